"""What the attention kernels for Hopper and Blackwell share: launch, producer warpgroup, key tiles, masks, softmax.

A program has the rows of one tile of queries and walks over a share of the key tiles that any of its rows attends to
(`KeyTiles`). A producer warpgroup copies tiles of keys and values into shared memory, `stages` of them ahead; the
computing warpgroups (`hopper`, `hopper_head_dim_512`, `blackwell`) multiply, mask what a row does not attend to, and
keep an online softmax (arXiv 1805.02867). Only tiles at the borders of the ranges need masks.

Every buffer of a tile has two barriers. `full` completes when the copy has arrived, and computing warpgroups wait for
it before they read; `free` completes when all of them have read the tile, and the producer waits for it before it
overwrites the buffer. A phase of `free` is waited for once per use of the buffer, so that no arrival is left over when
a program ends.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from mercury_jax.ops import tuned
from mercury_jax.ops.attention import tiling
from mercury_jax.ops.attention.inputs import AttentionCall, AttentionResult, Int8Vectors

ROWS = 64  # of one warpgroup's wgmma
RANGES = 6  # of a query, at most; their gaps are in shared memory
ALIGN = 8  # slots of a tile in shared memory: TMA copies whole tiles
SMEM_BYTES = 227 * 1024 - 1024  # shared memory of a program, without barriers and alignment
FLOOR = -1e30  # initial maximum of the scores; finite, so that rows without keys have no inf - inf
INT8_STAGES = 2  # int8 tiles in flight
WGMMA = plgpu.Layout.WGMMA
PER_ROW = WGMMA.reduce(1)  # the layout of one number for each row
# A thread loads four adjacent int8 and stores their 16-bit values at once.
INT8_LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X

Ref = Any  # a reference to global, shared or tensor memory, or a barrier, inside a kernel
Value = Any  # an array or index in the registers of a kernel


class AttentionConfig(NamedTuple):
    """What a program is compiled for."""

    rows: int  # of a program
    workers: int  # warpgroups that compute
    keys: int  # of a tile
    stages: int  # tiles in flight
    splits: int  # of the keys
    slots: int  # of the keys that are read, a multiple of ALIGN and at least `keys`
    groups: int  # key heads
    heads: int  # query heads of a key head in a tile, from `heads_of`
    block: int  # queries of each head whose rows follow each other in a tile
    ranges: int
    scale: float
    softcap: float | None
    int8: bool  # keys and values are int8
    interpreted: bool
    wide: bool = False  # head size 512: both warpgroups share 64 rows, each with half of the columns
    listed: bool = False  # a table lists the key tiles of each program; `slots` is a multiple of `keys`
    clustered: bool = False  # the programs of the splits run side by side and merge their results themselves


class SharedMemory(NamedTuple):
    """Shared memory and barriers of one program: `full` when data has arrived, `free` when it has been read."""

    q: Ref
    gaps: Ref  # between the key ranges of the rows; in the end their log-sum-exps, for the other splits
    k: Ref
    v: Ref
    q_full: Ref
    k_full: Ref
    v_full: Ref
    k_free: Ref
    v_free: Ref
    # of each warpgroup: all splits have their result in shared memory; then, have read those
    merged: Ref = None
    cleared: Ref = None  # values without readers are zero
    # Of head size 512: weights of each half of a tile's keys, a number per row that the warpgroups exchange, and the
    # barriers of both.
    weights: Ref = None
    exchange: Ref = None
    exchanged: Ref = None
    weights_full: Ref = None
    # Of int8: tiles of keys and of values, their scales, and their barrier.
    int8: Ref = None
    scales: Ref = None
    int8_full: Ref = None
    # Of the backward pass (`gradient`): ranges of the rows, the cotangent of the output, and two numbers of each row.
    edges: Ref = None
    d_out: Ref = None
    stats: Ref = None
    d_out_full: Ref = None


# --- the launch


def swizzled_tile(*shape: int, dtype: DTypeLike) -> Ref:
    """Shared memory with its last two axes in the tiles that tensor cores read without bank conflicts."""
    line = 64 * jnp.dtype(dtype).itemsize  # bytes of a swizzled line: 64 numbers
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(line)))


def sources_of(c: AttentionConfig, call: AttentionCall) -> tuple[Array, ...]:
    """What the producer reads.

    Keys are in shared memory in tiles of 8 slots, and TMA copies whole tiles: a cache whose slots are no multiple of 8
    is copied first.

    Returns:
        Keys and values, padded with zeros to `c.slots`; for int8 also their scales, slots last.
    """
    k, v = call.k, call.v

    def pad(x: Array) -> Array:
        more = c.slots - x.shape[1]
        return jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2))) if more else x

    if not (isinstance(k, Int8Vectors) and isinstance(v, Int8Vectors)):
        return pad(jnp.asarray(k)), pad(jnp.asarray(v))
    # Slots last and a multiple of 8: TMA needs rows whose bytes are a multiple of 16.
    scales = [pad(x.scale).transpose(0, 2, 1) for x in (k, v)]
    return pad(k.values), pad(v.values), *scales


def heads_of(heads: int, groups: int) -> int:
    """How many query heads of a key head are in one tile, such that the rows of each are whole tiles of 8 rows."""
    return heads // groups if heads // groups in (1, 2, 4, 8) else 1


def query_block(heads: int, groups: int) -> int:
    """How many queries follow each other in the rows that `launch` makes of each head (`tiling.fold_queries`)."""
    own = heads_of(heads, groups)
    return ROWS // own if own * groups == heads else 1


def launch(
    c: AttentionConfig,
    call: AttentionCall,
    program: Callable[..., None],
    scratch: Sequence[Ref],
    out_dtype: DTypeLike,
) -> AttentionResult:
    """Runs a program for each split of the keys, tile of rows, and pair of (row of the batch, key head).

    Args:
        program: program(c, number of inputs, *refs); refs are the inputs (queries [P, M, K], their gaps [B, E, M],
            `tiling.tile_bounds` or `tiling.key_visits`, then `sources_of`), the outputs [N, B, T, H, K] and their
            log-sum-exps [N, P, M], the scratch. N is 1 if the programs merge their results, otherwise the number of
            splits.
    """
    batch, queries, heads, width = call.q.shape
    regrouped = heads != c.groups * c.heads
    # No row attends to the padding behind the last slot.
    q, ranges = call.q, jnp.minimum(call.ranges, call.k.shape[1])
    if regrouped:
        q = q.reshape(batch, queries, c.groups, -1, width).swapaxes(2, 3).reshape(batch, -1, c.groups, width)
        ranges = jnp.repeat(ranges, heads // c.groups, axis=1)
    count = q.shape[1]  # of queries
    fold = functools.partial(tiling.fold_ranges, heads=c.heads, rows=c.rows, block=c.block)
    bound = tiling.key_visits if c.listed else tiling.tile_bounds
    bounds, gaps = bound(fold(ranges), c.rows, c.keys, c.slots), fold(tiling.gaps(ranges))
    sources = sources_of(c, call)
    q = tiling.fold_queries(q, c.groups, c.rows, c.block)
    pairs, rows, _ = q.shape
    parts = 1 if c.clustered else c.splits
    together = c.clustered and c.splits > 1

    def attention(*refs: Ref) -> None:
        program(c, 3 + len(sources), *refs)

    knobs = tuned.AttentionKnobs(c.workers, c.keys, c.stages, c.splits)
    attention.__name__ = tuned.kernel_name("attention", knobs)

    outs, lses = plgpu.kernel(
        attention,
        out_type=(
            jax.ShapeDtypeStruct((parts, batch, rows // c.heads, c.groups * c.heads, width), out_dtype),
            jax.ShapeDtypeStruct((parts, pairs, rows), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(rows // c.rows, pairs) if together else (c.splits, rows // c.rows, pairs),
        grid_names=("tile", "pair") if together else ("split", "tile", "pair"),
        cluster=(c.splits,) if together else (),
        cluster_names=("split",) if together else (),
        num_threads=c.workers + 1,  # the producer
        thread_name="warpgroup",
        interpret=None if call.device is None else call.device.interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(q, gaps, bounds, *sources)
    unfold = functools.partial(
        tiling.unfold_queries, batch=batch, queries=count, heads=c.groups * c.heads, block=c.block
    )
    outs = outs[:, :, :count]
    out, lse = outs[0], unfold(lses[0])
    if parts > 1:
        out, lse = tiling.merge_splits(outs, jnp.stack([unfold(x) for x in lses]))
    if regrouped:
        split = lambda x: x.reshape(batch, queries, -1, *x.shape[2:]).swapaxes(2, 3)  # [B, T, G, H / G, ...]
        out, lse = (split(x).reshape(batch, queries, heads, *x.shape[3:]) for x in (out, lse))
    out = out.astype(call.q.dtype)
    return (out, lse) if call.residual else out


# --- key tiles


class KeyTiles(NamedTuple):
    """The key tiles of one program."""

    batch: Value  # row of the batch
    group: Value  # key head
    first: Value  # index of the first tile; None with `visits`
    steps: Value  # number of tiles
    # In memory, because registers are scarce: keys [from, to) that every row attends to; for each range the lowest
    # start and the highest end over the rows. None with `visits`.
    unmasked: Ref
    hulls: Ref
    visits: Ref = None  # in memory: this program's line of `tiling.key_visits`

    def index(self, i: Value) -> Value:
        """The index of the key tile of a step."""
        return self.first + i if self.visits is None else jax.lax.div(self.visits[i + 1], jnp.int32(2))

    def start(self, c: AttentionConfig, i: Value) -> Value:
        """The first key loaded at a step: the last tile may not fit, and then starts earlier."""
        return jnp.minimum(self.index(i) * c.keys, c.slots - c.keys)


def key_tiles(c: AttentionConfig, bounds: Ref) -> KeyTiles:
    """This program's share of the tiles that its rows attend to.

    Args:
        bounds: From `tiling.tile_bounds`; if `c.listed`, from `tiling.key_visits` (keys are then not split).
    """
    pair, tile = (jax.lax.axis_index(name) for name in ("pair", "tile"))
    batch, group = jax.lax.div(pair, jnp.int32(c.groups)), jax.lax.rem(pair, jnp.int32(c.groups))
    own = bounds.at[batch, tile]
    if c.listed:
        return KeyTiles(batch, group, None, own[0], None, None, own)
    split = jax.lax.axis_index("split")
    first, last = own[0], own[1]
    share = jax.lax.div(last - first + (c.splits - 1), jnp.int32(c.splits))
    first = first + split * share
    steps = jnp.maximum(jnp.minimum(share, last - first), 0)
    return KeyTiles(batch, group, first, steps, own.at[pl.ds(2, 2)], own.at[pl.ds(4, 2 * c.ranges)])


# --- the producer warpgroup


def produce(c: AttentionConfig, s: SharedMemory, tiles: KeyTiles, sources: tuple[Ref, ...]) -> None:
    """Loads all key tiles of a program, dequantising int8 on the way.

    Args:
        sources: From `sources_of`.
    """
    if c.int8:
        for i in range(INT8_STAGES):
            pl.when(i < tiles.steps)(functools.partial(_load_int8, c, s, tiles, sources, i))
    load = _dequantise if c.int8 else _load
    jax.lax.fori_loop(0, tiles.steps, lambda i, _: load(c, s, tiles, sources, i), None)
    for slot in range(c.stages):  # a program may end only when every arrival at a barrier has been waited for

        @pl.when(slot < tiles.steps)
        def _(slot: int = slot) -> None:
            plgpu.barrier_wait(s.k_free.at[slot])
            plgpu.barrier_wait(s.v_free.at[slot])


def _load(c: AttentionConfig, s: SharedMemory, tiles: KeyTiles, sources: tuple[Ref, ...], i: Value) -> None:
    """Loads the keys and values of step i."""
    slot = jax.lax.rem(i, jnp.int32(c.stages))
    at = (tiles.batch, pl.ds(tiles.start(c, i), c.keys), tiles.group)
    buffers = (s.k, s.v), (s.k_full, s.v_full), (s.k_free, s.v_free)
    for source, tile, full, free in zip(sources[:2], *buffers, strict=True):
        # Wait until the tile of `stages` steps ago has been read. In the first round nothing is overwritten.
        pl.when(i >= c.stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
        plgpu.copy_gmem_to_smem(source.at[at], tile.at[slot], full.at[slot])


def _load_int8(
    c: AttentionConfig, s: SharedMemory, tiles: KeyTiles, sources: tuple[Ref, ...], i: Value
) -> None:
    """Loads the int8 keys and values of step i, and their scales: four copies that arrive at one barrier."""
    slot, keys = jax.lax.rem(jnp.int32(i), jnp.int32(INT8_STAGES)), pl.ds(tiles.start(c, i), c.keys)
    for x in (0, 1):
        full = s.int8_full.at[slot]
        plgpu.copy_gmem_to_smem(sources[x].at[tiles.batch, keys, tiles.group], s.int8.at[x, slot], full)
        plgpu.copy_gmem_to_smem(sources[2 + x].at[tiles.batch, tiles.group, keys], s.scales.at[x, slot], full)


def _dequantise(
    c: AttentionConfig, s: SharedMemory, tiles: KeyTiles, sources: tuple[Ref, ...], i: Value
) -> None:
    """Writes values * scale of step i's keys and values where `_load` would have loaded them."""
    source_slot = jax.lax.rem(i, jnp.int32(INT8_STAGES))
    slot = jax.lax.rem(i, jnp.int32(c.stages))
    plgpu.barrier_wait(s.int8_full.at[source_slot])
    buffers = (s.k, s.v), (s.k_full, s.v_full), (s.k_free, s.v_free)
    for x, (tile, full, free) in enumerate(zip(*buffers, strict=True)):
        pl.when(i >= c.stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
        # [64, 64] numbers at a time: 32 registers per thread.
        for row in range(0, c.keys, ROWS):
            rows = pl.ds(row, ROWS)
            scale = plgpu.layout_cast(s.scales[x, source_slot, rows], INT8_LAYOUT.reduce(1))
            for column in range(0, tile.shape[-1], 64):
                at = (rows, pl.ds(column, 64))
                values = plgpu.layout_cast(s.int8[x, source_slot, *at], INT8_LAYOUT).astype(jnp.float32)
                scales = plgpu.layout_cast(across_columns(scale, values), INT8_LAYOUT)
                values = values * scales
                tile[slot, *at] = values.astype(tile.dtype)
        plgpu.commit_smem()  # the tensor cores see what threads have written
        plgpu.barrier_arrive(full.at[slot])
    # This warpgroup alone reads the int8 tile, so the next copy may overwrite it now.
    pl.when(i + INT8_STAGES < tiles.steps)(lambda: _load_int8(c, s, tiles, sources, i + INT8_STAGES))


# --- products


def product(c: AttentionConfig, left: Ref, right: Ref) -> Value:
    """Computes left right^T, of two operands in shared memory, and waits for it.

    Returns:
        The products [64, vectors of `right`] in fp32.
    """
    if c.interpreted:  # the interpreter has no wgmma with a transposed operand
        return jnp.dot(left[...], right[...].T, preferred_element_type=jnp.float32)

    def multiply(acc: Any) -> Value:
        plgpu.wgmma(acc, left, right.transpose((1, 0)))
        return acc[...]  # waits for the product

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((left.shape[0], right.shape[0]), jnp.float32))


