"""What the warpgroups of the Blackwell kernel do: one feeds, one starts the products and takes the softmax."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from mercury_jax.kernels.blackwell.tensor import LAYOUT, ROWS, Tensor, parts, product, read, settle, write
from mercury_jax.kernels.hopper.feed import feed
from mercury_jax.kernels.hopper.plan import Plan, Scratch, Walk, walk_of
from mercury_jax.kernels.hopper.softmax import FLOOR, blank, capped, covered, hide, inside, over

LANES = LAYOUT.reduce(1)  # one number for each row


def program(p: Plan, inputs: int, *refs: Any) -> None:
    """One program of the grid.

    refs: queries, edges, bounds, the sources of `feed` (in all `inputs`), the output, its log-sum-exp, shared memory,
    tensor memory.
    """
    (q, edges, bounds, *sources), (out, lse, s, t) = refs[:inputs], refs[inputs:]
    warpgroup, walk = jax.lax.axis_index("warpgroup"), walk_of(p, bounds)
    pl.when(warpgroup == 0)(lambda: _compute(p, s, t, walk, q, edges, out, lse))
    pl.when(warpgroup == 1)(lambda: feed(p, s, walk, tuple(sources)))


def _compute(p: Plan, s: Scratch, t: Tensor, walk: Walk, q: Any, edges: Any, out: Any, lse: Any) -> None:
    pair, tile, split = (jax.lax.axis_index(name) for name in ("pair", "tile", "split"))
    rows = pl.ds(tile * ROWS, ROWS)
    plgpu.copy_gmem_to_smem(q.at[pair, rows], s.q, s.q_full.at[0])
    plgpu.copy_gmem_to_smem(edges.at[walk.batch, :, rows], s.edges, s.q_full.at[0])
    plgpu.barrier_wait(s.q_full.at[0])
    pl.when(walk.steps > 0)(lambda: _score(p, s, t, jnp.int32(0)))
    fill = lambda x: plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), LANES)
    step = functools.partial(_step, p, s, t, walk)
    most, total = jax.lax.fori_loop(0, walk.steps, step, (fill(FLOOR), fill(0.0)))
    pl.when(walk.steps > 0)(lambda: plgpu.barrier_wait(t.summed.at[0]))
    safe = jnp.where(total > 0, total, 1.0)
    lse[split, pair, rows] = jnp.where(total > 0, most * math.log(2) + jnp.log(safe), -jnp.inf)
    _store(p, t, jnp.where(total > 0, 1.0 / safe, 0.0), out.at[split, pair, rows])


def _store(p: Plan, t: Tensor, share: Any, out: Any) -> None:
    """sum * share, and zeros where the share is 0, since no product may have written there: a copy for each part."""
    for columns, part in parts(t.sum):
        sums = read(p, part)
        each = over(share, sums)
        plgpu.wait_smem_to_gmem(0)  # the part before has been read
        t.out[...] = jnp.where(each > 0, sums * each, 0.0)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(t.out, out.at[:, columns])
    plgpu.wait_smem_to_gmem(0)


def _score(p: Plan, s: Scratch, t: Tensor, i: Any) -> None:
    """Start q k^T of step i, once its keys are there."""
    slot, half = jax.lax.rem(i, jnp.int32(p.stages)), jax.lax.rem(i, jnp.int32(2))
    plgpu.barrier_wait(s.k_full.at[slot])
    scores = t.scores.at[:, pl.ds(half * p.keys, p.keys)]
    product(p, scores, s.q, s.k.at[slot], s.k_free.at[slot], t.scored.at[half], False, turned=True)


def _step(p: Plan, s: Scratch, t: Tensor, walk: Walk, i: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
    """carry: of each row the largest score so far in units of log 2, and the sum of its weights."""
    (most, total), half = carry, jax.lax.rem(i, jnp.int32(2)) * p.keys
    plgpu.barrier_wait(t.scored.at[jax.lax.rem(i, jnp.int32(2))])
    found = [read(p, part) for _, part in parts(t.scores.at[:, pl.ds(half, p.keys)])]
    pl.when(i + 1 < walk.steps)(lambda: _score(p, s, t, i + 1))
    units = [capped(p, x) for x in found]
    mask = functools.partial(_mask, s.edges, walk.start(p, i), (walk.first + i) * p.keys)
    scores = jax.lax.cond(inside(p, walk, i), lambda *xs: xs, mask, *(x for x, _ in units))
    unit = units[0][1]
    peak = functools.reduce(jnp.maximum, [x.max(axis=1) * unit for x in scores], most)
    shrink = jnp.exp2(most - peak)
    total = total * shrink
    for x, (_, part) in zip(scores, parts(t.weights.at[:, pl.ds(half, p.keys)]), strict=True):
        weights = jnp.exp2(x * unit - over(peak, x))
        total = total + weights.sum(axis=1)
        write(p, part, weights.astype(t.weights.dtype))
    _add(p, s, t, walk, i, shrink)
    return peak, total


def _mask(edges: Any, begin: Any, at: Any, *scores: Any) -> tuple[Any, ...]:
    """`hide` for the parts of a tile, which are few columns each."""
    width = scores[0].shape[1]
    return tuple(hide(edges, begin + n * width, at, x, layout=LAYOUT) for n, x in enumerate(scores))


def _add(p: Plan, s: Scratch, t: Tensor, walk: Walk, i: Any, shrink: Any) -> None:
    """Start sum = sum * shrink + weights v of step i, once the product before it is done."""

    @pl.when(i > 0)
    def _() -> None:
        plgpu.barrier_wait(t.summed.at[0])
        for _, part in parts(t.sum):
            sums = read(p, part)
            write(p, part, sums * over(shrink, sums))

    settle(p)
    slot, half = jax.lax.rem(i, jnp.int32(p.stages)), jax.lax.rem(i, jnp.int32(2)) * p.keys
    plgpu.barrier_wait(s.v_full.at[slot])
    pl.when(jnp.logical_not(inside(p, walk, i)))(lambda: _clear(p, walk, walk.start(p, i), s.v.at[slot]))
    weights = t.weights.at[:, pl.ds(half, p.keys)]
    product(p, t.sum, weights, s.v.at[slot], s.v_free.at[slot], t.summed.at[0], i > 0)


def _clear(p: Plan, walk: Walk, begin: Any, values: Any) -> None:
    """Zeros for the values of keys that nobody sees, where a tile may have such."""
    pl.when(jnp.logical_not(covered(p, walk, begin)))(lambda: blank(p, walk, begin, values))
