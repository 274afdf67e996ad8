"""Attention over key ranges in plain jnp: the oracle of every kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.kernels.rounded import Keys, plain
from mercury_jax.types import wide


def refuses(*_: object, **__: object) -> None:
    """Nothing: it takes every shape, on every platform, and has a gradient."""


def visible(ranges: Int[Array, "B T R 2"], slots: int) -> Bool[Array, "B T S"]:
    """Which of `slots` keys each query row may see."""
    s = jnp.arange(slots)
    inside = (s >= ranges[..., 0, None]) & (s < ranges[..., 1, None])
    return inside.any(axis=2)


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
    """softmax(cap(scale q k^T)) v over each row's ranges; zeros where nothing is visible.

    Heads are folded into two plain batched products: on a CPU that is twice as fast as an einsum
    over the five axes.
    """
    k, v = plain(k, q.dtype), plain(v, q.dtype)
    b, t, h, width = q.shape
    g, slots = k.shape[2], k.shape[1]
    keys = k.transpose(0, 2, 3, 1).reshape(b * g, width, slots)
    values = v.transpose(0, 2, 1, 3).reshape(b * g, slots, width)
    scores = jnp.matmul(folded(q, g, scale), keys, preferred_element_type=wide(q.dtype))
    see = visible(ranges, slots)[:, None, None]
    # A finite floor keeps rows without keys free of NaN (inf - inf) in values and gradients.
    scores = jnp.where(see, capped(scores, softcap).reshape(b, g, h // g, t, slots), -1e30)
    most = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - most)
    total = weights.sum(axis=-1, keepdims=True)
    out = jnp.matmul(weights.astype(v.dtype).reshape(b * g, h // g * t, slots), values)
    some = see.any(axis=-1, keepdims=True)
    out = jnp.where(some, out.reshape(b, g, h // g, t, width) / total.astype(v.dtype), 0.0)
    out = unfolded(out, t).astype(q.dtype)
    return (out, unfolded(jnp.where(some, most + jnp.log(total), -jnp.inf), t)[..., 0]) if residual else out


def folded(q: Float[Array, "B T H K"], groups: int, scale: float) -> Float[Array, "P M K"]:
    """Queries times the scale, those of each key head in the rows of one matrix."""
    b, t, h, width = q.shape
    queries = (q * scale).astype(q.dtype).reshape(b, t, groups, h // groups, width)
    return queries.transpose(0, 2, 3, 1, 4).reshape(b * groups, h // groups * t, width)


def unfolded(x: Float[Array, "B G h T K"], queries: int) -> Float[Array, "B T H K"]:
    """The way back from `folded`."""
    return x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], queries, -1, x.shape[-1])


def capped(scores: Array, softcap: float | None) -> Array:
    """softcap * tanh(scores / softcap), which keeps them within its bounds."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)