# --- softmax


class OnlineSoftmax(NamedTuple):
    """State of the online softmax: sum of weight * value, maximum score in units of log 2, sum of weights."""

    sum: Value
    peak: Value
    total: Value


def full(x: float, shape: tuple[int, ...]) -> Value:
    """An array of one number, in the layout of the results of wgmma.

    Args:
        shape: [rows, columns], or [rows] for one number per row.
    """
    return plgpu.layout_cast(jnp.full(shape, x, jnp.float32), WGMMA if len(shape) == 2 else PER_ROW)


def across_columns(x: Value, like: Value) -> Value:
    """Broadcasts one number per row to the columns of another array.

    Args:
        x: Numbers [rows].
        like: An array [rows, columns].

    Returns:
        x in the shape of `like`.
    """
    return jax.lax.broadcast_in_dim(x, like.shape, [0])


def scaled_scores(c: AttentionConfig, scores: Value) -> tuple[Value, float]:
    """Applies the softcap. The scale is left to the exponent, where it costs no product of its own.

    Returns:
        (scores, unit) such that exp2(scores * unit) is the exponential of the final scores.
    """
    if c.softcap is None:
        return scores, c.scale * math.log2(math.e)
    return jnp.tanh(scores * (c.scale / c.softcap)), c.softcap * math.log2(math.e)


