"""From the arguments of a public call to a decoding `Session`.

A call puts its arguments into one `Request`. `encode_request` turns prompts into rows of ids; `edit` and `infill` make
their rows themselves. `start` then fixes the static sizes (`configure`), pads the rows to a bucket so that few shapes
are compiled, makes the first state, and encodes long prompts. Everything that does not fit is refused before any
compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from mercury_jax import sharding
from mercury_jax.config import Plan, refuse
from mercury_jax.decode import grammar, image_prompts, inputs, processors, rules
from mercury_jax.decode.answer_text import check_stops, continuation_prompt, visible_ids
from mercury_jax.decode.build_config import build_config, check_functions
from mercury_jax.decode.constrained import ALL_IDS, ConstrainedRow, Grammars
from mercury_jax.decode.defaults import choose_sampler, complete_sampler, find_effort
from mercury_jax.decode.grammar.spec import GrammarError, JSONSchema, Spec, Without
from mercury_jax.decode.image_prefill import encode_images_program
from mercury_jax.decode.inputs import EffortLike
from mercury_jax.decode.methods import guidance
from mercury_jax.decode.methods.cache_refresh import CachePolicy
from mercury_jax.decode.methods.drafting import Draft, draft_rule, drafting
from mercury_jax.decode.methods.prediction import WIDEST, add_predictions
from mercury_jax.decode.sampler import Param, Sampler, SamplerLike, check_sampler
from mercury_jax.decode.session import (
    Fork,
    Session,
    first_state_program,
    forked_prefill_program,
    prefill_program,
)
from mercury_jax.decode.state import (
    SEES_PADDING,
    ArrayLike,
    DecodeConfig,
    Rows,
    SamplingParams,
    State,
    check_equal_lengths,
    prefill_width,
    sampling_params,
    slots_for,
)
from mercury_jax.types import LM, Key

# {id: bias}, and texts; for all prompts, or a list with an entry for each
LogitBias: TypeAlias = Mapping[int, float] | Sequence[Mapping[int, float] | None]
Stops: TypeAlias = str | Sequence[str] | Sequence[Sequence[str] | None]
Schema: TypeAlias = Mapping[str, Any] | bool | Spec  # a JSON Schema, or a spec of `mj.grammar`
Schemas: TypeAlias = Schema | Sequence[Schema | None]


class Request(NamedTuple):
    """The arguments of a call, in one record from `sample`, `stream`, `edit` and `infill` to the decoder.

    The first fields are the arguments of `sample`, under their names; the second group is set by `encode_request`,
    or by `edit` and `infill` themselves.
    """

    prompt: inputs.Prompts | None = None
    max_tokens: Any = 64  # inputs.WholeNumbers; after `encode_request` one per row, int [B]
    seed: Any = 0  # inputs.Seeds; after `encode_request` one per row, int [B] or typed keys [B]
    sampler: SamplerLike | None = None
    plan: Plan = Plan()
    temperature: Param | Sequence[float] | None = None
    effort: EffortLike | Sequence[EffortLike] | None = None
    logit_bias: LogitBias | None = None
    guidance: Param | Sequence[float] | None = None
    negative: inputs.Prompts | None = None
    logprobs: int | None = None
    state: Session | None = None  # of an earlier call
    mesh: Mesh | None = None
    schema: Schemas | None = None
    n: int = 1
    stop: Stops | None = None
    draft: Draft | None = None
    bad_words: Stops | None = None
    passes: int | None = None
    draft_text: str | Sequence[str | None] | None = None

    reads_images: bool = False  # whether the messages of the prompt may have images
    rows: Rows | None = None
    grammars: Grammars | None = None  # of each row; None: no row has one
    prompts: Sequence[inputs.Prompt] = ()
    end_thinking: int | None = None  # the id that ends the thinking
    infilling: bool = False  # no id ends the answer
    block: int | None = None  # width of the canvas where the rows fix it, instead of the plan's
    steps: np.ndarray | None = None  # of a block, one per prompt, where efforts differ; None: the plan's
    stops: Sequence[tuple[str, ...]] = ()  # of each row
    predictions: Sequence[list[int]] = ()  # of each row, the ids of `draft_text`
    forked: bool = False  # the n rows of a prompt begin with the same tokens, which are encoded once
    trajectory: bool = False  # keep when each token was accepted (`rollout`)

    def checked(self) -> Request:
        """Returns the request with numbers and a mesh as the decoder takes them.

        The axes of the mesh become those that the compiler shards (`AxisType.Auto`), whatever kind the user's are.
        """
        if self.state is not None and not isinstance(self.state, Session):
            raise refuse("state", self.state, "the state of an earlier Output, or None")
        if not isinstance(self.plan, Plan):
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
            n=inputs.check_whole("n", self.n, 1, inputs.MAX_TOKENS, "a whole number of answers, 1 or more"),
            mesh=mesh,
            temperature=None if self.temperature is None else inputs.check_temperature(self.temperature),
            logprobs=inputs.check_logprobs(self.logprobs),
        )


def encode_request(lm: LM, request: Request) -> Request:
    """Encodes the prompts of a request, compiles its grammars, and chooses its sampler and plan."""
    if request.bad_words is not None:
        request = request._replace(schema=_bad_words(lm, request))
    grammars = None if request.schema is None else _grammars(lm, request)
    efforts = find_effort(request.effort)
    prompts = _prompts(lm, request, _thinks(efforts))
    if any(prompt.images for prompt in prompts):  # what these read beside the prompt has no images
        for name in ("draft", "guidance", "negative"):
            if getattr(request, name) is not None:
                raise refuse(name, getattr(request, name), "None with images")
    count, n = len(prompts), request.n
    request = resolve_sampler(lm, request, count)
    if grammars is not None:
        request = request._replace(sampler=_with_grammar_mask(lm, request.sampler, count), grammars=grammars)
    max_tokens = inputs.check_max_tokens(lm, prompts, request.max_tokens)
    seeds = inputs.row_seeds(request.seed, count, n)
    stops = check_stops(request.stop, count)
    # Room for thinking in each row: of conversations only, and never more than the context leaves.
    wanted = [
        0 if e is None else e.thinking for e in (efforts if isinstance(efforts, list) else [efforts] * count)
    ]
    left = [
        lm.model.config.context - len(p.ids) - t - 1
        for p, t in zip(prompts, max_tokens.tolist(), strict=True)
    ]
    budgets = [
        max(0, min(most, room)) if p.chat else 0 for p, most, room in zip(prompts, wanted, left, strict=True)
    ]
    marks = lm.tokenizer.thinking if any(wanted) else None
    if marks is not None:  # where the context leaves no room to think, the answer comes at once
        cut = -len(marks.opening)
        prompts = [
            p._replace(ids=p.ids[:cut]) if p.chat and most and not budget else p
            for p, most, budget in zip(prompts, wanted, budgets, strict=True)
        ]
    # From here on everything but the parameters of the sampler is one value per row.
    predictions = [ids for ids in _predictions(lm, request, count) for _ in range(n)]
    prompts = [p for p in prompts for _ in range(n)]
    max_tokens = np.repeat(max_tokens, n)
    return request._replace(
        rows=rows_of(prompts, max_tokens, seeds, np.repeat(budgets, n)),
        prompts=prompts,
        max_tokens=max_tokens,
        seed=seeds,
        stops=[texts for texts in stops for _ in range(n)],
        predictions=predictions,
        end_thinking=None if marks is None else marks.close,
        forked=n > 1 and request.draft is None,  # the drafter of each row encodes the prompt itself
    )


def _predictions(lm: LM, request: Request, count: int) -> list[list[int]]:
    """Encodes the predicted text of each prompt; a prompt may have none. []: no prompt has one."""

    def ids(name: str, text: Any) -> list[int]:
        if text is not None and not isinstance(text, str):
            raise refuse(name, text, "the text that the answer is expected to be, or None")
        return lm.tokenizer.encode(text) if text else []

    return (
        [] if request.draft_text is None else inputs.per_prompt("draft_text", request.draft_text, count, ids)
    )


def prompt_ids(
    lm: LM, prompt: inputs.Prompts, *, effort: EffortLike | Sequence[EffortLike] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Encodes prompts for `mj.decoder`, as `mj.sample` encodes them.

    Args:
        lm: The model; its tokenizer encodes texts and renders conversations.
        prompt: A text, a conversation or ids, or a list of these.
        effort: As in `sample`: with an effort that thinks, a conversation ends with the start of the thinking section.

    Returns:
        Ids [B, P], left-aligned, padded with 0; and the number of tokens of each prompt [B].

    Raises:
        ValueError: Names the argument that does not fit.

    Example:
        >>> ids, lengths = mj.prompt_ids(lm, [{"role": "user", "content": "347+585="}])
        >>> state = decoder.init(lm.params, ids, lengths, max_tokens=64, key=jax.random.key(0))
    """
    inputs.check_lm(lm)
    thinks = _thinks(find_effort(effort))
    prompts, _ = inputs.encode_prompts(lm, prompt, thinking=thinks)
    if isinstance(thinks, list) and len(thinks) != len(prompts):
        allowed = f"one for all, or {len(prompts)}: one for each prompt"
        raise refuse("effort", f"a list of {len(thinks)}", allowed)
    rows = rows_of(prompts, 0, 0)
    return np.asarray(rows.tokens), np.asarray(rows.committed)


