"""From a user's sampler and plan to a `DecodeConfig`: the checks, the static sizes and the decoding method.

`build_config` refuses plans, rules and drafts that the model does not support. `choose_method` is the one place that
decides which method decodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax.config import Plan, Refresh, refuse
from mercury_jax.decode import inputs, processors
from mercury_jax.decode.chunked_vocab import ChunkedVocab
from mercury_jax.decode.denoise import PLAIN
from mercury_jax.decode.methods.block_drafter import block_drafting
from mercury_jax.decode.methods.cache_refresh import CachePolicy, cache_vectors
from mercury_jax.decode.methods.fused_commit import SEEDED, fused_commit, repeat_fused
from mercury_jax.decode.methods.key_reuse import key_reuse
from mercury_jax.decode.methods.lookahead import lookahead
from mercury_jax.decode.methods.prompt_lookup import prompt_lookup
from mercury_jax.decode.methods.self_speculation import SELF_SPECULATION
from mercury_jax.decode.registration import check_token_ids
from mercury_jax.decode.rules.position import check_tables
from mercury_jax.decode.sampler import CAPABILITIES, Sampler, call_part
from mercury_jax.decode.state import (
    PREFILL,
    DecodeConfig,
    Frame,
    Method,
    Rows,
    SamplingParams,
    State,
    bucket,
    first_state,
)
from mercury_jax.types import LM, LookupDrafter, Model, Params, Pass, accumulation_dtype


def build_config(
    lm: LM,
    sampler: Sampler,
    plan: Plan,
    *,
    model: Model,
    longest: int,
    region: int,
    block: int | None = None,
    infilling: bool = False,
    logprobs: int | None = None,
    trajectory: bool = False,
    draft: int = 0,
    longest_pass: int = 0,
) -> DecodeConfig:
    """Chooses the static sizes for rows of given lengths.

    Args:
        longest_pass: Tokens of a prefill pass that holds an image whole; 0: there are no images. No row goes back
            behind such a pass, so that rings need half the room of another pass (`models.cache.ring_size`).
    """
    for processor in (*sampler.processors, *sampler.allow):
        processors.check_ids(processor, lm.model.config.vocab)
    check_token_ids(sampler.rule, lm.model.config.vocab)
    _check_plan_fits(lm, plan, sampler)
    config, rule = lm.model.config, sampler.rule
    width, block = _sizes(lm, plan, sampler, block, longest, region)
    method = choose_method(lm, plan, sampler)
    built = DecodeConfig(
        model, lm.corruption, width, block, method, forbidden=(config.eos, *config.ends) if infilling else (),
        revisable=min(plan.revise * block, width) if config.pattern == "bidirectional" else 0,
        leave_one_out=rule.leave_one_out, variable_length=rule.variable_length, logprobs=logprobs,
        times=plan.times, trajectory=trajectory, predict=ChunkedVocab(),
    )  # fmt: skip
    if isinstance(plan.refresh, CachePolicy):  # reads the keys of every position
        return built
    fused = 2 * width if method.loop is repeat_fused else 0
    return with_rings(built, max(draft + 1, fused, longest_pass // 2))


def choose_method(lm: LM, plan: Plan, sampler: Sampler) -> Method:
    """Chooses the decoding method of a call: the one place that decides it."""
    if plan.method is not None:
        return _own_method(plan, sampler)
    config, fused = lm.model.config, _fused_rows(lm, plan, sampler)
    assert isinstance(plan.refresh, Refresh | CachePolicy | None)
    if sampler.speculate is not None:
        drafter = lm.model.drafter
        if isinstance(drafter, LookupDrafter):
            return prompt_lookup(drafter.ngram)
        return SELF_SPECULATION if drafter is None else block_drafting(drafter.acceptance)
    if plan.lookahead:
        return lookahead(int(plan.lookahead))
    if plan.refresh is not None:
        return key_reuse(plan.refresh, config.alignment == "shifted")
    if fused:
        return fused_commit(fused)
    return SEEDED if config.predicts_block_start else PLAIN


def _own_method(plan: Plan, sampler: Sampler) -> Method:
    """Returns the method of the user; raises ValueError if it is none, or if the call asks for another one too."""
    method = plan.method
    if not isinstance(method, Method) or not callable(method.step) or not callable(method.init):
        raise refuse("plan.method", method, "an mj.Method(name, step), whose step and init are functions")
    try:
        hash(method)
    except TypeError:
        raise refuse("plan.method.settings", method.settings, "hashable values: they are static") from None
    others = {f"plan.{name}": getattr(plan, name) for name in ("refresh", "lookahead", "fuse_commit")}
    for name, value in (others | {"sampler.speculate": sampler.speculate}).items():
        if value:
            raise refuse(name, value, f"None or 0 with plan.method: {method.name} decodes")
    return method


def check_functions(config: DecodeConfig, sampling: SamplingParams, params: Params) -> None:
    """Traces a pass if it calls functions of the user, to report their errors before any compute.

    Without this check a user's rule, processor, stopping criterion or method is first called when the decoding program
    is traced, which is after the prefill of long prompts and, in a stream, at the first output. The model itself is
    not traced, and a pass only once per structure and shapes, whatever the values.
    """
    parts = (part.function for part in sampling.sampler.parts)
    functions = [f for part in parts for f in getattr(part, "functions", (part,))]
    if all(map(_is_ours, (*functions, config.method.step, config.method.init))):
        return
    if callable(sampling.sampler.rule.needs_hidden):  # its head needs what the model computes
        return
    leaves, tree = jax.tree.flatten((sampling, params))
    shapes = (jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) for x in leaves)
    _trace_pass(config, tree, tuple(shapes))


def _is_ours(function: Any) -> bool:
    """Returns whether a function is one of this package."""
    return (getattr(function, "__module__", None) or "").startswith("mercury_jax.")


def _silent(model: Model) -> Model:
    """Makes a model whose passes compute nothing: hidden states and logits are zeros."""
    sizes = model.config
    dtype = accumulation_dtype(jnp.dtype(sizes.dtype))

    def forward(params: Params, given: Pass) -> tuple[Any, Any]:
        masks = 0 if given.leave_one_out is None else given.leave_one_out.columns.shape[1]
        return jnp.zeros(
            (len(given.tokens), given.tokens.shape[1] + masks, sizes.width), sizes.dtype
        ), given.cache

    return model._replace(
        forward=forward,
        head=lambda params, hidden: jnp.zeros((*hidden.shape[:-1], sizes.vocab), dtype),
        head_chunk=model.head_chunk
        and (lambda p, hidden, first, n: jnp.zeros((*hidden.shape[:-1], n), dtype)),
        condition=lambda params, logits: model.condition(None, logits),
    )


@functools.lru_cache(maxsize=512)
def _trace_pass(config: DecodeConfig, tree: Any, leaves: tuple[jax.ShapeDtypeStruct, ...]) -> None:
    """Traces the first state of two rows and one pass from it, and checks the shapes of what a method returns."""
    method, name = config.method, f"of the method {config.method.name}"
    config = config._replace(model=_silent(config.model))
    zero, none = np.zeros(2, np.int32), np.zeros((2, config.slots_after), bool)
    rows = Rows(none * 1, none, zero, zero + 1, zero, none, zero, zero + 1, zero)
    # The parts of a sampler name themselves in their errors; a step of this package adds nothing to that.
    call = (lambda _, function, *args: function(*args)) if _is_ours(method.step) else call_part

    def begin(given: tuple[SamplingParams, Params]) -> tuple[State, Params]:
        sampling = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], (2, *x.shape[1:])), given[0])
        state = call(f"init {name}", first_state, config, sampling, rows)
        shapes = [np.shape(x) for x in jax.tree.leaves(state.method)]
        if any(shape[:1] != (2,) for shape in shapes):
            allowed = "arrays [2, ...]: one entry for each row"
            raise refuse(f"what init {name} returned for 2 rows", shapes, allowed)
        return state, given[1]

    def step(given: tuple[State, Params]) -> Any:
        made = call(f"step {name}", method.step, config, given[1], given[0])
        allowed = "(state, frame): the state with its shapes and dtypes unchanged, and a Frame"
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Frame)):
            raise refuse(f"what step {name} returned", type(made).__name__, allowed)
        fields = zip(State._fields, made[0], given[0], strict=True)
        changed = [field for field, new, old in fields if _form(new) != _form(old)]
        if changed:
            raise refuse(f"what step {name} returned", f"another {', '.join(changed)}", allowed)
        return made

    _shapes(step, *_shapes(begin, tree, leaves))


def _form(tree: Any) -> tuple[Any, ...]:
    """Returns the structure of a tree, and the shapes and dtypes of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(np.shape(x), jnp.result_type(x)) for x in leaves]


