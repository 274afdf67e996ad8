"""A residual sum and the RMS norms that read it on Hopper: one program for each row, which stays in registers."""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float

from mercury_jax.kernels.dispatch import ExpertOutputs
from mercury_jax.kernels.hopper import registers
from mercury_jax.kernels.quantised_rows import QuantisedRows, Rows, quantised, row_scale
from mercury_jax.kernels.residual_norm import Residual
from mercury_jax.kernels.tracing import traced_once
from mercury_jax.types import Device

Ref = Any  # a reference to global memory inside a kernel
Value = Any  # an array in registers


@traced_once
def run(
    x: Float[Array, "M D"],
    residual: Residual,
    factors: list[Float[Array, "D"]],
    eps: float,
    rounded: tuple[Any, ...] = (),
    device: Device | None = None,
) -> tuple[Float[Array, "M D"], list[Rows]]:
    """Computes `kernels.residual_norm.residual_norms`.

    Args:
        x: Hidden states, bfloat16; D is a multiple of 256.
        residual: What is added; `choice` as int32.
        factors: Factors of each norm of the new hidden states, bfloat16 or float32.
        eps: Added to the mean squares.
        rounded: For each norm the dtype of 8 bits to which its rows are rounded; None, or too few: none.
        device: To compile for.

    Returns:
        The new hidden states and their norms, bfloat16 or rounded.
    """
    interpret = None if device is None else device.interpret
    inputs, structure = jax.tree.flatten((x, residual, factors))
    like: Any = lambda dtype: jax.ShapeDtypeStruct(x.shape, dtype)
    scale: Any = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
    pairs = list(itertools.zip_longest(factors, rounded))
    norms = [like(x.dtype) if dtype is None else QuantisedRows(like(dtype), scale) for _, dtype in pairs]
    outputs, results = jax.tree.flatten((like(x.dtype), norms))

    def residual_norms(*refs: Ref) -> None:  # the kernel's name in a profile
        given = jax.tree.unflatten(structure, refs[: len(inputs)])
        _program(eps, interpret is not None, *given, *jax.tree.unflatten(results, refs[len(inputs) :]))

    found = registers.kernel(residual_norms, outputs, device, row=x.shape[0])(*inputs)
    return jax.tree.unflatten(results, found)


def _program(
    eps: float, interpreted: bool, x: Ref, residual: Any, factors: list[Ref], out: Ref, normed: list[Any]
) -> None:
    """One row; each value is rounded where the plain computation rounds it."""
    row, width, dtype = jax.lax.axis_index("row"), x.shape[1], x.dtype

    def load(ref: Ref) -> Value:
        """A row [D] in fp32; every array has the same layout, two numbers a thread at a time."""
        layout = plgpu.Layout.WG_STRIDED((width,), vec_size=2)
        return registers.load(ref, layout, interpreted).astype(jnp.float32)

    rounded = lambda y: y.astype(dtype).astype(jnp.float32)
    normalise = lambda y: y * jax.lax.rsqrt(jnp.sum(y * y) / width + eps)
    norm = lambda y, factor: y if factor is None else rounded(normalise(y) * load(factor))

    def branch(y: Any) -> Value:
        if not isinstance(y, ExpertOutputs):
            return load(y.at[row])
        weighted = [  # one row of each expert of the token
            load(y.rows.at[y.rank[row, i]]) * y.weights[row, i].astype(jnp.float32)
            for i in range(y.rank.shape[1])
        ]
        return rounded(functools.reduce(operator.add, weighted))

    added, *more = [
        norm(branch(y), factor) for y, factor in zip(residual.branches, residual.factors, strict=True)
    ]
    for y in more:
        added = rounded(added + y)
    total = rounded(load(x.at[row]) + norm(added, residual.post))
    if residual.scales:
        scale, *other = [scale[0].astype(dtype).astype(jnp.float32) for scale in residual.scales]
        if other:
            scale = jnp.where(residual.choice[row] != 0, other[0], scale)
        total = rounded(total * scale)
    out[row] = total.astype(dtype)
    if factors:
        base = normalise(total)
        for factor, to in zip(factors, normed, strict=True):
            y = (base * load(factor)).astype(dtype)
            if isinstance(to, QuantisedRows):
                y = y.astype(jnp.float32)
                scale = row_scale(jnp.max(jnp.abs(y)), to.values.dtype)
                to.scale[row] = scale
                to.values[row] = quantised(y, scale, to.values.dtype)
            else:
                to[row] = y
