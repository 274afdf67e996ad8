"""The grouped product on Hopper (sm_90a): Mosaic GPU, wgmma with its operands swapped.

wgmma multiplies 64 rows of its first operand with as few as 8 columns of the second. An expert's matrix has thousands
of outputs and about 16 tokens, so the matrix is the first operand and the tokens are the second, y^T = w^T x^T, and
no tile has to be padded to 64 tokens. A program waits mostly for the matrix, which streams through shared memory once
per tile of tokens; tiles of one expert run side by side, so that the second reads what the first has brought into the
cache.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mercury_jax.types import Device

DEPTH = 64  # inputs of a step: 128 bytes of bf16, one swizzled line
STAGES = 4  # loads in flight


class GroupedConfig(NamedTuple):
    """What a program is compiled for."""

    tile: int  # rows of x
    block: int  # outputs of one program
    blocks: int  # programs per tile
    transposed: bool  # matrices are [out, in]: the gradient of rows
    quantised: bool  # matrices have 8 bits, and are widened in shared memory

    @property
    def w_shape(self) -> tuple[int, int]:
        """The part of a matrix that one step reads."""
        return (self.block, DEPTH) if self.transposed else (DEPTH, self.block)


def run(
    x: Float[Array, "M I"],
    w: Array,
    visits: Int[Array, "4 t"],
    rows: int,
    tile: int,
    transposed: bool,
    dtype: DTypeLike,
    device: Device | None = None,
) -> Float[Array, "rows O"]:
    """The rows of every visit times its expert's matrix.

    Args:
        x: Rows; M is a multiple of 8.
        w: Matrices [E, I, O], or [E, O, I] if `transposed`; 8-bit ones without their scales.
        visits: The expert, the first of `tile` rows to read, and the rows [low, high) to write; none if low >= high.
            The first row is a multiple of 8 and first + tile <= M; the rows to write are among those read and below
            `rows`.
        rows: Rows of the result.
        tile: A multiple of 8.
        transposed: See w.
        dtype: Of the result.
        device: To compile for.

    Returns:
        [rows, O]; rows that no visit writes hold anything.
    """
    outputs = w.shape[1] if transposed else w.shape[2]
    block = next(n for n in (128, 64) if outputs % n == 0)  # `refuses` checked that 64 divides the outputs
    c = GroupedConfig(tile, block, outputs // block, transposed, w.dtype.itemsize == 1)

    def grouped(*refs: Any) -> None:  # the kernel's name in a profile
        _program(c, *refs)

    call = plgpu.kernel(
        grouped,
        out_type=jax.ShapeDtypeStruct((rows, outputs), dtype),
        grid=(visits.shape[1] * c.blocks,),
        grid_names=("program",),
        interpret=None if device is None else device.interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return call(visits, x, w)


def _swizzled(shape: tuple[int, ...], dtype: DTypeLike) -> tuple[Any, ...]:
    """The layout of shared memory that wgmma reads without bank conflicts: swizzled lines of at most 128 bytes."""
    itemsize = jnp.dtype(dtype).itemsize
    line = min(shape[-1], 128 // itemsize)
    return plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(line * itemsize)


def _program(c: GroupedConfig, visits: Any, x: Any, w: Any, out: Any) -> None:
    """One block of outputs of one visit; adjacent programs share a visit, so that they read whole rows of w."""
    program = jax.lax.axis_index("program")
    visit, n = jax.lax.div(program, jnp.int32(c.blocks)), jax.lax.rem(program, jnp.int32(c.blocks))
    expert, start, low, high = (visits[i, visit] for i in range(4))

    @pl.when(low < high)
    def _() -> None:
        multiply = functools.partial(_multiply, c, n, w.at[expert], x.at[pl.ds(start, c.tile)])
        if c.quantised:  # two buffers for widened parts: one is filled while wgmma reads the other
            buffer = plgpu.SMEM((2, *c.w_shape), x.dtype, transforms=_swizzled(c.w_shape, x.dtype))
            y = pl.run_scoped(multiply, buffer)
        else:
            y = multiply()
        store = functools.partial(_store, y, out, n * c.block, start, low, high)
        # Lines are 8 numbers longer than a block: otherwise all threads of a column would write to the same banks.
        pl.run_scoped(store, plgpu.SMEM((c.tile, c.block + 8), out.dtype))


def _multiply(c: GroupedConfig, n: Any, w: Any, x: Any, widened: Any = None) -> Any:
    """[block, tile] = block n of the outputs of w^T times x^T, with inputs streamed in steps of DEPTH."""

    def step(acc: Any, at: Any, w_s: Any, x_s: Any) -> None:
        """acc [block, tile] += w_s^T x_s^T over DEPTH inputs; w_s is [DEPTH, block], x_s is [tile, DEPTH]."""
        if widened is not None:  # 1. 8-bit numbers become 16-bit ones in shared memory, which wgmma reads
            slot = widened.at[jax.lax.rem(at[0], jnp.int32(2))]
            # In the first layout each thread reads 8 bits where it will hold 16; the second writes wgmma's tiles.
            values = plgpu.layout_cast(w_s[...], plgpu.Layout.WGMMA_UPCAST_2X)
            if values.dtype != jnp.int8:  # Hopper converts fp8 to fp16 only: bf16 needs a step in between
                values = values.astype(jnp.float32)
            slot[...] = plgpu.layout_cast(values.astype(slot.dtype), plgpu.Layout.WGMMA)
            plgpu.commit_smem()
            w_s = slot
        # 2. The product is asynchronous: wait until the one of the step before is complete.
        plgpu.wgmma(acc, w_s if c.transposed else w_s.transpose((1, 0)), x_s.transpose((1, 0)))
        plgpu.wgmma_wait(1)
        plgpu.commit_smem()  # all warps are past the step before this one: what it read may be overwritten

    # The pipeline copies blocks of w and x STAGES steps ahead. It reuses a buffer one step late (delay_release),
    # because the product that reads it is still running when its step ends.
    blocks = (
        (c.w_shape, lambda k: (n, k) if c.transposed else (k, n), w),
        ((c.tile, DEPTH), lambda k: (0, k), x),
    )
    streams = [
        plgpu.BlockSpec(shape, index, transforms=_swizzled(shape, source.dtype), delay_release=1)
        for shape, index, source in blocks
    ]

    def all_steps(acc: Any) -> Any:
        body, steps = functools.partial(step, acc), (x.shape[1] // DEPTH,)
        plgpu.emit_pipeline(body, grid=steps, in_specs=streams, max_concurrent_steps=STAGES)(w, x)
        return acc[...]  # waits for the last product

    return pl.run_scoped(all_steps, plgpu.WGMMAAccumulatorRef((c.block, c.tile)))


def _store(y: Any, out: Any, column: Any, start: Any, low: Any, high: Any, rows: Any) -> None:
    """Transposes y through shared memory, then copies the rows that this visit writes, one by one."""
    transposed = plgpu.layout_cast(y.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    rows = rows.at[:, pl.ds(0, y.shape[0])]
    rows.transpose((1, 0))[...] = transposed
    plgpu.commit_smem()

    def copy_row(row: Any, _: None) -> None:
        plgpu.copy_smem_to_gmem(rows.at[row - start], out.at[row, pl.ds(column, y.shape[0])])

    jax.lax.fori_loop(low, high, copy_row, None)
    plgpu.wait_smem_to_gmem(0)
