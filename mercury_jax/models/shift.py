"""Shifted alignment: the denoiser says position i where it reads position i - 1.

A model made of an autoregressive one may keep its habit of predicting the next token (Dream, DiffuCoder,
Fast-dLLM v2). Its logits belong one position further on. What stands in front of a canvas then leads
the pass, read again and written nowhere: nothing is carried from pass to pass but the tokens themselves,
which the cache keeps beside their keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Int

from mercury_jax.config import ModelConfig, refuse
from mercury_jax.models import cache as kv_cache, masks
from mercury_jax.models.ops import sharded_rows
from mercury_jax.models.parallel import ops_over
from mercury_jax.types import Device, PackedPass, Params, Pass


class ShiftedCache(NamedTuple):
    """Keys and values, and the token of each slot."""

    kv: tuple[kv_cache.KV, ...]
    tokens: Int[Array, "B S"]


def empty(config: ModelConfig, batch: int, slots: int) -> ShiftedCache:
    """A cache of `slots` positions per row."""
    dtype = jnp.dtype(config.dtype)
    kv = kv_cache.empty(config.layers, batch, slots, config.kv_heads, config.head_dim, dtype)
    return ShiftedCache(kv, jnp.zeros((batch, slots), jnp.int32))


def apply(
    net: Any, params: Params, given: PackedPass, *, mesh: Mesh | None = None, device: Device | None = None
) -> Array:
    """`Model.apply` of packed rows: each position takes the hidden state of the one before it."""
    net, positions = net.clone(ops=sharded_rows(mesh, device)), given.positions
    hidden = net.apply({"params": params}, given.tokens, positions, given.ranges)[0]
    slot = jnp.arange(given.tokens.shape[1])
    before = jnp.maximum(slot - 1, 0)
    follows = positions[:, before] == positions - 1
    # A canvas's first token follows the clean tokens that its row may see: the last of its first range.
    lead = jnp.where(follows, before, jnp.maximum(given.ranges[:, :, 0, 1] - 1, 0))
    lead = jnp.where(positions == 0, slot, lead)
    return jnp.take_along_axis(hidden, lead[..., None], axis=1)


def forward(
    net: Any, params: Params, given: Pass, *, mesh: Mesh | None = None, device: Device | None = None
) -> tuple[Array, ShiftedCache]:
    """`Model.forward` with the token before `start` in front. Rows that encode keep their own hidden states.

    Raises:
        ValueError: For `leave_one_out`.
    """
    if given.leave_one_out is not None:
        raise refuse(
            "sampler.rule", "blind", "a rule that needs no blind masks: this model's logits are shifted"
        )
    net = net.clone(ops=ops_over(mesh, device))
    tokens, cache, encoding = given.tokens, given.cache, given.encoding
    capacity = cache.tokens.shape[1]
    run = masks.cached_pass(net.config, given, capacity)
    known = cache.tokens.at[jnp.arange(tokens.shape[0])[:, None], run.slots].set(tokens, mode="drop")
    whole = tokens.shape[1] == capacity  # then every row starts at 0, and no token precedes it
    if not whole:
        run = _led(net.config, run, known, given)
    hidden, kv = net.apply({"params": params}, run.tokens, run.positions, run.ranges, cache.kv, run.slots)
    own = hidden if whole else hidden[:, 1:]
    before = jnp.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1) if whole else hidden[:, :-1]
    first = (run.positions if whole else run.positions[:, 1:]) == 0
    return jnp.where(encoding[:, None, None] | first[..., None], own, before), ShiftedCache(kv, known)


def _led(config: ModelConfig, run: masks.NetInputs, known: Array, given: Pass) -> masks.NetInputs:
    """The pass with one token in front, which attends to what it attended to when it was encoded."""
    at = jnp.maximum(given.start - 1, 0)[:, None]
    live = ((given.start > 0) & (given.used > 0))[:, None]
    stop = given.end if config.pattern == "bidirectional" else given.start
    seen = jnp.stack([jnp.zeros_like(stop), stop], axis=-1)[:, None]
    ranges = jnp.stack([seen, jnp.zeros_like(seen)], axis=2) * live[..., None, None]
    join = lambda a, b: jnp.concatenate([a, b], axis=1)
    return masks.NetInputs(
        join(jnp.take_along_axis(known, at, axis=1), run.tokens),
        join(at, run.positions),
        join(ranges, run.ranges),
        join(jnp.full_like(at, known.shape[1]), run.slots),
        join(live, run.live),
    )
