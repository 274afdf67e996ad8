"""Weight-only quantisation: a matrix as 8-bit values, int8 or fp8, and one scale for each output."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8 as Byte

from mercury_jax.config import refuse

FP8 = jnp.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa, no infinity


class Scaled(NamedTuple):
    """w = values * scale, the scale broadcast over the input axes; the arithmetic stays in the model's dtype."""

    values: Byte[Array, "*inputs *outputs"] | Float[Array, "*inputs *outputs"]  # int8 or float8_e4m3fn
    scale: Float[Array, "*outputs"]


def int8(w: Any, inputs: int, batch: int = 0) -> Scaled:
    """Round w [batch..., in..., out...] to 255 even levels a column: max |w| = 127 steps. numpy in, numpy out.

    inputs: how many axes are contracted; batch: how many stand before them (experts).
    """
    return _scaled(w, inputs, batch, 127.0, lambda x: np.rint(x).astype(np.int8))


def fp8(w: Any, inputs: int, batch: int = 0) -> Scaled:
    """The same as float8_e4m3fn, max |w| at its largest number, 448.

    Small numbers are kept more exactly than as int8, large ones less: within 1/16 of themselves. What a column
    of much different numbers gains, an even one loses.
    """
    return _scaled(w, inputs, batch, float(jnp.finfo(FP8).max), lambda x: x.astype(FP8))


KINDS = {"int8": int8, "fp8": fp8}  # what `quantise=` may be


def _scaled(w: Any, inputs: int, batch: int, most: float, cast: Any) -> Scaled:
    w = np.asarray(w, np.float32)
    axes = tuple(range(batch, batch + inputs))
    scale = np.maximum(np.abs(w).max(axis=axes), 1e-12) / most
    return Scaled(cast(w / np.expand_dims(scale, axes)), scale.astype(np.float32))  # pyright: ignore[reportArgumentType]


def check_whole(params: Any) -> None:
    """Refuse to write parameters that were rounded when they were loaded."""
    for x in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Scaled)):
        if isinstance(x, Scaled):
            kind = "int8" if x.values.dtype == jnp.int8 else "fp8"
            raise refuse("params", kind, "floating parameters: load the model without quantise")


def dense(w: Any, batch: int = 0) -> Array:
    """The fp32 matrix that a Scaled stands for; other arrays as they are."""
    if not isinstance(w, Scaled):
        return w
    inputs = w.values.ndim - w.scale.ndim
    axes = tuple(range(batch, batch + inputs))
    return w.values.astype(jnp.float32) * jnp.expand_dims(w.scale, axes)
