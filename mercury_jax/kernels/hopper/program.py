"""What the warpgroups of the Hopper kernel do: scores, softmax and products of their 64 rows, tile by tile."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from mercury_jax.kernels.hopper.feed import feed
from mercury_jax.kernels.hopper.plan import ROWS, Plan, Scratch, Walk, walk_of

FLOOR = -1e30  # finite, so that rows without keys have no inf - inf
WGMMA = plgpu.Layout.WGMMA
LANES = WGMMA.reduce(1)  # one number for each row


class Running(NamedTuple):
    """Softmax so far: sum of weight * value, the largest score in units of log 2, sum of weights."""

    sum: Any
    most: Any
    total: Any


def program(p: Plan, inputs: int, *refs: Any) -> None:
    """One program of the grid.

    refs: queries, edges, bounds, the sources of `feed` (in all `inputs`), the output, its log-sum-exp, the scratch.
    """
    (q, edges, bounds, *sources), (out, lse) = refs[:inputs], refs[inputs : inputs + 2]
    s, warpgroup, walk = Scratch(*refs[inputs + 2 :]), jax.lax.axis_index("warpgroup"), walk_of(p, bounds)

    @pl.when(warpgroup < p.workers)
    def _() -> None:
        if p.workers == 2:  # they take registers that the third gives up
            plgpu.set_max_registers(232, action="increase")
        _compute(p, s, walk, warpgroup, q, edges, out, lse)

    @pl.when(warpgroup == p.workers)
    def _() -> None:
        if p.workers == 2:
            plgpu.set_max_registers(40, action="decrease")
        feed(p, s, walk, tuple(sources))


def _compute(p: Plan, s: Scratch, walk: Walk, worker: Any, q: Any, edges: Any, out: Any, lse: Any) -> None:
    pair, tile, split = (jax.lax.axis_index(name) for name in ("pair", "tile", "split"))
    rows = pl.ds((tile * p.workers + worker) * ROWS, ROWS)
    plgpu.copy_gmem_to_smem(q.at[pair, rows], s.q.at[worker], s.q_full.at[worker])
    plgpu.copy_gmem_to_smem(edges.at[walk.batch, :, rows], s.edges.at[worker], s.q_full.at[worker])
    plgpu.barrier_wait(s.q_full.at[worker])
    fill = lambda x, shape, layout: plgpu.layout_cast(jnp.full(shape, x, jnp.float32), layout)
    start = Running(
        fill(0.0, (ROWS, q.shape[-1]), WGMMA), fill(FLOOR, (ROWS,), LANES), fill(0.0, (ROWS,), LANES)
    )
    step = functools.partial(_step, p, s, walk, worker)
    end = Running(*jax.lax.fori_loop(0, walk.steps, step, tuple(start)))
    safe = jnp.where(end.total > 0, end.total, 1.0)
    out[split, pair, rows] = (end.sum * _over(1.0 / safe, end.sum)).astype(out.dtype)
    lse[split, pair, rows] = jnp.where(end.total > 0, end.most * math.log(2) + jnp.log(safe), -jnp.inf)


def _step(p: Plan, s: Scratch, walk: Walk, worker: Any, i: Any, carry: tuple[Any, ...]) -> Any:
    run, slot = Running(*carry), jax.lax.rem(i, jnp.int32(p.stages))
    plgpu.barrier_wait(s.k_full.at[slot])
    scores = _scores(p, s.q.at[worker], s.k.at[slot])
    plgpu.barrier_arrive(s.k_free.at[slot])
    unit = p.scale * math.log2(math.e)
    if p.softcap is not None:
        scores, unit = jnp.tanh(scores * (p.scale / p.softcap)), p.softcap * math.log2(math.e)
    begin, at = walk.start(p, i), (walk.first + i) * p.keys
    inside = (begin >= jnp.maximum(walk.whole[0], at)) & (begin + p.keys <= walk.whole[1])
    hide = functools.partial(_hide, s.edges.at[worker], begin, at)
    scores = jax.lax.cond(inside, lambda x: x, hide, scores)
    most = jnp.maximum(run.most, scores.max(axis=1) * unit)
    weights = jnp.exp2(scores * unit - _over(most, scores))
    shrink = jnp.exp2(run.most - most)
    total = run.total * shrink + weights.sum(axis=1)
    plgpu.barrier_wait(s.v_full.at[slot])
    pl.when(jnp.logical_not(inside))(lambda: _clear(p, s, walk, worker, slot, begin))
    sums = _add_product(p, run.sum * _over(shrink, run.sum), weights.astype(s.v.dtype), s.v.at[slot])
    plgpu.barrier_arrive(s.v_free.at[slot])
    return sums, most, total


def _hide(edges: Any, begin: Any, at: Any, scores: Any) -> Any:
    """Scores of keys that a row does not see become -inf, and those below `at`, which the tile before has had.

    The ranges are read again each time: few tiles need them, and registers are scarce.
    """
    key = begin + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=WGMMA)
    edge = [plgpu.layout_cast(edges[e], LANES) for e in range(edges.shape[0])]
    see = [
        (key >= _over(jnp.maximum(start, at), scores)) & (key < _over(end, scores))
        for start, end in zip(edge[::2], edge[1::2], strict=True)
    ]
    return jnp.where(functools.reduce(jnp.logical_or, see), scores, -jnp.inf)


def _clear(p: Plan, s: Scratch, walk: Walk, worker: Any, slot: Any, begin: Any) -> None:
    """Zeros for the values of keys in no range of any row: a weight of 0 does not undo a NaN."""
    hulls = [(walk.hulls[2 * r], walk.hulls[2 * r + 1]) for r in range(p.ranges)]
    covered = [(begin >= low) & (begin + p.keys <= high) for low, high in hulls]

    def clear() -> None:
        for row in range(0, p.keys, ROWS):
            for column in range(0, s.v.shape[-1], 64):
                part = s.v.at[slot, pl.ds(row, ROWS), pl.ds(column, 64)]
                key = begin + row + plgpu.broadcasted_iota(jnp.int32, (ROWS, 64), 0, layout=WGMMA)
                seen = functools.reduce(jnp.logical_or, [(key >= low) & (key < high) for low, high in hulls])
                values = plgpu.layout_cast(part[...], WGMMA)
                part[...] = jnp.where(seen, values, jnp.zeros_like(values))
        plgpu.commit_smem()

    @pl.when(jnp.logical_not(functools.reduce(jnp.logical_or, covered)))
    def _() -> None:
        pl.when(worker == 0)(clear)
        plgpu.barrier_arrive(s.cleared.at[0])
        plgpu.barrier_wait(s.cleared.at[0])


def _over(x: Any, like: Any) -> Any:
    """One number a row, for each of its columns."""
    return jax.lax.broadcast_in_dim(x, like.shape, [0])


def _scores(p: Plan, q: Any, k: Any) -> Any:
    """q k^T in fp32."""
    if p.interpreted:  # which has no wgmma with a transposed operand
        return jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)

    def fill(acc: Any) -> Any:
        plgpu.wgmma(acc, q, plgpu.transpose_ref(k, (1, 0)))
        return acc[...]

    return pl.run_scoped(fill, plgpu.WGMMAAccumulatorRef((ROWS, p.keys), jnp.float32))


def _add_product(p: Plan, sums: Any, weights: Any, v: Any) -> Any:
    """sums + weights v; weights are in registers, sums are added to in place."""
    if p.interpreted:  # which has no wgmma with an operand in registers
        return sums + jnp.dot(weights, v[...], preferred_element_type=jnp.float32)
    return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, v))(plgpu.WGMMAAccumulatorRef.init(sums))