def _thinks(effort: Any) -> bool | list[bool]:
    """Returns whether the prompt asks for thinking at an effort, or at each of several."""
    if isinstance(effort, list):
        return [bool(_thinks(one)) for one in effort]
    return effort is not None and effort.thinking > 0


def resolve_sampler(lm: LM, request: Request, prompts: int) -> Request:
    """Returns the request with the sampler and the plan that apply, its `logit_bias` among the processors."""
    efforts, steps = find_effort(request.effort), None
    if isinstance(efforts, list):
        if len(efforts) != prompts:
            allowed = f"one for all, or {prompts}: one for each prompt"
            raise refuse("effort", f"a list of {len(efforts)}", allowed)
        plans = [choose_sampler(lm, request.sampler, request.plan, effort)[1] for effort in efforts]
        steps = np.array([plan.steps or 0 for plan in plans])
        if request.sampler is None and lm.corruption.mask is not None:
            request = request._replace(sampler=rules.threshold(np.array([effort.p for effort in efforts])))
        efforts = efforts[0]
    given, temperature = request.sampler, request.temperature
    sampler, plan = choose_sampler(lm, given, request.plan, efforts, temperature)
    if given is None and isinstance(
        sampler, Sampler
    ):  # the model's own, which has the caller's temperature already
        request = request._replace(temperature=None)
    if request.logit_bias:
        sampler = check_sampler(sampler)
        sampler = sampler._replace(processors=(*sampler.processors, processors.bias(request.logit_bias)))
    return request._replace(sampler=sampler, plan=plan, steps=steps)


