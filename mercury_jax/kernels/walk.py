"""Attention that walks the keys in chunks, from the first that any row sees to the last: for a cache on a CPU.

A cache has room for more than a row has reached. `attend` in plain jnp pays for all of it; this pays for the
chunks between the lowest start and the highest end of all ranges. Softmax is kept running (Milakov and
Gimelshein, arXiv 1805.02867). The loop's length is known on the device only, so there is no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.types import wide

CHUNK = 64  # keys of one step: five steps over 320 keys cost what one product with 320 does


class Running(NamedTuple):
    """Softmax so far: sum of exp(score - most) * value, the largest score, sum of exp(score - most)."""

    sum: Float[Array, "P M K"]
    most: Float[Array, "P M 1"]
    total: Float[Array, "P M 1"]


def walk(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    ranges: Int[Array, "B T R 2"],
) -> Float[Array, "B T H K"]:
    """What `attend` gives, in as many steps as the ranges need; not differentiable."""
    b, t, h, width = q.shape
    slots, g = k.shape[1], k.shape[2]
    chunk = min(CHUNK, slots)
    queries = (q * width**-0.5).reshape(b, t, g, h // g, width).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(b * g, h // g * t, width)
    seen = ranges[..., 1] > ranges[..., 0]
    first = jnp.min(jnp.where(seen, ranges[..., 0], slots)) // chunk
    last = -(-jnp.minimum(jnp.max(jnp.where(seen, ranges[..., 1], 0)), slots) // chunk)

    def step(i: Array, run: Running) -> Running:
        # The last chunk may not fit: it starts earlier, and what the one before has had is hidden.
        start = jnp.minimum(i * chunk, slots - chunk)
        keys, values = (jax.lax.dynamic_slice_in_dim(x, start, chunk, 1) for x in (k, v))
        keys = keys.transpose(0, 2, 3, 1).reshape(b * g, width, chunk)
        values = values.transpose(0, 2, 1, 3).reshape(b * g, chunk, width)
        scores = jnp.matmul(queries, keys, preferred_element_type=wide(q.dtype))
        at = start + jnp.arange(chunk)
        see = ((at >= ranges[..., :1]) & (at < ranges[..., 1:]) & (at >= i * chunk)).any(axis=2)
        scores = jnp.where(see[:, None, None], scores.reshape(b, g, h // g, t, chunk), -jnp.inf)
        return _join(run, scores.reshape(b * g, -1, chunk), values)

    rows = (b * g, h // g * t)
    exact = wide(q.dtype)
    # A finite floor keeps rows without keys free of inf - inf.
    start = Running(
        jnp.zeros((*rows, width), exact), jnp.full((*rows, 1), -1e30, exact), jnp.zeros((*rows, 1), exact)
    )
    run = jax.lax.fori_loop(first, last, step, start)
    out = run.sum / jnp.where(run.total > 0, run.total, 1.0)
    return (
        out.reshape(b, g, h // g, t, width).transpose(0, 3, 1, 2, 4).reshape(b, t, h, width).astype(q.dtype)
    )


def _join(run: Running, scores: Float[Array, "P M C"], values: Float[Array, "P C K"]) -> Running:
    most = jnp.maximum(run.most, scores.max(axis=-1, keepdims=True))
    weights, shrink = jnp.exp(scores - most), jnp.exp(run.most - most)
    fresh = jnp.matmul(weights.astype(values.dtype), values, preferred_element_type=run.sum.dtype)
    return Running(run.sum * shrink + fresh, most, run.total * shrink + weights.sum(axis=-1, keepdims=True))
