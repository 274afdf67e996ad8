"""Kernels on Hopper whose programs each hold one row, or a few, in registers.

They are what a layer computes between two products: residual sums with the norms that read them, rows rounded to 8
bits, the choice of experts, and the copies of tokens for them. The module of the same name in `kernels` decides whether
a call is supported, and has the plain form.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.kernels.fused_norms import Residual
from mercury_jax.kernels.hopper import registers
from mercury_jax.kernels.quantised_rows import QuantisedRows, Rows, quantised, row_scale
from mercury_jax.kernels.routing import THREADS, ExpertOutputs, offsets_each
from mercury_jax.kernels.tracing import traced_once
from mercury_jax.types import Device

Ref = Any  # a reference to global memory inside a kernel
Value = Any  # an array in registers


@traced_once
def residual_norms(
    x: Float[Array, "M D"],
    residual: Residual,
    factors: list[Float[Array, "D"]],
    eps: float,
    rounded: tuple[Any, ...] = (),
    device: Device | None = None,
) -> tuple[Float[Array, "M D"], list[Rows]]:
    """Computes `models.norms.residual_norms`."""
    interpret = None if device is None else device.interpret
    inputs, structure = jax.tree.flatten((x, residual, factors))
    like: Any = lambda dtype: jax.ShapeDtypeStruct(x.shape, dtype)
    scale: Any = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
    pairs = list(itertools.zip_longest(factors, rounded))
    norms = [like(x.dtype) if dtype is None else QuantisedRows(like(dtype), scale) for _, dtype in pairs]
    outputs, results = jax.tree.flatten((like(x.dtype), norms))

    def residual_norms(*refs: Ref) -> None:  # the kernel's name in a profile
        given = jax.tree.unflatten(structure, refs[: len(inputs)])
        _one_row(eps, interpret is not None, *given, *jax.tree.unflatten(results, refs[len(inputs) :]))

    found = registers.kernel(residual_norms, outputs, device, row=x.shape[0])(*inputs)
    return jax.tree.unflatten(results, found)


def _one_row(
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


@traced_once
def quantise_rows(
    x: Float[Array, "M W"], count: int, dtype: Any, device: Device | None = None
) -> QuantisedRows:
    """Computes `kernels.quantised_rows.quantise_rows`."""
    (rows, width), interpret = x.shape, None if device is None else device.interpret
    programs, numbers = rows // count, count * width
    layout = plgpu.Layout.WG_STRIDED((numbers,), vec_size=2 if numbers % 256 == 0 else 1)

    def quantise_rows(x: Ref, values: Ref, scale: Ref) -> None:  # the kernel's name in a profile
        program = jax.lax.axis_index("program")
        y = registers.load(x.at[program], layout, interpret is not None).astype(jnp.float32)
        place = plgpu.broadcasted_iota(jnp.int32, (numbers,), 0, layout=layout)
        scales = jnp.ones_like(y)
        for i in range(count):
            own = (place >= i * width) & (place < (i + 1) * width)
            one = row_scale(jnp.max(jnp.where(own, jnp.abs(y), 0.0)), dtype)
            scales = jnp.where(own, one, scales)
            scale[program, i] = one
        values[program] = quantised(y, scales, dtype)

    values, scale = registers.kernel(
        quantise_rows,
        [
            jax.ShapeDtypeStruct((programs, numbers), dtype),
            jax.ShapeDtypeStruct((programs, count), jnp.float32),
        ],
        device,
        program=programs,
    )(x.reshape(programs, numbers))
    return QuantisedRows(values.reshape(x.shape), scale.reshape(rows))


@traced_once
def route(
    logits: Float[Array, "M E"],
    factors: Float[Array, "E"],
    active: int,
    scale: float,
    device: Device | None = None,
) -> tuple[Int[Array, "M k"], Float[Array, "M k"]]:
    """Computes `kernels.routing.route`."""
    rows, experts = logits.shape
    interpret = None if device is None else device.interpret
    layout = plgpu.Layout.WG_STRIDED((experts,), vec_size=1)

    def load(ref: Ref) -> Array:
        return registers.load(ref, layout, interpret is not None).astype(jnp.float32)

    def routing(logits: Ref, factors: Ref, ids: Ref, weights: Ref) -> None:
        row = jax.lax.axis_index("row")
        scores = load(logits.at[row])
        # The weights are relative to the sum of the chosen ones: the sum of all probabilities is not needed.
        left = jnp.exp((scores - jnp.max(scores)) * scale)
        # Counts down, so that the first of equal experts has the largest number.
        number = experts - plgpu.broadcasted_iota(jnp.int32, (experts,), 0, layout=layout)
        own, chosen = load(factors), []
        for _ in range(active):  # the largest one that is left, k times
            best = jnp.max(left)
            at = jnp.max(jnp.where(left == best, number, 0))
            here = number == at
            chosen.append((experts - at, best, jnp.sum(jnp.where(here, own, 0.0))))
            left = jnp.where(here, -1.0, left)
        total = sum(best for _, best, _ in chosen)
        for i, (at, best, factor) in enumerate(chosen):
            ids[row, i] = at
            weights[row, i] = best / total * factor

    out = (rows, active)
    results = [jax.ShapeDtypeStruct(out, jnp.int32), jax.ShapeDtypeStruct(out, logits.dtype)]
    ids, weights = registers.kernel(routing, results, device, row=rows)(logits, factors)
    return ids, weights


@traced_once
def dispatch(
    x: Rows, expert: Int[Array, "N k"], count: int, device: Device | None = None
) -> tuple[Rows, Int[Array, "N k"], Int[Array, "offsets"]]:
    """Computes `kernels.routing.dispatch`."""
    parts, structure = jax.tree.flatten(x)  # values and scales, or one array
    (tokens, width), active = parts[0].shape, expert.shape[1]
    size, each = tokens * active, offsets_each(tokens, count)
    interpret = None if device is None else device.interpret

    load = functools.partial(registers.load, interpreted=interpret is not None)

    def dispatch(expert: Ref, *refs: Ref) -> None:
        x, rows, (rank, offsets) = refs[: len(parts)], refs[len(parts) : -2], refs[-2:]
        token = jax.lax.axis_index("token")
        first = token * active
        vector = load(x[0].at[token], plgpu.Layout.WG_STRIDED((width,), vec_size=2))  # [D]
        copied = [vector, *(scale[token] for scale in x[1:])]
        # Keys are different, and ordered as the rows are to be: by expert, then by index.
        layout = plgpu.Layout.WG_STRIDED((size,), vec_size=math.gcd(size // THREADS, 4))
        keys = load(expert, layout) * size + plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
        own = [expert[first + j] * size + first + j for j in range(active)]
        bounds = [(token * each + i) * size for i in range(each)]  # the smallest key of each expert
        smaller = _smaller(keys, [*own, *bounds])
        for j, place in enumerate(smaller[:active]):
            rank[token, j] = place
            for to, y in zip(rows, copied, strict=True):
                to[place] = y
        for i, offset in enumerate(smaller[active:]):
            offsets[token * each + i] = offset

    kernel = registers.kernel(
        dispatch,
        [
            *(jax.ShapeDtypeStruct((size, *y.shape[1:]), y.dtype) for y in parts),
            jax.ShapeDtypeStruct((tokens, active), jnp.int32),
            jax.ShapeDtypeStruct((tokens * each,), jnp.int32),
        ],
        device,
        token=tokens,
    )
    *rows, rank, offsets = kernel(expert.reshape(-1), *parts)
    return jax.tree.unflatten(structure, rows), rank, offsets


def _smaller(keys: Value, bounds: list[Value]) -> list[Value]:
    """Counts for each bound the keys that are smaller.

    The threads of a program sum two numbers, each of 16 bits, at once: a sum over threads takes longer than the
    comparisons.
    """
    found, half = [], 1 << 16
    for i in range(0, len(bounds), 2):
        counted = jnp.where(keys < bounds[i], 1, 0)
        if pair := i + 1 < len(bounds):
            counted += jnp.where(keys < bounds[i + 1], half, 0)
        total = jnp.sum(counted)
        found += [total & (half - 1), total >> 16] if pair else [total]
    return found
