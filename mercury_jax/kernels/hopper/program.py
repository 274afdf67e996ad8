"""What the warpgroups of the Hopper kernel do: scores, softmax and products of their 64 rows, tile by tile."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from mercury_jax.kernels.hopper import wide
from mercury_jax.kernels.hopper.feed import feed
from mercury_jax.kernels.hopper.plan import ROWS, Plan, Scratch, Walk, walk_of
from mercury_jax.kernels.hopper.softmax import (
    FLOOR,
    Running,
    blank,
    capped,
    covered,
    filled,
    hide,
    inside,
    over,
    store,
)


def program(p: Plan, inputs: int, *refs: Any) -> None:
    """One program of the grid.

    refs: queries, edges, bounds, the sources of `feed` (in all `inputs`), the output, its log-sum-exp, the scratch.
    """
    (q, edges, bounds, *sources), (out, lse, s) = refs[:inputs], refs[inputs:]
    warpgroup, walk = jax.lax.axis_index("warpgroup"), walk_of(p, bounds)
    computing, feeding = (
        (240, 24) if p.wide else (232, 40)
    )  # registers of a thread; together all that there are

    def work(worker: Any) -> None:
        if p.workers == 2:  # they take registers that the third gives up
            plgpu.set_max_registers(computing, action="increase")
        (wide.compute if p.wide else _compute)(p, s, walk, worker, q, edges, out, lse)

    def bring() -> None:
        if p.workers == 2:
            plgpu.set_max_registers(feeding, action="decrease")
        (wide.feed if p.wide else feed)(p, s, walk, tuple(sources))

    if (
        p.wide and not p.interpreted
    ):  # who it is is known when compiled: addresses that depend on it take no registers
        jax.lax.switch(warpgroup, [functools.partial(work, 0), functools.partial(work, 1), bring])
    else:
        jax.lax.cond(warpgroup < p.workers, lambda: work(warpgroup), bring)


def _compute(p: Plan, s: Scratch, walk: Walk, worker: Any, q: Any, edges: Any, out: Any, lse: Any) -> None:
    pair, tile, split = (jax.lax.axis_index(name) for name in ("pair", "tile", "split"))
    rows = pl.ds((tile * p.workers + worker) * ROWS, ROWS)
    plgpu.copy_gmem_to_smem(q.at[pair, rows], s.q.at[worker], s.q_full.at[worker])
    plgpu.copy_gmem_to_smem(edges.at[walk.batch, :, rows], s.edges.at[worker], s.q_full.at[worker])
    plgpu.barrier_wait(s.q_full.at[worker])
    start = Running(filled(0.0, (ROWS, q.shape[-1])), filled(FLOOR, (ROWS,)), filled(0.0, (ROWS,)))
    step = functools.partial(_step, p, s, walk, worker)
    end = Running(*jax.lax.fori_loop(0, walk.steps, step, tuple(start)))
    safe = jnp.where(end.total > 0, end.total, 1.0)
    # No one reads the queries any more: their place takes the result.
    store(out.at[split, pair, rows], s.q.at[worker], end.sum * over(1.0 / safe, end.sum))
    lse[split, pair, rows] = jnp.where(end.total > 0, end.most * math.log(2) + jnp.log(safe), -jnp.inf)


def _step(p: Plan, s: Scratch, walk: Walk, worker: Any, i: Any, carry: tuple[Any, ...]) -> Any:
    run, slot = Running(*carry), jax.lax.rem(i, jnp.int32(p.stages))
    plgpu.barrier_wait(s.k_full.at[slot])
    scores = _scores(p, s.q.at[worker], s.k.at[slot])
    plgpu.barrier_arrive(s.k_free.at[slot])
    scores, unit = capped(p, scores)
    begin, plain = walk.start(p, i), inside(p, walk, i)
    mask = functools.partial(hide, s.edges.at[worker], begin, (walk.first + i) * p.keys)
    scores = jax.lax.cond(plain, lambda x: x, mask, scores)
    most = jnp.maximum(run.most, scores.max(axis=1) * unit)
    weights = jnp.exp2(scores * unit - over(most, scores))
    shrink = jnp.exp2(run.most - most)
    total = run.total * shrink + weights.sum(axis=1)
    plgpu.barrier_wait(s.v_full.at[slot])
    pl.when(jnp.logical_not(plain))(lambda: _clear(p, s, walk, worker, slot, begin))
    sums = _add_product(p, run.sum * over(shrink, run.sum), weights.astype(s.v.dtype), s.v.at[slot])
    plgpu.barrier_arrive(s.v_free.at[slot])
    return sums, most, total


def _clear(p: Plan, s: Scratch, walk: Walk, worker: Any, slot: Any, begin: Any) -> None:
    """Where a tile of values has keys that nobody sees, one worker clears them for both."""

    @pl.when(jnp.logical_not(covered(p, walk, begin)))
    def _() -> None:
        pl.when(worker == 0)(lambda: blank(p, walk, begin, s.v.at[slot]))
        plgpu.barrier_arrive(s.cleared.at[0])
        plgpu.barrier_wait(s.cleared.at[0])


def _scores(p: Plan, q: Any, k: Any) -> Any:
    """q k^T in fp32."""
    if p.interpreted:  # which has no wgmma with a transposed operand
        return jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)

    def fill(acc: Any) -> Any:
        plgpu.wgmma(acc, q, k.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(fill, plgpu.WGMMAAccumulatorRef((ROWS, p.keys), jnp.float32))


def _add_product(p: Plan, sums: Any, weights: Any, v: Any) -> Any:
    """sums + weights v; weights are in registers, sums are added to in place."""
    if p.interpreted:  # which has no wgmma with an operand in registers
        return sums + jnp.dot(weights, v[...], preferred_element_type=jnp.float32)
    return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, v))(plgpu.WGMMAAccumulatorRef.init(sums))
