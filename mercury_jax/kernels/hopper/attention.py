"""Entry point of the attention kernel for Hopper: what it refuses, its configuration for given shapes, its launch.

`program` has the code of the warpgroups that compute, `producer` that of the one that loads, `tile_loop` what both
share with Blackwell.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.kernels import tiling
from mercury_jax.kernels.hopper import head_dim_512
from mercury_jax.kernels.hopper.producer import INT8_STAGES, sources_of
from mercury_jax.kernels.hopper.program import program
from mercury_jax.kernels.hopper.tile_loop import ROWS, AttentionConfig, SharedMemory, padded_slots
from mercury_jax.kernels.kv_quant import Int8Vectors, KVArray, KVPool
from mercury_jax.types import Device

PROCESSORS = 132  # of an H100 and an H200
SMEM_BYTES = 227 * 1024 - 1024  # shared memory of a program, without barriers and alignment
KEYS = {64: 128, 128: 128, 256: 64, 512: head_dim_512.KEYS}  # head size: keys of a tile, as registers allow


def refuses(
    q: Any,
    k: Any,
    v: Any,
    ranges: Any,
    *,
    scale: float,
    softcap: float | None,
    residual: bool,
    pages: Any = None,
) -> str | None:
    """Why this kernel does not take these shapes and dtypes; None: it does."""
    if isinstance(k, Int8Vectors) != isinstance(v, Int8Vectors):
        return "of keys and values one is int8 and the other is not"
    dtypes = [str(jnp.dtype(x.dtype)) for x in (q, k, v) if not isinstance(x, Int8Vectors)]
    if dtypes[0] not in ("bfloat16", "float16") or len(set(dtypes)) > 1:
        return f"of {', '.join(dtypes)}; the tensor cores take bfloat16 or float16, one for all"
    if q.shape[-1] not in KEYS:
        return f"head size {q.shape[-1]} is not one of {', '.join(map(str, KEYS))}"
    if q.shape[-1] > 256 and isinstance(k, Int8Vectors):
        return (
            f"of head size {q.shape[-1]} the keys are int8; there is no shared memory left to widen them in"
        )
    if ranges.shape[2] > 3:
        return f"{ranges.shape[2]} ranges a row; registers suffice for 3"
    if q.shape[2] % k.shape[2]:
        return f"{q.shape[2]} heads are no multiple of {k.shape[2]} key heads"
    if pages is not None and k.shape[1] % (keys := KEYS[q.shape[-1]]):
        return f"pages of {k.shape[1]} slots are no multiple of the {keys} keys that it copies at once"
    return None if scale > 0 else f"scale {scale} is not above 0"


def run(
    q: Float[Array, "B T H K"],
    k: KVArray | KVPool,
    v: KVArray | KVPool,
    ranges: Int[Array, "B T R 2"],
    *,
    scale: float,
    softcap: float | None = None,
    residual: bool = False,
    pages: Int[Array, "B N"] | None = None,
    device: Device | None = None,
) -> Any:
    """`kernels.attend` by this kernel, without a gradient.

    Keys that no row attends to may hold anything, also NaN. So may values, unless they lie between the lowest start and
    the highest end that one range has over the rows of a tile: there they must be finite.

    Args:
        q: Queries.
        k: Keys, or a pool of them [P, page, G, K].
        v: Values, or a pool of them.
        ranges: Key ranges.
        scale: Of the scores.
        softcap: Of the scores.
        residual: Also return the log-sum-exp.
        pages: With pools, the pages of each row, all within 0..P-1 (`kernels.attend_paged`).
        device: To compile for.

    Returns:
        As `kernels.attend`.
    """
    batch, queries, heads, _ = q.shape
    interpret = None if device is None else device.interpret
    c = _config(q, k, ranges, scale, softcap, pages, interpret is not None)
    if pages is None:  # no row attends to the padding behind the last slot
        ranges = jnp.minimum(ranges, k.shape[1])
    edges = tiling.fold_ranges(ranges, heads // c.groups, c.rows)
    bounds = tiling.tile_bounds(edges, c.rows, c.keys, c.slots)
    sources = sources_of(c, k, v) if pages is None else _pool_sources(c, k, v, pages)
    outs, lses = _launch(c, tiling.fold_queries(q, c.groups, c.rows), edges, bounds, sources, interpret)
    out, lse = (outs[0], lses[0]) if c.splits == 1 else tiling.merge_splits(outs, lses)
    out = tiling.unfold_queries(out, batch, queries, heads).astype(q.dtype)
    return (out, tiling.unfold_queries(lse, batch, queries, heads)) if residual else out


def _config(
    q: Any,
    k: Any,
    ranges: Any,
    scale: float,
    softcap: float | None,
    pages: Any = None,
    interpreted: bool = False,
) -> AttentionConfig:
    batch, queries, heads, width = q.shape
    _, slots, groups, _ = k.shape
    rows, keys, int8, wide = queries * (heads // groups), KEYS[width], isinstance(k, Int8Vectors), width > 256
    # A producer that dequantises int8 needs more registers than two computing warpgroups could leave.
    workers = 2 if wide else 1 if rows <= ROWS or int8 else 2
    line, edge = 2 * width, 8 * ranges.shape[2]  # bytes of a row of queries or keys, and of its ranges
    free = SMEM_BYTES - workers * ROWS * (line + edge) - (INT8_STAGES * keys * (line + 8) if int8 else 0)
    slots = padded_slots(slots, keys) if pages is None else pages.shape[1] * slots
    c = AttentionConfig(
        workers,
        keys,
        stages=head_dim_512.STAGES if wide else min(4, free // (2 * keys * line)),
        splits=1,
        slots=slots,
        groups=groups,
        ranges=ranges.shape[2],
        scale=scale,
        softcap=softcap,
        int8=int8,
        interpreted=interpreted,
        wide=wide,
        paged=pages is not None,
    )
    programs, steps = batch * groups * -(-rows // c.rows), -(-slots // keys)
    return c._replace(splits=tiling.choose_splits(programs, steps, PROCESSORS))


def _pool_sources(c: AttentionConfig, k: KVPool, v: KVPool, pages: Int[Array, "B N"]) -> tuple[Array, ...]:
    """The producer's sources over a pool: it is one row of slots, and each tile of keys lies within a page."""
    page = k.shape[1]
    starts = pages[:, :, None] * page + jnp.arange(0, page, c.keys, dtype=jnp.int32)
    k, v = (jax.tree.map(lambda y: y.reshape(1, -1, *y.shape[2:]), x) for x in (k, v))
    return *sources_of(c, k, v), starts.reshape(len(pages), -1)


