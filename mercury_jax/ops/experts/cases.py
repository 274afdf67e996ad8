"""Shapes of the choice of experts, of dispatch, and of grouped products."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax.ops.experts.grouped_matmul import grouped_form, grouped_matmul, offsets_of
from mercury_jax.ops.experts.op import Dispatched
from mercury_jax.ops.operation import Cases, KernelCheck, Op, beside_plain
from mercury_jax.ops.quantised_rows import quantise_rows
from mercury_jax.ops.tuned import GroupedKnobs
from mercury_jax.types import Device

BF16, FP16, INT8, FP8 = "bfloat16", "float16", "int8", "float8_e4m3fn"
EXPERTS = {"up": (2816, 1408), "down": (704, 2816)}  # of DiffusionGemma: [inputs, outputs] of a matrix


class RoutingShape(NamedTuple):
    """The choice of `active` of `experts` experts for each of `rows` tokens."""

    rows: int
    experts: int
    active: int

    form = "routing"

    def check(self, op: Op, device: Device | None = None) -> KernelCheck:
        """The kernel beside the plain computation: the weight of every expert, 0 for one that is not chosen."""

        def draw(key: Any) -> tuple[Any, ...]:
            keys = jax.random.split(key)
            logits = jnp.round(2 * jax.random.normal(keys[0], (self.rows, self.experts)), 1)  # many are equal
            return logits, jax.random.uniform(keys[1], (self.experts,), jnp.bfloat16, 0.5, 2.0)

        def spread(chosen: Any, logits: Any, factors: Any) -> Any:
            ids, weights = chosen
            return jnp.zeros_like(logits).at[jnp.arange(self.rows)[:, None], ids].set(weights)

        return beside_plain(op, draw, device, spread, active=self.active)


class DispatchShape(NamedTuple):
    """The hidden states [rows, width], dispatched to `active` of `experts` experts each."""

    rows: int
    width: int
    experts: int
    active: int
    rounded: str | None = None  # dtype of 8 bits of the hidden states

    form = "dispatch"

    def check(self, op: Op, device: Device | None = None) -> KernelCheck:
        """The kernel beside the plain computation: rows, places and offsets."""

        def draw(key: Any) -> tuple[Any, ...]:
            keys = jax.random.split(key)
            x = jax.random.normal(keys[0], (self.rows, self.width), jnp.bfloat16)
            # Id E: no expert of this device. Not all experts have rows.
            expert = jax.random.randint(keys[1], (self.rows, self.active), 0, self.experts + 1, jnp.int32)
            return x if self.rounded is None else quantise_rows(x, jnp.dtype(self.rounded)), expert // 2 * 2

        def one_hot(found: Dispatched, x: Any, expert: Any) -> Any:
            # One-hot, so that the next place is as wrong as any other.
            places = jnp.concatenate([found.rank.reshape(-1), found.offsets[: self.experts + 1]])
            return found.rows, jax.nn.one_hot(places, expert.size + 1)

        return beside_plain(op, draw, device, one_hot, count=self.experts)


class GroupedShape(NamedTuple):
    """A grouped product: `rows` rows over `experts` experts, unevenly, each times its expert's [inputs, outputs].

    With `gated`, the first half of the outputs is the gate of the second. With `rounded`, rows have 8 bits as well.

    Attributes:
        knobs: Settings of the Hopper kernel; None: those that calls have by default.
    """

    dtype: str
    rows: int
    experts: int
    inputs: int
    outputs: int
    gradient: bool = False
    gated: bool = False
    rounded: bool = False
    knobs: dict[str, int] | None = None

    @property
    def form(self) -> str:
        """As `grouped_form`."""
        return grouped_form(self.dtype, self.gradient, self.gated)

    def sizes(self, rng: np.random.Generator) -> np.ndarray:
        """Rows of each expert: one has none, one has many, and the first rows have all remainders modulo 8.

        One expert has all rows.
        """
        if self.experts == 1:
            return np.array([self.rows])
        few = np.full(min(self.experts - 2, 8), 9)
        rest = self.rows - int(few.sum())
        if self.experts <= 10:
            return np.array([*few, 0, rest])
        share = rng.dirichlet(np.full(self.experts - 9, 0.7))
        return np.array([*few, 0, *rng.multinomial(rest, share)])

    def prepared(self, key: Any, sizes: Any) -> tuple[Any, ...]:
        """Draws what `check` multiplies; what no row may read is NaN.

        Args:
            sizes: Rows of each expert [experts].

        Returns:
            (rows [rows + 5, inputs] or `QuantisedRows`, cotangent [rows + 5, outputs], matrices [experts, inputs,
            outputs], sizes, scales [experts, outputs] or None).
        """
        keys, kind, scale = jax.random.split(key, 4), jnp.dtype(self.dtype), None
        wide = kind if kind == jnp.float16 else jnp.bfloat16
        x = jax.random.normal(keys[0], (self.rows + 5, self.inputs), wide)
        x = x.at[self.rows :].set(jnp.nan)
        dy = jax.random.normal(keys[3], (self.rows + 5, self.outputs), jnp.bfloat16)
        shape = (self.experts, self.inputs, self.outputs)
        if kind == jnp.int8:
            w = jax.lax.bitcast_convert_type(jax.random.bits(keys[1], shape, jnp.uint8), jnp.int8)
        else:
            w = (jax.random.normal(keys[1], shape, wide) * self.inputs**-0.5).astype(kind)
        if kind.itemsize == 1:
            w = w.swapaxes(1, 2)
            scale = jax.random.uniform(keys[2], (self.experts, self.outputs), minval=0.005, maxval=0.02)
            scale = jnp.where(sizes[:, None] > 0, scale, jnp.nan)
        else:
            w = jnp.where(sizes[:, None, None] > 0, w, jnp.nan)
        return quantise_rows(x, kind) if self.rounded else x, dy, w, sizes, scale

    def check(self, op: Op, device: Device | None = None) -> KernelCheck:
        """The product, or the gradient of its rows, beside the plain one."""
        act = jax.nn.gelu if self.gated else None
        knobs = None if self.knobs is None else GroupedKnobs(**self.knobs)

        def kernel(x: Any, dy: Any, w: Any, sizes: Any, scale: Any) -> Any:
            x, row_scale = x if self.rounded else (x, None)
            how: Any = dict(row_scale=row_scale, act=act, knobs=knobs, device=device)
            product = lambda x: grouped_matmul(x, w, offsets_of(sizes), scale, **how)
            return (jax.vjp(product, x)[1](dy)[0] if self.gradient else product(x))[: self.rows]

        def reference(x: Any, dy: Any, w: Any, sizes: Any, scale: Any) -> Any:
            x, row_scale = x if self.rounded else (x, None)
            if self.gradient:  # the product with the transposed matrices
                return op.plain(dy, w.swapaxes(1, 2), offsets_of(sizes))[: self.rows]
            return op.plain(x, w, offsets_of(sizes), scale, row_scale=row_scale, act=act)[: self.rows]

        prepare = jax.jit(self.prepared)

        def inputs(seed: int) -> tuple[Any, Any]:
            sizes = np.asarray(self.sizes(np.random.default_rng(seed)), np.int32)
            return (args := prepare(jax.random.key(seed), sizes)), args

        sizes = jax.ShapeDtypeStruct((self.experts,), jnp.int32)
        like = jax.eval_shape(self.prepared, jax.eval_shape(jax.random.key, 0), sizes)
        return KernelCheck(kernel, reference, inputs, like)


def _products(**kind: Any) -> list[tuple[GroupedShape, float]]:
    """The product, its gated form, or the gradient of its rows (in bf16), for each dtype.

    The last sizes are of one matrix and the rows of one canvas, the dense products of a quantised model. Rows of 8 bits
    have the forms of their matrices.
    """
    sizes = (
        (200, 10, (128, 128)),
        (2048, 128, EXPERTS["down"]),
        (2048, 128, EXPERTS["up"]),
        (256, 1, (2816, 4224)),
    )
    dtypes = (BF16,) if kind.get("gradient") else (BF16, INT8, FP8)
    found = []
    for dtype, (rows, experts, matrix) in itertools.product(dtypes, sizes):
        shape = GroupedShape(dtype, rows, experts, *matrix, **kind)
        found += [shape] if dtype == BF16 else [shape, shape._replace(rounded=True)]
    return [(shape, 30.0) for shape in found]


def _compiled() -> list[Any]:
    """The widths of DiffusionGemma's experts, with few and with many rows for each."""
    found: list[Any] = []
    for rows, matrix, dtype in itertools.product((2048, 16384), EXPERTS.values(), (BF16, FP16, INT8, FP8)):
        shape = GroupedShape(dtype, rows, 128, *matrix)
        found += [shape, *[shape._replace(gated=True)] * (matrix == EXPERTS["up"])]
        found += [shape._replace(gradient=True)] * (dtype in (BF16, FP16))
    return found


