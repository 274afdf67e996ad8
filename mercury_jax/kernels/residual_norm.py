"""`residual_norms`: a residual sum and all RMS norms that read it, as one kernel on Hopper.

XLA for GPUs makes one kernel of each norm, and another of the sum: between two products of a layer these are four or
five, each of which reads every hidden state again. The kernel is `hopper.rows`; `models.ops` calls it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mercury_jax.config import refuse
from mercury_jax.kernels import device as kernel_device
from mercury_jax.kernels.device import HOPPER
from mercury_jax.kernels.dispatch import ExpertOutputs, combine
from mercury_jax.kernels.quantised_rows import Rows, quantise_rows, refuse_gradient
from mercury_jax.types import Device, accumulation_dtype

WIDTH_QUANTUM = 256  # numbers that the 128 threads of a program load at once, two each
WIDEST = 6144  # as registers allow: 48 numbers a thread of each array


def rms_normalise(
    x: Float[Array, "*s D"], eps: float, inverse: Float[Array, "*s 1"] | None = None
) -> Float[Array, "*s D"]:
    """Computes x / rms(x) in at least fp32, and returns it in that dtype (arXiv 1910.07467)."""
    y = x.astype(accumulation_dtype(x.dtype))
    return y * (jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + eps) if inverse is None else inverse)


class Residual(NamedTuple):
    """What a layer adds to its hidden states.

    Attributes:
        branches: Outputs of the layer [..., D], one or two. Outputs of experts are combined first.
        factors: For each branch the factors [D] of its norm; None: the branch is added as it is.
        post: Factors of a norm of the sum of the branches; None: no norm.
        scales: Numbers [1] that multiply the new hidden states: none, one, or two among which `choice` selects.
        choice: For each vector [...] whether the second of `scales` multiplies it; None if there are not two.
    """

    branches: tuple[Float[Array, "*s D"] | ExpertOutputs, ...]
    factors: tuple[Float[Array, "D"] | None, ...]
    post: Float[Array, "D"] | None = None
    scales: tuple[Float[Array, "1"], ...] = ()
    choice: Bool[Array, "*s"] | None = None


def residual_norms(
    x: Float[Array, "*s D"],
    residual: Residual,
    factors: Sequence[Float[Array, "D"]],
    eps: float,
    rounded: Sequence[Any] = (),
) -> tuple[Float[Array, "*s D"], list[Rows]]:
    """Adds what a layer computed to x, and normalises the sum.

    Returns:
        The new hidden states, and their norms, one for each of `factors`; those that are rounded as `QuantisedRows`.
    """
    norm = lambda y, factor: y if factor is None else (rms_normalise(y, eps) * factor).astype(x.dtype)
    branches = [combine(y) if isinstance(y, ExpertOutputs) else y for y in residual.branches]
    added = functools.reduce(operator.add, map(norm, branches, residual.factors))
    total = x + norm(added, residual.post)
    if residual.scales:
        scale = residual.scales[0]
        if residual.choice is not None:
            scale = jnp.where(residual.choice[..., None], residual.scales[1], scale)
        total = total * scale.astype(x.dtype)
    found = [norm(total, factor) for factor in factors]
    pairs = itertools.zip_longest(found, rounded)
    return total, [y if dtype is None else quantise_rows(y, dtype) for y, dtype in pairs]


def refuses(x: Array | jax.ShapeDtypeStruct, device: Device | None = None) -> str | None:
    """Gives the reason why the kernel does not compute `residual_norms` of x."""
    if kernel_device.present(device) != HOPPER:
        return f"the kernel is for {HOPPER}"
    if x.dtype != jnp.bfloat16:
        return f"hidden states are {x.dtype}, not bfloat16"
    if x.shape[-1] % WIDTH_QUANTUM or x.shape[-1] > WIDEST or 0 in x.shape:
        return f"the width is {x.shape[-1]}, no multiple of {WIDTH_QUANTUM} up to {WIDEST}"
    return kernel_device.why_off(kernel_device.NORM_FORM, device)


def kernel_residual_norms(
    x: Float[Array, "*s D"],
    residual: Residual,
    factors: Sequence[Float[Array, "D"]],
    eps: float,
    device: Device | None = None,
    rounded: Sequence[Any] = (),
) -> tuple[Float[Array, "*s D"], list[Rows]]:
    """Computes `residual_norms` with the kernel; gradients are the plain ones, and there are none of rounded rows.

    Args:
        rounded: As in `residual_norms`.

    Returns:
        As `residual_norms`.
    """
    if (why := refuses(x, device)) is not None:
        raise refuse("x", f"{x.dtype}{list(x.shape)}", f"others: {why}")

    @jax.custom_vjp
    def run(x: Array, residual: Residual, factors: list[Array]) -> tuple[Array, list[Rows]]:
        from mercury_jax.kernels.hopper import rows  # here, because importing Mosaic takes time

        flat = lambda y: y.reshape(-1, y.shape[-1])
        choice = None if residual.choice is None else residual.choice.reshape(-1).astype(jnp.int32)
        branches = tuple(
            y._replace(rank=flat(y.rank), weights=flat(y.weights))
            if isinstance(y, ExpertOutputs)
            else flat(y)
            for y in residual.branches
        )
        flattened = residual._replace(branches=branches, choice=choice)
        found = rows.residual_norms(flat(x), flattened, factors, eps, tuple(rounded), device)
        return jax.tree.map(lambda y: y.reshape(*x.shape[:-1], *y.shape[1:]), found)

    def backward(args: Any, dy: Any) -> Any:
        refuse_gradient(any(rounded))
        return jax.vjp(functools.partial(residual_norms, eps=eps), *args)[1](dy)

    run.defvjp(lambda *args: (run(*args), args), backward)
    return run(x, residual, list(factors))
