"""Preparation and merging around an attention kernel: tiles of rows, the keys that each tile visits, and splits.

Everything here is plain jnp on small arrays, or arithmetic on shapes. Arrays that depend only on the ranges are the
same in all layers of a pass, and XLA computes them once. P is the number of (row of the batch, key head) pairs, M the
number of rows (queries times heads) of each pair.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def fold_queries(q: Float[Array, "B T H K"], groups: int, rows: int) -> Float[Array, "P M K"]:
    """Makes a matrix of the queries of each key head.

    Rows are ordered by query, then by head, so that a tile holds few queries, whose ranges are close to each other.

    Args:
        q: Queries.
        groups: G, number of key heads.
        rows: Rows of a tile; M is padded with zeros to a multiple of it.

    Returns:
        P = B * G matrices of M = T * H / G rows, padded.
    """
    b, t, h, width = q.shape
    x = q.reshape(b, t, groups, h // groups, width).transpose(0, 2, 1, 3, 4)  # [B, G, T, H / G, K]
    x = x.reshape(b * groups, t * (h // groups), width)
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % rows), (0, 0)))


def unfold_queries(
    x: Float[Array, "P M *K"], batch: int, queries: int, heads: int
) -> Float[Array, "B T H *K"]:
    """Inverts `fold_queries`, for outputs and for log-sum-exps.

    Args:
        x: Results of each row, padding included.
        batch: B.
        queries: T.
        heads: H.

    Returns:
        Results of each query and head.
    """
    groups, rest = x.shape[0] // batch, x.shape[2:]
    x = x[:, : queries * (heads // groups)].reshape(batch, groups, queries, heads // groups, *rest)
    return jnp.moveaxis(x, 1, 2).reshape(batch, queries, heads, *rest)


def fold_ranges(ranges: Int[Array, "B T R 2"], heads: int, rows: int) -> Int[Array, "B E M"]:
    """Lays out the key ranges in the order of the rows of `fold_queries`.

    Args:
        ranges: Key ranges.
        heads: H / G, number of query heads per key head.
        rows: Rows of a tile; M is padded with the last row's ranges to a multiple of it.

    Returns:
        E = 2 R numbers per row: start 0, end 0, start 1, ...
    """
    x = jnp.repeat(ranges.reshape(*ranges.shape[:2], -1), heads, axis=1).transpose(0, 2, 1)
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % rows)), mode="edge").astype(jnp.int32)


def tile_bounds(edges: Int[Array, "B E M"], rows: int, keys: int, slots: int) -> Int[Array, "B N C"]:
    """Computes which keys each tile of rows visits, and which of them need no mask.

    Args:
        edges: Result of `fold_ranges`.
        rows: Rows of a tile.
        keys: Keys of a tile.
        slots: S, number of keys.

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
    first = low.min(axis=1) // keys
    last = jnp.maximum(-(-high.max(axis=1) // keys), first)
    # Keys that all rows attend to in their first range. Most key tiles of a long prefix are among them.
    unmasked = [start[:, 0].max(axis=-1), end[:, 0].min(axis=-1)]
    hulls = jnp.stack([jnp.where(high > 0, low, 0), high], axis=2).reshape(b, e, -1)
    return jnp.concatenate([jnp.stack([first, last, *unmasked], axis=1), hulls], axis=1).transpose(0, 2, 1)


def choose_splits(programs: int, steps: int, processors: int) -> int:
    """Chooses into how many parts the keys of each program are split, so that all processors are busy.

    Programs run in waves of `processors`. A few programs, or a last wave that is not full, leave processors idle;
    splitting makes more and shorter programs. Each part costs about one step more, for its queries and partial result.

    Args:
        programs: Number of programs without splitting.
        steps: Number of key tiles of the longest program.
        processors: Number of programs that run at the same time.

    Returns:
        The number of parts with the least estimated cost.
    """
    # Waves of programs, times the steps of each program.
    cost = lambda n: -(-programs * n // processors) * (-(-steps // n) + 1)
    return min(range(1, max(1, min(steps, processors)) + 1), key=lambda n: (cost(n), n))


def merge_splits(
    outs: Float[Array, "N P M K"], lses: Float[Array, "N P M"]
) -> tuple[Float[Array, "P M K"], Float[Array, "P M"]]:
    """Merges the results of attention over disjoint parts of the keys.

    Args:
        outs: Output of each of the N parts.
        lses: Log-sum-exp of each part; -inf for a row without keys in the part.

    Returns:
        Output and log-sum-exp over all keys.
    """
    peak = jnp.maximum(lses.max(axis=0), -1e30)  # finite even if no part has keys
    weights = jnp.exp(lses - peak)
    total = weights.sum(axis=0)
    safe = jnp.where(total > 0, total, 1.0)
    out = (outs * (weights / safe)[..., None]).sum(axis=0)
    return out, jnp.where(total > 0, peak + jnp.log(safe), -jnp.inf)
