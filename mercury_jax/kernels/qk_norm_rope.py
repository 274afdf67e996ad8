"""`norm_rope_write`: head norms, RoPE and the write into the KV cache, as one kernel on Hopper.

Between the projections to queries, keys and values and the attention, XLA for GPUs makes five kernels: the sums of
squares of the heads, 1 / rms, the queries in the order in which the attention kernel reads them, and a scatter each for
keys and values. The kernel is `hopper.qk_norm_rope`; `models.ops` calls it. vLLM calls its own kernel of this kind
`fused_qk_norm_rope`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from mercury_jax.config import refuse
from mercury_jax.kernels import device as kernel_device
from mercury_jax.kernels.device import HOPPER
from mercury_jax.kernels.residual_norm import rms_normalise
from mercury_jax.types import Device, accumulation_dtype

WIDTH_QUANTUM = 256  # of the head size: the 128 threads of a program load half a head at once
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


def inverse_rms(xs: Sequence[Float[Array, "B T _ K"]], eps: float) -> list[Float[Array, "B T _ 1"]]:
    """Computes 1 / rms of each head of several arrays of the same head size, in at least fp32.

    The mean squares of all arrays are one reduction. XLA makes one GPU kernel of it, and fuses the normalisation of
    each array into what reads it: RoPE and the write into the cache. With a reduction for each array it would make a
    kernel for each, and would not fuse those.
    """
    heads = jnp.concatenate(xs, axis=2)
    squares = jnp.mean(heads.astype(accumulation_dtype(heads.dtype)) ** 2, axis=-1, keepdims=True)
    parts = jnp.split(squares, np.cumsum([x.shape[2] for x in xs])[:-1], axis=2)
    return [jax.lax.rsqrt(part + eps) for part in parts]


def rotate(x: Float[Array, "B T H K"], table: Table) -> Float[Array, "B T H K"]:
    """Applies RoPE: rotates each pair (x[i], x[i + C]), i < C; the other dimensions are unchanged."""
    (cos, sin), half, dtype = table, table[0].shape[-1], accumulation_dtype(x.dtype)
    a, b = x[..., :half].astype(dtype), x[..., half : 2 * half].astype(dtype)
    parts = [a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :].astype(dtype)]
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def norm_rope(
    x: Projections, factors: HeadFactors, table: Table, eps: float
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G K"]]:
    """Normalises the heads of queries, keys and values, and rotates queries and keys."""
    heads = [y for y in x[:3] if y is not None]
    inverse = inverse_rms(heads, eps)
    q, k, v = heads[0], heads[1], heads[-1]
    normed = lambda y, factor, i: (rms_normalise(y, eps, inverse[i]) * factor).astype(y.dtype)
    v = rms_normalise(v, eps, inverse[-1]).astype(v.dtype)
    return rotate(normed(q, factors.q, 0), table), rotate(normed(k, factors.k, 1), table), v


def write_rows(
    cache: Shaped[Array, "B S *w"], new: Shaped[Array, "B T *w"], slots: Int[Array, "B T"]
) -> Shaped[Array, "B S *w"]:
    """Writes an array of each token at its slot of the cache."""
    write = lambda old, new, at: old.at[at].set(new.astype(old.dtype), mode="drop")
    return jax.vmap(write)(cache, new, slots)


def norm_rope_write(
    x: Projections, factors: HeadFactors, table: Table, kv: KVArrays, slots: Int[Array, "B T"], eps: float
) -> tuple[Float[Array, "B T H K"], KVArrays]:
    """Computes `norm_rope`, and writes keys and values into the cache of the layer."""
    q, k, v = norm_rope(x, factors, table, eps)
    return q, (write_rows(kv[0], k, slots), write_rows(kv[1], v, slots))


def refuses(
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
    if width % WIDTH_QUANTUM or 0 in x.q.shape:
        return f"the head size is {width}, no multiple of {WIDTH_QUANTUM}"
    if heads % groups or (heads // groups + 2) * width > LARGEST_GROUP:
        return f"{heads} query heads and {groups} key heads of {width} do not fit in its registers"
    if (pairs := table[0].shape[-1]) * 2 != width:
        return f"RoPE has {pairs} pairs, not {width // 2}"
    return kernel_device.why_off(kernel_device.HEADS_FORM, device)


def kernel_norm_rope_write(
    x: Projections,
    factors: HeadFactors,
    table: Table,
    kv: KVArrays,
    slots: Int[Array, "B T"],
    eps: float,
    device: Device | None = None,
) -> tuple[Float[Array, "B T H K"], KVArrays]:
    """Computes `norm_rope_write` with the kernel; gradients are the plain ones.

    Returns:
        As `norm_rope_write`.
    """
    if (why := refuses(x, table, kv, device)) is not None:
        raise refuse("x", f"{x.q.dtype}{list(x.q.shape)}", f"others: {why}")

    @jax.custom_vjp
    def run(*args: object) -> tuple[Array, KVArrays]:
        from mercury_jax.kernels.hopper import qk_norm_rope  # here, because importing Mosaic takes time

        return qk_norm_rope.run(*args, eps, device)  # pyright: ignore[reportCallIssue, reportArgumentType]

    plain = functools.partial(norm_rope_write, eps=eps)
    run.defvjp(lambda *args: (run(*args), args), lambda args, dy: jax.vjp(plain, *args)[1](dy))
    return run(x, factors, table, kv, slots)
