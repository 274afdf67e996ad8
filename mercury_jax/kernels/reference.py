"""Attention over key ranges in plain jnp.

All other backends are tested against it, and it computes the calls that they do not support.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.kernels.attention_inputs import AttentionCall, AttentionResult, dequantise
from mercury_jax.types import accumulation_dtype


def visible(ranges: Int[Array, "B T R 2"], slots: int) -> Bool[Array, "B T S"]:
    """Computes the attention mask of key ranges."""
    s = jnp.arange(slots)
    inside = (s >= ranges[..., 0, None]) & (s < ranges[..., 1, None])  # [B, T, R, S]
    return inside.any(axis=2)


def run(call: AttentionCall) -> AttentionResult:
    """Computes softmax(softcap(scale q k^T)) v over each query's ranges; differentiable, on every platform.

    Each of the two products is a batched matrix product: P = B * G matrices, with the M = H / G * T queries of a key
    head as rows. On a CPU this is twice as fast as an einsum over five axes.
    """
    q, ranges = call.q, call.ranges
    k, v = dequantise(call.k, q.dtype), dequantise(call.v, q.dtype)
    b, t, h, width = q.shape
    g, slots = k.shape[2], k.shape[1]
    keys = k.transpose(0, 2, 3, 1).reshape(b * g, width, slots)  # [P, K, S]
    values = v.transpose(0, 2, 1, 3).reshape(b * g, slots, width)  # [P, S, K]
    queries = fold_heads(q, g, call.scale)  # [P, M, K]
    scores = jnp.matmul(queries, keys, preferred_element_type=accumulation_dtype(q.dtype))  # [P, M, S]
    scores = apply_softcap(scores, call.softcap).reshape(b, g, h // g, t, slots)
    mask = visible(ranges, slots)[:, None, None]  # [B, 1, 1, T, S]
    # -1e30 instead of -inf: for a query without keys, inf - inf would make values and gradients NaN.
    scores = jnp.where(mask, scores, -1e30)
    peak = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)  # [B, G, h, T, 1]
    out = jnp.matmul(weights.astype(v.dtype).reshape(b * g, h // g * t, slots), values)
    has_keys = mask.any(axis=-1, keepdims=True)
    out = jnp.where(has_keys, out.reshape(b, g, h // g, t, width) / total.astype(v.dtype), 0.0)
    out = unfold_heads(out, t).astype(q.dtype)
    if not call.residual:
        return out
    return out, unfold_heads(jnp.where(has_keys, peak + jnp.log(total), -jnp.inf), t)[..., 0]


def fold_heads(q: Float[Array, "B T H K"], groups: int, scale: float) -> Float[Array, "P M K"]:
    """Scales the queries, and makes a matrix of the queries of each key head: rows by head, then by query."""
    b, t, h, width = q.shape
    queries = (q * scale).astype(q.dtype).reshape(b, t, groups, h // groups, width)
    return queries.transpose(0, 2, 3, 1, 4).reshape(b * groups, h // groups * t, width)


def unfold_heads(x: Float[Array, "B G h T K"], queries: int) -> Float[Array, "B T H K"]:
    """Inverts `fold_heads`, after the rows have been split into axes (G, h, T)."""
    return x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], queries, -1, x.shape[-1])


def apply_softcap(scores: Array, softcap: float | None) -> Array:
    """Limits scores smoothly to (-softcap, softcap)."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)
