"""Entry point of the attention kernel for Blackwell: what it refuses, its configuration for given shapes, its launch.

It shares the configuration, the producer warpgroup and the masks with Hopper; `program` has the computing warpgroup.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.kernels import hopper, tiling
from mercury_jax.kernels.blackwell.program import (
    COLUMNS,
    ROWS,
    interpreter_lacks_tcgen05,
    product_barriers,
    program,
    tensor_memory,
)
from mercury_jax.kernels.hopper.producer import INT8_STAGES, sources_of
from mercury_jax.kernels.hopper.tile_loop import AttentionConfig, SharedMemory, padded_slots
from mercury_jax.kernels.kv_quant import Int8Vectors, KVArray
from mercury_jax.types import Device

PROCESSORS = 148  # of a B200
SMEM_BYTES = 227 * 1024 - 1024  # shared memory of a program, without barriers and alignment
# Head size: keys of a tile, as tensor memory allows (2 keys + keys / 2 + K columns).
KEYS = {64: 128, 128: 128, 256: 64}


def refuses(q: Any, k: Any, v: Any, ranges: Any, **options: Any) -> str | None:
    """Why this kernel does not take these shapes and dtypes; None: it does. As on Hopper, except for the head sizes."""
    if q.shape[-1] not in KEYS:
        return f"head size {q.shape[-1]} is not one of {', '.join(map(str, KEYS))}"
    return hopper.refuses(q, k, v, ranges, **options)


def run(
    q: Float[Array, "B T H K"],
    k: KVArray,
    v: KVArray,
    ranges: Int[Array, "B T R 2"],
    *,
    scale: float,
    softcap: float | None = None,
    residual: bool = False,
    device: Device | None = None,
) -> Any:
    """`kernels.attend` by this kernel, without a gradient.

    Keys that no row attends to may hold anything, also NaN. So may values, unless they lie between the lowest start and
    the highest end that one range has over the rows of a tile: there they must be finite.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        ranges: Key ranges.
        scale: Of the scores.
        softcap: Of the scores.
        residual: Also return the log-sum-exp.
        device: To compile for.

    Returns:
        As `kernels.attend`.
    """
    batch, queries, heads, _ = q.shape
    interpret = None if device is None else device.interpret
    c = _config(q, k, ranges, scale, softcap, interpret is not None and interpreter_lacks_tcgen05())
    ranges = jnp.minimum(ranges, k.shape[1])  # no row attends to the padding behind the last slot
    edges = tiling.fold_ranges(ranges, heads // c.groups, ROWS)
    bounds = tiling.tile_bounds(edges, ROWS, c.keys, c.slots)
    queries_folded = tiling.fold_queries(q, c.groups, ROWS)
    outs, lses = _launch(c, queries_folded, edges, bounds, sources_of(c, k, v), interpret)
    out, lse = (outs[0], lses[0]) if c.splits == 1 else tiling.merge_splits(outs, lses)
    out = tiling.unfold_queries(out, batch, queries, heads).astype(q.dtype)
    return (out, tiling.unfold_queries(lse, batch, queries, heads)) if residual else out


def _config(
    q: Any, k: Any, ranges: Any, scale: float, softcap: float | None, interpreted: bool = False
) -> AttentionConfig:
    _, queries, heads, width = q.shape
    batch, slots, groups, _ = k.shape
    int8 = isinstance(k, Int8Vectors)
    keys = min(KEYS[width], 64) if int8 else KEYS[width]  # int8 tiles are in shared memory twice
    tiles = -(-queries * (heads // groups) // ROWS)
    line, edge = 2 * width, 8 * ranges.shape[2]  # bytes of a row of queries or keys, and of its ranges
    free = SMEM_BYTES - ROWS * (line + edge + 4 * COLUMNS) - (INT8_STAGES * keys * (line + 8) if int8 else 0)
    slots = padded_slots(slots, keys)
    return AttentionConfig(
        workers=1,
        keys=keys,
        stages=min(4, free // (2 * keys * line)),
        splits=tiling.choose_splits(batch * groups * tiles, -(-slots // keys), PROCESSORS),
        slots=slots,
        groups=groups,
        ranges=ranges.shape[2],
        scale=scale,
        softcap=softcap,
        int8=int8,
        interpreted=interpreted,
    )


def _launch(
    c: AttentionConfig, q: Array, edges: Array, bounds: Array, sources: tuple[Array, ...], interpret: Any
) -> tuple[Array, Array]:
    """The kernel over its grid: outputs [splits, P, M, K] and log-sum-exp [splits, P, M], both in fp32.

    A thread has a row of the output, and two numbers of 16 bits are too few for it to store them without conflicts;
    the output is rounded after it is unfolded.
    """
    pairs, rows, width = q.shape
    shapes = [jax.ShapeDtypeStruct((c.splits, *s), jnp.float32) for s in (q.shape, (pairs, rows))]
    params: dict[str, Any] = dict(approx_math=True, reduction_scratch_bytes=0)
    return plgpu.kernel(
        functools.partial(program, c, 3 + len(sources)),
        out_type=tuple(shapes),
        scratch_types=(_shared_memory(c, width, q.dtype), tensor_memory(c, width, q.dtype)),
        grid=(c.splits, rows // ROWS, pairs),
        grid_names=("split", "tile", "pair"),
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, **params),
    )(q, edges, bounds, *sources)


def _shared_memory(c: AttentionConfig, width: int, dtype: Any) -> SharedMemory:
    def tile(*shape: int, dtype: Any = dtype) -> Any:
        line = 64 * jnp.dtype(dtype).itemsize  # bytes of a swizzled line: 64 numbers of 1 or 2 bytes
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(line))
        return plgpu.SMEM((*shape, width), dtype, transforms=transforms)

    # A tile has one arrival: of its copy, or for int8 of the warpgroup that writes it.
    full, int8 = plgpu.Barrier(num_barriers=c.stages), (2, INT8_STAGES, c.keys)
    return SharedMemory(
        q=tile(ROWS),
        edges=plgpu.SMEM((2 * c.ranges, ROWS), jnp.int32),
        k=tile(c.stages, c.keys),
        v=tile(c.stages, c.keys),
        q_full=plgpu.Barrier(num_arrivals=2, num_barriers=1),
        k_full=full,
        v_full=full,
        k_free=product_barriers(c, c.stages),
        v_free=product_barriers(c, c.stages),
        int8=tile(*int8, dtype=jnp.int8) if c.int8 else None,
        scales=plgpu.SMEM(int8, jnp.float32) if c.int8 else None,
        int8_full=plgpu.Barrier(num_arrivals=4, num_barriers=INT8_STAGES) if c.int8 else None,
    )
