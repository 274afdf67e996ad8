"""The few layers we need, thin: parameters by `self.param`, arithmetic by einsum.

Every module computes in the dtype of its input; parameters are stored in fp32 and cast at use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.types import wide

Init = Callable[..., Array]


def fan_in(axes: int = 1, scale: float = 1.0) -> Init:
    """Normal init with variance scale / (product of the first `axes` dimensions)."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        inputs = 1
        for size in shape[:axes]:
            inputs *= size
        return jax.random.normal(key, shape, dtype) * (scale / inputs) ** 0.5

    return init


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + scale), in fp32 at least (arXiv 1910.07467)."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*s D"]) -> Float[Array, "*s D"]:
        scale = self.param("scale", nn.initializers.zeros, (x.shape[-1],))
        y = x.astype(wide(x.dtype))
        y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + self.eps)
        return (y * (1.0 + scale)).astype(x.dtype)


class Linear(nn.Module):
    """y = x @ w over the last `len(inputs)` axes; `inputs` and `outputs` are axis sizes."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scale: float = 1.0

    @nn.compact
    def __call__(self, x: Float[Array, "*s"]) -> Float[Array, "*o"]:
        count = len(self.inputs)
        w = self.param("w", fan_in(count, self.scale), (*self.inputs, *self.outputs))
        return jax.lax.dot_general(
            x, w.astype(x.dtype), ((tuple(range(x.ndim - count, x.ndim)), tuple(range(count))), ((), ()))
        )


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    width: int
    hidden: int
    scale: float  # of the last projection's init: 1 / (2 layers)

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = Linear((self.width,), (self.hidden,), name="gate")(x)
        up = Linear((self.width,), (self.hidden,), name="up")(x)
        return Linear((self.hidden,), (self.width,), self.scale, name="down")(jax.nn.silu(gate) * up)


def rope(x: Float[Array, "B T H K"], positions: Int[Array, "B T"], theta: float) -> Float[Array, "B T H K"]:
    """Rotate the pairs (x[i], x[i + K/2]) by position * theta**(-2i/K) (RoFormer, arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=wide(x.dtype)) / half)
    angle = positions[..., None, None].astype(wide(x.dtype)) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half].astype(wide(x.dtype)), x[..., half:].astype(wide(x.dtype))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