def _tuned() -> list[tuple[str, GroupedShape, dict[str, tuple[int, ...]]]]:
    """Products of DiffusionGemma's layers, the most expensive first: those of experts, then of a canvas."""
    (up, down) = (dict(rows=2048, experts=128, inputs=i, outputs=o) for i, o in EXPERTS.values())
    products: list[tuple[str, dict[str, Any]]] = [
        ("experts up", up | {"gated": True}),
        ("experts down", down),
    ]
    # Attention's output in local and global layers, gate and up, down.
    for inputs, outputs in ((4096, 2816), (8192, 2816), (2816, 4224), (2112, 2816)):
        sizes = dict(rows=256, experts=1, inputs=inputs, outputs=outputs, gated=outputs == 4224)
        products.append(("dense", sizes))
    steps = {"depth": (64, 128, 192, 256), "stages": (4, 6, 8, 12), "workers": (1, 2)}
    tiles = {True: (32, 48, 64, 96, 128), False: (24, 32, 48, 64)}  # whether it is one expert
    # Dtypes of the matrices, and whether the rows have 8 bits too.
    kinds = ((FP8, True), (INT8, False), (BF16, False), (INT8, True), (FP8, False))
    return [
        (name, GroupedShape(dtype, rounded=rounded, **sizes), {"tile": tiles[sizes["experts"] == 1]} | steps)
        for (name, sizes), (dtype, rounded) in itertools.product(products, kinds)
    ]


