"""A KV cache in 4 or 3 bits per number, after TurboQuant (Zandieh et al., arXiv 2504.19874).

Each vector is multiplied by a fixed random rotation. Its direction is then a random point of the sphere: all
coordinates have the same known density and none is an outlier. So one scalar codebook, optimal for that density,
suits every vector, and no calibration is needed. The squared error is 0.009 of the vector's squared norm with 4 bits
and 0.034 with 3. The norm is stored in 16 bits.

Keys and values stay rotated. <Rq, Rk> = <q, k>, so the few queries of a pass are rotated instead of all keys; a
weighted sum of rotated values is the rotated sum, which is rotated back once. The rotation is drawn uniformly from
all rotations, for every head size. A signed Hadamard transform would need fewer products, but these few rows cost
little; it exists for powers of two only, and maps a vector with one large coordinate to two levels, for which the
codebook is not optimal.

This saves memory, not time: vectors are unpacked before the attention. int8 (`kernels.attention_inputs`) is read by the
kernels.
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

from mercury_jax import kernels
from mercury_jax.kernels.attention_inputs import AttentionResult, KVArray
from mercury_jax.types import accumulation_dtype

SEED = 2504  # of the rotations: keys that one process has written, another reads
GRID = 1 << 16  # angles at which the density is tabulated


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("codes", "norm"), meta_fields=("bits", "width")
)
@dataclass(frozen=True)
class RotatedVectors:
    """Rotated vectors x R = norm * levels[code] [B, S, G, K] in a few bits per number.

    Attributes:
        codes: uint8 [B, S, G, bits * ceil(K / 8)], the bit planes of the codes, lowest first. (Shapes or shardings
            where a tree of them is mapped; likewise `norm`.)
        norm: bfloat16 [B, S, G]. It has the range of fp32; its error of up to 0.2% is small beside the codes' 10%.
        bits: Bits per number, 3 or 4.
        width: K.
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
    """The rotation R [K, K] of vectors of K = `width` numbers, always the same.

    The Q of the QR decomposition of a normal matrix, with R's diagonal made positive (Stewart 1980).
    """
    q, r = np.linalg.qr(np.random.default_rng((SEED, width)).standard_normal((width, width)))
    return q * np.sign(np.diag(r))


@functools.cache
def codebook(width: int, bits: int) -> np.ndarray:
    """The levels of least squared error for a coordinate of a random unit vector of `width` numbers.

    Lloyd's iteration (1957; 1982): each level moves to the mean of the values that are closer to it than to the
    other levels. The density of x = -cos(a) is proportional to sin(a)^(width - 2) in the angle a, without a pole.

    Args:
        width: K.
        bits: Bits per code.

    Returns:
        2^bits levels, ascending and symmetric.
    """
    angles = np.linspace(0.0, np.pi, GRID)
    x, density = -np.cos(angles), np.sin(angles) ** (width - 2)
    # Running integrals over the grid of x: of the density, and of x times the density.
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
    """Packs numbers below 2^bits as bit planes.

    Args:
        codes: The numbers.
        bits: Bits of each.

    Returns:
        P = bits * ceil(K / 8) bytes per vector.
    """
    # Plane i holds bit i of every number: [..., bits, K] bits, then [..., bits, ceil(K / 8)] bytes.
    planes = (codes[..., None, :] >> jnp.arange(bits)[:, None]) & 1
    words = jnp.packbits(planes.astype(jnp.uint8), axis=-1)
    return words.reshape(*codes.shape[:-1], -1)


def unpack_bits(words: UInt8[Array, "*s P"], bits: int, width: int) -> UInt8[Array, "*s K"]:
    """The inverse of `pack_bits`.

    Args:
        words: Packed vectors.
        bits: Bits of each number.
        width: K, numbers of a vector.

    Returns:
        The numbers.
    """
    planes = jnp.unpackbits(words.reshape(*words.shape[:-1], bits, -1), axis=-1, count=width)
    return functools.reduce(jnp.bitwise_or, [planes[..., i, :] << i for i in range(bits)])


def quantise_rotated(x: Float[Array, "*s K"], bits: int) -> RotatedVectors:
    """Rotates vectors and rounds them to `bits` bits per number. Zero vectors stay zero.

    Args:
        x: Keys or values.
        bits: 3 or 4.

    Returns:
        The vectors, rotated.
    """
    width, dtype = x.shape[-1], accumulation_dtype(x.dtype)
    levels = codebook(width, bits)
    cuts = jnp.asarray((levels[1:] + levels[:-1]) / 2, dtype)
    y = jnp.matmul(x.astype(dtype), jnp.asarray(rotation(width), dtype), precision="highest")
    norm = jnp.linalg.norm(y, axis=-1, keepdims=True)
    codes = (y[..., None] > cuts * norm[..., None]).sum(-1)  # index of the nearest level
    return RotatedVectors(pack_bits(codes, bits), norm[..., 0].astype(jnp.bfloat16), bits, width)


def dequantise_rotated(x: RotatedVectors, dtype: DTypeLike) -> Float[Array, "*s K"]:
    """The vectors as numbers, still rotated.

    Args:
        x: Quantised vectors.
        dtype: Of the result.

    Returns:
        [..., K].
    """
    levels = jnp.asarray(codebook(x.width, x.bits), dtype)
    return levels[unpack_bits(x.codes, x.bits, x.width)] * x.norm[..., None].astype(dtype)


def attend(
    q: Float[Array, "B T H K"],
    k: KVArray | RotatedVectors,
    v: KVArray | RotatedVectors,
    ranges: Int[Array, "B T R 2"],
    **options: Any,
) -> AttentionResult:
    """`kernels.attend` for keys and values that may be `RotatedVectors`.

    Args:
        q: Queries.
        k: Keys [B, S, G, K].
        v: Values of the same kind.
        ranges: Key ranges [start, end) of each query.
        **options: As of `kernels.attend`.

    Returns:
        As `kernels.attend`.
    """
    if not (isinstance(k, RotatedVectors) and isinstance(v, RotatedVectors)):
        return kernels.attend(q, k, v, ranges, **options)  # pyright: ignore[reportArgumentType]
    matrix = jnp.asarray(rotation(k.width), q.dtype)
    keys, values = (dequantise_rotated(x, q.dtype) for x in (k, v))
    # Scores need the queries in the rotated coordinates, and the weighted sum of rotated values is rotated back.
    found = kernels.attend(q @ matrix, keys, values, ranges, **options)
    return (found[0] @ matrix.T, found[1]) if isinstance(found, tuple) else found @ matrix.T
