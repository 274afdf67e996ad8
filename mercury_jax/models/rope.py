"""Rotary position embeddings, and the norms of heads that come before them, in plain JAX."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mercury_jax.config import RopeScaling
from mercury_jax.models import cache
from mercury_jax.models.norms import inverse_rms, rms_normalise
from mercury_jax.ops.norms import op as fused_norms
from mercury_jax.ops.norms.op import HeadFactors, Projections, Table
from mercury_jax.ops.operation import Op
from mercury_jax.types import accumulation_dtype

Frequencies: TypeAlias = Float[np.ndarray, "C"] | Float[Array, "B 1 1 C"]  # of all rows, or of each
ROPE_TABLE = 1 << 17  # maximum number of cosines in a table; each program holds the table as a constant


def rope(
    x: Float[Array, "B T H K"],
    positions: Int[Array, "B T"],
    frequencies: Frequencies,
    amplitude: float = 1.0,
    context: int | None = None,
) -> Float[Array, "B T H K"]:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split layout of Llama.

    Rotates each pair (x[i], x[i + C]), i < C, by the angle position * frequencies[i]. The other
    dimensions are unchanged.
    """
    return rotate(x, rope_table(positions, frequencies, amplitude, context, accumulation_dtype(x.dtype)))


def rope_table(
    positions: Int[Array, "B T"],
    frequencies: Frequencies,
    amplitude: float = 1.0,
    context: int | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Table:
    """Computes the cosines and sines of `rope`."""
    if (
        isinstance(frequencies, np.ndarray)
        and context is not None
        and context * len(frequencies) <= ROPE_TABLE
    ):
        # Look up cosines in a table: otherwise XLA fuses them into the products, and a CPU computes each cosine again
        # for every head.
        angle = np.arange(context)[:, None] * frequencies
        table = jnp.asarray(amplitude * np.stack([np.cos(angle), np.sin(angle)]), dtype)  # [2, context, C]
        cos, sin = (x.at[positions].get(mode="clip", wrap_negative_indices=False)[:, :, None] for x in table)
        return cos, sin
    angle = positions[..., None, None].astype(dtype) * jnp.asarray(frequencies, dtype)  # [B, T, 1, C]
    return jnp.cos(angle) * amplitude, jnp.sin(angle) * amplitude


def rope_frequencies(
    theta: float, half: int, scaling: RopeScaling | None = None, length: Int[Array, "B"] | None = None
) -> Frequencies:
    """Computes the angle per position of each rotated pair: theta**(-i/half), scaled."""
    plain = float(theta) ** (-np.arange(half) / half)
    if scaling is None:
        return plain
    if scaling.kind == "dynamic":
        if length is None or half < 2:
            return plain
        ratio = jnp.maximum(length[:, None, None, None] / scaling.original, 1.0)
        return plain * (scaling.factor * ratio - (scaling.factor - 1.0)) ** (-np.arange(half) / (half - 1))
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "longrope":
        short, long = (plain / np.asarray(divisors) for divisors in (scaling.short, scaling.long))
        return (
            short
            if length is None
            else jnp.where(length[:, None, None, None] > scaling.original, long, short)
        )
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / plain
        share = (scaling.original / wavelength - scaling.low) / (scaling.high - scaling.low)
        share = np.clip(share, 0.0, 1.0)  # of the plain frequency: 1 for high frequencies, 0 for low ones
        return (1 - share) * plain / scaling.factor + share * plain
    # yarn: blends scaled and plain frequencies (arXiv 2309.00071, equations 17 to 22). `low` and `high` are the indices
    # of the pairs that make `fast` and `slow` rotations over the original context; between them the blend is linear.
    low, high = (
        half * math.log(scaling.original / (turns * 2 * math.pi)) / math.log(theta)
        for turns in (scaling.fast, scaling.slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    # An empty range becomes a step. A range whose bounds are reversed (fewer than `fast` rotations fit into the
    # original context) divides by a negative number, as the reference implementation does.
    ramp = np.clip((np.arange(half) - low) / (high - low or 1e-3), 0.0, 1.0)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def rotate(x: Float[Array, "B T H K"], table: Table) -> Float[Array, "B T H K"]:
    """Applies RoPE: rotates each pair (x[i], x[i + C]), i < C; the other dimensions are unchanged."""
    (cos, sin), half, dtype = table, table[0].shape[-1], accumulation_dtype(x.dtype)
    a, b = x[..., :half].astype(dtype), x[..., half : 2 * half].astype(dtype)
    parts = [a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :].astype(dtype)]
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def norm_rope(
    x: Projections, factors: HeadFactors, table: Table, eps: float
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G K"]]:
    """Normalises the heads of queries, keys and values, and rotates queries and keys."""
    heads = [y for y in x[:3] if y is not None]
    inverse = inverse_rms(heads, eps)
    q, k, v = heads[0], heads[1], heads[-1]
    normed = lambda y, factor, i: (rms_normalise(y, eps, inverse[i]) * factor).astype(y.dtype)
    v = rms_normalise(v, eps, inverse[-1]).astype(v.dtype)
    return rotate(normed(q, factors.q, 0), table), rotate(normed(k, factors.k, 1), table), v


def norm_rope_write(
    x: Projections, factors: HeadFactors, table: Table, kv: Any, slots: Int[Array, "B T"], eps: float
) -> tuple[Float[Array, "B T H K"], cache.KV]:
    """Computes `norm_rope`, and writes keys and values into `kv`, the pair that a layer's cache is."""
    q, k, v = norm_rope(x, factors, table, eps)
    return q, cache.write(cache.KV(*kv), k, v, slots)


NORM_ROPE_WRITE = Op(
    "heads", norm_rope_write, fused_norms.NORM_ROPE_WRITE,
    fallback="sums of squares, a transposition and scatters, by XLA", cases="mercury_jax.ops.norms.cases",
)  # fmt: skip
