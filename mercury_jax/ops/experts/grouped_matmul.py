"""`grouped_matmul`: multiplies rows that are sorted by expert by the matrix of their expert; few rows per expert.

The kernel is `hopper.grouped_matmul`. This module decides whether it supports a call, and defines the gradient.
`models.moe` calls it for experts, and uses `tiles_of` for its loop in plain jnp; `models.ops` for the dense products of
a canvas, which are those of one expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mercury_jax.config import refuse
from mercury_jax.ops import device as kernel_device, tuned
from mercury_jax.ops.operation import Kernel, Op, device_code
from mercury_jax.ops.quantised_rows import refuse_gradient
from mercury_jax.ops.tuned import GroupedKnobs
from mercury_jax.types import Device

QUANTISED = (jnp.int8, jnp.float8_e4m3fn)
ALIGN = 8  # rows of the groups in which the kernel loads
# Maximum rows of a tile: with 128 rows, the accumulator of 128 outputs takes 128 registers per thread.
MAX_TILE = 128
FEW_ROWS = 384  # rows up to which a product waits for its matrix rather than for arithmetic
PROCESSORS = 132  # of an H100 and an H200
BLOCK = 64  # outputs of one matrix that a warpgroup multiplies by
ACTIVATIONS = (jax.nn.silu, jax.nn.gelu)  # those that the kernel computes; gelu is the approximation by tanh

Activation = Callable[[Array], Array]
Given = ParamSpec("Given")
Shaped = Array | np.ndarray | jax.ShapeDtypeStruct


# --- tiles of rows


def tile_rows(rows: int, count: int) -> int:
    """Chooses the rows per tile: a quarter more than the average of an expert, so that most experts need one tile.

    Each tile copies the matrices of its expert, so more tiles cost more; but rows of a tile that its expert does not
    fill are wasted. At 32 rows per expert, tiles of 32, 40, 48 and 64 rows took 11.8, 10.3, 10.7 and 12.6 ms per layer
    (16 experts, D = 512, F = 256, one CPU core).
    """
    quarter_more = -(-rows * 5 // (count * 4))
    return min(max(-(-quarter_more // 8) * 8, 16), 128)


def few_rows_tile(rows: int, outputs: int, itemsize: int, gated: bool = False) -> int:
    """Chooses the rows per tile of a product of few rows, so that all processors have work.

    A piece of work reads a tile of the rows and a block of the matrix; the time is that of the processor that reads
    most. 256 rows by 2,816 outputs are 44 pieces of 128 rows, but 132 pieces of 48 rows, each of which reads less.
    """
    tile = lambda count: -(-rows // (count * ALIGN)) * ALIGN
    blocks = outputs // (BLOCK if gated or outputs % (2 * BLOCK) else 2 * BLOCK)

    def bytes_read(count: int) -> int:
        return -(-count * blocks // PROCESSORS) * (2 * tile(count) + 2 * BLOCK * itemsize)

    return tile(min(range(-(-rows // MAX_TILE), -(-rows // ALIGN) + 1), key=bytes_read))


class Product(NamedTuple):
    """Sizes and dtypes of a product."""

    rows: int
    experts: int
    inputs: int
    outputs: int  # of the result
    gated: bool
    gradient: bool  # of the rows: 16-bit matrices are [out, in]
    x: Any  # dtypes of the rows, the matrices and the result
    w: Any
    out: Any

    @property
    def form(self) -> str:
        """The form, as in `ops.device`."""
        return grouped_form(self.w, self.gradient, self.gated)

    @property
    def shapes(self) -> str:
        """The bucket of shapes whose measured settings it shares."""
        rows = f"up to {tuned.bucket(self.rows)} rows of {jnp.dtype(self.x)}"
        return f"{rows} by {self.experts} x {self.inputs} x {self.outputs}"


def product_of(
    x: Shaped, matrices: Sequence[Shaped], dtype: DTypeLike, transposed: bool, act: Activation | None
) -> Product:
    """Describes a product."""
    experts, *axes = matrices[0].shape
    outputs, inputs = axes if transposed else reversed(axes)
    if act is not None and len(matrices) == 1:
        outputs //= 2
    gradient = transposed and jnp.dtype(matrices[0].dtype).itemsize > 1
    return Product(
        len(x), experts, inputs, outputs, act is not None, gradient, x.dtype, matrices[0].dtype, dtype
    )


def default_tile(p: Product, count: int) -> int:
    """Chooses the rows of a tile, where none were measured."""
    if count == 1:
        tile = few_rows_tile(p.rows, p.outputs, jnp.dtype(p.w).itemsize, p.gated)
    else:  # the first tile of an expert may begin with up to 7 rows of the expert before it
        tile = tile_rows(p.rows + (ALIGN - 1) * count, count)
    # Integer products of wgmma have no other widths.
    return -(-tile // 16) * 16 if p.x == jnp.int8 and tile > 32 else tile


class RowTiles(NamedTuple):
    """Tiles of sorted rows, each with rows of one expert; only the first `count` tiles are used."""

    expert: Int[Array, "t"]
    start: Int[Array, "t"]
    end: Int[Array, "t"]  # end of the expert's rows
    count: Int[Array, ""]


def offsets_of(sizes: Int[Array, "E"] | np.ndarray | Sequence[int]) -> Int[Array, "offsets"]:
    """Computes the first row of each expert, and the end of the last one's rows."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(jnp.asarray(sizes)).astype(jnp.int32)])


