"""Attention on Hopper with a gradient: the backend of `attend` for training.

The forward pass is the kernel of `hopper`, with a list of the key tiles that each program visits, because a training
row holds several documents, each twice (BD3-LM, arXiv 2503.09573): between the two ranges of a canvas token lie many
keys that it does not attend to. The backward pass is two kernels that compute the weights again from the log-sum-exp;
for head size 256, whose sums of dk and dv do not fit into registers together, it is blockwise attention's in plain XLA.

With weights p = exp(s - lse): dv = p' do, ds = p (do v' - delta), dq = ds k, dk = ds' q, where delta = o do - dlse is
one number per row (FlashAttention-2, arXiv 2307.08691, algorithm 2). One kernel computes dq: a program has 128 rows
and walks over key tiles like the forward pass, whose launch, producer and key tiles it shares (`hopper_tile_loop`). The
other computes dk and dv: a program has 128 keys and walks over the tiles of 64 rows that attend to one of them. Its
products are transposed, [keys, rows], so that the weights are the first operand of the next product as they are in
registers. The rows of a key head are the queries of all of its query heads, so the sum over the heads of a group is
part of the walk, and no two programs add to the same number.

In both kernels a walk skips tiles without a visible pair (`tiling.key_visits`, `tiling.row_visits`), and only tiles
at the borders of the ranges are masked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float

from mercury_jax.ops.attention import hopper, tiling, xla
from mercury_jax.ops.attention.hopper_tile_loop import (
    PER_ROW,
    ROWS,
    SMEM_BYTES,
    WGMMA,
    AttentionConfig,
    KeyTiles,
    Ref,
    SharedMemory,
    Value,
    across_columns,
    full,
    is_unmasked,
    key_tiles,
    produce,
    product,
    scaled_scores,
    sources_of,
    swizzled_tile,
)
from mercury_jax.ops.attention.inputs import AttentionCall, AttentionResult, Int8Vectors
from mercury_jax.types import Device

WIDTHS = (64, 128, 256)  # head sizes
KEYS = {64: 128, 128: 64}  # head size: keys of a tile in the kernel of dq, as registers allow
WORKERS = 2  # computing warpgroups of a program, each with 64 rows (dq) or 64 keys (dk, dv)
# Score of a masked pair. Its weight is 0; its square, in the derivative of the softcap, is finite.
MASKED = -1e18
PER_COLUMN = WGMMA.reduce(0)  # the layout of one number for each column
# Registers per thread; together all that there are.
COMPUTE_REGISTERS, PRODUCER_REGISTERS = 240, 24


class TrainingConfig(NamedTuple):
    """Static arguments of attention with a gradient."""

    scale: float
    softcap: float | None
    device: Device | None


def refuses(call: AttentionCall) -> str | None:
    """Gives the reason why the kernels do not support a call with a gradient."""
    if isinstance(call.k, Int8Vectors) or isinstance(call.v, Int8Vectors):
        return "rounded keys have no gradient"
    if (width := call.q.shape[-1]) not in WIDTHS:
        return f"head size {width} is not one of {', '.join(map(str, WIDTHS))}, which have a gradient"
    if call.q.dtype == jnp.float16:
        return "gradients in float16 overflow; bfloat16 has a gradient"
    if (ranges := call.ranges.shape[2]) > 3:
        return f"{ranges} ranges a row have no gradient; registers suffice for 3"
    if width == 128 and call.softcap is not None:
        return f"head size {width} with a softcap has no gradient; its derivative would spill registers"
    return hopper.refuses(call)


def run(call: AttentionCall) -> AttentionResult:
    """Computes attention by the Hopper kernels.

    Outputs and log-sum-exp are differentiable in q, k and v, in reverse mode, and only once (no second derivative).
    All keys and values must be finite, those that no query attends to as well.
    """
    found: Any = _attend(
        call.q, call.k, call.v, call.ranges, TrainingConfig(call.scale, call.softcap, call.device)
    )
    return found if call.residual else found[0]


@functools.partial(jax.jit, static_argnames="config")  # all layers share one trace
def _values(q: Array, k: Array, v: Array, ranges: Array, config: TrainingConfig) -> Any:
    return hopper.run(_call(q, k, v, ranges, config), listed=True)


@functools.partial(jax.jit, static_argnames="config")
def _gradients(
    q: Array, k: Array, v: Array, ranges: Array, out: Array, lse: Array, d_out: Array, d_lse: Array,
    config: TrainingConfig,
) -> tuple[Array, Array, Array]:  # fmt: skip
    if q.shape[-1] in KEYS:
        return gradients(_call(q, k, v, ranges, config), out, lse, d_out, d_lse)
    plain = xla.BlockwiseConfig(config.scale, config.softcap)
    return xla.gradients(q, k, v, ranges, out, lse, d_out, d_lse, plain)


def _call(q: Array, k: Array, v: Array, ranges: Array, config: TrainingConfig) -> AttentionCall:
    return AttentionCall(q, k, v, ranges, config.scale, config.softcap, residual=True, device=config.device)


_attend = xla.with_gradients(_values, _gradients)


# --- the backward pass


def gradients(
    call: AttentionCall,
    out: Float[Array, "B T H K"],
    lse: Float[Array, "B T H"],
    d_out: Float[Array, "B T H K"],
    d_lse: Float[Array, "B T H"],
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S G K"], Float[Array, "B S G K"]]:
    """Computes the gradients of attention."""
    c = _config(call, KEYS[call.q.shape[3]])
    batch, queries, heads, _ = call.q.shape
    fold = functools.partial(tiling.fold_queries, groups=c.groups, rows=c.rows)
    q, d_rows = fold(call.q), fold(d_out.astype(call.q.dtype))  # [P, M, K]
    # 1. Two numbers of each row: its log-sum-exp in units of log 2, and delta. A row without keys has no weights:
    # there any finite numbers will do.
    blind = jnp.isneginf(lse)
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1) - d_lse
    stats = jnp.stack([lse * math.log2(math.e), delta], axis=-1)  # [B, T, H, 2]
    stats = fold(jnp.where(blind[..., None], 0.0, stats)).swapaxes(1, 2)  # [P, 2, M]
    ranges = jnp.minimum(call.ranges, call.k.shape[1])
    edges = tiling.fold_ranges(ranges, heads // c.groups, c.rows)
    # 2. dq [P, M, K].
    dq = _query_gradient(c, call, q, d_rows, stats, edges)
    dq = tiling.unfold_queries(dq, batch, queries, heads)
    # 3. dk and dv [B, S, G, K].
    dk, dv = _key_gradients(_config(call, WORKERS * ROWS), call, q, d_rows, stats, edges)
    slots = call.k.shape[1]
    return dq, dk[:, :slots], dv[:, :slots]


def _config(call: AttentionCall, keys: int) -> AttentionConfig:
    """The configuration of a kernel with tiles of `keys` keys; a program of dq has 128 rows."""
    width, slots, ranges = call.q.shape[3], call.k.shape[1], call.ranges.shape[2]
    # Bytes of what stays in shared memory, two arrays of 128 vectors, and of a tile in flight, two of 64 or `keys`.
    line = 2 * width
    resident, tile = (
        2 * WORKERS * ROWS * (line + 4 * ranges + 4),
        2 * max(keys, ROWS) * (line + 4 * ranges + 4),
    )
    return AttentionConfig(
        rows=WORKERS * ROWS,
        workers=WORKERS,
        keys=keys,
        stages=min(4, (SMEM_BYTES - resident) // tile),
        splits=1,
        slots=slots + -slots % keys,
        groups=call.k.shape[2],
        heads=call.q.shape[2] // call.k.shape[2],
        block=1,
        ranges=ranges,
        scale=call.scale,
        softcap=call.softcap,
        int8=False,
        interpreted=call.device is not None and call.device.interpret is not None,
        listed=True,
    )


def _launch(
    c: AttentionConfig,
    call: AttentionCall,
    program: Callable[..., None],
    out_type: Any,
    scratch: SharedMemory,
    grid: tuple[int, int],
) -> Callable[..., Any]:
    """The call of a kernel with a program for each tile and pair of (row of the batch, key head)."""
    return plgpu.kernel(
        program,
        out_type=out_type,
        scratch_types=[scratch],
        grid=grid,
        grid_names=("tile", "pair"),
        num_threads=c.workers + 1,  # the producer
        thread_name="warpgroup",
        interpret=None if call.device is None else call.device.interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )


def _share(c: AttentionConfig, compute: Callable[[Value], None], load: Callable[[], None]) -> None:
    """Runs `compute(worker)` on the computing warpgroups and `load()` on the producer, which gives up registers."""
    warpgroup = jax.lax.axis_index("warpgroup")

    def work() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        compute(warpgroup)

    def feed() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        load()

    jax.lax.cond(warpgroup < c.workers, work, feed)


# --- dq


def _query_gradient(
    c: AttentionConfig, call: AttentionCall, q: Array, d_out: Array, stats: Array, edges: Array
) -> Float[Array, "P M K"]:
    """Computes dq [P, M, K] from the folded rows: queries and cotangents [P, M, K], `stats` [P, 2, M], their ranges."""
    (pairs, rows, width), dtype = q.shape, q.dtype
    tiles, own = (swizzled_tile(n, m, width, dtype=dtype) for n, m in ((c.stages, c.keys), (c.workers, ROWS)))
    loaded = plgpu.Barrier(num_barriers=c.stages)
    read = plgpu.Barrier(num_arrivals=c.workers, num_barriers=c.stages)
    scratch = SharedMemory(
        q=own,
        gaps=None,
        edges=plgpu.SMEM((c.workers, 2 * c.ranges, ROWS), jnp.int32),
        k=tiles,
        v=tiles,
        # Queries, cotangents, two numbers, ranges.
        q_full=plgpu.Barrier(num_arrivals=4, num_barriers=c.workers),
        k_full=loaded,
        v_full=loaded,
        k_free=read,
        v_free=read,
        d_out=own,
        stats=plgpu.SMEM((c.workers, 2, ROWS), jnp.float32),
    )

    def query_gradient(*refs: Ref) -> None:  # the kernel's name in a profile
        *inputs, dq, s = refs
        *rows, visits, k, v = inputs
        tiles = key_tiles(c, visits)
        compute = functools.partial(_compute_queries, c, s, tiles, tuple(rows), dq)
        _share(c, compute, lambda: produce(c, s, tiles, (k, v)))

    kernel = _launch(
        c, call, query_gradient, jax.ShapeDtypeStruct(q.shape, dtype), scratch, (rows // c.rows, pairs)
    )
    visits = tiling.key_visits(edges, c.rows, c.keys, c.slots)
    return kernel(q, d_out, stats, edges, visits, *sources_of(c, call))


def _compute_queries(
    c: AttentionConfig, s: SharedMemory, tiles: KeyTiles, inputs: tuple[Ref, ...], dq: Ref, worker: Value
) -> None:
    """All steps of one computing warpgroup of dq, and the store of its 64 rows."""
    pair, tile = (jax.lax.axis_index(name) for name in ("pair", "tile"))
    rows = pl.ds((tile * c.workers + worker) * ROWS, ROWS)
    q, d_out, stats, edges = inputs
    loads = ((q.at[pair, rows], s.q), (d_out.at[pair, rows], s.d_out), (stats.at[pair, :, rows], s.stats))
    for source, to in (*loads, (edges.at[tiles.batch, :, rows], s.edges)):
        plgpu.copy_gmem_to_smem(source, to.at[worker], s.q_full.at[worker])
    plgpu.barrier_wait(s.q_full.at[worker])
    lse, delta = (plgpu.layout_cast(s.stats[worker, n], PER_ROW) for n in (0, 1))

    def step(i: Value, sums: Value) -> Value:
        slot = jax.lax.rem(i, jnp.int32(c.stages))
        # 1. Scores and weights [64, keys].
        plgpu.barrier_wait(s.k_full.at[slot])
        scores = product(c, s.q.at[worker], s.k.at[slot])
        mask = functools.partial(_mask, s.edges.at[worker], tiles.start(c, i), 1)
        weights, slope = _weights(
            c, scores, lambda: across_columns(lse, scores), is_unmasked(c, tiles, i), mask
        )
        # 2. Their gradient ds [64, keys].
        plgpu.barrier_wait(s.v_full.at[slot])
        ds = weights * (product(c, s.d_out.at[worker], s.v.at[slot]) - across_columns(delta, weights))
        plgpu.barrier_arrive(s.v_free.at[slot])
        # 3. dq [64, K] += ds [64, keys] k [keys, K].
        ds = (ds if slope is None else ds * slope).astype(s.k.dtype)
        (sums,) = _add_products(c, [(sums, ds, s.k.at[slot])])
        plgpu.barrier_arrive(s.k_free.at[slot])
        return sums

    sums = jax.lax.fori_loop(0, tiles.steps, step, full(0.0, (ROWS, dq.shape[-1])))
    _store(sums * c.scale, s.q.at[worker], dq.at[pair, rows])  # the queries are not read any more


# --- dk and dv


def _key_gradients(
    c: AttentionConfig, call: AttentionCall, q: Array, d_out: Array, stats: Array, edges: Array
) -> tuple[Float[Array, "B S G K"], Float[Array, "B S G K"]]:
    """Computes dk and dv of `c.slots` keys from the folded rows, as `_query_gradient`."""
    width, dtype = q.shape[2], q.dtype
    own, tiles = (swizzled_tile(n, ROWS, width, dtype=dtype) for n in (c.workers, c.stages))
    scratch = SharedMemory(
        q=tiles,
        gaps=None,
        edges=plgpu.SMEM((c.stages, 2 * c.ranges, ROWS), jnp.int32),
        k=own,
        v=own,
        q_full=plgpu.Barrier(num_arrivals=3, num_barriers=c.stages),  # queries, two numbers, ranges
        k_full=plgpu.Barrier(num_arrivals=2, num_barriers=c.workers),  # keys and values
        v_full=None,
        k_free=plgpu.Barrier(num_arrivals=c.workers, num_barriers=c.stages),  # all of a tile of rows is read
        v_free=None,
        d_out=tiles,
        stats=plgpu.SMEM((c.stages, 2, ROWS), jnp.float32),
        d_out_full=plgpu.Barrier(num_barriers=c.stages),
    )

    def key_gradients(*refs: Ref) -> None:  # the kernel's name in a profile
        *rows, visits, k, v, dk, dv, s = refs
        tile, pair = (jax.lax.axis_index(name) for name in ("tile", "pair"))
        batch, group = jax.lax.div(pair, jnp.int32(c.groups)), jax.lax.rem(pair, jnp.int32(c.groups))
        own = visits.at[batch, tile]
        walk = KeyTiles(batch, group, None, own[0], None, None, own)  # here of tiles of rows
        compute = functools.partial(_compute_keys, c, s, walk, (k, v), (dk, dv))
        _share(c, compute, lambda: _produce_rows(c, s, walk, tuple(rows)))

    k, v = sources_of(c, call)
    like = jax.ShapeDtypeStruct(k.shape, k.dtype)
    kernel = _launch(c, call, key_gradients, (like, like), scratch, (c.slots // c.keys, q.shape[0]))
    visits = tiling.row_visits(edges, ROWS, c.keys, c.slots)
    return kernel(q, d_out, stats, edges, visits, k, v)


def _produce_rows(c: AttentionConfig, s: SharedMemory, walk: KeyTiles, inputs: tuple[Ref, ...]) -> None:
    """Loads the tiles of rows that a program visits: queries, two numbers and ranges of each row, then cotangents."""
    pair, (q, d_out, stats, edges) = jax.lax.axis_index("pair"), inputs

    def load(i: Value, _: None) -> None:
        slot = jax.lax.rem(i, jnp.int32(c.stages))
        rows = pl.ds(walk.index(i) * ROWS, ROWS)
        # Wait until the tile of `stages` steps ago has been read. In the first round nothing is overwritten.
        pl.when(i >= c.stages)(lambda: plgpu.barrier_wait(s.k_free.at[slot]))
        plgpu.copy_gmem_to_smem(q.at[pair, rows], s.q.at[slot], s.q_full.at[slot])
        plgpu.copy_gmem_to_smem(stats.at[pair, :, rows], s.stats.at[slot], s.q_full.at[slot])
        plgpu.copy_gmem_to_smem(edges.at[walk.batch, :, rows], s.edges.at[slot], s.q_full.at[slot])
        plgpu.copy_gmem_to_smem(d_out.at[pair, rows], s.d_out.at[slot], s.d_out_full.at[slot])

    jax.lax.fori_loop(0, walk.steps, load, None)
    for slot in range(c.stages):  # a program may end only when every arrival at a barrier has been waited for
        pl.when(slot < walk.steps)(functools.partial(plgpu.barrier_wait, s.k_free.at[slot]))


def _compute_keys(
    c: AttentionConfig,
    s: SharedMemory,
    walk: KeyTiles,
    inputs: tuple[Ref, Ref],
    outputs: tuple[Ref, Ref],
    worker: Value,
) -> None:
    """All steps of one computing warpgroup of dk and dv, and the store of its 64 keys."""
    begin = (jax.lax.axis_index("tile") * c.workers + worker) * ROWS
    at = (walk.batch, pl.ds(begin, ROWS), walk.group)
    for source, to in zip(inputs, (s.k, s.v), strict=True):
        plgpu.copy_gmem_to_smem(source.at[at], to.at[worker], s.k_full.at[worker])
    plgpu.barrier_wait(s.k_full.at[worker])

    def step(i: Value, sums: tuple[Value, Value]) -> tuple[Value, Value]:
        dk, dv = sums
        slot = jax.lax.rem(i, jnp.int32(c.stages))
        # 1. Scores and weights, transposed: [64 keys, 64 rows].
        plgpu.barrier_wait(s.q_full.at[slot])
        scores = product(c, s.k.at[worker], s.q.at[slot])
        mask = functools.partial(_mask, s.edges.at[slot], begin, 0)
        number = lambda n: _across_rows(plgpu.layout_cast(s.stats[slot, n], PER_COLUMN), scores)
        weights, slope = _weights(c, scores, lambda: number(0), is_unmasked(c, walk, i), mask)
        plgpu.barrier_wait(s.d_out_full.at[slot])
        p = weights.astype(s.q.dtype)
        if slope is not None:  # an array more: registers suffice if `p` is not needed any more after this
            (dv,) = _add_products(c, [(dv, p, s.d_out.at[slot])])
            weights = weights * slope
        # 2. Their gradient ds' [64 keys, 64 rows].
        d_weights = product(c, s.v.at[worker], s.d_out.at[slot])
        ds = (weights * (d_weights - number(1))).astype(s.q.dtype)
        # 3. dv [64, K] += p' do and dk [64, K] += ds' q, over the 64 rows.
        if slope is None:
            dk, dv = _add_products(c, [(dk, ds, s.q.at[slot]), (dv, p, s.d_out.at[slot])])
        else:
            (dk,) = _add_products(c, [(dk, ds, s.q.at[slot])])
        plgpu.barrier_arrive(s.k_free.at[slot])
        return dk, dv

    zeros = full(0.0, (ROWS, outputs[0].shape[-1]))
    dk, dv = jax.lax.fori_loop(0, walk.steps, step, (zeros, zeros))
    # This warpgroup alone reads these keys and values, and it does not read them any more.
    _store(dk * c.scale, s.k.at[worker], outputs[0].at[at])
    _store(dv, s.v.at[worker], outputs[1].at[at])


# --- of both kernels


def _weights(
    c: AttentionConfig,
    scores: Value,
    lse: Callable[[], Value],
    unmasked: Value,
    mask: Callable[[Value], Value],
) -> tuple[Value, Value | None]:
    """(weights, derivative of the softcap or None): exp2 of the scores minus the log-sum-exp, 0 where masked."""
    scores, unit = scaled_scores(c, scores)
    scores = jax.lax.cond(unmasked, lambda x: x, mask, scores)
    return jnp.exp2(scores * unit - lse()), None if c.softcap is None else 1.0 - scores * scores


def _mask(edges: Ref, begin: Value, key_axis: int, scores: Value) -> Value:
    """Masks scores of keys that a row does not attend to.

    Args:
        edges: Ranges of the rows in shared memory [2 R, rows].

    Returns:
        The scores, `MASKED` where masked.
    """
    key = begin + plgpu.broadcasted_iota(jnp.int32, scores.shape, key_axis, layout=WGMMA)
    edge = [plgpu.layout_cast(edges[e], WGMMA.reduce(key_axis)) for e in range(edges.shape[0])]
    edge = [jax.lax.broadcast_in_dim(x, scores.shape, [1 - key_axis]) for x in edge]
    mask = [(key >= start) & (key < end) for start, end in zip(edge[::2], edge[1::2], strict=True)]
    return jnp.where(functools.reduce(jnp.logical_or, mask), scores, MASKED)


def _across_rows(x: Value, like: Value) -> Value:
    """Broadcasts one number per column to the rows of another array."""
    return jax.lax.broadcast_in_dim(x, like.shape, [1])


def _add_products(c: AttentionConfig, terms: list[tuple[Value, Value, Ref]]) -> list[Value]:
    """sum + left right for each (sum, left, right); left is in registers, and the sums are updated in place."""
    if c.interpreted:  # the interpreter has no wgmma with an operand in registers
        return [x + jnp.dot(a, b[...], preferred_element_type=jnp.float32) for x, a, b in terms]

    def add(accs: Any) -> None:
        for acc, (_, left, right) in zip(accs, terms, strict=True):
            plgpu.wgmma(acc, left, right)

    return pl.run_state(add)([plgpu.WGMMAAccumulatorRef.init(x) for x, _, _ in terms])


def _store(x: Value, staging: Ref, to: Ref) -> None:
    """Writes 16-bit numbers to memory in whole lines, through shared memory."""
    staging[...] = x.astype(staging.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, to)
    plgpu.wait_smem_to_gmem(0)
