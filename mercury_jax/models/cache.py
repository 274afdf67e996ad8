"""The KV cache as an explicit value. Slot s holds absolute position s; the batch axis comes first.

Keys and values are stored in the dtype of the arithmetic, as int8 (`kernels.attention_inputs`), or in 4 or 3 bits
(`models.kv_quant`). Slots that have not been written may hold any values: no key range of a pass includes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.config import ModelConfig, refuse
from mercury_jax.kernels.attention_inputs import Int8Vectors, KVArray, quantise_int8
from mercury_jax.models.kv_quant import RotatedVectors, quantise_rotated
from mercury_jax.types import Cache, Model

# Quantised formats of the cache: each function converts arrays [..., K].
KV_KINDS: dict[str, Callable[[Array], Int8Vectors | RotatedVectors]] = {
    "int8": quantise_int8,
    "4bit": functools.partial(quantise_rotated, bits=4),
    "3bit": functools.partial(quantise_rotated, bits=3),
}


class KV(NamedTuple):
    """Keys and values of one layer [B, S, G, K], quantised or not."""

    k: KVArray | RotatedVectors
    v: KVArray | RotatedVectors


def empty_cache(
    config: ModelConfig, batch: int, slots: int, shapes: Sequence[tuple[int, int]] | None = None
) -> tuple[KV, ...]:
    """Creates a cache of zeros in the dtype of the arithmetic.

    Args:
        config: Sizes of the model.
        batch: B, number of rows.
        slots: S, length of the longest sequence that fits.
        shapes: (key heads G, head size K) of each layer that has keys; None: the sizes of the config for every layer.

    Returns:
        One `KV` of [B, S, G, K] per layer.
    """
    shapes = [(config.kv_heads, config.head_dim)] * config.layers if shapes is None else shapes
    zeros = lambda shape: jnp.zeros((batch, slots, *shape), jnp.dtype(config.dtype))
    return tuple(KV(zeros(shape), zeros(shape)) for shape in shapes)


def write(kv: KV, k: Float[Array, "B T G K"], v: Float[Array, "B T G K"], slots: Int[Array, "B T"]) -> KV:
    """Writes each token's key and value at its slot.

    Args:
        kv: The cache of one layer.
        k: Keys; this function quantises them if the cache is quantised.
        v: Values.
        slots: Slot of each token. Tokens with slot >= S are not written; unused tokens get such a slot.

    Returns:
        The updated cache.
    """

    if isinstance(kv.k, Int8Vectors):
        new = KV(quantise_int8(k), quantise_int8(v))
    elif isinstance(kv.k, RotatedVectors):
        new = KV(quantise_rotated(k, kv.k.bits), quantise_rotated(v, kv.k.bits))
    else:
        new = KV(k, v)
    write_rows = jax.vmap(lambda old, new, at: old.at[at].set(new.astype(old.dtype), mode="drop"))
    return jax.tree.map(lambda old, new: write_rows(old, new, slots), kv, new)


def check_kv_kind(kind: str | None) -> None:
    """Checks the name of a cache format.

    Args:
        kind: A key of `KV_KINDS`, or None for the dtype of the arithmetic.

    Raises:
        ValueError: For any other value.
    """
    if kind is not None and kind not in KV_KINDS:
        raise refuse("kv", kind, f"{', '.join(map(repr, KV_KINDS))}, or None")


@functools.cache
def with_kv_kind(model: Model, kind: str | None) -> Model:
    """Returns a model that stores its KV cache in another format.

    A key or value of K numbers takes K + 4 bytes in int8, K / 2 + 2 in 4 bits and K * 3 / 8 + 2 in 3 bits.

    Args:
        model: A model.
        kind: "int8", "4bit" or "3bit"; None: the model itself.

    Returns:
        The model; equal arguments give the same object.

    Raises:
        ValueError: `kind` is none of these.
    """
    check_kv_kind(kind)
    if kind is None:
        return model
    return model._replace(empty_cache=functools.partial(_empty_quantised, model.empty_cache, kind))


def _empty_quantised(empty: Callable[[int, int], Cache], kind: str, batch: int, slots: int) -> Cache:
    """Creates the cache of `empty` with each layer's keys and values in the format `kind`, all zeros."""

    quantise: Callable[[Any], Any] = KV_KINDS[kind]
    shapes = jax.eval_shape(
        lambda: jax.tree.map(
            lambda x: KV(quantise(x.k), quantise(x.v)) if isinstance(x, KV) else x,
            empty(batch, slots),
            is_leaf=lambda x: isinstance(x, KV),
        )
    )
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def slot_count(cache: Cache) -> int:
    """Returns S, the number of slots per row, of the cache of any model."""
    return jax.tree.leaves(cache)[0].shape[1]
