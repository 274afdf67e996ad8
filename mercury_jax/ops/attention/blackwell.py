"""Attention over key ranges for Blackwell (sm_100a) in Mosaic GPU: tcgen05, TMA and a producer warpgroup.

One program has 128 rows (heads of a group times queries) of one key head and walks over its share of the key tiles
that any of its rows attends to. It shares the launch, the producer warpgroup and the masks with Hopper
(`hopper_tile_loop`); one warpgroup computes.

Scores, weights and the sum of values are in tensor memory, which has 128 lanes of 512 columns of 32 bits; tcgen05
products read weights there and leave their sums there. They are asynchronous: the product for the next tile's scores
runs while the softmax of a tile is computed (FlashAttention-3, arXiv 2407.08608), and so does the previous tile's
product with its values. Arrays that are too wide for the registers are processed in parts of `COLUMNS` columns. Where
the interpreter has no tcgen05, shared memory and `jnp.dot` replace it.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.typing import DTypeLike

from mercury_jax.ops.attention import hopper, tiling
from mercury_jax.ops.attention.hopper_tile_loop import (
    ALIGN,
    FLOOR,
    INT8_STAGES,
    SMEM_BYTES,
    AttentionConfig,
    KeyTiles,
    Ref,
    SharedMemory,
    Value,
    across_columns,
    clear_values,
    heads_of,
    is_covered,
    is_unmasked,
    key_tiles,
    launch,
    mask_scores,
    produce,
    scaled_scores,
    swizzled_tile,
)
from mercury_jax.ops.attention.inputs import AttentionCall, AttentionResult, Int8Vectors
from mercury_jax.ops.operation import traced_once

PROCESSORS = 148  # of a B200
# Head size: keys of a tile, as tensor memory allows (2 keys of scores, keys of packed weights, K of sums).
KEYS = {64: 128, 128: 128, 256: 64}
ROWS = 128  # of a product, one per lane
LAYOUT = plgpu.Layout.TCGEN05_TMEM_NATIVE  # a thread has a row: no number passes between threads
PER_ROW = LAYOUT.reduce(1)  # the layout of one number for each row
COLUMNS = 32  # of the sum that are in registers at a time; in fp32 a line of 128 bytes of shared memory


def refuses(call: AttentionCall) -> str | None:
    """Why this kernel does not take a call: as on Hopper, except for the head sizes."""
    if call.q.shape[-1] not in KEYS:
        return f"head size {call.q.shape[-1]} is not one of {', '.join(map(str, KEYS))}"
    return hopper.refuses(call)


@traced_once
def run(call: AttentionCall) -> AttentionResult:
    """Attention by this kernel, without a gradient.

    Keys that no row attends to may hold anything, also NaN. So may values, unless they lie between the lowest start and
    the highest end that one range has over the rows of a tile: there they must be finite.
    """
    c = config_of(call)
    # The output is fp32: a thread has a row of it, and two numbers of 16 bits are too few for it to store them without
    # conflicts. It is rounded after it is unfolded.
    return launch(c, call, _program, scratch_of(c, call.q.shape[-1], call.q.dtype), jnp.float32)


def config_of(call: AttentionCall) -> AttentionConfig:
    """Chooses the tiles of a call: as many in flight as shared memory holds, and splits that fill the GPU."""
    (batch, slots, groups, width), int8 = call.k.shape, isinstance(call.k, Int8Vectors)
    ranges = call.ranges.shape[2]
    keys = min(KEYS[width], 64) if int8 else KEYS[width]  # int8 tiles are in shared memory twice
    line, edge = 2 * width, 8 * ranges + 8  # bytes of a row of queries or keys, and of its gaps
    free = SMEM_BYTES - ROWS * (line + edge + 4 * COLUMNS) - (INT8_STAGES * keys * (line + 8) if int8 else 0)
    slots = max(slots + -slots % ALIGN, keys)
    programs = batch * groups * -(-call.group_rows // ROWS)
    heads = heads_of(call.q.shape[2], call.k.shape[2])
    lacks_tcgen05 = not hasattr(gpu_callbacks, "tcgen05_mma")
    return AttentionConfig(
        rows=ROWS,
        workers=1,
        keys=keys,
        stages=min(4, free // (2 * keys * line)),
        splits=tiling.choose_splits(programs, -(-slots // keys), PROCESSORS),
        slots=slots,
        groups=groups,
        heads=heads,
        block=ROWS // heads,
        ranges=ranges,
        scale=call.scale,
        softcap=call.softcap,
        int8=int8,
        interpreted=call.device is not None and call.device.interpret is not None and lacks_tcgen05,
    )


# --- memory


class TensorMemory(NamedTuple):
    """Tensor memory of one program, and the barriers of the products that write it."""

    scores: Ref  # [128, 2 * keys] fp32: of one tile while those of the next are computed
    weights: Ref  # [128, 2 * keys]: of one tile while those of the tile before are read
    sum: Ref  # [128, K] fp32, of weight * value
    scores_full: Ref
    sum_full: Ref
    out: Ref  # shared memory [128, COLUMNS] fp32: columns of the sum on their way out


def scratch_of(c: AttentionConfig, width: int, dtype: DTypeLike) -> tuple[SharedMemory, TensorMemory]:
    """The scratch of a program."""
    finished = functools.partial(plgpu.Barrier, orders_tensor_core=not c.interpreted)  # products arrive here
    # A tile has one arrival: of its copy, or for int8 of the warpgroup that writes it.
    loaded, int8 = plgpu.Barrier(num_barriers=c.stages), (2, INT8_STAGES, c.keys)
    tiles = swizzled_tile(c.stages, c.keys, width, dtype=dtype)
    shared = SharedMemory(
        q=swizzled_tile(ROWS, width, dtype=dtype),
        gaps=plgpu.SMEM((2 * c.ranges + 2, ROWS), jnp.int32),
        k=tiles,
        v=tiles,
        q_full=plgpu.Barrier(num_arrivals=2, num_barriers=1),  # queries and their gaps
        k_full=loaded,
        v_full=loaded,
        k_free=finished(num_barriers=c.stages),
        v_free=finished(num_barriers=c.stages),
        int8=swizzled_tile(*int8, width, dtype=jnp.int8) if c.int8 else None,
        scales=plgpu.SMEM(int8, jnp.float32) if c.int8 else None,
        int8_full=plgpu.Barrier(num_arrivals=4, num_barriers=INT8_STAGES) if c.int8 else None,
    )
    transforms = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(4 * COLUMNS))
    memory = plgpu.SMEM if c.interpreted else plgpu.TMEM
    packed: dict[str, Any] = {} if c.interpreted else {"packed": True}
    return shared, TensorMemory(
        scores=memory((ROWS, 2 * c.keys), jnp.float32),
        weights=memory((ROWS, 2 * c.keys), dtype, **packed),
        sum=memory((ROWS, width), jnp.float32),
        scores_full=finished(num_barriers=2),
        sum_full=finished(num_barriers=1),
        out=plgpu.SMEM((ROWS, COLUMNS), jnp.float32, transforms=transforms),
    )


def _read(c: AttentionConfig, ref: Ref) -> Value:
    """Tensor memory into registers; when it returns, what was read may be overwritten."""
    if c.interpreted:
        return ref[...]
    x = plgpu.async_load_tmem(ref, layout=LAYOUT)
    plgpu.wait_load_tmem()
    return x


def _write(c: AttentionConfig, ref: Ref, x: Value) -> None:
    """Registers into tensor memory; products see it after `plgpu.commit_tmem`."""
    if c.interpreted:
        ref[...] = x
    else:
        plgpu.async_store_tmem(ref, x)


def _column_parts(ref: Ref) -> list[tuple[Any, Ref]]:
    """(columns, view of them) of an array that is too wide for the registers."""
    cuts = [pl.ds(at, COLUMNS) for at in range(0, ref.shape[-1], COLUMNS)]
    return [(cut, ref.at[:, cut]) for cut in cuts]


def _start_product(
    c: AttentionConfig, out: Ref, a: Ref, b: Ref, free: Ref, done: Ref, add: Value, transposed: bool = False
) -> None:
    """Starts out (+)= a b, or a b^T if `transposed`; at its end it arrives at `done`, and at `free` of b's tile."""
    if c.interpreted:
        before, tile = jnp.where(add, out[...], 0.0), b[...]
        out[...] = before + jnp.dot(
            a[...], tile.T if transposed else tile, preferred_element_type=jnp.float32
        )
        plgpu.barrier_arrive(free)
        plgpu.barrier_arrive(done)
    else:
        plgpu.tcgen05_mma(out, a, b.transpose((1, 0)) if transposed else b, free, accumulate=add)
        plgpu.tcgen05_commit_arrive(done)


