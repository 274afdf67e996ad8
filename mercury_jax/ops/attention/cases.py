"""Shapes of attention over a cache, and of attention with its gradient."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax.ops.attention.inputs import AttentionCall, Int8Vectors, dequantise, quantise_int8
from mercury_jax.ops.attention.op import attend
from mercury_jax.ops.operation import Cases, KernelCheck, Op, device_code
from mercury_jax.ops.tuned import AttentionKnobs
from mercury_jax.types import Device

BF16, FP16 = "bfloat16", "float16"
WIDTHS = (64, 128, 256, 512)  # head sizes


class AttentionShape(NamedTuple):
    """A call of `attend`, or of `attend` with its gradient.

    Attributes:
        width: Head size.
        b, t, h: Rows, queries of a row, query heads.
        g, s: Key heads, keys of a row.
        r: Ranges of each query.
        int8: Whether keys and values are int8.
        softcap: Cap of the scores; None for none.
        gradient: Whether the result has gradients, too: the call is one without a cache.
        knobs: Settings of the Hopper kernel; None: those that calls have by default.
        full: Whether every query attends to all keys.
    """

    width: int
    b: int = 1
    t: int = 8
    h: int = 16
    g: int = 2
    s: int = 1024
    r: int = 2
    dtype: str = BF16
    int8: bool = False
    softcap: float | None = None
    gradient: bool = False
    knobs: dict[str, int] | None = None
    full: bool = False

    @property
    def form(self) -> str:
        """As `attention_form`."""
        kinds = {"int8": self.int8, "softcap": self.softcap is not None, "gradient": self.gradient}
        parts = ["attention", str(self.width), self.dtype, *(kind for kind, is_so in kinds.items() if is_so)]
        return "-".join(parts)

    def drawn(self, seed: int) -> tuple[Any, ...]:
        """Draws the inputs: a prefix, a gap that no query sees, ranges that grow from query to query; some queries see
        nothing.

        Returns:
            Queries [b, t, h, width], keys and values [b, s, g, width], which keys are seen [b, s], and ranges
            [b, t, r, 2].
        """
        rng, ranges = np.random.default_rng(seed), np.zeros((self.b, self.t, self.r, 2), np.int32)
        prefix = self.s // 3 + np.arange(self.b)[:, None] * 3 % (self.s // 8)
        ranges[:, :, 0] = np.stack([np.arange(self.b)[:, None] * 5 % (self.s // 4), prefix], axis=-1)
        for i in range(1, self.r):
            start = prefix + 7 + self.s // 4 * (i - 1)
            end = start + 1 + np.arange(self.t) * 3 % (self.s // 5)
            ranges[:, :, i] = np.stack(np.broadcast_arrays(start, end), axis=-1)
        ranges[:, 3::7] = 0
        if self.t > 1:
            ranges[:, -1] = 0
        if self.full:
            ranges[:], ranges[:, :, 0, 1] = 0, self.s
        see = ((np.arange(self.s) >= ranges[..., :1]) & (np.arange(self.s) < ranges[..., 1:])).any((1, 2))
        draw = lambda n, heads: rng.standard_normal((self.b, n, heads, self.width), np.float32)
        return draw(self.t, self.h), draw(self.s, self.g), draw(self.s, self.g), see, ranges

    def prepared(self, q: Any, k: Any, v: Any, see: Any, ranges: Any) -> tuple[Any, Any]:
        """(arrays of the kernel, of the reference). Unseen keys are 0, and NaN in the first if there is no gradient."""
        q, k, v = (x.astype(self.dtype) for x in (q, k, v))
        clean, poisoned = [], []
        for x in (k, v):
            x = jnp.where(see[:, :, None, None], x, 0)
            if self.int8:
                bits = quantise_int8(x)
                clean.append(dequantise(bits, jnp.float32))
                poisoned.append(Int8Vectors(bits.values, jnp.where(see[:, :, None], bits.scale, jnp.nan)))
            else:
                clean.append(x.astype(jnp.float32))
                poisoned.append(x if self.gradient else jnp.where(see[:, :, None, None], x, jnp.nan))
        return (q, *poisoned, ranges), (q.astype(jnp.float32), *clean, ranges)

    def abstract(self) -> tuple[Any, ...]:
        """The shapes of the kernel's arguments."""
        like = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
        q, k = (like(self.b, n, heads, self.width) for n, heads in ((self.t, self.h), (self.s, self.g)))
        ranges = like(self.b, self.t, self.r, 2, dtype=jnp.int32)
        return jax.eval_shape(self.prepared, q, k, k, like(self.b, self.s, dtype=jnp.bool_), ranges)[0]

    def check(self, op: Op, device: Device | None = None) -> KernelCheck:
        """The kernel beside the reference."""
        how: dict[str, Any] = dict(scale=self.width**-0.5, softcap=self.softcap, residual=True)
        kernel = functools.partial(attend, backend=op.backend(device), device=device, **how)
        reference = functools.partial(attend, backend="reference", **how)
        if self.gradient:
            kernel, reference = (functools.partial(_graded, one) for one in (kernel, reference))
        if self.knobs is not None:
            run, knobs = device_code("mercury_jax.ops.attention.hopper", "run"), AttentionKnobs(**self.knobs)
            kernel = lambda *arrays: run(AttentionCall(*arrays, **how, device=device), knobs=knobs)
        prepare = jax.jit(self.prepared)
        plain = reference if self.gradient else None
        return KernelCheck(
            kernel, reference, lambda seed: prepare(*self.drawn(seed)), self.abstract(), plain
        )  # fmt: skip


