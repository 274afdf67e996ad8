"""Keys and values as int8 with one scale per vector: what a KV cache may hold, and what the attention kernels read.

Formats with fewer bits, which are unpacked before the attention, are in `models.kv_quant`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from mercury_jax.types import accumulation_dtype


class Int8Vectors(NamedTuple):
    """Vectors x = values * scale, with one scale for each position and head."""

    values: Int8[Array, "B S G K"]
    scale: Float[Array, "B S G"]

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, S, G, K]."""
        return self.values.shape


KVArray = Float[Array, "B S G K"] | Int8Vectors  # keys or values
KVPool = Float[Array, "P page G K"] | Int8Vectors  # the same, in pages that rows share


def quantise_int8(x: Float[Array, "*s K"]) -> Int8Vectors:
    """Rounds vectors to int8, 255 evenly spaced levels up to the largest number of each.

    Args:
        x: Vectors.

    Returns:
        Values and fp32 scales.
    """
    x = x.astype(accumulation_dtype(x.dtype))
    scale = jnp.maximum(jnp.abs(x).max(-1), 1e-12) / 127.0
    return Int8Vectors(jnp.rint(x / scale[..., None]).astype(jnp.int8), scale.astype(jnp.float32))


def dequantise(x: KVArray, dtype: jnp.dtype) -> Array:
    """Vectors, quantised or not, as an array [..., K] of `dtype`."""
    return (x.values * x.scale[..., None] if isinstance(x, Int8Vectors) else x).astype(dtype)


def slice_slots(x: KVArray, start: int | Int[Array, ""], size: int) -> Float[Array, "B size G K"] | Int8Vectors:
    """Cuts a run of cache slots out of keys or values.

    Args:
        x: Keys or values, [B, S, G, K].
        start: First slot; may be traced. Clamped so that the run ends at S at the latest.
        size: Number of slots; static.

    Returns:
        Keys or values in the form of `x`, [B, size, G, K].
    """
    return jax.tree.map(lambda y: jax.lax.dynamic_slice_in_dim(y, start, size, 1), x)
