"""`grouped_matmul`: rows sorted by expert, each multiplied by its expert's matrix, with few rows per expert.

The kernel is `hopper.grouped_matmul`. This module decides whether it takes a call, cuts the rows into tiles of one
expert each, and defines the gradient. `models.moe` uses it, and uses `tiles_of` for its own loop in plain jnp.
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
# Rows of a tile: the accumulator of a block of 128 outputs then takes 128 registers per thread.
MAX_TILE = 128


# --- tiles of rows


def tile_rows(rows: int, count: int) -> int:
    """Rows of a tile: a quarter more than an expert has on average, so that most experts need one tile.

    A tile costs a copy of its expert's matrices, and products of few rows are slow: at 32 rows per expert tiles of 32,
    40, 48 and 64 took 11.8, 10.3, 10.7 and 12.6 ms per layer (16 experts, D = 512, F = 256, one CPU core).

    Args:
        rows: Of all experts.
        count: Number of experts.

    Returns:
        A multiple of 8 in 16..128.
    """
    quarter_more = -(-rows * 5 // (count * 4))
    return min(max(-(-quarter_more // 8) * 8, 16), 128)


class RowTiles(NamedTuple):
    """Tiles of sorted rows, each of one expert; those from `count` on are not used."""

    expert: Int[Array, "t"]
    start: Int[Array, "t"]
    end: Int[Array, "t"]  # of the expert's rows
    count: Int[Array, ""]


def tiles_of(sizes: Int[Array, "E"], rows: int, tile: int) -> RowTiles:
    """Cuts each expert's rows into tiles; the last tile of an expert may reach into the next expert's rows.

    Args:
        sizes: Rows of each expert.
        rows: Of all experts, at most.
        tile: Rows of a tile.

    Returns:
        As many tiles as any sizes need.
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
    """Why `grouped_matmul` does not take its arguments. Reads shapes, dtypes and the device alone.

    Args:
        x: Rows [M, I].
        w: Matrices [E, I, O].
        scale: As in `grouped_matmul`, [E, O]; likewise the others.
        dtype: Of the result.
        tile: Rows of a tile.
        device: To compile for.

    Returns:
        The reason in words; None: it takes them.
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
    """y_m = x_m w_e (* scale_e), where e is the expert of row m.

    Differentiable in x and w; 8-bit matrices and their scales are constants. If M is no multiple of 8, x is copied.

    Args:
        x: Rows sorted by expert, bfloat16.
        w: Matrices [E, I, O]: bfloat16, or int8 or float8_e4m3fn with a scale.
        sizes: Rows of each expert, sum(sizes) <= M. Rows behind the last expert's get anything, their gradient too.
        scale: Of each output of 8-bit matrices; None otherwise.
        dtype: Of the result, bfloat16 or float32; None: that of x.
        tile: Rows of a tile, a multiple of 8 up to 128; None: `tile_rows`.
        device: To compile for; None: the device of this machine.

    Returns:
        [M, O], summed in fp32.

    Raises:
        ValueError: If `refuses` has a reason.
    """
    why = refuses(x, w, scale, dtype, tile, device)
    if why is not None:
        raise refuse("x, w", f"{x.dtype}{list(x.shape)}, {w.dtype}{list(w.shape)}", f"others: {why}")
    # An expert's first tile may begin with up to 7 rows of the expert before it.
    tile = tile or tile_rows(len(x) + (ALIGN - 1) * len(sizes), len(sizes))
    return _grouped((jnp.dtype(dtype or x.dtype), tile, device), x, w, sizes, scale)


Static = tuple[Any, int, Device | None]  # dtype of the result, rows of a tile, device


def _scaled(x: Float[Array, "M O"], scale: Array, sizes: Int[Array, "E"], dtype: Any) -> Float[Array, "M O"]:
    """Rows times the scale of their expert."""
    expert = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(x))
    return (x * scale[expert]).astype(dtype)


def _forward(static: Static, x: Array, w: Array, sizes: Array, scale: Array | None) -> tuple[Array, Any]:
    dtype, tile, device = static
    y = _kernel_product(x, w, sizes, dtype, tile, device)
    if scale is not None:
        y = _scaled(y, scale, sizes, dtype)
    return y, (x, w, sizes, scale)


def _backward(static: Static, saved: Any, dy: Float[Array, "M O"]) -> tuple[Any, ...]:
    """dx = dy w^T by the same kernel, or by a loop if that form did not pass its check; dw by `outer_products`."""
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
    """dy_m w_e^T in plain jnp, a loop over tiles. What a tile writes to the next expert's rows is written again."""
    tiles, padded = tiles_of(sizes, len(dy), tile), jnp.pad(dy, ((0, tile), (0, 0)))

    def step(i: Array, out: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(padded, tiles.start[i], tile)
        y = jnp.matmul(rows, w[tiles.expert[i]].astype(dy.dtype).T, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, y.astype(dtype), tiles.start[i], 0)

    start = jnp.zeros((len(padded), w.shape[1]), dtype)
    return jax.lax.fori_loop(0, tiles.count, step, start)[: len(dy)]


def _visits(sizes: Int[Array, "E"], rows: int, tile: int, readable: int) -> Int[Array, "4 t"]:
    """Cuts each expert's rows into tiles for the kernel.

    TMA sees x [M, I] as [M / 8, I / 64, 8, 64]. A load that starts within a group of 8 rows leaves the group's axis at
    its end and is filled with zeros there, so an expert's tiles begin at the last multiple of 8 up to its first row.
    The rows that a tile reads beside its expert's are multiplied too and not written, because each row of the result
    depends on its own row alone. Padding every expert to a multiple of 8 would copy all rows twice.

    Args:
        sizes: Rows of each expert.
        rows: Of all experts, at most.
        tile: Rows of a tile, a multiple of 8.
        readable: Rows that may be read, a multiple of 8: no tile reaches past them.

    Returns:
        For each tile the expert, the first row to read, and the rows [low, high) to write. As many tiles as any sizes
        need; those that these sizes do not need write no row (low = high).
    """
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    bases = starts - starts % ALIGN
    tiles = jnp.where(sizes > 0, -(-(ends - bases) // tile), 0)
    last = jnp.cumsum(tiles)
    # With k tiles an expert has more than (k - 1) * tile - 7 rows. Bound the sum of k - 1 over the experts by the sum
    # over all experts, or by counting experts with k > 1 alone:
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
    """The gradient of the matrices: for each expert the sum over its rows of x_m dy_m^T, in plain jnp.

    A loop over an expert's tiles within a loop over experts: no array of the size of all matrices but the result.

    Args:
        x: Rows sorted by expert.
        dy: Cotangent of the product.
        sizes: Rows of each expert.

    Returns:
        Summed in fp32, in the dtype of x.
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
