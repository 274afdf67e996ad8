"""The jitted functions of the engine: denoising passes over all slots, and changes to rows between two dispatches.

`scheduler` and `buckets` call them; `CompiledPrograms` holds `run_passes` compiled for each bucket. B is the number of
rows of a bucket and S its capacity, the positions of a row.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from mercury_jax.decode.constrained import FreeText, run_free, write_committed
from mercury_jax.decode.passes import prefill, run_limited
from mercury_jax.decode.state import DecodeConfig, Frame, Rows, SamplingParams, State, admit, first_state
from mercury_jax.decode.token_stats import LogprobBuffer
from mercury_jax.types import Params


class DispatchReport(NamedTuple):
    """The fields of the `State` that the host reads after a dispatch.

    They are copies: the state itself is donated to the next dispatch, possibly before the host reads the report.
    """

    tokens: Int[Array, "B S"]
    committed: Int[Array, "B"]
    end: Int[Array, "B"]
    answer_budget: Int[Array, "B"]
    cache_length: Int[Array, "B"]
    nfe: Int[Array, "B"]
    nan_step: Int[Array, "B"]
    done: Bool[Array, "B"]
    waits: Bool[Array, "B"]  # the host must judge the last pass of the row, see `constrained.run_free`


class DispatchResult(NamedTuple):
    """Result of a dispatch: the next state, frames [P, B, ...], the number of passes that ran, the report."""

    state: State
    frames: Frame
    passes: Int[Array, ""]
    report: DispatchReport


def _run_passes(
    program: DecodeConfig,
    params: Params,
    state: State,
    sampling: SamplingParams,
    idle: Bool[Array, "B"],
    limit: Int[Array, ""],
    free: FreeText | None,
    passes: int,
) -> DispatchResult:
    """Runs up to `limit` denoising passes over all rows.

    Args:
        state: State of the rows; donated. Its field `sampling` is (), because the structure of the sampling parameters
            depends on the sampler level and the state must not.
    """
    state = state._replace(done=state.done | idle, sampling=sampling)
    if free is None:
        state, frames, used = run_limited(program, params, state, passes, limit)
        waits = jnp.zeros_like(idle)
    else:
        state, frames, used, waits = run_free(program, params, state, passes, limit, free)
    report = DispatchReport(
        state.tokens, state.committed, state.limits.end, state.limits.answer_budget, state.cache_length, state.nfe,
        state.records.nan_step, state.done & ~waits, waits,
    )  # fmt: skip
    report = jax.tree.map(jnp.copy, report)
    return DispatchResult(state._replace(sampling=()), frames, used, report)


run_passes = jax.jit(_run_passes, static_argnums=(0, 7), donate_argnums=2)


def run_passes_sharded(shardings: Any) -> Any:
    """Makes `run_passes` for a state on a mesh; the next state has the same shardings as the input.

    Args:
        shardings: A `State` of NamedSharding.
    """
    replicated = NamedSharding(jax.tree.leaves(shardings)[0].mesh, PartitionSpec())
    out = DispatchResult(shardings, replicated, replicated, replicated)  # type: ignore[arg-type]
    return jax.jit(_run_passes, static_argnums=(0, 7), donate_argnums=2, out_shardings=out)


@functools.partial(jax.jit, static_argnums=0)
def start_row(
    program: DecodeConfig, sampling: SamplingParams, tokens: Int[Array, "1 S"], sizes: Int[Array, "5"]
) -> State:
    """Makes the state of one row that starts a request.

    Args:
        sizes: Five numbers: length of the prompt; position where thinking ends (without thinking: the answer); tokens
            reserved for the answer after thinking, else 0; seed; number of prompt tokens whose keys and values the
            caller will write to the KV cache.
    """
    prompt, end, answer_budget, seed, cached = (sizes[i : i + 1] for i in range(5))
    given = jnp.arange(tokens.shape[1])[None] < prompt[:, None]
    draft = jnp.zeros_like(given)
    longest = jnp.where(answer_budget > 0, end + 1 + answer_budget, end)
    rows = Rows(tokens, given, prompt, end, seed, draft, prompt, longest, answer_budget)
    return first_state(program, sampling, rows)._replace(cache_length=cached, sampling=())


# (program, params, row, width, upto) -> the row, with its prompt encoded up to position `upto` in forward passes of
# `width` tokens. The row is donated.
encode_prompt = jax.jit(prefill, static_argnums=(0, 3), donate_argnums=2)
# (state, slot, row) -> the state, with the row in the slot. The state is donated.
place_row = jax.jit(admit, donate_argnums=0)
# (program, state, change, eos) -> the state, with the tokens that grammars have committed. The state is donated.
write_tokens = jax.jit(write_committed, static_argnums=0, donate_argnums=1)


class RowSizes(NamedTuple):
    """Sizes of the axes of a state behind the batch axis. Static.

    Attributes:
        capacity: Positions of a row.
        width: Positions of a canvas.
        slots: Slots of each leaf of the KV cache: `capacity`, or fewer in layers with a sliding window; 0: no slots.
    """

    capacity: int
    width: int
    slots: tuple[int, ...]


@functools.partial(jax.jit, static_argnums=2)
def move_rows(state: State, order: Int[Array, "b"], sizes: RowSizes) -> State:
    """Moves rows of a state into a new state of other sizes."""

    def moved(leaf: Array, size: int | None = None) -> Array:
        rows = leaf[jnp.maximum(order, 0)]
        if size is None or leaf.ndim < 2 or leaf.shape[1] == size:
            return rows
        if leaf.shape[1] > size:
            return jax.lax.slice_in_dim(rows, 0, size, axis=1)
        return jnp.pad(rows, [(0, 0), (0, size - leaf.shape[1])] + [(0, 0)] * (leaf.ndim - 2))

    # The second axis of a leaf runs over the positions of the row [B, S, ...] or of the canvas [B, W, ...], or over
    # something else. Rules choose the shape of their memory: a second axis of length W is taken for the canvas.
    capacity, width, slots = sizes
    of_canvas = {name: getattr(state, name) for name in ("canvas", "answer", "frozen", "self_cond")}
    canvas = state.canvas.shape[1:2]
    of_row = state._replace(memory=(), key=(), cache=(), **dict.fromkeys(of_canvas, ()))  # type: ignore[arg-type]
    rows = jax.tree.map(lambda leaf: moved(leaf, capacity), of_row)
    # A ring keeps its size. It is cut or padded only if one of both states is short enough that nothing has wrapped.
    leaves, structure = jax.tree.flatten(state.cache)
    cache = [moved(leaf, size or None) for leaf, size in zip(leaves, slots, strict=True)]
    return rows._replace(
        cache=structure.unflatten(cache),
        **{name: jax.tree.map(lambda leaf: moved(leaf, width), tree) for name, tree in of_canvas.items()},
        memory=jax.tree.map(lambda x: moved(x, width if x.shape[1:2] == canvas else None), state.memory),
        key=jax.tree.map(moved, state.key),
        done=rows.done | (order < 0),
    )


@jax.jit
def row_logprobs(state: State, slot: Int[Array, ""]) -> LogprobBuffer:
    """Extracts the log-probabilities of one row."""
    return jax.tree.map(lambda leaf: leaf[slot], state.logprobs)


def tree_bytes(tree: Any) -> int:
    """Returns the size of a tree of arrays in bytes; the arrays may be abstract."""
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
