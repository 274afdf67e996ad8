"""The grouped product on Hopper (sm_90a): Mosaic GPU, wgmma with its operands swapped.

wgmma multiplies 64 rows of its first operand and may have as few as 8 columns in the second. Of an expert's
matrix there are thousands of outputs and of its tokens about 16: so the matrix is the first operand and the tokens
are the second, y^T = w^T x^T, and no tile is filled up to 64 tokens. What a program waits for is the matrix: it
streams through shared memory once a tile of tokens, and tiles of one expert run side by side, so that the second
reads what the first has brought into the cache.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.types import Device

DEPTH = 64  # of a step: 128 bytes of bf16, one swizzled line
STAGES = 4  # loads in flight


class Shape(NamedTuple):
    """What is fixed for all programs."""

    tile: int  # rows
    block: int  # outputs
    blocks: int
    turned: bool  # matrices are [out, in]: the gradient of rows
    small: bool  # matrices are of 8 bits, and made wide in shared memory


def block_of(outputs: int) -> int | None:
    """Outputs that one program makes, of as many as a matrix has."""
    return next((n for n in (128, 64) if outputs % n == 0), None)


def run(
    x: Float[Array, "M I"],
    w: Array,
    visits: Int[Array, "4 t"],
    rows: int,
    tile: int,
    turned: bool,
    dtype: Any,
    device: Device | None = None,
) -> Float[Array, "rows O"]:
    """Every visit's rows times its expert's matrix: w [E, I, O], or [E, O, I] where `turned`; 8 bits as they are.

    visits: the expert, the first of `tile` rows to read, and the rows [low, high) to write; none where low >= high.
    The first is a multiple of 8, as are `tile` and M, and first + tile <= M; the rows to write are among those read
    and below `rows`. Rows that no visit writes are left as they were found.
    """
    outputs = w.shape[1] if turned else w.shape[2]
    block = block_of(outputs)
    assert block is not None
    s = Shape(tile, block, outputs // block, turned, w.dtype.itemsize == 1)

    def grouped(*refs: Any) -> None:  # whose name the kernel has in a compiler's reports
        _program(s, *refs)

    call = plgpu.kernel(
        grouped,
        out_type=jax.ShapeDtypeStruct((rows, outputs), dtype),
        grid=(visits.shape[1] * s.blocks,),
        grid_names=("program",),
        interpret=None if device is None else device.interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return call(visits, x, w)


def _lines(shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    """The layout of shared memory that wgmma reads without conflicts: lines of at most 128 bytes, swizzled."""
    size = jnp.dtype(dtype).itemsize
    line = min(shape[-1], 128 // size)
    return plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(line * size)


def _program(s: Shape, visits: Any, x: Any, w: Any, out: Any) -> None:
    """One block of outputs of one visit; neighbours share the visit, so that they read whole rows of w."""
    program = jax.lax.axis_index("program")
    visit, n = jax.lax.div(program, jnp.int32(s.blocks)), jax.lax.rem(program, jnp.int32(s.blocks))
    expert, start, low, high = (visits[i, visit] for i in range(4))

    @pl.when(low < high)
    def _() -> None:
        multiply = functools.partial(_multiply, s, n, w.at[expert], x.at[pl.ds(start, s.tile)])
        y = multiply() if not s.small else pl.run_scoped(multiply, _wide(s, x.dtype))
        store = functools.partial(_store, y, out, n * s.block, start, low, high)
        # Lines a little longer than a block: else all threads of a column would write into the same banks.
        pl.run_scoped(store, plgpu.SMEM((s.tile, s.block + 8), out.dtype))


def _part(s: Shape) -> tuple[int, int]:
    """Of a matrix, in one step."""
    return (s.block, DEPTH) if s.turned else (DEPTH, s.block)


def _wide(s: Shape, dtype: Any) -> Any:
    """Room for an 8-bit part in the tokens' dtype: one to fill while wgmma reads the other."""
    return plgpu.SMEM((2, *_part(s)), dtype, transforms=_lines(_part(s), dtype))


def _multiply(s: Shape, n: Any, w: Any, x: Any, wide: Any = None) -> Any:
    """[block, tile] = the n-th block of outputs of w^T times x^T, its inputs streamed in steps of DEPTH."""

    def step(acc: Any, at: Any, w_s: Any, x_s: Any) -> None:
        if wide is not None:
            slot = wide.at[jax.lax.rem(at[0], jnp.int32(2))]
            # In this layout each thread reads 8 bits where it will have 16; in the next wgmma's tiles are written.
            few = plgpu.layout_cast(w_s[...], plgpu.Layout.WGMMA_UPCAST_2X)
            if few.dtype != jnp.int8:  # Hopper widens fp8 to fp16 alone: to bf16 it takes a step between
                few = few.astype(jnp.float32)
            slot[...] = plgpu.layout_cast(few.astype(slot.dtype), plgpu.Layout.WGMMA)
            plgpu.commit_smem()
            w_s = slot
        plgpu.wgmma(acc, w_s if s.turned else w_s.transpose((1, 0)), x_s.transpose((1, 0)))
        plgpu.wgmma_wait(1)
        plgpu.commit_smem()  # all warps are past the step before this one: what it read may be written over

    def stream(shape: tuple[int, int], index: Any, dtype: Any) -> Any:
        return plgpu.BlockSpec(shape, index, transforms=_lines(shape, dtype), delay_release=1)

    streams = [
        stream(_part(s), lambda k: (n, k) if s.turned else (k, n), w.dtype),
        stream((s.tile, DEPTH), lambda k: (0, k), x.dtype),
    ]
    steps = (x.shape[1] // DEPTH,)

    def all_steps(acc: Any) -> Any:
        body = functools.partial(step, acc)
        plgpu.emit_pipeline(body, grid=steps, in_specs=streams, max_concurrent_steps=STAGES)(w, x)
        return acc[...]

    return pl.run_scoped(all_steps, plgpu.WGMMAAccumulatorRef((s.block, s.tile)))


def _store(y: Any, out: Any, column: Any, start: Any, low: Any, high: Any, rows: Any) -> None:
    """Transposed through shared memory; then those rows that are this visit's, one copy each."""
    turned = plgpu.layout_cast(y.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    rows = rows.at[:, pl.ds(0, y.shape[0])]
    rows.transpose((1, 0))[...] = turned
    plgpu.commit_smem()

    def one(row: Any, _: None) -> None:
        plgpu.copy_smem_to_gmem(rows.at[row - start], out.at[row, pl.ds(column, y.shape[0])])

    jax.lax.fori_loop(low, high, one, None)
    plgpu.wait_smem_to_gmem(0)
