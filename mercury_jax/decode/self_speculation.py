"""Lossless self-speculation: a diffusion draft, verified by the causal pass of the same weights.

The last committed token leads the canvas and is not yet encoded. One encoding pass over this token and the draft writes
their keys and predicts, after each of them, the next token; each prediction is drawn with the uniform of its
position, as plain autoregressive decoding would draw it, and the draft is accepted as far as it agrees. One token
beyond it comes for free. So every emitted token is the one that autoregressive decoding emits with the same seed:
whatever is drafted, only the number of passes changes (LinearSpec; TiDAR, arXiv 2511.08923). With a canvas of one
token there is no draft, and this is autoregressive decoding.

`first_tokens` lets a model of causal blocks with shifted logits decide a block's first token in the same way.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode.decode_config import DecodeConfig
from mercury_jax.decode.drafting import Proposals, accept_or_redraw, proposals
from mercury_jax.decode.state import (
    Frame,
    State,
    close_thinking,
    ends_text,
    position_uniforms,
    update_rows,
)
from mercury_jax.decode.token_stats import (
    LogprobBuffer,
    Trajectory,
    draw,
    draw_log_prob,
    update_logprobs,
    write_at,
    write_changed,
)
from mercury_jax.decode.view import process_logits, row_view
from mercury_jax.types import Params


def first_tokens(
    config: DecodeConfig, params: Params, hidden: Any, rows: Bool[Array, "B"], moved: State
) -> State:
    """Decides the first token of the next block by the pass that has encoded the block before it.

    A model of causal blocks whose logits are shifted predicts that token from the last one of a finished block, which
    no later token changes. Fast-dLLM v2 (arXiv 2509.26328; `generate` in the checkpoint's modeling.py) takes the argmax
    at any temperature, and denoises the block with this token in place.

    Args:
        config: Static sizes.
        params: Of the model.
        hidden: Of each row's window [B, L, ...]; its last position is the last of the encoded block.
        rows: Rows whose block is encoded and that hold no token after it.
        moved: The state after the other rows' steps.

    Returns:
        The state with one more committed token in these rows.
    """
    logits = config.model.head(params, jax.tree.map(lambda x: x[:, -1:], hidden))
    changes = jax.vmap(functools.partial(_first_token, config))(moved.without_cache(), logits)
    here = lambda known: jnp.take_along_axis(known, moved.committed[:, None], axis=1)[:, 0]
    rows = rows & (moved.committed < moved.end) & ~here(moved.given) & ~here(moved.draft)
    if not isinstance(moved.sampling.constrained, tuple):
        rows = rows & ~moved.sampling.constrained
    return update_rows(moved, rows, changes)


def _first_token(config: DecodeConfig, row: State, logits: Float[Array, "1 V"]) -> dict[str, Any]:
    """The fields of one row that change where its next token is the argmax of these logits."""
    at, one = row.committed[None], jnp.ones(())
    open_token = jnp.ones((1,), bool)
    blank = jnp.full((1,), config.corruption.mask or 0, jnp.int32)
    view = row_view(
        config, row, canvas=blank, answer=blank, editable=open_token, masked=open_token, used=jnp.int32(1),
        growth=jnp.int32(0), noise=blank, t=one, s=one, alpha_t=one * 0, alpha_s=one * 0, steps=jnp.int32(1),
        position=at[0] - row.prompt,
    )  # fmt: skip
    token = process_logits(config, row, view, at, logits).argmax(-1).astype(jnp.int32)
    ended = ends_text(config, token, row)[0]
    ended |= (row.answer_budget > 0) & (token[0] == row.sampling.end_thinking)
    end = jnp.where(ended, row.committed, row.end)  # the end of text itself is not part of the text
    committed = jnp.minimum(row.committed + 1, end)
    changes: dict[str, Any] = dict(
        tokens=write_at(row.tokens, token, row.committed),
        committed=committed,
        end=end,
        done=ended | (committed >= end),
    )
    changes |= close_thinking(row, changes)
    changes = {name: x.astype(getattr(row, name).dtype) for name, x in changes.items()}
    if isinstance(row.logprobs, LogprobBuffer):
        changes["logprobs"] = update_logprobs(row.logprobs, logits, token, open_token, row.committed)
    return changes


def verify(
    config: DecodeConfig,
    state: State,
    logits: Float[Array, "B W V"],
    rows: Bool[Array, "B"],
    moved: State,
    frame: Frame,
) -> tuple[State, Frame]:
    """Verifies the drafts of some rows: what agrees becomes text, and one token more.

    Args:
        config: Static sizes.
        state: Before the pass.
        logits: Of the causal pass; logits[:, j] predicts the token after canvas position j.
        rows: Which rows verify.
        moved: The state after the denoising step of the other rows.
        frame: That step's frame.

    Returns:
        The next state and frame, of both kinds of rows.
    """
    row = functools.partial(verify_row, config)
    changes, count, drawn = jax.vmap(row)(state.without_cache(), logits, proposals(config, state))
    moved = update_rows(moved, rows, changes)._replace(nfe=moved.nfe + rows)
    shown = Frame(
        start=state.cache_length + 1,
        used=jnp.where(rows, jnp.minimum(count, moved.end - state.cache_length - 1), 0),
        answer=drawn,
        accepted=jnp.ones(drawn.shape, bool),
        confidence=jax.nn.softmax(logits, axis=-1).max(-1).astype(frame.confidence.dtype),
        done=moved.done,
    )
    return moved, update_rows(frame, rows, shown._asdict())


def verify_row(
    config: DecodeConfig, row: State, logits: Float[Array, "W V"], proposed: Proposals | None = None
) -> tuple[dict[str, Any], Int[Array, ""], Int[Array, "W"]]:
    """Verifies the draft of one row.

    Args:
        config: Static sizes.
        row: One row of a state.
        logits: logits[j] predicts the token after canvas position j.
        proposed: From what another model has drawn the draft, for rejection sampling; None: accept what agrees.

    Returns:
        The fields of the state that change, how many tokens are accepted, and the drawn tokens.
    """
    at = row.cache_length + 1 + jnp.arange(config.width, dtype=jnp.int32)  # what each logit predicts
    # 1. Processors see the draft as if it were decided text, at time 0.
    canvas, editable = jnp.concatenate([row.answer[1:], row.answer[-1:]]), at < row.end
    zero, one = jnp.zeros(()), jnp.ones(())
    view = row_view(
        config, row, canvas=canvas, answer=canvas, editable=editable, masked=jnp.zeros_like(editable),
        used=row.used, growth=jnp.zeros_like(row.used), noise=canvas, t=zero, s=zero, alpha_t=one, alpha_s=one,
        steps=jnp.ones_like(row.step), position=at[0] - row.prompt,
    )  # fmt: skip
    processed = process_logits(config, row, view, at, logits)
    temperature = jnp.asarray(row.sampling.sampler.temperature, jnp.float32)
    place = jnp.arange(config.width)
    draft, exists = jnp.concatenate([row.answer[1:], row.answer[-1:]]), place < row.used - 1
    if proposed is None:
        drawn = draw(processed, position_uniforms(row.key, at), temperature)
    else:
        drawn = accept_or_redraw(row, processed, proposed, draft, exists, at, temperature)
    # 2. How many drawn tokens are accepted: those that agree with the draft and one more, up to the end of the row,
    # and not beyond a token that ends the text.
    agrees = (drawn == draft) & exists
    count = jnp.minimum(jnp.sum(jnp.cumprod(agrees.astype(jnp.int32))) + 1, row.end - row.committed)
    ends = ends_text(config, drawn, row)
    close = row.sampling.end_thinking
    ends |= (row.answer_budget > 0) & (close >= 0) & (drawn == close)
    first_end = jnp.min(jnp.where(ends, place, config.width))
    ended = first_end < count
    count = jnp.minimum(count, first_end + 1).astype(jnp.int32)
    # 3. The row after them.
    committed = row.committed + count
    end = jnp.where(ended, committed - 1, row.end)  # the end of text itself is not part of the text
    new = place < count
    old = jax.lax.dynamic_slice_in_dim(row.tokens, row.committed, config.width)
    inside = (at < row.end + 1) & (at <= row.cache_length + row.used)
    is_nan = jnp.any(jnp.isnan(processed.sum(-1)) & inside)
    changes: dict[str, Any] = dict(
        tokens=write_at(row.tokens, jnp.where(new, drawn, old), row.committed),
        cache_length=row.cache_length + count,
        committed=jnp.where(ended, end, committed),
        end=end,
        step=jnp.full_like(row.step, -1),
        unverified=jnp.zeros_like(row.unverified),
        done=ended | (committed >= row.end) | is_nan,
        nan_step=jnp.where(is_nan & (row.nan_step < 0), row.nfe, row.nan_step),
    )
    changes |= close_thinking(row, changes)
    # After a closed thinking the canvas is led by the closing token, which is not encoded yet.
    changes["cache_length"] = jnp.minimum(changes["cache_length"], changes["committed"] - 1)
    changes = {name: x.astype(getattr(row, name).dtype) for name, x in changes.items()}
    if isinstance(row.logprobs, LogprobBuffer):
        changes["logprobs"] = update_logprobs(row.logprobs, logits, drawn, new, row.committed)
    if isinstance(row.trajectory, Trajectory):
        fresh = Trajectory(jnp.full_like(drawn, row.nfe), draw_log_prob(processed, drawn, temperature))
        write = lambda old, x: write_changed(old, x, new, row.committed)
        changes["trajectory"] = jax.tree.map(write, row.trajectory, fresh)
    return changes, count, drawn
