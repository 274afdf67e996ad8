"""The grouped product on Hopper (sm_90a): Mosaic GPU, wgmma with its operands swapped.

wgmma multiplies 64 rows of its first operand with as few as 8 columns of the second. An expert's matrix has thousands
of outputs and about 16 tokens, so the matrix is the first operand and the tokens are the second, y^T = w^T x^T, and
no tile has to be padded to 64 tokens. The time is that of reading the matrices, so nothing may interrupt it: each
processor runs one program for the whole call, in which one warpgroup only loads, some steps ahead of the ones that
multiply, and goes on into the next piece of work while the last results are stored. 8-bit matrices become 16-bit ones
in the registers from which wgmma reads them, unless the rows have 8 bits too. Scales and the gate are applied to the
sums before they are stored.
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
from jaxtyping import Array, Float

from mercury_jax.ops import registers, tuned
from mercury_jax.ops.experts.grouped_matmul import BLOCK, PROCESSORS, Operands, Product, product_of
from mercury_jax.ops.operation import traced_once
from mercury_jax.ops.tuned import GroupedKnobs
from mercury_jax.types import Device

ALIGN = 8  # TMA addresses the rows of x in groups of 8, so every load starts at a multiple of 8
SMEM_BYTES = 220 * 1024  # shared memory of a program, without barriers and alignment
# steps that the loads are ahead: 39 KB in flight hide the latency of a processor's share of HBM
MOST_STAGES = 8
PER_OUTPUT = plgpu.Layout.WGMMA.reduce(1)  # the layout of one number for each output of a block
PER_ROW = plgpu.Layout.WGMMA.reduce(0)

Ref = Any  # a reference to global or shared memory inside a kernel
Value = Any  # an array or index in registers


class GroupedConfig(NamedTuple):
    """What a program is compiled for."""

    tile: int  # the fields of `GroupedKnobs`
    workers: int
    depth: int
    stages: int
    blocks: int  # pieces of work of a tile, each with other outputs
    programs: int
    transposed: bool  # matrices are [out, in]
    act: Callable[[Array], Array] | None  # activation of the gate; None: one matrix and no gate
    sums: Any  # dtype of the sums: int32 of int8 rows
    interpreted: bool

    @property
    def part(self) -> tuple[int, int]:
        """The part of a matrix that one warpgroup reads in a step."""
        return (BLOCK, self.depth) if self.transposed else (self.depth, BLOCK)


class Scratch(NamedTuple):
    """Shared memory and barriers of a program."""

    x: Ref  # rows of each stage [stages, tile, depth]
    w: Ref  # parts of matrices of each stage, one for each worker
    out: Ref  # results of each worker [tile, outputs]
    full: Ref  # a stage is loaded
    free: Ref  # a stage is not read any more
    up: Ref = None  # sums of the up projection, for the worker of the gate
    given: Ref = None  # they are written
    read: Ref = None  # they are not read any more
    widened: Ref = None  # 16-bit parts of each worker, for the interpreter


class ProductRefs(NamedTuple):
    """What one product of a launch reads and writes, as references."""

    c: GroupedConfig
    given: Any  # Operands
    out: Ref
    column: int  # of `out` at which its first output is stored


class Work(NamedTuple):
    """One tile of rows of an expert, and one block of its outputs."""

    expert: Value
    block: Value
    first: Value  # row at which the tile is loaded
    low: Value  # rows low .. high - 1 are the expert's
    high: Value


@traced_once
def run(
    products: tuple[Operands, ...],
    rows: tuple[int, ...],
    knobs: tuple[GroupedKnobs, ...],
    dtype: DTypeLike,
    *,
    transposed: bool = False,
    act: Callable[[Array], Array] | None = None,
    joined: bool = False,
    device: Device | None = None,
) -> list[Float[Array, "rows O"]]:
    """Multiplies the rows of every expert by its matrix, in one launch for several products.

    Products after the first cost no launch of their own, and their work fills the processors that the ones before
    leave idle at their end.

    The first tile of an expert starts at the last multiple of 8 that is not after the expert's first row: TMA
    addresses x [M, I] as [M / 8, I / 64, 8, 64], and a load that starts inside a group of 8 rows would reach past the
    end of the group's axis and get zeros there. A tile also multiplies the rows of other experts that it reads, but
    does not write their results; this is correct because each row of the result depends only on the same row of x.
    The alternative, padding the rows of every expert to a multiple of 8, would copy all rows twice.

    Args:
        knobs: Choices of each product, which fit (`unfit`); all have the same workers and depth.
    """
    how: Any = dtype, transposed, act
    described = [product_of(o.x, o.matrices, *how) for o in products]
    blocks = [
        p.outputs // BLOCK // (1 if p.gated else k.workers) for p, k in zip(described, knobs, strict=True)
    ]
    pieces = [
        (n // k.tile + p.experts) * b for p, k, b, n in zip(described, knobs, blocks, rows, strict=True)
    ]
    stages = min(k.stages for k in knobs)
    sums = jnp.int32 if products[0].x.dtype == jnp.int8 else jnp.float32
    interpreted = device is not None and device.interpret is not None
    rest = min(PROCESSORS, max(pieces)), transposed, act, sums, interpreted
    configs = [
        GroupedConfig(*k._replace(stages=stages), b, *rest) for k, b in zip(knobs, blocks, strict=True)
    ]
    c = max(configs, key=lambda c: c.tile)  # memory is for the largest tile
    widths = [p.outputs for p in described]
    columns = [sum(widths[:i]) * joined for i in range(len(widths))]
    shapes = [(rows[0], sum(widths))] if joined else zip(rows, widths, strict=True)
    inputs, given = jax.tree.flatten(products)

    def grouped(*refs: Ref) -> None:
        operands = jax.tree.unflatten(given, refs[: len(inputs)])
        outs = refs[len(inputs) : -1] * (len(widths) if joined else 1)
        _program(list(map(ProductRefs, configs, operands, outs, columns)), Scratch(**refs[-1]))

    grouped.__name__ = tuned.kernel_name("grouped", knobs[0])
    call = plgpu.kernel(
        grouped,
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes],
        scratch_types=[_scratch(c, products[0].x.dtype, products[0].matrices[0].dtype, dtype)],
        grid=(c.programs,),
        grid_names=("program",),
        num_threads=c.workers + 1,  # the one that loads
        thread_name="warpgroup",
        interpret=None if device is None else device.interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return call(*inputs)


def default_knobs(p: Product, tile: int) -> GroupedKnobs:
    """Chooses what a product leaves open, where nothing was measured."""
    line = 128 // p.w.itemsize
    depth = line if p.inputs % line == 0 else 64
    knobs = GroupedKnobs(tile, 2 if p.gated or p.outputs % (2 * BLOCK) == 0 else 1, depth, MOST_STAGES)
    while knobs.stages > 1 and unfit(p, knobs) is not None:
        knobs = knobs._replace(stages=knobs.stages - 1)
    return knobs


def unfit(p: Product, knobs: GroupedKnobs) -> str | None:
    """Gives the reason why a product cannot have some choices."""
    tile, workers, depth, stages = knobs
    if (p.gated and workers != 2) or (not p.gated and p.outputs % (workers * BLOCK)):
        return f"{workers} warpgroups do not divide {p.outputs} outputs"
    if p.inputs % depth:
        return f"steps of {depth} inputs do not divide {p.inputs}"
    if p.x == jnp.int8 and tile > 32 and tile % 16:
        return f"integer products have no width of {tile}"
    staging = workers * tile * (BLOCK + 8) * jnp.dtype(p.out).itemsize + p.gated * 4 * BLOCK * tile
    need = staging + stages * depth * (workers * BLOCK * p.w.itemsize + tile * p.x.itemsize)
    return None if need <= SMEM_BYTES else f"it needs {need} of {SMEM_BYTES} bytes of shared memory"


def _scratch(c: GroupedConfig, x: DTypeLike, w: DTypeLike, out: DTypeLike) -> dict[str, Any]:
    """The types of `Scratch`."""
    stage = lambda *shape: (c.stages, *shape)
    found = dict(
        x=_swizzled(stage(c.tile, c.depth), x),
        w=_swizzled(stage(c.workers, *c.part), w),
        # Lines are 8 numbers longer than a block: otherwise all threads of a column would write to the same banks.
        out=plgpu.SMEM((c.workers, c.tile, BLOCK + 8), out),
        full=plgpu.Barrier(num_arrivals=c.workers + 1, num_barriers=c.stages),
        free=plgpu.Barrier(num_arrivals=c.workers, num_barriers=c.stages),
    )
    if c.act is not None:
        found |= dict(up=_swizzled((BLOCK, c.tile), jnp.float32), given=plgpu.Barrier(), read=plgpu.Barrier())
    if c.interpreted and w != x:
        found |= dict(widened=_swizzled((c.workers, *c.part), x))
    return found


def _swizzled(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Shared memory that wgmma reads without bank conflicts: swizzled lines of at most 128 bytes."""
    itemsize = jnp.dtype(dtype).itemsize
    line = 128 // itemsize
    while shape[-1] % line:
        line //= 2
    transforms = plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(line * itemsize)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


