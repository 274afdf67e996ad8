"""Head size 512 on Hopper: 64 rows, two warpgroups, each with half of the keys of a tile and half of the columns.

64 rows of 512 columns in fp32 are 256 registers a thread, more than there are: so the columns of the output are
divided. Scores are not computed twice: each warpgroup makes those of its half of the keys, both agree on the largest
of each row, and the weights of the other half are read from shared memory (FlashMLA divides its work like this).
Keys and values stream in pieces of 16 KB: beside the queries there is no room for two tiles of 128.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from mercury_jax.kernels.hopper.plan import ROWS, Plan, Scratch, Walk
from mercury_jax.kernels.hopper.softmax import (
    FLOOR,
    blank,
    capped,
    covered,
    filled,
    hide,
    inside,
    over,
)

KEYS = 128  # of a tile: a half for each warpgroup
HALF = KEYS // 2
DEPTH = 64  # columns of a piece of keys [2, HALF, DEPTH]
SPAN = 128  # columns of a piece of values [HALF, SPAN]
RING = 4  # pieces of keys in flight, and of values


def feed(p: Plan, s: Scratch, walk: Walk, sources: tuple[Any, ...]) -> None:
    """All pieces of a walk, in the order in which they are read. sources: as those of `hopper.feed`."""
    args = (p, s, walk, sources)

    def step(i: Any, _: None) -> None:  # in loops: unrolled, addresses would take more registers than it has
        jax.lax.fori_loop(0, s.q.shape[0], lambda n, _: _load_keys(*args, i, n), None)
        jax.lax.fori_loop(0, s.q.shape[0], lambda n, _: _load_values(*args, i, n), None)

    jax.lax.fori_loop(0, walk.steps, step, None)

    @pl.when(walk.steps > 0)
    def _() -> None:  # all that was loaded has been read
        for slot in range(RING):
            plgpu.barrier_wait(s.k_free.at[slot])
            plgpu.barrier_wait(s.v_free.at[slot])


def _load_keys(p: Plan, s: Scratch, walk: Walk, sources: tuple[Any, ...], i: Any, n: Any) -> None:
    slot, (row, begin) = _vacant(s.k_free, i, n), walk.place(p, i, sources)
    for half in (0, 1):
        at = (row, pl.ds(begin + half * HALF, HALF), walk.group, pl.ds(n * DEPTH, DEPTH))
        plgpu.copy_gmem_to_smem(sources[0].at[at], s.k.at[slot, half], s.k_full.at[slot])


def _load_values(p: Plan, s: Scratch, walk: Walk, sources: tuple[Any, ...], i: Any, n: Any) -> None:
    slot, (row, begin) = _vacant(s.v_free, i, n), walk.place(p, i, sources)
    worker = jax.lax.rem(n, jnp.int32(2))
    half, column = _place(s.q.shape[0], jax.lax.div(n, jnp.int32(2)), worker)
    at = (row, pl.ds(begin + half * HALF, HALF), walk.group, pl.ds(column, SPAN))
    plgpu.copy_gmem_to_smem(sources[1].at[at], s.v.at[slot], s.v_full.at[slot])


def _vacant(free: Any, i: Any, n: Any) -> Any:
    """Where the n-th piece of step i goes, once what was there has been read. RING divides the pieces of a tile."""
    slot = jax.lax.rem(n, jnp.int32(RING))
    pl.when((i > 0) | (n >= RING))(lambda: plgpu.barrier_wait(free.at[slot]))
    return slot


def _place(count: int, n: Any, worker: Any) -> tuple[Any, Any]:
    """(half of the keys, first column) of a worker's n-th piece of values: its own keys first, then the other's."""
    spans = jnp.int32(count // 4)  # of the columns of one worker
    return jnp.where(n < spans, worker, 1 - worker), (worker * spans + jax.lax.rem(n, spans)) * SPAN


def compute(p: Plan, s: Scratch, walk: Walk, worker: Any, q: Any, edges: Any, out: Any, lse: Any) -> None:
    """What one of the two warpgroups does."""
    pair, tile, split = (jax.lax.axis_index(name) for name in ("pair", "tile", "split"))
    rows, spans = pl.ds(tile * ROWS, ROWS), q.shape[-1] // 2 // SPAN

    @pl.when(worker == 0)
    def _() -> None:
        for n in range(s.q.shape[0]):
            piece = q.at[pair, rows, pl.ds(n * DEPTH, DEPTH)]
            plgpu.copy_gmem_to_smem(piece, s.q.at[n], s.q_full.at[0])
        plgpu.copy_gmem_to_smem(edges.at[walk.batch, :, rows], s.edges.at[0], s.q_full.at[0])

    plgpu.barrier_wait(s.q_full.at[0])
    sums = tuple(filled(0.0, (ROWS, SPAN)) for _ in range(spans))
    start = (*sums, filled(FLOOR, (ROWS,)), filled(0.0, (ROWS,)))
    step = functools.partial(_step, p, s, walk, worker)
    *sums, most, total = jax.lax.fori_loop(0, walk.steps, step, start)
    total = total + _others(s, worker, total)
    safe = jnp.where(total > 0, total, 1.0)
    for n, x in enumerate(sums):
        columns = pl.ds((worker * spans + n) * SPAN, SPAN)
        out[split, pair, rows, columns] = x * over(1.0 / safe, x)

    @pl.when(worker == 0)
    def _() -> None:
        lse[split, pair, rows] = jnp.where(total > 0, most * math.log(2) + jnp.log(safe), -jnp.inf)


def _step(p: Plan, s: Scratch, walk: Walk, worker: Any, i: Any, carry: tuple[Any, ...]) -> Any:
    *sums, before, total = carry
    scores, unit = capped(p, _scores(s, worker))
    begin, plain = walk.start(p, i) + worker * HALF, inside(p, walk, i)
    mask = functools.partial(hide, s.edges.at[0], begin, (walk.first + i) * p.keys)
    scores = jax.lax.cond(plain, lambda x: x, mask, scores)
    own = scores.max(axis=1) * unit
    most = jnp.maximum(before, jnp.maximum(own, _others(s, worker, own)))
    weights = jnp.exp2(scores * unit - over(most, scores))
    shrink = jnp.exp2(before - most)
    total = total * shrink + weights.sum(axis=1)
    weights = weights.astype(s.p.dtype)
    s.p.at[worker][...] = weights
    plgpu.commit_smem()
    plgpu.barrier_arrive(s.shared.at[0])
    sums = [x * over(shrink, x) for x in sums]
    sums = _add_products(p, s, worker, sums, weights, functools.partial(_clear, p, s, walk, i, plain))
    return *sums, most, total


def _others(s: Scratch, worker: Any, x: Any) -> Any:
    """The other warpgroup's number for each row, in exchange for this one's."""
    s.most.at[worker][...] = x
    plgpu.barrier_arrive(s.met.at[0])
    plgpu.barrier_wait(s.met.at[0])
    return plgpu.layout_cast(s.most[1 - worker], plgpu.Layout.WGMMA.reduce(1))


def _clear(p: Plan, s: Scratch, walk: Walk, i: Any, plain: Any, slot: Any, half: Any) -> None:
    """Zeros where a piece of values has keys that nobody sees; only one warpgroup reads it."""
    begin = walk.start(p, i)

    @pl.when(jnp.logical_not(plain | covered(p, walk, begin)))
    def _() -> None:
        blank(p, walk, begin + half * HALF, s.v.at[slot])


def _scores(s: Scratch, worker: Any) -> Any:
    """q k^T [ROWS, HALF] in fp32, over pieces of the columns.

    wgmma is asynchronous: a piece is given back when the product after it has begun.
    """

    def fill(acc: Any) -> Any:
        def multiply(n: Any) -> None:
            slot = jax.lax.rem(jnp.int32(n), jnp.int32(RING))
            plgpu.barrier_wait(s.k_full.at[slot])
            plgpu.wgmma(acc, s.q.at[n], s.k.at[slot, worker].transpose((1, 0)))

        def then(n: Any, _: None) -> None:
            multiply(n)
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(s.k_free.at[jax.lax.rem(n - 1, jnp.int32(RING))])

        multiply(0)
        jax.lax.fori_loop(1, s.q.shape[0], then, None)
        scores = acc[...]
        plgpu.barrier_arrive(s.k_free.at[(s.q.shape[0] - 1) % RING])
        return scores

    return pl.run_scoped(fill, plgpu.WGMMAAccumulatorRef((ROWS, HALF), jnp.float32))


def _add_products(
    p: Plan, s: Scratch, worker: Any, sums: list[Any], weights: Any, clear: Callable[[Any, Any], None]
) -> list[Any]:
    """sums + weights v over this worker's columns; the other half's weights are awaited when its own are through."""
    spans = len(sums)
    slots = [2 * n % RING + worker for n in range(2 * spans)]

    def all_of(accs: Any) -> None:
        for n, slot in enumerate(slots):
            plgpu.barrier_wait(s.v_full.at[slot])
            clear(slot, worker if n < spans else 1 - worker)
            if n == spans:
                plgpu.barrier_wait(s.shared.at[0])
            _accumulate(p, accs, n % spans, weights if n < spans else s.p.at[1 - worker], s.v.at[slot])
            if n:
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(s.v_free.at[slots[n - 1]])

    if p.interpreted:  # which has no run_state, nor wgmma with an operand in registers
        found = list(sums)
        all_of(found)
    else:
        found = pl.run_state(all_of)([plgpu.WGMMAAccumulatorRef.init(x) for x in sums])
    plgpu.barrier_arrive(s.v_free.at[slots[-1]])
    return found


def _accumulate(p: Plan, accs: Any, n: int, left: Any, right: Any) -> None:
    if p.interpreted:
        weights = left if isinstance(left, jax.Array) else left[...]
        accs[n] = accs[n] + jnp.dot(weights, right[...], preferred_element_type=jnp.float32)
    else:
        plgpu.wgmma(accs[n], left, right)
