"""Tensor memory: 128 lanes of 512 columns of 32 bits, where tcgen05 products read weights and leave their sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from mercury_jax.kernels.hopper.plan import Plan

ROWS = 128  # of a product, one a lane
LAYOUT = plgpu.Layout.TCGEN05_TMEM_NATIVE  # a thread has a row: no number passes between threads
PART = 32  # columns of the sum that are in registers at a time; in fp32 a line of 128 bytes of shared memory


class Tensor(NamedTuple):
    """Tensor memory of one program, and the barriers of what the products write there."""

    scores: Any  # [128, 2 * keys] fp32: of one tile while those of the next are made
    weights: Any  # [128, 2 * keys]: of one tile while those of the one before are used
    sum: Any  # [128, K] fp32, of weight * value
    scored: Any
    summed: Any
    out: Any  # shared memory [128, 32] fp32: the sum's columns on their way out


def lacking() -> bool:
    """Whether the interpreter of this JAX has no tcgen05: shared memory and jnp.dot replace it there."""
    return not hasattr(gpu_callbacks, "tcgen05_mma")


def arrivals(p: Plan, n: int) -> Any:
    """Barriers on which a finished product arrives."""
    return plgpu.Barrier(num_barriers=n, orders_tensor_core=not p.interpreted)


def tensor(p: Plan, width: int, dtype: Any) -> Tensor:
    """What a program takes of it, for heads of `width`."""
    how = (plgpu.TilingTransform((8, PART)), plgpu.SwizzleTransform(4 * PART))
    memory = plgpu.SMEM if p.interpreted else plgpu.TMEM
    packed: dict[str, Any] = {} if p.interpreted else {"packed": True}
    return Tensor(
        scores=memory((ROWS, 2 * p.keys), jnp.float32),
        weights=memory((ROWS, 2 * p.keys), dtype, **packed),
        sum=memory((ROWS, width), jnp.float32),
        scored=arrivals(p, 2),
        summed=arrivals(p, 1),
        out=plgpu.SMEM((ROWS, PART), jnp.float32, transforms=how),
    )


def read(p: Plan, ref: Any) -> Any:
    """Into registers; when it returns, what was read may be written over."""
    if p.interpreted:
        return ref[...]
    x = plgpu.async_load_tmem(ref, layout=LAYOUT)
    plgpu.wait_load_tmem()
    return x


def write(p: Plan, ref: Any, x: Any) -> None:
    """From registers; products see it after `settle`."""
    if p.interpreted:
        ref[...] = x
    else:
        plgpu.async_store_tmem(ref, x)


def settle(p: Plan) -> None:
    """All that this warpgroup wrote is there for the products that it starts from now on."""
    if not p.interpreted:
        plgpu.commit_tmem()


def product(p: Plan, into: Any, a: Any, b: Any, free: Any, done: Any, add: Any, turned: bool = False) -> None:
    """Start into (+)= a b, or a b^T where `turned`; at its end it arrives on `done` and on `free`, of b's tile."""
    if p.interpreted:
        before, tile = jnp.where(add, into[...], 0.0), b[...]
        into[...] = before + jnp.dot(a[...], tile.T if turned else tile, preferred_element_type=jnp.float32)
        plgpu.barrier_arrive(free)
        plgpu.barrier_arrive(done)
    else:
        plgpu.tcgen05_mma(into, a, b.transpose((1, 0)) if turned else b, free, accumulate=add)
        plgpu.tcgen05_commit_arrive(done)


def parts(ref: Any) -> list[tuple[Any, Any]]:
    """(columns, view of them) of an array that is too wide for the registers."""
    cuts = [pl.ds(at, PART) for at in range(0, ref.shape[-1], PART)]
    return [(cut, ref.at[:, cut]) for cut in cuts]
