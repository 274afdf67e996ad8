"""What runs on the device: one program of steps for all slots, and the small ones around it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from mercury_jax.decode import decoder
from mercury_jax.decode.constrained import CommittedTokens, write_committed
from mercury_jax.decode.state import DecodeConfig, Frame, Rows, SamplingParams, State, admit, first_state
from mercury_jax.types import Cache, Params


class Report(NamedTuple):
    """What the host learns of each row after a dispatch; arrays of its own, so that the state may move on."""

    tokens: Int[Array, "B S"]
    committed: Int[Array, "B"]
    end: Int[Array, "B"]
    answer_budget: Int[Array, "B"]
    cache_length: Int[Array, "B"]
    nfe: Int[Array, "B"]
    nan_step: Int[Array, "B"]
    done: Bool[Array, "B"]


class Result(NamedTuple):
    """A dispatch: the state to go on with, and what it showed."""

    state: State
    frames: Frame  # [passes, B, ...]
    used: Int[Array, ""]  # passes that were made
    report: Report


def _run(
    program: DecodeConfig,
    params: Params,
    state: State,
    knobs: SamplingParams,
    leave: Bool[Array, "B"],
    limit: Int[Array, ""],
    passes: int,
) -> Result:
    """Up to `limit` passes, at most `passes`. leave: rows that end now, whatever they have written."""
    state = state._replace(done=state.done | leave)
    state, frames, used = decoder.run(program, params, state, knobs, passes, limit)
    assert frames is not None
    held = {name: getattr(state, name) for name in Report._fields}
    return Result(state, frames, used, Report(**jax.tree.map(jnp.copy, held)))


run = jax.jit(_run, static_argnums=(0, 6), donate_argnums=2)


def run_on(where: Any) -> Any:
    """`run` for a state that lies on a mesh as `where` says, and stays so."""
    whole = NamedSharding(jax.tree.leaves(where)[0].mesh, PartitionSpec())
    out = Result(where, whole, whole, whole)  # type: ignore[arg-type]
    return jax.jit(_run, static_argnums=(0, 6), donate_argnums=2, out_shardings=out)


@functools.partial(jax.jit, static_argnums=0)
def start(program: DecodeConfig, knobs: SamplingParams, text: Array, numbers: Int[Array, "6"]) -> State:
    """One row that wants `numbers`: known, total, most, reserve, seed, and how many keys it has already."""
    known, total, most, reserve, seed, length = (numbers[i : i + 1] for i in range(6))
    given = jnp.arange(text.shape[1])[None] < known[:, None]
    nothing = jnp.zeros_like(given)
    rows = Rows(text, given, known, total, seed, nothing, known, most, reserve)
    return first_state(program, knobs, rows)._replace(cache_length=length)


@functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=2)
def encode(program: DecodeConfig, params: Params, row: State, width: int, upto: Int[Array, ""]) -> State:
    """Encode a row's known text in passes of `width`, but no further than `upto`."""
    return decoder.prefill(program, params, row, width, upto)


@functools.partial(jax.jit, donate_argnums=0)
def place(state: State, slot: Int[Array, ""], row: State) -> State:
    """`state.admit` as a program; the row's numbers are copied into the slot."""
    return admit(state, slot, row)


@functools.partial(jax.jit, static_argnums=(2, 3))
def move(state: State, order: Int[Array, "b"], slots: int, width: int) -> State:
    """Rows `order` of a state (-1: an idle one), with `slots` positions and canvases of `width`."""
    live = order >= 0

    def fit(path: Any, leaf: Array) -> Array:
        rows = leaf[jnp.maximum(order, 0)]
        name = path[0].name
        size = {"canvas": width, "answer": width, "frozen": width, "self_cond": width}.get(name, slots)
        if name in _FLAT or leaf.ndim < 2 or leaf.shape[1] == size:
            return rows
        if leaf.shape[1] > size:
            return jax.lax.slice_in_dim(rows, 0, size, axis=1)
        return jnp.pad(rows, [(0, 0), (0, size - leaf.shape[1])] + [(0, 0)] * (leaf.ndim - 2))

    moved = jax.tree_util.tree_map_with_path(fit, state)
    return moved._replace(done=moved.done | ~live)


_FLAT = {"memory", "key"}  # of which no axis is a position of the text


@functools.partial(jax.jit, static_argnums=3)
def cut(cache: Cache, slot: Int[Array, ""], start: Int[Array, ""], size: int) -> Cache:
    """`size` slots of one row's keys."""
    one = lambda x: jax.lax.dynamic_slice_in_dim(
        jax.lax.dynamic_index_in_dim(x, slot, keepdims=False), start, size
    )
    return jax.tree.map(one, cache)


@functools.partial(jax.jit, donate_argnums=0)
def lay(row: State, piece: Cache, at: Int[Array, ""]) -> State:
    """A row with a piece of keys laid into its cache at slot `at`."""
    put = lambda all, new: jax.lax.dynamic_update_slice_in_dim(all, new[None], at, 1)
    return row._replace(cache=jax.tree.map(put, row.cache, piece))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def write(program: DecodeConfig, state: State, change: CommittedTokens, eos: Int[Array, "B"]) -> State:
    """`write_committed` as a program."""
    return write_committed(program, state, change, eos)


@jax.jit
def peek(state: State, slot: Int[Array, ""]) -> Any:
    """One row's log-probabilities."""
    return jax.tree.map(lambda x: x[slot], state.logprobs)


def bytes_of(tree: Any) -> int:
    """Bytes of a tree of arrays."""
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
