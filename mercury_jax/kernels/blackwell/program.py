"""The computing warpgroup of the Blackwell kernel, and tensor memory.

Tensor memory has 128 lanes of 512 columns of 32 bits; tcgen05 products read weights there and leave their sums there.
Arrays that are too wide for the registers are processed in parts of `COLUMNS` columns. Where the interpreter has no
tcgen05, shared memory and `jnp.dot` replace it.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from mercury_jax.kernels.hopper.producer import produce
from mercury_jax.kernels.hopper.tile_loop import (
    FLOOR,
    AttentionConfig,
    KeyTiles,
    SharedMemory,
    across_columns,
    clear_values,
    is_covered,
    is_unmasked,
    key_tiles,
    mask_scores,
    scaled_scores,
)

ROWS = 128  # of a product, one per lane
LAYOUT = plgpu.Layout.TCGEN05_TMEM_NATIVE  # a thread has a row: no number passes between threads
PER_ROW = LAYOUT.reduce(1)  # the layout of one number for each row
COLUMNS = 32  # of the sum that are in registers at a time; in fp32 a line of 128 bytes of shared memory


# --- tensor memory


class TensorMemory(NamedTuple):
    """Tensor memory of one program, and the barriers of the products that write it."""

    scores: Any  # [128, 2 * keys] fp32: of one tile while those of the next are computed
    weights: Any  # [128, 2 * keys]: of one tile while those of the tile before are read
    sum: Any  # [128, K] fp32, of weight * value
    scores_full: Any
    sum_full: Any
    out: Any  # shared memory [128, COLUMNS] fp32: columns of the sum on their way out


def interpreter_lacks_tcgen05() -> bool:
    """Whether the interpreter of this JAX cannot run tcgen05 products."""
    return not hasattr(gpu_callbacks, "tcgen05_mma")


def product_barriers(c: AttentionConfig, n: int) -> Any:
    """Barriers at which finished products arrive."""
    return plgpu.Barrier(num_barriers=n, orders_tensor_core=not c.interpreted)


def tensor_memory(c: AttentionConfig, width: int, dtype: Any) -> TensorMemory:
    """Tensor memory of a program for heads of `width` numbers of `dtype`."""
    transforms = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(4 * COLUMNS))
    memory = plgpu.SMEM if c.interpreted else plgpu.TMEM
    packed: dict[str, Any] = {} if c.interpreted else {"packed": True}
    return TensorMemory(
        scores=memory((ROWS, 2 * c.keys), jnp.float32),
        weights=memory((ROWS, 2 * c.keys), dtype, **packed),
        sum=memory((ROWS, width), jnp.float32),
        scores_full=product_barriers(c, 2),
        sum_full=product_barriers(c, 1),
        out=plgpu.SMEM((ROWS, COLUMNS), jnp.float32, transforms=transforms),
    )


def _read(c: AttentionConfig, ref: Any) -> Any:
    """Tensor memory into registers; when it returns, what was read may be overwritten."""
    if c.interpreted:
        return ref[...]
    x = plgpu.async_load_tmem(ref, layout=LAYOUT)
    plgpu.wait_load_tmem()
    return x


def _write(c: AttentionConfig, ref: Any, x: Any) -> None:
    """Registers into tensor memory; products see it after `plgpu.commit_tmem`."""
    if c.interpreted:
        ref[...] = x
    else:
        plgpu.async_store_tmem(ref, x)


def _start_product(
    c: AttentionConfig, out: Any, a: Any, b: Any, free: Any, done: Any, add: Any, transposed: bool = False
) -> None:
    """Starts out (+)= a b, or a b^T if `transposed`; at its end it arrives at `done`, and at `free` of b's tile."""
    if c.interpreted:
        before, tile = jnp.where(add, out[...], 0.0), b[...]
        out[...] = before + jnp.dot(
            a[...], tile.T if transposed else tile, preferred_element_type=jnp.float32
        )
        plgpu.barrier_arrive(free)
        plgpu.barrier_arrive(done)
    else:
        plgpu.tcgen05_mma(out, a, b.transpose((1, 0)) if transposed else b, free, accumulate=add)
        plgpu.tcgen05_commit_arrive(done)


