"""What both programs for Hopper share: softmax kept running, and which keys a row or nobody sees."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from mercury_jax.kernels.hopper.plan import ROWS, Plan, Walk

FLOOR = -1e30  # finite, so that rows without keys have no inf - inf
WGMMA = plgpu.Layout.WGMMA
LANES = WGMMA.reduce(1)  # one number for each row


class Running(NamedTuple):
    """Softmax so far: sum of weight * value, the largest score in units of log 2, sum of weights."""

    sum: Any
    most: Any
    total: Any


def filled(x: float, shape: tuple[int, ...]) -> Any:
    """An array of one number, in the layout that wgmma leaves its results in."""
    return plgpu.layout_cast(jnp.full(shape, x, jnp.float32), WGMMA if len(shape) == 2 else LANES)


def over(x: Any, like: Any) -> Any:
    """One number a row, for each of its columns."""
    return jax.lax.broadcast_in_dim(x, like.shape, [0])


def capped(p: Plan, scores: Any) -> tuple[Any, float]:
    """(scores, scaled and capped where there is a cap; what they are to be multiplied by for exp2)."""
    if p.softcap is None:
        return scores, p.scale * math.log2(math.e)
    return jnp.tanh(scores * (p.scale / p.softcap)), p.softcap * math.log2(math.e)


def inside(p: Plan, walk: Walk, i: Any) -> Any:
    """Whether every row sees every key of step i, and none of them was in the tile before."""
    begin, at = walk.start(p, i), (walk.first + i) * p.keys
    return (begin >= jnp.maximum(walk.whole[0], at)) & (begin + p.keys <= walk.whole[1])


def hide(edges: Any, begin: Any, at: Any, scores: Any, layout: Any = WGMMA) -> Any:
    """Scores of keys that a row does not see become -inf, and those below `at`, which the tile before has had.

    The ranges are read again each time: few tiles need them, and registers are scarce.
    """
    key = begin + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
    edge = [plgpu.layout_cast(edges[e], layout.reduce(1)) for e in range(edges.shape[0])]
    see = [
        (key >= over(jnp.maximum(start, at), scores)) & (key < over(end, scores))
        for start, end in zip(edge[::2], edge[1::2], strict=True)
    ]
    return jnp.where(functools.reduce(jnp.logical_or, see), scores, -jnp.inf)


def covered(p: Plan, walk: Walk, begin: Any) -> Any:
    """Whether one range reaches, over all rows, from the first to the last key of a tile."""
    ends = [(begin >= low) & (begin + p.keys <= high) for low, high in _hulls(p, walk)]
    return functools.reduce(jnp.logical_or, ends)


def blank(p: Plan, walk: Walk, begin: Any, values: Any) -> None:
    """Zeros for values [keys, columns] of keys in no range of any row: a weight of 0 does not undo a NaN."""
    for row in range(0, values.shape[0], ROWS):
        for column in range(0, values.shape[1], 64):
            part = values.at[pl.ds(row, ROWS), pl.ds(column, 64)]
            key = begin + row + plgpu.broadcasted_iota(jnp.int32, (ROWS, 64), 0, layout=WGMMA)
            seen = [(key >= low) & (key < high) for low, high in _hulls(p, walk)]
            found = plgpu.layout_cast(part[...], WGMMA)
            part[...] = jnp.where(functools.reduce(jnp.logical_or, seen), found, jnp.zeros_like(found))
    plgpu.commit_smem()


def _hulls(p: Plan, walk: Walk) -> list[tuple[Any, Any]]:
    return [(walk.hulls[2 * r], walk.hulls[2 * r + 1]) for r in range(p.ranges)]


def store(out: Any, tile: Any, x: Any) -> None:
    """Write x [ROWS, n] to memory: fp32 straight from registers, 16 bits by way of `tile`, in whole lines.

    What a quad of threads holds of a row are 8 numbers: 32 bytes of fp32, the least that memory moves, 16 of bf16.
    """
    if out.dtype == jnp.float32:
        out[...] = x
        return
    tile[...] = x.astype(tile.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, out)
    plgpu.wait_smem_to_gmem(0)
