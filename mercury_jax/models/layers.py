"""Layers that the architectures share: linear maps, RMSNorm, the gated MLP and rotary position embeddings.

These are thin Flax modules: `self.param` creates the parameters, `Ops` does the arithmetic. Each module computes in the
dtype of its input; parameters are stored in fp32 and cast when they are used.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mercury_jax.config import RopeScaling
from mercury_jax.kernels.qk_norm_rope import Table, rotate
from mercury_jax.kernels.quantised_rows import Rows
from mercury_jax.kernels.residual_norm import rms_normalise
from mercury_jax.models.ops import Activation, Ops, Term, Weight
from mercury_jax.models.weight_quant import QuantisedWeight
from mercury_jax.types import LoraWeight, accumulation_dtype

Init = nn.initializers.Initializer
Frequencies: TypeAlias = Float[np.ndarray, "C"] | Float[Array, "B 1 1 C"]  # of all rows, or of each


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


ROPE_TABLE = 1 << 17  # maximum number of cosines in a table; each program holds the table as a constant


def rope(
    x: Float[Array, "B T H K"],
    positions: Int[Array, "B T"],
    frequencies: Frequencies,
    amplitude: float = 1.0,
    context: int | None = None,
) -> Float[Array, "B T H K"]:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split layout of Llama.

    Rotates each pair (x[i], x[i + C]), i < C, by the angle position * frequencies[i]. The other
    dimensions are unchanged.
    """
    return rotate(x, rope_table(positions, frequencies, amplitude, context, accumulation_dtype(x.dtype)))


def rope_table(
    positions: Int[Array, "B T"],
    frequencies: Frequencies,
    amplitude: float = 1.0,
    context: int | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Table:
    """Computes the cosines and sines of `rope`."""
    if (
        isinstance(frequencies, np.ndarray)
        and context is not None
        and context * len(frequencies) <= ROPE_TABLE
    ):
        # Look up cosines in a table: otherwise XLA fuses them into the products, and a CPU computes each cosine again
        # for every head.
        angle = np.arange(context)[:, None] * frequencies
        table = jnp.asarray(amplitude * np.stack([np.cos(angle), np.sin(angle)]), dtype)  # [2, context, C]
        cos, sin = (x.at[positions].get(mode="clip", wrap_negative_indices=False)[:, :, None] for x in table)
        return cos, sin
    angle = positions[..., None, None].astype(dtype) * jnp.asarray(frequencies, dtype)  # [B, T, 1, C]
    return jnp.cos(angle) * amplitude, jnp.sin(angle) * amplitude


def rope_frequencies(
    theta: float, half: int, scaling: RopeScaling | None = None, length: Int[Array, "B"] | None = None
) -> Frequencies:
    """Computes the angle per position of each rotated pair: theta**(-i/half), scaled."""
    plain = float(theta) ** (-np.arange(half) / half)
    if scaling is None:
        return plain
    if scaling.kind == "dynamic":
        if length is None or half < 2:
            return plain
        ratio = jnp.maximum(length[:, None, None, None] / scaling.original, 1.0)
        return plain * (scaling.factor * ratio - (scaling.factor - 1.0)) ** (-np.arange(half) / (half - 1))
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "longrope":
        short, long = (plain / np.asarray(divisors) for divisors in (scaling.short, scaling.long))
        return (
            short
            if length is None
            else jnp.where(length[:, None, None, None] > scaling.original, long, short)
        )
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / plain
        share = (scaling.original / wavelength - scaling.low) / (scaling.high - scaling.low)
        share = np.clip(share, 0.0, 1.0)  # of the plain frequency: 1 for high frequencies, 0 for low ones
        return (1 - share) * plain / scaling.factor + share * plain
    # yarn: blends scaled and plain frequencies (arXiv 2309.00071, equations 17 to 22). `low` and `high` are the indices
    # of the pairs that make `fast` and `slow` rotations over the original context; between them the blend is linear.
    low, high = (
        half * math.log(scaling.original / (turns * 2 * math.pi)) / math.log(theta)
        for turns in (scaling.fast, scaling.slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    # An empty range becomes a step. A range whose bounds are reversed (fewer than `fast` rotations fit into the
    # original context) divides by a negative number, as the reference implementation does.
    ramp = np.clip((np.arange(half) - low) / (high - low or 1e-3), 0.0, 1.0)
    return plain / scaling.factor * ramp + plain * (1 - ramp)
