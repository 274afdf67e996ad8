"""Keys and values in 4 or 3 bits a number, after TurboQuant (Zandieh et al., arXiv 2504.19874).

A vector is turned by a fixed random rotation. Whatever it was, its direction is then a random point of the
sphere: each coordinate has the same known density, and none is an outlier. So one scalar codebook, the best for
that density, suits every vector, and nothing is calibrated. Its squared error is 0.009 of the vector's squared
norm with 4 bits and 0.034 with 3. The norm is kept beside it in 16 bits.

Keys and values stay turned. <Rq, Rk> = <q, k>, so that the queries of a pass are turned instead of all keys; a
weighted sum of turned values is the turned sum, and that is turned back once. The rotation is a matrix drawn
evenly from all rotations, for every head size alike. A signed Hadamard transform would need fewer products, but
these few rows are not what costs; it exists for powers of two only, and leaves a vector of one large coordinate
with two levels, which the codebook is not made for.

This saves memory, not time: what is kept is unpacked in front of the attention.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from mercury_jax import kernels
from mercury_jax.types import wide

SEED = 2504  # of the rotations: keys that one process has written, another reads
GRID = 1 << 16  # angles at which the density is tabulated


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("codes", "norm"), meta_fields=("bits", "width")
)
@dataclass(frozen=True)
class Turned:
    """Vectors [B, S, G, K] as x R = norm * levels[code]: `bits` bits a number, and 16 for each norm.

    codes: uint8 [B, S, G, P], bit planes of the codes, the lowest first, each of ceil(K / 8) bytes. norm: bfloat16
    [B, S, G], which has fp32's range; that it is off by up to 0.2% is little beside the codes' 10%.
    """

    codes: Any  # arrays, and shapes or shardings where a tree of them is mapped
    norm: Any
    bits: int
    width: int  # K

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.width)


@functools.cache
def rotation(width: int) -> np.ndarray:
    """R [K, K], orthogonal, always the same: the Q of a normal matrix's QR, its signs made even (Stewart 1980)."""
    q, r = np.linalg.qr(np.random.default_rng((SEED, width)).standard_normal((width, width)))
    return q * np.sign(np.diag(r))


@functools.cache
def codebook(width: int, bits: int) -> np.ndarray:
    """The 2^bits levels of least squared error for a coordinate of a random unit vector, ascending, symmetric.

    Lloyd's iteration (1957; 1982): each level moves to the mean of what is nearer to it than to the others. The
    density of x = -cos(a) is proportional to sin(a)^(width - 2) in the angle, without a pole at either end.
    """
    angles = np.linspace(0.0, np.pi, GRID)
    x, weight = -np.cos(angles), np.sin(angles) ** (width - 2)
    steps = lambda y: np.concatenate([[0.0], np.cumsum((y[1:] + y[:-1]) / 2)])
    mass, moment = steps(weight), steps(weight * x)
    levels = np.interp((np.arange(1 << bits) + 0.5) / (1 << bits), mass / mass[-1], x)
    for _ in range(10_000):
        cuts = np.concatenate([[-1.0], (levels[1:] + levels[:-1]) / 2, [1.0]])
        better = np.diff(np.interp(cuts, x, moment)) / np.diff(np.interp(cuts, x, mass))
        better = (better - better[::-1]) / 2
        moved, levels = np.abs(better - levels).max(), better
        if moved < 1e-9 / width**0.5:
            break
    return levels


def packed(codes: Int[Array, "*s K"], bits: int) -> UInt8[Array, "*s P"]:
    """Numbers below 2^bits as bit planes, bits * ceil(K / 8) bytes."""
    planes = (codes[..., None, :] >> jnp.arange(bits)[:, None]) & 1
    words = jnp.packbits(planes.astype(jnp.uint8), axis=-1)
    return words.reshape(*codes.shape[:-1], -1)


def unpacked(words: UInt8[Array, "*s P"], bits: int, width: int) -> UInt8[Array, "*s K"]:
    """What was packed."""
    planes = jnp.unpackbits(words.reshape(*words.shape[:-1], bits, -1), axis=-1, count=width)
    return functools.reduce(jnp.bitwise_or, [planes[..., i, :] << i for i in range(bits)])


def turned(x: Float[Array, "*s K"], bits: int) -> Turned:
    """Vectors as `bits` bits a number. Vectors of zeros stay zeros."""
    width, kind = x.shape[-1], wide(x.dtype)
    levels = codebook(width, bits)
    cuts = jnp.asarray((levels[1:] + levels[:-1]) / 2, kind)
    y = jnp.matmul(x.astype(kind), jnp.asarray(rotation(width), kind), precision="highest")
    norm = jnp.linalg.norm(y, axis=-1, keepdims=True)
    codes = (y[..., None] > cuts * norm[..., None]).sum(-1)
    return Turned(packed(codes, bits), norm[..., 0].astype(jnp.bfloat16), bits, width)


def still_turned(x: Turned, dtype: Any) -> Float[Array, "*s K"]:
    """The vectors that are kept, as they are kept: turned."""
    levels = jnp.asarray(codebook(x.width, x.bits), dtype)
    return levels[unpacked(x.codes, x.bits, x.width)] * x.norm[..., None].astype(dtype)


def attend(q: Float[Array, "B T H K"], k: Any, v: Any, ranges: Int[Array, "B T R 2"], **how: Any) -> Any:
    """`kernels.attend`, whose keys and values may be Turned, too."""
    if not isinstance(k, Turned):
        return kernels.attend(q, k, v, ranges, **how)
    turn = jnp.asarray(rotation(k.width), q.dtype)
    keys, values = (still_turned(x, q.dtype) for x in (k, v))
    found = kernels.attend(q @ turn, keys, values, ranges, **how)
    back = lambda out: out @ turn.T
    return (back(found[0]), found[1]) if isinstance(found, tuple) else back(found)
