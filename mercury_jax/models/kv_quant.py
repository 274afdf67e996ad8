"""A KV cache in 4 or 3 bits per number, after TurboQuant (Zandieh et al., arXiv 2504.19874).

Each vector is multiplied by a fixed random rotation. Its direction is then a random point on the sphere: all
coordinates have the same known density, and there are no outlier coordinates. One scalar codebook that is optimal for
this density therefore suits every vector, and no calibration is needed. The squared error is 0.009 of the vector's
squared norm with 4 bits and 0.034 with 3 bits. The norm is stored in 16 bits.

Keys and values stay rotated in the cache. For keys, <Rq, Rk> = <q, k>: rotating the few queries of a pass replaces
rotating all keys back. For values, a weighted sum of rotated values is the rotated weighted sum, so only the output is
rotated back. The rotation is drawn uniformly from all rotations, for every head size. A signed Hadamard transform would
need fewer operations, but the rotation of so few rows costs little; it also exists only for powers of two, and it maps
a vector with one large coordinate to only two levels, for which the codebook is not optimal.

This format saves memory but no time: vectors are unpacked before the attention. The kernels read int8
(`ops.attention.inputs`) directly; fp8 is widened like this format.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from mercury_jax import ops
from mercury_jax.ops.attention.inputs import AttentionResult, KVArray
from mercury_jax.types import accumulation_dtype

SEED = 2504  # of the rotations; fixed, so that every process reads caches written by another
GRID = 1 << 16  # angles at which the density is tabulated


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("codes", "norm"), meta_fields=("bits", "width")
)
@dataclass(frozen=True)
class RotatedVectors:
    """Vectors x [B, S, G, K], stored as x R = norm * levels[code] in a few bits per number.

    Attributes:
        codes: uint8 [B, S, G, bits * ceil(K / 8)], the bit planes of the codes, lowest bit first. (In a mapped
            tree, `codes` and `norm` may be shapes or shardings.)
        norm: bfloat16 [B, S, G], for the range of fp32. Its error of up to 0.2% is small compared with the 10% of the
            codes.
        bits: Bits per number, 3 or 4.
        width: K, size of a head.
    """

    codes: Any
    norm: Any
    bits: int
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, S, G, K]."""
        return (*self.codes.shape[:-1], self.width)


@functools.cache
def rotation(width: int) -> np.ndarray:
    """Computes the rotation R [K, K] for vectors of K = `width` numbers; the same in every process.

    It is the orthogonal factor of the QR decomposition of a normal matrix, with signs that make the diagonal of the
    triangular factor positive: a uniformly distributed orthogonal matrix (Stewart 1980).
    """
    q, r = np.linalg.qr(np.random.default_rng((SEED, width)).standard_normal((width, width)))
    return q * np.sign(np.diag(r))


@functools.cache
def codebook(width: int, bits: int) -> np.ndarray:
    """Computes the levels with the least squared error for one coordinate of a random unit vector of `width` numbers.

    Lloyd's iteration (1957; 1982): each level moves to the mean of the values that are closer to it than to any other
    level. The coordinate is written as x = -cos(a): the density of the angle a is proportional to sin(a)^(width - 2),
    which has no pole.
    """
    angles = np.linspace(0.0, np.pi, GRID)
    x, density = -np.cos(angles), np.sin(angles) ** (width - 2)
    # Running integrals over the grid: of the density, and of x times the density. Their differences between two cuts
    # give the probability and the mean of the values between the cuts.
    integral = lambda y: np.concatenate([[0.0], np.cumsum((y[1:] + y[:-1]) / 2)])
    mass, moment = integral(density), integral(density * x)
    levels = np.interp((np.arange(1 << bits) + 0.5) / (1 << bits), mass / mass[-1], x)
    for _ in range(10_000):
        cuts = np.concatenate([[-1.0], (levels[1:] + levels[:-1]) / 2, [1.0]])
        means = np.diff(np.interp(cuts, x, moment)) / np.diff(np.interp(cuts, x, mass))
        means = (means - means[::-1]) / 2
        change, levels = np.abs(means - levels).max(), means
        if change < 1e-9 / width**0.5:
            break
    return levels


def pack_bits(codes: Int[Array, "*s K"], bits: int) -> UInt8[Array, "*s P"]:
    """Packs numbers below 2^bits as bit planes."""
    # Plane i holds bit i of every number: [..., bits, K] bits, then [..., bits, ceil(K / 8)] bytes.
    planes = (codes[..., None, :] >> jnp.arange(bits)[:, None]) & 1
    words = jnp.packbits(planes.astype(jnp.uint8), axis=-1)
    return words.reshape(*codes.shape[:-1], -1)


def unpack_bits(words: UInt8[Array, "*s P"], bits: int, width: int) -> UInt8[Array, "*s K"]:
    """Unpacks numbers: the inverse of `pack_bits`."""
    planes = jnp.unpackbits(words.reshape(*words.shape[:-1], bits, -1), axis=-1, count=width)
    return functools.reduce(jnp.bitwise_or, [planes[..., i, :] << i for i in range(bits)])


def quantise_rotated(x: Float[Array, "*s K"], bits: int) -> RotatedVectors:
    """Rotates vectors and rounds them to `bits` bits per number. Zero vectors stay zero."""
    width, dtype = x.shape[-1], accumulation_dtype(x.dtype)
    levels = codebook(width, bits)
    cuts = jnp.asarray((levels[1:] + levels[:-1]) / 2, dtype)
    y = jnp.matmul(x.astype(dtype), jnp.asarray(rotation(width), dtype), precision="highest")
    norm = jnp.linalg.norm(y, axis=-1, keepdims=True)
    # The index of the nearest level is the number of cuts below the coordinate, for a vector of norm 1.
    codes = (y[..., None] > cuts * norm[..., None]).sum(-1)
    return RotatedVectors(pack_bits(codes, bits), norm[..., 0].astype(jnp.bfloat16), bits, width)


def dequantise_rotated(x: RotatedVectors, dtype: DTypeLike) -> Float[Array, "*s K"]:
    """Unpacks vectors to arrays; they stay rotated."""
    levels = jnp.asarray(codebook(x.width, x.bits), dtype)
    return levels[unpack_bits(x.codes, x.bits, x.width)] * x.norm[..., None].astype(dtype)


def attend(
    q: Float[Array, "B T H K"],
    k: KVArray | RotatedVectors,
    v: KVArray | RotatedVectors,
    ranges: Int[Array, "B T R 2"],
    **options: Any,
) -> AttentionResult:
    """Calls `ops.attend` on keys and values that may be `RotatedVectors`.

    Args:
        **options: Keyword arguments of `ops.attend`.
    """
    if not (isinstance(k, RotatedVectors) and isinstance(v, RotatedVectors)):
        return ops.attend(q, k, v, ranges, **options)  # pyright: ignore[reportArgumentType]
    matrix = jnp.asarray(rotation(k.width), q.dtype)
    keys, values = (dequantise_rotated(x, q.dtype) for x in (k, v))
    # Rotate the queries, so that scores with rotated keys are right; rotate the weighted sums of rotated values back.
    found = ops.attend(q @ matrix, keys, values, ranges, **options)
    return (found[0] @ matrix.T, found[1]) if isinstance(found, tuple) else found @ matrix.T
