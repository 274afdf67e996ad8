"""Lossless self-speculation: a diffusion draft, verified by the causal pass of the same weights.

A canvas consists of the last committed token, which is not in the KV cache yet, and the draft after it. One causal
pass over the canvas writes their keys and values, and predicts the next token after each of them. Each prediction is
drawn with the uniform number of its position, as plain autoregressive decoding would draw it. The draft is accepted up
to the first token that differs from its prediction, and the prediction at that place is accepted as well.

Every emitted token is therefore the one that autoregressive decoding emits with the same seed; the draft only changes
the number of passes (LinearSpec; TiDAR, arXiv 2511.08923). A canvas of one token has no draft, and gives autoregressive
decoding. `drafting.py` verifies the drafts of another model by the same pass.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool

from mercury_jax.decode.denoise import denoise, open_canvases
from mercury_jax.decode.methods.causal import verify, verifying_pass
from mercury_jax.decode.state import (
    DecodeConfig,
    Frame,
    Method,
    Rows,
    SamplingParams,
    State,
)
from mercury_jax.types import Params


class Speculation(NamedTuple):
    """The slot of self-speculation in `State.method`."""

    unverified: Bool[Array, "B"]  # the canvas is a finished draft, which waits for its verifying pass


def first_slot(config: DecodeConfig, sampling: SamplingParams, rows: Rows) -> Speculation:
    """Makes the slot before the first pass."""
    return Speculation(jnp.zeros(rows.tokens.shape[:1], bool))


def speculative_step(config: DecodeConfig, params: Params, state: State) -> tuple[State, Frame]:
    """Runs one pass in which rows encode, denoise a draft, or verify one."""
    # 1. A canvas that holds only the last committed token has nothing to denoise: it is verified at once.
    opened = open_canvases(config, state)
    begun = (state.step < 0) & (opened.step >= 0)
    unverified = jnp.where(begun, opened.used <= 1, state.method.unverified)
    # 2. One pass for all rows; those with a finished draft feed it to be verified.
    feed, verifying, hidden, state = verifying_pass(config, params, opened, unverified)
    denoising = ~feed.encoding & ~verifying & ~state.done
    # 3. Some rows take a denoising step on their draft, others commit what the pass has verified.
    moved, frame = denoise(config, params, state, hidden, None, denoising)
    finished, moved = hold_drafts(state, moved, denoising)
    logits = config.model.head(params, hidden)
    moved, frame = verify(config, state, logits, verifying, moved, frame._replace(done=moved.done))
    waiting = jnp.where(verifying, False, jnp.where(denoising, finished, unverified))
    return feed.advance(moved._replace(method=Speculation(waiting))), frame


def hold_drafts(state: State, moved: State, denoising: Bool[Array, "B"]) -> tuple[Bool[Array, "B"], State]:
    """Takes back the commit of drafts that a denoising step has finished: their verifying pass commits them.

    Returns:
        The rows whose draft is finished, and the state in which no row has committed.
    """
    finished = denoising & (moved.step < 0)
    is_nan = moved.records.nan_step != state.records.nan_step
    held = moved._replace(
        tokens=state.tokens, committed=state.committed, limits=state.limits, step=state.step + denoising,
        done=state.done | is_nan,
    )  # fmt: skip
    return finished, held


SELF_SPECULATION = Method(
    "self_speculation",
    speculative_step,
    first_slot,
    # The verifying pass feeds the last committed token as the first one of its canvas, because the logits at its
    # position verify the token after it.
    held_back=1,
    # A draft always takes at least one step: 0 would mean one step per token.
    min_steps=1,
    # A draft is drawn with the uniforms of its verification, so that the two agree more often.
    position_draws=True,
)
