"""Norms as one kernel with what stands around them, on Hopper: a residual sum, or RoPE and the cache write.

Between two products of a layer XLA for GPUs makes four or five kernels of a residual sum and the norms that read it,
each of which reads every hidden state again. Between the projections and attention it makes five: the sums of squares
of the heads, 1 / rms, the queries in the order in which the attention kernel reads them, and a scatter each for keys
and values. vLLM calls its own kernel of this kind `fused_qk_norm_rope`. `models.norms` and `models.rope` have the plain
forms; `models.ops` calls these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import refuse
from mercury_jax.kernels import device as kernel_device
from mercury_jax.kernels.device import HOPPER
from mercury_jax.kernels.quantised_rows import Rows, refuse_gradient
from mercury_jax.kernels.routing import ExpertOutputs
from mercury_jax.types import Device

HIDDEN_QUANTUM = 256  # numbers of hidden states that the 128 threads of a program load at once, two each
WIDEST = 6144  # as registers allow: 48 numbers a thread of each array


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


def refuses_residual(x: Array | jax.ShapeDtypeStruct, device: Device | None = None) -> str | None:
    """Gives the reason why the kernel does not compute `residual_norms` of x."""
    if kernel_device.present(device) != HOPPER:
        return f"the kernel is for {HOPPER}"
    if x.dtype != jnp.bfloat16:
        return f"hidden states are {x.dtype}, not bfloat16"
    if x.shape[-1] % HIDDEN_QUANTUM or x.shape[-1] > WIDEST or 0 in x.shape:
        return f"the width is {x.shape[-1]}, no multiple of {HIDDEN_QUANTUM} up to {WIDEST}"
    return kernel_device.why_off(kernel_device.NORM_FORM, device)


def kernel_residual_norms(
    plain: Callable[..., tuple[Array, list[Rows]]],
    x: Float[Array, "*s D"],
    residual: Residual,
    factors: Sequence[Float[Array, "D"]],
    eps: float,
    device: Device | None = None,
    rounded: Sequence[Any] = (),
) -> tuple[Float[Array, "*s D"], list[Rows]]:
    """Computes with the kernel what plain(x, residual, factors, eps=eps) does, and takes its gradients.

    Args:
        rounded: Dtypes of 8 bits to which norms are rounded, or None; there are no gradients of those.
    """
    if (why := refuses_residual(x, device)) is not None:
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
        return jax.vjp(lambda *args: plain(*args, eps=eps), *args)[1](dy)

    run.defvjp(lambda *args: (run(*args), args), backward)
    return run(x, residual, list(factors))


HEAD_QUANTUM = 256  # of the head size: the 128 threads of a program load half a head at once
# Numbers of the heads of a key head, queries included, that fit in the registers of a program.
LARGEST_GROUP = 8192

KVArrays = tuple[Float[Array, "B S G K"], Float[Array, "B S G K"]]  # keys and values of a layer's cache
Table = tuple[Float[Array, "B T 1 C"], Float[Array, "B T 1 C"]]  # cosines and sines of RoPE


class Projections(NamedTuple):
    """Projected hidden states of a layer.

    Attributes:
        q: Queries.
        k: Keys.
        v: Values; None: the keys before their norm and RoPE.
    """

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T G K"]
    v: Float[Array, "B T G K"] | None


class HeadFactors(NamedTuple):
    """Factors of the norms of queries and keys; values are normalised without factors."""

    q: Float[Array, "K"]
    k: Float[Array, "K"]


def refuses_heads(
    x: Projections, table: Table, kv: tuple[object, object], device: Device | None = None
) -> str | None:
    """Gives the reason why the kernel does not compute `norm_rope_write`."""
    if kernel_device.present(device) != HOPPER:
        return f"the kernel is for {HOPPER}"
    cached = [getattr(y, "dtype", type(y).__name__) for y in kv]
    if (other := [str(d) for d in cached if d != jnp.bfloat16]) != []:
        return f"the cache holds {other[0]}, not bfloat16"
    if x.q.dtype != jnp.bfloat16:
        return f"queries are {x.q.dtype}, not bfloat16"
    heads, groups, width = x.q.shape[2], x.k.shape[2], x.q.shape[3]
    if width % HEAD_QUANTUM or 0 in x.q.shape:
        return f"the head size is {width}, no multiple of {HEAD_QUANTUM}"
    if heads % groups or (heads // groups + 2) * width > LARGEST_GROUP:
        return f"{heads} query heads and {groups} key heads of {width} do not fit in its registers"
    if (pairs := table[0].shape[-1]) * 2 != width:
        return f"RoPE has {pairs} pairs, not {width // 2}"
    return kernel_device.why_off(kernel_device.HEADS_FORM, device)


def kernel_norm_rope_write(
    plain: Callable[..., tuple[Array, KVArrays]],
    x: Projections,
    factors: HeadFactors,
    table: Table,
    kv: KVArrays,
    slots: Int[Array, "B T"],
    eps: float,
    device: Device | None = None,
) -> tuple[Float[Array, "B T H K"], KVArrays]:
    """Computes with the kernel what plain(x, factors, table, kv, slots, eps=eps) does, and takes its gradients."""
    if (why := refuses_heads(x, table, kv, device)) is not None:
        raise refuse("x", f"{x.q.dtype}{list(x.q.shape)}", f"others: {why}")

    @jax.custom_vjp
    def run(*args: object) -> tuple[Array, KVArrays]:
        from mercury_jax.kernels.hopper import qk_norm_rope  # here, because importing Mosaic takes time

        return qk_norm_rope.run(*args, eps, device)  # pyright: ignore[reportCallIssue, reportArgumentType]

    backward = lambda args, dy: jax.vjp(lambda *args: plain(*args, eps=eps), *args)[1](dy)
    run.defvjp(lambda *args: (run(*args), args), backward)
    return run(x, factors, table, kv, slots)
