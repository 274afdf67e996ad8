"""What the host writes into a gated row between two passes: tokens that a grammar has accepted.

A gated row (`Knobs.gated`) proposes as every other does, and settles nothing by itself: after each pass the host
looks at its frame, decides how far the proposal stands, and says so here. Accepted tokens are held from then on;
where they fill the block, or end the answer, the block is committed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from mercury_jax.decode.state import Program, State


class Amend(NamedTuple):
    """For each row: accepted tokens, from the front of what is accepted already. n = 0 and no end: nothing."""

    tokens: Int[Array, "B W"]
    front: Int[Array, "B"]  # absolute position of the first of them
    n: Int[Array, "B"]  # how many of them there are
    clear: Bool[Array, "B"]  # what stands behind them becomes noise again
    ended: Bool[Array, "B"]  # the answer ends behind them


def nothing(rows: int, width: int) -> Amend:
    """An Amend on the host that changes no row; fill it in place."""
    int32 = lambda *shape: np.zeros(shape, np.int32)
    no = lambda: np.zeros(rows, bool)
    return Amend(int32(rows, width), int32(rows), int32(rows), no(), no())  # type: ignore[arg-type]


def amend(program: Program, state: State, change: Amend, eos: Int[Array, "B"]) -> State:
    """The state with the accepted tokens in it. eos: what is written behind an answer that ends."""
    small = state._replace(cache=(), carry=(), memory=(), nats=())
    fresh = jax.vmap(lambda *row: _row(program, *row))(small, change, eos)
    return state._replace(**fresh)


def _row(program: Program, row: State, change: Amend, eos: Int[Array, ""]) -> dict[str, Array]:
    at = row.length + jnp.arange(program.width, dtype=jnp.int32)
    slots = jnp.arange(row.text.shape[0], dtype=jnp.int32)
    reach = change.front + change.n
    new = lambda where: change.tokens[jnp.clip(where - change.front, 0, program.width - 1)]
    inside = lambda where: (where >= change.front) & (where < reach)
    text = jnp.where(inside(slots), new(slots), row.text)
    canvas = jnp.where(inside(at), new(at), row.canvas)
    if program.corruption.mask is not None:  # under uniform noise what stands there is as good as noise
        behind = change.clear & (at >= reach) & ~row.held
        canvas = jnp.where(behind, program.corruption.mask, canvas)
    total = jnp.where(change.ended, reach, row.total)
    end = jnp.minimum(jnp.minimum(total, row.length + program.width), row.known + program.block)
    # Where no canvas is open (the row still encodes) what is accepted is known at once.
    full = ((change.n > 0) & ((reach >= end) | (row.step < 0))) | change.ended
    known = jnp.where(full, reach, row.known)
    return dict(
        text=jnp.where(change.ended & (slots == reach), eos, text),
        canvas=canvas,
        answer=jnp.where(inside(at) | (canvas != row.canvas), canvas, row.answer),
        held=row.held | inside(at),
        known=known,
        total=total,
        step=jnp.where(full, -1, row.step),
        done=row.done | (full & (known >= total)),
    )
