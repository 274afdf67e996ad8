"""Models whose logits are shifted: the hidden state at position i - 1 predicts the token at position i.

A denoiser made from an autoregressive model may keep its habit of predicting the next token (Dream, DiffuCoder,
Fast-dLLM v2). The token before the canvas then precedes each pass: it is computed again and its key is written
nowhere. Nothing is carried from pass to pass but the tokens themselves, which the cache stores beside their keys.
`transformer.build` uses these functions for configs with alignment="shifted".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Int

from mercury_jax.config import ModelConfig, refuse
from mercury_jax.models import cache as kv_cache, masks
from mercury_jax.models.ops import training_ops
from mercury_jax.models.tensor_parallel import cache_ops
from mercury_jax.types import Device, PackedPass, Params, Pass


class ShiftedCache(NamedTuple):
    """Keys and values, and the token of each slot."""

    kv: tuple[kv_cache.KV, ...]
    tokens: Int[Array, "B S"]


def empty_cache(config: ModelConfig, batch: int, slots: int) -> ShiftedCache:
    """`Model.empty_cache`: a cache of `slots` positions for each of `batch` rows."""
    dtype = jnp.dtype(config.dtype)
    kv = kv_cache.empty_cache(config.layers, batch, slots, config.kv_heads, config.head_dim, dtype)
    return ShiftedCache(kv, jnp.zeros((batch, slots), jnp.int32))


def apply(
    net: nn.Module,
    params: Params,
    given: PackedPass,
    *,
    mesh: Mesh | None = None,
    device: Device | None = None,
) -> Array:
    """`Model.apply`: each position takes the hidden state of the position before it.

    Args:
        net: The network, a `transformer.Transformer`.
        params: Its parameters.
        given: Packed rows.
        mesh: Of a training step.
        device: To compile kernels for.

    Returns:
        Hidden states [B, T, D], aligned with the tokens that they predict.
    """
    net, positions = net.clone(ops=training_ops(mesh, device)), given.positions
    hidden = net.apply({"params": params}, given.tokens, positions, given.ranges)[0]
    slot = jnp.arange(given.tokens.shape[1])
    previous = jnp.maximum(slot - 1, 0)
    follows = positions[:, previous] == positions - 1
    # A canvas's first token follows the last of the clean tokens that it attends to, the end of its first range.
    source = jnp.where(follows, previous, jnp.maximum(given.ranges[:, :, 0, 1] - 1, 0))
    source = jnp.where(positions == 0, slot, source)
    return jnp.take_along_axis(hidden, source[..., None], axis=1)


def forward(
    net: nn.Module, params: Params, given: Pass, *, mesh: Mesh | None = None, device: Device | None = None
) -> tuple[Array, ShiftedCache]:
    """`Model.forward` with the token before `start` in front of each row.

    Args:
        net: The network, a `transformer.Transformer`, whose config has alignment="shifted".
        params: Its parameters.
        given: Tokens, a `ShiftedCache` and positions.
        mesh: Over which the pass is divided (`tensor_parallel`).
        device: To compile kernels for.

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
    net = net.clone(ops=cache_ops(mesh, device))
    tokens, cache, encoding = given.tokens, given.cache, given.encoding
    capacity = cache.tokens.shape[1]
    run = masks.cache_pass_inputs(config, given, capacity)
    cached = cache.tokens.at[jnp.arange(tokens.shape[0])[:, None], run.slots].set(tokens, mode="drop")
    full = tokens.shape[1] == capacity  # then every row starts at 0, and no token precedes it
    if not full:
        run = _with_previous_token(config, run, cached, given)
    found: Any = net.apply({"params": params}, run.tokens, run.positions, run.ranges, cache.kv, run.slots)
    hidden, kv = found
    own = hidden if full else hidden[:, 1:]
    previous = jnp.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1) if full else hidden[:, :-1]
    at_zero = (run.positions if full else run.positions[:, 1:]) == 0
    aligned = jnp.where(encoding[:, None, None] | at_zero[..., None], own, previous)
    return aligned, ShiftedCache(kv, cached)


def _with_previous_token(
    config: ModelConfig, run: masks.CachePassInputs, cached: Array, given: Pass
) -> masks.CachePassInputs:
    """The pass with one token in front, which attends to the keys that it attended to when it was encoded."""
    position = jnp.maximum(given.start - 1, 0)[:, None]
    used = ((given.start > 0) & (given.used > 0))[:, None]
    stop = given.end if config.pattern == "bidirectional" else given.start
    first = jnp.stack([jnp.zeros_like(stop), stop], axis=-1)[:, None]
    ranges = jnp.stack([first, jnp.zeros_like(first)], axis=2) * used[..., None, None]
    concat = lambda a, b: jnp.concatenate([a, b], axis=1)
    return masks.CachePassInputs(
        concat(jnp.take_along_axis(cached, position, axis=1), run.tokens),
        concat(position, run.positions),
        concat(ranges, run.ranges),
        concat(jnp.full_like(position, cached.shape[1]), run.slots),
        concat(used, run.used),
    )
