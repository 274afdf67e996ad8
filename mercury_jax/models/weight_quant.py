"""Weight-only quantisation: matrices are stored as int8 or fp8 values with one scale per output.

The arithmetic stays in the model's dtype; only memory use and memory traffic shrink. `hub` quantises while it loads a
checkpoint; `ops.dot` and `moe` multiply by quantised matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8 as Byte

from mercury_jax.config import refuse
from mercury_jax.types import LoraWeight, Params

FP8 = jnp.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa, no infinity


class QuantisedWeight(NamedTuple):
    """A matrix w = values * scale, with the scale broadcast over the input axes.

    Attributes:
        values: int8 or float8_e4m3fn, [batch..., inputs..., outputs...]; the batch axes are the experts, if any.
        scale: fp32, [batch..., outputs...].
    """

    values: Byte[Array, "*inputs *outputs"] | Float[Array, "*inputs *outputs"]
    scale: Float[Array, "*outputs"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.values.shape


def quantise_int8(w: Any, inputs: int, batch: int = 0) -> QuantisedWeight:
    """Rounds a matrix to int8: 255 evenly spaced levels per output.

    Args:
        w: Matrix [batch..., inputs..., outputs...], a numpy array or a JAX array on the host.
        inputs: Number of axes that are contracted.
        batch: Number of axes before the contracted axes (1 for stacked experts).

    Returns:
        The values and scales in numpy; a scale is max |w| / 127 of its output.
    """
    return _quantise(w, inputs, batch, 127.0, lambda x: np.rint(x).astype(np.int8))


def quantise_fp8(w: Any, inputs: int, batch: int = 0) -> QuantisedWeight:
    """Rounds a matrix to float8_e4m3fn, scaled so that max |w| of each output becomes 448, the largest fp8 number.

    The relative error of a number is at most 1/16, except for very small numbers. Compared with int8, small numbers are
    more precise and large numbers less precise. fp8 is therefore better for outputs whose weights differ much in
    magnitude, and int8 for outputs whose weights have similar magnitudes.

    Args:
        w: Matrix [batch..., inputs..., outputs...], a numpy array or a JAX array on the host.
        inputs: Number of axes that are contracted.
        batch: Number of axes before the contracted axes (1 for stacked experts).

    Returns:
        The values and scales in numpy; a scale is max |w| / 448 of its output.
    """
    return _quantise(w, inputs, batch, float(jnp.finfo(FP8).max), lambda x: x.astype(FP8))


WEIGHT_KINDS = {"int8": quantise_int8, "fp8": quantise_fp8}  # values of `quantise=`


def _quantise(
    w: Any, inputs: int, batch: int, max_value: float, cast: Callable[[np.ndarray], np.ndarray]
) -> QuantisedWeight:
    w = np.asarray(w, np.float32)
    axes = tuple(range(batch, batch + inputs))
    scale = np.maximum(np.abs(w).max(axis=axes), 1e-12) / max_value
    found: Any = (cast(w / np.expand_dims(scale, axes)), scale.astype(np.float32))
    return QuantisedWeight(*found)


def check_not_quantised(params: Params) -> None:
    """Checks that parameters can be saved: none may be quantised or have a low-rank addition.

    Args:
        params: Parameters of a model.

    Raises:
        ValueError: If a leaf is a `QuantisedWeight` or a `LoraWeight`.
    """
    for x in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, QuantisedWeight | LoraWeight)):
        if isinstance(x, LoraWeight):
            allowed = "merged parameters: save the adapter, and load(base, adapter=FOLDER) merges it"
            raise refuse("params", "base and adapter", allowed)
        if isinstance(x, QuantisedWeight):
            kind = "int8" if x.values.dtype == jnp.int8 else "fp8"
            raise refuse("params", kind, "floating parameters: load the model without quantise")


def dequantise(w: Array | QuantisedWeight, batch: int = 0) -> Array:
    """Computes the fp32 matrix that a `QuantisedWeight` represents; returns other arrays unchanged.

    Args:
        w: Matrix [batch..., inputs..., outputs...].
        batch: Number of axes before the inputs (1 for stacked experts).

    Returns:
        The matrix, with the same shape.
    """
    if not isinstance(w, QuantisedWeight):
        return w
    inputs = w.values.ndim - w.scale.ndim
    axes = tuple(range(batch, batch + inputs))
    return w.values.astype(jnp.float32) * jnp.expand_dims(w.scale, axes)
