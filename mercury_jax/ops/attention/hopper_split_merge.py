"""The result of a Hopper attention program: its store, and the merge of the results of split keys.

If the keys of a tile of rows are split, the programs of the splits are a cluster: they run at the same time on
neighbouring processors and read each other's shared memory. Partial sums never go through global memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from mercury_jax.ops.attention.hopper_tile_loop import (
    ALIGN,
    FLOOR,
    PER_ROW,
    ROWS,
    WGMMA,
    AttentionConfig,
    KeyTiles,
    Ref,
    Value,
    across_columns,
    full,
)


def merge_barrier(c: AttentionConfig) -> Ref:
    """The barrier of each computing warpgroup with those of the other splits that have the same rows."""
    return plgpu.ClusterBarrier(collective_axes=("split",), num_barriers=c.workers) if c.splits > 1 else None


def parts_of(c: AttentionConfig, result: Ref, column: Value) -> list[tuple[Ref, Value]]:
    """Divides results in shared memory into the parts that `store_result` takes.

    Args:
        result: Results [64, columns].
    """
    width = result.shape[1] if c.splits == 1 else 64
    return [(result.at[:, pl.ds(at, width)], column + at) for at in range(0, result.shape[1], width)]


def store_result(
    c: AttentionConfig,
    tiles: KeyTiles,
    first: Value,
    parts: Sequence[tuple[Ref, Value]],
    nats: Value,
    merged: Ref | None,
    told: Ref,
    out: Ref,
    lse: Ref,
) -> None:
    """Stores the results of 64 rows; if the keys are split, merges those of all splits before.

    Each program of a cluster merges and stores its share of the parts. The results of the splits are rounded to the
    dtype of `out` before they are merged, in fp32.

    Args:
        first: The first of its rows in `out` and `lse`.
        nats: Log-sum-exp of each row [64], -inf without keys.
        told: Shared memory [64] of int32 that nobody reads any more, for the log-sum-exps.
        out: Output [1, B, T, H, K].
        lse: Log-sum-exps [1, P, M].
    """
    pair, split = jax.lax.axis_index("pair"), jax.lax.axis_index("split")
    own = lambda n, run: run() if merged is None else pl.when(split == n % c.splits)(run)
    told[...] = jax.lax.bitcast_convert_type(nats, jnp.int32)
    if merged is not None:
        _fence_cluster(c)
    plgpu.commit_smem()
    if merged is not None:
        plgpu.barrier_arrive(merged)
        plgpu.barrier_wait(merged)
        _fence_cluster(c)
        weights, nats = _split_weights(c, told)
        for n, (part, _) in enumerate(parts):
            own(n, functools.partial(_merge_part, part, weights))
        plgpu.commit_smem()
        plgpu.barrier_arrive(merged)  # nothing of the other programs is read any more
    query = jax.lax.div(first, jnp.int32(c.heads))
    count = c.block if merged is None else ALIGN  # rows of a copy: it reads contiguous shared memory

    def store(part: Ref, column: Value) -> None:
        for row in range(0, ROWS, count):
            queries, head = pl.ds(query + row % c.block, count), tiles.group * c.heads + row // c.block
            at = (0, tiles.batch, queries, head, pl.ds(column, part.shape[1]))
            plgpu.copy_smem_to_gmem(part.at[pl.ds(row, count)], out.at[at])

    for n, part in enumerate(parts):
        own(n, functools.partial(store, *part))

    @pl.when(split == 0)
    def _() -> None:
        lse[0, pair, pl.ds(first, ROWS)] = nats

    plgpu.wait_smem_to_gmem(0)
    if merged is not None:
        plgpu.barrier_wait(merged)  # a program ends when no other one reads its shared memory


def _fence_cluster(c: AttentionConfig) -> None:
    """Orders accesses to shared memory for all programs of the cluster: a barrier does that within a program alone."""
    if c.interpreted:  # where memory has one order
        return

    def fence(ctx: Any) -> None:
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "fence.acq_rel.cluster;", "", has_side_effects=True)

    inlined: Any = plgpu.inline_mgpu()(fence)
    inlined()


def _split_weights(c: AttentionConfig, told: Ref) -> tuple[list[Value], Value]:
    """The weight of each split for each row [64], and the log-sum-exp of each row over all splits."""
    peers = [plgpu.cluster_ref(told, {"split": jnp.int32(n)}) for n in range(c.splits)]
    nats = [
        jax.lax.bitcast_convert_type(plgpu.layout_cast(peer[...], PER_ROW), jnp.float32) for peer in peers
    ]
    peak = functools.reduce(jnp.maximum, nats, full(FLOOR, (ROWS,)))  # finite even if no split has keys
    weights = [jnp.exp(x - peak) for x in nats]
    total = functools.reduce(jnp.add, weights)
    safe = jnp.where(total > 0, total, 1.0)
    return [x / safe for x in weights], jnp.where(total > 0, peak + jnp.log(safe), -jnp.inf)


def _merge_part(part: Ref, weights: Sequence[Value]) -> None:
    """Replaces this program's results [64, 64] by the weighted sum of those of all splits."""
    total = full(0.0, part.shape)
    for n, weight in enumerate(weights):
        x = plgpu.layout_cast(plgpu.cluster_ref(part, {"split": jnp.int32(n)})[...], WGMMA).astype(
            jnp.float32
        )
        total = total + x * across_columns(weight, x)
    part[...] = total.astype(part.dtype)
