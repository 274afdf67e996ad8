"""What the attention programs for Hopper and Blackwell share: configuration, shared memory, key tiles, masks, softmax.

A program walks over a share of the key tiles that any of its rows attends to (`KeyTiles`), masks what a row does not
attend to, and keeps an online softmax. Only tiles at the borders of the ranges need masks.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

ROWS = 64  # of one warpgroup's wgmma
ALIGN = 8  # slots of a tile in shared memory: TMA copies whole tiles
FLOOR = -1e30  # initial maximum of the scores; finite, so that rows without keys have no inf - inf
WGMMA = plgpu.Layout.WGMMA
PER_ROW = WGMMA.reduce(1)  # the layout of one number for each row


class AttentionConfig(NamedTuple):
    """What a program is compiled for."""

    workers: int  # warpgroups that compute, 64 rows each
    keys: int  # of a tile
    stages: int  # tiles in flight
    splits: int  # of the keys
    slots: int  # of the keys that are read, a multiple of ALIGN and at least `keys`
    groups: int  # key heads
    ranges: int
    scale: float
    softcap: float | None
    int8: bool  # keys and values are int8
    interpreted: bool
    wide: bool = False  # head size 512: both warpgroups share 64 rows, each with half of the columns
    paged: bool = False  # a table gives the place of each tile of keys in a pool that all rows share

    @property
    def rows(self) -> int:
        """Rows of one program."""
        return ROWS if self.wide else self.workers * ROWS


class SharedMemory(NamedTuple):
    """Shared memory and barriers of one program: `full` when data has arrived, `free` when it has been read."""

    q: Any
    edges: Any  # ranges of the rows
    k: Any
    v: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    cleared: Any = None  # values without readers are zero
    # Of head size 512: weights of each half of a tile's keys, a number per row that the warpgroups exchange, and the
    # barriers of both.
    weights: Any = None
    exchange: Any = None
    exchanged: Any = None
    weights_full: Any = None
    # Of int8: tiles of keys and of values, their scales, and their barrier.
    int8: Any = None
    scales: Any = None
    int8_full: Any = None


class KeyTiles(NamedTuple):
    """The key tiles of one program."""

    batch: Any  # row of the batch
    group: Any  # key head
    first: Any  # index of the first tile
    steps: Any  # number of tiles
    unmasked: Any  # in memory, because registers are scarce: keys [from, to) that every row attends to
    hulls: Any  # in memory: for each range the lowest start and the highest end over the rows

    def start(self, c: AttentionConfig, i: Any) -> Any:
        """The first key loaded at step i: the last tile may not fit, and then starts earlier."""
        return jnp.minimum((self.first + i) * c.keys, c.slots - c.keys)

    def place(self, c: AttentionConfig, i: Any, sources: tuple[Any, ...]) -> tuple[Any, Any]:
        """(row of the batch, slot) of the tile of step i in the producer's sources; a pool is one long row."""
        return (0, sources[-1][self.batch, self.first + i]) if c.paged else (self.batch, self.start(c, i))


def key_tiles(c: AttentionConfig, bounds: Any) -> KeyTiles:
    """This program's share of the tiles that its rows attend to; bounds are those of `tiling.tile_bounds`."""
    pair, tile, split = (jax.lax.axis_index(name) for name in ("pair", "tile", "split"))
    batch, group = jax.lax.div(pair, jnp.int32(c.groups)), jax.lax.rem(pair, jnp.int32(c.groups))
    own = bounds.at[batch, tile]
    first, last = own[0], own[1]
    share = jax.lax.div(last - first + (c.splits - 1), jnp.int32(c.splits))
    first = first + split * share
    steps = jnp.maximum(jnp.minimum(share, last - first), 0)
    return KeyTiles(batch, group, first, steps, own.at[pl.ds(2, 2)], own.at[pl.ds(4, 2 * c.ranges)])


def padded_slots(slots: int, keys: int) -> int:
    """Slots that keys and values are padded to: whole tiles of shared memory, and at least one tile of keys."""
    return max(slots + -slots % ALIGN, keys)


# --- softmax


class OnlineSoftmax(NamedTuple):
    """State of the online softmax: sum of weight * value, maximum score in units of log 2, sum of weights."""

    sum: Any
    peak: Any
    total: Any


def full(x: float, shape: tuple[int, ...]) -> Any:
    """An array of one number, in the layout of the results of wgmma."""
    return plgpu.layout_cast(jnp.full(shape, x, jnp.float32), WGMMA if len(shape) == 2 else PER_ROW)


def across_columns(x: Any, like: Any) -> Any:
    """One number per row, broadcast to the columns of `like`."""
    return jax.lax.broadcast_in_dim(x, like.shape, [0])


def scaled_scores(c: AttentionConfig, scores: Any) -> tuple[Any, float]:
    """(scores, soft-capped if there is a cap; the factor that they need for exp2)."""
    if c.softcap is None:
        return scores, c.scale * math.log2(math.e)
    return jnp.tanh(scores * (c.scale / c.softcap)), c.softcap * math.log2(math.e)


# --- masks


def is_unmasked(c: AttentionConfig, tiles: KeyTiles, i: Any) -> Any:
    """Whether every row attends to every key of step i, and none of the keys was in the tile before."""
    begin, own = tiles.start(c, i), (tiles.first + i) * c.keys
    return (begin >= jnp.maximum(tiles.unmasked[0], own)) & (begin + c.keys <= tiles.unmasked[1])


def mask_scores(edges: Any, begin: Any, own: Any, scores: Any, layout: Any = WGMMA) -> Any:
    """Scores, -inf for keys that a row does not attend to and for those below `own`, which the tile before had.

    The ranges are read again each time: few tiles need them, and registers are scarce.
    """
    key = begin + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
    edge = [plgpu.layout_cast(edges[e], layout.reduce(1)) for e in range(edges.shape[0])]
    mask = [
        (key >= across_columns(jnp.maximum(start, own), scores)) & (key < across_columns(end, scores))
        for start, end in zip(edge[::2], edge[1::2], strict=True)
    ]
    return jnp.where(functools.reduce(jnp.logical_or, mask), scores, -jnp.inf)


def is_covered(c: AttentionConfig, tiles: KeyTiles, begin: Any) -> Any:
    """Whether the hull of one range holds all keys of a tile, so that its values are finite."""
    covers = [(begin >= low) & (begin + c.keys <= high) for low, high in _hulls(c, tiles)]
    return functools.reduce(jnp.logical_or, covers)


def clear_values(c: AttentionConfig, tiles: KeyTiles, begin: Any, values: Any) -> None:
    """Sets values [keys, columns] of keys in no range of any row to zero: a weight of 0 times NaN would be NaN."""
    for row in range(0, values.shape[0], ROWS):
        for column in range(0, values.shape[1], 64):
            part = values.at[pl.ds(row, ROWS), pl.ds(column, 64)]
            key = begin + row + plgpu.broadcasted_iota(jnp.int32, (ROWS, 64), 0, layout=WGMMA)
            mask = [(key >= low) & (key < high) for low, high in _hulls(c, tiles)]
            found = plgpu.layout_cast(part[...], WGMMA)
            part[...] = jnp.where(functools.reduce(jnp.logical_or, mask), found, jnp.zeros_like(found))
    plgpu.commit_smem()


def _hulls(c: AttentionConfig, tiles: KeyTiles) -> list[tuple[Any, Any]]:
    return [(tiles.hulls[2 * r], tiles.hulls[2 * r + 1]) for r in range(c.ranges)]
