"""Weight-only int8: a matrix as int8 values and one scale for each output."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8 as Byte


class Int8(NamedTuple):
    """w = values * scale, the scale broadcast over the input axes; the arithmetic stays in the model's dtype."""

    values: Byte[Array, "*inputs *outputs"]
    scale: Float[Array, "*outputs"]


def int8(w: Any, inputs: int, batch: int = 0) -> Int8:
    """Round w [batch..., in..., out...] to 255 levels a column: max |w| = 127 steps. numpy in, numpy out.

    inputs: how many axes are contracted; batch: how many stand before them (experts).
    """
    w = np.asarray(w, np.float32)
    axes = tuple(range(batch, batch + inputs))
    scale = np.maximum(np.abs(w).max(axis=axes), 1e-12) / 127.0
    wide = np.expand_dims(scale, axes)
    return Int8(np.rint(w / wide).astype(np.int8), scale.astype(np.float32))  # pyright: ignore[reportArgumentType]


def dense(w: Any, batch: int = 0) -> Array:
    """The fp32 matrix that an Int8 stands for; other arrays as they are."""
    if not isinstance(w, Int8):
        return w
    inputs = w.values.ndim - w.scale.ndim
    axes = tuple(range(batch, batch + inputs))
    return w.values.astype(jnp.float32) * jnp.expand_dims(w.scale, axes)
