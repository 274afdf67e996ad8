"""The grouped product on Hopper (sm_90a): Mosaic GPU, wgmma with its operands swapped.

wgmma multiplies 64 rows of its first operand with as few as 8 columns of the second. An expert's matrix has thousands
of outputs and about 16 tokens, so the matrix is the first operand and the tokens are the second, y^T = w^T x^T, and
no tile has to be padded to 64 tokens. A program waits mostly for the matrix, which streams through shared memory once
per tile of tokens. The scales of 8-bit matrices and the gate of a gated feed-forward are applied to the sums while
they are in registers, so that nothing but the result is written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mercury_jax.kernels.grouped_matmul import PROCESSORS
from mercury_jax.kernels.hopper import registers
from mercury_jax.kernels.tracing import traced_once
from mercury_jax.types import Device

DEPTH = 64  # inputs of a step: 128 bytes of bf16, one swizzled line
STAGES = 4  # loads in flight, if two or more programs share a processor
MOST_STAGES = 8  # for a program that has a processor to itself
SMEM_BYTES = 220 * 1024  # shared memory of a program, without barriers and alignment
ALIGN = 8  # TMA addresses the rows of x in groups of 8, so every load starts at a multiple of 8
PER_OUTPUT = plgpu.Layout.WGMMA.reduce(1)  # the layout of one number for each output of a block

Ref = Any  # a reference to global or shared memory inside a kernel
Value = Any  # an array or index in registers


class GroupedConfig(NamedTuple):
    """What a program is compiled for."""

    tile: int  # rows of x
    lanes: int  # programs that share the tiles of an expert
    block: int  # outputs of one program, of each of its matrices
    stages: int  # loads in flight
    blocks: int  # programs that share the outputs of a tile
    shift: int  # blocks before the first one of the up projection
    transposed: bool  # matrices are [out, in]: the gradient of rows
    quantised: bool  # matrices have 8 bits, and are widened in shared memory
    act: Callable[[Array], Array] | None  # activation of the gate; None: one matrix and no gate
    interpreted: bool

    @property
    def w_shape(self) -> tuple[int, int]:
        """The part of a matrix that one step reads."""
        return (self.block, DEPTH) if self.transposed else (DEPTH, self.block)

    @property
    def matrices(self) -> int:
        """Matrices that a program multiplies by: the gate and the up projection, or one."""
        return 1 if self.act is None else 2


@traced_once
def run(
    x: Float[Array, "M I"],
    matrices: tuple[Array, ...],
    scales: tuple[Array, ...],
    offsets: Int[Array, "offsets"],
    rows: int,
    tile: int,
    dtype: DTypeLike,
    *,
    transposed: bool = False,
    act: Callable[[Array], Array] | None = None,
    device: Device | None = None,
) -> Float[Array, "rows O"]:
    """Multiplies the rows of every expert by its matrix.

    The first tile of an expert starts at the last multiple of 8 that is not after the expert's first row: TMA
    addresses x [M, I] as [M / 8, I / 64, 8, 64], and a load that starts inside a group of 8 rows would reach past the
    end of the group's axis and get zeros there. A tile also multiplies the rows of other experts that it reads, but
    does not write their results; this is correct because each row of the result depends only on the same row of x.
    The alternative, padding the rows of every expert to a multiple of 8, would copy all rows twice.

    Args:
        x: Rows; M is a multiple of 8 and at least `tile`.
        matrices: [E, I, O], or [E, O, I] if `transposed`: one; with `act` two, gate and up, of the same shape. The two
            may be one array [E, I, 2 O], given once: the gate is its first half.
        scales: fp32 [E, O] of each matrix, or () for matrices that are not quantised.
        offsets: The rows of expert e are offsets[e] .. offsets[e + 1] - 1; at most `rows` in all. Numbers after the
            first E + 1 are not read.
        rows: Rows of the result.
        tile: Rows of a tile, a multiple of 8.
        dtype: Of the result.
        transposed: See `matrices`.
        act: The result is act(x gate) * (x up) instead of x w.
        device: To compile for.

    Returns:
        [rows, O]; rows of no expert hold anything.
    """
    c = _config(x, matrices, rows, tile, dtype, transposed, act, device)
    experts, outputs = matrices[0].shape[0], c.block * c.blocks

    def grouped(*refs: Ref) -> None:  # the kernel's name in a profile
        _program(c, *refs)

    call = plgpu.kernel(
        grouped,
        out_type=jax.ShapeDtypeStruct((rows, outputs), dtype),
        grid=(experts * c.lanes * c.blocks,),
        grid_names=("program",),
        interpret=None if device is None else device.interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return call(offsets, x, *matrices, *scales)


def _config(
    x: Array, matrices: tuple[Array, ...], rows: int, tile: int, dtype: DTypeLike, transposed: bool,
    act: Callable[[Array], Array] | None, device: Device | None,
) -> GroupedConfig:  # fmt: skip
    """Chooses the blocks of outputs and the stages of a call."""
    w, joined = matrices[0], act is not None and len(matrices) == 1
    outputs = w.shape[1 if transposed else 2] // (2 if joined else 1)
    streams, itemsize, quantised = 1 if act is None else 2, w.dtype.itemsize, w.dtype.itemsize == 1
    lanes = -(-rows // (w.shape[0] * tile))  # so that a product with one matrix has its tiles side by side
    # `refuses` checked that 64 divides the outputs. Two sums of 64 outputs take as many registers as one of 128, and
    # few programs leave processors without work.
    few = w.shape[0] * lanes * (outputs // 128) < PROCESSORS
    block = 64 if act is not None or outputs % 128 or few else 128
    part = DEPTH * block * streams  # numbers of the matrices in a step
    free = SMEM_BYTES - tile * (block + 8) * jnp.dtype(dtype).itemsize - (4 * part if quantised else 0)
    room = free // (part * itemsize + 2 * DEPTH * tile)
    alone = w.shape[0] * lanes * (outputs // block) < 2 * PROCESSORS
    stages = min(MOST_STAGES if alone else STAGES, room, x.shape[1] // DEPTH + 1)
    interpreted = device is not None and device.interpret is not None
    blocks = outputs // block
    shift = blocks if joined else 0
    return GroupedConfig(tile, lanes, block, stages, blocks, shift, transposed, quantised, act, interpreted)


def _swizzled(shape: tuple[int, ...], dtype: DTypeLike) -> tuple[Any, ...]:
    """The layout of shared memory that wgmma reads without bank conflicts: swizzled lines of at most 128 bytes."""
    itemsize = jnp.dtype(dtype).itemsize
    line = min(shape[-1], 128 // itemsize)
    return plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(line * itemsize)


def _program(c: GroupedConfig, offsets: Ref, x: Ref, *refs: Ref) -> None:
    """One block of outputs of every `lanes`-th tile of an expert; adjacent programs read the same rows of w."""
    *operands, out = refs
    given = 1 if c.shift else c.matrices  # gate and up may be halves of one array
    matrices, scales = (part * (c.matrices // given) for part in (operands[:given], operands[given:]))
    program = jax.lax.axis_index("program")
    n, lane = jax.lax.rem(program, jnp.int32(c.blocks)), jax.lax.div(program, jnp.int32(c.blocks))
    expert, lane = jax.lax.div(lane, jnp.int32(c.lanes)), jax.lax.rem(lane, jnp.int32(c.lanes))
    start, end = offsets[expert], offsets[expert + 1]
    base = start - jax.lax.rem(start, jnp.int32(ALIGN))
    tiles = jnp.where(end > start, jax.lax.div(end - base + (c.tile - 1), jnp.int32(c.tile)), 0)
    multiply = functools.partial(_multiply, c, n, [w.at[expert] for w in matrices])
    scales = [scale.at[expert] for scale in scales]

    def each_tile(i: Value, _: None, buffers: Any, staging: Ref) -> None:
        first = base + i * c.tile
        low, high = jnp.maximum(first, start), jnp.minimum(first + c.tile, end)
        first = jnp.minimum(first, x.shape[0] - c.tile)  # no load reaches past the last row
        sums = multiply(x.at[pl.ds(first, c.tile)], buffers)
        y = _epilogue(c, n, sums, scales)
        _store(y, out, n * c.block, first, low, high, staging)

    def all_tiles(staging: Ref, buffers: Any = None) -> None:
        body = functools.partial(each_tile, buffers=buffers, staging=staging)
        count = jax.lax.div(tiles - lane + (c.lanes - 1), jnp.int32(c.lanes))
        jax.lax.fori_loop(0, count, lambda i, none: body(lane + i * c.lanes, none), None)

    # Lines are 8 numbers longer than a block: otherwise all threads of a column would write to the same banks.
    scratch = [plgpu.SMEM((c.tile, c.block + 8), out.dtype)]
    if c.quantised:  # two buffers for widened parts: one is filled while wgmma reads the other
        shape = (2, c.matrices, *c.w_shape)
        scratch.append(plgpu.SMEM(shape, x.dtype, transforms=_swizzled(shape, x.dtype)))
    pl.run_scoped(all_tiles, *scratch)


def _multiply(c: GroupedConfig, n: Value, matrices: list[Ref], x: Ref, widened: Ref) -> list[Value]:
    """[block, tile] = block n of the outputs of each w^T times x^T, with inputs streamed in steps of DEPTH."""

    def step(accs: tuple[Any, ...], at: Any, *streams: Ref) -> None:
        """Each acc [block, tile] += w_s^T x_s^T over DEPTH inputs; w_s is [DEPTH, block], x_s is [tile, DEPTH]."""
        *parts, x_s = streams
        for i, (acc, w_s) in enumerate(zip(accs, parts, strict=True)):
            if widened is not None:  # 1. 8-bit numbers become 16-bit ones in shared memory, which wgmma reads
                slot = widened.at[jax.lax.rem(at[0], jnp.int32(2)), i]
                # In the first layout each thread reads 8 bits where it will hold 16; the second writes wgmma's tiles.
                values = plgpu.layout_cast(w_s[...], plgpu.Layout.WGMMA_UPCAST_2X)
                if values.dtype != jnp.int8:  # Hopper converts fp8 to fp16 only: bf16 needs a step in between
                    values = values.astype(jnp.float32)
                slot[...] = plgpu.layout_cast(values.astype(slot.dtype), plgpu.Layout.WGMMA)
                plgpu.commit_smem()
                w_s = slot
            # 2. The product is asynchronous.
            plgpu.wgmma(acc, w_s if c.transposed else w_s.transpose((1, 0)), x_s.transpose((1, 0)))
        plgpu.wgmma_wait(len(accs))  # those of the step before are complete
        plgpu.commit_smem()  # all warps are past the step before this one: what it read may be overwritten

    # The pipeline copies blocks of w and x `stages` steps ahead. It reuses a buffer one step late (delay_release),
    # because the product that reads it is still running when its step ends.
    def block_of(i: int) -> Callable[[Value], tuple[Value, Value]]:
        m = n + c.shift * i
        return lambda k: (m, k) if c.transposed else (k, m)

    blocks = [(c.w_shape, block_of(i), w) for i, w in enumerate(matrices)]
    blocks.append(((c.tile, DEPTH), lambda k: (0, k), x))
    streams = [
        plgpu.BlockSpec(shape, index, transforms=_swizzled(shape, source.dtype), delay_release=1)
        for shape, index, source in blocks
    ]

    def all_steps(*accs: Any) -> list[Value]:
        body, steps = functools.partial(step, accs), (x.shape[1] // DEPTH,)
        pipeline = plgpu.emit_pipeline(body, grid=steps, in_specs=streams, max_concurrent_steps=c.stages)
        pipeline(*matrices, x)
        return [acc[...] for acc in accs]  # waits for the last product

    return pl.run_scoped(all_steps, *[plgpu.WGMMAAccumulatorRef((c.block, c.tile))] * c.matrices)


def _epilogue(c: GroupedConfig, n: Value, sums: list[Value], scales: list[Ref]) -> Value:
    """Scales the sums [block, tile], and applies the gate."""
    if scales:
        found = []
        for i, (y, scale) in enumerate(zip(sums, scales, strict=True)):
            own = scale.at[pl.ds((n + c.shift * i) * c.block, c.block)]
            factors = registers.load(own, PER_OUTPUT, c.interpreted)
            found.append(y * jax.lax.broadcast_in_dim(factors, y.shape, (0,)))
        sums = found
    return sums[0] if c.act is None else c.act(sums[0]) * sums[1]


def _store(y: Value, out: Ref, column: Value, start: Value, low: Value, high: Value, rows: Ref) -> None:
    """Transposes y through shared memory, then copies the rows [low, high) of the tile at `start`, one by one."""
    transposed = plgpu.layout_cast(y.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    rows = rows.at[:, pl.ds(0, y.shape[0])]
    rows.transpose((1, 0))[...] = transposed
    plgpu.commit_smem()

    def copy_row(row: Value, _: None) -> None:
        plgpu.copy_smem_to_gmem(rows.at[row - start], out.at[row, pl.ds(column, y.shape[0])])

    jax.lax.fori_loop(low, high, copy_row, None)
    plgpu.wait_smem_to_gmem(0)