# --- the program


def _program(parts: list[ProductRefs], s: Scratch) -> None:
    """One program of the grid: its warpgroups go through the same pieces of work."""
    worker, c = jax.lax.axis_index("warpgroup"), parts[0].c

    def each(body: Callable[..., Value]) -> Value:
        carry = jnp.int32(0), jnp.int32(0)
        for part in parts:
            carry = _each_work(part, functools.partial(body, part), carry)
        return carry[1]

    @pl.when(worker == c.workers)
    def _() -> None:
        if c.workers == 2:  # the others take registers that this one releases
            plgpu.set_max_registers(40, action="decrease")
        loaded = each(functools.partial(_load, s))
        for slot in range(c.stages):  # nothing may be in flight at the end
            pl.when(slot < loaded)(functools.partial(plgpu.barrier_wait, s.free.at[slot]))

    @pl.when(worker < c.workers)
    def _() -> None:
        if c.workers == 2:
            plgpu.set_max_registers(232, action="increase")
        if c.act is not None:
            pl.when(worker == 0)(lambda: plgpu.barrier_arrive(s.read))
        each(functools.partial(_compute, s, worker))
        plgpu.wait_smem_to_gmem(0)
        if c.act is not None:
            pl.when(worker == 1)(lambda: plgpu.barrier_wait(s.read))


