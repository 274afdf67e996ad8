"""Requests become programs: shapes bucketed, prompts encoded, rows spread over a mesh."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from mercury_jax import sharding
from mercury_jax.config import Plan, refuse
from mercury_jax.decode import guide, machine
from mercury_jax.decode.arguments import naming_wrong_params
from mercury_jax.decode.check_sampler import check_sampler
from mercury_jax.decode.parts import Sampler, spread
from mercury_jax.decode.program import bucket, checked_temperature, plan_program, slots_for
from mercury_jax.decode.state import Frame, Knobs, Program, State, begin
from mercury_jax.types import LM

PREFILL = 256  # tokens of a wide encode pass


class Request(NamedTuple):
    """Rows as arrays: what is given, how much is settled, where each row ends."""

    text: np.ndarray  # [B, S]
    given: np.ndarray  # bool [B, S]
    known: np.ndarray  # [B]
    total: np.ndarray  # [B]
    seeds: np.ndarray  # [B]
    reserve: np.ndarray | None = None  # [B] room for the answer, where `total` ends the thinking
    prompt: np.ndarray | None = None  # [B] where the answer begins; None: at `known`
    draft: np.ndarray | None = None  # bool [B, S] tokens of `text` that a canvas starts from
    most: np.ndarray | None = None  # [B] how far a growing row may reach; None: to `total`

    @property
    def longest(self) -> np.ndarray:
        """[B] where each row may end at the latest."""
        ends = self.total if self.most is None else self.most
        return ends if self.reserve is None else np.maximum(ends, self.total + 1 + self.reserve)


class Guidance(NamedTuple):
    """Classifier-free guidance of each row: its weight, and what stands in for the prompt."""

    weights: np.ndarray  # [B]
    negatives: list[list[int]]


class Job(NamedTuple):
    """A request ready to run: its program, knobs, first state, and how many rows are real."""

    program: Program
    knobs: Knobs
    state: State
    rows: int
    mesh: Mesh | None


def prepare(
    lm: LM,
    request: Request,
    sampler: Any,
    plan: Plan,
    *,
    temperature: Any = None,
    block: int | None = None,
    infilling: bool = False,
    close: int | None = None,
    logprobs: int | None = None,
    guidance: Guidance | None = None,
    before: State | None = None,
    mesh: Mesh | None = None,
) -> Job:
    """Bucket the shapes, fill the sampler's defaults, encode long prompts; nothing is decoded yet.

    block: width of the canvas where the request fixes it (infilling), instead of the plan's. close: the
    id that ends the thinking. before: a state whose rows these go on from; its keys are reused.
    """
    program, knobs, padded = arranged(
        lm, request, sampler, plan, temperature=temperature, block=block, infilling=infilling, close=close,
        logprobs=logprobs, guidance=guidance, mesh=mesh,
    )  # fmt: skip
    rows = len(request.known)
    state = _begin(program, knobs, **padded)
    with naming_wrong_params(lm):
        if guidance is not None:
            state = state._replace(cache=_guided_cache(lm, state, padded, guidance))
        if before is not None:
            state = _go_on(state, before)
        state = _encode_long(lm, program, state, int((request.known - np.asarray(state.length)[:rows]).max()))
    return Job(program, knobs, state, rows, by_rows(lm, mesh))


def by_rows(lm: LM, mesh: Mesh | None) -> Mesh | None:
    """The mesh whose devices decode rows of their own; None where the parameters lie apart: all share all passes."""
    return None if mesh is not None and mesh == sharding.apart(lm.params) else mesh


def arranged(
    lm: LM,
    request: Request,
    sampler: Any,
    plan: Plan,
    *,
    temperature: Any = None,
    block: int | None = None,
    infilling: bool = False,
    close: int | None = None,
    logprobs: int | None = None,
    guidance: Guidance | None = None,
    mesh: Mesh | None = None,
) -> tuple[Program, Knobs, dict[str, Any]]:
    """(program, knobs, arguments of `begin`) of a request, its shapes bucketed; the parameters are not looked at."""
    program, sampler = plan_program(lm, request, sampler, plan, block=block, infilling=infilling)
    on = sharding.apart(lm.params)
    if by_rows(lm, mesh) is None:
        program = program._replace(model=sharding.over(program.model, on))
    program = program._replace(logprobs=logprobs)
    if guidance is not None:
        if program.verify:
            raise refuse("guidance", guidance.weights.tolist(), "None where drafts are verified")
        program = program._replace(model=guide.guided(program.model))
    if temperature is not None:
        sampler = sampler._replace(temperature=checked_temperature(temperature))
    rows = len(request.known)
    padded = _padded(request, sampler, program, _row_bucket(rows, mesh))
    total = len(padded["known"])
    steps = plan.steps or (1 if program.verify else 0)
    ids = lambda x: jnp.full((total,), -1 if x is None else x, jnp.int32)
    knobs = Knobs(
        _spread(sampler, rows, total), jnp.full((total,), steps, jnp.int32),
        ids(None if infilling else lm.model.config.eos), ids(close),
    )  # fmt: skip
    check_sampler(program, knobs)
    return program, knobs, padded


def advance(lm: LM, job: Job, passes: int | None) -> tuple[Job, Frame | None, jax.Array]:
    """Run up to `passes` passes (None: to the end), without waiting for the device.

    Returns the job (its old state is used up), the frames [passes, B, ...], and how many passes were
    made: a number, or one for each shard.
    """
    with naming_wrong_params(lm):
        if job.mesh is None:
            state, frames, used = _run(job.program, lm.params, job.state, job.knobs, passes)
        else:
            state, frames, used = _run_sharded(job.program, job.mesh, lm.params, job.state, job.knobs, passes)
    return job._replace(state=state), frames, used


def refuse_broken(job: Job) -> None:
    """ValueError that names row and pass where a model's logits were no numbers."""
    bad = np.asarray(job.state.bad)[: job.rows]
    for row in np.flatnonzero(bad >= 0):
        raise ValueError(
            f"logits of row {row} are NaN in denoising pass {bad[row]}; allowed: numbers. "
            "The parameters hold NaN, or the arithmetic overflowed: try dtype float32"
        )


