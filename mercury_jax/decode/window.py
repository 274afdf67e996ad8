"""The window: the part of a row's canvas that a rule sees, and where it stands in the text."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mercury_jax.decode.state import Program, State


class Window(NamedTuple):
    """One row's window, without a batch axis."""

    offset: Int[Array, ""]  # of its first position within the canvas
    at: Int[Array, "L"]  # absolute positions
    end: Int[Array, ""]  # absolute end of the active block
    n: Int[Array, ""]  # used positions
    held: Bool[Array, "L"]
    editable: Bool[Array, "L"]


def offset_of(program: Program, length: Array, known: Array) -> Array:
    """Where the window begins within the canvas; of one row or of many."""
    return jnp.clip(known - length - program.back, 0, program.width - program.window)


def window_of(program: Program, row: State) -> Window:
    """The window of a row that denoises: its active block and what stays editable before it."""
    offset = offset_of(program, row.length, row.known)
    at = row.length + offset + jnp.arange(program.window, dtype=jnp.int32)
    end = jnp.minimum(jnp.minimum(row.total, row.length + program.width), row.known + program.block)
    held = cut(row.held, offset, program.window)
    n = jnp.clip(end - at[0], 0, program.window)
    return Window(offset, at, end, n, held, ~held & (at < end))


def cut(x: Array, start: Array, size: int) -> Array:
    """x[start : start + size] along the first axis; the whole where it is no longer than that."""
    return x if x.shape[0] == size else jax.lax.dynamic_slice_in_dim(x, start, size)


def paste(x: Array, piece: Array, start: Array) -> Array:
    """x with `piece` at start; the piece itself where it is as long as x."""
    piece = piece.astype(x.dtype)
    return piece if x.shape == piece.shape else jax.lax.dynamic_update_slice_in_dim(x, piece, start, 0)


def cut_rows(tree: Any, start: Int[Array, "B"], size: int) -> Any:
    """Each row's [start : start + size] along axis 1 of every leaf [B, T, ...]."""
    one = lambda x, s: jax.lax.dynamic_slice_in_dim(x, s, size)
    return jax.tree.map(lambda x: x if x.shape[1] == size else jax.vmap(one)(x, start), tree)
