"""Preparation and merging around an attention kernel: tiles of rows, the keys that each tile visits, and splits.

Everything here is plain jnp on small arrays, or arithmetic on shapes. Arrays that depend only on the ranges are the
same in all layers of a pass, and XLA computes them once. P is the number of (row of the batch, key head) pairs, M the
number of rows (queries times heads) of each pair.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BEHIND = 1 << 30  # behind every key


def fold_queries(q: Float[Array, "B T H K"], groups: int, rows: int, block: int = 1) -> Float[Array, "P M K"]:
    """Makes a matrix of the queries of each key head.

    Rows are ordered by block of queries, then by head, then by query, so that a tile holds few queries, whose ranges
    are close to each other.
    """
    b, t, h, width = q.shape
    q = jnp.pad(q, ((0, 0), (0, -t % block), (0, 0), (0, 0)))
    x = q.reshape(b, -1, block, groups, h // groups, width).transpose(0, 3, 1, 4, 2, 5)
    x = x.reshape(b * groups, -1, width)  # from [B, G, T / block, H / G, block, K]
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % rows), (0, 0)))


def unfold_queries(
    x: Float[Array, "P M *K"], batch: int, queries: int, heads: int, block: int = 1
) -> Float[Array, "B T H *K"]:
    """Inverts `fold_queries`, for outputs and for log-sum-exps."""
    groups, rest, blocks = x.shape[0] // batch, x.shape[2:], -(-queries // block)
    x = x[:, : blocks * block * (heads // groups)]
    x = x.reshape(batch, groups, blocks, heads // groups, block, *rest)
    x = jnp.moveaxis(x, (1, 3), (3, 4))  # [B, T / block, block, G, H / G, ...]
    return x.reshape(batch, blocks * block, heads, *rest)[:, :queries]


def fold_ranges(ranges: Int[Array, "B T R 2"], heads: int, rows: int, block: int = 1) -> Int[Array, "B E M"]:
    """Lays out the key ranges in the order of the rows of `fold_queries`."""
    b, t, count, _ = ranges.shape
    x = jnp.pad(ranges.reshape(b, t, 2 * count), ((0, 0), (0, -t % block), (0, 0)), mode="edge")
    x = jnp.repeat(x.reshape(b, -1, 1, block, 2 * count), heads, axis=2).reshape(b, -1, 2 * count)
    x = x.transpose(0, 2, 1)
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % rows)), mode="edge").astype(jnp.int32)


def gaps(ranges: Int[Array, "B T R 2"]) -> Int[Array, "B T _ 2"]:
    """Finds the keys between the ranges of each query, to which the query does not attend.

    A kernel sets the scores of one gap after the other to -inf, which takes fewer registers than a mask of all ranges.
    """
    empty = ranges[..., 1] <= ranges[..., 0]
    found = [jnp.where(empty[:, :, r, None], BEHIND, ranges[:, :, r]) for r in range(ranges.shape[2])]
    for i in range(len(found)):  # odd-even transposition sort by start: elementwise, so that XLA fuses it
        for r in range(i % 2, len(found) - 1, 2):
            a, b = found[r], found[r + 1]
            swap = a[..., :1] > b[..., :1]
            found[r], found[r + 1] = jnp.where(swap, b, a), jnp.where(swap, a, b)
    ends = [jnp.zeros_like(ranges[:, :, 0, 0])]
    for one in found:
        ends.append(jnp.maximum(ends[-1], one[..., 1]))
    starts = [*(one[..., 0] for one in found), jnp.full_like(ends[0], BEHIND)]
    return jnp.stack([jnp.stack(pair, axis=-1) for pair in zip(ends, starts, strict=True)], axis=2)


def tile_bounds(edges: Int[Array, "B E M"], rows: int, keys: int, slots: int) -> Int[Array, "B N C"]:
    """Computes which keys each tile of rows visits, and which of them need no mask.

    Returns:
        C = 4 + E numbers for each of the N = M / rows tiles: the key tiles [first, last) to visit; the keys [from, to)
        that all rows attend to in their first range, which need no mask; and for each range its hull, which is the
        lowest start and the highest end over the rows (0, 0 if empty).
    """
    b, e, m = edges.shape
    x = jnp.clip(edges, 0, slots).reshape(b, e // 2, 2, m // rows, rows)
    start, end = x[:, :, 0], x[:, :, 1]  # [B, R, N, rows]
    nonempty = end > start
    # The hull of each range over the rows of a tile [B, R, N]. It may include keys that no row attends to.
    low = jnp.where(nonempty, start, slots).min(axis=-1)
    high = jnp.where(nonempty, end, 0).max(axis=-1)
    # Keys that all rows attend to in their first range, as in most key tiles of a long prefix. Four reductions,
    # not one over all of them joined: on an H200, XLA of jax 0.11.2 reduced a slice of that one at a wrong offset.
    unmasked = [start[:, 0].max(axis=-1), end[:, 0].min(axis=-1)]
    first = low.min(axis=1) // keys
    last = jnp.maximum(-(-high.max(axis=1) // keys), first)
    hulls = jnp.stack([jnp.where(high > 0, low, 0), high], axis=2).reshape(b, e, -1)
    return jnp.concatenate([jnp.stack([first, last, *unmasked], axis=1), hulls], axis=1).transpose(0, 2, 1)


def key_visits(edges: Int[Array, "B E M"], rows: int, keys: int, slots: int) -> Int[Array, "B N C"]:
    """Lists the key tiles that each tile of rows visits: those with a key that one of its rows attends to.

    Returns:
        C = 1 + S / keys numbers for each of the N = M / rows tiles: how many key tiles it visits, then 2 j for every
        key tile j that all of its rows attend to in one range, 2 j + 1 for every other that it visits (it needs a
        mask), rising, and then any numbers.
    """
    return _visits(*_seen_tiles(edges, rows, keys, slots))


def row_visits(edges: Int[Array, "B E M"], rows: int, keys: int, slots: int) -> Int[Array, "B J C"]:
    """Lists the tiles of rows that visit each key tile."""
    seen, unmasked = _seen_tiles(edges, rows, keys, slots)
    return _visits(seen.swapaxes(1, 2), unmasked.swapaxes(1, 2))


def _seen_tiles(
    edges: Int[Array, "B E M"], rows: int, keys: int, slots: int
) -> tuple[Bool[Array, "B N J"], Bool[Array, "B N J"]]:
    """For each tile of rows and each key tile: whether some row attends to some key, and whether all attend to all."""
    b, e, m = edges.shape
    x = jnp.clip(edges, 0, slots).reshape(b, e // 2, 2, m // rows, rows, 1)
    start, end = x[:, :, 0], x[:, :, 1]  # [B, R, N, rows, 1]
    begin = jnp.arange(0, slots, keys)
    seen = (jnp.maximum(start, begin) < jnp.minimum(end, begin + keys)).any(axis=(1, 3))
    return seen, ((start <= begin) & (end >= begin + keys)).any(axis=1).all(axis=2)


def _visits(seen: Bool[Array, "B N J"], unmasked: Bool[Array, "B N J"]) -> Int[Array, "B N C"]:
    index = jnp.arange(seen.shape[2], dtype=jnp.int32)
    order = jnp.where(seen, 2 * index + jnp.logical_not(unmasked), 2 * seen.shape[2])
    count = seen.sum(axis=2, keepdims=True, dtype=jnp.int32)
    return jnp.concatenate([count, jnp.sort(order, axis=2)], axis=2)


def choose_splits(programs: int, steps: int, processors: int, most: int | None = None) -> int:
    """Chooses into how many parts the keys of each program are split, so that all processors are busy.

    Programs run in waves of `processors`. A few programs, or a last wave that is not full, leave processors idle;
    splitting makes more and shorter programs. Each part costs about one step more, for its queries and partial result.
    """
    # Waves of programs, times the steps of each program.
    cost = lambda n: -(-programs * n // processors) * (-(-steps // n) + 1)
    return min(range(1, max(1, min(steps, most or processors)) + 1), key=lambda n: (cost(n), n))


def merge_splits(
    outs: Float[Array, "N *r K"], lses: Float[Array, "N *r"]
) -> tuple[Float[Array, "*r K"], Float[Array, "*r"]]:
    """Merges the results of attention over disjoint parts of the keys."""
    peak = jnp.maximum(lses.max(axis=0), -1e30)  # finite even if no part has keys
    weights = jnp.exp(lses - peak)
    total = weights.sum(axis=0)
    safe = jnp.where(total > 0, total, 1.0)
    out = (outs * (weights / safe)[..., None]).sum(axis=0)
    return out, jnp.where(total > 0, peak + jnp.log(safe), -jnp.inf)
