"""The KV cache: an explicit value. A slot is an absolute position, the batch axis is first."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from mercury_jax.types import Cache, Model, wide


class Rounded(NamedTuple):
    """Vectors as int8: x = values * scale, one scale for each position and head."""

    values: Int8[Array, "B S G K"]
    scale: Float[Array, "B S G"]


class KV(NamedTuple):
    """Keys and values of one layer; as they are, or rounded."""

    k: Float[Array, "B S G K"] | Rounded
    v: Float[Array, "B S G K"] | Rounded


def empty(layers: int, batch: int, slots: int, heads: int, width: int, dtype: jnp.dtype) -> tuple[KV, ...]:
    """A cache of `slots` positions per row; what it holds is hidden by the ranges until written."""
    shape = (batch, slots, heads, width)
    return tuple(KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers))


def write(kv: KV, k: Float[Array, "B T G K"], v: Float[Array, "B T G K"], slots: Int[Array, "B T"]) -> KV:
    """Store each token at its slot; a slot past the end drops the token (dead positions)."""

    def row(old: Array, new: Array, at: Array) -> Array:
        return old.at[at].set(new.astype(old.dtype), mode="drop", unique_indices=False)

    def store(old: Any, new: Array) -> Any:
        fresh = rounded(new) if isinstance(old, Rounded) else new
        return jax.tree.map(lambda all, some: jax.vmap(row)(all, some, slots), old, fresh)

    return KV(store(kv.k, k), store(kv.v, v))


def read(kv: KV, dtype: Any) -> tuple[Float[Array, "B S G K"], Float[Array, "B S G K"]]:
    """All keys and values of a layer in the dtype of its arithmetic."""
    k, v = (
        (x.values * x.scale[..., None] if isinstance(x, Rounded) else x).astype(dtype) for x in (kv.k, kv.v)
    )
    return k, v


def rounded(x: Float[Array, "*s K"]) -> Rounded:
    """255 levels a vector, its largest number 127 of them."""
    x = x.astype(wide(x.dtype))
    scale = jnp.maximum(jnp.abs(x).max(-1), 1e-12) / 127.0
    return Rounded(jnp.rint(x / scale[..., None]).astype(jnp.int8), scale.astype(jnp.float32))


def int8(model: Model) -> Model:
    """The model with keys and values kept as int8: about a quarter of the memory of fp32, half of bf16."""
    return model._replace(empty_cache=functools.partial(_empty_int8, model.empty_cache))


def _empty_int8(empty: Any, batch: int, slots: int) -> Cache:
    def layer(kv: KV) -> KV:
        zeros = lambda x: Rounded(jnp.zeros(x.shape, jnp.int8), jnp.zeros(x.shape[:-1], jnp.float32))
        return KV(zeros(kv.k), zeros(kv.v))

    return jax.tree.map(layer, empty(batch, slots), is_leaf=lambda x: isinstance(x, KV))


def slots_of(cache: Any) -> int:
    """Slots of a cache, whatever its tree."""
    return jax.tree.leaves(cache)[0].shape[1]
