"""A mixture of experts as plain functions: rows to their chosen experts and back.

Routing belongs to the families; here is what follows it. Assignments are sorted by expert, each expert's
rows go through its gated feed-forward, and what comes back is weighed and summed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mercury_jax.kernels import grouped
from mercury_jax.kernels.tiles import plan, tile_of
from mercury_jax.models.quantise import Scaled
from mercury_jax.types import Device, wide

Act = Callable[[Array], Array]
Stack = Array | Scaled  # [E, in, out], one matrix an expert


def experts(
    x: Float[Array, "N D"],
    ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    gate_up: Stack,
    down: Stack,
    act: Act,
    first: Int[Array, ""] | None = None,
    of: int | None = None,
    device: Device | None = None,
) -> Float[Array, "N D"]:
    """sum over j of weights[n, j] * (act(x_n gate) * (x_n up)) down, by the experts e = ids[n, j].

    gate_up [E, D, 2*F]: the gate is the first half of its last axis; down [E, F, D]. Computes in x's dtype, sums
    in fp32 at least; differentiable in x, weights, and in stacks that are not int8. first, of: the stacks hold E of
    `of` experts, from that id on; the others add nothing, and no product is made for them. device: to compile for.
    """
    count = (gate_up.values if isinstance(gate_up, Scaled) else gate_up).shape[0]
    flat = ids.reshape(-1)
    if first is not None:
        flat = jnp.where((flat >= first) & (flat < first + count), flat - first, count)  # others behind all
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=count).astype(jnp.int32)
    tile = tile_of(flat.size, of or count)
    out = jax.lax.platform_dependent(
        x[order // ids.shape[1]], sizes, gate_up, down,
        cuda=lambda *args: grouped_or_tiled(act, *args, tile=tile, device=device),
        tpu=lambda *args: ragged(act, *args, tile=tile),
        default=lambda *args: tiled(act, *args, tile=tile),
    )  # fmt: skip
    index = jnp.arange(flat.size, dtype=order.dtype)
    rank = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
    back, exact = out[rank].reshape(*ids.shape, -1), wide(x.dtype)
    if first is not None:  # what the kernels do not write may hold anything
        back = jnp.where((flat < count).reshape(*ids.shape, 1), back, 0)
    return jnp.einsum("nk,nkd->nd", weights.astype(exact), back.astype(exact)).astype(x.dtype)


def gated(act: Act, hidden: Float[Array, "*s W"]) -> Float[Array, "*s F"]:
    """act(gate) * up of a fused projection."""
    gate, up = jnp.split(hidden, 2, axis=-1)
    return act(gate) * up


def grouped_or_tiled(
    act: Act,
    rows: Float[Array, "M D"],
    sizes: Int[Array, "E"],
    gate_up: Stack,
    down: Stack,
    tile: int | None = None,
    device: Device | None = None,
) -> Float[Array, "M D"]:
    """Rows sorted by expert, `sizes` of each, through their experts: by our kernels, where they take both products.

    tile: rows of a tile (None: `tile_of` these rows and experts). Rows behind the last expert's hold anything.

    XLA for GPUs has no grouped product: it makes ragged_dot a dense one of every row by every expert, [E, M, D] in
    memory. Where the kernels refuse, the tiles' loop is left.
    """
    if refuses(rows, gate_up, down, tile, device) is not None:
        return tiled(act, rows, sizes, gate_up, down, tile)

    def product(x: Array, w: Stack) -> Array:
        if isinstance(w, Scaled):
            return grouped.grouped(x, w.values, sizes, w.scale, tile=tile, device=device)
        return grouped.grouped(x, w.astype(x.dtype), sizes, tile=tile, device=device)

    return product(gated(act, product(rows, gate_up)), down)


def refuses(
    rows: Float[Array, "M D"],
    gate_up: Stack,
    down: Stack,
    tile: int | None = None,
    device: Device | None = None,
) -> str | None:
    """Why our kernels do not take these experts; None: they do."""

    def why(width: int, w: Stack) -> str | None:
        x = jax.ShapeDtypeStruct((rows.shape[0], width), rows.dtype)
        if isinstance(w, Scaled):
            return grouped.refuses(x, w.values, w.scale, tile=tile, device=device)
        return grouped.refuses(x, jax.ShapeDtypeStruct(w.shape, rows.dtype), tile=tile, device=device)

    inside = (down.values if isinstance(down, Scaled) else down).shape[1]
    return why(rows.shape[1], gate_up) or why(inside, down)


def ragged(
    act: Act,
    rows: Float[Array, "M D"],
    sizes: Int[Array, "E"],
    gate_up: Stack,
    down: Stack,
    tile: int | None = None,
) -> Float[Array, "M D"]:
    """The same, for TPUs, whose compiler has a grouped product for ragged_dot.

    It would first write int8 matrices down in x's dtype, all of them: those go through the tiles' loop.
    """
    if isinstance(gate_up, Scaled) or isinstance(down, Scaled):
        return tiled(act, rows, sizes, gate_up, down, tile)
    hidden = gated(act, jax.lax.ragged_dot(rows, gate_up.astype(rows.dtype), sizes))
    return jax.lax.ragged_dot(hidden, down.astype(rows.dtype), sizes)


def tiled(
    act: Act,
    rows: Float[Array, "M D"],
    sizes: Int[Array, "E"],
    gate_up: Stack,
    down: Stack,
    tile: int | None = None,
) -> Float[Array, "M D"]:
    """The same in plain jnp, without a product of every row by every expert: a loop over tiles of rows."""
    tile = tile or tile_of(len(rows), len(sizes))
    if isinstance(gate_up, Scaled) or isinstance(down, Scaled):
        return _tiles(act, tile, rows, sizes, gate_up, down)
    return _differentiable(act, tile, rows, sizes, gate_up, down)


def _one(act: Act, tile: Float[Array, "t D"], gate_up: Stack, down: Stack, e: Array) -> Float[Array, "t D"]:
    """A tile through one expert; its matrices are cast here, where they are small."""

    def product(x: Array, w: Stack) -> Array:
        if isinstance(w, Scaled):
            return (x @ w.values[e].astype(x.dtype)) * w.scale[e].astype(x.dtype)
        return x @ w[e].astype(x.dtype)

    return product(gated(act, product(tile, gate_up)), down)


def _tiles(act: Act, tile: int, rows: Array, sizes: Array, gate_up: Stack, down: Stack) -> Array:
    """A loop over tiles. What one writes over the next expert's rows, that expert's tiles write again."""
    p, padded = plan(sizes, len(rows), tile), jnp.pad(rows, ((0, tile), (0, 0)))

    def step(i: Array, out: Array) -> Array:
        mine = jax.lax.dynamic_slice_in_dim(padded, p.start[i], tile)
        y = _one(act, mine, gate_up, down, p.expert[i])
        return jax.lax.dynamic_update_slice_in_dim(out, y, p.start[i], 0)

    return jax.lax.fori_loop(0, p.count, step, jnp.zeros_like(padded))[: len(rows)]


def _forward(act: Act, tile: int, *args: Any) -> tuple[Array, Any]:
    return _tiles(act, tile, *args), args


def _backward(act: Act, tile: int, saved: Any, cotangent: Float[Array, "M D"]) -> tuple[Any, ...]:
    """The same tiles again: the hidden rows are made anew, each expert's gradients summed in place."""
    rows, sizes, gate_up, down = saved
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


_differentiable = jax.custom_vjp(_tiles, nondiff_argnums=(0, 1))
_differentiable.defvjp(_forward, _backward)
