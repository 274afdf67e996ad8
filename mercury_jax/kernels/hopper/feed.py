"""The warpgroup that feeds the others: tiles of keys and values into shared memory, as they are or out of int8."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array

from mercury_jax.kernels.hopper.plan import ROWS, Plan, Scratch, Walk
from mercury_jax.kernels.rounded import Keys, Rounded

RAW = 2  # int8 tiles in flight
BYTES = (
    plgpu.Layout.WGMMA_UPCAST_2X
)  # four neighbours a thread: one load of int8, one store of what it becomes


def feed(p: Plan, s: Scratch, walk: Walk, sources: tuple[Any, ...]) -> None:
    """All tiles of a walk. sources: keys and values [B, S, G, K]; int8: also their scales [B, G, S].

    Of a pool, [1, S, G, K] and [1, G, S], and last the slots at which the tiles of each row begin [B, N].
    """
    if p.rounded:
        for i in range(RAW):
            pl.when(i < walk.steps)(lambda i=i: _load_raw(p, s, walk, sources, i))
    bring = _widen if p.rounded else _load
    jax.lax.fori_loop(0, walk.steps, lambda i, _: bring(p, s, walk, sources, i), None)
    for slot in range(p.stages):  # a barrier is left when all that was announced there has been seen
        pl.when(slot < walk.steps)(lambda slot=slot: _read(s, slot))


def _read(s: Scratch, slot: int) -> None:
    """Waits until the last tile in a slot has been read."""
    plgpu.barrier_wait(s.k_free.at[slot])
    plgpu.barrier_wait(s.v_free.at[slot])


def _load(p: Plan, s: Scratch, walk: Walk, sources: tuple[Any, ...], i: Any) -> None:
    slot = jax.lax.rem(i, jnp.int32(p.stages))
    row, start = walk.place(p, i, sources)
    at = (row, pl.ds(start, p.keys), walk.group)
    for source, tile, full, free in zip(sources[:2], *_tiles(s), strict=True):
        pl.when(i >= p.stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
        plgpu.copy_gmem_to_smem(source.at[at], tile.at[slot], full.at[slot])


def _tiles(s: Scratch) -> tuple[tuple[Any, Any], ...]:
    """Of keys and of values: the tiles, where they are full and where they are free."""
    return (s.k, s.v), (s.k_full, s.v_full), (s.k_free, s.v_free)


def _load_raw(p: Plan, s: Scratch, walk: Walk, sources: tuple[Any, ...], i: Any) -> None:
    slot, (row, start) = jax.lax.rem(jnp.int32(i), jnp.int32(RAW)), walk.place(p, i, sources)
    keys = pl.ds(start, p.keys)
    for x in (0, 1):
        plgpu.copy_gmem_to_smem(sources[x].at[row, keys, walk.group], s.raw.at[x, slot], s.raw_full.at[slot])
        plgpu.copy_gmem_to_smem(
            sources[2 + x].at[row, walk.group, keys], s.scales.at[x, slot], s.raw_full.at[slot]
        )


def _widen(p: Plan, s: Scratch, walk: Walk, sources: tuple[Any, ...], i: Any) -> None:
    """values * scale of one tile of keys and one of values, for the others to read as if it had been loaded."""
    raw, slot = jax.lax.rem(i, jnp.int32(RAW)), jax.lax.rem(i, jnp.int32(p.stages))
    plgpu.barrier_wait(s.raw_full.at[raw])
    for x, (tile, full, free) in enumerate(zip(*_tiles(s), strict=True)):
        pl.when(i >= p.stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
        for row in range(0, p.keys, ROWS):
            rows = pl.ds(row, ROWS)
            scale = plgpu.layout_cast(s.scales[x, raw, rows], BYTES.reduce(1))
            for column in range(0, tile.shape[-1], 64):
                at = (rows, pl.ds(column, 64))
                values = plgpu.layout_cast(s.raw[x, raw, *at], BYTES).astype(jnp.float32)
                values = values * plgpu.layout_cast(jax.lax.broadcast_in_dim(scale, values.shape, [0]), BYTES)
                tile[slot, *at] = values.astype(tile.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(full.at[slot])
    pl.when(i + RAW < walk.steps)(lambda: _load_raw(p, s, walk, sources, i + RAW))


def sources_of(p: Plan, k: Keys, v: Keys) -> tuple[Array, ...]:
    """What `feed` reads: keys and values, filled up to `p.slots` with zeros; the scales of int8 ones, slots last.

    In shared memory keys lie in tiles of 8 slots, and TMA copies whole tiles: a cache whose slots are no multiple of 8
    is copied first.
    """

    def filled(x: Array) -> Array:
        more = 0 if p.paged else p.slots - x.shape[1]
        return jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2))) if more else x

    if not (isinstance(k, Rounded) and isinstance(v, Rounded)):
        return tuple(filled(jnp.asarray(x)) for x in (k, v))
    # Slots last and a multiple of 8: TMA wants rows whose bytes are a multiple of 16.
    scales = [filled(x.scale).transpose(0, 2, 1) for x in (k, v)]
    return filled(k.values), filled(v.values), *scales