def _shapes(function: Callable[[Any], Any], tree: Any, leaves: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Returns the structure and the shapes of what a function makes of a tree, which holds tracers, never shapes."""
    made = []

    def flat(leaves: Sequence[Any]) -> list[Any]:
        leaves, structure = jax.tree.flatten(function(tree.unflatten(leaves)))
        made.append(structure)
        return leaves

    shapes = jax.eval_shape(flat, leaves)
    return made[0], shapes


def with_rings(config: DecodeConfig, widest: int = 0) -> DecodeConfig:
    """Lets layers with a sliding window keep only the slots of the KV cache that their window needs.

    Args:
        widest: Tokens of the widest pass, if it is wider than those of the prefill and of a canvas.
    """
    model = config.model
    if model.rings is None:
        return config
    return config._replace(model=model.rings(model, max(PREFILL, config.slots_after, widest)))


def _fused_rows(lm: LM, plan: Plan, sampler: Sampler) -> int:
    """Returns up to how many rows a pass commits a block and begins the next one; 0: never.

    Raises ValueError where the plan asks for what these parts do not allow.
    """
    config, reason = lm.model.config, None
    if config.pattern == "bidirectional":
        reason = "this model encodes no blocks"
    elif config.alignment == "shifted":
        reason = "this model's logits are shifted: a block needs those of the pass that commits the block before it"
    elif plan.refresh is not None or plan.lookahead:
        reason = "passes with plan.refresh or plan.lookahead compute parts or copies of a canvas"
    elif sampler.speculate is not None or sampler.rule.leave_one_out:
        reason = "passes that verify drafts or feed leave-one-out masks are wider already"
    if reason is not None:
        if plan.fuse_commit:
            raise refuse("plan.fuse_commit", plan.fuse_commit, f"0 or None: {reason}")
        return 0
    if plan.fuse_commit is None:
        return int(jax.default_backend() != "cpu")
    return int(plan.fuse_commit)


def _conditions_itself(lm: LM) -> bool:
    """Returns whether a pass of the model reads the predictions of the pass before."""
    return bool(jax.tree.leaves(jax.eval_shape(lambda: lm.model.condition(None, jnp.zeros((1, 1, 1))))))


# Which models offer the `CAPABILITIES` that a rule relies on.
OFFERS: dict[str, Callable[[LM], bool]] = {
    "leave-one-out masks": lambda lm: lm.model.leave_one_out,
    "aligned logits": lambda lm: lm.model.config.alignment != "shifted",
    "hidden padding": lambda lm: lm.model.hides_padding,
    "no self-conditioning": lambda lm: not _conditions_itself(lm),
    "no time": lambda lm: not lm.model.config.timed,
    "hybrid noise": lambda lm: lm.corruption.kind == "hybrid",
}


def _check_plan_fits(lm: LM, plan: Plan, sampler: Sampler) -> None:
    """Raises ValueError for plans, rules and drafts that the model does not support."""
    config, rule, draft = lm.model.config, sampler.rule, sampler.speculate
    pattern, refresh = config.pattern, plan.refresh
    check_tables(rule, config.vocab)
    for need in rule.requires:
        if not OFFERS[need](lm):
            raise refuse("sampler.rule", rule.name, CAPABILITIES[need])
    reuses, policy, own = refresh is not None, isinstance(refresh, CachePolicy), isinstance(refresh, Refresh)
    shown, drifts = refresh, False
    if isinstance(refresh, CachePolicy):
        shown = f"the cache policy {refresh.name}"
        keys, _ = cache_vectors(jax.eval_shape(lambda: lm.model.empty_cache(1, 1)))
        drifts = refresh.drift and not keys
    several = rule.leave_one_out or rule.variable_length
    # (what does not fit, field, value, what is allowed); the first row that holds is refused.
    conflicts: list[tuple[Any, str, Any, str]] = [
        (reuses and not lm.model.reuses_keys, "plan.refresh", refresh, "None: this model has no KV cache"),
        (pattern == "block_causal" and plan.block and config.block % plan.block, "plan.block", plan.block,
         f"a divisor of {config.block}, the block of this model, or None"),
        (own and pattern != "bidirectional", "plan.refresh", refresh,
         f"a policy of mj.cache_refresh, or None: a {pattern} model computes its canvas alone"),
        (plan.revise and pattern != "bidirectional", "plan.revise", plan.revise,
         f"0: a {pattern} model encodes its blocks; use edit()"),
        (reuses and several, "plan.refresh", refresh, f"None with {rule.name}: it reads the whole canvas"),
        (rule.variable_length and plan.block and "block" in rule.params, "plan.block", plan.block,
         f"None with {rule.name}: {rule.name}(block=) sets it"),
        (plan.lookahead and reuses, "plan.lookahead", plan.lookahead,
         "0 with plan.refresh: reused keys depend on earlier passes"),
        (plan.lookahead and draft is not None, "plan.lookahead", plan.lookahead,
         "0 with sampler.speculate: its drafts are verified by a causal pass"),
        (plan.lookahead and _conditions_itself(lm), "plan.lookahead", plan.lookahead,
         "0 for this model: its self-conditioning depends on the previous pass"),
        (policy and config.alignment == "shifted", "plan.refresh", shown,
         "a Refresh: this model's logits are shifted by a position"),
        (drifts, "plan.refresh", shown, "a policy that compares no keys: those of this model are quantised"),
        (reuses and not policy and not own, "plan.refresh", refresh,
         "a Refresh, a policy of mj.cache_refresh, or None"),
    ]  # fmt: skip
    if draft is not None:
        whole = "a number of tokens to draft, 0 or more, or None"
        inputs.check_whole("sampler.speculate", draft, 0, inputs.MAX_TOKENS, whole)
        conflicts += [
            (reuses, "sampler.speculate", draft, "None with plan.refresh: a draft is verified as a whole"),
            (not config.predicts_next, "sampler.speculate", draft,
             "None: this model's encoding pass does not predict the next token"),
            (pattern == "block_causal" and draft, "sampler.speculate", draft,
             "0: a model of one-token blocks has no draft to verify"),
            (several, "sampler.rule", rule.name, "a rule that accepts masks in place, to draft with"),
        ]  # fmt: skip
    for holds, name, value, allowed in conflicts:
        if holds:
            raise refuse(name, value, allowed)


def draft_width(lm: LM, block: int, speculate: int) -> int:
    """Returns the width of a canvas that holds the last committed token and a draft."""
    return min(block, speculate + 1) if lm.model.drafter is None else lm.model.drafter.block


def _sizes(
    lm: LM, plan: Plan, sampler: Sampler, block: int | None, longest: int, region: int
) -> tuple[int, int]:
    """Chooses the sizes of the canvas W and of the active block.

    A bidirectional model has no encoded prefix: its canvas is the whole row, and the block moves through it. In other
    models the canvas is one block after the KV cache.
    """
    config = lm.model.config
    # A rule of variable length that names no block edits the whole answer at once.
    whole = sampler.rule.variable_length and plan.block is None and config.pattern != "block_causal"
    if config.pattern == "bidirectional":
        width = bucket(longest) if lm.model.hides_padding else longest
        return width, width if whole else min(block or plan.block or config.block, width)
    if block is not None:
        return block, block
    if sampler.speculate is not None and plan.method is None:
        width = draft_width(lm, plan.block or config.block, sampler.speculate)
        return width, width
    if config.pattern == "block_causal":
        return config.block, plan.block or config.block
    width = bucket(region, config.block) if whole else plan.block or config.block
    return width, width