def _column_parts(ref: Any) -> list[tuple[Any, Any]]:
    """(columns, view of them) of an array that is too wide for the registers."""
    cuts = [pl.ds(at, COLUMNS) for at in range(0, ref.shape[-1], COLUMNS)]
    return [(cut, ref.at[:, cut]) for cut in cuts]


# --- the program


def program(c: AttentionConfig, inputs: int, *refs: Any) -> None:
    """One program of the grid.

    Args:
        c: Static configuration.
        inputs: Number of inputs among `refs`.
        *refs: Queries, their ranges, bounds, the producer's sources; the output, its log-sum-exp; shared memory, tensor
            memory.
    """
    (q, edges, bounds, *sources), (out, lse, s, t) = refs[:inputs], refs[inputs:]
    warpgroup, tiles = jax.lax.axis_index("warpgroup"), key_tiles(c, bounds)
    pl.when(warpgroup == 0)(lambda: _compute(c, s, t, tiles, q, edges, out, lse))
    pl.when(warpgroup == 1)(lambda: produce(c, s, tiles, tuple(sources)))


def _compute(
    c: AttentionConfig,
    s: SharedMemory,
    t: TensorMemory,
    tiles: KeyTiles,
    q: Any,
    edges: Any,
    out: Any,
    lse: Any,
) -> None:
    """All steps of the computing warpgroup, and the store of its result."""
    pair, tile, split = (jax.lax.axis_index(name) for name in ("pair", "tile", "split"))
    rows = pl.ds(tile * ROWS, ROWS)
    plgpu.copy_gmem_to_smem(q.at[pair, rows], s.q, s.q_full.at[0])
    plgpu.copy_gmem_to_smem(edges.at[tiles.batch, :, rows], s.edges, s.q_full.at[0])
    plgpu.barrier_wait(s.q_full.at[0])
    pl.when(tiles.steps > 0)(lambda: _start_scores(c, s, t, jnp.int32(0)))
    full = lambda x: plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), PER_ROW)
    step = functools.partial(_step, c, s, t, tiles)
    peak, total = jax.lax.fori_loop(0, tiles.steps, step, (full(FLOOR), full(0.0)))
    pl.when(tiles.steps > 0)(lambda: plgpu.barrier_wait(t.sum_full.at[0]))
    safe = jnp.where(total > 0, total, 1.0)
    lse[split, pair, rows] = jnp.where(total > 0, peak * math.log(2) + jnp.log(safe), -jnp.inf)
    _store(c, t, jnp.where(total > 0, 1.0 / safe, 0.0), out.at[split, pair, rows])


def _store(c: AttentionConfig, t: TensorMemory, factor: Any, out: Any) -> None:
    """Writes sum * factor, and zeros where the factor is 0, because no product may have written there."""
    for columns, part in _column_parts(t.sum):
        sums = _read(c, part)
        factors = across_columns(factor, sums)
        plgpu.wait_smem_to_gmem(0)  # the part before has been copied
        t.out[...] = jnp.where(factors > 0, sums * factors, 0.0)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(t.out, out.at[:, columns])
    plgpu.wait_smem_to_gmem(0)


def _start_scores(c: AttentionConfig, s: SharedMemory, t: TensorMemory, i: Any) -> None:
    """Starts q k^T of step i, once its keys are loaded."""
    slot, half = jax.lax.rem(i, jnp.int32(c.stages)), jax.lax.rem(i, jnp.int32(2))
    plgpu.barrier_wait(s.k_full.at[slot])
    scores = t.scores.at[:, pl.ds(half * c.keys, c.keys)]
    free, done = s.k_free.at[slot], t.scores_full.at[half]
    _start_product(c, scores, s.q, s.k.at[slot], free, done, False, transposed=True)


