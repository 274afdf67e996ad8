"""The KV cache as an explicit value. Slot s holds absolute position s; the batch axis comes first.

A layer with a sliding window may keep fewer slots, a ring in which slot s holds the newest position p with p % size = s
(`with_rings`). Keys and values are stored in the dtype of the arithmetic, as int8 or fp8 (`ops.attention.inputs`),
or in 4 or 3 bits (`models.kv_quant`). Slots that have not been written may hold any values: no key range of a pass
includes them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from mercury_jax.config import ModelConfig, refuse
from mercury_jax.models.kv_quant import RotatedVectors, quantise_rotated
from mercury_jax.ops.attention.inputs import (
    Fp8Vectors,
    Int8Vectors,
    KVArray,
    RoundedVectors,
    quantise_fp8,
    quantise_int8,
)
from mercury_jax.sharding import cache_shardings
from mercury_jax.types import Cache, Model

# Quantised formats of the cache: each function converts arrays [..., K].
KV_KINDS: dict[str, Callable[[Array], RoundedVectors | RotatedVectors]] = {
    "int8": quantise_int8,
    "fp8": quantise_fp8,
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

    Returns:
        One `KV` of [B, S, G, K] per layer.
    """
    shapes = [(config.kv_heads, config.head_dim)] * config.layers if shapes is None else shapes
    zeros = lambda shape: jnp.zeros((batch, slots, *shape), jnp.dtype(config.dtype))
    return tuple(KV(zeros(shape), zeros(shape)) for shape in shapes)


def write(kv: KV, k: Float[Array, "B T G K"], v: Float[Array, "B T G K"], slots: Int[Array, "B T"]) -> KV:
    """Writes each token's key and value at its slot."""

    if isinstance(kv.k, Int8Vectors):
        new = KV(quantise_int8(k), quantise_int8(v))
    elif isinstance(kv.k, Fp8Vectors):
        new = KV(quantise_fp8(k), quantise_fp8(v))
    elif isinstance(kv.k, RotatedVectors):
        new = KV(quantise_rotated(k, kv.k.bits), quantise_rotated(v, kv.k.bits))
    else:
        new = KV(k, v)
    return jax.tree.map(lambda old, new: write_rows(old, new, slots), kv, new)


def write_rows(
    cache: Shaped[Array, "B S *w"], new: Shaped[Array, "B T *w"], slots: Int[Array, "B T"]
) -> Shaped[Array, "B S *w"]:
    """Writes an array of each token at its slot of the cache."""
    write = lambda old, new, at: old.at[at].set(new.astype(old.dtype), mode="drop")
    return jax.vmap(write)(cache, new, slots)


def check_kv_kind(kind: str | None) -> None:
    """Checks the name of a cache format."""
    if kind is not None and kind not in KV_KINDS:
        raise refuse("kv", kind, f"{', '.join(map(repr, KV_KINDS))}, or None")


@functools.cache
def with_kv_kind(model: Model, kind: str | None) -> Model:
    """Returns a model that stores its KV cache in another format.

    A key or value of K numbers takes K + 4 bytes in int8 and fp8, K / 2 + 2 in 4 bits and K * 3 / 8 + 2 in 3 bits.
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


# --- rings

LONGEST_PASS = 512  # tokens of a pass for which rings are made, unless the passes are longer
RING_QUANTUM = 128  # ring sizes are multiples: kernels read keys in tiles of up to 128


def ring_size(config: ModelConfig, longest_pass: int) -> int | None:
    """Computes the slots that a layer with a sliding window needs.

    A pass of T tokens overwrites T slots before its first query reads the window behind it. As many slots again allow a
    row to go back by T tokens, when a draft is rejected or a text is cut at a stop text.
    """
    if config.window is None or all(config.is_global(i) for i in range(config.layers)):
        return None
    return math.ceil((config.lookback + 2 * max(longest_pass, LONGEST_PASS)) / RING_QUANTUM) * RING_QUANTUM


def ring_slots(config: ModelConfig, layers: Sequence[KV], tokens: int) -> int | None:
    """Finds the size of the rings of a cache, from its shapes."""
    sizes = {config.is_global(i): kv.k.shape[1] for i, kv in enumerate(layers)}
    size = sizes.get(False)
    if size is None or size == sizes.get(True):
        return None
    if tokens + config.lookback > size and len(sizes) > 1:
        allowed = f"at most {size - config.lookback}, for which the cache of sliding layers was made"
        raise refuse("tokens of a pass", tokens, allowed)
    return size


@functools.cache
def with_rings(model: Model, longest_pass: int) -> Model:
    """Returns a model whose cache has no more slots for a layer with a sliding window than its window needs.

    For passes in which slots are positions, that is, without a cache policy that hides positions.
    """
    size = ring_size(model.config, longest_pass)
    if size is None:
        return model
    return model._replace(empty_cache=functools.partial(_empty_rings, model, size))


def _empty_rings(model: Model, size: int, batch: int, slots: int) -> Cache:
    """Creates the cache of `model` with at most `size` slots in layers with a sliding window, all zeros."""
    if slots <= size:
        return model.empty_cache(batch, slots)
    whole, short = (jax.eval_shape(lambda n=n: model.empty_cache(batch, n)) for n in (slots, size))
    is_layer = lambda x: isinstance(x, KV)
    layers, structure = jax.tree.flatten(whole, is_leaf=is_layer)
    rings = jax.tree.leaves(short, is_leaf=is_layer)
    # `KV` records are in the order of the layers; other leaves have no window.
    numbers = iter(range(len(layers)))
    chosen = [
        ring if is_layer(layer) and not model.config.is_global(next(numbers)) else layer
        for layer, ring in zip(layers, rings, strict=True)
    ]
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), structure.unflatten(chosen))
    if model.mesh is None:
        return cache
    return jax.lax.with_sharding_constraint(cache, cache_shardings(cache, model.mesh))
