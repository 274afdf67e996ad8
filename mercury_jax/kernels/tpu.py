"""Canvas attention for TPUs, in Pallas: few queries over a long cache, of which only what is seen is read.

The cache is read as it lies, slots first: heads first would ask for a copy of all of it after each write. So a
program takes a tile of the queries of all heads, those of one key head in the rows of a matrix, and walks the key
tiles from the first that any of them sees to the last, in the order of the grid: the next one is copied while this
one is computed. Which those are is known on the device before it starts (scalar prefetch), and the grid is as long
as the longest walk. Softmax is kept running in fp32 (arXiv 1805.02867).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.kernels import parts
from mercury_jax.kernels.rounded import Keys, Rounded
from mercury_jax.kernels.tpu_program import Plan, program
from mercury_jax.types import Device

ROWS = 1024  # of a tile of queries of one key head, at most
KEYS = (512, 256, 128)  # of a tile, the first that fits
SUBLANES, LANES = 16, 128  # rows of a register of bfloat16, two of float32; its columns
LEAST = 8  # keys: products with a single one do not lower
WIDTHS = range(64, 513, 64)  # head sizes


def refuses(
    q: Any, k: Any, v: Any, ranges: Any, *, scale: float, softcap: float | None, residual: bool
) -> str | None:
    """Why this kernel does not take these shapes and dtypes, here; or None."""
    if isinstance(k, Rounded) != isinstance(v, Rounded):
        return "of keys and values one is int8 and the other is not"
    for x in (x for x in (q, k, v) if not isinstance(x, Rounded)):
        if x.dtype not in (jnp.bfloat16, jnp.float32):
            return f"{x.dtype}, neither bfloat16 nor float32"
    if q.shape[-1] not in WIDTHS:
        return f"head size {q.shape[-1]} is no multiple of 64 up to 512"
    if q.shape[2] % k.shape[2]:
        return f"{q.shape[2]} heads are no multiple of {k.shape[2]} key heads"
    if k.shape[1] < LEAST:
        return f"{k.shape[1]} keys; it takes {LEAST} or more"
    if _plan(q, k, ranges, scale, softcap, residual) is None:
        return f"{KEYS[-1]} keys of {k.shape[2]} heads do not fit into VMEM"
    if _divided(q):
        return "XLA does not divide kernels among devices; in shard_map over every axis each has its own"
    return None


def _divided(q: Any) -> bool:
    """Whether XLA is to divide the work among devices, and not a shard_map that has done so already."""
    mesh = jax.typeof(q).sharding.mesh  # that of the arguments of jit, where nobody has set one
    mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
    manual = set(mesh.manual_axes)
    return manual != set(mesh.axis_names) if manual else mesh.size > 1


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
    """What `kernels.attend` gives; not differentiable. Products in fp32 are as exact as JAX's default precision.

    Keys that no row sees may hold anything, NaN as well. Values too, unless they lie between the lowest start and the
    highest end that one range has over the rows of a tile: there they must be finite.
    """
    batch, queries, heads, _ = q.shape
    p = _plan(q, k, ranges, scale, softcap, residual)
    assert p is not None, refuses(q, k, v, ranges, scale=scale, softcap=softcap, residual=residual)
    edges = parts.fold_ranges(jnp.clip(ranges, 0, p.slots), heads // p.groups, p.rows)
    bounds = parts.bounds(edges, p.rows, p.keys, p.slots)
    folded = parts.fold(q, p.groups, p.rows)
    interpret = False if device is None or device.interpret is None else device.interpret
    found = _launch(
        p, folded.reshape(batch, p.groups, *folded.shape[1:]), edges, bounds, _sources(k, v), interpret
    )
    out, *lse = (parts.unfold(x.reshape(-1, *x.shape[2:]), batch, queries, heads) for x in found)
    return (out, lse[0][..., 0]) if residual else out


def _plan(q: Any, k: Any, ranges: Any, scale: float, softcap: float | None, residual: bool) -> Plan | None:
    """As many rows at once as fit, so that the keys are read as few times as can be; then as many keys."""
    batch, queries, heads, width = q.shape
    slots, groups, rounded = k.shape[1], k.shape[2], isinstance(k, Rounded)
    rows, (memory, cores) = queries * (heads // groups), _chip()
    fewest = 1 if batch % cores == 0 or rows < cores * SUBLANES else cores
    sizes = q.dtype.itemsize, 1 if rounded else k.dtype.itemsize
    for tiles in range(max(fewest, -(-rows // ROWS)), -(-rows // SUBLANES) + 1):
        even = -(-rows // (tiles * SUBLANES)) * SUBLANES
        for keys in KEYS:
            p = Plan(
                even, min(keys, slots), -(-rows // even), groups, width, slots, ranges.shape[2], scale, softcap,
                rounded, residual, memory,
            )  # fmt: skip
            if _bytes(p, *sizes) <= memory:
                return p
    return None


def _chip() -> tuple[int, int]:
    """(bytes of VMEM for a program, cores that share the programs of one device)."""
    try:
        info = pltpu.get_tpu_info()
    except ValueError:  # interpreted
        return 16 * 2**20, 1
    return info.vmem_capacity_bytes // 2, info.num_cores


def _bytes(p: Plan, query: int, key: int) -> int:
    """Of VMEM, from above: what is copied in and out lies there twice, then come the scratch and what a step makes.

    query, key: bytes of a number.
    """
    line, thin = -(-p.width // LANES) * LANES, LANES * 4  # of a row; of one number a row
    rows = (
        p.groups * p.rows * (4 * line * query + line * 4 + (4 if p.residual else 2) * thin)
        + 2 * p.rows * thin
    )
    keys = p.groups * p.keys * 6 * line * key + (64 * p.groups * p.keys if p.rounded else 0)
    return rows + keys + 16 * p.rows * p.keys + 4 * p.keys * line * query + 4 * p.rows * line


def _sources(k: Keys, v: Keys) -> tuple[Array, ...]:
    """Keys and values; of int8 ones their scales too, slots last [B, G, 1, S]."""
    if not (isinstance(k, Rounded) and isinstance(v, Rounded)):
        return jnp.asarray(k), jnp.asarray(v)
    return k.values, v.values, *(x.scale.transpose(0, 2, 1)[:, :, None] for x in (k, v))


def _launch(
    p: Plan, q: Array, edges: Array, bounds: Array, sources: tuple[Array, ...], interpret: Any
) -> tuple[Array, ...]:
    """The kernel over its grid: outputs [B, G, M, K], and where asked for log-sum-exp [B, G, M, 1]."""
    batch, _, rows, width = q.shape
    kinds = [(width, q.dtype), (1, jnp.float32)][: 1 + p.residual]
    known = 4 + 2 * p.ranges  # numbers that `parts.bounds` tells of a tile

    def key_tile(row: Any, tile: Any, step: Any, bounds: Any) -> Any:
        """Behind the last tile it stays there, so that nothing is copied."""
        at = (row * p.tiles + tile) * known
        last = jnp.maximum(bounds[at + 1] - 1, bounds[at])
        return jnp.minimum(jnp.minimum(bounds[at] + step, last), (p.slots - 1) // p.keys)

    own = lambda row, tile, *_: (row, 0, tile, 0)
    keys = pl.BlockSpec((None, p.keys, p.groups, width), lambda *at: (at[0], key_tile(*at), 0, 0))
    scales = pl.BlockSpec((None, p.groups, 1, p.keys), lambda *at: (at[0], 0, 0, key_tile(*at)))
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(batch, p.tiles, jnp.maximum((bounds[..., 1] - bounds[..., 0]).max(), 1)),
        in_specs=[
            pl.BlockSpec((None, p.groups, p.rows, width), own),
            pl.BlockSpec((None, p.rows, 2 * p.ranges), lambda row, tile, *_: (row, tile, 0)),
            *[keys, keys, scales, scales][: len(sources)],
        ],
        out_specs=[pl.BlockSpec((None, p.groups, p.rows, wide), own) for wide, _ in kinds],
        scratch_shapes=[
            *[pltpu.VMEM((p.groups, p.rows, wide), jnp.float32) for wide in (width, 1, 1)],
            *[pltpu.VMEM((p.groups, p.keys, width), x.dtype) for x in sources[:2]],
        ],
    )
    call = pl.pallas_call(
        functools.partial(program, p),
        grid_spec=spec,
        out_shape=[jax.ShapeDtypeStruct((batch, p.groups, rows, wide), dtype) for wide, dtype in kinds],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=p.memory
        ),
        cost_estimate=_cost(p, q, sources[0]),
        name="canvas_attention",
        interpret=interpret,
    )
    return tuple(call(bounds.reshape(-1), q, edges.transpose(0, 2, 1), *sources))


def _cost(p: Plan, q: Array, keys: Array) -> pl.CostEstimate:
    """What XLA plans with and counts: as if every slot were seen."""
    seen = q.shape[0] * p.groups * q.shape[2] * p.slots
    moved = 2 * (q.size * q.dtype.itemsize + p.tiles * keys.size * keys.dtype.itemsize)
    return pl.CostEstimate(flops=4 * seen * p.width, transcendentals=seen, bytes_accessed=moved)
