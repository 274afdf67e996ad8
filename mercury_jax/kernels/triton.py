"""The grouped product for NVIDIA GPUs other than Hopper: Ampere, Ada and Blackwell. Pallas lowers it to Triton.

As on Hopper (`hopper.grouped_matmul`) a program has a block of outputs of one expert, and streams the block through
shared memory once for each of its tiles of rows; scales and gates are applied to the sums in registers. Rows need no
alignment: their loads and stores are masked. Triton multiplies at least 16 rows and takes powers of two, so a tile of
24 rows becomes one of 32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mercury_jax.kernels.tracing import traced_once
from mercury_jax.types import Device

DEPTH = 64  # inputs of a step
STAGES = 3  # loads in flight, which fit into the 99 KB of shared memory of an L4
SUMS = 4096  # sums of a program up to which 4 warps hold them in registers; 8 hold more

Ref = Any  # a reference to global memory inside a kernel
Value = Any  # an array or index in registers


class TritonConfig(NamedTuple):
    """What a program is compiled for."""

    tile: int  # rows
    lanes: int  # programs that share the tiles of an expert
    block: int  # outputs of one program, of each of its matrices
    shift: int  # outputs before the first one of the up projection
    transposed: bool
    act: Callable[[Array], Array] | None


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

    Args:
        x: Rows.
        matrices: [E, I, O], or [E, O, I] if `transposed`: one; with `act` two, gate and up, of the same shape. The two
            may be one array [E, I, 2 O], given once: the gate is its first half.
        scales: fp32 [E, O] of each matrix, or () for matrices that are not quantised.
        offsets: The rows of expert e are offsets[e] .. offsets[e + 1] - 1; at most `rows` in all. Numbers after the
            first E + 1 are not read.
        rows: Rows of the result.
        tile: Rows of a tile, up to 128.
        dtype: Of the result.
        transposed: See `matrices`.
        act: The result is act(x gate) * (x up) instead of x w.
        device: To compile for.

    Returns:
        [rows, O]; rows of no expert hold anything.
    """
    experts, joined = matrices[0].shape[0], act is not None and len(matrices) == 1
    outputs = matrices[0].shape[1 if transposed else 2] // (2 if joined else 1)
    tile = max(16, 1 << (tile - 1).bit_length())
    block = 64 if outputs % 128 or act is not None or tile > 64 else 128
    lanes = -(-rows // (experts * tile))  # so that a product with one matrix has its tiles side by side
    static = TritonConfig(tile, lanes, block, outputs if joined else 0, transposed, act)
    sums = tile * block * (1 if act is None else 2)
    call = pl.pallas_call(
        functools.partial(_program, static),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), dtype),
        grid=(outputs // block, lanes, experts),
        compiler_params=plt.CompilerParams(num_warps=4 if sums <= SUMS else 8, num_stages=STAGES),
        interpret=device is not None and device.interpret is not None,
        name="grouped",
    )
    return call(offsets, x, *matrices, *scales)


def _program(c: TritonConfig, offsets: Ref, x: Ref, *refs: Ref) -> None:
    """One block of outputs of every `lanes`-th tile of an expert; adjacent programs read the same rows of x."""
    *operands, out = refs
    count = 1 if c.act is None else 2  # products: one, or those with the gate and the up projection
    given = 1 if c.shift else count  # gate and up may be halves of one array
    matrices, scales = (part * (count // given) for part in (operands[:given], operands[given:]))
    expert, lane = pl.program_id(2), pl.program_id(1)
    column = pl.program_id(0) * c.block
    columns = [pl.ds(column + c.shift * i, c.block) for i in range(count)]
    start, end = offsets[expert], offsets[expert + 1]
    tiles = jax.lax.div(end - start + (c.tile - 1), c.tile)

    def one_tile(i: Value, _: None) -> None:
        first = start + (lane + i * c.lanes) * c.tile
        inside = (first + jnp.arange(c.tile) < end)[:, None]
        some = pl.ds(first, c.tile)

        def step(k: Value, sums: tuple[Value, ...]) -> tuple[Value, ...]:
            depth = pl.ds(k * DEPTH, DEPTH)
            x_k = plt.load(x.at[some, depth], mask=inside, other=0.0)
            found = []
            for total, w, own in zip(sums, matrices, columns, strict=True):
                part = plt.load(w.at[expert, own, depth] if c.transposed else w.at[expert, depth, own])
                if part.dtype != x_k.dtype:  # 8 bits; fp8 has no direct conversion to bf16
                    part = part.astype(jnp.float32).astype(x_k.dtype)
                found.append(total + plt.dot(x_k, part, trans_b=c.transposed))
            return tuple(found)

        zeros = (jnp.zeros((c.tile, c.block), jnp.float32),) * count
        sums = jax.lax.fori_loop(0, x.shape[1] // DEPTH, step, zeros)
        if scales:
            factors = [plt.load(s.at[expert, own]) for s, own in zip(scales, columns, strict=True)]
            sums = [total * factor[None] for total, factor in zip(sums, factors, strict=True)]
        y = sums[0] if c.act is None else c.act(sums[0]) * sums[1]
        plt.store(out.at[some, pl.ds(column, c.block)], y.astype(out.dtype), mask=inside)

    jax.lax.fori_loop(0, jax.lax.div(tiles - lane + (c.lanes - 1), c.lanes), one_tile, None)
