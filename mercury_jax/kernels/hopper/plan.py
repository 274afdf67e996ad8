"""What a program of the Hopper kernel is compiled for, what it owns, and which keys it walks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

ROWS = 64  # of one warpgroup's wgmma
ALIGN = 8  # slots of a tile in shared memory: TMA copies whole tiles


class Plan(NamedTuple):
    """What a program is compiled for."""

    workers: int  # warpgroups that compute, 64 rows each
    keys: int  # of a tile
    stages: int  # tiles in flight
    splits: int  # of the keys
    slots: int  # of the keys that are read, a multiple of ALIGN and at least `keys`
    groups: int
    ranges: int
    scale: float
    softcap: float | None
    rounded: bool  # int8 keys and values
    interpreted: bool
    wide: bool = False  # both warpgroups share 64 rows, each with half of the columns
    paged: bool = False  # a table says where each tile of keys lies in a pool that all rows share

    @property
    def rows(self) -> int:
        """Of one program."""
        return ROWS if self.wide else self.workers * ROWS


class Scratch(NamedTuple):
    """Shared memory and barriers of one program: full where data has arrived, free where it has been read."""

    q: Any
    edges: Any
    k: Any
    v: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    cleared: Any = None
    p: Any = (
        None  # of the wide program: weights of each half of a tile's keys, a number a row, and where both are
    )
    most: Any = None
    met: Any = None
    shared: Any = None
    raw: Any = None  # int8: tiles of keys and of values, their scales, and where they have arrived
    scales: Any = None
    raw_full: Any = None


class Walk(NamedTuple):
    """The part of the keys that one program walks."""

    batch: Any
    group: Any
    first: Any  # tile of keys
    steps: Any
    whole: Any  # in memory, for registers are scarce: keys [from, to) that every row sees
    hulls: Any  # in memory: of each range the lowest start and the highest end

    def start(self, p: Plan, i: Any) -> Any:
        """The first key loaded at step i: the last tile may not fit, and starts earlier."""
        return jnp.minimum((self.first + i) * p.keys, p.slots - p.keys)

    def place(self, p: Plan, i: Any, sources: tuple[Any, ...]) -> tuple[Any, Any]:
        """(row of the batch, slot) where the tile of step i lies in the sources of `feed`; a pool is one long row."""
        return (0, sources[-1][self.batch, self.first + i]) if p.paged else (self.batch, self.start(p, i))


def walk_of(p: Plan, bounds: Any) -> Walk:
    """This program's share of the tiles that its rows see."""
    pair, tile, split = (jax.lax.axis_index(name) for name in ("pair", "tile", "split"))
    batch, group = jax.lax.div(pair, jnp.int32(p.groups)), jax.lax.rem(pair, jnp.int32(p.groups))
    own = bounds.at[batch, tile]
    first, last = own[0], own[1]
    share = jax.lax.div(last - first + (p.splits - 1), jnp.int32(p.splits))
    first = first + split * share
    steps = jnp.maximum(jnp.minimum(share, last - first), 0)
    return Walk(batch, group, first, steps, own.at[pl.ds(2, 2)], own.at[pl.ds(4, 2 * p.ranges)])


def room(slots: int, keys: int) -> int:
    """Slots that keys and values are filled up to: whole tiles of shared memory, and at least one tile of keys."""
    return max(slots + -slots % ALIGN, keys)
