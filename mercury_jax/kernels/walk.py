"""Attention that walks the keys in chunks, from the first that any row sees to the last: for a cache on a CPU.

A cache has room for more than a row has reached. `attend` in plain jnp pays for all of it; this pays for the
chunks between the lowest start and the highest end of all ranges. Softmax is kept running (Milakov and
Gimelshein, arXiv 1805.02867). The loop's length is known on the device only, so there is no gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.kernels.reference import capped, folded, unfolded
from mercury_jax.kernels.rounded import Keys, plain, span
from mercury_jax.types import wide

CHUNK = 64  # keys of one step: five steps over 320 keys cost what one product with 320 does


class Running(NamedTuple):
    """Softmax so far: sum of exp(score - most) * value, the largest score, sum of exp(score - most)."""

    sum: Float[Array, "P M K"]
    most: Float[Array, "P M 1"]
    total: Float[Array, "P M 1"]


def refuses(q: Any, k: Any, *_: object, **__: object) -> str | None:
    """Few keys, which one product serves as well."""
    slots = k.shape[1]
    return None if slots > 4 * CHUNK else f"{slots} keys; it takes more than {4 * CHUNK}"


def run(
    q: Float[Array, "B T H K"],
    k: Keys,
    v: Keys,
    ranges: Int[Array, "B T R 2"],
    *,
    scale: float,
    softcap: float | None = None,
    residual: bool = False,
) -> Float[Array, "B T H K"] | tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """What the reference gives, in as many steps as the ranges need; not differentiable."""
    b, t, h, width = q.shape
    slots, g = k.shape[1], k.shape[2]
    chunk, queries = min(CHUNK, slots), folded(q, g, scale)
    seen = ranges[..., 1] > ranges[..., 0]
    first = jnp.min(jnp.where(seen, ranges[..., 0], slots)) // chunk
    last = -(-jnp.minimum(jnp.max(jnp.where(seen, ranges[..., 1], 0)), slots) // chunk)

    def step(i: Array, run: Running) -> Running:
        # The last chunk may not fit: it starts earlier, and what the one before has had is hidden.
        start = jnp.minimum(i * chunk, slots - chunk)
        keys, values = (plain(span(x, start, chunk), q.dtype) for x in (k, v))
        keys = keys.transpose(0, 2, 3, 1).reshape(b * g, width, chunk)
        values = values.transpose(0, 2, 1, 3).reshape(b * g, chunk, width)
        scores = capped(jnp.matmul(queries, keys, preferred_element_type=wide(q.dtype)), softcap)
        at = start + jnp.arange(chunk)
        see = ((at >= ranges[..., :1]) & (at < ranges[..., 1:]) & (at >= i * chunk)).any(axis=2)
        scores = jnp.where(see[:, None, None], scores.reshape(b, g, h // g, t, chunk), -jnp.inf)
        return _join(run, scores.reshape(b * g, -1, chunk), values)

    done = jax.lax.fori_loop(first, last, step, _nothing(b * g, h // g * t, width, wide(q.dtype)))
    apart = lambda x: unfolded(x.reshape(b, g, h // g, t, -1), t)
    out = apart(done.sum / jnp.where(done.total > 0, done.total, 1.0)).astype(q.dtype)
    # A row that saw nothing has a total of 0: its logarithm is what it should be.
    return (out, apart(done.most + jnp.log(done.total))[..., 0]) if residual else out


def _nothing(products: int, rows: int, width: int, dtype: Any) -> Running:
    # A finite floor keeps rows without keys free of inf - inf.
    one = jnp.full((products, rows, 1), -1e30, dtype)
    return Running(jnp.zeros((products, rows, width), dtype), one, jnp.zeros_like(one))


def _join(run: Running, scores: Float[Array, "P M C"], values: Float[Array, "P C K"]) -> Running:
    most = jnp.maximum(run.most, scores.max(axis=-1, keepdims=True))
    weights, shrink = jnp.exp(scores - most), jnp.exp(run.most - most)
    fresh = jnp.matmul(weights.astype(values.dtype), values, preferred_element_type=run.sum.dtype)
    return Running(run.sum * shrink + fresh, most, run.total * shrink + weights.sum(axis=-1, keepdims=True))
