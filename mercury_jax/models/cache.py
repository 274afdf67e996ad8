"""The KV cache: an explicit value. A slot is an absolute position, the batch axis is first."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.kernels.rounded import Keys, Rounded, rounded
from mercury_jax.types import Cache, Model


class KV(NamedTuple):
    """Keys and values of one layer; as they are, or rounded."""

    k: Keys
    v: Keys


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