# --- the program


def _program(c: AttentionConfig, inputs: int, *refs: Ref) -> None:
    """One program of the grid; `refs` are those of `tile_loop.launch`, the scratch is that of `scratch_of`."""
    (q, gaps, bounds, *sources), (out, lse, s, t) = refs[:inputs], refs[inputs:]
    warpgroup, tiles = jax.lax.axis_index("warpgroup"), key_tiles(c, bounds)
    pl.when(warpgroup == 0)(lambda: _compute(c, s, t, tiles, q, gaps, out, lse))
    pl.when(warpgroup == 1)(lambda: produce(c, s, tiles, tuple(sources)))


def _compute(
    c: AttentionConfig,
    s: SharedMemory,
    t: TensorMemory,
    tiles: KeyTiles,
    q: Ref,
    gaps: Ref,
    out: Ref,
    lse: Ref,
) -> None:
    """All steps of the computing warpgroup, and the store of its result."""
    pair, tile, split = (jax.lax.axis_index(name) for name in ("pair", "tile", "split"))
    rows = pl.ds(tile * ROWS, ROWS)
    # 1. The queries [128, K] and their gaps [2 R + 2, 128] into shared memory: two copies, two arrivals.
    plgpu.copy_gmem_to_smem(q.at[pair, rows], s.q, s.q_full.at[0])
    plgpu.copy_gmem_to_smem(gaps.at[tiles.batch, :, rows], s.gaps, s.q_full.at[0])
    plgpu.barrier_wait(s.q_full.at[0])
    # 2. The loop over key tiles. Each step starts the scores of the next one; those of the first start here.
    pl.when(tiles.steps > 0)(lambda: _start_scores(c, s, t, jnp.int32(0)))
    full = lambda x: plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), PER_ROW)
    step = functools.partial(_step, c, s, t, tiles)
    peak, total = jax.lax.fori_loop(0, tiles.steps, step, (full(FLOOR), full(0.0)))
    pl.when(tiles.steps > 0)(lambda: plgpu.barrier_wait(t.sum_full.at[0]))  # the product of the last step
    safe = jnp.where(total > 0, total, 1.0)
    lse[split, pair, rows] = jnp.where(total > 0, peak * math.log(2) + jnp.log(safe), -jnp.inf)
    # 3. The result, in parts: tensor memory -> registers -> shared memory -> global memory.
    factor, queries = jnp.where(total > 0, 1.0 / safe, 0.0), pl.ds(tile * c.block, c.block)
    for columns, part in _column_parts(t.sum):
        sums = _read(c, part)
        factors = across_columns(factor, sums)
        plgpu.wait_smem_to_gmem(0)  # the part before has been copied
        # Zeros where the factor is 0, because no product may have written there.
        t.out[...] = jnp.where(factors > 0, sums * factors, 0.0)
        plgpu.commit_smem()
        for head in range(c.heads):
            to = out.at[split, tiles.batch, queries, tiles.group * c.heads + head, columns]
            plgpu.copy_smem_to_gmem(t.out.at[pl.ds(head * c.block, c.block)], to)
    plgpu.wait_smem_to_gmem(0)