def _graded(attend: Any, q: Any, k: Any, v: Any, ranges: Any) -> Any:
    """Output, log-sum-exp and the gradients of both, whose cotangents are the queries in reverse order."""
    found, back = jax.vjp(lambda q, k, v: attend(q, k, v, ranges), q, k, v)
    turned = jnp.flip(q, axis=1)
    return *found, *back((turned, turned[..., 0].astype(jnp.float32)))


def _over_a_cache(**kind: Any) -> list[tuple[AttentionShape, float]]:
    """The shapes of one kind of form (int8 keys, soft-cap, fp16; none for plain bf16) for each head size."""
    found = []
    for width in WIDTHS:
        if width == 512 and "int8" in kind:
            continue  # the kernel's shared memory has no room to convert them
        shape = functools.partial(AttentionShape, width, **kind)
        groups = {256: 8, 512: 2}.get(width, 4)
        shapes = [
            shape(b=1, t=8, h=4, g=2, s=256, r=1),  # few rows, so that the keys are split
            # Gaps, three ranges, and a last tile of rows that is not full.
            shape(b=2, t=40, h=16, g=groups, s=1152, r=3),
        ]
        if not kind:  # a batch of canvases, where nothing is split
            shapes.append(shape(b=8, t=256, h=16, g=groups, s=2048, r=2))
        # The widest takes several times as long to compile.
        found += [(one, 45.0 if width == 512 else 25.0) for one in shapes]
    return found


def _with_gradient() -> Iterator[tuple[AttentionShape, float]]:
    """The shapes with a gradient, for each head size that has one."""
    for width, softcap in ((64, None), (128, None), (256, None), (64, 30.0), (256, 30.0)):
        shape = functools.partial(AttentionShape, width, softcap=softcap, gradient=True)
        yield shape(b=1, t=200, h=4, g=2, s=210, r=1), 40.0  # lengths that are no multiple of a tile
        yield shape(b=2, t=1000, h=12, g=4, s=1152, r=3), 40.0  # gaps, and more tiles than in flight


def _compiled() -> Iterator[AttentionShape]:
    """Head sizes x dtypes x int8 keys x ranges, for few query rows (one warpgroup, keys split), for more (two
    warpgroups, keys split) and for many; every fifth form has a soft-cap."""
    sizes = itertools.product(WIDTHS, (BF16, FP16), (False, True), (1, 6), (8, 128, 512))
    for n, (width, dtype, int8, ranges, queries) in enumerate(sizes):
        batch = 8 if queries == 512 else 1  # with many rows keys are not split
        shape = AttentionShape(width, batch, queries, s=8192, r=ranges, dtype=dtype, int8=int8)
        yield shape._replace(softcap=30.0 if n % 5 == 0 else None)


_KNOBS = {"splits": (1, 2, 4, 8), "workers": (1, 2), "keys": (64, 128), "stages": (2, 3, 4)}
_TINY: Any = dict(b=1, t=3, h=2, g=1, s=128, r=2)
CASES = {
    "attention": Cases(
        AttentionShape,
        small=(
            AttentionShape(64, **_TINY), AttentionShape(64, **_TINY, int8=True), AttentionShape(512, **_TINY)
        ),
        checked=tuple(_over_a_cache()),
        later=(*_over_a_cache(int8=True), *_over_a_cache(softcap=30.0), *_over_a_cache(dtype=FP16)),
        compiled=tuple(_compiled()),
        tuned=tuple(  # a canvas of DiffusionGemma, in local and in global layers
            ("attention", AttentionShape(width, 1, 256, 16, g, s, full=True), _KNOBS)
            for s in (2048, 8192) for width, g in ((256, 8), (512, 2))
        ),
        tuned_small=(("attention", AttentionShape(64, 1, 4, 1, 1, 256, full=True), {"splits": (1, 2)}),),
    ),
    "attention with its gradient": Cases(
        AttentionShape,
        # A length that is no multiple of a tile.
        small=(AttentionShape(64, **_TINY | {"s": 70}, gradient=True),),
        later=tuple(_with_gradient()),
        compiled=tuple(
            AttentionShape(width, 2, 2048, g=4, s=2048, r=ranges, softcap=softcap, gradient=True)
            for width in WIDTHS for ranges in (1, 2, 3) for softcap in (None, 30.0)
        ),
    ),
}  # fmt: skip
