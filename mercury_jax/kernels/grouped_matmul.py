"""`grouped_matmul`: multiplies rows that are sorted by expert by the matrix of their expert; few rows per expert.

The kernel is `hopper.grouped_matmul`. This module decides whether the kernel supports a call, cuts the rows into tiles
of one expert each, and defines the gradient. `models.moe` calls it, and uses `tiles_of` for its loop in plain jnp.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mercury_jax.config import refuse
from mercury_jax.kernels import device as kernel_device
from mercury_jax.kernels.device import BLACKWELL, HOPPER, grouped_form
from mercury_jax.types import Device

QUANTISED = (jnp.int8, jnp.float8_e4m3fn)
ALIGN = 8  # TMA addresses the rows of x in groups of 8, so every load starts at a multiple of 8
# Maximum rows of a tile: with 128 rows, the accumulator of 128 outputs takes 128 registers per thread.
MAX_TILE = 128


# --- tiles of rows


def tile_rows(rows: int, count: int) -> int:
    """Chooses the rows per tile: a quarter more than the average of an expert, so that most experts need one tile.

    Each tile copies the matrices of its expert, so more tiles cost more; but rows of a tile that its expert does not
    fill are wasted. At 32 rows per expert, tiles of 32, 40, 48 and 64 rows took 11.8, 10.3, 10.7 and 12.6 ms per layer
    (16 experts, D = 512, F = 256, one CPU core).

    Args:
        rows: Number of rows of all experts.
        count: Number of experts.

    Returns:
        A multiple of 8 in 16..128.
    """
    quarter_more = -(-rows * 5 // (count * 4))
    return min(max(-(-quarter_more // 8) * 8, 16), 128)


class RowTiles(NamedTuple):
    """Tiles of sorted rows, each with rows of one expert; only the first `count` tiles are used."""

    expert: Int[Array, "t"]
    start: Int[Array, "t"]
    end: Int[Array, "t"]  # end of the expert's rows
    count: Int[Array, ""]


def tiles_of(sizes: Int[Array, "E"], rows: int, tile: int) -> RowTiles:
    """Cuts each expert's rows into tiles; the last tile of an expert may reach into the next expert's rows.

    Args:
        sizes: Rows of each expert.
        rows: Upper bound of sum(sizes); static.
        tile: Rows of a tile.

    Returns:
        The tiles. Their number is static: enough for any sizes.
    """
    ends, tiles = jnp.cumsum(sizes), -(-sizes // tile)
    last = jnp.cumsum(tiles)
    # At most one partly filled tile per expert.
    index = jnp.arange(rows // tile + len(sizes), dtype=jnp.int32)
    expert = jnp.minimum((index[:, None] >= last).sum(-1), len(sizes) - 1)
    start = (ends - sizes)[expert] + (index - (last - tiles)[expert]) * tile
    return RowTiles(expert, start, ends[expert], last[-1])


# --- the product


Shaped = Array | np.ndarray | jax.ShapeDtypeStruct


def refuses(
    x: Shaped,
    w: Shaped,
    scale: Shaped | None = None,
    dtype: DTypeLike | None = None,
    tile: int | None = None,
    device: Device | None = None,
) -> str | None:
    """Gives the reason why `grouped_matmul` does not support its arguments, from shapes, dtypes and the device.

    Args:
        x: Rows [M, I].
        w: Matrices [E, I, O].
        scale: Scales [E, O], as in `grouped_matmul`.
        dtype: Dtype of the result.
        tile: Rows of a tile.
        device: Device to compile for.

    Returns:
        The reason in words; None: it supports them.
    """
    kind = kernel_device.present(device)
    if kind == BLACKWELL:
        return f"the kernel multiplies by wgmma, which {BLACKWELL} does not have: there, tiles go in a loop"
    if kind != HOPPER:
        return f"the kernel is for {HOPPER}, not for {kind or 'this machine'}"
    if x.dtype != jnp.bfloat16:
        return f"rows are {x.dtype}, not bfloat16"
    if w.dtype not in (jnp.bfloat16, *QUANTISED):
        return f"matrices are {w.dtype}, not bfloat16, int8 or float8_e4m3fn"
    if (w.dtype in QUANTISED) != (scale is not None):
        return "8-bit matrices have a scale, and no others have"
    if dtype is not None and dtype not in (jnp.bfloat16, jnp.float32):
        return f"out is {dtype}, neither bfloat16 nor float32"
    if w.shape[1] % 64 or w.shape[2] % 64:
        return f"a matrix is {w.shape[1]} by {w.shape[2]}, not in multiples of 64"
    if x.shape[0] == 0 or w.shape[0] == 0:
        return f"there are {x.shape[0]} rows and {w.shape[0]} experts"
    if tile is not None and (tile % ALIGN or not 0 < tile <= MAX_TILE):
        return f"a tile has {tile} rows, no multiple of {ALIGN} up to {MAX_TILE}"
    return kernel_device.why_off(grouped_form(w.dtype), device)


def grouped_matmul(
    x: Float[Array, "M I"],
    w: Array,
    sizes: Int[Array, "E"],
    scale: Float[Array, "E O"] | None = None,
    dtype: DTypeLike | None = None,
    tile: int | None = None,
    device: Device | None = None,
) -> Float[Array, "M O"]:
    """Computes y_m = x_m w_e (* scale_e), where e is the expert of row m.

    Differentiable in x and w; 8-bit matrices and their scales are constants. If M is not a multiple of 8, x is copied.

    Args:
        x: Rows sorted by expert, bfloat16.
        w: Matrices [E, I, O]: bfloat16, or int8 or float8_e4m3fn with a scale.
        sizes: Number of rows of each expert, sum(sizes) <= M. Results and gradients of rows after sum(sizes) are
            undefined.
        scale: Scale of each output of 8-bit matrices; None for bfloat16.
        dtype: Dtype of the result, bfloat16 or float32; None: the dtype of x.
        tile: Rows of a tile, a multiple of 8 up to 128; None: `tile_rows`.
        device: Device to compile for; None: the device of this machine.

    Returns:
        The products [M, O], summed in fp32.

    Raises:
        ValueError: If `refuses` gives a reason.
    """
    why = refuses(x, w, scale, dtype, tile, device)
    if why is not None:
        raise refuse("x, w", f"{x.dtype}{list(x.shape)}, {w.dtype}{list(w.shape)}", f"others: {why}")
    # The first tile of an expert may begin with up to 7 rows of the expert before it (`_visits`).
    tile = tile or tile_rows(len(x) + (ALIGN - 1) * len(sizes), len(sizes))
    return _grouped((jnp.dtype(dtype or x.dtype), tile, device), x, w, sizes, scale)


Static = tuple[Any, int, Device | None]  # dtype of the result, rows of a tile, device


def _scaled(x: Float[Array, "M O"], scale: Array, sizes: Int[Array, "E"], dtype: Any) -> Float[Array, "M O"]:
    """Multiplies each row by the scales of its expert."""
    expert = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(x))
    return (x * scale[expert]).astype(dtype)


def _forward(static: Static, x: Array, w: Array, sizes: Array, scale: Array | None) -> tuple[Array, Any]:
    dtype, tile, device = static
    y = _kernel_product(x, w, sizes, dtype, tile, device)
    if scale is not None:
        y = _scaled(y, scale, sizes, dtype)
    return y, (x, w, sizes, scale)


def _backward(static: Static, saved: Any, dy: Float[Array, "M O"]) -> tuple[Any, ...]:
    """Computes dx = dy w^T with the same kernel, or with a loop if this form is off; and dw by `outer_products`."""
    (x, w, sizes, scale), (_, tile, device) = saved, static
    no_gradient = np.zeros(sizes.shape, jax.dtypes.float0)
    on = kernel_device.why_off(grouped_form(w.dtype, gradient=True), device) is None
    product = functools.partial(_kernel_product, device=device, transposed=True) if on else _loop_product
    if scale is None:
        dy = dy.astype(x.dtype)
        return product(dy, w, sizes, x.dtype, tile), outer_products(x, dy, sizes), no_gradient, None
    dx = product(_scaled(dy, scale, sizes, x.dtype), w, sizes, x.dtype, tile)
    return dx, np.zeros(w.shape, jax.dtypes.float0), no_gradient, jnp.zeros_like(scale)


_grouped = jax.custom_vjp(lambda *args: _forward(*args)[0], nondiff_argnums=(0,))
_grouped.defvjp(_forward, _backward)


def _kernel_product(
    x: Array, w: Array, sizes: Array, dtype: Any, tile: int, device: Device | None, transposed: bool = False
) -> Float[Array, "M O"]:
    from mercury_jax.kernels.hopper import (
        grouped_matmul as kernel,
    )  # here, because importing Mosaic takes time

    readable = max(len(x) + -len(x) % ALIGN, tile)
    visits = _visits(sizes, len(x), tile, readable)
    padded = jnp.pad(x, ((0, readable - len(x)), (0, 0)))
    return kernel.run(padded, w, visits, len(x), tile, transposed, dtype, device)


def _loop_product(dy: Array, w: Array, sizes: Array, dtype: Any, tile: int) -> Float[Array, "M I"]:
    """Computes dy_m w_e^T in plain jnp, in a loop over tiles.

    A tile may write wrong results to rows of the next expert, which the tiles of that expert overwrite.
    """
    tiles, padded = tiles_of(sizes, len(dy), tile), jnp.pad(dy, ((0, tile), (0, 0)))

    def step(i: Array, out: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(padded, tiles.start[i], tile)
        y = jnp.matmul(rows, w[tiles.expert[i]].astype(dy.dtype).T, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, y.astype(dtype), tiles.start[i], 0)

    start = jnp.zeros((len(padded), w.shape[1]), dtype)
    return jax.lax.fori_loop(0, tiles.count, step, start)[: len(dy)]


def _visits(sizes: Int[Array, "E"], rows: int, tile: int, readable: int) -> Int[Array, "4 t"]:
    """Cuts each expert's rows into tiles for the kernel.

    TMA addresses x [M, I] as [M / 8, I / 64, 8, 64]. A load that starts inside a group of 8 rows would reach past the
    end of the group's axis and get zeros there. The first tile of an expert therefore starts at the last multiple of 8
    that is not after the expert's first row. A tile also multiplies the rows of other experts that it reads, but does
    not write their results; this is correct because each row of the result depends only on the same row of x. The
    alternative, padding the rows of every expert to a multiple of 8, would copy all rows twice.

    Args:
        sizes: Rows of each expert.
        rows: Upper bound of sum(sizes); static.
        tile: Rows of a tile, a multiple of 8.
        readable: Number of rows that may be read, a multiple of 8; no tile reaches past them.

    Returns:
        For each tile: the expert, the first row to read, and the rows [low, high) to write. Their number is static and
        enough for any sizes; tiles that these sizes do not need write no row (low = high).
    """
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    bases = starts - starts % ALIGN
    tiles = jnp.where(sizes > 0, -(-(ends - bases) // tile), 0)
    last = jnp.cumsum(tiles)
    # An expert with k tiles has more than (k - 1) * tile - 7 rows. `more` bounds the sum of k - 1 over the experts in
    # two ways: by adding this inequality over all experts, or over the experts with k > 1 only.
    more = min((rows + (ALIGN - 2) * len(sizes)) // tile, rows // (tile - ALIGN + 2))
    index = jnp.arange(min(len(sizes), rows) + more)
    expert = jnp.minimum((index[:, None] >= last).sum(-1), len(sizes) - 1)
    first = bases[expert] + (index - (last - tiles)[expert]) * tile
    used = index < last[-1]
    low = jnp.where(used, jnp.maximum(first, starts[expert]), 0)
    high = jnp.where(used, jnp.minimum(first + tile, ends[expert]), 0)
    return jnp.stack([expert, jnp.clip(first, 0, readable - tile), low, high]).astype(jnp.int32)


def outer_products(
    x: Float[Array, "M I"], dy: Float[Array, "M O"], sizes: Int[Array, "E"]
) -> Float[Array, "E I O"]:
    """Computes the gradient of the matrices: for each expert, the sum of x_m dy_m^T over its rows, in plain jnp.

    The outer loop is over experts, the inner loop over the tiles of an expert, so that the result is the only array
    with the size of all matrices.

    Args:
        x: Rows sorted by expert.
        dy: Cotangent of the product.
        sizes: Rows of each expert.

    Returns:
        The gradients in the dtype of x, summed in fp32.
    """
    tile = tile_rows(len(x), len(sizes))
    padded_x, padded_dy = (jnp.pad(a, ((0, tile), (0, 0))) for a in (x, dy))
    ends = jnp.cumsum(sizes)

    def one_expert(e: Array) -> Float[Array, "I O"]:
        start = ends[e] - sizes[e]

        def step(i: Array, total: Array) -> Array:
            row = start + i * tile
            a, b = (jax.lax.dynamic_slice_in_dim(v, row, tile) for v in (padded_x, padded_dy))
            a = jnp.where((row + jnp.arange(tile) < ends[e])[:, None], a, 0)
            return total + jnp.matmul(a.T, b, preferred_element_type=jnp.float32)

        total = jnp.zeros((x.shape[1], dy.shape[1]), jnp.float32)
        return jax.lax.fori_loop(0, -(-sizes[e] // tile), step, total).astype(x.dtype)

    return jax.lax.map(one_expert, jnp.arange(len(sizes)))
