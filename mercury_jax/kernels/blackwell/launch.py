"""The door of the Blackwell kernel: what it refuses, its plan for given shapes, its launch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.kernels import hopper, parts
from mercury_jax.kernels.blackwell.program import program
from mercury_jax.kernels.blackwell.tensor import PART, ROWS, arrivals, lacking, tensor
from mercury_jax.kernels.hopper.feed import RAW, sources_of
from mercury_jax.kernels.hopper.plan import Plan, Scratch, room
from mercury_jax.kernels.rounded import Keys, Rounded
from mercury_jax.types import Device

PROCESSORS = 148  # of a B200
SHARED = 227 * 1024 - 1024  # bytes that a program may have, but those for barriers and alignment
KEYS = {
    64: 128,
    128: 128,
    256: 64,
}  # head size: keys of a tile, as tensor memory allows: 2 keys + keys / 2 + K


def refuses(q: Any, k: Any, v: Any, ranges: Any, **asked: Any) -> str | None:
    """Why this kernel does not take these shapes and dtypes, or None: as on Hopper, but for the head sizes."""
    if q.shape[-1] not in KEYS:
        return f"head size {q.shape[-1]} is not one of {', '.join(map(str, KEYS))}"
    return hopper.refuses(q, k, v, ranges, **asked)


def run(
    q: Float[Array, "B T H K"],
    k: Keys,
    v: Keys,
    ranges: Int[Array, "B T R 2"],
    *,
    scale: float,
    softcap: float | None = None,
    residual: bool = False,
    device: Device | None = None,
) -> Any:
    """What `kernels.attend` gives; not differentiable.

    Keys that no row sees may hold anything, NaN as well. Values too, unless they lie between the lowest start and the
    highest end that one range has over the rows of a tile: there they must be finite.
    """
    batch, queries, heads, _ = q.shape
    interpret = None if device is None else device.interpret
    p = _plan(q, k, ranges, scale, softcap, interpret is not None and lacking())
    ranges = jnp.minimum(ranges, k.shape[1])  # what is filled in behind the last slot is seen by no row
    edges = parts.fold_ranges(ranges, heads // p.groups, ROWS)
    bounds = parts.bounds(edges, ROWS, p.keys, p.slots)
    outs, lses = _launch(p, parts.fold(q, p.groups, ROWS), edges, bounds, sources_of(p, k, v), interpret)
    out, lse = (outs[0], lses[0]) if p.splits == 1 else parts.merge(outs, lses)
    out = parts.unfold(out, batch, queries, heads).astype(q.dtype)
    return (out, parts.unfold(lse, batch, queries, heads)) if residual else out


def _plan(
    q: Any, k: Any, ranges: Any, scale: float, softcap: float | None, interpreted: bool = False
) -> Plan:
    _, queries, heads, width = q.shape
    batch, slots, groups, _ = k.shape
    int8 = isinstance(k, Rounded)
    keys = min(KEYS[width], 64) if int8 else KEYS[width]  # int8 tiles are in shared memory twice
    tiles = -(-queries * (heads // groups) // ROWS)
    line, edge = 2 * width, 8 * ranges.shape[2]  # bytes of a row of queries or keys, and of its ranges
    free = SHARED - ROWS * (line + edge + 4 * PART) - (RAW * keys * (line + 8) if int8 else 0)
    slots = room(slots, keys)
    return Plan(
        workers=1,
        keys=keys,
        stages=min(4, free // (2 * keys * line)),
        splits=parts.splits(batch * groups * tiles, -(-slots // keys), PROCESSORS),
        slots=slots,
        groups=groups,
        ranges=ranges.shape[2],
        scale=scale,
        softcap=softcap,
        rounded=int8,
        interpreted=interpreted,
    )


def _launch(
    p: Plan, q: Array, edges: Array, bounds: Array, sources: tuple[Array, ...], interpret: Any
) -> tuple[Array, Array]:
    """The kernel over its grid: outputs [splits, P, M, K] and log-sum-exp [splits, P, M], both in fp32.

    A thread has a row of the output, and two numbers of 16 bits are too few for it to store them without conflicts;
    who unfolds the output rounds it.
    """
    pairs, rows, width = q.shape
    shapes = [jax.ShapeDtypeStruct((p.splits, *s), jnp.float32) for s in (q.shape, (pairs, rows))]
    params: dict[str, Any] = dict(approx_math=True, reduction_scratch_bytes=0)
    return plgpu.kernel(
        functools.partial(program, p, 3 + len(sources)),
        out_type=tuple(shapes),
        scratch_types=(_shared(p, width, q.dtype), tensor(p, width, q.dtype)),
        grid=(p.splits, rows // ROWS, pairs),
        grid_names=("split", "tile", "pair"),
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, **params),
    )(q, edges, bounds, *sources)


def _shared(p: Plan, width: int, dtype: Any) -> Scratch:
    """Shared memory and its barriers; what is not needed is None."""

    def tile(*shape: int, dtype: Any = dtype) -> Any:
        line = 64 * jnp.dtype(dtype).itemsize  # bytes of a swizzled line: 64 numbers of either kind
        how = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(line))
        return plgpu.SMEM((*shape, width), dtype, transforms=how)

    # int8: a warpgroup writes a tile, and arrives once; else its copy does.
    full, raw = plgpu.Barrier(num_barriers=p.stages), (2, RAW, p.keys)
    return Scratch(
        q=tile(ROWS),
        edges=plgpu.SMEM((2 * p.ranges, ROWS), jnp.int32),
        k=tile(p.stages, p.keys),
        v=tile(p.stages, p.keys),
        q_full=plgpu.Barrier(num_arrivals=2, num_barriers=1),
        k_full=full,
        v_full=full,
        k_free=arrivals(p, p.stages),
        v_free=arrivals(p, p.stages),
        raw=tile(*raw, dtype=jnp.int8) if p.rounded else None,
        scales=plgpu.SMEM(raw, jnp.float32) if p.rounded else None,
        raw_full=plgpu.Barrier(num_arrivals=4, num_barriers=RAW) if p.rounded else None,
    )