def _prompts(lm: LM, request: Request, thinking: bool | list[bool]) -> list[inputs.Prompt]:
    """The prompts of a request, after the session that they continue."""
    session = request.state
    previous = () if session is None else session.prompts
    prompts, _ = inputs.encode_prompts(
        lm, request.prompt, thinking=thinking, previous=previous, images=request.reads_images
    )
    if session is None:
        return prompts
    check_session(lm, session)
    if not session.done:
        raise refuse("prompt", request.prompt, "None, to finish the answer in state first")
    if len(prompts) != session.rows:
        raise refuse("prompt", f"{len(prompts)} prompts", f"{session.rows}, one for each row of state")
    pairs = zip(session.tokens, prompts, session.prompts, strict=True)
    return [
        inputs.Prompt(
            [*map(int, before), *new.ids],
            new.chat,
            old.images + image_prompts.moved(new.images, len(before)),
        )
        for before, new, old in pairs
    ]


def resume_request(lm: LM, request: Request) -> tuple[Request, Session]:
    """Prepares the call that finishes the answers of a session which `passes` stopped.

    Returns:
        The request with its sampler, for answers that are continued after their thinking; and a copy of the session,
        because running one uses its state up.
    """
    session = request.state
    assert session is not None
    check_session(lm, session)
    fixed: dict[str, Any] = dict.fromkeys(
        ("guidance", "negative", "schema", "bad_words", "logprobs", "mesh")
    ) | {"n": 1}
    if request.effort is None:  # else answers are continued after their thinking, with these
        fixed |= dict.fromkeys(("sampler", "temperature", "logit_bias"))
        fixed |= {"plan": Plan(), "max_tokens": 64, "seed": 0}
    for name, default in fixed.items():
        found = getattr(request, name)
        if found is not default and not (isinstance(found, int | Plan) and found == default):
            allowed = f"{None if name == 'plan' else default} without a prompt: state has begun its answers"
            raise refuse(name, found, allowed)
    if is_guided(session) and request.effort is not None:
        raise refuse("effort", request.effort, "None with the state of a guided call")
    whole = lambda name, value: inputs.check_whole(name, value, 1, inputs.MAX_TOKENS)
    request = resolve_sampler(lm, request, session.rows)._replace(
        prompts=session.prompts,
        max_tokens=np.array(inputs.per_prompt("max_tokens", request.max_tokens, session.rows, whole)),
        seed=inputs.row_seeds(request.seed, session.rows),
        stops=check_stops(request.stop, session.rows) or session.stops,
    )
    state = jax.tree.map(jnp.copy, session.state)
    return request, dataclasses.replace(session, state=state, stops=list(request.stops))