def _each_work(
    part: ProductRefs, body: Callable[[Work, Value], Value], carry: tuple[Value, Value]
) -> tuple[Value, Value]:
    """Calls `body` with each piece of work of this program, and with the number of steps before it, which it adds to.

    The pieces of all experts are numbered by expert, tile and block, and dealt to the programs in turn: the blocks of
    a tile run at the same time, so that its rows are read from HBM once.

    Returns:
        `carry` with the pieces and steps of this product.
    """
    program, i32 = jax.lax.axis_index("program"), jnp.int32
    c, offsets, rows = part.c, part.given.offsets, part.given.x.shape[0]

    def of_expert(e: Value, carry: tuple[Value, Value]) -> tuple[Value, Value]:
        before, step = carry
        start, end = offsets[e], offsets[e + 1]
        base = start - jax.lax.rem(start, i32(ALIGN))
        tiles = jnp.where(end > start, jax.lax.div(end - base + (c.tile - 1), i32(c.tile)), 0)
        mine = jax.lax.rem(program - jax.lax.rem(before, i32(c.programs)) + c.programs, i32(c.programs))
        count = jax.lax.div(tiles * c.blocks - mine + (c.programs - 1), i32(c.programs))

        def piece(i: Value, step: Value) -> Value:
            index = mine + i * c.programs
            at = base + jax.lax.div(index, i32(c.blocks)) * c.tile
            block = jax.lax.rem(index, i32(c.blocks))
            first = pl.multiple_of(jnp.minimum(at, rows - c.tile), ALIGN)  # no load reaches past the last row
            return body(Work(e, block, first, jnp.maximum(at, start), jnp.minimum(at + c.tile, end)), step)

        return before + tiles * c.blocks, jax.lax.fori_loop(0, count, piece, step)

    return jax.lax.fori_loop(0, part.given.matrices[0].shape[0], of_expert, carry)


def _column(c: GroupedConfig, matrices: int, worker: int, block: Value) -> tuple[int, Value]:
    """The matrix, and the first of its outputs, that a worker multiplies by."""
    if c.act is None:
        return 0, (block * c.workers + worker) * BLOCK
    return (worker, block * BLOCK) if matrices == 2 else (0, (block + worker * c.blocks) * BLOCK)


