"""Attention over key ranges in plain jnp: every other backend is tested against it, and it takes what they refuse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.kernels.kv_quant import KVArray, dequantise
from mercury_jax.types import accumulation_dtype


def refuses(*_: object, **__: object) -> None:
    """None: this backend takes all shapes and dtypes, on every platform, and has a gradient."""


def visible(ranges: Int[Array, "B T R 2"], slots: int) -> Bool[Array, "B T S"]:
    """The attention mask of key ranges: which of `slots` keys each query attends to."""
    s = jnp.arange(slots)
    inside = (s >= ranges[..., 0, None]) & (s < ranges[..., 1, None])
    return inside.any(axis=2)


def run(
    q: Float[Array, "B T H K"],
    k: KVArray,
    v: KVArray,
    ranges: Int[Array, "B T R 2"],
    *,
    scale: float,
    softcap: float | None = None,
    residual: bool = False,
) -> Float[Array, "B T H K"] | tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """softmax(softcap(scale q k^T)) v over each query's ranges.

    Heads are folded into two batched matrix products, P = B * G of them: on a CPU that is twice as fast as an einsum
    over five axes.

    Args:
        q: Queries.
        k: Keys [B, S, G, K].
        v: Values.
        ranges: Key ranges [start, end) of each query.
        scale: Of the scores.
        softcap: Scores become softcap * tanh(scores / softcap); None: unchanged.
        residual: Also return the log-sum-exp of the scores.

    Returns:
        Zeros for a query without keys. With `residual` also the log-sum-exp, -inf for a query without keys.
    """
    k, v = dequantise(k, q.dtype), dequantise(v, q.dtype)
    b, t, h, width = q.shape
    g, slots = k.shape[2], k.shape[1]
    keys = k.transpose(0, 2, 3, 1).reshape(b * g, width, slots)
    values = v.transpose(0, 2, 1, 3).reshape(b * g, slots, width)
    # [P, h T, S], h = H / G query heads of each key head
    scores = jnp.matmul(fold_heads(q, g, scale), keys, preferred_element_type=accumulation_dtype(q.dtype))
    mask = visible(ranges, slots)[:, None, None]
    # A finite minimum keeps queries without keys free of NaN (inf - inf), in values and in gradients.
    scores = jnp.where(mask, apply_softcap(scores, softcap).reshape(b, g, h // g, t, slots), -1e30)
    peak = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    out = jnp.matmul(weights.astype(v.dtype).reshape(b * g, h // g * t, slots), values)
    has_keys = mask.any(axis=-1, keepdims=True)
    out = jnp.where(has_keys, out.reshape(b, g, h // g, t, width) / total.astype(v.dtype), 0.0)
    out = unfold_heads(out, t).astype(q.dtype)
    if not residual:
        return out
    return out, unfold_heads(jnp.where(has_keys, peak + jnp.log(total), -jnp.inf), t)[..., 0]


def fold_heads(q: Float[Array, "B T H K"], groups: int, scale: float) -> Float[Array, "P M K"]:
    """Scaled queries, with those of one key head as the M = H / G * T rows of a matrix."""
    b, t, h, width = q.shape
    queries = (q * scale).astype(q.dtype).reshape(b, t, groups, h // groups, width)
    return queries.transpose(0, 2, 3, 1, 4).reshape(b * groups, h // groups * t, width)


def unfold_heads(x: Float[Array, "B G h T K"], queries: int) -> Float[Array, "B T H K"]:
    """The inverse of `fold_heads`, after the rows were split into (G, h, T)."""
    return x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], queries, -1, x.shape[-1])


def apply_softcap(scores: Array, softcap: float | None) -> Array:
    """softcap * tanh(scores / softcap), or the scores for None."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)
