"""A mixture of experts as plain functions: rows to their chosen experts and back.

Routing belongs to the families; here is what follows it. Assignments are sorted by expert, each expert's
rows go through its gated feed-forward, and what comes back is weighed and summed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mercury_jax.models.quantise import Int8
from mercury_jax.types import wide

Act = Callable[[Array], Array]
Stack = Array | Int8  # [E, in, out], one matrix an expert


def experts(
    x: Float[Array, "N D"],
    ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    gate_up: Stack,
    down: Stack,
    act: Act,
) -> Float[Array, "N D"]:
    """sum over j of weights[n, j] * (act(x_n gate) * (x_n up)) down, by the experts e = ids[n, j].

    gate_up [E, D, 2*F]: the gate is the first half of its last axis; down [E, F, D]. Computes in x's dtype, sums
    in fp32 at least; differentiable in x, weights, and in stacks that are not int8.
    """
    count = (gate_up.values if isinstance(gate_up, Int8) else gate_up).shape[0]
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=count).astype(jnp.int32)
    out = jax.lax.platform_dependent(
        x[order // ids.shape[1]], sizes, gate_up, down,
        cpu=lambda *args: tiled(act, *args), default=lambda *args: ragged(act, *args),
    )  # fmt: skip
    index = jnp.arange(flat.size, dtype=order.dtype)
    rank = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
    back, exact = out[rank].reshape(*ids.shape, -1), wide(x.dtype)
    return jnp.einsum("nk,nkd->nd", weights.astype(exact), back.astype(exact)).astype(x.dtype)


def gated(act: Act, hidden: Float[Array, "*s W"]) -> Float[Array, "*s F"]:
    """act(gate) * up of a fused projection."""
    gate, up = jnp.split(hidden, 2, axis=-1)
    return act(gate) * up


def ragged(
    act: Act, rows: Float[Array, "M D"], sizes: Int[Array, "E"], gate_up: Stack, down: Stack
) -> Float[Array, "M D"]:
    """Rows sorted by expert, `sizes` of each, through their experts: for accelerators."""

    def product(x: Array, w: Stack) -> Array:
        if not isinstance(w, Int8):
            return jax.lax.ragged_dot(x, w.astype(x.dtype), sizes)
        expert = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(x))
        return jax.lax.ragged_dot(x, w.values.astype(x.dtype), sizes) * w.scale.astype(x.dtype)[expert]

    return product(gated(act, product(rows, gate_up)), down)


def tiled(
    act: Act, rows: Float[Array, "M D"], sizes: Int[Array, "E"], gate_up: Stack, down: Stack
) -> Float[Array, "M D"]:
    """The same, for a CPU, where ragged_dot multiplies every row by every expert."""
    if isinstance(gate_up, Int8) or isinstance(down, Int8):
        return _tiles(act, rows, sizes, gate_up, down)
    return _differentiable(act, rows, sizes, gate_up, down)


def tile_of(rows: int, count: int) -> int:
    """Rows of a tile: a quarter more than an expert has on average, so that most need one tile.

    A tile costs a copy of its expert's matrices, and products of few rows are slow: at 32 rows an expert tiles of
    32, 40, 48 and 64 took 11.8, 10.3, 10.7 and 12.6 ms a layer (16 experts, D = 512, F = 256, one core).
    """
    quarter_more = -(-rows * 5 // (count * 4))
    return min(max(-(-quarter_more // 8) * 8, 16), 128)


class Plan(NamedTuple):
    """Tiles of the sorted rows, each of one expert; those from `count` on are not used."""

    expert: Int[Array, "t"]
    start: Int[Array, "t"]
    end: Int[Array, "t"]  # of the expert's rows
    count: Int[Array, ""]


def plan(sizes: Int[Array, "E"], rows: int, tile: int) -> Plan:
    """Cut each expert's rows into tiles; the last of each may reach into the next expert's rows."""
    ends, tiles = jnp.cumsum(sizes), -(-sizes // tile)
    last = jnp.cumsum(tiles)
    index = jnp.arange(rows // tile + len(sizes), dtype=jnp.int32)  # at most: one part-filled tile an expert
    expert = jnp.minimum((index[:, None] >= last).sum(-1), len(sizes) - 1)
    start = (ends - sizes)[expert] + (index - (last - tiles)[expert]) * tile
    return Plan(expert, start, ends[expert], last[-1])


def _one(act: Act, tile: Float[Array, "t D"], gate_up: Stack, down: Stack, e: Array) -> Float[Array, "t D"]:
    """A tile through one expert; its matrices are cast here, where they are small."""

    def product(x: Array, w: Stack) -> Array:
        if isinstance(w, Int8):
            return (x @ w.values[e].astype(x.dtype)) * w.scale[e].astype(x.dtype)
        return x @ w[e].astype(x.dtype)

    return product(gated(act, product(tile, gate_up)), down)


def _tiles(act: Act, rows: Array, sizes: Array, gate_up: Stack, down: Stack) -> Array:
    """A loop over tiles. What one writes over the next expert's rows, that expert's tiles write again."""
    tile = tile_of(len(rows), len(sizes))
    p, padded = plan(sizes, len(rows), tile), jnp.pad(rows, ((0, tile), (0, 0)))

    def step(i: Array, out: Array) -> Array:
        mine = jax.lax.dynamic_slice_in_dim(padded, p.start[i], tile)
        y = _one(act, mine, gate_up, down, p.expert[i])
        return jax.lax.dynamic_update_slice_in_dim(out, y, p.start[i], 0)

    return jax.lax.fori_loop(0, p.count, step, jnp.zeros_like(padded))[: len(rows)]


def _forward(act: Act, *args: Any) -> tuple[Array, Any]:
    return _tiles(act, *args), args


def _backward(act: Act, saved: Any, cotangent: Float[Array, "M D"]) -> tuple[Any, ...]:
    """The same tiles again: the hidden rows are made anew, each expert's gradients summed in place."""
    rows, sizes, gate_up, down = saved
    tile = tile_of(len(rows), len(sizes))
    p = plan(sizes, len(rows), tile)
    padded, told = (jnp.pad(x, ((0, tile), (0, 0))) for x in (rows, cotangent))

    def step(i: Array, grads: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        e, at = p.expert[i], p.start[i]
        mine, dy = (jax.lax.dynamic_slice_in_dim(x, at, tile) for x in (padded, told))
        through = lambda x, w, v: _one(act, x, w[None], v[None], jnp.asarray(0))
        _, back = jax.vjp(through, mine, gate_up[e], down[e])
        inside = (at + jnp.arange(tile) < p.end[i])[:, None]
        dx, dw, dv = back(jnp.where(inside, dy, 0))
        put = jax.lax.dynamic_update_slice_in_dim(grads[0], dx, at, 0)
        return put, grads[1].at[e].add(dw), grads[2].at[e].add(dv)

    zeros = (jnp.zeros_like(padded), jnp.zeros_like(gate_up), jnp.zeros_like(down))
    dx, dw, dv = jax.lax.fori_loop(0, p.count, step, zeros)
    return dx[: len(rows)], np.zeros(sizes.shape, jax.dtypes.float0), dw, dv


_differentiable = jax.custom_vjp(_tiles, nondiff_argnums=(0,))
_differentiable.defvjp(_forward, _backward)
