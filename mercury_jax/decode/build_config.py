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
from jax.sharding import Mesh

from mercury_jax import sharding
from mercury_jax.config import Plan, Refresh, refuse
from mercury_jax.decode import inputs, processors, rules
from mercury_jax.decode.defaults import complete_sampler
from mercury_jax.decode.methods.cache_refresh import CachePolicy, cache_vectors
from mercury_jax.decode.methods.drafting import Draft, draft_rule, drafting
from mercury_jax.decode.methods.fused_commit import SEEDED, fused_commit, repeat_fused
from mercury_jax.decode.methods.key_reuse import key_reuse
from mercury_jax.decode.methods.lookahead import lookahead
from mercury_jax.decode.methods.self_speculation import SELF_SPECULATION
from mercury_jax.decode.passes import PLAIN
from mercury_jax.decode.registration import check_token_ids
from mercury_jax.decode.rules.position import check_tables
from mercury_jax.decode.sampler import Sampler, call_part, check_sampler
from mercury_jax.decode.state import (
    PREFILL,
    SEES_PADDING,
    DecodeConfig,
    Frame,
    Method,
    Rows,
    SamplingParams,
    State,
    bucket,
    first_state,
    sampling_params,
)
from mercury_jax.types import LM, Model, Params, Pass, accumulation_dtype


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
) -> DecodeConfig:
    """Chooses the static sizes for rows of given lengths."""
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
        times=plan.times, trajectory=trajectory,
    )  # fmt: skip
    if isinstance(plan.refresh, CachePolicy):  # reads the keys of every position
        return built
    return with_rings(built, max(draft + 1, 2 * width if method.loop is repeat_fused else 0))


def choose_method(lm: LM, plan: Plan, sampler: Sampler) -> Method:
    """Chooses the decoding method of a call: the one place that decides it."""
    if plan.method is not None:
        return _own_method(plan, sampler)
    config, fused = lm.model.config, _fused_rows(lm, plan, sampler)
    assert isinstance(plan.refresh, Refresh | CachePolicy | None)
    if sampler.speculate is not None:
        return SELF_SPECULATION
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


def _check_plan_fits(lm: LM, plan: Plan, sampler: Sampler) -> None:
    """Raises ValueError for plans, rules and drafts that the model does not support."""
    config, pattern, rule, draft = lm.model.config, lm.model.config.pattern, sampler.rule, sampler.speculate
    bidirectional, model = pattern == "bidirectional", lm.model
    check_tables(rule, config.vocab)
    if plan.refresh is not None and not model.reuses_keys:
        raise refuse("plan.refresh", plan.refresh, "None: this model has no KV cache")
    if rule.leave_one_out and not model.leave_one_out:
        allowed = "a rule without leave-one-out predictions: they need attention_mask and positions in apply"
        raise refuse("sampler.rule", rule.name, allowed)
    if rule.variable_length and not model.hides_padding:
        allowed = f"a rule that keeps the number of tokens: {SEES_PADDING}"
        raise refuse("sampler.rule", rule.name, allowed)
    if pattern == "block_causal" and plan.block is not None and config.block % plan.block:
        allowed = f"a divisor of {config.block}, the block of this model, or None"
        raise refuse("plan.block", plan.block, allowed)
    if rule.leave_one_out and config.alignment == "shifted":
        allowed = "a rule without leave-one-out predictions: this model's logits are shifted"
        raise refuse("sampler.rule", rule.name, allowed)
    if rule.name == "ancestral_cache" and config.timed:
        allowed = "ancestral: this model takes the time, and predicts anew in each step"
        raise refuse("sampler.rule", rule.name, allowed)
    if rule.name == "hybrid_ancestral" and lm.corruption.kind != "hybrid":
        raise refuse("sampler.rule", rule.name, f"ancestral: the noise of this model is {lm.corruption.kind}")
    if isinstance(plan.refresh, Refresh) and not bidirectional:
        allowed = f"a policy of mj.cache_refresh, or None: a {pattern} model computes its canvas alone"
        raise refuse("plan.refresh", plan.refresh, allowed)
    if plan.revise and not bidirectional:
        raise refuse("plan.revise", plan.revise, f"0: a {pattern} model encodes its blocks; use edit()")
    if plan.refresh is not None and (rule.leave_one_out or rule.variable_length):
        raise refuse("plan.refresh", plan.refresh, f"None with {rule.name}: it reads the whole canvas")
    self_cond = lambda: lm.model.condition(None, jnp.zeros((1, 1, 1)))
    if rule.variable_length and jax.tree.leaves(jax.eval_shape(self_cond)):
        allowed = (
            "a rule that keeps the number of tokens: this model reads its predictions of the pass before"
        )
        raise refuse("sampler.rule", rule.name, allowed)
    if rule.variable_length and plan.block is not None and "block" in rule.params:
        raise refuse("plan.block", plan.block, f"None with {rule.name}: {rule.name}(block=) sets it")
    if plan.lookahead:
        _check_lookahead(lm, plan, draft)
    if isinstance(plan.refresh, CachePolicy):
        name = f"the cache policy {plan.refresh.name}"
        if config.alignment == "shifted":
            raise refuse("plan.refresh", name, "a Refresh: this model's logits are shifted by a position")
        keys, _ = cache_vectors(jax.eval_shape(lambda: lm.model.empty_cache(1, 1)))
        if plan.refresh.drift and not keys:
            allowed = "a policy that compares no keys: those of this model are quantised"
            raise refuse("plan.refresh", name, allowed)
    elif plan.refresh is not None and not isinstance(plan.refresh, Refresh):
        raise refuse("plan.refresh", plan.refresh, "a Refresh, a policy of mj.cache_refresh, or None")
    if draft is None:
        return
    if plan.refresh is not None:
        raise refuse("sampler.speculate", draft, "None with plan.refresh: a draft is verified as a whole")
    allowed = "a number of tokens to draft, 0 or more, or None"
    inputs.check_whole("sampler.speculate", draft, 0, inputs.MAX_TOKENS, allowed)
    if not config.predicts_next:
        allowed = "None: this model's encoding pass does not predict the next token"
        raise refuse("sampler.speculate", draft, allowed)
    if pattern == "block_causal" and draft:
        raise refuse("sampler.speculate", draft, "0: a model of one-token blocks has no draft to verify")
    if rule.leave_one_out or rule.variable_length:
        raise refuse("sampler.rule", rule.name, "a rule that accepts masks in place, to draft with")


