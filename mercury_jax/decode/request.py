"""From the arguments of a public call to a decoding `Session`.

A call puts its arguments into one `Request`. `encode_request` turns prompts into rows of ids; `edit` and `infill` make
their rows themselves. `start` then fixes the static sizes (`configure`), pads the rows to a bucket so that few shapes
are compiled, makes the first state, and encodes long prompts. Everything that does not fit is refused before any
compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from mercury_jax import sharding
from mercury_jax.config import Plan, refuse
from mercury_jax.decode import guidance, inputs, processors
from mercury_jax.decode.decoder import Session, first_state_program, prefill_program
from mercury_jax.decode.defaults import choose_sampler, complete_sampler, find_effort
from mercury_jax.decode.denoise import check_parts
from mercury_jax.decode.registration import check_token_ids
from mercury_jax.decode.sampler import Sampler, broadcast_params, check_sampler
from mercury_jax.decode.state import ArrayLike, DecodeConfig, Rows, SamplingParams
from mercury_jax.decode.thinking import continuation_prompt, visible_ids
from mercury_jax.types import LM

PREFILL = 256  # tokens of one pass over a long prompt
QUANTUM = 64  # capacities are multiples of it, then of powers of two
SEES_PADDING = "apply takes neither lengths nor attention_mask, so it would see the padding of shorter rows"


class Request(NamedTuple):
    """The arguments of a call, in one record from `sample`, `stream`, `edit` and `infill` to the decoder.

    The first fields are the arguments of `sample`, under their names; the second group is set by `encode_request`,
    or by `edit` and `infill` themselves.
    """

    prompt: Any = None
    max_tokens: Any = 64
    seed: Any = 0
    sampler: Any = None
    plan: Any = None
    temperature: Any = None
    effort: Any = None
    logit_bias: Any = None
    guidance: Any = None
    negative: Any = None
    logprobs: Any = None
    state: Any = None  # the Session of an earlier call
    mesh: Any = None
    schema: Any = None

    rows: Rows | None = None
    prompts: Sequence[inputs.Prompt] = ()
    end_thinking: int | None = None  # the id that ends the thinking
    infilling: bool = False  # no id ends the answer
    block: int | None = None  # width of the canvas where the rows fix it, instead of the plan's

    def checked(self) -> Request:
        """Returns the request with a plan, a mesh and a temperature as the decoder takes them.

        The axes of the mesh become those that the compiler shards (`AxisType.Auto`), whatever kind the user's are.

        Raises:
            ValueError: Names the argument of a wrong type.
        """
        if self.state is not None and not isinstance(self.state, Session):
            raise refuse("state", self.state, "the state of an earlier Output, or None")
        if not isinstance(self.plan, Plan | None):
            raise refuse("plan", self.plan, "a Plan, such as mj.Plan(block=32, steps=16), or None")
        mesh = self.mesh
        if mesh is not None:
            if not isinstance(mesh, Mesh):
                raise refuse("mesh", mesh, "a jax Mesh, such as mj.mesh(data=4), or None")
            if "data" not in mesh.shape:
                allowed = "a mesh with an axis named data"
                raise refuse("mesh", f"axes {', '.join(mesh.axis_names)}", allowed)
            if any(kind != AxisType.Auto for kind in mesh.axis_types):
                mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        return self._replace(
            plan=self.plan or Plan(),
            mesh=mesh,
            temperature=None if self.temperature is None else inputs.check_temperature(self.temperature),
            logprobs=inputs.check_logprobs(self.logprobs),
        )


def encode_request(lm: LM, request: Request) -> Request:
    """Encodes the prompts of a request, and chooses its sampler and plan.

    Args:
        lm: The model.
        request: Checked, with a prompt.

    Returns:
        The request with `rows` and `prompts`.

    Raises:
        ValueError: Names the argument that does not fit.
    """
    effort = find_effort(request.effort)
    prompts = _prompts(lm, request, thinking=effort is not None and effort.thinking > 0)
    max_tokens = inputs.check_max_tokens(lm, prompts, request.max_tokens)
    # Room for thinking in each row: of conversations only, and never more than the context leaves.
    thinking = 0 if effort is None else effort.thinking
    left = [lm.model.config.context - len(p.ids) - max_tokens - 1 for p in prompts]
    budgets = [max(0, min(thinking, room)) if p.chat else 0 for p, room in zip(prompts, left, strict=True)]
    marks = lm.tokenizer.thinking if thinking else None
    if marks is not None:  # where the context leaves no room to think, the answer comes at once
        cut = -len(marks.opening)
        prompts = [
            p._replace(ids=p.ids[:cut]) if p.chat and not budget else p for p, budget in zip(prompts, budgets)
        ]
    return resolve_sampler(lm, request)._replace(
        rows=rows_of(prompts, max_tokens, inputs.check_seed(request.seed), budgets),
        prompts=prompts,
        end_thinking=None if marks is None else marks.close,
    )


def resolve_sampler(lm: LM, request: Request) -> Request:
    """Returns the request with the sampler and the plan that apply, its `logit_bias` among the processors.

    Args:
        lm: Its checkpoint and noise set the defaults.
        request: Checked.

    Returns:
        The request with `sampler` and `plan` set.
    """
    sampler, plan = choose_sampler(lm, request.sampler, request.plan, find_effort(request.effort))
    if request.logit_bias:
        sampler = check_sampler(sampler)
        sampler = sampler._replace(processors=(*sampler.processors, processors.bias(request.logit_bias)))
    return request._replace(sampler=sampler, plan=plan)


def _prompts(lm: LM, request: Request, thinking: bool) -> list[inputs.Prompt]:
    """The prompts of a request, after the session that they continue."""
    session: Session | None = request.state
    previous = () if session is None else session.prompts
    prompts, _ = inputs.encode_prompts(lm, request.prompt, thinking=thinking, previous=previous)
    if session is None:
        return prompts
    check_session(lm, session)
    if not session.done:
        raise refuse("prompt", request.prompt, "None, to finish the answer in state first")
    if len(prompts) != session.rows:
        raise refuse("prompt", f"{len(prompts)} prompts", f"{session.rows}, one for each row of state")
    pairs = zip(session.tokens, prompts, strict=True)
    return [inputs.Prompt([*map(int, before), *new.ids], new.chat) for before, new in pairs]


def check_session(lm: LM, session: Session) -> None:
    """Raises ValueError unless a session belongs to this model.

    Args:
        lm: The model of the call.
        session: The caller's.

    Raises:
        ValueError: It was made by another model.
    """
    if session.config.model.config != lm.model.config:
        raise refuse("state", "a session of another model", f"one of {lm.name}")


def rows_of(
    prompts: Sequence[inputs.Prompt],
    max_tokens: int | np.ndarray,
    seed: int,
    thinking: Sequence[int] | None = None,
) -> Rows:
    """Lays prompts out as left-aligned rows.

    Args:
        prompts: As ids.
        max_tokens: Most tokens of an answer; one number, or one per row.
        seed: Row i draws from seed + i.
        thinking: Most tokens of thinking in each row; None: no row thinks.

    Returns:
        The rows.
    """
    lengths = np.array([len(p.ids) for p in prompts])
    budgets = np.zeros(len(prompts), int) if thinking is None else np.asarray(thinking)
    end = lengths + np.where(budgets > 0, budgets, max_tokens)
    answer_budget = np.where(budgets > 0, max_tokens, 0)
    longest = end + np.where(budgets > 0, 1 + answer_budget, 0)
    tokens = np.zeros((len(prompts), int(longest.max())), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt.ids)] = prompt.ids
    given = np.arange(tokens.shape[1]) < lengths[:, None]
    seeds = row_seeds(seed, len(prompts))
    return Rows(tokens, given, lengths, end, seeds, answer_budget=answer_budget if budgets.any() else None)


def row_seeds(seed: int, rows: int) -> np.ndarray:
    """Returns the seed of each row [B]: seed + i.

    Args:
        seed: Of the call.
        rows: B.

    Returns:
        Seeds in 0..2**31 - 1.
    """
    return (seed + np.arange(rows)) % 2**31


def start(lm: LM, request: Request) -> Session:
    """Makes a session of a request; long prompts are encoded, nothing is decoded yet.

    Args:
        lm: The model.
        request: With `rows`, a sampler and a plan. Where `state` is set, its keys are reused.

    Returns:
        A session that `decoder.advance` runs.

    Raises:
        ValueError: Names the argument that does not fit, before any compute.
    """
    rows = request.rows
    assert rows is not None
    guided = _guidance(lm, request, len(rows.committed))
    config, sampling, padded = configure(lm, request)
    state = first_state_program(config, sampling, padded)
    with inputs.explain_wrong_params(lm):
        if guided is not None:
            weights, negatives = guided
            (batch, slots), prompts = state.tokens.shape, rows.committed.tolist()
            cache = guidance.start(lm.model, lm.params, batch, slots, prompts, negatives, weights)
            state = state._replace(cache=cache)
        if request.state is not None:  # the keys of the earlier state, in a cache of this one's size
            before = request.state.state
            write = lambda new, old: new.at[:, : old.shape[1]].set(old[:, : new.shape[1]])
            fit = lambda new, old: jnp.copy(old) if new.shape == old.shape else write(new, old)
            cache = jax.tree.map(fit, state.cache, before.cache)
            state = state._replace(cache=cache, cache_length=jnp.copy(before.cache_length))
        pending = int((rows.committed - np.asarray(state.cache_length)[: len(rows.committed)]).max())
        width = prefill_width(config, pending)
        if width is not None:
            state = prefill_program(config, lm.params, state, width)
    mesh = row_mesh(lm, request.mesh)
    return Session(config, sampling, state, len(rows.committed), mesh, list(request.prompts))


def configure(lm: LM, request: Request) -> tuple[DecodeConfig, SamplingParams, Rows]:
    """Fixes the static sizes of a request and pads its rows. The parameters of the model are not read.

    Args:
        lm: The model.
        request: With `rows`, a sampler and a plan.

    Returns:
        The static configuration, the sampling parameters [B, ...] and the rows [B, ...], B a bucket.

    Raises:
        ValueError: Names what does not fit together.
    """
    rows, plan, model_config = request.rows, request.plan, lm.model.config
    assert rows is not None
    sampler = complete_sampler(request.sampler, lm.corruption, model_config.autoregressive)
    temperature = sampler.temperature if request.temperature is None else request.temperature
    sampler = sampler._replace(temperature=inputs.check_temperature(temperature))
    for processor in (*sampler.processors, *sampler.allow):
        processors.check_ids(processor, model_config.vocab)
    check_token_ids(sampler.rule, model_config.vocab)
    _check_plan_fits(lm, plan, sampler)
    # Slots for the furthest position that any row can reach.
    longest = rows.end if rows.max_end is None else rows.max_end
    if rows.answer_budget is not None:
        longest = np.maximum(longest, rows.end + 1 + rows.answer_budget)
    if not lm.model.hides_padding:
        check_equal_lengths("rows", longest)
    region = int((longest - rows.committed).max())  # tokens that a row may write
    width, block = _sizes(lm, plan, sampler, request.block, int(longest.max()), region)
    # Between refreshes a pass runs over `after` positions past the window; by default all that a row may write.
    bidirectional = model_config.pattern == "bidirectional"
    refresh = plan.refresh
    if refresh is not None and refresh.after is None:
        refresh = dataclasses.replace(refresh, after=bucket(region))
    model = lm.model
    if row_mesh(lm, request.mesh) is None:
        model = sharding.with_mesh(model, sharding.model_parallel_mesh(lm.params))
    if request.guidance is not None:
        if sampler.speculate is not None:
            raise refuse("guidance", request.guidance, "None with self-speculation")
        model = guidance.guided(model)
    rule = sampler.rule
    config = DecodeConfig(
        model=model,
        corruption=lm.corruption,
        width=width,
        block=block,
        forbidden=(model_config.eos, *model_config.ends) if request.infilling else (),
        revisable=min(plan.revise * block, width) if bidirectional else 0,
        refresh=refresh,
        leave_one_out=rule.leave_one_out,
        variable_length=rule.variable_length,
        speculative=sampler.speculate is not None,
        logprobs=request.logprobs,
    )
    # Slots after a row's last position, where canvases are written; leave-one-out masks come after the canvas.
    behind = width * (2 if rule.leave_one_out else 1)
    slots = behind
    if not bidirectional:
        slots = slots_for(max(int(longest.max()), rows.tokens.shape[1]), behind, model_config.context)
    # The rows are padded to a power of two that the mesh's axis `data` divides.
    ways = 1 if request.mesh is None else request.mesh.shape["data"]
    count = -(-(1 << (len(rows.committed) - 1).bit_length()) // ways) * ways
    padded = _padded(rows, longest, sampler, count, slots)
    # Added rows take the parameters of the last one.
    widened = broadcast_params(sampler._replace(speculate=None), len(rows.committed))
    more = count - len(rows.committed)
    widened = jax.tree.map(lambda x: jnp.concatenate([x, jnp.repeat(x[-1:], more, axis=0)]), widened)
    ids = lambda x: jnp.full((count,), -1 if x is None else x, jnp.int32)
    steps = plan.steps or (1 if config.speculative else 0)
    eos = None if request.infilling else model_config.eos
    sampling = SamplingParams(widened, ids(steps), ids(eos), ids(request.end_thinking))
    check_parts(config, sampling)
    return config, sampling, padded


def _check_plan_fits(lm: LM, plan: Plan, sampler: Sampler) -> None:
    """Refuses plans, rules and drafts that the model cannot decode with."""
    config, pattern, rule, draft = lm.model.config, lm.model.config.pattern, sampler.rule, sampler.speculate
    bidirectional, model = pattern == "bidirectional", lm.model
    if plan.refresh is not None and not model.reuses_keys:
        raise refuse("plan.refresh", plan.refresh, "None: this model has no KV cache")
    if rule.leave_one_out and not model.leave_one_out:
        allowed = (
            "a rule without leave-one-out predictions, for which apply must take attention_mask and positions"
        )
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
    if plan.refresh is not None and not bidirectional:
        raise refuse("plan.refresh", plan.refresh, f"None: the cache of a {pattern} model is exact")
    if plan.revise and not bidirectional:
        raise refuse("plan.revise", plan.revise, f"0: a {pattern} model encodes its blocks; use edit()")
    if plan.refresh is not None and (rule.leave_one_out or rule.variable_length):
        raise refuse("plan.refresh", plan.refresh, f"None with {rule.name}: it reads the whole canvas")
    if draft is None:
        return
    allowed = "a number of tokens to draft, 0 or more, or None"
    inputs.check_whole("sampler.speculate", draft, 0, inputs.MAX_TOKENS, allowed)
    if not config.predicts_next:
        allowed = "None: this model's encoding pass does not predict the next token"
        raise refuse("sampler.speculate", draft, allowed)
    if pattern == "block_causal" and draft:
        raise refuse("sampler.speculate", draft, "0: a model of one-token blocks has no draft to verify")
    if rule.leave_one_out or rule.variable_length:
        raise refuse("sampler.rule", rule.name, "a rule that accepts masks in place, to draft with")


def _sizes(
    lm: LM, plan: Plan, sampler: Sampler, block: int | None, longest: int, region: int
) -> tuple[int, int]:
    """Positions of the canvas, and of the active block."""
    config = lm.model.config
    whole = sampler.rule.variable_length and plan.block is None and config.pattern != "block_causal"
    if config.pattern == "bidirectional":
        width = bucket(longest) if lm.model.hides_padding else longest
        return width, width if whole else min(block or plan.block or config.block, width)
    if block is not None:
        return block, block
    if sampler.speculate is not None:
        width = min(plan.block or config.block, sampler.speculate + 1)
        return width, width
    if config.pattern == "block_causal":
        return config.block, plan.block or config.block
    width = bucket(region, config.block) if whole else plan.block or config.block
    return width, width


def check_equal_lengths(name: str, lengths: ArrayLike | Sequence[int]) -> None:
    """Refuses rows of several lengths, for a model that would see their padding.

    Args:
        name: What errors call the rows.
        lengths: Of each row, prompt and answer together.

    Raises:
        ValueError: They differ.
    """
    found = sorted({int(n) for n in np.asarray(lengths)})
    if len(found) > 1:
        allowed = f"one length in a call: {SEES_PADDING}"
        raise refuse(f"lengths of the {name}", found, allowed)


def bucket(size: int, quantum: int = QUANTUM) -> int:
    """Returns the smallest capacity >= size: multiples of `quantum` up to 8 of them, then 4 steps per doubling.

    Beyond 8 quanta it wastes less than a quarter of `size`; below that, less than a quantum.

    Args:
        size: What must fit.
        quantum: Smallest capacity.

    Returns:
        The capacity.
    """
    step = quantum
    while step * 8 < size:
        step *= 2
    return -(-size // step) * step


def slots_for(tokens: int, behind: int, context: int) -> int:
    """Returns the slots of a row's tokens and KV cache: a bucket, but no more than any row of the model needs.

    Without that bound a row that fills a context of 2 ** k would take the next bucket, a quarter more slots.

    Args:
        tokens: Positions of the longest row.
        behind: Further slots after a row's last position, where canvases are written.
        context: The model's; no row is longer.

    Returns:
        The number of slots.
    """
    most = -(-(context + behind) // QUANTUM) * QUANTUM
    return min(bucket(tokens + behind), max(most, tokens + behind))


def _padded(rows: Rows, longest: ArrayLike, sampler: Sampler, count: int, slots: int) -> Rows:
    """Rows up to `count` with `slots` positions, all fields set; added rows write nothing, so they are done."""
    more = count - len(rows.committed)
    wide = lambda x: np.pad(x, [(0, more), (0, slots - x.shape[1])])
    long = lambda x: np.pad(np.asarray(x), (0, more)).astype(np.int32)
    # A rule of variable length says how short an answer starts; a hole's length is the caller's.
    starts_short = sampler.rule.variable_length and rows.max_end is None
    first = sampler.rule.params.get("start") if starts_short else None
    end = rows.end if first is None else np.minimum(rows.committed + np.asarray(first), rows.end)
    none = np.zeros(len(rows.committed), np.int32)
    return Rows(
        tokens=wide(rows.tokens),
        given=wide(rows.given),
        committed=long(rows.committed),
        end=long(end),
        seeds=long(rows.seeds),
        draft=wide(np.zeros_like(rows.given) if rows.draft is None else rows.draft),
        prompt=long(rows.committed if rows.prompt is None else rows.prompt),
        max_end=long(longest),
        answer_budget=long(none if rows.answer_budget is None else rows.answer_budget),
    )


def row_mesh(lm: LM, mesh: Mesh | None) -> Mesh | None:
    """Returns the mesh whose devices decode rows of their own; None where the parameters are sharded over it.

    Args:
        lm: Its parameters may be sharded.
        mesh: Of the request.

    Returns:
        The mesh, or None.
    """
    return None if mesh is not None and mesh == sharding.model_parallel_mesh(lm.params) else mesh


def prefill_width(config: DecodeConfig, pending: int) -> int | None:
    """Returns the tokens of one pass over a long prompt; None where the decoder's own steps encode it.

    Args:
        config: Static sizes.
        pending: Committed tokens that are not in the cache, at most.

    Returns:
        The width, or None.
    """
    if config.model.config.pattern == "bidirectional" or pending <= 2 * config.width:
        return None
    # Whole blocks: a block-causal row must find the keys of its own block in the same pass.
    quantum = config.width if config.model.config.pattern == "block_causal" else 1
    return -(-min(PREFILL, bucket(pending)) // quantum) * quantum


def _guidance(lm: LM, request: Request, rows: int) -> tuple[np.ndarray, list[list[int]]] | None:
    """Guidance weights [B] and the ids of the negative prompts; None without guidance."""
    weight, negative = request.guidance, request.negative
    if weight is None:
        if negative is not None:
            raise refuse("negative", negative, "None without guidance=")
        return None
    if request.state is not None:
        raise refuse("guidance", weight, "None with state=: a session keeps the keys of one branch")
    weights = np.asarray(weight)
    numeric = weights.dtype.kind in "iuf" and weights.shape in ((), (rows,))
    if not numeric or not np.isfinite(weights).all():
        raise refuse("guidance", weight, f"a finite number, or one for each of the {rows} prompts")
    weights = np.broadcast_to(weights.astype(np.float32), (rows,))
    if negative is None and lm.model.hides_padding:
        return weights, [[]] * rows
    texts = [[]] * rows if negative is None else inputs.prompt_rows(lm, negative, rows, "negative")
    room = lm.model.config.context - request.max_tokens
    for i, ids in enumerate(texts):
        if len(ids) > room:
            allowed = f"at most {room}: context less max_tokens"
            raise refuse(f"negative[{i}]", f"{len(ids)} tokens", allowed)
        if not lm.model.hides_padding and request.rows is not None:
            prompt = int(np.asarray(request.rows.committed)[i])
            if len(ids) != prompt:
                allowed = f"{prompt} tokens, as many as the prompt has: {SEES_PADDING}"
                raise refuse(f"negative[{i}]", f"{len(ids)} tokens", allowed)
    return weights, texts


def continue_request(
    lm: LM, request: Request, replies: Sequence[tuple[int, ...]], which: Sequence[int]
) -> Request:
    """Makes the request that continues answers in which nothing shows, after their closed thinking.

    Args:
        lm: The model.
        request: As `encode_request` made it.
        replies: Of every row; of those to continue, the closed thinking alone.
        which: The rows to continue. The first token of their answers shows text; the others are done from the start.

    Returns:
        A request for `start`.
    """
    context, prompts, budgets = lm.model.config.context, [], []
    for i, (prompt, reply) in enumerate(zip(request.prompts, replies, strict=True)):
        begun, budget = inputs.Prompt([*prompt.ids, *reply], True), 0
        if i in which:
            begun, budget = continuation_prompt(lm.tokenizer, prompt.ids, reply, request.max_tokens, context)
        prompts.append(begun)
        budgets.append(budget)
    sampler = check_sampler(request.sampler)
    visible = processors.allow_bits(visible_ids(lm.tokenizer, lm.model.config.vocab))
    return request._replace(
        sampler=sampler._replace(allow=(*sampler.allow, visible)),
        rows=rows_of(prompts, np.asarray(budgets), request.seed),
        end_thinking=None,
        state=None,
    )