def _launch(
    c: AttentionConfig, q: Array, edges: Array, bounds: Array, sources: tuple[Array, ...], interpret: Any
) -> tuple[Array, Array]:
    """The kernel over its grid: outputs [splits, P, M, K], in fp32 if split, and log-sum-exp [splits, P, M].

    For head size 512 they are always fp32: writing 16 bits in whole lines would spill registers.
    """
    pairs, rows, width = q.shape
    exact = c.wide or c.splits > 1
    out = jax.ShapeDtypeStruct((c.splits, *q.shape), jnp.float32 if exact else q.dtype)

    def attention(*refs: Any) -> None:  # the kernel's name in a profile
        program(c, 3 + len(sources), *refs)

    return plgpu.kernel(
        attention,
        out_type=(out, jax.ShapeDtypeStruct((c.splits, pairs, rows), jnp.float32)),
        scratch_types=[(_shared_memory_512 if c.wide else _shared_memory)(c, width, q.dtype)],
        grid=(c.splits, rows // c.rows, pairs),
        grid_names=("split", "tile", "pair"),
        num_threads=c.workers + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(q, edges, bounds, *sources)


def _tile(*shape: int, dtype: Any) -> Any:
    """Shared memory with its last two axes in the tiles that wgmma reads without bank conflicts."""
    line = 64 * jnp.dtype(dtype).itemsize  # bytes of a swizzled line: 64 numbers of 1 or 2 bytes
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(line)))


def _barrier(barriers: int, arrivals: int = 1) -> Any:
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=barriers)


def _shared_memory(c: AttentionConfig, width: int, dtype: Any) -> SharedMemory:
    tiles = _tile(c.stages, c.keys, width, dtype=dtype)
    full, free = _barrier(c.stages), _barrier(c.stages, c.workers)
    memory = SharedMemory(
        q=_tile(c.workers, ROWS, width, dtype=dtype),
        edges=plgpu.SMEM((c.workers, 2 * c.ranges, ROWS), jnp.int32),
        k=tiles,
        v=tiles,
        q_full=_barrier(c.workers, 2),
        k_full=full,
        v_full=full,
        k_free=free,
        v_free=free,
        cleared=_barrier(1, c.workers),
    )
    if not c.int8:
        return memory
    return memory._replace(
        int8=_tile(2, INT8_STAGES, c.keys, width, dtype=jnp.int8),
        scales=plgpu.SMEM((2, INT8_STAGES, c.keys), jnp.float32),
        int8_full=_barrier(INT8_STAGES, 4),  # keys, values and the scales of both
    )


def _shared_memory_512(c: AttentionConfig, width: int, dtype: Any) -> SharedMemory:
    half, depth = head_dim_512.HALF, head_dim_512.DEPTH
    return SharedMemory(
        q=_tile(width // depth, ROWS, depth, dtype=dtype),
        edges=plgpu.SMEM((1, 2 * c.ranges, ROWS), jnp.int32),
        k=_tile(c.stages, 2, half, depth, dtype=dtype),
        v=_tile(c.stages, half, head_dim_512.SPAN, dtype=dtype),
        q_full=_barrier(1, width // depth + 1),  # pieces of the queries, their ranges
        k_full=_barrier(c.stages, 2),  # both halves of the keys
        v_full=_barrier(c.stages),
        k_free=_barrier(c.stages, 2),
        v_free=_barrier(c.stages),  # one warpgroup reads it
        weights=_tile(2, ROWS, half, dtype=dtype),
        exchange=plgpu.SMEM((2, ROWS), jnp.float32),
        exchanged=_barrier(1, 2),
        weights_full=_barrier(1, 2),
    )
