"""grouped(): rows sorted by expert, each times its expert's matrix, few rows an expert."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mercury_jax.config import refuse
from mercury_jax.kernels import chip
from mercury_jax.kernels.checked import grouped_form
from mercury_jax.kernels.chip import BLACKWELL, HOPPER
from mercury_jax.kernels.tiles import plan, tile_of
from mercury_jax.types import Device

SMALL = (jnp.int8, jnp.float8_e4m3fn)
ROWS = 8  # TMA addresses the rows of x in groups of 8, so every load starts at a multiple of 8
MOST = 128  # rows of a tile: the accumulator of a block of 128 outputs then takes 128 registers a thread


def refuses(
    x: Any,
    w: Any,
    scale: Any = None,
    dtype: Any = None,
    tile: int | None = None,
    device: Device | None = None,
) -> str | None:
    """Why the kernel does not take x [M, I], w [E, I, O], scale [E, O] or None, and tile; None: it does.

    From shapes and dtypes alone (arrays or `jax.ShapeDtypeStruct`) and the chip that is traced for.
    """
    if chip.present(device) == BLACKWELL:
        return f"the kernel multiplies by wgmma, which {BLACKWELL} does not have: there, tiles go in a loop"
    if chip.present(device) != HOPPER:
        return f"the kernel is for {HOPPER}, not for {chip.present(device) or 'this machine'}"
    if x.dtype != jnp.bfloat16:
        return f"rows are {x.dtype}, not bfloat16"
    if w.dtype not in (jnp.bfloat16, *SMALL):
        return f"matrices are {w.dtype}, not bfloat16, int8 or float8_e4m3fn"
    if (w.dtype in SMALL) != (scale is not None):
        return "8-bit matrices have a scale, and no others have"
    if dtype is not None and dtype not in (jnp.bfloat16, jnp.float32):
        return f"out is {dtype}, neither bfloat16 nor float32"
    if w.shape[1] % 64 or w.shape[2] % 64:
        return f"a matrix is {w.shape[1]} by {w.shape[2]}, not in multiples of 64"
    if x.shape[0] == 0 or w.shape[0] == 0:
        return f"there are {x.shape[0]} rows and {w.shape[0]} experts"
    if tile is not None and (tile % ROWS or not 0 < tile <= MOST):
        return f"a tile has {tile} rows, no multiple of {ROWS} up to {MOST}"
    return chip.why_off(grouped_form(w.dtype), device)


def grouped(
    x: Float[Array, "M I"],
    w: Array,
    sizes: Int[Array, "E"],
    scale: Float[Array, "E O"] | None = None,
    dtype: Any = None,
    tile: int | None = None,
    device: Device | None = None,
) -> Float[Array, "M O"]:
    """y_m = x_m w_e (* scale_e), e the expert of row m: rows are sorted, `sizes` of each expert, sum(sizes) <= M.

    w [E, I, O]: bfloat16, or int8 or float8_e4m3fn with a scale. Sums in fp32; out in `dtype` (bfloat16 or float32;
    None: x's). Differentiable in x and in w; 8-bit matrices and their scales are constants. tile: rows of a tile, a
    multiple of 8 up to 128 (None: by `tile_of`). What rows behind the last expert's are given may be anything, and
    their gradient, too. M may be any number; where it is no multiple of 8, x is copied. ValueError where `refuses`
    has a reason. device: to compile for; None: the device of this machine.
    """
    why = refuses(x, w, scale, dtype, tile, device)
    if why is not None:
        raise refuse("x, w", f"{x.dtype}{list(x.shape)}, {w.dtype}{list(w.shape)}", f"others: {why}")
    # An expert's first tile may begin with up to 7 rows of the expert before.
    how = jnp.dtype(dtype or x.dtype), tile or tile_of(len(x) + (ROWS - 1) * len(sizes), len(sizes)), device
    return _grouped(how, x, w, sizes, scale)


def _each(scale: Float[Array, "E O"], sizes: Int[Array, "E"], rows: int) -> Float[Array, "M O"]:
    """The scale of each row's expert."""
    return scale[jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=rows)]


def _forward(
    how: tuple[Any, int, Device | None], x: Array, w: Array, sizes: Array, scale: Array | None
) -> tuple[Array, Any]:
    dtype, tile, device = how
    y = _product(x, w, sizes, dtype, tile, device)
    if scale is not None:
        y = (y * _each(scale, sizes, len(x))).astype(dtype)
    return y, (x, w, sizes, scale)


def _backward(how: tuple[Any, int, Device | None], saved: Any, dy: Float[Array, "M O"]) -> tuple[Any, ...]:
    """dx = dy w^T by the same kernel, or by a loop where that form did not pass; dw by `outer`."""
    (x, w, sizes, scale), (_, tile, device) = saved, how
    none = np.zeros(sizes.shape, jax.dtypes.float0)
    on = chip.why_off(grouped_form(w.dtype, gradient=True), device) is None
    turned = functools.partial(_product, device=device, turned=True) if on else _turned
    if scale is None:
        dy = dy.astype(x.dtype)
        return turned(dy, w, sizes, x.dtype, tile), outer(x, dy, sizes), none, None
    told = (dy * _each(scale, sizes, len(x))).astype(x.dtype)
    dx = turned(told, w, sizes, x.dtype, tile)
    return dx, np.zeros(w.shape, jax.dtypes.float0), none, jnp.zeros_like(scale)


