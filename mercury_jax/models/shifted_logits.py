"""Models whose logits are shifted: the hidden state at position i - 1 predicts the token at position i.

Denoisers that were made from autoregressive models may keep the next-token alignment (Dream, DiffuCoder, Fast-dLLM v2).
A canvas then also needs the hidden state of the token before it. Each pass therefore computes that token again, in
front of the canvas, without writing its key. The cache stores the ids of its tokens for this; no hidden state is kept.
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
    """Keys and values of each layer, and the token id of each slot."""

    kv: tuple[kv_cache.KV, ...]
    tokens: Int[Array, "B S"]


def empty_cache(config: ModelConfig, batch: int, slots: int) -> ShiftedCache:
    """Creates a cache of zeros for a model with shifted logits (`Model.empty_cache`)."""
    kv = kv_cache.empty_cache(config, batch, slots)
    return ShiftedCache(kv, jnp.zeros((batch, slots), jnp.int32))


def apply(net: nn.Module, given: PackedPass) -> Array:
    """Runs a pass without a cache, and gives each position the hidden state of the position before it.

    Returns:
        Hidden states [B, T, D], aligned with the tokens that they predict.
    """
    positions = given.positions
    inputs = masks.NetworkInputs(given.tokens, positions, given.ranges, length=positions.max(axis=1) + 1)
    hidden = net(inputs)[0]  # pyright: ignore[reportCallIssue]  # flax names no call of a module
    slot = jnp.arange(given.tokens.shape[1])
    # The position before a canvas is the last clean token that the canvas attends to: the end of its first key range.
    # It is not the slot before the canvas, which may hold the noised end of another canvas. `source` [B, T] is the slot
    # from which each position takes its hidden state; position 0 has no token before it and keeps its own.
    own = given.ranges[:, :, 1]  # range of the canvas itself; empty for clean tokens
    first = (own[..., 0] == slot) & (own[..., 0] < own[..., 1])
    source = jnp.where(first, jnp.maximum(given.ranges[:, :, 0, 1] - 1, 0), jnp.maximum(slot - 1, 0))
    source = jnp.where(positions == 0, slot, source)
    return jnp.take_along_axis(hidden, source[..., None], axis=1)


def forward(net: nn.Module, params: Params, given: Pass) -> tuple[Array, ShiftedCache]:
    """Runs a pass over a cache with the token at start - 1 in front of each row.

    Returns:
        The hidden states [B, T, D] and the cache. In denoising rows, hidden states are aligned with the tokens that
        they predict; encoding rows keep the hidden states of their own positions.
    """
    if given.leave_one_out is not None:
        raise refuse(
            "sampler.rule",
            "leave_one_out",
            "a rule that needs no leave-one-out masks: this model's logits are shifted",
        )
    config: ModelConfig = net.config  # pyright: ignore[reportAttributeAccessIssue]
    tokens, cache, encoding = given.tokens, given.cache, masks.encoded_tokens(given)
    capacity = cache.tokens.shape[1]
    run = masks.cache_pass_inputs(config, given)
    cached = cache.tokens.at[jnp.arange(tokens.shape[0])[:, None], run.slots].set(tokens, mode="drop")
    full = tokens.shape[1] == capacity  # then every row starts at position 0, and no token comes before it
    soft = given.self_cond or None  # set only with soft masking
    if not full:
        soft = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (1, 0), (0, 0)]), soft)
        # Add one token in front; it attends to the same keys as when it was encoded.
        position = jnp.maximum(given.start - 1, 0)[:, None]  # [B, 1]
        used = ((given.start > 0) & (given.used > 0))[:, None]
        stop = given.end if config.pattern == "bidirectional" else given.start
        first = jnp.stack([jnp.zeros_like(stop), stop], axis=-1)[:, None]  # [B, 1, 2]
        ranges = jnp.stack([first, jnp.zeros_like(first)], axis=2) * used[..., None, None]  # [B, 1, 2, 2]
        slot = jnp.full_like(position, capacity)  # its key is written nowhere
        front = masks.NetworkInputs(jnp.take_along_axis(cached, position, axis=1), position, ranges, slot)
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), front, run._replace(length=None))
        run = both._replace(length=run.length)
    found: Any = net.apply({"params": params}, run, cache.kv, soft)
    hidden, kv = found  # [B, T, D], or [B, 1 + T, D] with the token in front
    own = hidden if full else hidden[:, 1:]
    previous = jnp.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1) if full else hidden[:, :-1]
    at_zero = (run.positions if full else run.positions[:, 1:]) == 0
    aligned = jnp.where(encoding[..., None] | at_zero[..., None], own, previous)
    return aligned, ShiftedCache(kv, cached)
