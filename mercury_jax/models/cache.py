"""The KV cache: an explicit value. A slot is an absolute position, the batch axis is first."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.config import refuse
from mercury_jax.kernels.rounded import Keys, Rounded, rounded
from mercury_jax.models.turbo import Turned, turned
from mercury_jax.types import Cache, Model

# What keys and values may be kept as, beside the dtype of the arithmetic: how a vector becomes it.
KINDS = {
    "int8": rounded,
    "4bit": functools.partial(turned, bits=4),
    "3bit": functools.partial(turned, bits=3),
}


class KV(NamedTuple):
    """Keys and values of one layer; as they are, or in few bits."""

    k: Keys | Turned
    v: Keys | Turned


def empty(layers: int, batch: int, slots: int, heads: int, width: int, dtype: jnp.dtype) -> tuple[KV, ...]:
    """A cache of `slots` positions per row; what it holds is hidden by the ranges until written."""
    shape = (batch, slots, heads, width)
    return tuple(KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers))


def write(kv: KV, k: Float[Array, "B T G K"], v: Float[Array, "B T G K"], slots: Int[Array, "B T"]) -> KV:
    """Store each token at its slot; a slot past the end drops the token (dead positions)."""

    def row(old: Array, new: Array, at: Array) -> Array:
        return old.at[at].set(new.astype(old.dtype), mode="drop", unique_indices=False)

    def store(old: Any, new: Any) -> Any:
        if isinstance(old, Rounded):
            new = rounded(new)
        elif isinstance(old, Turned):
            new = turned(new, old.bits)
        return jax.tree.map(lambda all, some: jax.vmap(row)(all, some, slots), old, new)

    return KV(store(kv.k, k), store(kv.v, v))


def check_kind(kind: str | None) -> None:
    """Refuse what keys and values cannot be kept as."""
    if kind is not None and kind not in KINDS:
        raise refuse("kv", kind, f"{', '.join(map(repr, KINDS))}, or None")


@functools.cache
def kept(model: Model, kind: str | None) -> Model:
    """The model with keys and values kept as "int8", "4bit" or "3bit"; None: as it is. Equal models give the same.

    Of a head of K numbers int8 takes K + 4 bytes, the others K / 2 + 2 and K * 3 / 8 + 2.
    """
    check_kind(kind)
    return (
        model
        if kind is None
        else model._replace(empty_cache=functools.partial(_empty, model.empty_cache, kind))
    )


def int8(model: Model) -> Model:
    """The model with keys and values kept as int8: about a quarter of the memory of fp32, half of bf16."""
    return kept(model, "int8")


def bits(model: Model, count: int) -> Model:
    """The model with keys and values kept in 4 or 3 bits a number (`models.turbo`)."""
    return kept(model, f"{count}bit")


def _empty(empty: Any, kind: str, batch: int, slots: int) -> Cache:
    """Zeros of what each layer's keys and values become, whatever `empty` would keep; all else is zeros, too."""

    def zeros(x: Any) -> Any:
        found = jax.eval_shape(KINDS[kind], jax.ShapeDtypeStruct(x.shape, jnp.float32))
        return jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), found)

    def one(x: Any) -> Any:
        return KV(zeros(x.k), zeros(x.v)) if isinstance(x, KV) else jnp.zeros(x.shape, x.dtype)

    return jax.tree.map(one, jax.eval_shape(lambda: empty(batch, slots)), is_leaf=lambda x: isinstance(x, KV))


def slots_of(cache: Any) -> int:
    """Slots of a cache, whatever its tree."""
    return jax.tree.leaves(cache)[0].shape[1]