def _step(
    c: AttentionConfig, s: SharedMemory, t: TensorMemory, tiles: KeyTiles, i: Any, carry: tuple[Any, Any]
) -> tuple[Any, Any]:
    """Adds the key tile of step i to the softmax.

    Args:
        c: Static configuration.
        s: Shared memory.
        t: Tensor memory.
        tiles: The program's key tiles.
        i: The step.
        carry: Maximum score so far of each row in units of log 2, and the sum of its weights.

    Returns:
        The carry of the next step.
    """
    (before, total), half = carry, jax.lax.rem(i, jnp.int32(2)) * c.keys
    plgpu.barrier_wait(t.scores_full.at[jax.lax.rem(i, jnp.int32(2))])
    found = [_read(c, part) for _, part in _column_parts(t.scores.at[:, pl.ds(half, c.keys)])]
    pl.when(i + 1 < tiles.steps)(lambda: _start_scores(c, s, t, i + 1))
    scaled = [scaled_scores(c, x) for x in found]
    mask = functools.partial(_mask_parts, s.edges, tiles.start(c, i), (tiles.first + i) * c.keys)
    scores = jax.lax.cond(is_unmasked(c, tiles, i), lambda *xs: xs, mask, *(x for x, _ in scaled))
    unit = scaled[0][1]
    peak = functools.reduce(jnp.maximum, [x.max(axis=1) * unit for x in scores], before)
    shrink = jnp.exp2(before - peak)
    total = total * shrink
    for x, (_, part) in zip(scores, _column_parts(t.weights.at[:, pl.ds(half, c.keys)]), strict=True):
        weights = jnp.exp2(x * unit - across_columns(peak, x))
        total = total + weights.sum(axis=1)
        _write(c, part, weights.astype(t.weights.dtype))
    _start_sum(c, s, t, tiles, i, shrink)
    return peak, total


def _mask_parts(edges: Any, begin: Any, own: Any, *scores: Any) -> tuple[Any, ...]:
    """`mask_scores` for the column parts of a tile."""
    width = scores[0].shape[1]
    return tuple(mask_scores(edges, begin + n * width, own, x, layout=LAYOUT) for n, x in enumerate(scores))


def _start_sum(
    c: AttentionConfig, s: SharedMemory, t: TensorMemory, tiles: KeyTiles, i: Any, shrink: Any
) -> None:
    """Starts sum = sum * shrink + weights v of step i, once the product before it is done."""

    @pl.when(i > 0)
    def _() -> None:
        plgpu.barrier_wait(t.sum_full.at[0])
        for _, part in _column_parts(t.sum):
            sums = _read(c, part)
            _write(c, part, sums * across_columns(shrink, sums))

    if not c.interpreted:
        plgpu.commit_tmem()  # what this warpgroup wrote is visible to the products that it starts from now on
    slot, half = jax.lax.rem(i, jnp.int32(c.stages)), jax.lax.rem(i, jnp.int32(2)) * c.keys
    plgpu.barrier_wait(s.v_full.at[slot])
    unmasked = is_unmasked(c, tiles, i)
    pl.when(jnp.logical_not(unmasked))(lambda: _clear(c, tiles, tiles.start(c, i), s.v.at[slot]))
    weights = t.weights.at[:, pl.ds(half, c.keys)]
    _start_product(c, t.sum, weights, s.v.at[slot], s.v_free.at[slot], t.sum_full.at[0], i > 0)


def _clear(c: AttentionConfig, tiles: KeyTiles, begin: Any, values: Any) -> None:
    """Clears the values of keys that no row attends to, if a tile may have such."""
    pl.when(jnp.logical_not(is_covered(c, tiles, begin)))(lambda: clear_values(c, tiles, begin, values))