def check_session(lm: LM, session: Session) -> None:
    """Raises ValueError unless a session belongs to this model."""
    if session.config.model.config != lm.model.config:
        raise refuse("state", "a session of another model", f"one of {lm.name}")


def rows_of(
    prompts: Sequence[inputs.Prompt],
    max_tokens: int | np.ndarray,
    seed: int | np.ndarray | Key,
    thinking: Sequence[int] | np.ndarray | None = None,
) -> Rows:
    """Lays prompts out as left-aligned rows."""
    lengths = np.array([len(p.ids) for p in prompts])
    budgets = np.zeros(len(prompts), int) if thinking is None else np.asarray(thinking)
    end = lengths + np.where(budgets > 0, budgets, max_tokens)
    answer_budget = np.where(budgets > 0, max_tokens, 0)
    longest = end + np.where(budgets > 0, 1 + answer_budget, 0)
    tokens = np.zeros((len(prompts), int(longest.max())), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt.ids)] = prompt.ids
    given = np.arange(tokens.shape[1]) < lengths[:, None]
    seeds = inputs.row_seeds(seed, len(prompts))
    return Rows(tokens, given, lengths, end, seeds, answer_budget=answer_budget if budgets.any() else None)


def start(lm: LM, request: Request) -> Session:
    """Makes a session of a request; long prompts are encoded, nothing is decoded yet."""
    rows = request.rows
    assert rows is not None
    weights, negatives = _guidance(lm, request)
    config, sampling, padded = configure(lm, request)
    state = first_state_program(config, sampling, padded)
    fork = fork_of(request, state.done.shape[0])
    with inputs.explain_wrong_params(lm):
        if negatives is not None:
            (batch, slots), prompts = state.tokens.shape, rows.committed.tolist()
            assert weights is not None
            cache = guidance.start(
                lm.model, lm.params, batch, slots, prompts, negatives, weights, longest=state.limits.max_end
            )
            state = state._replace(cache=cache)
        if request.state is not None:  # the keys of the earlier state, in a cache of this one's size
            state = _with_earlier_keys(lm, config, state, request.state.state, fork, weights)
        pending = int((rows.committed - np.asarray(state.cache_length)[: len(rows.committed)]).max())
        batch, slots = state.tokens.shape
        pictures = [prompt.images for prompt in request.prompts]
        longest = image_prompts.longest_image(pictures)
        width = prefill_width(config, slots, always=fork is not None or longest > 0)
        if width is not None and longest:
            chosen = [pictures[i] for i in fork.first] if fork is not None else pictures
            chosen += [()] * (0 if fork is not None else batch - len(pictures))
            images, width = image_prompts.soft_tokens(lm, chosen, slots), max(width, longest)
            state = encode_images_program(config, lm.params, state, width, np.int32(slots), images, fork)
        elif width is not None and fork is not None:
            state = forked_prefill_program(config, lm.params, state, fork, width)
        elif width is not None and pending > config.own_prefill:
            state = prefill_program(config, lm.params, state, width)
    mesh = row_mesh(lm, request.mesh)
    return Session(
        config, state, len(rows.committed), mesh, list(request.prompts), list(request.stops), n=request.n
    )


