"""Tokens that the causal logits of a pass decide: the first token of the next block, and those that verify a draft.

`fused_commit` and `lookahead` decide the first token of a block with `first_tokens`. `self_speculation` and `drafting`
verify their drafts with `verify`, after the forward pass of `verifying_pass`. That pass feeds the last committed token
and, after it, the draft; the logits at index j then predict the token at position cache_length + 1 + j. So the draft is
`answer[1:]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode.passes import Feed, forward, next_feed
from mercury_jax.decode.state import (
    DecodeConfig,
    Frame,
    State,
    Written,
    close_thinking,
    position_uniforms,
    update_rows,
)
from mercury_jax.decode.token_stats import draw, write_at
from mercury_jax.decode.view import ends_section, process_logits, row_view
from mercury_jax.types import Params


def first_tokens(
    config: DecodeConfig, params: Params, hidden: Any, state: State, feed: Feed, moved: State
) -> State:
    """Decides the first token of the next block from the pass that encoded the block before it.

    With shifted logits, the last position of a finished block predicts the first token of the next one, and in a
    block-causal model no later token changes that prediction. As Fast-dLLM v2 (arXiv 2509.26328; `generate` in the
    checkpoint's modeling.py), this takes the argmax at any temperature. The block is then denoised with this token
    decided.

    Args:
        hidden: Hidden states of each row's window [B, L, ...]; the last position is the end of the encoded block.
    """
    rows = feed.encoding & (state.cache_length + feed.used == state.committed)  # no token follows the block
    logits = config.model.head(params, jax.tree.map(lambda x: x[:, -1:], hidden))
    changes = jax.vmap(functools.partial(_first_token, config))(moved.without_cache(), logits)
    # Skip rows that are finished, or whose next token is known already: given by the user, or part of a draft.
    here = lambda known: jnp.take_along_axis(known, moved.committed[:, None], axis=1)[:, 0]
    rows = rows & (moved.committed < moved.limits.end) & ~here(moved.given) & ~here(moved.draft)
    if not isinstance(moved.sampling.constrained, tuple):
        rows = rows & ~moved.sampling.constrained
    return update_rows(moved, rows, changes)


def _first_token(config: DecodeConfig, row: State, logits: Float[Array, "1 V"]) -> dict[str, Any]:
    """Commits the argmax of these logits as the next token of one row, and returns the fields that change."""
    # Processors see a canvas of one open position, at time 1.
    at, one = row.committed[None], jnp.ones(())
    open_token = jnp.ones((1,), bool)
    blank = jnp.full((1,), config.corruption.mask or 0, jnp.int32)
    view = row_view(
        config, row, canvas=blank, answer=blank, editable=open_token, masked=open_token, used=jnp.int32(1),
        growth=jnp.int32(0), noise=blank, t=one, s=one, alpha_t=one * 0, alpha_s=one * 0, steps=jnp.int32(1),
        position=at[0] - row.prompt,
    )  # fmt: skip
    token = process_logits(config, row, view, at, logits)[1].argmax(-1).astype(jnp.int32)
    ended = ends_section(config, token, row)[0]
    end = jnp.where(ended, row.committed, row.limits.end)  # the end of text itself is no part of the text
    committed = jnp.minimum(row.committed + 1, end)
    changes: dict[str, Any] = dict(
        tokens=write_at(row.tokens, token, row.committed),
        committed=committed,
        limits=row.limits._replace(end=end),
        done=ended | (committed >= end),
    )
    changes |= close_thinking(row, changes)
    written = Written(token, open_token, row.committed, config.corruption.forbidden, logits)
    return like_row(row, changes | {"records": row.records.with_tokens(written)})


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
    # 1. Draw a token after each canvas position. Processors see the draft as decided text, at time 0: draft[j] is the
    #    token at position at[j], one to the right of the input.
    draft, editable = jnp.concatenate([row.answer[1:], row.answer[-1:]]), at < row.limits.end
    zero, one = jnp.zeros(()), jnp.ones(())
    view = row_view(
        config, row, canvas=draft, answer=draft, editable=editable, masked=jnp.zeros_like(editable),
        used=row.used, growth=jnp.zeros_like(row.used), noise=draft, t=zero, s=zero, alpha_t=one, alpha_s=one,
        steps=jnp.ones_like(row.step), position=at[0] - row.prompt,
    )  # fmt: skip
    _, processed = process_logits(config, row, view, at, logits)
    temperature = jnp.asarray(row.sampling.sampler.temperature, jnp.float32)
    place = jnp.arange(config.width)
    exists = place < row.used - 1
    if accept is None:
        drawn = draw(processed, position_uniforms(row.key, at), temperature)
    else:
        drawn = accept(row, processed, proposed, draft, exists, at)
    # 2. Count the accepted tokens: the longest prefix of the draft that agrees with the drawn tokens, plus one. The end
    #    of the row, and a token that ends the text or the thinking section, cut it off.
    agrees = (drawn == draft) & exists
    count = jnp.minimum(jnp.sum(jnp.cumprod(agrees.astype(jnp.int32))) + 1, row.limits.end - row.committed)
    first_end = jnp.min(jnp.where(ends_section(config, drawn, row), place, config.width))
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


def like_row(row: State, changes: dict[str, Any]) -> dict[str, Any]:
    """Converts new values of some fields to the dtypes of these fields."""
    cast = lambda new, old: new.astype(old.dtype)
    return {name: jax.tree.map(cast, x, getattr(row, name)) for name, x in changes.items()}
