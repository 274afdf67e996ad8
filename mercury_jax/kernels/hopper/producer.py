"""The producer warpgroup: loads tiles of keys and values into shared memory, dequantising int8 on the way.

The computing warpgroups (`program`, `blackwell.program`) read a tile when its barrier `full` is complete and arrive
at `free` when they have read it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array

from mercury_jax.kernels.hopper.tile_loop import ROWS, AttentionConfig, KeyTiles, SharedMemory
from mercury_jax.kernels.kv_quant import Int8Vectors, KVArray

INT8_STAGES = 2  # int8 tiles in flight
INT8_LAYOUT = (
    plgpu.Layout.WGMMA_UPCAST_2X
)  # a thread loads four adjacent int8 and stores their 16-bit values at once


def produce(c: AttentionConfig, s: SharedMemory, tiles: KeyTiles, sources: tuple[Any, ...]) -> None:
    """Loads all key tiles of a program.

    Args:
        c: Static configuration.
        s: Shared memory and barriers.
        tiles: The program's key tiles.
        sources: From `sources_of`: keys and values [B, S, G, K]; for int8 also their scales [B, G, S]. Of a pool,
            [1, S, G, K] and [1, G, S], and last the slots at which the tiles of each row begin [B, N].
    """
    if c.int8:
        for i in range(INT8_STAGES):
            pl.when(i < tiles.steps)(lambda i=i: _load_int8(c, s, tiles, sources, i))
    load = _dequantise if c.int8 else _load
    jax.lax.fori_loop(0, tiles.steps, lambda i, _: load(c, s, tiles, sources, i), None)
    for slot in range(c.stages):  # a program may end only when every arrival at a barrier has been waited for
        pl.when(slot < tiles.steps)(lambda slot=slot: _wait_until_read(s, slot))


def _wait_until_read(s: SharedMemory, slot: int) -> None:
    plgpu.barrier_wait(s.k_free.at[slot])
    plgpu.barrier_wait(s.v_free.at[slot])


def _keys_and_values(s: SharedMemory) -> tuple[tuple[Any, Any], ...]:
    """Tiles, `full` barriers and `free` barriers, each of keys and of values."""
    return (s.k, s.v), (s.k_full, s.v_full), (s.k_free, s.v_free)


def _load(c: AttentionConfig, s: SharedMemory, tiles: KeyTiles, sources: tuple[Any, ...], i: Any) -> None:
    """Loads the keys and values of step i."""
    slot = jax.lax.rem(i, jnp.int32(c.stages))
    row, start = tiles.place(c, i, sources)
    at = (row, pl.ds(start, c.keys), tiles.group)
    for source, tile, full, free in zip(sources[:2], *_keys_and_values(s), strict=True):
        pl.when(i >= c.stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
        plgpu.copy_gmem_to_smem(source.at[at], tile.at[slot], full.at[slot])


def _load_int8(
    c: AttentionConfig, s: SharedMemory, tiles: KeyTiles, sources: tuple[Any, ...], i: Any
) -> None:
    """Loads the int8 keys and values of step i, and their scales."""
    slot, (row, start) = jax.lax.rem(jnp.int32(i), jnp.int32(INT8_STAGES)), tiles.place(c, i, sources)
    keys = pl.ds(start, c.keys)
    for x in (0, 1):
        full = s.int8_full.at[slot]
        plgpu.copy_gmem_to_smem(sources[x].at[row, keys, tiles.group], s.int8.at[x, slot], full)
        plgpu.copy_gmem_to_smem(sources[2 + x].at[row, tiles.group, keys], s.scales.at[x, slot], full)


def _dequantise(
    c: AttentionConfig, s: SharedMemory, tiles: KeyTiles, sources: tuple[Any, ...], i: Any
) -> None:
    """Writes values * scale of step i's keys and values where `_load` would have loaded them."""
    source_slot = jax.lax.rem(i, jnp.int32(INT8_STAGES))
    slot = jax.lax.rem(i, jnp.int32(c.stages))
    plgpu.barrier_wait(s.int8_full.at[source_slot])
    for x, (tile, full, free) in enumerate(zip(*_keys_and_values(s), strict=True)):
        pl.when(i >= c.stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
        for row in range(0, c.keys, ROWS):
            rows = pl.ds(row, ROWS)
            scale = plgpu.layout_cast(s.scales[x, source_slot, rows], INT8_LAYOUT.reduce(1))
            for column in range(0, tile.shape[-1], 64):
                at = (rows, pl.ds(column, 64))
                values = plgpu.layout_cast(s.int8[x, source_slot, *at], INT8_LAYOUT).astype(jnp.float32)
                scales = plgpu.layout_cast(jax.lax.broadcast_in_dim(scale, values.shape, [0]), INT8_LAYOUT)
                values = values * scales
                tile[slot, *at] = values.astype(tile.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(full.at[slot])
    pl.when(i + INT8_STAGES < tiles.steps)(lambda: _load_int8(c, s, tiles, sources, i + INT8_STAGES))


def sources_of(c: AttentionConfig, k: KVArray, v: KVArray) -> tuple[Array, ...]:
    """What `produce` reads.

    Keys are in shared memory in tiles of 8 slots, and TMA copies whole tiles: a cache whose slots are no multiple of 8
    is copied first.

    Args:
        c: Static configuration.
        k: Keys.
        v: Values.

    Returns:
        Keys and values, padded with zeros to `c.slots`; for int8 also their scales, slots last.
    """

    def pad(x: Array) -> Array:
        more = 0 if c.paged else c.slots - x.shape[1]
        return jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2))) if more else x

    if not (isinstance(k, Int8Vectors) and isinstance(v, Int8Vectors)):
        return tuple(pad(jnp.asarray(x)) for x in (k, v))
    # Slots last and a multiple of 8: TMA needs rows whose bytes are a multiple of 16.
    scales = [pad(x.scale).transpose(0, 2, 1) for x in (k, v)]
    return pad(k.values), pad(v.values), *scales
