"""Attention in tiles with a gradient: each tile of queries meets only the tiles of keys that some row of it sees.

In training a document stands in its row twice, as clean tokens and as canvases (BD3-LM, arXiv 2503.09573), and rows
are packed: about a quarter of all pairs of positions see each other. What is seen is read from the ranges on the
device, so that packed documents, prompts of any length and short canvases are exact; the two parts of a canvas's
view, the clean tokens before it and itself, meet in one running softmax. Its log-sum-exp is kept, and the backward
pass is FlashAttention's (arXiv 2205.14135; 2307.08691): scores are made again, tile by tile, and no array has both
axes of the scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.kernels.reference import capped
from mercury_jax.kernels.rounded import Rounded
from mercury_jax.types import wide

# Rows, and keys, of a tile. Small ones waste little at the borders of what is seen, and stay in a core's cache; an
# accelerator starts as many kernels for a small one as for a large one.
ON_CPU, ELSEWHERE = 64, 256
# Queries, and keys. Values and gradients at 256, 512, 1024 and 2048 positions took 0.23, 0.20, 0.14 and 0.19 of the
# reference's time on two CPU cores (a document as clean tokens and canvases, 12 heads of 64 on 4 key heads).
LEAST = 256


class How(NamedTuple):
    """What a call is compiled for."""

    scale: float
    softcap: float | None
    size: int = ON_CPU  # rows, and keys, of a tile


class Plan(NamedTuple):
    """Which tiles of keys each tile of queries visits; it follows from the ranges, the same in all layers."""

    edges: Int[Array, "N B M R 2"]  # ranges of its rows
    order: Int[Array, "N B J"]  # tiles of keys that are seen; behind them J, which none sees
    count: Int[Array, "N"]  # how many are seen: in the row of the batch that sees most


def refuses(q: Any, k: Any, v: Any, ranges: Any, **_: object) -> str | None:
    """What has no gradient, and short sequences, which one product serves as well."""
    if isinstance(k, Rounded):
        return "rounded keys have no gradient"
    if min(q.shape[1], k.shape[1]) < LEAST:
        return f"{q.shape[1]} queries on {k.shape[1]} keys; it takes {LEAST} or more of both"
    return None


def run(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    ranges: Int[Array, "B T R 2"],
    *,
    scale: float,
    softcap: float | None = None,
    residual: bool = False,
) -> Float[Array, "B T H K"] | tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """What the reference gives, and its gradient in q, k, v, of the log-sum-exp too; in reverse mode, once."""
    found: Any = _attend(q, k, v, ranges, How(scale, softcap))
    return found if residual else found[0]


def plan(ranges: Int[Array, "B T R 2"], slots: int, size: int) -> Plan:
    """Tiles of keys that hold a key which some row of a tile of queries sees, in order, for every tile."""
    b, t, r, _ = ranges.shape
    edges = jnp.pad(jnp.minimum(ranges, slots), ((0, 0), (0, -t % size), (0, 0), (0, 0)))
    edges = jnp.moveaxis(edges.reshape(b, -1, size, r, 2), 1, 0)
    start, end = edges[..., 0, None], edges[..., 1, None]
    tile = jnp.arange(-(-slots // size), dtype=jnp.int32)
    seen = ((start < (tile + 1) * size) & (end > tile * size) & (end > start)).any(axis=(2, 3))
    # The n-th that is seen stands in place n. No sort: one compiles for minutes for a TPU.
    place, count = jnp.cumsum(seen, axis=-1) - 1, seen.sum(axis=-1, dtype=jnp.int32)
    order = jnp.where(seen[..., None] & (place[..., None] == tile), tile[:, None], 0).sum(axis=-2)
    order = jnp.where(tile < count[..., None], order, len(tile))
    return Plan(edges, order.astype(jnp.int32), count.max(axis=1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: Array, k: Array, v: Array, ranges: Array, how: How) -> tuple[Array, Array]:
    return _forward(q, k, v, ranges, how)[0]


def _forward(q: Array, k: Array, v: Array, ranges: Array, how: How) -> tuple[tuple[Array, Array], Any]:
    """((out, log-sum-exp), what the backward pass needs)."""
    found = _by_platform(_values, how, q, k, v, ranges)
    return found, (q, k, v, ranges, *found)


def _backward(how: How, kept: tuple[Array, ...], given: tuple[Array, Array]) -> tuple[Any, ...]:
    return *_by_platform(_slopes, how, *kept, *given), None


_attend.defvjp(_forward, _backward)


def _by_platform(f: Callable[..., Any], how: How, *args: Array) -> Any:
    small, large = (functools.partial(f, how=how._replace(size=size)) for size in (ON_CPU, ELSEWHERE))
    return jax.lax.platform_dependent(*args, cpu=small, default=large)


@functools.partial(jax.jit, static_argnames="how")  # all layers share one trace
def _values(q: Array, k: Array, v: Array, ranges: Array, how: How) -> tuple[Array, Array]:
    """(out [B, T, H, K], log-sum-exp [B, T, H])."""
    kind, size = wide(q.dtype), how.size
    queries = _queries(q * how.scale, q.dtype, k.shape[2], size)
    keys, values = _tiles(k, size), _tiles(v, size)

    def tile(_: None, given: tuple[Plan, Array]) -> tuple[None, tuple[Array, Array]]:
        at, x = given
        one = jnp.full((*x.shape[:-1], 1), -1e30, kind)  # a finite floor: rows without keys give no inf - inf

        def visit(i: Array, run: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            total, most, sums = run
            j = at.order[:, i]
            scores = _seen(_scores(x, _take(keys, j), how), at.edges, j)
            top = jnp.maximum(most, scores.max(axis=-1, keepdims=True))
            weights, shrink = jnp.exp(scores - top), jnp.exp(most - top)
            fresh = _dot("bgmc,bgck->bgmk", weights, _take(values, j))
            return total * shrink + weights.sum(axis=-1, keepdims=True), top, sums * shrink + fresh

        start = (jnp.zeros_like(one), one, jnp.zeros(x.shape, kind))
        total, most, sums = jax.lax.fori_loop(0, at.count, visit, start)
        # A row that saw nothing has a total of 0: its logarithm is what it should be.
        out = (sums / jnp.where(total > 0, total, 1.0)).astype(q.dtype)
        return None, (out, (most + jnp.log(total)))

    _, (outs, lses) = jax.lax.scan(tile, None, (plan(ranges, k.shape[1], size), queries))
    return _rows(outs, q.shape, size), _rows(lses, (*q.shape[:3], 1), size)[..., 0]


@functools.partial(jax.jit, static_argnames="how")
def _slopes(
    q: Array, k: Array, v: Array, ranges: Array, out: Array, lse: Array, slope: Array, moved: Array, how: How
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v. With p = exp(s - lse): dv = p' do, ds = p (do v' - delta), delta = o do - dlse."""
    kind, size = wide(q.dtype), how.size
    delta = (slope.astype(kind) * out.astype(kind)).sum(axis=-1) - moved
    fold = functools.partial(_queries, groups=k.shape[2], size=size)
    rows = (
        fold(q * how.scale, q.dtype), fold(slope, q.dtype),
        fold(jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None], kind), fold(delta[..., None], kind),
    )  # fmt: skip
    keys, values = _tiles(k, size), _tiles(v, size)

    def tile(sums: tuple[Array, Array], given: tuple[Plan, tuple[Array, ...]]) -> tuple[Any, Array]:
        at, (x, dout, nats, less) = given

        def visit(i: Array, run: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk, dv = run
            j = at.order[:, i]
            here, there = _take(keys, j), _take(values, j)
            scores = _scores(x, here, how)
            weights = jnp.exp(_seen(scores, at.edges, j) - nats)
            ds = weights * (_dot("bgmk,bgck->bgmc", dout, there) - less)
            if how.softcap is not None:
                ds = ds * (1.0 - (scores / how.softcap) ** 2)
            dv = _add(dv, j, _dot("bgmc,bgmk->bgck", weights, dout))
            dk = _add(dk, j, _dot("bgmc,bgmk->bgck", ds, x))
            return dq + _dot("bgmc,bgck->bgmk", ds, here), dk, dv

        dq, dk, dv = jax.lax.fori_loop(0, at.count, visit, (jnp.zeros(x.shape, kind), *sums))
        return (dk, dv), dq

    none = (jnp.zeros(keys.shape, kind), jnp.zeros(values.shape, kind))
    (dk, dv), dq = jax.lax.scan(tile, none, (plan(ranges, k.shape[1], size), rows))
    return (_rows(dq, q.shape, size) * how.scale).astype(q.dtype), _slots(dk, k), _slots(dv, v)


# --- tiles: N of queries, J of keys; a query tile's rows are M = heads of a group times size


def _queries(x: Float[Array, "B T H K"], dtype: Any, groups: int, size: int) -> Float[Array, "N B G M K"]:
    b, t, h, width = x.shape
    x = jnp.pad(x.astype(dtype), ((0, 0), (0, -t % size), (0, 0), (0, 0)))
    x = x.reshape(b, -1, size, groups, h // groups, width).transpose(1, 0, 3, 4, 2, 5)
    return x.reshape(*x.shape[:3], -1, width)


def _rows(x: Float[Array, "N B G M K"], shape: tuple[int, ...], size: int) -> Float[Array, "B T H K"]:
    """The way back from `_queries`."""
    n, b, groups = x.shape[:3]
    x = x.reshape(n, b, groups, -1, size, shape[3]).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(b, n * size, *shape[2:])[:, : shape[1]]


def _tiles(x: Float[Array, "B S G K"], size: int) -> Float[Array, "B J G C K"]:
    b, s, groups, width = x.shape
    x = jnp.pad(x, ((0, 0), (0, -s % size), (0, 0), (0, 0)))
    return x.reshape(b, -1, size, groups, width).swapaxes(2, 3)


def _slots(x: Float[Array, "B J G C K"], like: Array) -> Float[Array, "B S G K"]:
    """The way back from `_tiles`."""
    x = x.swapaxes(2, 3).reshape(like.shape[0], -1, *like.shape[2:])
    return x[:, : like.shape[1]].astype(like.dtype)


def _take(x: Float[Array, "B J G C K"], j: Int[Array, "B"]) -> Float[Array, "B G C K"]:
    """Each row of the batch takes a tile of its own."""
    return jax.vmap(lambda y, i: jax.lax.dynamic_index_in_dim(y, i, 0, keepdims=False))(x, j)


def _add(x: Float[Array, "B J G C K"], j: Int[Array, "B"], more: Float[Array, "B G C K"]) -> Array:
    return jax.vmap(lambda y, i, z: y.at[i].add(z, unique_indices=True, mode="drop"))(x, j, more)


def _dot(legend: str, x: Array, y: Array) -> Array:
    return jnp.einsum(legend, x.astype(y.dtype), y, preferred_element_type=wide(y.dtype))


def _scores(x: Float[Array, "B G M K"], keys: Float[Array, "B G C K"], how: How) -> Float[Array, "B G M C"]:
    return capped(_dot("bgmk,bgck->bgmc", x, keys), how.softcap)


def _seen(scores: Float[Array, "B G M C"], edges: Int[Array, "B m R 2"], j: Int[Array, "B"]) -> Array:
    """-inf where a row does not see the key."""
    size = scores.shape[-1]
    at = j[:, None, None, None] * size + jnp.arange(size)
    see: Bool[Array, "B m C"] = ((at >= edges[..., :1]) & (at < edges[..., 1:])).any(axis=2)
    apart = scores.reshape(*scores.shape[:2], -1, *see.shape[1:])
    return jnp.where(see[:, None, None], apart, -jnp.inf).reshape(scores.shape)
