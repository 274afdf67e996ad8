"""Rows of 8 bits, each with a scale, which tensor cores multiply natively by matrices of 8 bits.

The kernel of `ops.norms.op` writes norms in this form, and that of `ops.experts.op` copies it. Rows that neither
kernel holds, which are attention outputs and hidden units, are rounded by `ops.norms.op.ROUND_ROWS`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mercury_jax.config import refuse


class QuantisedRows(NamedTuple):
    """Rows x = values * scale.

    Attributes:
        values: int8 or float8_e4m3fn, of the shape of x.
        scale: fp32, without the axes that are contracted.
    """

    values: Array
    scale: Array


Rows = Array | QuantisedRows


def largest(dtype: Any) -> float:
    """The largest number of int8 or float8_e4m3fn that is used; int8 is symmetric."""
    return 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)


def quantise_rows(x: Float[Array, "*s"], dtype: Any, count: int = 1) -> QuantisedRows:
    """Rounds rows to 8 bits, with a scale for each."""
    exact, last = x.astype(jnp.float32), tuple(range(x.ndim - count, x.ndim))
    scale = row_scale(jnp.abs(exact).max(axis=last, keepdims=True), dtype)
    return QuantisedRows(quantised(exact, scale, dtype), scale.squeeze(last))


def row_scale(peak: Array, dtype: Any) -> Array:
    """Computes the scale of a row, also in the registers of a kernel."""
    return jnp.maximum(peak, 1e-12) / largest(dtype)


def quantised(x: Float[Array, "*s"], scale: Array, dtype: Any) -> Array:
    """Rounds numbers to 8 bits, also in the registers of a kernel."""
    values = jnp.minimum(jnp.maximum(x / scale, -largest(dtype)), largest(dtype))
    if dtype == jnp.int8:
        values = jax.lax.round(values, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    return values.astype(dtype)


def dense(x: Rows) -> Array:
    """The array that rows stand for, in bfloat16; arrays as they are."""
    if not isinstance(x, QuantisedRows):
        return x
    scale = x.scale.reshape(*x.scale.shape, *[1] * (x.values.ndim - x.scale.ndim))
    return (x.values.astype(jnp.float32) * scale).astype(jnp.bfloat16)


def refuse_gradient(rounded: bool) -> None:
    """Refuses a gradient through rows that are rounded."""
    if rounded:
        allowed = "int8, fp8 or None, under which rows have a gradient"
        raise refuse("quantise", "int8_dynamic or fp8_dynamic", allowed)
