"""Timing without compilation: warm calls, and the measured limits of a device.

`steady` times warm calls. `measure_roofline` measures the memory bandwidth and the matmul rate with which `mercury
bench gpu` compares. `endless` gives answers a fixed length.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from mercury_jax.compilation import compilations
from mercury_jax.ops import device as kernel_device
from mercury_jax.types import LM, Device

T = TypeVar("T")

TRIES = 4  # calls after which one must have compiled nothing
REPEATS = 5  # timed loops, of which the fastest counts
PRODUCTS, COPIES = 4, 8  # matrix products and array updates per timed loop
PROGRAMS = 132  # multiprocessors of an H100 and an H200
TILE, STAGES = (64, 128), 6  # numbers of a tile that `read_tiles` reads at once, 32 KB, and tiles in flight


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """Times a call.

    Returns:
        (result, seconds).
    """
    began = time.perf_counter()
    result = call()
    return result, time.perf_counter() - began


def steady(call: Callable[[], T]) -> tuple[T, float]:
    """Times a call without compilation: repeats it until a call compiles nothing.

    Args:
        call: The function, as in `timed`.

    Returns:
        (result, seconds) of the call that compiled nothing.
    """
    for _ in range(TRIES):
        before = compilations()
        result, seconds = timed(call)
        if compilations() == before:
            return result, seconds
    raise RuntimeError(f"each of {TRIES} equal calls compiled a program; there is no steady state to time")


# --- measured limits of a device


class Roofline(NamedTuple):
    """Measured limits of a device: bytes/s of the fastest way to move them, and FLOP/s of large bf16 products."""

    bandwidth: float
    matmul: float


def measure_roofline(megabytes: int = 2048, width: int = 8192) -> Roofline:
    """Measures memory bandwidth and matmul rate of the first device.

    The fastest of several loops counts, because other work on the device can only add to the time.

    Args:
        megabytes: Size of the array that is copied, incremented in place and, on Hopper, read by `read_tiles`. A copy
            and an increment read and write every byte.
    """
    multiply, flops = matmul_loop(width, jnp.bfloat16)
    size = megabytes << 20
    # Values other than zeros, because a device may compress memory.
    x = jax.jit(lambda: (jnp.arange(size // 2, dtype=jnp.int32) % 251).astype(jnp.bfloat16))()
    # Each increment uses the result of the one before, so that none can be optimised away. On a GPU the driver copies,
    # faster than XLA's loops.
    moves = [jax.jit(lambda x: x + 1, donate_argnums=0), jax.jit(jnp.copy)]
    products, copies = [], []
    for repeat in range(REPEATS + 1):
        products.append(timed(multiply)[1])
        for move in moves:
            y = jax.block_until_ready(x + 0)
            began = time.perf_counter()
            for _ in range(COPIES):
                y = move(y)
            jax.block_until_ready(y)
            if repeat:  # the first one compiles
                copies.append(time.perf_counter() - began)
    bandwidth = 2.0 * size * COPIES / min(copies)
    if kernel_device.present() == kernel_device.HOPPER:
        tiles = jax.lax.bitcast_convert_type(x.reshape(-1, TILE[1], 2), jnp.int32)
        read = jax.jit(lambda x: read_tiles(x, PROGRAMS))
        jax.block_until_ready(read(tiles))
        seconds = [
            timed(lambda: jax.block_until_ready([read(tiles) for _ in range(COPIES)]))[1]
            for _ in range(REPEATS)
        ]
        bandwidth = max(bandwidth, size * COPIES / min(seconds))
    return Roofline(bandwidth, flops / min(products))


def read_tiles(x: Int[Array, "M 128"], programs: int, device: Device | None = None) -> Int[Array, "programs"]:
    """Reads an array into shared memory by TMA, as the kernels of Hopper read matrices, and nothing else."""
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    blocks = x.shape[0] // TILE[0]

    def kernel(x: Any, out: Any, tiles: Any, full: Any, free: Any) -> None:
        program = jax.lax.axis_index("program")
        mine = (blocks - program + programs - 1) // programs

        def copy(j: Array) -> None:
            at = pl.multiple_of((program + j * programs) * TILE[0], TILE[0])
            stage = jax.lax.rem(j, jnp.int32(STAGES))
            plgpu.copy_gmem_to_smem(x.at[pl.ds(at, TILE[0])], tiles.at[stage], full.at[stage])

        def step(j: Array, total: Array) -> Array:
            stage = jax.lax.rem(j, jnp.int32(STAGES))
            plgpu.barrier_wait(full.at[stage])
            total = total + tiles[stage, 0, 0]
            plgpu.barrier_arrive(free)  # all threads have read before the tile is overwritten
            plgpu.barrier_wait(free)
            pl.when(j + STAGES < mine)(lambda: copy(j + STAGES))
            return total

        for j in range(STAGES):
            pl.when(j < mine)(functools.partial(copy, jnp.int32(j)))
        out[program] = jax.lax.fori_loop(0, mine, step, jnp.int32(0))

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((programs,), jnp.int32),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=[
            plgpu.SMEM((STAGES, *TILE), jnp.int32), plgpu.Barrier(num_barriers=STAGES), plgpu.Barrier(),
        ],
        interpret=None if device is None else device.interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(x)  # fmt: skip


def matmul_loop(width: int, dtype: DTypeLike) -> tuple[Callable[[], None], float]:
    """Makes a loop of products of large square matrices, to measure the highest matmul rate of a device.

    Returns:
        (a compiled function that multiplies and waits, FLOP per call).
    """
    w = jax.random.normal(jax.random.key(0), (width, width), dtype) * width**-0.5
    # Each product uses the result of the one before, so that XLA cannot remove any.
    multiply = jax.jit(lambda x: functools.reduce(lambda x, _: x @ w, range(PRODUCTS), x))
    jax.block_until_ready(multiply(w))

    def run() -> None:
        jax.block_until_ready(multiply(w))

    return run, 2.0 * width**3 * PRODUCTS


# --- answers of a fixed length


def endless(lm: LM) -> LM:
    """Returns the same model with `eos` forbidden, so that every answer has `max_tokens` tokens."""
    c = lm.corruption
    return dataclasses.replace(lm, corruption=c._replace(forbidden=(*c.forbidden, lm.model.config.eos)))