def copied(job: Job) -> Job:
    """The job with a state of its own: running it leaves the original readable."""
    return job._replace(state=jax.tree.map(jnp.copy, job.state))


def _encode_long(lm: LM, program: Program, state: State, behind: int) -> State:
    wide = prefill_width(program, behind)
    return state if wide is None else _prefill(program, lm.params, state, wide)


def prefill_width(program: Program, behind: int) -> int | None:
    """Tokens of a wide encode pass for rows with `behind` known tokens to encode; None: the steps do it."""
    full = program.model.config.pattern == "bidirectional"
    if full or behind <= 2 * program.width:
        return None
    # Whole blocks: a block-causal row must find the keys of its own block in the same pass.
    quantum = program.width if program.model.config.pattern == "block_causal" else 1
    return -(-min(PREFILL, bucket(behind)) // quantum) * quantum


def _go_on(state: State, before: State) -> State:
    """The state with the keys that are already there, in a cache of its own size."""

    def fit(new: jax.Array, old: jax.Array) -> jax.Array:
        return (
            jnp.copy(old) if new.shape == old.shape else new.at[:, : old.shape[1]].set(old[:, : new.shape[1]])
        )

    return state._replace(cache=jax.tree.map(fit, state.cache, before.cache), length=jnp.copy(before.length))


def _guided_cache(lm: LM, state: State, padded: dict[str, Any], guidance: Guidance) -> Any:
    more = len(padded["known"]) - len(guidance.weights)
    return guide.start(
        lm.model, lm.params, len(padded["known"]), state.text.shape[1], padded["known"].tolist(),
        [*guidance.negatives, *[[]] * more], np.pad(np.asarray(guidance.weights, np.float32), (0, more)),
    )  # fmt: skip


def _row_bucket(rows: int, mesh: Mesh | None) -> int:
    size = 1 << (rows - 1).bit_length()
    ways = 1 if mesh is None else mesh.shape["data"]
    return -(-size // ways) * ways


def _padded(request: Request, sampler: Sampler, program: Program, rows: int) -> dict[str, Any]:
    """Arguments of `begin`, rows up to the bucket; those added want nothing, so they are done."""
    more = rows - len(request.known)
    wide = lambda x: np.pad(x, [(0, more), (0, capacity_of(request, program) - x.shape[1])])
    long = lambda x: np.pad(np.asarray(x), (0, more)).astype(np.int32)
    draft = np.zeros_like(request.given) if request.draft is None else request.draft
    # A growing rule says how short an answer begins; a hole's length is the caller's.
    start = sampler.rule.knobs.get("start") if program.grows and request.most is None else None
    total = request.total if start is None else np.minimum(request.known + np.asarray(start), request.total)
    none = np.zeros(len(request.known), np.int32)
    prompt = request.known if request.prompt is None else request.prompt
    return dict(
        text=wide(request.text), given=wide(request.given), draft=wide(draft), known=long(request.known),
        total=long(total), most=long(request.longest), prompt=long(prompt), seeds=long(request.seeds),
        reserve=long(none if request.reserve is None else request.reserve),
    )  # fmt: skip


def capacity_of(request: Request, program: Program) -> int:
    """Slots of text and cache: the longest row, one width behind it, one more for blind masks."""
    config = program.model.config
    if config.pattern == "bidirectional":
        return program.width * (2 if program.blind else 1)
    longest = max(int(request.longest.max()), request.text.shape[1])
    return slots_for(longest, program.width * (2 if program.blind else 1), config.context)


def _spread(sampler: Any, rows: int, total: int) -> Any:
    wide = spread(sampler, rows)
    return jax.tree.map(lambda x: jnp.concatenate([x, jnp.repeat(x[-1:], total - rows, axis=0)]), wide)


_begin = jax.jit(begin, static_argnums=0)
_prefill = jax.jit(machine.prefill, static_argnums=(0, 3), donate_argnums=2)
_run = jax.jit(machine.run, static_argnums=(0, 4), donate_argnums=2)


@functools.partial(jax.jit, static_argnums=(0, 1, 5), donate_argnums=3)
def _run_sharded(
    program: Program, mesh: Mesh, params: Any, state: State, knobs: Knobs, passes: int | None
) -> tuple[State, Frame | None, jax.Array]:
    """Rows over the `data` axis: every device decodes its own rows, with its own trip count."""
    row, whole = PartitionSpec("data"), PartitionSpec()

    def local(params: Any, state: State, knobs: Knobs) -> tuple[State, Frame | None, jax.Array]:
        state, frames, used = machine.run(program, params, state, knobs, passes)
        return state, frames, jnp.reshape(used, (1,))

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(whole, row, row),
        out_specs=(row, PartitionSpec(None, "data"), row),
        check_vma=False,
    )(params, state, knobs)
