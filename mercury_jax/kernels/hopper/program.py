"""The computing warpgroups of the Hopper kernel: scores, online softmax and products of their 64 rows, tile by tile.

Head sizes up to 256. For 512 the warpgroups divide the work differently (`head_dim_512`).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from mercury_jax.kernels.hopper import head_dim_512
from mercury_jax.kernels.hopper.producer import produce
from mercury_jax.kernels.hopper.tile_loop import (
    FLOOR,
    ROWS,
    AttentionConfig,
    KeyTiles,
    OnlineSoftmax,
    SharedMemory,
    across_columns,
    clear_values,
    full,
    is_covered,
    is_unmasked,
    key_tiles,
    mask_scores,
    scaled_scores,
)


def program(c: AttentionConfig, inputs: int, *refs: Any) -> None:
    """One program of the grid.

    Args:
        c: Static configuration.
        inputs: Number of inputs among `refs`.
        *refs: Queries, their ranges, bounds, the producer's sources; the output, its log-sum-exp; shared memory.
    """
    (q, edges, bounds, *sources), (out, lse, s) = refs[:inputs], refs[inputs:]
    warpgroup, tiles = jax.lax.axis_index("warpgroup"), key_tiles(c, bounds)
    # Registers per thread; together all that there are.
    compute_registers, producer_registers = (240, 24) if c.wide else (232, 40)

    def compute(worker: Any) -> None:
        if c.workers == 2:  # takes registers that the producer releases
            plgpu.set_max_registers(compute_registers, action="increase")
        (head_dim_512.compute if c.wide else _compute)(c, s, tiles, worker, q, edges, out, lse)

    def load() -> None:
        if c.workers == 2:
            plgpu.set_max_registers(producer_registers, action="decrease")
        (head_dim_512.produce if c.wide else produce)(c, s, tiles, tuple(sources))

    if c.wide and not c.interpreted:  # a static worker index: addresses that depend on it take no registers
        jax.lax.switch(warpgroup, [functools.partial(compute, 0), functools.partial(compute, 1), load])
    else:
        jax.lax.cond(warpgroup < c.workers, lambda: compute(warpgroup), load)


def _compute(
    c: AttentionConfig,
    s: SharedMemory,
    tiles: KeyTiles,
    worker: Any,
    q: Any,
    edges: Any,
    out: Any,
    lse: Any,
) -> None:
    """All steps of one computing warpgroup, and the store of its result."""
    pair, tile, split = (jax.lax.axis_index(name) for name in ("pair", "tile", "split"))
    rows = pl.ds((tile * c.workers + worker) * ROWS, ROWS)
    plgpu.copy_gmem_to_smem(q.at[pair, rows], s.q.at[worker], s.q_full.at[worker])
    plgpu.copy_gmem_to_smem(edges.at[tiles.batch, :, rows], s.edges.at[worker], s.q_full.at[worker])
    plgpu.barrier_wait(s.q_full.at[worker])
    start = OnlineSoftmax(full(0.0, (ROWS, q.shape[-1])), full(FLOOR, (ROWS,)), full(0.0, (ROWS,)))
    step = functools.partial(_step, c, s, tiles, worker)
    end = OnlineSoftmax(*jax.lax.fori_loop(0, tiles.steps, step, tuple(start)))
    safe = jnp.where(end.total > 0, end.total, 1.0)
    result = end.sum * across_columns(1.0 / safe, end.sum)
    # The queries are not read any more: the result takes their place in shared memory.
    _store(out.at[split, pair, rows], s.q.at[worker], result)
    lse[split, pair, rows] = jnp.where(end.total > 0, end.peak * math.log(2) + jnp.log(safe), -jnp.inf)


def _store(out: Any, tile: Any, x: Any) -> None:
    """Writes x [ROWS, n] to memory: fp32 directly from registers, 16 bits through shared memory in whole lines.

    Four threads hold 8 numbers of a row: 32 bytes in fp32, the least that memory moves, but 16 in bf16.
    """
    if out.dtype == jnp.float32:
        out[...] = x
        return
    tile[...] = x.astype(tile.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, out)
    plgpu.wait_smem_to_gmem(0)


def _step(
    c: AttentionConfig, s: SharedMemory, tiles: KeyTiles, worker: Any, i: Any, carry: tuple[Any, ...]
) -> Any:
    """Adds the key tile of step i to the softmax."""
    state, slot = OnlineSoftmax(*carry), jax.lax.rem(i, jnp.int32(c.stages))
    plgpu.barrier_wait(s.k_full.at[slot])
    scores = _scores(c, s.q.at[worker], s.k.at[slot])  # [64, keys]
    plgpu.barrier_arrive(s.k_free.at[slot])
    scores, unit = scaled_scores(c, scores)
    begin, unmasked = tiles.start(c, i), is_unmasked(c, tiles, i)
    mask = functools.partial(mask_scores, s.edges.at[worker], begin, (tiles.first + i) * c.keys)
    scores = jax.lax.cond(unmasked, lambda x: x, mask, scores)
    peak = jnp.maximum(state.peak, scores.max(axis=1) * unit)
    weights = jnp.exp2(scores * unit - across_columns(peak, scores))
    shrink = jnp.exp2(state.peak - peak)
    total = state.total * shrink + weights.sum(axis=1)
    plgpu.barrier_wait(s.v_full.at[slot])
    pl.when(jnp.logical_not(unmasked))(lambda: _clear(c, s, tiles, worker, slot, begin))
    sums = state.sum * across_columns(shrink, state.sum)
    sums = _add_product(c, sums, weights.astype(s.v.dtype), s.v.at[slot])
    plgpu.barrier_arrive(s.v_free.at[slot])
    return sums, peak, total


def _clear(c: AttentionConfig, s: SharedMemory, tiles: KeyTiles, worker: Any, slot: Any, begin: Any) -> None:
    """If a tile of values has keys that no row attends to, one warpgroup clears them for both."""

    @pl.when(jnp.logical_not(is_covered(c, tiles, begin)))
    def _() -> None:
        pl.when(worker == 0)(lambda: clear_values(c, tiles, begin, s.v.at[slot]))
        plgpu.barrier_arrive(s.cleared.at[0])
        plgpu.barrier_wait(s.cleared.at[0])


def _scores(c: AttentionConfig, q: Any, k: Any) -> Any:
    """q k^T in fp32."""
    if c.interpreted:  # the interpreter has no wgmma with a transposed operand
        return jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)

    def multiply(acc: Any) -> Any:
        plgpu.wgmma(acc, q, k.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, c.keys), jnp.float32))


def _add_product(c: AttentionConfig, sums: Any, weights: Any, v: Any) -> Any:
    """sums + weights v; the weights are in registers, the sums are updated in place."""
    if c.interpreted:  # the interpreter has no wgmma with an operand in registers
        return sums + jnp.dot(weights, v[...], preferred_element_type=jnp.float32)
    return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, v))(plgpu.WGMMAAccumulatorRef.init(sums))
