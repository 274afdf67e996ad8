"""What surrounds an attention kernel: rows folded into tiles, the keys each tile visits, splits and their merging.

All of it is plain jnp on small arrays, or arithmetic on shapes. What depends on the ranges alone is the same for all
layers of a pass, and XLA computes it once.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def fold(q: Float[Array, "B T H K"], groups: int, rows: int) -> Float[Array, "P M K"]:
    """Queries of one key head as the rows of a matrix, P = B * groups; zeros fill M up to a multiple of `rows`.

    Rows are ordered by query, then by head: a tile holds few queries, whose ranges lie close together.
    """
    b, t, h, width = q.shape
    x = q.reshape(b, t, groups, h // groups, width).transpose(0, 2, 1, 3, 4)
    x = x.reshape(b * groups, t * (h // groups), width)
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % rows), (0, 0)))


def unfold(x: Float[Array, "P M *K"], batch: int, queries: int, heads: int) -> Float[Array, "B T H *K"]:
    """The way back from `fold`, for outputs and for their log-sum-exp."""
    groups, rest = x.shape[0] // batch, x.shape[2:]
    x = x[:, : queries * (heads // groups)].reshape(batch, groups, queries, heads // groups, *rest)
    return jnp.moveaxis(x, 1, 2).reshape(batch, queries, heads, *rest)


def fold_ranges(ranges: Int[Array, "B T R 2"], heads: int, rows: int) -> Int[Array, "B E M"]:
    """Starts and ends of each row's ranges, E = 2 R: start 0, end 0, start 1, ..; the last row's, to fill a tile."""
    x = jnp.repeat(ranges.reshape(*ranges.shape[:2], -1), heads, axis=1).transpose(0, 2, 1)
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % rows)), mode="edge").astype(jnp.int32)


def bounds(edges: Int[Array, "B E M"], rows: int, keys: int, slots: int) -> Int[Array, "B N C"]:
    """What a tile of `rows` rows must know before its first key, C = 4 + E.

    The first and the last tile of `keys` keys to visit (the last exclusive); the keys [from, to) that every row sees
    in its first range, where no mask is needed; and of each range the lowest start and the highest end (0, 0: empty).
    """
    b, e, m = edges.shape
    x = jnp.clip(edges, 0, slots).reshape(b, e // 2, 2, m // rows, rows)
    start, end = x[:, :, 0], x[:, :, 1]
    some = end > start
    low = jnp.where(some, start, slots).min(axis=-1)
    high = jnp.where(some, end, 0).max(axis=-1)
    first = low.min(axis=1) // keys
    last = jnp.maximum(-(-high.max(axis=1) // keys), first)
    hulls = jnp.stack([jnp.where(high > 0, low, 0), high], axis=2).reshape(b, e, -1)
    every = [start[:, 0].max(axis=-1), end[:, 0].min(axis=-1)]
    return jnp.concatenate([jnp.stack([first, last, *every], axis=1), hulls], axis=1).transpose(0, 2, 1)


def splits(programs: int, steps: int, processors: int) -> int:
    """Into how many parts to cut the keys of each program, so that the last wave of programs is full as well.

    steps: key tiles of the longest program. A part costs about a step more: its queries, its partial result.
    """
    cost = lambda n: -(-programs * n // processors) * (-(-steps // n) + 1)
    return min(range(1, max(1, min(steps, processors)) + 1), key=lambda n: (cost(n), n))


def merge(
    outs: Float[Array, "N P M K"], lses: Float[Array, "N P M"]
) -> tuple[Float[Array, "P M K"], Float[Array, "P M"]]:
    """Attention over disjoint keys, from that over each part and its log-sum-exp (-inf: it saw nothing)."""
    most = jnp.maximum(lses.max(axis=0), -1e30)
    weights = jnp.exp(lses - most)
    total = weights.sum(axis=0)
    safe = jnp.where(total > 0, total, 1.0)
    out = (outs * (weights / safe)[..., None]).sum(axis=0)
    return out, jnp.where(total > 0, most + jnp.log(safe), -jnp.inf)