# --- masks


def is_unmasked(c: AttentionConfig, tiles: KeyTiles, i: Value) -> Value:
    """Whether every row attends to every key of a step, and none of the keys was in the tile before."""
    if tiles.visits is not None:
        return jax.lax.rem(tiles.visits[i + 1], jnp.int32(2)) == 0
    begin, own = tiles.start(c, i), (tiles.first + i) * c.keys
    return (begin >= jnp.maximum(tiles.unmasked[0], own)) & (begin + c.keys <= tiles.unmasked[1])


def mask_scores(gaps: Ref, begin: Value, own: Value, scores: Value, layout: plgpu.Layout = WGMMA) -> Value:
    """Masks keys that a row does not attend to, and keys that the tile before had.

    The gaps are read again each time: few tiles need them, and registers are scarce.

    Args:
        gaps: `tiling.gaps` of the rows in shared memory [2 R + 2, rows].
        scores: Scores [rows, keys].
    """
    key = begin + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)

    def mask(r: Value, scores: Value) -> Value:
        start, end = (plgpu.layout_cast(gaps[2 * r + edge], layout.reduce(1)) for edge in (0, 1))
        hidden = (key >= across_columns(start, scores)) & (key < across_columns(end, scores))
        return jnp.where(hidden, -jnp.inf, scores)

    scores = jnp.where(key < own, -jnp.inf, scores)
    return jax.lax.fori_loop(0, gaps.shape[0] // 2, mask, scores)


def is_covered(c: AttentionConfig, tiles: KeyTiles, begin: Value) -> Value:
    """Whether the hull of one range holds all keys of a tile, so that its values are finite."""
    covers = [(begin >= low) & (begin + c.keys <= high) for low, high in _hulls(c, tiles)]
    return functools.reduce(jnp.logical_or, covers)


def clear_values(c: AttentionConfig, tiles: KeyTiles, begin: Value, values: Ref) -> None:
    """Sets values of keys in no range of any row to zero: a weight of 0 times NaN would be NaN.

    Args:
        values: Values in shared memory [keys, columns], changed in place.
    """
    for row in range(0, values.shape[0], ROWS):
        for column in range(0, values.shape[1], 64):
            part = values.at[pl.ds(row, ROWS), pl.ds(column, 64)]
            key = begin + row + plgpu.broadcasted_iota(jnp.int32, (ROWS, 64), 0, layout=WGMMA)
            mask = [(key >= low) & (key < high) for low, high in _hulls(c, tiles)]
            found = plgpu.layout_cast(part[...], WGMMA)
            part[...] = jnp.where(functools.reduce(jnp.logical_or, mask), found, jnp.zeros_like(found))
    plgpu.commit_smem()


def _hulls(c: AttentionConfig, tiles: KeyTiles) -> list[tuple[Value, Value]]:
    return [(tiles.hulls[2 * r], tiles.hulls[2 * r + 1]) for r in range(c.ranges)]