_CHOSEN = ((256, 128, 8), (256, 512, 8))  # tokens, experts, experts of a token
_SMALL = GroupedShape(BF16, rows=34, experts=4, inputs=64, outputs=64)
CASES = {
    "grouped": Cases(
        GroupedShape,
        small=(_SMALL, _SMALL._replace(gradient=True), _SMALL._replace(dtype=INT8, outputs=128, gated=True)),
        checked=(*_products(), *_products(gated=True)),
        later=tuple(_products(gradient=True)),
        compiled=tuple(_compiled()),
        tuned=tuple(_tuned()),
        tuned_small=(("experts", GroupedShape(INT8, 24, 2, 64, 64), {"tile": (8, 16)}),),
    ),
    "routing": Cases(
        RoutingShape,
        small=(RoutingShape(5, 128, 3),),
        checked=tuple((RoutingShape(*sizes), 25.0) for sizes in _CHOSEN),
        compiled=tuple(RoutingShape(*sizes) for sizes in _CHOSEN),
    ),
    "dispatch": Cases(
        DispatchShape,
        small=(DispatchShape(16, 256, 24, 8),),
        checked=tuple(
            (DispatchShape(rows, 2816, experts, active), 25.0)
            for rows, experts, active in (*_CHOSEN, (32, 128, 8))  # fewer tokens than experts
        ),
        compiled=(
            DispatchShape(256, 2816, 128, 8), DispatchShape(256, 2816, 128, 8, INT8),
            DispatchShape(512, 2816, 512, 8), DispatchShape(32, 2816, 128, 8),
        ),
    ),
}  # fmt: skip
