"""Vectors as int8, each with a scale: what a KV cache may hold, and what the kernels read."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from mercury_jax.types import wide


class Rounded(NamedTuple):
    """Vectors as int8: x = values * scale, one scale for each position and head."""

    values: Int8[Array, "B S G K"]
    scale: Float[Array, "B S G"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


Keys = Float[Array, "B S G K"] | Rounded  # or values
Pool = Float[Array, "P page G K"] | Rounded  # the same in pages that rows share


def rounded(x: Float[Array, "*s K"]) -> Rounded:
    """255 levels a vector, its largest number 127 of them."""
    x = x.astype(wide(x.dtype))
    scale = jnp.maximum(jnp.abs(x).max(-1), 1e-12) / 127.0
    return Rounded(jnp.rint(x / scale[..., None]).astype(jnp.int8), scale.astype(jnp.float32))


def plain(x: Any, dtype: Any) -> Array:
    """What was rounded, or was not, in the dtype of its arithmetic."""
    return (x.values * x.scale[..., None] if isinstance(x, Rounded) else x).astype(dtype)


def span(x: Any, start: Any, size: int) -> Any:
    """Positions start..start+size of keys or values, rounded or not; `start` may be traced."""
    return jax.tree.map(lambda y: jax.lax.dynamic_slice_in_dim(y, start, size, 1), x)
