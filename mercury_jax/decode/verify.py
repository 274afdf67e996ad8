"""Lossless self-speculation: a diffusion draft, checked by the causal pass of the same weights.

The last known token leads the canvas and is not yet encoded. One encoding pass over lead and draft
writes their keys and predicts, after each of them, the next token; each prediction is drawn with the
uniform of its position, as plain autoregressive decoding would draw it, and the draft is accepted
as far as it agrees. One token beyond it comes for free. So every emitted token is the token that
autoregressive decoding emits with the same seed: whatever was drafted, only the number of passes
changes (greedy at temperature 0). With a canvas of one token there is no draft: that is
autoregressive decoding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode import nats
from mercury_jax.decode.read import draw
from mercury_jax.decode.row import close_thinking
from mercury_jax.decode.sight import begins, counts, ends_text, shape
from mercury_jax.decode.state import Knobs, Program, State, uniforms_at
from mercury_jax.decode.window import paste
from mercury_jax.types import View


def check(
    program: Program, row: State, logits: Float[Array, "L V"], knobs: Knobs
) -> tuple[dict[str, Any], Int[Array, ""], Array]:
    """One row's check: logits[j] predicts the token behind canvas position j.

    Returns what changed of the row, how many tokens were accepted, and the drawn tokens [L].
    """
    at = row.length + 1 + jnp.arange(program.width, dtype=jnp.int32)  # what each logit predicts
    begun = begins(program, row, logits, at, knobs)
    seen = shape(program, knobs.sampler, _view(program, row, begun, at, knobs))
    drawn = draw(seen, uniforms_at(row.key, at), jnp.asarray(knobs.sampler.temperature, jnp.float32))
    count, ended = _accepted(program, row, drawn, knobs)
    known = row.known + count
    end = jnp.where(ended, known - 1, row.total)  # the end of text itself is not part of the text
    new = jnp.arange(program.width) < count
    old = jax.lax.dynamic_slice_in_dim(row.text, row.known, program.width)
    broken = jnp.any(jnp.isnan(seen.sum(-1)) & (at < row.total + 1) & (at <= row.length + row.n))
    fresh: dict[str, Any] = dict(
        text=paste(row.text, jnp.where(new, drawn, old), row.known),
        length=row.length + count,
        known=jnp.where(ended, end, known),
        total=end,
        step=jnp.full_like(row.step, -1),
        tentative=jnp.zeros_like(row.tentative),
        done=ended | (known >= row.total) | broken,
        bad=jnp.where(broken & (row.bad < 0), row.forwards, row.bad),
    )
    fresh |= close_thinking(row, fresh, knobs)
    # Behind a closed thinking the lead is the closing token, which is not encoded.
    fresh["length"] = jnp.minimum(fresh["length"], fresh["known"] - 1)
    if program.logprobs is not None:
        fresh["nats"] = nats.keep(row.nats, logits, drawn, new, row.known)
    return {k: v.astype(getattr(row, k).dtype) if k != "nats" else v for k, v in fresh.items()}, count, drawn


def _accepted(program: Program, row: State, drawn: Array, knobs: Knobs) -> tuple[Array, Bool[Array, ""]]:
    """(how many drawn tokens stand, whether the last of them ends the text)."""
    width = drawn.shape[0]
    draft = jnp.concatenate([row.answer[1:], jnp.full((1,), -1, jnp.int32)])
    agrees = (drawn == draft) & (jnp.arange(width) < row.n - 1)
    count = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32))) + 1
    count = jnp.minimum(count, row.total - row.known)
    ends = ends_text(program, drawn, knobs)
    ends |= (row.reserve > 0) & (knobs.close >= 0) & (drawn == knobs.close)
    first = jnp.min(jnp.where(ends, jnp.arange(width), width))
    return jnp.minimum(count, first + 1).astype(jnp.int32), first < count


def _view(program: Program, row: State, logits: Array, at: Array, knobs: Knobs) -> View:
    """What a shaper sees of predictions: the draft as if it were settled text."""
    said, told = counts(row, program.model.config.vocab)
    canvas = jnp.concatenate([row.answer[1:], row.answer[-1:]])
    inside = at < row.total
    nothing = jnp.zeros_like(inside)
    zero, one = jnp.zeros(()), jnp.ones(())
    return View(
        canvas=canvas, answer=canvas, reading=None, blind=None, logits=logits,  # type: ignore[arg-type]
        editable=inside, masked=nothing, n=row.n, room=jnp.zeros_like(row.n), noise=canvas, t=zero, s=zero,
        keep_t=one, keep_s=one, step=row.step, steps=jnp.ones_like(row.step),
        eos=jnp.where(row.reserve > 0, knobs.close, knobs.eos), at=at[0] - row.prompt, said=said, told=told,
    )  # fmt: skip
