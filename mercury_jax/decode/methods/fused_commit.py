"""Passes that write a finished block to the KV cache and also begin the next block.

In a plain decoder these are two passes (`denoise.plain_step`): a block of n steps takes n + 1 of them.

`fused_commit`: one pass feeds the committed tokens and, after them, the new canvas. In each layer the keys of the
committed tokens are written before the canvas attends to them, so the canvas sees what it would see one pass later, and
the tokens are the same. The pass is twice as wide as a canvas: it pays where a pass waits for the weights, as with few
rows on a GPU or TPU.

`SEEDED`: for block-causal models with shifted logits, the pass over a finished block also decides the first token of
the next one (Fast-dLLM v2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from mercury_jax.decode.denoise import denoise, open_canvases, plain_step
from mercury_jax.decode.methods.causal import first_tokens
from mercury_jax.decode.passes import alternate, forward, next_feed, slice_rows, times, unpack_state
from mercury_jax.decode.state import DecodeConfig, Frame, Method, State, Step
from mercury_jax.decode.view import window_offset
from mercury_jax.types import Params, Pass


def fused_commit(rows: int) -> Method:
    """Makes the method that fuses both passes in batches of at most `rows` rows."""
    return Method("fused_commit", fused_step, settings=rows, loop=repeat_fused)


def fused_step(config: DecodeConfig, params: Params, state: State) -> tuple[State, Frame]:
    """Runs one pass: a wide one where a small batch begins a block, otherwise a plain one."""
    if len(state.done) > config.method.settings:
        return plain_step(config, params, state)
    wide, plain = (functools.partial(run, config, params) for run in (wide_step, plain_step))
    return jax.lax.cond(begins(config, state), wide, plain, state)


def repeat_fused(
    config: DecodeConfig, going: Callable[[Any], Array], advance: Callable[[Step, Any], Any], carry: Any
) -> Any:
    """Repeats passes on the device; see `passes.repeat`."""
    if carry[1].counters.shape[1] > config.method.settings:
        return jax.lax.while_loop(going, functools.partial(advance, plain_step), carry)
    wide = lambda carry: begins(config, unpack_state(carry[1]))
    return alternate(going, wide, advance, (wide_step, plain_step), carry)


def begins(config: DecodeConfig, state: State) -> Bool[Array, ""]:
    """Returns whether the next pass is a wide one: whether a row then encodes the last of its committed tokens."""
    behind = config.encodable(state.committed) - state.cache_length
    return jnp.any((behind > 0) & (behind <= config.width) & ~state.done)


def wide_step(config: DecodeConfig, params: Params, state: State) -> tuple[State, Frame]:
    """Runs one pass of 2W tokens, in which each row feeds what it has to encode, and then its canvas."""
    # 1. Each row encodes up to W committed tokens. A row that has encoded all of them opens a canvas after them.
    start, width, running = state.cache_length, config.width, ~state.done
    encodable = config.encodable(state.committed)
    encoded = jnp.clip(encodable - start, 0, width) * running  # [B]
    state = open_canvases(config, state._replace(cache_length=start + encoded))
    denoising = running & (state.cache_length >= encodable)

    # 2. One pass: token j of a row is the committed token at start + j, or position j - encoded of its canvas.
    at = jnp.arange(2 * width)
    committed = at < encoded[:, None]  # [B, 2W]
    column = jnp.clip(at - encoded[:, None], 0, width - 1)
    beside = jax.vmap(lambda canvas, column: canvas[column])
    slots = jnp.minimum(start[:, None] + at, state.tokens.shape[1] - 1)
    tokens = jnp.where(
        committed, jnp.take_along_axis(state.tokens, slots, axis=1), beside(state.canvas, column)
    )
    used = encoded + jnp.where(denoising, state.used, 0)

    def on_canvas(x: Array) -> Array:  # the self-conditioning [B, W, D], for the canvas only
        return jnp.where(committed[..., None], 0, beside(x, column)).astype(x.dtype)

    time = times(config, state, ~denoising)
    given = Pass(
        tokens, state.cache, start, used, start + used, committed, jax.tree.map(on_canvas, state.self_cond),
        None if time is None else jnp.where(committed, 0.0, time[:, None]), length=state.limits.max_end,
    )  # fmt: skip
    hidden, cache = config.model.forward(params, given)

    # 3. The canvas of each row begins after what the row has encoded.
    offset = encoded + window_offset(config, state.cache_length, state.committed)
    window: Any = slice_rows(hidden, offset, config.window)
    return denoise(config, params, state._replace(cache=cache), window, None, denoising)


# --- the first token of a block


def seeded_step(config: DecodeConfig, params: Params, state: State) -> tuple[State, Frame]:
    """Runs one pass as `plain_step`; the pass that encodes a block also decides the first token of the next one."""
    state = open_canvases(config, state)
    feed = next_feed(config, state)
    hidden, leave_one_out, state = forward(config, params, state, *feed)
    moved, frame = denoise(config, params, state, hidden, leave_one_out, ~feed.encoding & ~state.done)
    return feed.advance(first_tokens(config, params, hidden, state, feed, moved)), frame


SEEDED = Method("seeded", seeded_step)
