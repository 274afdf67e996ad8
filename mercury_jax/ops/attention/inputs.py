"""Inputs of the attention backends: the record of one call, and keys and values that may be int8 or fp8.

`attention` builds an `AttentionCall`, which is the argument of every backend. The kernels read int8 keys directly; for
fp8 keys, `reference` and `chunked` widen the keys that they read. Formats with fewer bits are unpacked before the
attention (`models.kv_quant`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn, Int, Int8

from mercury_jax.types import Device, accumulation_dtype


class Int8Vectors(NamedTuple):
    """Vectors x = values * scale, with one fp32 scale per position and head."""

    values: Int8[Array, "B S G K"]
    scale: Float[Array, "B S G"]

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, S, G, K]."""
        return self.values.shape


class Fp8Vectors(NamedTuple):
    """Vectors x = values * scale in float8_e4m3fn, with one fp32 scale per position and head.

    The scale is computed from the vector when it is written, so no calibration is needed and no number overflows.
    """

    values: Float8e4m3fn[Array, "B S G K"]
    scale: Float[Array, "B S G"]

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, S, G, K]."""
        return self.values.shape


RoundedVectors = Int8Vectors | Fp8Vectors
KVArray = Float[Array, "B S G K"] | RoundedVectors  # keys or values
# softmax(scores) v [B, T, H, K]; with `residual` also the log-sum-exp of the scores [B, T, H]
AttentionResult = Float[Array, "B T H K"] | tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]


class AttentionCall(NamedTuple):
    """One call of attention, as `attend` passes it to a backend.

    A backend has two functions: `refuses(call)` gives the reason why the backend does not support the call, or None;
    `run(call)` computes the result of `attend`. `refuses` reads only shapes and dtypes, so that the arrays may be
    `jax.ShapeDtypeStruct`.

    Attributes:
        q: Queries; H is a multiple of G.
        k: Keys [B, S, G, K], an array or `RoundedVectors`.
        v: Values, with the shape of k.
        ranges: Key ranges [start, end) of each query.
        scale: Factor of the scores.
        softcap: Scores become softcap * tanh(scores / softcap); None leaves them unchanged.
        residual: Whether to also return the log-sum-exp of each query's scores.
        device: Device to compile for; None: the device of this machine.
    """

    q: Float[Any, "B T H K"]
    k: Float[Any, "_ _ G K"] | RoundedVectors
    v: Float[Any, "_ _ G K"] | RoundedVectors
    ranges: Int[Any, "B T R 2"]
    scale: float
    softcap: float | None = None
    residual: bool = False
    device: Device | None = None

    @property
    def group_rows(self) -> int:
        """Number of rows per key head, T * H / G: one row for each query of each of its query heads."""
        return self.q.shape[1] * (self.q.shape[2] // self.k.shape[2])


def attention_form(q: Any, k: Any, softcap: float | None, gradient: bool = False) -> str:
    """Names the form of the attention kernel for a call, for example "attention-128-bfloat16-int8".

    Args:
        gradient: Whether the call is one without a cache, whose result is differentiable: forward and backward pass
            are one form.
    """
    parts = ["attention", str(q.shape[-1]), str(jnp.dtype(q.dtype))]
    parts += ["int8"] * isinstance(k, Int8Vectors) + ["fp8"] * isinstance(k, Fp8Vectors)
    parts += ["softcap"] * (softcap is not None) + ["gradient"] * gradient
    return "-".join(parts)


def quantise_int8(x: Float[Array, "*s K"]) -> Int8Vectors:
    """Rounds vectors to int8: 255 evenly spaced levels, scaled by the largest magnitude in each vector."""
    x = x.astype(accumulation_dtype(x.dtype))
    scale = jnp.maximum(jnp.abs(x).max(-1), 1e-12) / 127.0
    return Int8Vectors(jnp.rint(x / scale[..., None]).astype(jnp.int8), scale.astype(jnp.float32))


def quantise_fp8(x: Float[Array, "*s K"]) -> Fp8Vectors:
    """Rounds vectors to float8_e4m3fn, scaled so that the largest magnitude in each vector becomes 448, the largest.

    A number keeps 3 bits of mantissa, so its error is at most 1/16 of it, where int8 has at most 1/254 of the largest:
    int8 is the more precise of the two unless a few numbers of a vector are much larger than the others.
    """
    x = x.astype(accumulation_dtype(x.dtype))
    scale = jnp.maximum(jnp.abs(x).max(-1), 1e-12) / float(jnp.finfo(jnp.float8_e4m3fn).max)
    return Fp8Vectors((x / scale[..., None]).astype(jnp.float8_e4m3fn), scale.astype(jnp.float32))


def dequantise(x: KVArray, dtype: DTypeLike) -> Float[Array, "B S G K"]:
    """Converts keys or values to an array of a dtype; multiplies rounded vectors by their scales."""
    if isinstance(x, RoundedVectors):
        return (x.values.astype(x.scale.dtype) * x.scale[..., None]).astype(dtype)
    return x.astype(dtype)
