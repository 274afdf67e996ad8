"""Mixture of experts as plain functions: routing (the choice of experts), and the feed-forward of the chosen experts.

A token has one row for each of its experts. Rows are sorted by expert (`ops.experts.op`), each expert applies its
gated feed-forward to its rows, and the results are weighted and summed per token (`combine`). The matrix products use
`ops.experts.grouped_matmul` on GPUs, `ragged_dot` on TPUs, and a loop over tiles of rows elsewhere. `ops.experts` and
`tensor_parallel.experts` call `apply_experts`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mercury_jax.config import Experts
from mercury_jax.models.weight_quant import QuantisedWeight, RowQuantisedWeight, multiply
from mercury_jax.ops.experts.grouped_matmul import (
    GROUPED,
    Prepared,
    grouped_matmuls,
    prepare,
    tile_rows,
    tiles_of,
)
from mercury_jax.ops.experts.op import DISPATCH, ExpertOutputs, combine
from mercury_jax.ops.norms.op import ROUND_ROWS
from mercury_jax.ops.quantised_rows import QuantisedRows, Rows, dense
from mercury_jax.types import Device, LoraWeight

Activation = Callable[[Array], Array]
Stack = Array | QuantisedWeight | LoraWeight  # [E, in, out], quantised [E, out, in]: one matrix per expert


def route(
    config: Experts, scores: Float[Array, "*s E"], correction: Float[Array, "E"] | None = None
) -> tuple[Int[Array, "*s k"], Float[Array, "*s k"]]:
    """Chooses each token's experts and their weights (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Returns:
        Ids and weights [..., k] of the k = `config.active` best experts of each token.
    """
    choice = scores if correction is None else scores + correction
    if config.groups > 1:  # keep only the groups with the largest sums of their two best scores
        group_size = config.count // config.groups
        by_group = choice.reshape(*choice.shape[:-1], config.groups, group_size)
        strength = jax.lax.top_k(by_group, min(2, group_size))[0].sum(-1)  # [..., groups]
        _, best = jax.lax.top_k(strength, config.active_groups)
        chosen = (best[..., None] == jnp.arange(config.groups)).any(axis=-2)  # [..., groups]
        choice = jnp.where(jnp.repeat(chosen, group_size, axis=-1), choice, -jnp.inf)
    _, ids = jax.lax.top_k(choice, config.active)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if config.renormalise:
        # A sum of sigmoids can underflow to 0; the largest probabilities of a softmax cannot.
        floor = 1e-20 if config.score == "sigmoid" else 0.0
        weights = weights / (weights.sum(-1, keepdims=True) + floor)
    return ids.astype(jnp.int32), weights * config.scale


def apply_experts(
    x: Rows,
    ids: Int[Array, "*s k"],
    weights: Float[Array, "*s k"],
    gate_up: Stack,
    down: Stack,
    act: Activation,
    first: Int[Array, ""] | None = None,
    total: int | None = None,
    device: Device | None = None,
) -> Float[Array, "*s D"]:
    """Computes the weighted sum of the outputs of each token's experts.

    For token n it is the sum over j of weights[n, j] * (act(x_n gate) * (x_n up)) down, with the matrices of expert
    ids[n, j]. Differentiable in x, in weights, and in stacks that are not quantised and their low-rank additions.

    Args:
        first: With expert parallelism, the id of the first of the E experts on this device. Experts of other devices
            are skipped: they add nothing to the sum and cost nothing. None: the stacks hold all experts.
    """
    outputs = expert_outputs(x, ids, weights, gate_up, down, act, first, total, device)
    # The kernels do not write rows of skipped experts, which may hold NaN.
    return combine(outputs, None if first is None else (ids >= first) & (ids < first + gate_up.shape[0]))


def expert_outputs(
    x: Rows,
    ids: Int[Array, "*s k"],
    weights: Float[Array, "*s k"],
    gate_up: Stack,
    down: Stack,
    act: Activation,
    first: Int[Array, ""] | None = None,
    total: int | None = None,
    device: Device | None = None,
) -> ExpertOutputs:
    """Computes `apply_experts` without the sum (`combine`).

    Args:
        first: Id of the first of the E experts on this device. Outputs of other experts are undefined. None: the
            stacks hold all experts.
    """
    count = gate_up.shape[0]
    flat = jax.tree.map(lambda y: y.reshape(-1, *y.shape[ids.ndim - 1 :]), x)  # N tokens
    expert = ids.reshape(-1, ids.shape[-1])
    if first is not None:  # give rows of other devices' experts the id E, which sorts them last
        expert = jnp.where((expert >= first) & (expert < first + count), expert - first, count)

    # On GPUs the dispatch kernel is used where the products have kernels, too.
    why = kernels_refuse(flat, expert, (gate_up, down), device)

    def branch(
        products: Callable[..., Array], backend: str = "reference"
    ) -> Callable[..., tuple[Array, Array]]:
        def run(x: Rows, expert: Array, gate_up: Stack, down: Stack) -> tuple[Array, Array]:
            found = DISPATCH.run(x, expert, count=count, backend=backend, device=device)
            return products(act, found.rows, found.offsets, gate_up, down, total), found.rank

        return run

    rows, rank = jax.lax.platform_dependent(
        flat, expert, gate_up, down,
        cuda=branch(functools.partial(grouped_or_tiled, device=device), "reference" if why else "hopper"),
        tpu=branch(ragged),
        default=branch(tiled),
    )  # fmt: skip
    return ExpertOutputs(rows, rank.reshape(ids.shape), weights)


def kernels_refuse(
    x: Rows | jax.ShapeDtypeStruct,
    expert: Array | jax.ShapeDtypeStruct,
    stacks: Sequence[Stack],
    device: Device | None = None,
    act: Activation | None = None,
) -> str | None:
    """Gives the reason why the kernels do not compute dispatch and products of these experts."""
    like = jax.eval_shape(dense, x)
    rows = jax.ShapeDtypeStruct((expert.size, like.shape[-1]), like.dtype)
    gate_up, down = stacks
    why = refuses(rows, gate_up, down, device, act)
    return why or DISPATCH.refuses(x, expert, count=gate_up.shape[0], device=device)


# --- the feed-forward of sorted rows


def gated(act: Activation, hidden: Float[Array, "*s W"]) -> Float[Array, "*s F"]:
    """Computes act(gate) * up from a fused projection."""
    gate, up = jnp.split(hidden, 2, axis=-1)
    return act(gate) * up


def grouped_or_tiled(
    act: Activation,
    rows: Rows,
    offsets: Int[Array, "offsets"],
    gate_up: Stack,
    down: Stack,
    total: int | None = None,
    device: Device | None = None,
) -> Float[Array, "M D"]:
    """Computes the experts' feed-forward on a GPU: with the grouped kernel if it supports both products, else `tiled`.

    XLA for GPUs has no grouped product: it turns `ragged_dot` into a dense product of every row with every expert,
    which needs an array [E, M, D].

    Args:
        offsets: The rows of expert e are offsets[e] .. offsets[e + 1] - 1. The results of rows from offsets[E] on are
            undefined.
    """
    like = jax.eval_shape(dense, rows)
    if refuses(like, gate_up, down, device) is not None:
        return tiled(act, rows, offsets, gate_up, down, total, together=True)

    def multiply(x: Rows, w: Stack, act: Activation | None = None) -> Array:
        return grouped_matmuls(expert_product(x, w, offsets, act, total, device))[0]

    fused = refuses(like, gate_up, down, device, act) is None
    hidden = multiply(rows, gate_up, act) if fused else gated(act, multiply(rows, gate_up))
    return multiply(hidden, down)


def expert_product(
    x: Rows,
    w: Any,
    offsets: Int[Array, "offsets"],
    act: Activation | None = None,
    total: int | None = None,
    device: Device | None = None,
) -> Prepared:
    """Prepares a product of the grouped kernel, which does not refuse it.

    Args:
        w: Matrices of all experts; with `act` gate and up.
    """
    how: Any = dict(act=act, total=total, device=device)
    if isinstance(w, RowQuantisedWeight):
        rows = x if isinstance(x, QuantisedRows) else ROUND_ROWS.run(x, dtype=w.values.dtype, device=device)
        return prepare(rows.values, w.values, offsets, w.scale, row_scale=rows.scale, **how)
    if isinstance(w, QuantisedWeight):
        return prepare(dense(x), w.values, offsets, w.scale, **how)
    return prepare(dense(x), w.astype(jnp.bfloat16), offsets, **how)


def refuses(
    rows: Array | jax.ShapeDtypeStruct,
    gate_up: Stack,
    down: Stack,
    device: Device | None = None,
    act: Activation | None = None,
) -> str | None:
    """Gives the reason why the grouped kernel does not support these experts."""
    for w, own in ((gate_up, act), (down, None)):
        if isinstance(w, LoraWeight):
            return "experts with a low-rank addition: its inner axis is narrower than a tile of the kernel"
        quantised = isinstance(w, QuantisedWeight)
        if quantised and not w.plain:
            return f"experts in {w.values.dtype} or with scales per group of inputs, which the kernel does not read"
        x = jax.ShapeDtypeStruct((rows.shape[0], w.shape[2 if quantised else 1]), rows.dtype)
        values, scale = (
            (w.values, w.scale) if quantised else (jax.ShapeDtypeStruct(w.shape, rows.dtype), None)
        )
        why = GROUPED.refuses(x, values, None, scale, act=own, device=device)
        if why is not None:
            return why
    return None


def ragged(
    act: Activation,
    rows: Rows,
    offsets: Int[Array, "offsets"],
    gate_up: Stack,
    down: Stack,
    total: int | None = None,
) -> Float[Array, "M D"]:
    """Computes the experts' feed-forward on a TPU, whose compiler has a grouped product for `ragged_dot`.

    Quantised stacks use `tiled`: `ragged_dot` would need all their matrices in the dtype of x in memory.
    """
    if isinstance(rows, QuantisedRows) or _quantised(gate_up) or _quantised(down):
        return tiled(act, rows, offsets, gate_up, down, total)

    def product(x: Array, w: Any) -> Array:
        if isinstance(w, LoraWeight):
            return product(x, w.base) + jnp.asarray(w.scale, x.dtype) * product(product(x, w.a), w.b)
        return jax.lax.ragged_dot(x, w.astype(x.dtype), jnp.diff(offsets[: gate_up.shape[0] + 1]))

    return product(gated(act, product(rows, gate_up)), down)


def tiled(
    act: Activation,
    rows: Rows,
    offsets: Int[Array, "offsets"],
    gate_up: Stack,
    down: Stack,
    total: int | None = None,
    together: bool = False,
) -> Float[Array, "M D"]:
    """Computes the experts' feed-forward in plain jnp: a loop over tiles of rows, each with one expert.

    On a GPU each step of the loop is a dozen launches. With `together`, and enough rows that most experts have some, a
    step multiplies a tile of every expert: most experts have no more, and few steps read their matrices again.
    """
    offsets, rows = offsets[: gate_up.shape[0] + 1], dense(rows)
    count = total or gate_up.shape[0]
    together &= len(rows) >= count and all(_read_in_place(w, rows.dtype) for w in (gate_up, down))
    run, tile = (_all_experts if together else _tiled), tile_rows(len(rows), count)
    if together:  # a second step would read all matrices again for a few rows
        tile *= 2
    return _DIFFERENTIABLE[run](act, tile, rows, offsets, gate_up, down)


def _read_in_place(w: Stack, dtype: Any) -> bool:
    """Whether a product with all matrices writes no copy of them in another dtype."""
    return w.plain if isinstance(w, QuantisedWeight) else isinstance(w, jax.Array) and w.dtype == dtype


def _quantised(w: Stack) -> bool:
    return isinstance(w.base if isinstance(w, LoraWeight) else w, QuantisedWeight)


def _of_expert(w: Stack, e: Array) -> Any:
    """Selects the matrices of expert e from a stack."""
    return jax.tree.map(lambda x: x[e], w)


def _one_expert(act: Activation, x: Float[Array, "t D"], gate_up: Any, down: Any) -> Float[Array, "t D"]:
    """Applies one expert to a tile of rows; only the matrices of this expert are cast to the dtype of x."""

    def product(x: Array, w: Any) -> Array:
        if isinstance(w, LoraWeight):
            return product(x, w.base) + jnp.asarray(w.scale, x.dtype) * product(product(x, w.a), w.b)
        if isinstance(w, QuantisedWeight):
            return multiply(x, w, 1)
        return x @ w.astype(x.dtype)

    return product(gated(act, product(x, gate_up)), down)


def _tiled(act: Activation, tile: int, rows: Array, offsets: Array, gate_up: Stack, down: Stack) -> Array:
    """Runs the loop over tiles.

    The last tile of an expert may reach into the rows of the next expert and write wrong results there. Tiles run in
    the order of experts, so the tiles of the next expert overwrite these results.
    """
    tiles, padded = tiles_of(offsets, len(rows), tile), jnp.pad(rows, ((0, tile), (0, 0)))

    def step(i: Array, out: Array) -> Array:
        x = jax.lax.dynamic_slice_in_dim(padded, tiles.start[i], tile)
        e = tiles.expert[i]
        y = _one_expert(act, x, _of_expert(gate_up, e), _of_expert(down, e))
        return jax.lax.dynamic_update_slice_in_dim(out, y, tiles.start[i], 0)

    with jax.named_scope("expert_tiles"):  # by which `bench.traffic` knows how often the loop runs
        return jax.lax.fori_loop(0, tiles.count, step, jnp.zeros_like(padded))[: len(rows)]


def _all_experts(
    act: Activation, tile: int, rows: Array, offsets: Array, gate_up: Stack, down: Stack
) -> Array:
    """Runs a loop in which each step multiplies the next tile of every expert."""
    starts, ends = offsets[:-1, None], offsets[1:, None]  # [E, 1]

    def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        done, out = carry
        place = starts + done + jnp.arange(tile)  # [E, tile]
        place = jnp.where(place < ends, place, len(rows))  # not an expert's own: read as zeros, not written
        x = rows.at[place].get(mode="fill", fill_value=0)
        y = jax.vmap(functools.partial(_one_expert, act))(x, gate_up, down)
        return done + tile, out.at[place].set(y, mode="drop")

    longest = (ends - starts).max()
    with jax.named_scope("expert_steps"):
        start = jnp.int32(0), jnp.zeros_like(rows)
        return jax.lax.while_loop(lambda carry: carry[0] < longest, step, start)[1]


def _tiled_backward(act: Activation, tile: int, saved: Any, dy: Float[Array, "M D"]) -> tuple[Any, ...]:
    """Runs the backward pass in the same loop.

    Hidden units are computed again for each tile, and the gradients of each expert are summed in place. In a stack with
    a low-rank addition only the two factors get a gradient, because the base is frozen; in a quantised stack nothing.
    """
    rows, offsets, gate_up, down = saved
    tiles = tiles_of(offsets, len(rows), tile)
    padded_rows, padded_dy = (jnp.pad(x, ((0, tile), (0, 0))) for x in (rows, dy))

    def step(i: Array, grads: tuple[Array, Any]) -> tuple[Array, Any]:
        e, start = tiles.expert[i], tiles.start[i]
        x_tile, dy_tile = (jax.lax.dynamic_slice_in_dim(x, start, tile) for x in (padded_rows, padded_dy))
        stacks = _of_expert(gate_up, e), _of_expert(down, e)
        forward = lambda x, *learnt: _one_expert(act, x, *map(_with_learnt, stacks, learnt))
        _, vjp = jax.vjp(forward, x_tile, *map(_learnt, stacks))
        own = (start + jnp.arange(tile) < tiles.end[i])[:, None]  # excludes rows of the next expert
        dx, *dw = vjp(jnp.where(own, dy_tile, 0))
        all_dx = jax.lax.dynamic_update_slice_in_dim(grads[0], dx, start, 0)
        return all_dx, jax.tree.map(lambda total, part: total.at[e].add(part), grads[1], tuple(dw))

    zeros = jax.tree.map(jnp.zeros_like, (padded_rows, (_learnt(gate_up), _learnt(down))))
    dx, (dw, dv) = jax.lax.fori_loop(0, tiles.count, step, zeros)
    dw, dv = (_with_learnt(jax.tree.map(_no_gradient, w), d) for w, d in ((gate_up, dw), (down, dv)))
    return dx[: len(rows)], np.zeros(offsets.shape, jax.dtypes.float0), dw, dv


def _learnt(w: Any) -> Any:
    """Returns the part of a stack that has a gradient: the LoRA factors, nothing quantised, or the whole stack."""
    return (w.a, w.b) if isinstance(w, LoraWeight) else () if isinstance(w, QuantisedWeight) else w


def _with_learnt(w: Any, learnt: Any) -> Any:
    """Replaces the part of a stack that `_learnt` returns."""
    if isinstance(w, LoraWeight):
        return dataclasses.replace(w, a=learnt[0], b=learnt[1])
    return w if isinstance(w, QuantisedWeight) else learnt


def _no_gradient(x: Array) -> Any:
    """The gradient of a frozen array, which is never read; of integers it has no values."""
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.zeros_like(x) if inexact else np.zeros(x.shape, jax.dtypes.float0)


def _differentiable(run: Callable[..., Array]) -> Callable[..., Array]:
    found = jax.custom_vjp(run, nondiff_argnums=(0, 1))
    found.defvjp(lambda act, tile, *args: (run(act, tile, *args), args), _tiled_backward)
    return found


_DIFFERENTIABLE = {run: _differentiable(run) for run in (_tiled, _all_experts)}