def _start_scores(c: AttentionConfig, s: SharedMemory, t: TensorMemory, i: Value) -> None:
    """Starts q k^T of step i, once its keys are loaded; even steps write the first half of `t.scores`."""
    slot, half = jax.lax.rem(i, jnp.int32(c.stages)), jax.lax.rem(i, jnp.int32(2))
    plgpu.barrier_wait(s.k_full.at[slot])
    scores = t.scores.at[:, pl.ds(half * c.keys, c.keys)]
    free, done = s.k_free.at[slot], t.scores_full.at[half]
    _start_product(c, scores, s.q, s.k.at[slot], free, done, False, transposed=True)


def _step(
    c: AttentionConfig,
    s: SharedMemory,
    t: TensorMemory,
    tiles: KeyTiles,
    i: Value,
    carry: tuple[Value, Value],
) -> tuple[Value, Value]:
    """Adds the key tile of step i to the softmax."""
    (before, total), half = carry, jax.lax.rem(i, jnp.int32(2)) * c.keys
    # 1. Scores [128, keys] into registers. The product of the next step starts at once, in the other half of
    # `t.scores`: what step i - 1 left there was read before step i began.
    plgpu.barrier_wait(t.scores_full.at[jax.lax.rem(i, jnp.int32(2))])
    found = [_read(c, part) for _, part in _column_parts(t.scores.at[:, pl.ds(half, c.keys)])]
    pl.when(i + 1 < tiles.steps)(lambda: _start_scores(c, s, t, i + 1))
    scaled = [scaled_scores(c, x) for x in found]
    mask = functools.partial(_mask_parts, s.gaps, tiles.start(c, i), (tiles.first + i) * c.keys)
    scores = jax.lax.cond(is_unmasked(c, tiles, i), lambda *xs: xs, mask, *(x for x, _ in scaled))
    # 2. Weights relative to the new maximum, into tensor memory.
    unit = scaled[0][1]
    peak = functools.reduce(jnp.maximum, [x.max(axis=1) * unit for x in scores], before)
    shrink = jnp.exp2(before - peak)
    total = total * shrink
    for x, (_, part) in zip(scores, _column_parts(t.weights.at[:, pl.ds(half, c.keys)]), strict=True):
        weights = jnp.exp2(x * unit - across_columns(peak, x))
        total = total + weights.sum(axis=1)
        _write(c, part, weights.astype(t.weights.dtype))
    # 3. The product with the values; it runs during the next step.
    _start_sum(c, s, t, tiles, i, shrink)
    return peak, total


