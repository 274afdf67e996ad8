"""Shapes of residual norms, of rounded rows, and of head norms with RoPE and the cache write."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mercury_jax.ops.experts.op import ExpertOutputs
from mercury_jax.ops.norms.op import HeadFactors, Projections, Residual
from mercury_jax.ops.operation import Cases, KernelCheck, Op, beside_plain
from mercury_jax.types import Device

ROUNDED = ("int8", "float8_e4m3fn")


class NormShape(NamedTuple):
    """Two branches of a layer with their norms, added to `rows` hidden states; and three norms of the sum.

    Attributes:
        active: Experts of each token, whose outputs the second branch combines; 0: it is an array.
        rounded: Dtype of 8 bits to which the first and the third norm are rounded; None: none is.
    """

    rows: int
    width: int
    active: int = 0
    rounded: str | None = None

    form = "norm"

    def check(self, op: Op, device: Device | None = None) -> KernelCheck:
        """The kernel beside the plain computation."""

        def draw(key: Any) -> tuple[Any, ...]:
            keys = iter(jax.random.split(key, 13))
            draw = lambda rows: jax.random.normal(next(keys), (rows, self.width), jnp.bfloat16)
            hidden: list[Any] = [draw(self.rows) for _ in range(3)]
            if self.active:
                routed = (self.rows, self.active)
                rank = jax.random.permutation(next(keys), self.rows * self.active).reshape(routed)
                weights = jax.random.uniform(next(keys), routed)
                hidden[2] = ExpertOutputs(draw(rank.size), rank, weights)
            factors = [1 + 0.3 * jax.random.normal(next(keys), (self.width,), jnp.bfloat16) for _ in range(6)]
            scales = jnp.full((1,), 0.7, jnp.bfloat16), jnp.full((1,), 1.9, jnp.bfloat16)
            choice = jax.random.bernoulli(next(keys), 0.5, (self.rows,))
            residual = Residual(tuple(hidden[1:]), tuple(factors[:2]), factors[2], scales, choice)
            return hidden[0], residual, factors[3:]

        dtype = None if self.rounded is None else jnp.dtype(self.rounded)
        rounded = () if dtype is None else (dtype, None, dtype)
        return beside_plain(op, draw, device, eps=1e-6, rounded=rounded)


class RowsShape(NamedTuple):
    """Rows that are rounded to 8 bits."""

    rows: int
    width: int
    rounded: str

    form = "norm"

    def check(self, op: Op, device: Device | None = None) -> KernelCheck:
        """The kernel beside the plain computation."""
        draw = lambda key: (jax.random.normal(key, (self.rows, self.width), jnp.bfloat16),)
        return beside_plain(op, draw, device, dtype=jnp.dtype(self.rounded))


class HeadsShape(NamedTuple):
    """Head norms, RoPE and the cache write of two rows of `t` tokens.

    Attributes:
        width: Head size.
        t: Tokens of a row, of which the last two are not written.
        h, g: Query heads, key heads; with fewer than 4 key heads the keys are the values.
        s: Slots of a row, a ring.
    """

    width: int
    t: int
    h: int
    g: int
    s: int

    form = "heads"

    def check(self, op: Op, device: Device | None = None) -> KernelCheck:
        """The kernel beside the plain computation."""

        def draw(key: Any) -> tuple[Any, ...]:
            keys = iter(jax.random.split(key, 12))
            normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.bfloat16)
            counts = [self.h, self.g, self.g][: 3 if self.g > 3 else 2]
            products = [normal(2, self.t, n, self.width) for n in counts]
            x = Projections(products[0], products[1], products[2] if len(products) > 2 else None)
            factors = HeadFactors(1 + 0.3 * normal(self.width), 1 + 0.3 * normal(self.width))
            angle = jax.random.uniform(next(keys), (2, self.t, 1, self.width // 2), maxval=6.3)
            kv = normal(2, self.s, self.g, self.width), normal(2, self.s, self.g, self.width)
            column = jnp.arange(self.t)
            slots = jnp.where(column < self.t - 2, (column + self.s - 3) % self.s, self.s + column)
            return x, factors, (jnp.cos(angle), jnp.sin(angle)), kv, jnp.tile(slots, (2, 1))

        return beside_plain(op, draw, device, eps=1e-6)


# Hidden states and heads of the layers of DiffusionGemma, and others.
CASES = {
    "norm": Cases(
        NormShape,
        small=(NormShape(5, 256), NormShape(5, 256, active=3)),
        checked=tuple(
            (NormShape(rows, width, active), 25.0)
            for rows, width, active in ((3, 256, 0), (256, 2816, 0), (1024, 4096, 0), (256, 2816, 8))
        ),
        compiled=(
            NormShape(256, 2816), NormShape(256, 2816, 8), *(NormShape(256, 2816, rounded=r) for r in ROUNDED)
        ),
    ),
    "rows": Cases(
        RowsShape,
        small=(RowsShape(6, 704, "int8"),),
        compiled=tuple(
            RowsShape(*sizes, kind) for kind in ROUNDED for sizes in ((256, 4096), (256, 2112), (2048, 704))
        ),
    ),
    "heads": Cases(
        HeadsShape,
        small=(HeadsShape(width=256, t=5, h=2, g=1, s=9),),
        checked=tuple(
            (HeadsShape(*sizes), 25.0)
            # The last ones are tokens that are no whole tile.
            for sizes in ((256, 256, 16, 8, 2048), (512, 256, 16, 2, 512), (256, 37, 12, 4, 64))
        ),
        compiled=(HeadsShape(256, 256, 16, 8, 8192), HeadsShape(512, 256, 16, 2, 8192)),
    ),
}  # fmt: skip
