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

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode.denoise import denoise, open_canvases
from mercury_jax.decode.passes import Feed, forward, next_feed
from mercury_jax.decode.state import (
    DecodeConfig,
    Frame,
    Method,
    Rows,
    SamplingParams,
    State,
    Written,
    close_thinking,
    like_row,
    position_uniforms,
    update_rows,
)
from mercury_jax.decode.token_stats import draw, write_at
from mercury_jax.decode.view import ends_text, process_logits, row_view
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


def verifying_pass(
    config: DecodeConfig, params: Params, state: State, unverified: Bool[Array, "B"]
) -> tuple[Feed, Bool[Array, "B"], Any, State]:
    """Runs the pass: (what rows feed, which of them verify, hidden states, the state with the new cache)."""
    feed = next_feed(config, state)
    verifying = unverified & ~state.done
    tokens = jnp.where(verifying[:, None], state.answer, feed.tokens)
    hidden, _, state = forward(config, params, state, tokens, feed.used, feed.encoding | verifying)
    return feed, verifying, hidden, state


def idle_frame(state: State) -> Frame:
    """Makes the frame of a verifier before its verifying pass, in which no row denoised."""
    zeros = jnp.zeros_like(state.used)
    confidence = jnp.zeros(state.answer.shape, jnp.float32)
    accepted = jnp.zeros(state.answer.shape, bool)
    return Frame(state.cache_length + 1, zeros, state.answer, accepted, confidence, state.done)


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


# accept(row, logits [W, V], proposed, draft [W], which of it exists [W], positions [W]) -> tokens [W]
Accept = Callable[[State, Array, Any, Array, Array, Array], Array]


def verify(
    config: DecodeConfig,
    state: State,
    logits: Float[Array, "B W V"],
    rows: Bool[Array, "B"],
    moved: State,
    frame: Frame,
    accept: Accept | None = None,
    proposed: Any = (),
) -> tuple[State, Frame]:
    """Verifies the drafts of some rows, and commits the accepted tokens plus one.

    Args:
        moved: The state after the pass, in which these rows have not changed yet.
        accept: Draws the tokens by the distributions of another model; None: see `verify_row`.
        proposed: These distributions, leaves [B, ...].
    """
    row = functools.partial(verify_row, config, accept)
    changes, count, drawn = jax.vmap(row)(state.without_cache(), logits, proposed)
    moved = update_rows(moved, rows, changes)
    moved = moved._replace(records=moved.records._replace(nfe=moved.nfe + rows))
    start, accepted = state.cache_length + 1, jnp.ones(drawn.shape, bool)
    # At least one: a pass that finds only the end of text counts as a pass of the row, too.
    used = jnp.where(rows, jnp.clip(moved.limits.end - start, 1, count), 0)
    confidence = jax.nn.softmax(logits, axis=-1).max(-1).astype(frame.confidence.dtype)
    shown = Frame(start, used, drawn, accepted, confidence, moved.done)
    return moved, update_rows(frame, rows, shown._asdict())


def verify_row(
    config: DecodeConfig, accept: Accept | None, row: State, logits: Float[Array, "W V"], proposed: Any
) -> tuple[dict[str, Any], Int[Array, ""], Int[Array, "W"]]:
    """Verifies the draft of one row.

    Without `accept`, tokens are drawn from the logits, and the draft is accepted as far as it equals them.

    Returns:
        The fields of the state that change, the number of accepted tokens, and the drawn tokens [W].
    """
    at = row.cache_length + 1 + jnp.arange(config.width, dtype=jnp.int32)  # positions that the logits predict
    # 1. Draw a token after each canvas position. Processors see the draft as decided text, at time 0: canvas[j] is the
    #    draft token at position at[j], one to the right of the input.
    canvas, editable = jnp.concatenate([row.answer[1:], row.answer[-1:]]), at < row.limits.end
    zero, one = jnp.zeros(()), jnp.ones(())
    view = row_view(
        config, row, canvas=canvas, answer=canvas, editable=editable, masked=jnp.zeros_like(editable),
        used=row.used, growth=jnp.zeros_like(row.used), noise=canvas, t=zero, s=zero, alpha_t=one, alpha_s=one,
        steps=jnp.ones_like(row.step), position=at[0] - row.prompt,
    )  # fmt: skip
    _, processed = process_logits(config, row, view, at, logits)
    temperature = jnp.asarray(row.sampling.sampler.temperature, jnp.float32)
    place = jnp.arange(config.width)
    draft, exists = jnp.concatenate([row.answer[1:], row.answer[-1:]]), place < row.used - 1
    if accept is None:
        drawn = draw(processed, position_uniforms(row.key, at), temperature)
    else:
        drawn = accept(row, processed, proposed, draft, exists, at)
    # 2. Count the accepted tokens: the longest prefix of the draft that agrees with the drawn tokens, plus one. The end
    #    of the row, and a token that ends the text or the thinking section, cut it off.
    agrees = (drawn == draft) & exists
    count = jnp.minimum(jnp.sum(jnp.cumprod(agrees.astype(jnp.int32))) + 1, row.limits.end - row.committed)
    ends = ends_text(config, drawn, row)
    close = row.sampling.end_thinking
    ends |= (row.limits.answer_budget > 0) & (close >= 0) & (drawn == close)
    first_end = jnp.min(jnp.where(ends, place, config.width))
    ended = first_end < count
    count = jnp.minimum(count, first_end + 1).astype(jnp.int32)
    # 3. Commit them. The pass has written keys for the whole draft; `cache_length` keeps those of the accepted tokens.
    committed = row.committed + count
    end = jnp.where(ended, committed - 1, row.limits.end)  # the end of text itself is not part of the text
    new = place < count
    old = jax.lax.dynamic_slice_in_dim(row.tokens, row.committed, config.width)
    # NaN logits beyond the draft, from unused positions, are no error.
    inside = (at < row.limits.end + 1) & (at <= row.cache_length + row.used)
    is_nan = jnp.any(jnp.isnan(processed.sum(-1)) & inside)
    changes: dict[str, Any] = dict(
        tokens=write_at(row.tokens, jnp.where(new, drawn, old), row.committed),
        cache_length=row.cache_length + count,
        committed=jnp.where(ended, end, committed),
        limits=row.limits._replace(end=end),
        step=jnp.full_like(row.step, -1),
        done=ended | (committed >= row.limits.end) | is_nan,
    )
    changes |= close_thinking(row, changes)
    # If the thinking section was closed, its closing token is the last committed one and is not encoded yet.
    changes["cache_length"] = jnp.minimum(changes["cache_length"], changes["committed"] - 1)
    written = Written(drawn, new, row.committed, config.corruption.forbidden, logits, processed, temperature)
    records = row.records.with_nan(is_nan).with_tokens(written)
    return like_row(row, changes | {"records": records}), count, drawn


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
