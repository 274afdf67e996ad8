"""Head size 512 on Hopper: 64 rows, two warpgroups, each with half of the keys of a tile and half of the columns.

64 rows of 512 columns in fp32 are 256 registers per thread, more than there are, so the columns of the output are
divided. Scores are not computed twice: each warpgroup computes those of its half of the keys, both agree on the
maximum of each row, and each reads the weights of the other half from shared memory (FlashMLA divides its work like
this). Keys and values are loaded in pieces of 16 KB: beside the queries there is no room for two tiles of 128 keys.
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

from mercury_jax.ops.attention.hopper_split_merge import parts_of, store_result
from mercury_jax.ops.attention.hopper_tile_loop import (
    FLOOR,
    PER_ROW,
    ROWS,
    AttentionConfig,
    KeyTiles,
    Ref,
    SharedMemory,
    Value,
    across_columns,
    clear_values,
    full,
    is_covered,
    is_unmasked,
    mask_scores,
    scaled_scores,
)

KEYS = 128  # of a tile: a half for each warpgroup
HALF = KEYS // 2
DEPTH = 64  # columns of a piece of keys [2, HALF, DEPTH]
SPAN = 128  # columns of a piece of values [HALF, SPAN]
STAGES = 4  # pieces of keys in flight, and of values


# --- the producer


def produce(c: AttentionConfig, s: SharedMemory, tiles: KeyTiles, sources: tuple[Ref, ...]) -> None:
    """Loads all pieces of a program, in the order in which they are read.

    Args:
        sources: From `tile_loop.sources_of`.
    """
    pieces = s.q.shape[0]  # of the keys of a tile, and of its values

    def load_keys(i: Value, n: Value) -> None:
        """Columns n * DEPTH .. of the keys of step i, in two copies: the halves are tiles of their own."""
        slot, begin = _free_slot(s.k_free, i, n), tiles.start(c, i)
        for half in (0, 1):
            at = (tiles.batch, pl.ds(begin + half * HALF, HALF), tiles.group, pl.ds(n * DEPTH, DEPTH))
            plgpu.copy_gmem_to_smem(sources[0].at[at], s.k.at[slot, half], s.k_full.at[slot])

    def load_values(i: Value, n: Value) -> None:
        """The n-th piece of the values of step i; even pieces are for warpgroup 0, odd ones for warpgroup 1."""
        slot, begin = _free_slot(s.v_free, i, n), tiles.start(c, i)
        worker, index = jax.lax.rem(n, jnp.int32(2)), jax.lax.div(n, jnp.int32(2))
        # A warpgroup reads its columns of values with its own half of the keys first, then those with the other half.
        spans = jnp.int32(pieces // 4)  # pieces that the columns of one warpgroup take
        half = jnp.where(index < spans, worker, 1 - worker)
        column = (worker * spans + jax.lax.rem(index, spans)) * SPAN
        at = (tiles.batch, pl.ds(begin + half * HALF, HALF), tiles.group, pl.ds(column, SPAN))
        plgpu.copy_gmem_to_smem(sources[1].at[at], s.v.at[slot], s.v_full.at[slot])

    def step(
        i: Value, _: None
    ) -> None:  # loops: unrolled, addresses would take more registers than there are
        jax.lax.fori_loop(0, pieces, lambda n, _: load_keys(i, n), None)
        jax.lax.fori_loop(0, pieces, lambda n, _: load_values(i, n), None)

    jax.lax.fori_loop(0, tiles.steps, step, None)

    @pl.when(tiles.steps > 0)
    def _() -> None:  # wait until all has been read
        for slot in range(STAGES):
            plgpu.barrier_wait(s.k_free.at[slot])
            plgpu.barrier_wait(s.v_free.at[slot])


def _free_slot(free: Ref, i: Value, n: Value) -> Value:
    """Waits for the slot of the n-th piece of step i and returns it. STAGES divides the pieces of a tile."""
    slot = jax.lax.rem(n, jnp.int32(STAGES))
    pl.when((i > 0) | (n >= STAGES))(lambda: plgpu.barrier_wait(free.at[slot]))
    return slot


# --- the computing warpgroups


def compute(
    c: AttentionConfig, s: SharedMemory, tiles: KeyTiles, worker: Value, q: Ref, gaps: Ref, out: Ref, lse: Ref
) -> None:
    """All steps of one of the two computing warpgroups, and the store of its columns.

    Args:
        q: Queries [P, M, K].
        gaps: Their gaps [B, E, M].
        out: Output [1, B, T, H, K].
        lse: Log-sum-exp [1, P, M].
    """
    pair, tile = jax.lax.axis_index("pair"), jax.lax.axis_index("tile")
    rows, spans = pl.ds(tile * ROWS, ROWS), q.shape[-1] // 2 // SPAN

    @pl.when(worker == 0)
    def _() -> None:  # both warpgroups have the same rows: one loads them, both wait
        for n in range(s.q.shape[0]):
            piece = q.at[pair, rows, pl.ds(n * DEPTH, DEPTH)]
            plgpu.copy_gmem_to_smem(piece, s.q.at[n], s.q_full.at[0])
        plgpu.copy_gmem_to_smem(gaps.at[tiles.batch, :, rows], s.gaps.at[0], s.q_full.at[0])

    plgpu.barrier_wait(s.q_full.at[0])
    # This warpgroup's columns of the sums, in arrays [64, SPAN]; then maxima and totals [64].
    sums = tuple(full(0.0, (ROWS, SPAN)) for _ in range(spans))
    start = (*sums, full(FLOOR, (ROWS,)), full(0.0, (ROWS,)))
    step = functools.partial(_step, c, s, tiles, worker)
    *sums, peak, total = jax.lax.fori_loop(0, tiles.steps, step, start)
    total = total + _exchange(s, worker, total)  # each has summed the weights of its half of the keys
    safe = jnp.where(total > 0, total, 1.0)
    # The result, by way of the values that this warpgroup alone has read, which are 64 x SPAN each as well.
    parts = []
    for n, x in enumerate(sums):
        staging, column = s.v.at[2 * n + worker], (worker * spans + n) * SPAN
        staging[...] = (x * across_columns(1.0 / safe, x)).astype(staging.dtype)
        parts += parts_of(c, staging, column)
    nats = jnp.where(total > 0, peak * math.log(2) + jnp.log(safe), -jnp.inf)
    merged = None if s.merged is None else s.merged.at[worker]
    store_result(c, tiles, tile * ROWS, parts, nats, merged, s.gaps.at[0, worker], out, lse)


def _step(
    c: AttentionConfig, s: SharedMemory, tiles: KeyTiles, worker: Value, i: Value, carry: tuple[Value, ...]
) -> tuple[Value, ...]:
    """Adds the key tile of step i to the softmax: the weights of this half of the keys, the sums of these columns."""
    *sums, before, total = carry
    # 1. Scores of this half of the keys [64, HALF].
    scores, unit = scaled_scores(c, _scores(s, worker))
    begin, unmasked = tiles.start(c, i) + worker * HALF, is_unmasked(c, tiles, i)
    mask = functools.partial(mask_scores, s.gaps.at[0], begin, (tiles.first + i) * c.keys)
    scores = jax.lax.cond(unmasked, lambda x: x, mask, scores)
    # 2. Both warpgroups agree on the maximum of each row over both halves, because they share the sums.
    own = scores.max(axis=1) * unit
    peak = jnp.maximum(before, jnp.maximum(own, _exchange(s, worker, own)))
    weights = jnp.exp2(scores * unit - across_columns(peak, scores))
    shrink = jnp.exp2(before - peak)
    total = total * shrink + weights.sum(axis=1)
    # 3. The weights of this half, for the other warpgroup. It has read those of the step before: it arrived at
    # `exchanged` in this step after its last product with them.
    weights = weights.astype(s.weights.dtype)
    s.weights.at[worker][...] = weights
    plgpu.commit_smem()
    plgpu.barrier_arrive(s.weights_full.at[0])
    # 4. Sums of these columns over both halves of the keys.
    sums = [x * across_columns(shrink, x) for x in sums]
    clear = functools.partial(_clear, c, s, tiles, i, unmasked)
    sums = _add_products(c, s, worker, sums, weights, clear)
    return *sums, peak, total


def _exchange(s: SharedMemory, worker: Value, x: Value) -> Value:
    """Gives the other warpgroup this one's number of each row, and returns the other's."""
    s.exchange.at[worker][...] = x
    plgpu.barrier_arrive(s.exchanged.at[0])
    plgpu.barrier_wait(s.exchanged.at[0])
    return plgpu.layout_cast(s.exchange[1 - worker], PER_ROW)


def _clear(
    c: AttentionConfig, s: SharedMemory, tiles: KeyTiles, i: Value, unmasked: Value, slot: Value, half: Value
) -> None:
    """Clears the values of keys that no row attends to; only one warpgroup reads a piece of values."""
    begin = tiles.start(c, i)

    @pl.when(jnp.logical_not(unmasked | is_covered(c, tiles, begin)))
    def _() -> None:
        clear_values(c, tiles, begin + half * HALF, s.v.at[slot])


def _scores(s: SharedMemory, worker: Value) -> Value:
    """q k^T [ROWS, HALF] in fp32, a sum over pieces of the columns.

    wgmma is asynchronous: a piece is released when the product after it has started.
    """

    def fill(acc: Any) -> Value:
        def multiply(n: Value) -> None:
            slot = jax.lax.rem(jnp.int32(n), jnp.int32(STAGES))
            plgpu.barrier_wait(s.k_full.at[slot])
            plgpu.wgmma(acc, s.q.at[n], s.k.at[slot, worker].transpose((1, 0)))

        def next_piece(n: Value, _: None) -> None:
            multiply(n)
            plgpu.wgmma_wait(1)  # all products but the one just started are complete
            plgpu.barrier_arrive(s.k_free.at[jax.lax.rem(n - 1, jnp.int32(STAGES))])

        multiply(0)
        jax.lax.fori_loop(1, s.q.shape[0], next_piece, None)
        scores = acc[...]  # waits for the last product
        plgpu.barrier_arrive(s.k_free.at[(s.q.shape[0] - 1) % STAGES])
        return scores

    return pl.run_scoped(fill, plgpu.WGMMAAccumulatorRef((ROWS, HALF), jnp.float32))


def _add_products(
    c: AttentionConfig,
    s: SharedMemory,
    worker: Value,
    sums: list[Value],
    weights: Value,
    clear: Callable[[Value, Value], None],
) -> list[Value]:
    """sums + weights v over this warpgroup's columns; its own half of the keys first, then the other half."""
    spans = len(sums)
    slots = [2 * n % STAGES + worker for n in range(2 * spans)]  # as `produce` fills them

    def add_all(accs: Any) -> None:
        for n, slot in enumerate(slots):
            plgpu.barrier_wait(s.v_full.at[slot])
            clear(slot, worker if n < spans else 1 - worker)
            if n == spans:  # only now are the other warpgroup's weights needed
                plgpu.barrier_wait(s.weights_full.at[0])
            left, right = weights if n < spans else s.weights.at[1 - worker], s.v.at[slot]
            if c.interpreted:  # the interpreter has no wgmma with an operand in registers
                left = left if isinstance(left, jax.Array) else left[...]
                product = jnp.dot(left, right[...], preferred_element_type=jnp.float32)
                accs[n % spans] = accs[n % spans] + product
            else:
                plgpu.wgmma(accs[n % spans], left, right)
            if n:  # a piece is released when the product after it has started
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(s.v_free.at[slots[n - 1]])

    if c.interpreted:  # nor has it run_state
        found = list(sums)
        add_all(found)
    else:
        found = pl.run_state(add_all)([plgpu.WGMMAAccumulatorRef.init(x) for x in sums])
    plgpu.barrier_arrive(s.v_free.at[slots[-1]])
    return found
