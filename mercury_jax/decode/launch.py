"""From a request to a compiled run: shapes are bucketed here, so that few programs serve all calls."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from mercury_jax.config import Plan, refuse
from mercury_jax.decode import machine
from mercury_jax.decode.parts import complete, spread
from mercury_jax.decode.state import Frame, Knobs, Program, State, begin
from mercury_jax.types import LM

PREFILL = 256  # tokens of a wide encode pass
QUANTUM = 64  # capacities are multiples of it, then of powers of two


class Request(NamedTuple):
    """Rows as arrays: what is given, how much is settled, where each row ends."""

    text: np.ndarray  # [B, S]
    given: np.ndarray  # bool [B, S]
    known: np.ndarray  # [B]
    total: np.ndarray  # [B]
    seeds: np.ndarray  # [B]


class Job(NamedTuple):
    """A request ready to run: its program, knobs, first state, and how many rows are real."""

    program: Program
    knobs: Knobs
    state: State
    rows: int
    mesh: Mesh | None


def bucket(size: int, quantum: int = QUANTUM) -> int:
    """The least capacity >= size among multiples of `quantum` with at most 25% waste."""
    step = quantum
    while step * 4 < size:
        step *= 2
    return -(-size // step) * step


def prepare(
    lm: LM,
    request: Request,
    sampler: Any,
    plan: Plan,
    *,
    temperature: float | None = None,
    block: int | None = None,
    infilling: bool = False,
    mesh: Mesh | None = None,
) -> Job:
    """Bucket the shapes, fill the sampler's defaults, encode long prompts; nothing is decoded yet.

    block: width of the canvas where the request fixes it (infilling), instead of the plan's.
    """
    config = lm.model.config
    full = config.pattern == "bidirectional"
    longest = int(request.total.max())
    width = bucket(longest) if full else (block or _block(lm, plan))
    active = min(block or plan.block or config.block, width)
    capacity = width if full else bucket(longest + width)
    sampler = complete(sampler, lm.corruption)
    if temperature is not None:
        sampler = sampler._replace(temperature=_temperature(temperature))
    rows = len(request.known)
    padded = _padded(request, _row_bucket(rows, mesh), capacity)
    total = len(padded.known)
    eos = None if infilling else config.eos
    kept_out = (config.eos,) if infilling else ()
    program = Program(lm.model, lm.corruption, width, active, eos, kept_out)
    knobs = Knobs(_spread(sampler, rows, total), jnp.full((total,), plan.steps or 0, jnp.int32))
    state = _begin(program, knobs, *padded)
    longest_known = int(request.known.max())
    if not full and longest_known > 2 * width:
        # Whole blocks: a block-causal row must find the keys of its own block in the same pass.
        wide = -(-min(PREFILL, bucket(longest_known)) // width) * width
        state = _prefill(program, lm.params, state, wide)
    return Job(program, knobs, state, rows, mesh)


def advance(lm: LM, job: Job, passes: int | None) -> tuple[Job, Frame | None, jax.Array]:
    """Run up to `passes` passes (None: to the end), without waiting for the device.

    Returns the job (its old state is used up), the frames [passes, B, ...], and how many of them
    hold a pass: a number, or one for each shard.
    """
    if job.mesh is None:
        state, frames, used = _run(job.program, lm.params, job.state, job.knobs, passes)
    else:
        state, frames, used = _run_sharded(job.program, job.mesh, lm.params, job.state, job.knobs, passes)
    return job._replace(state=state), frames, used


def _block(lm: LM, plan: Plan) -> int:
    """The plan's block, which may be no wider than what a block-causal model was built for."""
    config = lm.model.config
    if plan.block is not None and config.pattern == "block_causal" and plan.block != config.block:
        raise refuse("plan.block", plan.block, f"{config.block}, the block of this model, or None")
    return plan.block or config.block


def _temperature(value: Any) -> Any:
    if np.any(np.asarray(value) < 0) or not np.all(np.isfinite(np.asarray(value, float))):
        raise refuse("temperature", value, "0 or more")
    return value


def _row_bucket(rows: int, mesh: Mesh | None) -> int:
    size = 1 << (rows - 1).bit_length()
    ways = 1 if mesh is None else mesh.shape["data"]
    return -(-size // ways) * ways


def _padded(request: Request, rows: int, capacity: int) -> Request:
    """Rows up to the bucket; those added want nothing, so they are done from the start."""
    more = rows - len(request.known)
    wide = lambda x: np.pad(x, [(0, more), (0, capacity - x.shape[1])])
    long = lambda x: np.pad(x, (0, more)).astype(np.int32)
    return Request(
        wide(request.text), wide(request.given), long(request.known), long(request.total), long(request.seeds)
    )


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
