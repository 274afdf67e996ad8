"""Shapers that penalise what stands there already: in the prompt, in the answer, on the canvas.

An autoregressive decoder counts the tokens before a position. On a canvas the order is another one:
what counts for a position is what is settled, before it and behind it, but not itself.
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from mercury_jax.decode.parts import Knob, shaper
from mercury_jax.decode.ranges import Above, Finite
from mercury_jax.decode.shape.scale import Logits, hold
from mercury_jax.decode.shape.tables import targets
from mercury_jax.types import View


@shaper(whole=False)
def repetition(logits: Logits, view: View, *, p: Annotated[Knob, Above(0)] = 1.0) -> Logits:
    """Divide positive logits by `p`, and multiply negative ones, of ids in the prompt or the answer.

    CTRL's penalised sampling (arXiv 1909.05858, section 4.1) in the form that is in use, which also
    lowers negative logits; 1 changes nothing.
    """
    p = jnp.maximum(p, 1e-6)
    ids = logits.shape[-1]
    seen = (answered(view, ids) > 0) | (_part(view.told, view, ids) > 0)
    return hold(logits, jnp.where(seen, jnp.where(logits > 0, logits / p, logits * p), logits))


@shaper(whole=False)
def presence(logits: Logits, view: View, *, p: Annotated[Knob, Finite()] = 0.0) -> Logits:
    """Subtract `p` from every id that the answer holds (OpenAI's presence_penalty)."""
    return hold(logits, logits - p * (answered(view, logits.shape[-1]) > 0))


@shaper(whole=False)
def frequency(logits: Logits, view: View, *, p: Annotated[Knob, Finite()] = 0.0) -> Logits:
    """Subtract `p` for each time that the answer holds an id (OpenAI's frequency_penalty)."""
    return hold(logits, logits - p * answered(view, logits.shape[-1]))


def answered(view: View, ids: int) -> Int[Array, "L V"]:
    """How often each of `ids` ids from `view.first` on stands in the answer, as seen from each position of the window.

    The answer before the window counts everywhere, and a settled token everywhere but at its own
    position. Under uniform noise nothing is settled: there the last answer counts instead, seen from
    the positions behind it only, lest two equal neighbours suppress each other in turn. At time 0 the
    canvas is a draft that is checked from left to right: a token counts behind it only. The end of
    text is no part of an answer; a tail of it must not talk the position before it into going on.
    """
    at = jnp.arange(view.canvas.shape[0], dtype=jnp.int32)
    i, j = at[:, None], at[None, :]
    settled = (view.editable & ~view.masked) & jnp.where(view.t > 0, i != j, j < i)
    counts = jnp.where(view.masked, _redrawn(view) & (j < i), settled)
    token = jnp.where(view.masked, view.answer, view.canvas)
    counts &= token != view.eos
    said = jnp.broadcast_to(_part(view.said, view, ids), (at.shape[0], ids))
    # L x L scattered ones, instead of one-hot rows [L, V] and their sums.
    column = targets(token, view.first, ids)
    return said.at[i, column[None, :]].add(counts.astype(said.dtype), mode="drop")


def _part(counts: Int[Array, "V"], view: View, ids: int) -> Int[Array, "v"]:
    return jax.lax.dynamic_slice_in_dim(counts, view.first, ids)


def _redrawn(view: View) -> Array:
    """Whether open positions hold tokens of which there is an answer already.

    Under masked noise an open position holds exactly the noise to come, the mask. A uniform canvas
    equals its fresh noise at every open position with probability V^-open, and then only loses one
    step's count.
    """
    return jnp.any(view.masked & (view.canvas != view.noise)) & (view.step > 0)