_grouped = jax.custom_vjp(lambda *args: _forward(*args)[0], nondiff_argnums=(0,))
_grouped.defvjp(_forward, _backward)


def _product(
    x: Array, w: Array, sizes: Array, dtype: Any, tile: int, device: Device | None, turned: bool = False
) -> Float[Array, "M O"]:
    from mercury_jax.kernels import grouped_hopper  # where there is no GPU, nobody pays for Mosaic's import

    room = max(len(x) + -len(x) % ROWS, tile)
    visits = _visits(sizes, len(x), tile, room)
    padded = jnp.pad(x, ((0, room - len(x)), (0, 0)))
    return grouped_hopper.run(padded, w, visits, len(x), tile, turned, dtype, device)


def _turned(dy: Array, w: Array, sizes: Array, dtype: Any, tile: int) -> Float[Array, "M I"]:
    """dy_m w_e^T in plain jnp: a loop over tiles; what one writes over the next expert's rows is written again."""
    p, padded = plan(sizes, len(dy), tile), jnp.pad(dy, ((0, tile), (0, 0)))

    def step(i: Array, out: Array) -> Array:
        mine = jax.lax.dynamic_slice_in_dim(padded, p.start[i], tile)
        y = jnp.matmul(mine, w[p.expert[i]].astype(dy.dtype).T, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, y.astype(dtype), p.start[i], 0)

    return jax.lax.fori_loop(0, p.count, step, jnp.zeros((len(padded), w.shape[1]), dtype))[: len(dy)]


def _visits(sizes: Int[Array, "E"], rows: int, tile: int, room: int) -> Int[Array, "4 t"]:
    """Cuts each expert's rows into tiles: the expert, the first row to read, and the rows [low, high) to write.

    TMA sees x [M, I] as [M / 8, I / 64, 8, 64]. A load that starts within a group of 8 rows leaves the group's axis at
    its end, and is filled with zeros there: so an expert's tiles begin at the last multiple of 8 up to its first row.
    The rows that a tile reads beside its expert's are multiplied too and not written, since each row of the result
    depends on its own row alone; to fill every expert up to a multiple of 8 would copy all rows twice.

    Args:
        sizes: Rows of each expert.
        rows: Of all experts, at most.
        tile: Rows of a tile, a multiple of 8.
        room: Rows that may be read, a multiple of 8: no tile reaches past them.

    Returns:
        As many tiles as any sizes need. Those that these do not need write no row (low = high).
    """
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    bases = starts - starts % ROWS
    tiles = jnp.where(sizes > 0, -(-(ends - bases) // tile), 0)
    last = jnp.cumsum(tiles)
    # With k tiles an expert has more than (k - 1) * tile - 7 rows. Summed over the experts, or with k - 1 taken apart:
    more = min((rows + (ROWS - 2) * len(sizes)) // tile, rows // (tile - ROWS + 2))
    index = jnp.arange(min(len(sizes), rows) + more)
    expert = jnp.minimum((index[:, None] >= last).sum(-1), len(sizes) - 1)
    first = bases[expert] + (index - (last - tiles)[expert]) * tile
    used = index < last[-1]
    low = jnp.where(used, jnp.maximum(first, starts[expert]), 0)
    high = jnp.where(used, jnp.minimum(first + tile, ends[expert]), 0)
    return jnp.stack([expert, jnp.clip(first, 0, room - tile), low, high]).astype(jnp.int32)


def outer(x: Float[Array, "M I"], dy: Float[Array, "M O"], sizes: Int[Array, "E"]) -> Float[Array, "E I O"]:
    """sum over an expert's rows of x_m dy_m^T, for each expert, in fp32 and then in x's dtype: in plain jnp.

    An expert's tiles in a loop, in a loop over experts: nothing of the size of all matrices but the result.
    """
    tile = tile_of(len(x), len(sizes))
    xs, dys = (jnp.pad(a, ((0, tile), (0, 0))) for a in (x, dy))
    ends = jnp.cumsum(sizes)

    def one(e: Array) -> Float[Array, "I O"]:
        start = ends[e] - sizes[e]

        def step(i: Array, total: Array) -> Array:
            at = start + i * tile
            a, b = (jax.lax.dynamic_slice_in_dim(v, at, tile) for v in (xs, dys))
            a = jnp.where((at + jnp.arange(tile) < ends[e])[:, None], a, 0)
            return total + jnp.matmul(a.T, b, preferred_element_type=jnp.float32)

        total = jnp.zeros((x.shape[1], dy.shape[1]), jnp.float32)
        return jax.lax.fori_loop(0, -(-sizes[e] // tile), step, total).astype(x.dtype)

    return jax.lax.map(one, jnp.arange(len(sizes)))
