"""The door of the Hopper kernel: what it refuses, its plan for given shapes, its launch."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.kernels import parts
from mercury_jax.kernels.hopper import wide
from mercury_jax.kernels.hopper.feed import RAW, sources_of
from mercury_jax.kernels.hopper.plan import ROWS, Plan, Scratch, room
from mercury_jax.kernels.hopper.program import program
from mercury_jax.kernels.rounded import Keys, Pool, Rounded
from mercury_jax.types import Device

PROCESSORS = 132  # of an H100 and an H200
SHARED = (
    227 * 1024 - 1024
)  # bytes of shared memory that a program may have, but those for barriers and alignment
KEYS = {64: 128, 128: 128, 256: 64, 512: wide.KEYS}  # head size: keys of a tile, as registers allow


def refuses(
    q: Any,
    k: Any,
    v: Any,
    ranges: Any,
    *,
    scale: float,
    softcap: float | None,
    residual: bool,
    pages: Any = None,
) -> str | None:
    """Why this kernel does not take these shapes and dtypes, or None."""
    if isinstance(k, Rounded) != isinstance(v, Rounded):
        return "of keys and values one is int8 and the other is not"
    dtypes = [str(jnp.dtype(x.dtype)) for x in (q, k, v) if not isinstance(x, Rounded)]
    if dtypes[0] not in ("bfloat16", "float16") or len(set(dtypes)) > 1:
        return f"of {', '.join(dtypes)}; the tensor cores take bfloat16 or float16, one for all"
    if q.shape[-1] not in KEYS:
        return f"head size {q.shape[-1]} is not one of {', '.join(map(str, KEYS))}"
    if q.shape[-1] > 256 and isinstance(k, Rounded):
        return (
            f"of head size {q.shape[-1]} the keys are int8; there is no shared memory left to widen them in"
        )
    if ranges.shape[2] > 3:
        return f"{ranges.shape[2]} ranges a row; registers suffice for 3"
    if q.shape[2] % k.shape[2]:
        return f"{q.shape[2]} heads are no multiple of {k.shape[2]} key heads"
    if pages is not None and k.shape[1] % (keys := KEYS[q.shape[-1]]):
        return f"pages of {k.shape[1]} slots are no multiple of the {keys} keys that it copies at once"
    return None if scale > 0 else f"scale {scale} is not above 0"


def run(
    q: Float[Array, "B T H K"],
    k: Keys | Pool,
    v: Keys | Pool,
    ranges: Int[Array, "B T R 2"],
    *,
    scale: float,
    softcap: float | None = None,
    residual: bool = False,
    pages: Int[Array, "B N"] | None = None,
    device: Device | None = None,
) -> Any:
    """What `kernels.attend` gives; not differentiable.

    Keys that no row sees may hold anything, NaN as well. Values too, unless they lie between the lowest start and the
    highest end that one range has over the rows of a tile: there they must be finite.
    pages: k and v are a pool [P, page, G, K], and these its pages of each row, every one within 0..P-1
    (`kernels.paged`).
    """
    batch, queries, heads, _ = q.shape
    interpret = None if device is None else device.interpret
    p = _plan(q, k, ranges, scale, softcap, pages, interpret is not None)
    if pages is None:  # what is filled in behind the last slot is seen by no row
        ranges = jnp.minimum(ranges, k.shape[1])
    edges = parts.fold_ranges(ranges, heads // p.groups, p.rows)
    bounds = parts.bounds(edges, p.rows, p.keys, p.slots)
    sources = sources_of(p, k, v) if pages is None else _pool(p, k, v, pages)
    outs, lses = _launch(p, parts.fold(q, p.groups, p.rows), edges, bounds, sources, interpret)
    out, lse = (outs[0], lses[0]) if p.splits == 1 else parts.merge(outs, lses)
    out = parts.unfold(out, batch, queries, heads).astype(q.dtype)
    return (out, parts.unfold(lse, batch, queries, heads)) if residual else out


def _plan(
    q: Any,
    k: Any,
    ranges: Any,
    scale: float,
    softcap: float | None,
    pages: Any = None,
    interpreted: bool = False,
) -> Plan:
    batch, queries, heads, width = q.shape
    _, slots, groups, _ = k.shape
    rows, keys, int8, both = queries * (heads // groups), KEYS[width], isinstance(k, Rounded), width > 256
    # Who widens int8 needs more registers than two that compute could leave.
    workers = 2 if both else 1 if rows <= ROWS or int8 else 2
    line, edge = 2 * width, 8 * ranges.shape[2]  # bytes of a row of queries or keys, and of its ranges
    free = SHARED - workers * ROWS * (line + edge) - (RAW * keys * (line + 8) if int8 else 0)
    slots = room(slots, keys) if pages is None else pages.shape[1] * slots
    p = Plan(
        workers,
        keys,
        stages=wide.RING if both else min(4, free // (2 * keys * line)),
        splits=1,
        slots=slots,
        groups=groups,
        ranges=ranges.shape[2],
        scale=scale,
        softcap=softcap,
        rounded=int8,
        interpreted=interpreted,
        wide=both,
        paged=pages is not None,
    )
    programs, steps = batch * groups * -(-rows // p.rows), -(-slots // keys)
    return p._replace(splits=parts.splits(programs, steps, PROCESSORS))


def _pool(p: Plan, k: Pool, v: Pool, pages: Int[Array, "B N"]) -> tuple[Array, ...]:
    """The sources of `feed` over a pool: it is one row of slots, and each tile of keys lies within a page."""
    page = k.shape[1]
    begins = pages[:, :, None] * page + jnp.arange(0, page, p.keys, dtype=jnp.int32)
    k, v = (jax.tree.map(lambda y: y.reshape(1, -1, *y.shape[2:]), x) for x in (k, v))
    return *sources_of(p, k, v), begins.reshape(len(pages), -1)


def _launch(
    p: Plan, q: Array, edges: Array, bounds: Array, sources: tuple[Array, ...], interpret: Any
) -> tuple[Array, Array]:
    """The kernel over its grid: outputs [splits, P, M, K], fp32 where parts, and log-sum-exp [splits, P, M].

    Of head size 512 they are fp32 always: what it takes to write 16 bits in whole lines would spill registers.
    """
    pairs, rows, width = q.shape
    exact = p.wide or p.splits > 1
    out = jax.ShapeDtypeStruct((p.splits, *q.shape), jnp.float32 if exact else q.dtype)

    def attention(*refs: Any) -> None:  # whose name the kernel has in a compiler's reports
        program(p, 3 + len(sources), *refs)

    return plgpu.kernel(
        attention,
        out_type=(out, jax.ShapeDtypeStruct((p.splits, pairs, rows), jnp.float32)),
        scratch_types=[(_wide if p.wide else _scratch)(p, width, q.dtype)],
        grid=(p.splits, rows // p.rows, pairs),
        grid_names=("split", "tile", "pair"),
        num_threads=p.workers + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(q, edges, bounds, *sources)


def _tile(*shape: int, dtype: Any) -> Any:
    """Shared memory whose last two axes are in the tiles that wgmma reads without conflicts."""
    line = 64 * jnp.dtype(dtype).itemsize  # bytes of a swizzled line: 64 numbers of either kind
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(line)))


def _arrivals(barriers: int, count: int = 1) -> Any:
    return plgpu.Barrier(num_arrivals=count, num_barriers=barriers)


def _scratch(p: Plan, width: int, dtype: Any) -> Scratch:
    tiles = _tile(p.stages, p.keys, width, dtype=dtype)
    full, free = _arrivals(p.stages), _arrivals(p.stages, p.workers)
    scratch = Scratch(
        q=_tile(p.workers, ROWS, width, dtype=dtype),
        edges=plgpu.SMEM((p.workers, 2 * p.ranges, ROWS), jnp.int32),
        k=tiles,
        v=tiles,
        q_full=_arrivals(p.workers, 2),
        k_full=full,
        v_full=full,
        k_free=free,
        v_free=free,
        cleared=_arrivals(1, p.workers),
    )
    if not p.rounded:
        return scratch
    return scratch._replace(
        raw=_tile(2, RAW, p.keys, width, dtype=jnp.int8),
        scales=plgpu.SMEM((2, RAW, p.keys), jnp.float32),
        raw_full=_arrivals(RAW, 4),  # keys, values and the scales of both
    )


def _wide(p: Plan, width: int, dtype: Any) -> Scratch:
    return Scratch(
        q=_tile(width // wide.DEPTH, ROWS, wide.DEPTH, dtype=dtype),
        edges=plgpu.SMEM((1, 2 * p.ranges, ROWS), jnp.int32),
        k=_tile(p.stages, 2, wide.HALF, wide.DEPTH, dtype=dtype),
        v=_tile(p.stages, wide.HALF, wide.SPAN, dtype=dtype),
        q_full=_arrivals(1, width // wide.DEPTH + 1),  # pieces of the queries, their ranges
        k_full=_arrivals(p.stages, 2),  # both halves of the keys
        v_full=_arrivals(p.stages),
        k_free=_arrivals(p.stages, 2),
        v_free=_arrivals(p.stages),  # one warpgroup reads it
        p=_tile(2, ROWS, wide.HALF, dtype=dtype),
        most=plgpu.SMEM((2, ROWS), jnp.float32),
        met=_arrivals(1, 2),
        shared=_arrivals(1, 2),
    )
