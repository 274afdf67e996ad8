"""Attention over a KV cache for TPUs, in Pallas: few queries over a long cache, reading only keys in the ranges.

The cache is read as it is stored, slots first: heads first would need a copy of all of it after each write. So a
program takes a tile of the queries of all heads, with those of one key head as the rows of a matrix, and walks over
the key tiles from the first to the last that any of them attends to, along the last axis of the grid: the next tile
is copied while one is computed. Which tiles those are is known on the device before a program starts (scalar
prefetch), and the grid is as long as the longest walk. Softmax is computed online in fp32 (arXiv 1805.02867).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
from jaxtyping import Array

from mercury_jax.ops.attention import tiling
from mercury_jax.ops.attention.inputs import (
    AttentionCall,
    AttentionResult,
    Fp8Vectors,
    Int8Vectors,
    RoundedVectors,
)
from mercury_jax.ops.operation import traced_once

MAX_ROWS = 1024  # of a tile of queries of one key head
KEYS = (512, 256, 128)  # of a tile, the first that fits
SUBLANES, LANES = 16, 128  # rows of a register of bfloat16, two of float32; its columns
MIN_KEYS = 8  # products with a single key do not lower
WIDTHS = range(64, 513, 64)  # head sizes
FLOOR = -1e30  # initial maximum of the scores; finite, so that rows without keys have no inf - inf


class TpuConfig(NamedTuple):
    """What a program is compiled for."""

    rows: int  # of a tile of queries of one key head
    keys: int  # of a tile
    tiles: int  # of queries
    groups: int  # key heads
    width: int  # head size
    slots: int
    ranges: int
    scale: float
    softcap: float | None
    int8: bool  # keys and values are int8
    residual: bool
    memory: int  # bytes of VMEM that a program may take


def refuses(call: AttentionCall) -> str | None:
    """Why this kernel does not take a call."""
    q, k, v = call.q, call.k, call.v
    if isinstance(k, Fp8Vectors) or isinstance(v, Fp8Vectors):
        return "keys and values are fp8, which it does not read; it reads int8"
    if isinstance(k, Int8Vectors) != isinstance(v, Int8Vectors):
        return "of keys and values one is int8 and the other is not"
    for x in (x for x in (q, k, v) if not isinstance(x, Int8Vectors)):
        if x.dtype not in (jnp.bfloat16, jnp.float32):
            return f"{x.dtype}, neither bfloat16 nor float32"
    if q.shape[-1] not in WIDTHS:
        return f"head size {q.shape[-1]} is no multiple of 64 up to 512"
    if q.shape[2] % k.shape[2]:
        return f"{q.shape[2]} heads are no multiple of {k.shape[2]} key heads"
    if k.shape[1] < MIN_KEYS:
        return f"{k.shape[1]} keys; it takes {MIN_KEYS} or more"
    if config_of(call) is None:
        return f"{KEYS[-1]} keys of {k.shape[2]} heads do not fit into VMEM"
    # The mesh of jit's arguments, where none is set. Under shard_map over all axes the work is divided already.
    mesh = jax.typeof(q).sharding.mesh
    mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
    manual = set(mesh.manual_axes)
    if manual != set(mesh.axis_names) if manual else mesh.size > 1:
        return "XLA does not divide kernels among devices; in shard_map over every axis each has its own"
    return None


@traced_once
def run(call: AttentionCall) -> AttentionResult:
    """Attention by this kernel, without a gradient. Products in fp32 are as exact as JAX's default precision.

    Keys that no row attends to may hold anything, also NaN. So may values, unless they lie between the lowest start and
    the highest end that one range has over the rows of a tile: there they must be finite.
    """
    batch, queries, heads, _ = call.q.shape
    c = config_of(call)
    assert c is not None, refuses(call)
    edges = tiling.fold_ranges(jnp.clip(call.ranges, 0, c.slots), heads // c.groups, c.rows)
    bounds = tiling.tile_bounds(edges, c.rows, c.keys, c.slots)
    q = tiling.fold_queries(call.q, c.groups, c.rows)
    q = q.reshape(batch, c.groups, *q.shape[1:])  # [B, G, M, K]
    # scales with slots last [B, G, 1, S]
    if isinstance(call.k, Int8Vectors) and isinstance(call.v, Int8Vectors):
        scales = [x.scale.transpose(0, 2, 1)[:, :, None] for x in (call.k, call.v)]
        sources = call.k.values, call.v.values, *scales
    else:
        sources = jnp.asarray(call.k), jnp.asarray(call.v)
    interpret = False if call.device is None or call.device.interpret is None else call.device.interpret
    found = _launch(c, q, edges, bounds, sources, interpret)
    out, *lse = (tiling.unfold_queries(x.reshape(-1, *x.shape[2:]), batch, queries, heads) for x in found)
    return (out, lse[0][..., 0]) if call.residual else out


def config_of(call: AttentionCall) -> TpuConfig | None:
    """As many rows at once as fit, so that the keys are read as few times as possible; then as many keys."""
    (batch, _, _, width), (_, slots, groups, _) = call.q.shape, call.k.shape
    int8, rows, (memory, cores) = isinstance(call.k, Int8Vectors), call.group_rows, _vmem_and_cores()
    fewest = 1 if batch % cores == 0 or rows < cores * SUBLANES else cores
    itemsizes = call.q.dtype.itemsize, 1 if isinstance(call.k, RoundedVectors) else call.k.dtype.itemsize
    for tiles in range(max(fewest, -(-rows // MAX_ROWS)), -(-rows // SUBLANES) + 1):
        even = -(-rows // (tiles * SUBLANES)) * SUBLANES
        for keys in KEYS:
            c = TpuConfig(
                even, min(keys, slots), -(-rows // even), groups, width, slots, call.ranges.shape[2], call.scale,
                call.softcap, int8, call.residual, memory,
            )  # fmt: skip
            if _vmem_bytes(c, *itemsizes) <= memory:
                return c
    return None


def _vmem_and_cores() -> tuple[int, int]:
    """(bytes of VMEM for a program, cores that share the programs of one device)."""
    try:
        info = pltpu.get_tpu_info()
    except ValueError:  # interpreted
        return 16 * 2**20, 1
    return info.vmem_capacity_bytes // 2, info.num_cores


def _vmem_bytes(c: TpuConfig, q_itemsize: int, k_itemsize: int) -> int:
    """An upper bound of the VMEM of a program: inputs and outputs twice, the scratch, and the values of a step."""
    line, thin = -(-c.width // LANES) * LANES, LANES * 4  # of a row; of one number per row
    rows = (
        c.groups * c.rows * (4 * line * q_itemsize + line * 4 + (4 if c.residual else 2) * thin)
        + 2 * c.rows * thin
    )
    keys = c.groups * c.keys * 6 * line * k_itemsize + (64 * c.groups * c.keys if c.int8 else 0)
    return rows + keys + 16 * c.rows * c.keys + 4 * c.keys * line * q_itemsize + 4 * c.rows * line


def _launch(
    c: TpuConfig, q: Array, edges: Array, bounds: Array, sources: tuple[Array, ...], interpret: Any
) -> tuple[Array, ...]:
    """The kernel over its grid: outputs [B, G, M, K], and with `residual` the log-sum-exp [B, G, M, 1]."""
    batch, _, rows, width = q.shape
    outputs = [(width, q.dtype), (1, jnp.float32)][: 1 + c.residual]
    numbers = 4 + 2 * c.ranges  # of `tiling.tile_bounds` per tile

    def key_tile(row: Any, tile: Any, step: Any, bounds: Any) -> Any:
        """The tile of a step; after the last one it stays the same, so that Pallas copies nothing."""
        at = (row * c.tiles + tile) * numbers
        last = jnp.maximum(bounds[at + 1] - 1, bounds[at])
        return jnp.minimum(jnp.minimum(bounds[at] + step, last), (c.slots - 1) // c.keys)

    own_rows = lambda row, tile, *_: (row, 0, tile, 0)
    keys = pl.BlockSpec((None, c.keys, c.groups, width), lambda *at: (at[0], key_tile(*at), 0, 0))
    scales = pl.BlockSpec((None, c.groups, 1, c.keys), lambda *at: (at[0], 0, 0, key_tile(*at)))
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        # The last axis is a walk over key tiles, as long as the longest of all programs.
        grid=(batch, c.tiles, jnp.maximum((bounds[..., 1] - bounds[..., 0]).max(), 1)),
        in_specs=[
            pl.BlockSpec((None, c.groups, c.rows, width), own_rows),
            pl.BlockSpec((None, c.rows, 2 * c.ranges), lambda row, tile, *_: (row, tile, 0)),
            *[keys, keys, scales, scales][: len(sources)],
        ],
        out_specs=[pl.BlockSpec((None, c.groups, c.rows, columns), own_rows) for columns, _ in outputs],
        scratch_shapes=[
            # `SoftmaxRefs`
            *[pltpu.VMEM((c.groups, c.rows, columns), jnp.float32) for columns in (width, 1, 1)],
            # A tile of keys and one of values, heads first.
            *[pltpu.VMEM((c.groups, c.keys, width), x.dtype) for x in sources[:2]],
        ],
    )
    # What XLA plans with: the cost as if every slot were attended to.
    pairs = batch * c.groups * rows * c.slots
    moved = 2 * (q.size * q.dtype.itemsize + c.tiles * sources[0].size * sources[0].dtype.itemsize)
    cost = pl.CostEstimate(flops=4 * pairs * c.width, transcendentals=pairs, bytes_accessed=moved)
    call = pl.pallas_call(
        functools.partial(_program, c),
        grid_spec=spec,
        out_shape=[
            jax.ShapeDtypeStruct((batch, c.groups, rows, columns), dtype) for columns, dtype in outputs
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=c.memory
        ),
        cost_estimate=cost,
        name="canvas_attention",
        interpret=interpret,
    )
    return tuple(call(bounds.reshape(-1), q, edges.transpose(0, 2, 1), *sources))


# --- the program


class SoftmaxRefs(NamedTuple):
    """Scratch of the online softmax: sum of weight * value, maximum score in units of log 2, sum of weights."""

    sum: Any
    peak: Any
    total: Any


class KeyMask(NamedTuple):
    """What to mask in a tile of keys; by default nothing, where every row attends to all of it."""

    begin: Any = None  # its first key
    edges: Any = None  # ranges of each row: start, end, start, end, ...
    hulls: Any = ()  # for each range the lowest start and the highest end over the rows


def _program(c: TpuConfig, bounds: Any, q: Any, edges: Any, *refs: Any) -> None:
    """One step of one tile of queries: adds one tile of keys to its softmax.

    Args:
        bounds: From `tiling.tile_bounds`, flat.
        q: Queries of the tile [G, M, K].
        edges: Their ranges [M, 2 R].
        *refs: Keys, values, for int8 ones both scales; the output and with `residual` its log-sum-exp; the scratch.
    """
    inputs = 4 if c.int8 else 2
    sources, outs = refs[:inputs], refs[inputs : inputs + 1 + c.residual]
    *softmax, k, v = refs[inputs + len(outs) :]
    state, step = SoftmaxRefs(*softmax), pl.program_id(2)
    at = (pl.program_id(0) * c.tiles + pl.program_id(1)) * (4 + 2 * c.ranges)
    first, last, low, high = (bounds[at + i] for i in range(4))
    begin = (first + step) * c.keys
    unmasked = (begin >= low) & (begin + c.keys <= high)

    # The scratch keeps the softmax of the tile from one step of its walk to the next.
    @pl.when(step == 0)
    def _() -> None:
        for ref, value in zip(state, (0.0, FLOOR, 0.0), strict=True):
            ref[...] = jnp.full_like(ref, value)

    @pl.when(first + step < last)
    def _() -> None:
        for ref, source in zip((k, v), sources, strict=False):
            ref[...] = jnp.transpose(source[...], (1, 0, 2))  # [keys, G, K] -> [G, keys, K]
        add = functools.partial(_add_all_heads, c, state, q, (k, v, *sources[2:]))
        pl.when(unmasked)(functools.partial(add, KeyMask()))
        hulls = [(bounds[at + 4 + 2 * r], bounds[at + 5 + 2 * r]) for r in range(c.ranges)]
        pl.when(~unmasked)(functools.partial(add, KeyMask(begin, edges, hulls)))

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        nonempty = state.total[...] > 0
        safe = jnp.where(nonempty, state.total[...], 1.0)
        outs[0][...] = (state.sum[...] / safe).astype(outs[0].dtype)
        if c.residual:
            outs[1][...] = jnp.where(nonempty, state.peak[...] * math.log(2) + jnp.log(safe), -jnp.inf)


def _add_all_heads(c: TpuConfig, state: SoftmaxRefs, q: Any, sources: tuple[Any, ...], mask: KeyMask) -> None:
    """Adds a tile of keys for all key heads, one after the other."""

    def one(group: Any, _: None) -> None:
        own = SoftmaxRefs(*(x.at[group] for x in state))
        _add_tile(c, own, mask, q[group], *(x[group] for x in sources))

    jax.lax.fori_loop(0, c.groups, one, None)


def _add_tile(c: TpuConfig, state: SoftmaxRefs, mask: KeyMask, q: Any, k: Any, v: Any, *scales: Any) -> None:
    """Adds a tile of keys to the softmax. int8 ones are multiplied as whole numbers and scaled after the products.

    Args:
        q: Queries [M, K].
        k: Keys [keys, K].
        v: Values [keys, K].
        *scales: For int8 the scales of keys and of values, each [1, keys].
    """
    dot = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    # 1. Scores [M, keys], -inf where a row does not attend to a key.
    scores = dot(q, k.astype(q.dtype), (((1,), (1,)), ((), ())))
    scores = scores * scales[0] if scales else scores
    unit = c.scale * math.log2(math.e)
    if c.softcap is not None:
        scores, unit = jnp.tanh(scores * (c.scale / c.softcap)), c.softcap * math.log2(math.e)
    scores = scores * unit
    if mask.edges is not None:
        key = mask.begin + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        edge = [mask.edges[:, e : e + 1] for e in range(mask.edges.shape[1])]
        inside = [(key >= start) & (key < end) for start, end in zip(edge[::2], edge[1::2], strict=True)]
        scores = jnp.where(functools.reduce(jnp.logical_or, inside), scores, -jnp.inf)
    # 2. Weights relative to the new maximum; what was summed before shrinks to it.
    before = state.peak[...]
    peak = jnp.maximum(before, scores.max(axis=1, keepdims=True))
    weights, shrink = jnp.exp2(scores - peak), jnp.exp2(before - peak)
    state.peak[...] = peak
    state.total[...] = state.total[...] * shrink + weights.sum(axis=1, keepdims=True)
    # 3. Sums [M, K] += weights v. int8 has no NaN, but the scale of a value may be one.
    weights = weights * _clear_hidden(mask, scales[1], 1) if scales else weights
    v = v if scales else _clear_hidden(mask, v, 0)
    by_key = ((1,), (0,)), ((), ())
    state.sum[...] = state.sum[...] * shrink + dot(weights.astype(q.dtype), v.astype(q.dtype), by_key)


def _clear_hidden(mask: KeyMask, x: Any, axis: int) -> Any:
    """Zeros for keys, along `axis`, in no range of any row: a weight of 0 times NaN would be NaN."""
    if mask.edges is None:
        return x
    key = mask.begin + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    inside = [(key >= low) & (key < high) for low, high in mask.hulls]
    return jnp.where(functools.reduce(jnp.logical_or, inside), x, 0)