def fork_of(request: Request, rows: int) -> Fork | None:
    """Says which rows of a call share a prompt."""
    if not request.forked:
        return None
    prompts = len(request.prompts) // request.n
    # As many as a power of two, so that few shapes are compiled; the last prompt is then encoded in several rows.
    first = np.minimum(np.arange(1 << (prompts - 1).bit_length()), prompts - 1) * request.n
    return Fork(first, np.minimum(np.arange(rows) // request.n, prompts - 1))


def _with_earlier_keys(
    lm: LM, config: DecodeConfig, state: State, before: State, fork: Fork | None, weights: np.ndarray | None
) -> State:
    """The state with the cache of an earlier one, in as many slots as are there now; forked rows copy their prompt's.

    A guided call continues with the keys of both its branches, and with its weight unless there is another one.
    """

    rows, same = len(state.done), fork is None and len(before.done) == len(state.done)
    source = np.minimum(np.arange(rows) if fork is None else fork.source, len(before.done) - 1)
    take = lambda old: jnp.copy(old) if same else old[source]

    def fit(new: Any, old: Any) -> Any:
        write = lambda new, old: new.at[:, : old.shape[1]].set(old[:, : new.shape[1]])
        one = lambda new, old: take(old) if new.shape[1:] == old.shape[1:] else write(new, take(old))
        return jax.tree.map(one, new, old)

    cache, old = state.cache, before.cache
    if isinstance(cache, guidance.GuidedCache) and isinstance(old, guidance.GuidedCache):
        cache = guidance.resized(lm.model, old, rows, state.tokens.shape[1], take, fit)
        if weights is not None:
            wide = np.pad(weights, (0, rows - len(weights)))
            cache = dataclasses.replace(cache, weight=jnp.asarray(wide, cache.weight.dtype))
    elif isinstance(cache, guidance.GuidedCache):  # guided from here on
        cache = dataclasses.replace(cache, conditional=fit(cache.conditional, old))
    else:
        cache = fit(cache, old)
    length = take(jnp.asarray(before.cache_length))
    if not keeps_slots(config, state.tokens.shape[1], before):
        length = jnp.zeros_like(length)  # the text is encoded again
    if config.model.config.stretched:  # so do keys that RoPE has rotated for another length
        rope_of = config.model.config.rope_of
        length = jnp.where(rope_of(state.limits.max_end) == rope_of(take(before.limits.max_end)), length, 0)
    return state._replace(cache=cache, cache_length=length)


def keeps_slots(config: DecodeConfig, slots: int, before: State) -> bool:
    """Tells whether each position has the same slot in a new cache as in that of an earlier state.

    Layers with a sliding window keep fewer slots than positions (`models.cache.with_rings`). Rings of different sizes
    hold a position in different slots.
    """
    if config.model.config.window is None or isinstance(before.cache, guidance.GuidedCache):
        return True  # every layer has a slot for each position, before and now
    cache = jax.eval_shape(lambda: config.model.empty_cache(1, slots))
    cache = cache.conditional if isinstance(cache, guidance.GuidedCache) else cache
    earlier = before.tokens.shape[1]
    for new, old in zip(jax.tree.leaves(cache), jax.tree.leaves(before.cache), strict=True):
        if new.ndim < 2 or new.shape[1] == old.shape[1]:
            continue
        if old.shape[1] < earlier or new.shape[1] < min(slots, old.shape[1]):
            return False
    return True


def configure(lm: LM, request: Request) -> tuple[DecodeConfig, SamplingParams, Rows]:
    """Fixes the static sizes of a request and pads its rows. The parameters of the model are not read.

    Returns:
        The static configuration, the sampling parameters [B, ...] and the rows [B, ...], B a bucket.
    """
    rows, plan, model_config = request.rows, request.plan, lm.model.config
    assert rows is not None
    sampler = complete_sampler(request.sampler, lm.corruption, model_config.autoregressive)
    temperature = sampler.temperature if request.temperature is None else request.temperature
    sampler = sampler._replace(temperature=inputs.check_temperature(temperature))
    if plan.whole_blocks and model_config.pattern == "block_causal" and rows.answer_budget is None:
        block = model_config.block
        whole = np.minimum(-(-np.asarray(rows.end) // block) * block, model_config.context)
        rows = rows._replace(end=np.where(rows.end > rows.committed, whole, rows.end))
    # Slots for the furthest position that any row can reach.
    longest = rows.end if rows.max_end is None else rows.max_end
    if rows.answer_budget is not None:
        longest = np.maximum(longest, rows.end + 1 + rows.answer_budget)
    if not lm.model.hides_padding:
        check_equal_lengths("rows", longest)
    model = lm.model
    if row_mesh(lm, request.mesh) is None:
        model = sharding.with_mesh(model, sharding.model_parallel_mesh(lm.params))
    if request.guidance is not None or is_guided(request.state):
        if isinstance(plan.refresh, CachePolicy):
            raise refuse("guidance", request.guidance, f"None with the cache policy {plan.refresh.name}")
        if sampler.speculate is not None:
            raise refuse("guidance", request.guidance, "None with self-speculation")
        model, sampler = guidance.guided(model), guidance.reads_conditional(sampler)
    drafted = WIDEST - 1 if request.predictions else 0 if request.draft is None else request.draft.tokens
    config = build_config(
        lm, sampler, plan, model=model, longest=int(longest.max()), region=int((longest - rows.committed).max()),
        block=request.block, infilling=request.infilling, logprobs=request.logprobs, trajectory=request.trajectory,
        draft=drafted,
        longest_pass=image_prompts.longest_image([prompt.images for prompt in request.prompts]),
    )  # fmt: skip
    drafting: Any = None
    if request.draft is not None:
        if plan.method is not None:
            raise refuse("plan.method", plan.method.name, "None with draft=")
        mesh = sharding.model_parallel_mesh(lm.params) if row_mesh(lm, request.mesh) is None else None
        config, drafting = add_drafter(
            request.draft, config, sampler, mesh, int(longest.max()), len(rows.committed), request.n
        )
    if request.predictions:
        verified = sampler.speculate is not None
        slots = rows.tokens.shape[1]
        config, drafting = add_predictions(config, request.predictions, slots, verified)
    slots = config.slots_after
    if model_config.pattern != "bidirectional":
        size = max(int(longest.max()), rows.tokens.shape[1])
        slots = slots_for(size, config.slots_after, model_config.context)
    # The rows are padded to a power of two that the mesh's axis `data` divides.
    ways = 1 if request.mesh is None else request.mesh.shape["data"]
    count = -(-(1 << (len(rows.committed) - 1).bit_length()) // ways) * ways
    padded = _padded(rows, longest, sampler, count, slots)
    steps = plan.steps if request.steps is None else request.steps
    sampling = sampling_params(lm, config, sampler, steps, len(rows.committed), request.n)
    if request.end_thinking is not None:
        sampling = sampling._replace(end_thinking=np.full_like(sampling.end_thinking, request.end_thinking))
    if request.infilling:
        sampling = sampling._replace(eos=np.full_like(sampling.eos, -1))
    if drafting is not None:
        sampling = sampling._replace(method=drafting)
    if more := count - len(rows.committed):  # added rows take the parameters of the last one
        repeat = lambda x: (jnp if isinstance(x, jax.Array) else np).repeat(x[-1:], more, axis=0)
        join = lambda x: (jnp if isinstance(x, jax.Array) else np).concatenate([x, repeat(x)])
        sampling = jax.tree.map(join, sampling)
    check_functions(config, sampling, lm.params)
    return config, sampling, padded


def _padded(rows: Rows, longest: ArrayLike, sampler: Sampler, count: int, slots: int) -> Rows:
    """Rows up to `count` with `slots` positions, all fields set; added rows write nothing, so they are done."""

    def fit(x: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:  # np.pad takes ten times as long
        out = np.zeros(shape, dtype)
        out[tuple(slice(n) for n in x.shape)] = x
        return out

    wide = lambda x: fit(x, (count, slots), x.dtype)
    long = lambda x: fit(np.asarray(x), (count,), np.int32)
    # A rule of variable length says how short an answer starts; a hole's length is the caller's.
    starts_short = sampler.rule.variable_length and rows.max_end is None
    first = sampler.rule.params.get("start") if starts_short else None
    if first is not None and np.ndim(first):  # one for each prompt
        first = np.repeat(first, len(rows.committed) // len(np.asarray(first)))
    end = rows.end if first is None else np.minimum(rows.committed + np.asarray(first), rows.end)
    none = np.zeros(len(rows.committed), np.int32)
    last = np.minimum(np.arange(count), len(rows.committed) - 1)  # added rows take a key that exists
    return Rows(
        tokens=wide(rows.tokens),
        given=wide(rows.given),
        committed=long(rows.committed),
        end=long(end),
        seeds=long(rows.seeds) if isinstance(rows.seeds, np.ndarray) else rows.seeds[last],
        draft=wide(np.zeros_like(rows.given) if rows.draft is None else rows.draft),
        prompt=long(rows.committed if rows.prompt is None else rows.prompt),
        max_end=long(longest),
        answer_budget=long(none if rows.answer_budget is None else rows.answer_budget),
    )


def row_mesh(lm: LM, mesh: Mesh | None) -> Mesh | None:
    """Returns the mesh whose devices decode rows of their own; None where the parameters are sharded over it."""
    return None if mesh is not None and mesh == sharding.model_parallel_mesh(lm.params) else mesh


def is_guided(session: Session | None) -> bool:
    """Returns whether a session has the keys of two branches."""
    return session is not None and isinstance(session.state.cache, guidance.GuidedCache)


def _guidance(lm: LM, request: Request) -> tuple[np.ndarray | None, list[list[int]] | None]:
    """Guidance weights [B] where the call has any, and what the other branch reads where it has read nothing yet."""
    weight, negative, rows = request.guidance, request.negative, request.rows
    assert rows is not None
    continues = is_guided(request.state)
    if continues and negative is not None:
        allowed = "None: the other branch of the call that state= continues has read its negative prompt"
        raise refuse("negative", negative, allowed)
    if continues and request.effort is not None:
        raise refuse("effort", request.effort, "None with the state of a guided call")
    if weight is None:
        if negative is not None:
            raise refuse("negative", negative, "None without guidance=")
        return None, None
    prompts = len(rows.committed) // request.n
    weights = np.asarray(weight)
    numeric = weights.dtype.kind in "iuf" and weights.shape in ((), (prompts,))
    if not numeric or not np.isfinite(weights).all():
        raise refuse("guidance", weight, f"a finite number, or one for each of the {prompts} prompts")
    weights = np.repeat(np.broadcast_to(weights.astype(np.float32), (prompts,)), request.n)
    if continues:
        return weights, None
    if isinstance(negative, str) and negative == "masked":
        if lm.corruption.mask is None:
            raise refuse("negative", negative, "a prompt: a model of uniform noise has no mask token")
        return weights, [[lm.corruption.mask] * int(length) for length in rows.committed]
    texts: list[list[int]] = [[] for _ in weights]
    if negative is not None:
        given = inputs.prompt_rows(lm, negative, prompts, "negative")
        texts = [ids for ids in given for _ in range(request.n)]
    for i, (ids, most) in enumerate(zip(texts, request.max_tokens, strict=True)):
        name, found = f"negative[{i // request.n}]", f"{len(ids)} tokens"
        room, prompt = lm.model.config.context - int(most), int(np.asarray(rows.committed)[i])
        if len(ids) > room:
            raise refuse(name, found, f"at most {room}: context less max_tokens")
        if not lm.model.hides_padding and len(ids) != prompt:
            raise refuse(name, found, f"{prompt} tokens, as many as the prompt has: {SEES_PADDING}")
    return weights, texts


def continue_request(
    lm: LM, request: Request, replies: Sequence[tuple[int, ...]], which: Sequence[int]
) -> Request:
    """Makes the request that continues answers in which nothing shows, after their closed thinking."""
    context, prompts, budgets = lm.model.config.context, [], []
    for i, (prompt, reply) in enumerate(zip(request.prompts, replies, strict=True)):
        begun, budget = prompt._replace(ids=[*prompt.ids, *reply], chat=True), 0
        if i in which:
            begun, budget = continuation_prompt(
                lm.tokenizer, prompt.ids, reply, int(request.max_tokens[i]), context
            )
        prompts.append(begun)
        budgets.append(budget)
    sampler = check_sampler(request.sampler)
    visible = processors.allow_bits(visible_ids(lm.tokenizer, lm.model.config.vocab))
    return request._replace(
        sampler=sampler._replace(allow=(*sampler.allow, visible)),
        rows=rows_of(prompts, np.asarray(budgets), request.seed),
        end_thinking=None,
        state=None,
        forked=False,
    )


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


# --- grammars


def _grammars(lm: LM, request: Request) -> list[ConstrainedRow | None]:
    """Compiles the grammars of a request, after checking that its other arguments work with a grammar."""
    if max(lm.tokenizer.ends) < 0 or not any(lm.tokenizer.pieces):
        allowed = "None: a grammar needs a tokenizer with texts and an id that ends the answer"
        raise refuse("schema or bad_words", "set", allowed)
    # A text that `stop` cuts would no longer match the grammar.
    for name in ("state", "passes", "guidance", "mesh", "stop"):
        if getattr(request, name) is not None:
            raise refuse(name, getattr(request, name), "None with schema= or bad_words=")
    judges = "the grammar judges the tokens of each pass"
    reasons = {"revise": "tokens that the grammar has accepted stay", "lookahead": judges, "method": judges}
    for name, reason in reasons.items():
        if value := getattr(request.plan, name):
            allowed = f"{None if name == 'method' else 0} with schema= or bad_words=: {reason}"
            raise refuse(f"plan.{name}", value, allowed)
    sampler = None if request.sampler is None else check_sampler(request.sampler)
    if sampler is not None and sampler.rule.variable_length:
        allowed = "a rule that keeps the number of tokens, with schema= or bad_words="
        raise refuse("sampler.rule", sampler.rule.name, allowed)
    if sampler is not None and sampler.speculate:
        allowed = "None or 0 with schema= or bad_words=: the grammar judges what is drafted"
        raise refuse("sampler.speculate", sampler.speculate, allowed)
    prompts, _ = inputs.encode_prompts(lm, request.prompt, images=request.reads_images)
    budgets, count = inputs.check_max_tokens(lm, prompts, request.max_tokens).tolist(), len(prompts)
    several = isinstance(request.schema, Sequence) and not isinstance(request.schema, str)
    schemas: list[Any] = list(request.schema) if several else [request.schema] * count  # type: ignore[arg-type]
    if len(schemas) != count:
        raise refuse("schema", f"{len(schemas)} of them", f"one, or {count}: one for each prompt")
    rows: list[ConstrainedRow | None] = []
    for i, one in enumerate(schemas):
        name = f"schema[{i}]" if several else "schema"
        spec = JSONSchema(one, name) if isinstance(one, Mapping | bool) else one
        if spec is not None and not isinstance(spec, Spec):
            raise refuse("schema", one, "a JSON Schema, or a spec of mercury_jax.grammar")
        try:
            compiled = None if spec is None else grammar.compile(lm.tokenizer, spec)
            walkers = [None if compiled is None else compiled.walk(budgets[i]) for _ in range(request.n)]
        except GrammarError as error:
            if isinstance(spec, Without) or (error.place is not None and error.place.root == name):
                raise
            raise GrammarError(f"{name} is refused: {error}") from None
        rows += [None if walker is None else ConstrainedRow(walker) for walker in walkers]
    return rows


def _bad_words(lm: LM, request: Request) -> list[Without | None] | None:
    """Makes the texts that no answer may hold the grammar of each prompt; None if there are none."""
    if request.schema is not None:
        raise refuse("bad_words", request.bad_words, "None with schema=")
    prompts, _ = inputs.encode_prompts(lm, request.prompt, images=request.reads_images)
    words = check_stops(request.bad_words, len(prompts), "bad_words")
    before = ["" if p.chat else lm.tokenizer.decode(p.ids) for p in prompts]
    specs = [Without(texts, text) if texts else None for texts, text in zip(words, before, strict=False)]
    return specs if any(specs) else None


def _with_grammar_mask(lm: LM, sampler: SamplerLike | None, prompts: int) -> Sampler:
    """Adds a grammar mask for each prompt to a sampler; it allows every id until `constrained.run` sets it."""
    checked = check_sampler(sampler)
    bits = np.full((prompts, 1, -(-lm.model.config.vocab // 32)), ALL_IDS, np.uint32)
    mask = processors.allow_bits(bits, np.full(prompts, -1, np.int32))
    return checked._replace(allow=(*checked.allow, mask))
