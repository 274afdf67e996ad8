"""Layers that the architectures share: linear maps, RMSNorm, the gated MLP and rotary position embeddings.

These are thin Flax modules: `self.param` creates the parameters, `Ops` does the arithmetic. Each module computes in the
dtype of its input; parameters are stored in fp32 and cast when they are used.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mercury_jax.models.norms import rms_normalise
from mercury_jax.models.ops import Activation, Ops, Term, Weight
from mercury_jax.models.weight_quant import QuantisedWeight
from mercury_jax.ops.quantised_rows import Rows
from mercury_jax.types import LoraWeight

Init = nn.initializers.Initializer
ACTIVATIONS: dict[str, Activation] = {
    "gelu_tanh": jax.nn.gelu,  # approximate by default
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
}


def fan_in(axes: int = 1, scale: float = 1.0) -> Init:
    """Makes a normal initialiser with variance scale / (product of the first `axes` dimensions)."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jax.random.normal(key, shape, dtype) * (scale / math.prod(shape[:axes])) ** 0.5

    return init


def weight(module: nn.Module, name: str, init: Init, shape: tuple[int, ...]) -> Weight:
    """Declares a parameter that may have been loaded quantised, or have a LoRA addition."""
    if module.has_variable("params", name):
        found = module.get_variable("params", name)
        if isinstance(found, QuantisedWeight | LoraWeight):
            return found
    return module.param(name, init, shape)


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + scale), computed in at least fp32 (arXiv 1910.07467).

    Attributes:
        eps: Added to the mean square.
        zero_centred: False multiplies by `scale` instead of 1 + scale.
    """

    eps: float
    zero_centred: bool = True

    @nn.compact
    def factors(self, width: int) -> Float[Array, "D"]:
        """Returns what normalised vectors of a width are multiplied by."""
        init = nn.initializers.zeros if self.zero_centred else nn.initializers.ones
        scale = self.param("scale", init, (width,))
        return 1.0 + scale if self.zero_centred else scale

    def __call__(
        self, x: Float[Array, "*s D"], inverse: Float[Array, "*s 1"] | None = None
    ) -> Float[Array, "*s D"]:
        return (rms_normalise(x, self.eps, inverse) * self.factors(x.shape[-1])).astype(x.dtype)


class Linear(nn.Module):
    """y = x @ w + b over the last `len(inputs)` axes.

    Attributes:
        inputs: Sizes of the contracted axes.
        outputs: Sizes of the new axes.
        scale: Factor of the initial variance.
        bias: Whether there is a bias `b` of shape `outputs`.
        ops: The operations that may be divided among devices.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scale: float = 1.0
    bias: bool = False
    ops: Ops = Ops()

    @nn.compact
    def parameters(self) -> tuple[Weight, Array | None]:
        """Returns the matrix and the bias, if there is one."""
        w = weight(self, "w", fan_in(len(self.inputs), self.scale), (*self.inputs, *self.outputs))
        return w, self.param("b", nn.initializers.zeros, self.outputs) if self.bias else None

    def __call__(self, x: Rows) -> Float[Array, "*o"]:
        w, bias = self.parameters()
        y = self.ops.dot(x, w, len(self.inputs))
        return y if bias is None else y + bias.astype(y.dtype)


class OutputProjection(Linear):
    """The last `Linear` of an attention or feed-forward layer, whose result is a term of a sum (`ops.Term`).

    With tensor parallelism each device holds part of the contracted axis, so that the product is a sum over devices.
    """

    def term(self, x: Float[Array, "B T *s"]) -> Term:
        """Returns the product as a term, so that several sums can share one all-reduce. Only without a bias."""
        w, bias = self.parameters()
        assert bias is None
        return self.ops.dot_term(x, w, len(self.inputs))

    def __call__(self, x: Float[Array, "B T *s"]) -> Float[Array, "B T *o"]:
        w, bias = self.parameters()
        y = self.ops.sum_terms([self.ops.dot_term(x, w, len(self.inputs))])[0]
        return y if bias is None else y + bias.astype(y.dtype)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) (arXiv 2002.05202); SwiGLU with the default activation.

    Attributes:
        width: D.
        hidden: F.
        scale: Factor of the initial variance of `down`, 1 / (2 layers).
        bias: Whether the three projections have biases.
        ops: The operations that may be divided among devices.
        act: Activation of the gate.
    """

    width: int
    hidden: int
    scale: float
    bias: bool = False
    ops: Ops = Ops()
    act: Activation = jax.nn.silu

    def setup(self) -> None:
        """Creates the three projections."""
        self.gate = Linear((self.width,), (self.hidden,), bias=self.bias, ops=self.ops)
        self.up = Linear((self.width,), (self.hidden,), bias=self.bias, ops=self.ops)
        self.down = OutputProjection((self.hidden,), (self.width,), self.scale, self.bias, ops=self.ops)

    def matrices(self) -> tuple[Weight, Weight, Weight]:
        """Returns the matrices of gate, up and down."""
        gate, up, down = (layer.parameters()[0] for layer in (self.gate, self.up, self.down))
        return gate, up, down

    def term(self, x: Rows) -> Term:
        """Returns the output as a term of a sum. Only without biases."""
        return self.down.term(self._hidden(x))

    def __call__(self, x: Rows) -> Float[Array, "B T D"]:
        return self.down(self._hidden(x))

    def _hidden(self, x: Rows) -> Float[Array, "B T F"]:
        (gate, gate_bias), (up, _) = self.gate.parameters(), self.up.parameters()
        if gate_bias is None:
            return self.ops.gated_dot(x, gate, up, self.act)
        return self.act(self.gate(x)) * self.up(x)
