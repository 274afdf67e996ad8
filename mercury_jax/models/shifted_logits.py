"""Models whose logits are shifted: the hidden state at position i - 1 predicts the token at position i.

A denoiser made from an autoregressive model may keep its habit of predicting the next token (Dream, DiffuCoder,
Fast-dLLM v2). The token before the canvas then precedes each pass: it is computed again and its key is written
nowhere. Nothing is carried from pass to pass but the tokens themselves, which the cache stores beside their keys.
`transformer.build` uses these functions for configs with alignment="shifted".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from mercury_jax.config import ModelConfig, refuse
from mercury_jax.models import cache as kv_cache, masks
from mercury_jax.types import PackedPass, Params, Pass


class ShiftedCache(NamedTuple):
    """Keys and values, and the token of each slot."""

    kv: tuple[kv_cache.KV, ...]
    tokens: Int[Array, "B S"]


def empty_cache(config: ModelConfig, batch: int, slots: int) -> ShiftedCache:
    """`Model.empty_cache` of a model with shifted logits.

    Args:
        config: Sizes of the model.
        batch: B, number of rows.
        slots: S, positions of each row.

    Returns:
        A cache of zeros.
    """
    kv = kv_cache.empty_cache(config, batch, slots)
    return ShiftedCache(kv, jnp.zeros((batch, slots), jnp.int32))


def apply(net: nn.Module, given: PackedPass) -> Array:
    """A pass without a cache in which each position takes the hidden state of the position before it.

    Args:
        net: The network, a `transformer.Transformer` that is bound to its parameters.
        given: Packed rows.

    Returns:
        Hidden states [B, T, D], aligned with the tokens that they predict.
    """
    positions = given.positions
    inputs = masks.NetworkInputs(given.tokens, positions, given.ranges)
    hidden = net(inputs)[0]  # pyright: ignore[reportCallIssue]  # flax names no call of a module
    slot = jnp.arange(given.tokens.shape[1])
    # A canvas's first token follows the last of the clean tokens that it attends to, the end of its first range: the
    # slot before it may hold the noised end of another canvas.
    own = given.ranges[:, :, 1]  # of a canvas after clean tokens; empty elsewhere
    first = (own[..., 0] == slot) & (own[..., 0] < own[..., 1])
    source = jnp.where(first, jnp.maximum(given.ranges[:, :, 0, 1] - 1, 0), jnp.maximum(slot - 1, 0))
    source = jnp.where(positions == 0, slot, source)
    return jnp.take_along_axis(hidden, source[..., None], axis=1)


def forward(net: nn.Module, params: Params, given: Pass) -> tuple[Array, ShiftedCache]:
    """A pass over a cache with the token before `start` in front of each row.

    Args:
        net: The network, a `transformer.Transformer`, whose config has alignment="shifted".
        params: Its parameters.
        given: Tokens, a `ShiftedCache` and positions.

    Returns:
        Hidden states [B, T, D], aligned with the tokens that they predict in denoising rows; encoding rows keep
        those of their own positions. And the cache.

    Raises:
        ValueError: For `leave_one_out`.
    """
    if given.leave_one_out is not None:
        raise refuse(
            "sampler.rule",
            "leave_one_out",
            "a rule that needs no leave-one-out masks: this model's logits are shifted",
        )
    config: ModelConfig = net.config  # pyright: ignore[reportAttributeAccessIssue]
    tokens, cache, encoding = given.tokens, given.cache, given.encoding
    capacity = cache.tokens.shape[1]
    run = masks.cache_pass_inputs(config, given, capacity)
    cached = cache.tokens.at[jnp.arange(tokens.shape[0])[:, None], run.slots].set(tokens, mode="drop")
    full = tokens.shape[1] == capacity  # then every row starts at 0, and no token precedes it
    soft = given.self_cond or None  # of models with soft masking
    if not full:
        soft = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (1, 0), (0, 0)]), soft)
        # One token in front, which attends to the keys that it attended to when it was encoded.
        position = jnp.maximum(given.start - 1, 0)[:, None]  # [B, 1]
        used = ((given.start > 0) & (given.used > 0))[:, None]
        stop = given.end if config.pattern == "bidirectional" else given.start
        first = jnp.stack([jnp.zeros_like(stop), stop], axis=-1)[:, None]  # [B, 1, 2]
        ranges = jnp.stack([first, jnp.zeros_like(first)], axis=2) * used[..., None, None]  # [B, 1, 2, 2]
        slot = jnp.full_like(position, capacity)  # its key is written nowhere
        front = masks.NetworkInputs(jnp.take_along_axis(cached, position, axis=1), position, ranges, slot)
        run = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), front, run)
    found: Any = net.apply({"params": params}, run, cache.kv, soft)
    hidden, kv = found  # [B, T, D], or [B, 1 + T, D] with the token in front
    own = hidden if full else hidden[:, 1:]
    previous = jnp.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1) if full else hidden[:, :-1]
    at_zero = (run.positions if full else run.positions[:, 1:]) == 0
    aligned = jnp.where(encoding[:, None, None] | at_zero[..., None], own, previous)
    return aligned, ShiftedCache(kv, cached)
