"""The KV cache: an explicit value. A slot is an absolute position, the batch axis is first."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class KV(NamedTuple):
    """Keys and values of one layer."""

    k: Float[Array, "B S G K"]
    v: Float[Array, "B S G K"]


def empty(layers: int, batch: int, slots: int, heads: int, width: int, dtype: jnp.dtype) -> tuple[KV, ...]:
    """A cache of `slots` positions per row; what it holds is hidden by the ranges until written."""
    shape = (batch, slots, heads, width)
    return tuple(KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers))


def write(kv: KV, k: Float[Array, "B T G K"], v: Float[Array, "B T G K"], slots: Int[Array, "B T"]) -> KV:
    """Store each token at its slot; a slot past the end drops the token (dead positions)."""

    def row(old: Array, new: Array, at: Array) -> Array:
        return old.at[at].set(new.astype(old.dtype), mode="drop", unique_indices=False)

    return KV(jax.vmap(row)(kv.k, k, slots), jax.vmap(row)(kv.v, v, slots))


def slots_of(cache: Any) -> int:
    """Slots of a cache, whatever its tree."""
    return jax.tree.leaves(cache)[0].shape[1]
