"""Attention for Hopper: what it refuses, its configuration for a call, and its warpgroups up to head size 256.

One or two computing warpgroups have 64 rows each and share the tiles of keys and values that the producer loads
(`hopper_tile_loop`). For head size 512 they divide the work differently (`hopper_head_dim_512`).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from mercury_jax.ops import tuned
from mercury_jax.ops.attention import hopper_head_dim_512 as head_dim_512, tiling
from mercury_jax.ops.attention.hopper_split_merge import merge_barrier, parts_of, store_result
from mercury_jax.ops.attention.hopper_tile_loop import (
    ALIGN,
    FLOOR,
    INT8_STAGES,
    RANGES,
    ROWS,
    SMEM_BYTES,
    AttentionConfig,
    KeyTiles,
    OnlineSoftmax,
    Ref,
    SharedMemory,
    Value,
    across_columns,
    clear_values,
    full,
    heads_of,
    is_covered,
    is_unmasked,
    key_tiles,
    launch,
    mask_scores,
    produce,
    product,
    scaled_scores,
    swizzled_tile,
)
from mercury_jax.ops.attention.inputs import (
    AttentionCall,
    AttentionResult,
    Fp8Vectors,
    Int8Vectors,
    attention_form,
)
from mercury_jax.ops.operation import traced_once
from mercury_jax.ops.tuned import AttentionKnobs

PROCESSORS = 132  # of an H100 and an H200
# of the keys, at most: programs of a cluster, which run at the same time on neighbouring processors
SPLITS = 8
CLUSTERED = 128  # processors in use if programs run in clusters, which take a divisor of 16 neighbours
KEYS = {64: 128, 128: 128, 256: 64, 512: head_dim_512.KEYS}  # head size: keys of a tile, as registers allow


def refuses(call: AttentionCall) -> str | None:
    """Why this kernel does not take a call."""
    q, k = call.q, call.k
    if isinstance(k, Fp8Vectors) or isinstance(call.v, Fp8Vectors):
        return "keys and values are fp8, which it does not read; it reads int8"
    if isinstance(k, Int8Vectors) != isinstance(call.v, Int8Vectors):
        return "of keys and values one is int8 and the other is not"
    dtypes = [str(jnp.dtype(x.dtype)) for x in (q, k, call.v) if not isinstance(x, Int8Vectors)]
    if dtypes[0] not in ("bfloat16", "float16") or len(set(dtypes)) > 1:
        return f"of {', '.join(dtypes)}; the tensor cores take bfloat16 or float16, one for all"
    width, heads, groups, ranges = q.shape[-1], q.shape[2], k.shape[2], call.ranges.shape[2]
    if width not in KEYS:
        return f"head size {width} is not one of {', '.join(map(str, KEYS))}"
    if width > 256 and isinstance(k, Int8Vectors):
        return f"of head size {width} the keys are int8; there is no shared memory left to widen them in"
    if ranges > RANGES:
        return f"{ranges} ranges a row; shared memory is reserved for {RANGES}"
    if heads % groups:
        return f"{heads} heads are no multiple of {groups} key heads"
    return None if call.scale > 0 else f"scale {call.scale} is not above 0"


def run(call: AttentionCall, listed: bool = False, knobs: AttentionKnobs | None = None) -> AttentionResult:
    """Attention by this kernel, without a gradient.

    Keys that no row attends to may hold anything, also NaN. So may values, unless they lie between the lowest start and
    the highest end that one range has over the rows of a tile: there they must be finite.

    Args:
        listed: Whether each program visits only the key tiles with a key that one of its rows attends to, as long
            sequences of several documents need, and not all between the first and the last of them. All keys and
            values must then be finite. Head sizes up to 256.
    """
    if knobs is None and not listed:
        form = attention_form(call.q, call.k, call.softcap)
        knobs = tuned.find(AttentionKnobs, form, shapes_of(call), call.device)
        knobs = None if knobs is None or unfit(call, knobs) is not None else knobs
    return _run(call, listed, knobs or default_knobs(call, listed))


@traced_once
def _run(call: AttentionCall, listed: bool, knobs: AttentionKnobs) -> AttentionResult:
    c, width, dtype = _config(call, listed, knobs), call.q.shape[-1], call.q.dtype
    scratch = _shared_memory_512(c, width, dtype) if c.wide else _shared_memory(c, width, dtype)
    return launch(c, call, _program, [scratch], dtype)


def shapes_of(call: AttentionCall) -> str:
    """The bucket of shapes whose measured settings a call shares."""
    pairs, rows, slots = call.q.shape[0] * call.k.shape[2], call.group_rows, call.k.shape[1]
    return f"{pairs} x up to {tuned.bucket(rows)} rows, up to {tuned.bucket(slots)} keys"


def default_knobs(call: AttentionCall, listed: bool = False) -> AttentionKnobs:
    """Chooses what a call leaves open, where nothing was measured."""
    (batch, _, _, width), groups = call.q.shape, call.k.shape[2]
    keys, wide = KEYS[width], width > 256
    steps = -(-call.k.shape[1] // keys)
    programs = lambda rows: batch * groups * -(-call.group_rows // rows)
    # A producer that dequantises int8 needs more registers than two computing warpgroups could leave. With few rows
    # twice as many programs of half the rows keep more processors busy. With many ranges of wide heads, two would
    # spill registers.
    few = programs(2 * ROWS) * min(SPLITS, steps) * 2 <= PROCESSORS
    spills = width == 256 and call.ranges.shape[2] > 3
    int8 = isinstance(call.k, Int8Vectors)
    workers = 2 if wide or listed else 1 if call.group_rows <= ROWS or int8 or few or spills else 2
    splits = 1 if listed else _splits(programs(ROWS if wide else workers * ROWS), steps)
    stages = head_dim_512.STAGES if wide else min(4, _stages(call, workers, keys))
    return AttentionKnobs(workers, keys, stages, splits)


def unfit(call: AttentionCall, knobs: AttentionKnobs) -> str | None:
    """Gives the reason why a call cannot have some choices."""
    width = call.q.shape[-1]
    if width > 256 and knobs[:3] != (2, KEYS[width], head_dim_512.STAGES):
        return f"head size {width} leaves the splits open only"
    if isinstance(call.k, Int8Vectors) and knobs.workers > 1:
        return "the producer that dequantises needs the registers of a computing warpgroup"
    if knobs.keys > KEYS[width]:
        return f"head size {width} has registers for {KEYS[width]} keys"
    if width <= 256 and knobs.stages > (fit := _stages(call, knobs.workers, knobs.keys)):
        return f"shared memory holds {fit} tiles, not {knobs.stages}"
    steps = -(-call.k.shape[1] // knobs.keys)
    return f"{knobs.splits} programs for {steps} tiles of keys" if knobs.splits > min(SPLITS, steps) else None


def _stages(call: AttentionCall, workers: int, keys: int) -> int:
    """The tiles of keys and of values that shared memory holds."""
    line = 2 * call.q.shape[-1]  # bytes of a row of queries or keys
    gaps = -(-workers * ROWS * 8 * (call.ranges.shape[2] + 1) // 1024) * 1024  # Mosaic aligns to 1,024 bytes
    widened = INT8_STAGES * keys * (line + 8) if isinstance(call.k, Int8Vectors) else 0
    return (SMEM_BYTES - workers * ROWS * line - gaps - widened) // (2 * keys * line)


def _config(call: AttentionCall, listed: bool, knobs: AttentionKnobs) -> AttentionConfig:
    wide, align = call.q.shape[-1] > 256, knobs.keys if listed else ALIGN
    slots = max(call.k.shape[1] + -call.k.shape[1] % align, knobs.keys)
    heads = heads_of(call.q.shape[2], call.k.shape[2])
    return AttentionConfig(
        rows=ROWS if wide else knobs.workers * ROWS, **knobs._asdict(), slots=slots, groups=call.k.shape[2],
        heads=heads, block=ROWS // heads, ranges=call.ranges.shape[2], scale=call.scale, softcap=call.softcap,
        int8=isinstance(call.k, Int8Vectors), wide=wide, listed=listed, clustered=True,
        interpreted=call.device is not None and call.device.interpret is not None,
    )  # fmt: skip


def _splits(programs: int, steps: int) -> int:
    """The number of programs of a cluster: a power of two, so that clusters fill the processors that are neighbours."""
    count = tiling.choose_splits(programs, steps, PROCESSORS)
    if count == 1:
        return 1
    count = tiling.choose_splits(programs, steps, min(CLUSTERED, PROCESSORS), SPLITS)
    return 1 << (count.bit_length() - 1)


def _shared_memory(c: AttentionConfig, width: int, dtype: DTypeLike) -> SharedMemory:
    tiles = swizzled_tile(c.stages, c.keys, width, dtype=dtype)
    # one arrival: of the copy, or of the producer that dequantises
    loaded = plgpu.Barrier(num_barriers=c.stages)
    read = plgpu.Barrier(num_arrivals=c.workers, num_barriers=c.stages)
    memory = SharedMemory(
        q=swizzled_tile(c.workers, ROWS, width, dtype=dtype),
        gaps=plgpu.SMEM((c.workers, 2 * c.ranges + 2, ROWS), jnp.int32),
        k=tiles,
        v=tiles,
        q_full=plgpu.Barrier(num_arrivals=2, num_barriers=c.workers),  # queries and their gaps
        k_full=loaded,
        v_full=loaded,
        k_free=read,
        v_free=read,
        merged=merge_barrier(c),
        cleared=plgpu.Barrier(num_arrivals=c.workers, num_barriers=1),
    )
    if not c.int8:
        return memory
    return memory._replace(
        int8=swizzled_tile(2, INT8_STAGES, c.keys, width, dtype=jnp.int8),
        scales=plgpu.SMEM((2, INT8_STAGES, c.keys), jnp.float32),
        int8_full=plgpu.Barrier(num_arrivals=4, num_barriers=INT8_STAGES),  # keys, values, the scales of both
    )


def _shared_memory_512(c: AttentionConfig, width: int, dtype: DTypeLike) -> SharedMemory:
    half, depth = head_dim_512.HALF, head_dim_512.DEPTH
    return SharedMemory(
        q=swizzled_tile(width // depth, ROWS, depth, dtype=dtype),
        gaps=plgpu.SMEM((1, 2 * c.ranges + 2, ROWS), jnp.int32),
        k=swizzled_tile(c.stages, 2, half, depth, dtype=dtype),
        v=swizzled_tile(c.stages, half, head_dim_512.SPAN, dtype=dtype),
        # pieces of queries, their gaps
        q_full=plgpu.Barrier(num_arrivals=width // depth + 1, num_barriers=1),
        k_full=plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),  # both halves of the keys
        v_full=plgpu.Barrier(num_barriers=c.stages),
        k_free=plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
        v_free=plgpu.Barrier(num_barriers=c.stages),  # one warpgroup reads it
        merged=merge_barrier(c),
        weights=swizzled_tile(2, ROWS, half, dtype=dtype),
        exchange=plgpu.SMEM((2, ROWS), jnp.float32),
        exchanged=plgpu.Barrier(num_arrivals=2, num_barriers=1),
        weights_full=plgpu.Barrier(num_arrivals=2, num_barriers=1),
    )


# --- the program


def _program(c: AttentionConfig, inputs: int, *refs: Ref) -> None:
    """One program of the grid; `refs` are those of `tile_loop.launch`, the scratch is `SharedMemory`."""
    (q, gaps, bounds, *sources), (out, lse, s) = refs[:inputs], refs[inputs:]
    warpgroup, tiles = jax.lax.axis_index("warpgroup"), key_tiles(c, bounds)
    # Registers per thread; together all that there are.
    compute_registers, producer_registers = (240, 24) if c.wide else (232, 40)

    def compute(worker: Value) -> None:
        if c.workers == 2:  # takes registers that the producer releases
            plgpu.set_max_registers(compute_registers, action="increase")
        (head_dim_512.compute if c.wide else _compute)(c, s, tiles, worker, q, gaps, out, lse)

    def load() -> None:
        if c.workers == 2:
            plgpu.set_max_registers(producer_registers, action="decrease")
        (head_dim_512.produce if c.wide else produce)(c, s, tiles, tuple(sources))

    if c.wide and not c.interpreted:  # a static worker index: addresses that depend on it take no registers
        jax.lax.switch(warpgroup, [functools.partial(compute, 0), functools.partial(compute, 1), load])
    else:
        jax.lax.cond(warpgroup < c.workers, lambda: compute(warpgroup), load)


def _compute(
    c: AttentionConfig, s: SharedMemory, tiles: KeyTiles, worker: Value, q: Ref, gaps: Ref, out: Ref, lse: Ref
) -> None:
    """All steps of one computing warpgroup, and the store of its result."""
    pair, tile = jax.lax.axis_index("pair"), jax.lax.axis_index("tile")
    first = (tile * c.workers + worker) * ROWS
    rows = pl.ds(first, ROWS)
    # 1. Its queries [64, K] and their gaps [2 R + 2, 64] into shared memory: two copies, two arrivals.
    plgpu.copy_gmem_to_smem(q.at[pair, rows], s.q.at[worker], s.q_full.at[worker])
    plgpu.copy_gmem_to_smem(gaps.at[tiles.batch, :, rows], s.gaps.at[worker], s.q_full.at[worker])
    plgpu.barrier_wait(s.q_full.at[worker])
    # 2. The loop over key tiles; sums [64, K], maxima and totals [64] stay in registers.
    start = OnlineSoftmax(full(0.0, (ROWS, q.shape[-1])), full(FLOOR, (ROWS,)), full(0.0, (ROWS,)))
    step = functools.partial(_step, c, s, tiles, worker)
    end = OnlineSoftmax(*jax.lax.fori_loop(0, tiles.steps, step, tuple(start)))
    # 3. The result, by way of the shared memory of the queries, which are not read any more.
    safe = jnp.where(end.total > 0, end.total, 1.0)
    result = end.sum * across_columns(1.0 / safe, end.sum)
    staging = s.q.at[worker]
    staging[...] = result.astype(staging.dtype)
    nats = jnp.where(end.total > 0, end.peak * math.log(2) + jnp.log(safe), -jnp.inf)
    merged = None if s.merged is None else s.merged.at[worker]
    store_result(c, tiles, first, parts_of(c, staging, 0), nats, merged, s.gaps.at[worker, 0], out, lse)


def _step(
    c: AttentionConfig, s: SharedMemory, tiles: KeyTiles, worker: Value, i: Value, carry: tuple[Value, ...]
) -> tuple[Value, ...]:
    """Adds the key tile of step i to the softmax."""
    state, slot = OnlineSoftmax(*carry), jax.lax.rem(i, jnp.int32(c.stages))
    # 1. Scores [64, keys]. The product is complete when `product` returns, so the keys may be overwritten.
    plgpu.barrier_wait(s.k_full.at[slot])
    scores = product(c, s.q.at[worker], s.k.at[slot])
    plgpu.barrier_arrive(s.k_free.at[slot])
    scores, unit = scaled_scores(c, scores)
    begin, unmasked = tiles.start(c, i), is_unmasked(c, tiles, i)
    mask = functools.partial(mask_scores, s.gaps.at[worker], begin, tiles.index(i) * c.keys)
    scores = jax.lax.cond(unmasked, lambda x: x, mask, scores)
    # 2. Weights relative to the new maximum; what was summed before shrinks to it.
    peak = jnp.maximum(state.peak, scores.max(axis=1) * unit)
    weights = jnp.exp2(scores * unit - across_columns(peak, scores))
    shrink = jnp.exp2(state.peak - peak)
    total = state.total * shrink + weights.sum(axis=1)
    # 3. Sums [64, K] += weights [64, keys] v [keys, K], with the weights in registers.
    plgpu.barrier_wait(s.v_full.at[slot])
    if not c.listed:  # there all values are finite
        pl.when(jnp.logical_not(unmasked))(lambda: _clear(c, s, tiles, worker, slot, begin))
    sums = state.sum * across_columns(shrink, state.sum)
    weights, v = weights.astype(s.v.dtype), s.v.at[slot]
    if c.interpreted:  # the interpreter has no wgmma with an operand in registers
        sums = sums + jnp.dot(weights, v[...], preferred_element_type=jnp.float32)
    else:  # the sums are updated in place
        sums = pl.run_state(lambda acc: plgpu.wgmma(acc, weights, v))(plgpu.WGMMAAccumulatorRef.init(sums))
    plgpu.barrier_arrive(s.v_free.at[slot])
    return sums, peak, total


def _clear(
    c: AttentionConfig, s: SharedMemory, tiles: KeyTiles, worker: Value, slot: Value, begin: Value
) -> None:
    """If a tile of values has keys that no row attends to, one warpgroup clears them for both."""

    @pl.when(jnp.logical_not(is_covered(c, tiles, begin)))
    def _() -> None:
        pl.when(worker == 0)(lambda: clear_values(c, tiles, begin, s.v.at[slot]))
        # Neither warpgroup multiplies before the tile is clear. Both come here: the condition is that of the tile.
        plgpu.barrier_arrive(s.cleared.at[0])
        plgpu.barrier_wait(s.cleared.at[0])