def _load(s: Scratch, part: ProductRefs, work: Work, step: Value) -> Value:
    """Copies the rows and the parts of the matrices of all steps, each as soon as its stage is free."""
    c, given = part.c, part.given

    def one(k: Value, step: Value) -> Value:
        slot = jax.lax.rem(step, jnp.int32(c.stages))
        pl.when(step >= c.stages)(lambda: plgpu.barrier_wait(s.free.at[slot]))
        inputs = pl.ds(k * c.depth, c.depth)
        for worker in range(c.workers):
            i, column = _column(c, len(given.matrices), worker, work.block)
            at = (pl.ds(column, BLOCK), inputs) if c.transposed else (inputs, pl.ds(column, BLOCK))
            plgpu.copy_gmem_to_smem(
                given.matrices[i].at[work.expert, *at], s.w.at[slot, worker], s.full.at[slot]
            )
        rows = given.x.at[pl.ds(work.first, c.tile), inputs]
        plgpu.copy_gmem_to_smem(rows, _rows(c, s.x.at[slot]), s.full.at[slot])
        return step + 1

    return jax.lax.fori_loop(0, given.x.shape[1] // c.depth, one, step)


def _rows(c: GroupedConfig, memory: Ref) -> Ref:
    """The rows of a tile of memory that is for the largest one."""
    return memory if memory.shape[0] == c.tile else memory.at[pl.ds(0, c.tile)]


def _compute(s: Scratch, worker: Value, part: ProductRefs, work: Work, step: Value) -> Value:
    """Multiplies, and stores the results of the expert's own rows."""
    c, given, out, start = part
    steps = given.x.shape[1] // c.depth

    def all_steps(acc: Ref) -> tuple[Value, Value]:
        end = jax.lax.fori_loop(0, steps, functools.partial(_step, c, s, worker, acc), step)
        return acc[...], end

    y, step = pl.run_scoped(all_steps, plgpu.WGMMAAccumulatorRef((BLOCK, c.tile), c.sums))
    y = y.astype(jnp.float32)
    if given.scales:
        factors = []
        for each in range(c.workers):
            i, column = _column(c, len(given.scales), each, work.block)
            own = given.scales[i].at[work.expert, pl.ds(column, BLOCK)]
            factors.append(registers.load(own, PER_OUTPUT, c.interpreted))
        factor = factors[0] if c.workers == 1 else jnp.where(worker == 0, factors[0], factors[1])
        y = y * jax.lax.broadcast_in_dim(factor, y.shape, (0,))
    for scale in given.row_scale:
        factor = registers.load(scale.at[pl.ds(work.first, c.tile)], PER_ROW, c.interpreted)
        y = y * jax.lax.broadcast_in_dim(factor, y.shape, (1,))
    act = c.act
    if act is None:
        _store(s.out.at[worker], y, out, work, start + (work.block * c.workers + worker) * BLOCK)
        return step

    up = s.up if s.up.shape[1] == c.tile else s.up.at[:, pl.ds(0, c.tile)]

    @pl.when(worker == 1)
    def _() -> None:
        plgpu.barrier_wait(s.read)
        up[...] = y
        plgpu.commit_smem()
        plgpu.barrier_arrive(s.given)

    @pl.when(worker == 0)
    def _() -> None:
        plgpu.barrier_wait(s.given)
        factor = plgpu.layout_cast(up[...], plgpu.Layout.WGMMA)
        plgpu.barrier_arrive(s.read)
        _store(s.out.at[0], act(y) * factor, out, work, start + work.block * BLOCK)

    return step


def _step(c: GroupedConfig, s: Scratch, worker: Value, acc: Ref, _: Value, step: Value) -> Value:
    """acc [outputs, tile] += w^T x^T over the inputs of one stage."""
    slot = jax.lax.rem(step, jnp.int32(c.stages))
    plgpu.barrier_wait(s.full.at[slot])
    w = s.w.at[slot, worker]
    if w.dtype != s.x.dtype:
        # In the first layout each thread reads 8 bits where it will hold 16; the second is what wgmma reads.
        values = plgpu.layout_cast(w[...], plgpu.Layout.WGMMA_UPCAST_2X)
        if values.dtype != jnp.int8:  # Hopper converts fp8 to fp16 only: bf16 needs a step in between
            values = values.astype(jnp.float32)
        w = plgpu.layout_cast(values.astype(s.x.dtype), plgpu.Layout.WGMMA)
        if s.widened is not None:  # the interpreter has no wgmma with an operand in registers
            s.widened.at[worker][...] = w
            w = s.widened.at[worker]
    elif not c.transposed:
        w = w.transpose((1, 0))
    plgpu.wgmma(acc, w, _rows(c, s.x.at[slot]).transpose((1, 0)))
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(s.free.at[slot])
    return step + 1


def _store(lines: Ref, y: Value, out: Ref, work: Work, column: Value) -> None:
    """Transposes y through shared memory, then copies the rows of the expert, one by one."""
    plgpu.wait_smem_to_gmem(0)  # the copies of the piece before have read it
    lines = lines.at[pl.ds(0, y.shape[1]), pl.ds(0, BLOCK)]
    lines.transpose((1, 0))[...] = plgpu.layout_cast(y.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()

    def copy_row(row: Value, _: None) -> None:
        plgpu.copy_smem_to_gmem(lines.at[row - work.first], out.at[row, pl.ds(column, BLOCK)])

    jax.lax.fori_loop(work.low, work.high, copy_row, None)