def tiles_of(offsets: Int[Array, "offsets"], rows: int, tile: int) -> RowTiles:
    """Cuts each expert's rows into tiles; the last tile of an expert may reach into the next expert's rows."""
    count = len(offsets) - 1
    starts, ends = offsets[:-1], offsets[1:]
    tiles = -(-(ends - starts) // tile)
    last = jnp.cumsum(tiles)
    # At most one partly filled tile per expert.
    index = jnp.arange(rows // tile + count, dtype=jnp.int32)
    expert = jnp.minimum((index[:, None] >= last).sum(-1), count - 1)
    start = starts[expert] + (index - (last - tiles)[expert]) * tile
    return RowTiles(expert, start, ends[expert], last[-1])


# --- the product

_kernel = functools.partial(device_code, "mercury_jax.ops.experts.hopper_grouped_matmul")


def grouped_form(dtype: DTypeLike, gradient: bool = False, gated: bool = False) -> str:
    """Names the form of the kernel for matrices of a dtype."""
    return f"grouped-{jnp.dtype(dtype)}" + "-gated" * gated + "-gradient" * gradient


def _refuses(
    x: Shaped,
    w: Shaped | tuple[Shaped, ...],
    offsets: Any = None,
    scale: Shaped | tuple[Shaped, ...] | None = None,
    *,
    act: Activation | None = None,
    dtype: DTypeLike | None = None,
    knobs: GroupedKnobs | None = None,
    **how: Any,
) -> str | None:
    matrices = w if isinstance(w, tuple) else (w,)
    if x.dtype != jnp.bfloat16 and (x.dtype not in QUANTISED or x.dtype != matrices[0].dtype):
        return f"rows are {x.dtype}, neither bfloat16 nor like matrices of 8 bits"
    if dtype is not None and dtype not in (jnp.bfloat16, jnp.float32):
        return f"out is {dtype}, neither bfloat16 nor float32"
    if knobs is not None and (knobs.tile % ALIGN or not 0 < knobs.tile <= MAX_TILE):
        return f"a tile has {knobs.tile} rows, no multiple of {ALIGN} up to {MAX_TILE}"
    if act is not None and act not in ACTIVATIONS:
        return f"the activation is {getattr(act, '__name__', act)}, not jax.nn.silu or jax.nn.gelu"
    # Of gate and up side by side twice as many.
    outputs = 128 if act is not None and len(matrices) == 1 else 64
    for one in matrices:
        if one.dtype not in (jnp.bfloat16, *QUANTISED):
            return f"matrices are {one.dtype}, not bfloat16, int8 or float8_e4m3fn"
        if (one.dtype in QUANTISED) != (scale is not None):
            return "8-bit matrices have a scale, and no others have"
        inputs, width = one.shape[1:] if scale is None else one.shape[:0:-1]
        if inputs % 64 or width % outputs:
            return f"a matrix is {inputs} by {width}, not in multiples of 64 by {outputs}"
        if x.shape[0] == 0 or one.shape[0] == 0:
            return f"there are {x.shape[0]} rows and {one.shape[0]} experts"
    return None


class Operands(NamedTuple):
    """The arrays of a product, as the kernel takes them.

    Attributes:
        x: Rows, bfloat16 or in the dtype of 8-bit matrices.
        row_scale: Scale of each row of 8 bits, or ().
        matrices: [E, I, O], or [E, O, I] of 8 bits: one; with a gate two, gate and up, of the same shape. The two may
            be one array of 2 O outputs, given once: the gate is its first half.
        scales: fp32 [E, O] of each matrix of 8 bits, or ().
        offsets: The rows of expert e are offsets[e] .. offsets[e + 1] - 1. Numbers after the first E + 1 are not read.
    """

    x: Float[Array, "M I"] | Int[Array, "M I"]
    row_scale: tuple[Float[Array, "M"], ...]
    matrices: tuple[Array, ...]
    scales: tuple[Array, ...]
    offsets: Int[Array, "offsets"]


class _Static(NamedTuple):
    """What a product is traced for."""

    dtype: Any  # of the result
    count: int  # experts that the rows are for
    knobs: GroupedKnobs | None
    act: Activation | None
    device: Device | None


class Prepared(NamedTuple):
    """A product that is ready to be launched, alone or with others."""

    static: _Static
    operands: Operands


def prepare(
    x: Float[Array, "M I"] | Int[Array, "M I"],
    w: Array | tuple[Array, Array],
    offsets: Int[Array, "offsets"],
    scale: Array | tuple[Array, Array] | None = None,
    *,
    row_scale: Float[Array, "M"] | None = None,
    act: Activation | None = None,
    dtype: DTypeLike | None = None,
    total: int | None = None,
    knobs: GroupedKnobs | None = None,
    device: Device | None = None,
) -> Prepared:
    """Prepares y_m = x_m w_e (* scale_e), where e is the expert of row m, or act(x_m gate_e) * (x_m up_e).

    Differentiable in x and w; 8-bit matrices and their scales are constants. If M is not a multiple of 8, x is copied.

    Args:
        w: Matrices [E, I, O] in bfloat16, or [E, O, I] in int8 or float8_e4m3fn with a scale. With `act` gate and up,
            two arrays or one of 2 O outputs with the gate first.
        offsets: The rows of expert e are offsets[e] .. offsets[e + 1] - 1; offsets[E] <= M. Results and gradients of
            rows from offsets[E] on are undefined. Numbers after the first E + 1 are not read.
    """
    why = GROUPED.refuses(x, w, offsets, scale, act=act, dtype=dtype, knobs=knobs, device=device)
    matrices = w if isinstance(w, tuple) else (w,)
    if why is not None:
        given = ", ".join(f"{a.dtype}{list(a.shape)}" for a in (x, *matrices))
        raise refuse("x, w", given, f"others: {why}")
    scales = scale if isinstance(scale, tuple) else () if scale is None else (scale,)
    static = _Static(jnp.dtype(dtype or jnp.bfloat16), total or matrices[0].shape[0], knobs, act, device)
    rows = () if row_scale is None else (row_scale,)
    return Prepared(static, Operands(x, rows, matrices, scales, offsets.astype(jnp.int32)))


def grouped_matmuls(*products: Prepared, joined: bool = False) -> list[Float[Array, "M O"]]:
    """Computes products in one launch of the kernel if they are alike, otherwise in one each."""
    if len({_alike(*product) for product in products}) == 1:
        return _grouped(*zip(*products, strict=True), joined)
    results = [_grouped((s,), (o,), False)[0] for s, o in products]
    return [jnp.concatenate(results, axis=1)] if joined else results


def _alike(static: _Static, o: Operands) -> tuple[Any, ...]:
    """What products of one launch have in common: dtypes, and all choices but the rows of a tile and the stages."""
    knobs = _knobs(static, o, bool(o.scales))
    return static._replace(count=0, knobs=None), o.x.dtype, o.matrices[0].dtype, knobs.workers, knobs.depth


def _forward(
    statics: tuple[_Static, ...], operands: tuple[Operands, ...], joined: bool
) -> tuple[list[Array], tuple[Operands, ...]]:
    return _launch(statics, operands, bool(operands[0].scales), joined), operands


def _backward(
    statics: tuple[_Static, ...], joined: bool, saved: tuple[Operands, ...], dys: list[Array]
) -> tuple[Any]:
    if joined:
        widths = [w.shape[1 if o.scales else 2] for o in saved for w in o.matrices]
        dys = jnp.split(dys[0], np.cumsum(widths)[:-1], axis=1)
    return (tuple(map(_gradients, statics, saved, dys)),)


def _gradients(static: _Static, saved: Operands, dy: Float[Array, "M O"]) -> Operands:
    """Computes dx = dy w^T with the same kernel, or with a loop if this form is off; and dw by `outer_products`."""
    x, row_scale, matrices, scales, offsets = saved
    refuse_gradient(bool(row_scale))
    no_gradient = np.zeros(offsets.shape, jax.dtypes.float0)
    offsets = offsets[: matrices[0].shape[0] + 1]
    dys, act = [dy], static.act
    if act is not None:  # gate and up projections are computed again
        operands = [Operands(x, (), (w,), scales[i : i + 1], offsets) for i, w in enumerate(matrices)]
        plain = static._replace(dtype=x.dtype, act=None, knobs=None)
        projected = jnp.concatenate(_launch((plain,) * len(operands), operands, bool(scales)), axis=-1)
        gated = lambda y: act(y[:, : y.shape[1] // 2]) * y[:, y.shape[1] // 2 :]
        dys = jnp.split(jax.vjp(gated, projected)[1](dy.astype(x.dtype))[0], len(matrices), axis=-1)
    dx, dws = jnp.zeros((), x.dtype), []
    for i, (w, dy) in enumerate(zip(matrices, dys, strict=True)):
        # Tensor cores read 8-bit matrices in one order of their axes only, which is that of the product.
        on = not scales and kernel_device.why_off(grouped_form(w.dtype, gradient=True), static.device) is None
        plain = static._replace(dtype=x.dtype, act=None, knobs=None)
        if scales:
            dy = _scaled(dy, scales[i], offsets, x.dtype)
            dws.append(np.zeros(w.shape, jax.dtypes.float0))
        else:
            dy = dy.astype(x.dtype)
            dws.append(outer_products(x, dy, offsets))
        if on:
            dx += _launch((plain,), (Operands(dy, (), (w,), (), offsets),), transposed=True)[0]
        else:
            back = w if scales else w.swapaxes(1, 2)
            dx += _loop_product(dy, back, offsets, x.dtype, tile_rows(len(dy), static.count))
    no_scales: Any = tuple(map(jnp.zeros_like, scales))
    return Operands(dx, (), tuple(dws), no_scales, no_gradient)  # pyright: ignore[reportArgumentType]


_grouped = jax.custom_vjp(lambda *args: _forward(*args)[0], nondiff_argnums=(0, 2))
_grouped.defvjp(_forward, _backward)


def grouped_matmul(*args: Any, **how: Any) -> Float[Array, "M O"]:
    """Computes the product that `prepare` prepares from the same arguments, alone in a launch."""
    return grouped_matmuls(prepare(*args, **how))[0]


def _scaled(
    x: Float[Array, "M O"], scale: Array, offsets: Int[Array, "offsets"], dtype: Any
) -> Float[Array, "M O"]:
    """Multiplies each row by the scales of its expert."""
    expert = jnp.repeat(jnp.arange(len(scale)), jnp.diff(offsets), total_repeat_length=len(x))
    return (x * scale[expert]).astype(dtype)


def _knobs(static: _Static, o: Operands, transposed: bool) -> GroupedKnobs:
    """The choices of a product: those that were asked for, or measured ones, or the heuristic's."""
    if static.knobs is not None:
        return static.knobs
    p = product_of(o.x, o.matrices, static.dtype, transposed, static.act)
    knobs = tuned.find(GroupedKnobs, p.form, p.shapes, static.device)
    if knobs is None or _kernel("unfit")(p, knobs) is not None:
        return _kernel("default_knobs")(p, default_tile(p, static.count))
    return knobs


def _launch(
    statics: Sequence[_Static], operands: Sequence[Operands], transposed: bool, joined: bool = False
) -> list[Float[Array, "M O"]]:
    knobs = tuple(_knobs(s, o, transposed) for s, o in zip(statics, operands, strict=True))

    def padded(knobs: GroupedKnobs, o: Operands) -> Operands:
        more = (0, max(len(o.x) + -len(o.x) % ALIGN, knobs.tile) - len(o.x))
        return o._replace(
            x=jnp.pad(o.x, (more, (0, 0))), row_scale=tuple(jnp.pad(a, more) for a in o.row_scale)
        )

    return _kernel("run")(
        tuple(map(padded, knobs, operands)), tuple(len(o.x) for o in operands), knobs, statics[0].dtype,
        transposed=transposed, act=statics[0].act, joined=joined, device=statics[0].device,
    )  # fmt: skip


def _loop_product(dy: Array, w: Array, offsets: Array, dtype: Any, tile: int) -> Float[Array, "M I"]:
    """Computes dy_m w_e, of matrices [E, O, I], in plain jnp, in a loop over tiles.

    A tile may write wrong results to rows of the next expert, which the tiles of that expert overwrite.
    """
    tiles, padded = tiles_of(offsets, len(dy), tile), jnp.pad(dy, ((0, tile), (0, 0)))

    def step(i: Array, out: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(padded, tiles.start[i], tile)
        y = jnp.matmul(rows, w[tiles.expert[i]].astype(dy.dtype), preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, y.astype(dtype), tiles.start[i], 0)

    start = jnp.zeros((len(padded), w.shape[2]), dtype)
    return jax.lax.fori_loop(0, tiles.count, step, start)[: len(dy)]


def outer_products(
    x: Float[Array, "M I"], dy: Float[Array, "M O"], offsets: Int[Array, "offsets"]
) -> Float[Array, "E I O"]:
    """Computes the gradient of the matrices: for each expert, the sum of x_m dy_m^T over its rows, in plain jnp.

    The loop over tiles has a static number of steps, so that a GPU runs it without waiting for the host. The result is
    the only array with the size of all matrices.
    """
    count = len(offsets) - 1
    tile = tile_rows(len(x), count)
    tiles = tiles_of(offsets, len(x), tile)
    padded_x, padded_dy = (jnp.pad(a, ((0, tile), (0, 0))) for a in (x, dy))

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        total, out = carry
        e, start = tiles.expert[i], tiles.start[i]
        # Steps from `tiles.count` on have no rows, and write the last expert's sum again.
        own = (start + jnp.arange(tile) < tiles.end[i])[:, None]
        a, b = (
            jnp.where(own, jax.lax.dynamic_slice_in_dim(v, start, tile), 0) for v in (padded_x, padded_dy)
        )
        product = jnp.matmul(a.T, b, preferred_element_type=jnp.float32)
        total = product + jnp.where(start == offsets[e], 0, total)  # an expert's first tile begins a sum
        return total, out.at[e].set(total.astype(out.dtype))

    zeros = (
        jnp.zeros((x.shape[1], dy.shape[1]), jnp.float32),
        jnp.zeros((count, x.shape[1], dy.shape[1]), x.dtype),
    )
    return jax.lax.fori_loop(0, len(x) // tile + count, step, zeros)[1]


# --- the operation


def multiply_by_expert(
    x: Float[Array, "M I"],
    w: Array,
    offsets: Int[Array, "offsets"],
    scale: Float[Array, "E O"] | None = None,
    *,
    row_scale: Float[Array, "M"] | None = None,
    act: Activation | None = None,
    **how: Any,
) -> Float[Array, "M F"]:
    """Computes y_m = x_m w_e in plain jnp and fp32, in a loop over the experts: the reference of the kernel."""
    count, rows = w.shape[0], x.astype(jnp.float32)
    rows = rows if row_scale is None else rows * row_scale[:, None]
    owner = jnp.searchsorted(offsets[1 : count + 1], jnp.arange(len(x)), side="right")

    def one(e: Array, out: Array) -> Array:
        matrix = w[e].astype(jnp.float32)
        y = rows @ (matrix if scale is None else matrix.T * scale[e])
        return jnp.where((owner == e)[:, None], y, out)

    width = w.shape[2 if scale is None else 1]
    y = jax.lax.fori_loop(0, count, one, jnp.zeros((len(x), width)))
    if act is None:
        return y
    gate, up = jnp.split(y, 2, axis=-1)
    return act(gate) * up


GROUPED = Op(
    "grouped",
    multiply_by_expert,
    {"hopper": Kernel(_refuses, grouped_matmul, plain_gradient=False)},
    lambda x, w, *more, act=None, **how: grouped_form(jax.tree.leaves(w)[0].dtype, gated=act is not None),
    fallback="tiles of rows in a loop, by XLA",
    cases="mercury_jax.ops.experts.cases",
)
