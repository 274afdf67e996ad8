"""What the attention backends take: the record of one call, and keys and values that may be int8.

`attention` builds an `AttentionCall` and every backend takes it, so their arguments are described here only. int8 keys
are read by the kernels as they are; formats with fewer bits are unpacked before the attention (`models.kv_quant`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from mercury_jax.types import Device, accumulation_dtype


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
# softmax(scores) v [B, T, H, K]; with `residual` also the log-sum-exp of the scores [B, T, H]
AttentionResult = Float[Array, "B T H K"] | tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]


class AttentionCall(NamedTuple):
    """One call of attention, as `attend` and `attend_paged` pass it to a backend.

    A backend is two functions of a call: `refuses(call)` gives the reason why it does not take it, or None, and
    `run(call)` computes what `attend` returns. `refuses` reads shapes and dtypes only, so that the arrays may be
    `jax.ShapeDtypeStruct`.

    Attributes:
        q: Queries; H is a multiple of G.
        k: Keys [B, S, G, K], an array or `Int8Vectors`. With `pages`, a pool [P, page, G, K].
        v: Values, with the shape of k.
        ranges: Key ranges [start, end) of each query.
        scale: Factor of the scores.
        softcap: Scores become softcap * tanh(scores / softcap); None leaves them unchanged.
        residual: Also return the log-sum-exp of each query's scores.
        device: To compile for; None: the device of this machine.
        pages: With a pool, the pages of each row in order [B, N], all within 0..P-1.
    """

    q: Float[Any, "B T H K"]
    k: Float[Any, "_ _ G K"] | Int8Vectors
    v: Float[Any, "_ _ G K"] | Int8Vectors
    ranges: Int[Any, "B T R 2"]
    scale: float
    softcap: float | None = None
    residual: bool = False
    device: Device | None = None
    pages: Int[Any, "B N"] | None = None

    @property
    def group_rows(self) -> int:
        """Rows of one key head, T * H / G: each of its query heads has a row for each query."""
        return self.q.shape[1] * (self.q.shape[2] // self.k.shape[2])


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


def dequantise(x: KVArray, dtype: DTypeLike) -> Float[Array, "B S G K"]:
    """Multiplies int8 vectors by their scales; arrays are only cast.

    Args:
        x: Keys or values.
        dtype: Of the result.

    Returns:
        The vectors as an array.
    """
    return (x.values * x.scale[..., None] if isinstance(x, Int8Vectors) else x).astype(dtype)
