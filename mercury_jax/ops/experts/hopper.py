"""The choice of experts, and the copies of tokens for them, on Hopper.

A program holds one row, or a few, in registers.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.ops import registers
from mercury_jax.ops.experts.op import THREADS, offsets_each
from mercury_jax.ops.operation import traced_once
from mercury_jax.ops.quantised_rows import Rows
from mercury_jax.types import Device

Ref = Any  # a reference to global memory inside a kernel
Value = Any  # an array in registers


@traced_once
def route(
    logits: Float[Array, "M E"],
    factors: Float[Array, "E"],
    active: int,
    scale: float,
    device: Device | None = None,
) -> tuple[Int[Array, "M k"], Float[Array, "M k"]]:
    """Computes `ops.experts.op.route`."""
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
    """Computes `ops.experts.op.dispatch`."""
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