def _mask_parts(gaps: Ref, begin: Value, own: Value, *scores: Value) -> tuple[Value, ...]:
    """`mask_scores` for the column parts of a tile."""
    width = scores[0].shape[1]
    return tuple(mask_scores(gaps, begin + n * width, own, x, layout=LAYOUT) for n, x in enumerate(scores))


def _start_sum(
    c: AttentionConfig, s: SharedMemory, t: TensorMemory, tiles: KeyTiles, i: Value, shrink: Value
) -> None:
    """Starts sum = sum * shrink + weights v of step i, once the product before it is done."""

    @pl.when(i > 0)
    def _() -> None:
        plgpu.barrier_wait(t.sum_full.at[0])
        for _, part in _column_parts(t.sum):
            sums = _read(c, part)
            _write(c, part, sums * across_columns(shrink, sums))

    if not c.interpreted:
        plgpu.commit_tmem()  # what this warpgroup wrote is visible to the products that it starts from now on
    slot, half = jax.lax.rem(i, jnp.int32(c.stages)), jax.lax.rem(i, jnp.int32(2)) * c.keys
    plgpu.barrier_wait(s.v_full.at[slot])
    values = s.v.at[slot]

    @pl.when(jnp.logical_not(is_unmasked(c, tiles, i)))
    def _() -> None:  # a tile at the border of a range may hold values that no row attends to
        begin = tiles.start(c, i)
        clear = functools.partial(clear_values, c, tiles, begin, values)
        pl.when(jnp.logical_not(is_covered(c, tiles, begin)))(clear)

    weights = t.weights.at[:, pl.ds(half, c.keys)]
    _start_product(c, t.sum, weights, values, s.v_free.at[slot], t.sum_full.at[0], i > 0)
