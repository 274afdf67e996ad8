"""The few layers we need, thin: parameters by `self.param`, arithmetic by einsum.

Every module computes in the dtype of its input; parameters are stored in fp32 and cast at use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mercury_jax.models.ops import Ops, Term
from mercury_jax.models.quantise import Scaled
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
    """x / rms(x) * (1 + scale), in fp32 at least (arXiv 1910.07467); not zero_centred: * scale."""

    eps: float
    zero_centred: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*s D"]) -> Float[Array, "*s D"]:
        start = nn.initializers.zeros if self.zero_centred else nn.initializers.ones
        scale = self.param("scale", start, (x.shape[-1],))
        y = x.astype(wide(x.dtype))
        y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + self.eps)
        return (y * (1.0 + scale if self.zero_centred else scale)).astype(x.dtype)


class Linear(nn.Module):
    """y = x @ w + b over the last `len(inputs)` axes; `inputs` and `outputs` are axis sizes."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scale: float = 1.0
    bias: bool = False
    ops: Ops = Ops()

    @nn.compact
    def __call__(self, x: Float[Array, "*s"]) -> Float[Array, "*o"]:
        count = len(self.inputs)
        w = weight(self, "w", fan_in(count, self.scale), (*self.inputs, *self.outputs))
        y = self.ops.dot(x, w, count)
        return y + self.param("b", nn.initializers.zeros, self.outputs).astype(x.dtype) if self.bias else y


class Matrix(nn.Module):
    """A `Linear` at the end of a layer; on a mesh its product is a sum over the devices that hold parts of w."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scale: float = 1.0
    bias: bool = False
    ops: Ops = Ops()

    @nn.compact
    def __call__(self) -> tuple[Array | Scaled, Array | None]:
        w = weight(self, "w", fan_in(len(self.inputs), self.scale), (*self.inputs, *self.outputs))
        return w, self.param("b", nn.initializers.zeros, self.outputs) if self.bias else None

    def part(self, x: Float[Array, "B T *s"]) -> Term:
        """x @ w as a term of a sum, for a matrix without a bias: each device would add it once."""
        w, bias = self()
        assert bias is None
        return self.ops.product(x, w, len(self.inputs))

    def whole(self, x: Float[Array, "B T *s"]) -> Float[Array, "B T *o"]:
        """x @ w + b, summed over the devices before the bias is added."""
        w, bias = self()
        y = self.ops.total([self.ops.product(x, w, len(self.inputs))])[0]
        return y if bias is None else y + bias.astype(y.dtype)


def weight(module: nn.Module, name: str, init: Init, shape: tuple[int, ...]) -> Array | Scaled:
    """A parameter that may have been loaded as int8 or fp8."""
    if module.has_variable("params", name):
        found = module.get_variable("params", name)
        if isinstance(found, Scaled):
            return found
    return module.param(name, init, shape)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    width: int
    hidden: int
    scale: float  # of the last projection's init: 1 / (2 layers)
    bias: bool = False
    ops: Ops = Ops()

    def setup(self) -> None:
        self.gate = Linear((self.width,), (self.hidden,), bias=self.bias, ops=self.ops)
        self.up = Linear((self.width,), (self.hidden,), bias=self.bias, ops=self.ops)
        self.down = Matrix((self.hidden,), (self.width,), self.scale, self.bias, ops=self.ops)

    def _inner(self, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        return jax.nn.silu(self.gate(x)) * self.up(x)

    def part(self, x: Float[Array, "B T D"]) -> Term:
        """The output as a term of a sum, for a shared expert; without biases."""
        return self.down.part(self._inner(x))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down.whole(self._inner(x))
