"""A mixture of experts as plain functions: rows to their chosen experts and back.

Routing belongs to the families; here is what follows it. Assignments are sorted by expert, each expert's
rows go through its gated feed-forward, and what comes back is weighed and summed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mercury_jax.types import wide

Act = Callable[[Array], Array]
TILE = 32  # rows of one step on a CPU


def experts(
    x: Float[Array, "N D"],
    ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    gate_up: Float[Array, "E D 2*F"],
    down: Float[Array, "E F D"],
    act: Act,
) -> Float[Array, "N D"]:
    """sum over j of weights[n, j] * (act(x_n gate) * (x_n up)) down, by the experts ids[n, j].

    The gate is the first half of `gate_up`'s last axis. Computes in x's dtype, sums in fp32 at least;
    differentiable in all but ids. act must be the same function at every call, or each call compiles.
    """
    k = ids.shape[1]
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=gate_up.shape[0]).astype(jnp.int32)
    rows = x[order // k]
    out = jax.lax.platform_dependent(
        rows, sizes, gate_up.astype(x.dtype), down.astype(x.dtype),
        cpu=lambda *args: tiled(act, *args), default=lambda *args: ragged(act, *args),
    )  # fmt: skip
    back = out[jnp.argsort(order)].reshape(*ids.shape, -1)
    exact = wide(x.dtype)
    return jnp.einsum("nk,nkd->nd", weights.astype(exact), back.astype(exact)).astype(x.dtype)


def gated(act: Act, hidden: Float[Array, "*s 2*F"]) -> Float[Array, "*s F"]:
    """act(gate) * up of a fused projection."""
    gate, up = jnp.split(hidden, 2, axis=-1)
    return act(gate) * up


def ragged(
    act: Act,
    rows: Float[Array, "M D"],
    sizes: Int[Array, "E"],
    gate_up: Float[Array, "E D 2*F"],
    down: Float[Array, "E F D"],
) -> Float[Array, "M D"]:
    """Rows sorted by expert, `sizes` of each, through their experts: for accelerators."""
    hidden = gated(act, jax.lax.ragged_dot(rows, gate_up, sizes))
    return jax.lax.ragged_dot(hidden, down, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def tiled(
    act: Act,
    rows: Float[Array, "M D"],
    sizes: Int[Array, "E"],
    gate_up: Float[Array, "E D 2*F"],
    down: Float[Array, "E F D"],
) -> Float[Array, "M D"]:
    """The same, for a CPU, where ragged_dot multiplies every row by every expert.

    A loop over tiles of one expert's rows. A tile may reach into the next expert's rows; their tiles come
    later and overwrite what it left there.
    """
    plan = _plan(sizes, len(rows))
    padded = jnp.pad(rows, ((0, TILE), (0, 0)))

    def step(i: Array, out: Array) -> Array:
        e, at = plan.expert[i], plan.start[i]
        hidden = gated(act, jax.lax.dynamic_slice_in_dim(padded, at, TILE) @ gate_up[e])
        return jax.lax.dynamic_update_slice_in_dim(out, hidden @ down[e], at, 0)

    out = jnp.zeros((len(padded), down.shape[-1]), rows.dtype)
    return jax.lax.fori_loop(0, plan.count, step, out)[: len(rows)]


class Plan(NamedTuple):
    """Tiles of the sorted rows, each of one expert; those from `count` on are not used."""

    expert: Int[Array, "t"]
    start: Int[Array, "t"]
    end: Int[Array, "t"]  # of the expert's rows
    count: Int[Array, ""]


def _plan(sizes: Int[Array, "E"], rows: int) -> Plan:
    ends, tiles = jnp.cumsum(sizes), jnp.cumsum(-(-sizes // TILE))
    index = jnp.arange(rows // TILE + len(sizes))  # so many at most: one part-filled tile an expert
    expert = jnp.minimum(jnp.searchsorted(tiles, index, side="right"), len(sizes) - 1)
    nth = index - (tiles - -(-sizes // TILE))[expert]
    return Plan(expert, (ends - sizes)[expert] + nth * TILE, ends[expert], tiles[-1])


def _forward(act: Act, rows: Array, sizes: Array, gate_up: Array, down: Array) -> tuple[Array, Any]:
    return tiled(act, rows, sizes, gate_up, down), (rows, sizes, gate_up, down)


def _backward(act: Act, saved: Any, cotangent: Float[Array, "M D"]) -> tuple[Any, ...]:
    """The same tiles again: the hidden rows are made anew, each expert's gradients summed in place."""
    rows, sizes, gate_up, down = saved
    plan = _plan(sizes, len(rows))
    padded, told = (jnp.pad(x, ((0, TILE), (0, 0))) for x in (rows, cotangent))

    def step(i: Array, grads: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        e, at = plan.expert[i], plan.start[i]
        tile, dy = (jax.lax.dynamic_slice_in_dim(x, at, TILE) for x in (padded, told))
        mine = (at + jnp.arange(TILE) < plan.end[i])[:, None]
        through = lambda x, w, v: gated(act, x @ w) @ v
        _, back = jax.vjp(through, tile, gate_up[e], down[e])
        dx, dw, dv = back(jnp.where(mine, dy, 0))
        put = jax.lax.dynamic_update_slice_in_dim(grads[0], dx, at, 0)
        return put, grads[1].at[e].add(dw), grads[2].at[e].add(dv)

    zeros = (jnp.zeros_like(padded), jnp.zeros_like(gate_up), jnp.zeros_like(down))
    dx, dw, dv = jax.lax.fori_loop(0, plan.count, step, zeros)
    return dx[: len(rows)], np.zeros(sizes.shape, jax.dtypes.float0), dw, dv


tiled.defvjp(_forward, _backward)