def _check_lookahead(lm: LM, plan: Plan, draft: int | None) -> None:
    """Raises ValueError for lookahead if the logits of a canvas depend on more than the canvas.

    Lookahead computes canvases of later steps in the same pass, when the passes before them have not been made.
    """
    reason = None
    if plan.refresh is not None:
        reason = "with plan.refresh: reused keys depend on earlier passes"
    elif draft is not None:
        reason = "with sampler.speculate: its drafts are verified by a causal pass"
    elif jax.tree.leaves(jax.eval_shape(lambda: lm.model.condition(None, jnp.zeros((1, 1, 1))))):
        reason = "for this model: its self-conditioning depends on the previous pass"
    if reason is not None:
        raise refuse("plan.lookahead", plan.lookahead, f"0 {reason}")


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
        width = min(plan.block or config.block, sampler.speculate + 1)
        return width, width
    if config.pattern == "block_causal":
        return config.block, plan.block or config.block
    width = bucket(region, config.block) if whole else plan.block or config.block
    return width, width


def add_drafter(
    draft: Draft, config: DecodeConfig, sampler: Sampler, mesh: Mesh | None, longest: int, rows: int, n: int
) -> tuple[DecodeConfig, SamplingParams]:
    """Chooses the static sizes and the sampling parameters of the drafter.

    Returns:
        The verifier's config for decoding with drafts, and the drafter's sampling parameters [B, ...].
    """
    lm = draft.lm
    rule = rules.entropy_bound() if lm.corruption.mask is None else rules.confidence()
    own = draft.sampler or Sampler(rule, processors=sampler.processors, allow=sampler.allow)
    own = complete_sampler(check_sampler(own), lm.corruption)
    temperature = sampler.temperature if draft.temperature is None else draft.temperature
    own = own._replace(
        rule=draft_rule(own.rule, draft.method, lm.model.config.dtype),
        temperature=inputs.check_temperature(temperature),
    )
    if longest > lm.model.config.context:
        allowed = f"a model whose context holds {longest} tokens"
        raise refuse("draft.lm", f"{lm.name} with a context of {lm.model.config.context}", allowed)
    # The block length of a block-causal drafter is fixed. Its draft is the rest of the block after the verified text.
    block = None if lm.model.config.pattern == "block_causal" else draft.tokens
    drafter = build_config(
        lm,
        own,
        Plan(block=block, steps=draft.steps, fuse_commit=0),
        model=sharding.with_mesh(lm.model, mesh),
        longest=longest,
        region=draft.tokens,
    )
    # With the same seed, a draft is drawn with the uniforms of its verification.
    drafter = drafter._replace(method=drafter.method._replace(position_draws=draft.method == "same_seed"))
    sampling = sampling_params(lm, drafter, own, draft.steps, rows, n)
    sampling = sampling._replace(eos=np.full_like(sampling.eos, -1))  # the verifier decides where a text ends
    check_functions(drafter, sampling, lm.params)
    width = draft.tokens + 1  # the verifying pass feeds the last committed token and the draft
    return config._replace(width=width, block=width, method=drafting(drafter, draft.method)), sampling
