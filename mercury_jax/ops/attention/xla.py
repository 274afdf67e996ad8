"""Attention over key ranges in plain XLA: the reference, and two backends that compute chunks of keys.

The *reference* computes every call, with all scores at once; the other backends are tested against it.

*Chunked* attention is for a KV cache on a CPU, and for a long one on a GPU for which there is no kernel. Most slots of
a cache are not used yet; this backend reads only the chunks between the lowest start and the highest end of all ranges,
and never holds the scores of all slots. The number of loop steps depends on the ranges, which are only known when the
program runs, so it has no gradient.

*Blockwise* attention is for training and has a gradient. Each tile of queries visits only the tiles of keys that one
of its rows attends to. A training row is packed, and holds each document twice, as clean tokens and as canvases
(BD3-LM, arXiv 2503.09573), so that only about a quarter of all pairs of positions attend to each other. The program
chooses tiles from the ranges when it runs, and masks keys within a tile, so that results are exact for packed
documents, prompts of any length and short canvases. The backward pass is FlashAttention's (arXiv 2205.14135;
2307.08691): it computes scores again, tile by tile, and never stores the whole matrix of scores.

The two keep a running maximum and sum (online softmax: Milakov and Gimelshein, arXiv 1805.02867).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.ops.attention.inputs import AttentionCall, AttentionResult, RoundedVectors, dequantise
from mercury_jax.types import accumulation_dtype

FLOOR = -1e30  # initial maximum of the scores; finite, to avoid inf - inf for queries without keys

# --- the reference


def visible(ranges: Int[Array, "B T R 2"], slots: int) -> Bool[Array, "B T S"]:
    """Computes the attention mask of key ranges."""
    s = jnp.arange(slots)
    inside = (s >= ranges[..., 0, None]) & (s < ranges[..., 1, None])  # [B, T, R, S]
    return inside.any(axis=2)


def run_reference(call: AttentionCall) -> AttentionResult:
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


# --- chunked: a cache on a CPU, or a long cache on a GPU

CHUNK = 64  # keys per step on a CPU; five steps over 64 keys take as long as one product with 320 keys
LONG_CHUNK = 2048  # keys per step on a GPU: each step launches several kernels, and the host reads the loop's condition


class RunningSoftmax(NamedTuple):
    """State of the online softmax over the keys seen so far, with weights exp(score - peak).

    Attributes:
        sum: Weighted sum of the values.
        peak: Maximum score.
        total: Sum of the weights.
    """

    sum: Float[Array, "P M K"]
    peak: Float[Array, "P M 1"]
    total: Float[Array, "P M 1"]


def refuses_cached(call: AttentionCall, size: int = CHUNK) -> str | None:
    """Gives the reason why chunked attention does not support a call."""
    slots = call.k.shape[1]
    return None if slots > 4 * size else f"{slots} keys; it takes more than {4 * size}"


def run_cached(call: AttentionCall, size: int = CHUNK) -> AttentionResult:
    """Computes attention in steps over the chunks of keys that the ranges need, without a gradient."""
    q, k, ranges = call.q, call.k, call.ranges
    b, t, h, width = q.shape
    slots, g, dtype = k.shape[1], k.shape[2], accumulation_dtype(q.dtype)
    chunk, queries = min(size, slots), fold_heads(q, g, call.scale)  # [P, M, K]
    # The chunks [first, last) hold every key that any query of any row attends to.
    nonempty = ranges[..., 1] > ranges[..., 0]
    first = jnp.min(jnp.where(nonempty, ranges[..., 0], slots)) // chunk
    last = -(-jnp.minimum(jnp.max(jnp.where(nonempty, ranges[..., 1], 0)), slots) // chunk)

    def step(i: Array, state: RunningSoftmax) -> RunningSoftmax:
        # The last chunk may reach past the end. It then starts earlier, and keys of the chunk before it are masked.
        start = jnp.minimum(i * chunk, slots - chunk)
        keys, values = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=1), (k, call.v)
        )
        keys, values = dequantise(keys, q.dtype), dequantise(values, q.dtype)  # [B, chunk, G, K]
        keys = keys.transpose(0, 2, 3, 1).reshape(b * g, width, chunk)
        values = values.transpose(0, 2, 1, 3).reshape(b * g, chunk, width)
        scores = jnp.matmul(queries, keys, preferred_element_type=dtype)  # [P, M, chunk]
        scores = apply_softcap(scores, call.softcap).reshape(b, g, h // g, t, chunk)
        slot = start + jnp.arange(chunk)
        mask = ((slot >= ranges[..., :1]) & (slot < ranges[..., 1:]) & (slot >= i * chunk)).any(axis=2)
        scores = jnp.where(mask[:, None, None], scores, -jnp.inf).reshape(b * g, -1, chunk)
        # If the maximum grows, scale the sums so far down, so that all weights refer to the same maximum.
        peak = jnp.maximum(state.peak, scores.max(axis=-1, keepdims=True))
        weights, shrink = jnp.exp(scores - peak), jnp.exp(state.peak - peak)
        added = jnp.matmul(weights.astype(values.dtype), values, preferred_element_type=dtype)  # [P, M, K]
        total = state.total * shrink + weights.sum(axis=-1, keepdims=True)
        return RunningSoftmax(state.sum * shrink + added, peak, total)

    rows = h // g * t
    peak = jnp.full((b * g, rows, 1), FLOOR, dtype)
    start = RunningSoftmax(jnp.zeros((b * g, rows, width), dtype), peak, jnp.zeros_like(peak))
    end = jax.lax.fori_loop(first, last, step, start)
    unfold = lambda x: unfold_heads(x.reshape(b, g, h // g, t, -1), t)
    out = unfold(end.sum / jnp.where(end.total > 0, end.total, 1.0)).astype(q.dtype)
    # For a query without keys, total is 0 and the log-sum-exp is -inf, as required.
    return (out, unfold(end.peak + jnp.log(end.total))[..., 0]) if call.residual else out


# --- blockwise: training

# Queries, and keys, per tile. On a CPU, small tiles waste little work at the borders of the ranges and fit into a
# core's cache. On an accelerator each tile starts several XLA kernels, so large tiles are better.
TILE_CPU, TILE_ACCELERATOR = 64, 256
# Minimum number of queries, and of keys. Values and gradients at 256, 512, 1024 and 2048 positions took 0.23, 0.20,
# 0.14 and 0.19 of the reference's time on two CPU cores (a document as clean tokens and canvases, 12 heads of 64, 4 key
# heads).
MIN_LENGTH = 256


class BlockwiseConfig(NamedTuple):
    """Static arguments of blockwise attention."""

    scale: float
    softcap: float | None
    tile: int = TILE_CPU  # rows, and keys, of a tile


class TileVisits(NamedTuple):
    """The tiles of keys that each tile of queries visits.

    It depends only on the ranges, so that XLA computes it once per pass for all layers.
    """

    edges: Int[Array, "N B M R 2"]  # ranges of the tile's rows
    order: Int[Array, "N B J"]  # indices of the key tiles to visit, rising, then J: no tile
    count: Int[Array, "N"]  # number of key tiles to visit, the maximum over the rows of the batch


def refuses_blockwise(call: AttentionCall) -> str | None:
    """Gives the reason why blockwise attention does not support a call.

    Returns:
        A reason for rounded keys, which have no gradient, and for short sequences, for which one product is as fast;
        None: it supports the call.
    """
    if isinstance(call.k, RoundedVectors):
        return "rounded keys have no gradient"
    queries, keys = call.q.shape[1], call.k.shape[1]
    if min(queries, keys) < MIN_LENGTH:
        return f"{queries} queries on {keys} keys; it takes {MIN_LENGTH} or more of both"
    return None


def run_blockwise(call: AttentionCall) -> AttentionResult:
    """Computes attention tile by tile.

    Outputs and log-sum-exp are differentiable in q, k and v, in reverse mode, and only once (no second derivative).
    """
    config = BlockwiseConfig(call.scale, call.softcap)
    found: Any = _blockwise(call.q, call.k, call.v, call.ranges, config)
    return found if call.residual else found[0]


def tile_visits(ranges: Int[Array, "B T R 2"], slots: int, tile: int) -> TileVisits:
    """Finds the key tiles that each query tile visits: tiles with a key that some query of the tile attends to."""
    b, t, r, _ = ranges.shape
    edges = jnp.pad(jnp.minimum(ranges, slots), ((0, 0), (0, -t % tile), (0, 0), (0, 0)))
    edges = jnp.moveaxis(edges.reshape(b, -1, tile, r, 2), 1, 0)
    start, end = edges[..., 0, None], edges[..., 1, None]
    index = jnp.arange(-(-slots // tile), dtype=jnp.int32)
    seen = ((start < (index + 1) * tile) & (end > index * tile) & (end > start)).any(axis=(2, 3))  # [N, B, J]
    # Compact the seen tiles: the n-th one moves to place n. A sort would do the same but compiles for minutes on a TPU.
    place, count = jnp.cumsum(seen, axis=-1) - 1, seen.sum(axis=-1, dtype=jnp.int32)
    order = jnp.where(seen[..., None] & (place[..., None] == index), index[:, None], 0).sum(axis=-2)
    order = jnp.where(index < count[..., None], order, len(index))
    return TileVisits(edges, order.astype(jnp.int32), count.max(axis=1))


def with_gradients(values: Callable[..., Any], gradients: Callable[..., Any]) -> Callable[..., Any]:
    """Makes attention differentiable whose gradients are computed from its results.

    Args:
        values: values(q, k, v, ranges, config) -> (out [B, T, H, K], log-sum-exp [B, T, H]).
        gradients: gradients(q, k, v, ranges, out, lse, d_out, d_lse, config) -> (dq, dk, dv).
    """

    def forward(*args: Any) -> tuple[Any, tuple[Array, ...]]:
        found = values(*args)
        return found, (*args[:4], *found)  # what the backward pass needs: the arrays and the results

    def backward(config: Any, saved: tuple[Array, ...], cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
        return *gradients(*saved, *cotangents, config), None

    attend = jax.custom_vjp(values, nondiff_argnums=(4,))
    attend.defvjp(forward, backward)
    return attend


def gradients(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    ranges: Int[Array, "B T R 2"],
    out: Float[Array, "B T H K"],
    lse: Float[Array, "B T H"],
    d_out: Float[Array, "B T H K"],
    d_lse: Float[Array, "B T H"],
    config: BlockwiseConfig,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S G K"], Float[Array, "B S G K"]]:
    """Computes the gradients of q, k and v from the results of any exact forward pass."""
    return _by_platform(_gradients, config, q, k, v, ranges, out, lse, d_out, d_lse)


_blockwise = with_gradients(
    lambda q, k, v, ranges, config: _by_platform(_values, config, q, k, v, ranges), gradients
)


def _by_platform(f: Callable[..., Any], config: BlockwiseConfig, *args: Array) -> Any:
    """Calls f with the tile size for the platform that the program is lowered for."""
    small, large = (
        functools.partial(f, config=config._replace(tile=tile)) for tile in (TILE_CPU, TILE_ACCELERATOR)
    )
    return jax.lax.platform_dependent(*args, cpu=small, default=large)


# Shapes in the forward and backward pass: N tiles of queries, J tiles of keys. For each key head, a tile of queries has
# M = H / G * tile rows, and a tile of keys has C = tile keys.


@functools.partial(jax.jit, static_argnames="config")  # all layers share one trace
def _values(q: Array, k: Array, v: Array, ranges: Array, config: BlockwiseConfig) -> tuple[Array, Array]:
    """Computes the forward pass: a scan over query tiles, with a loop over the key tiles that each visits."""
    dtype, tile = accumulation_dtype(q.dtype), config.tile
    queries = _query_tiles(q * config.scale, q.dtype, k.shape[2], tile)  # [N, B, G, M, K]
    keys, values = _key_tiles(k, tile), _key_tiles(v, tile)  # [B, J, G, C, K]

    def query_tile(_: None, inputs: tuple[TileVisits, Array]) -> tuple[None, tuple[Array, Array]]:
        visits, x = inputs  # x [B, G, M, K]
        floor = jnp.full((*x.shape[:-1], 1), FLOOR, dtype)

        def visit(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            total, before, sums = state
            j = visits.order[:, i]  # [B]: rows of the batch visit different key tiles
            _, scores = _scores(x, _take(keys, j), visits.edges, j, config)  # [B, G, M, C]
            peak = jnp.maximum(before, scores.max(axis=-1, keepdims=True))
            weights, shrink = jnp.exp(scores - peak), jnp.exp(before - peak)
            added = _einsum("bgmc,bgck->bgmk", weights, _take(values, j))
            return total * shrink + weights.sum(axis=-1, keepdims=True), peak, sums * shrink + added

        start = (jnp.zeros_like(floor), floor, jnp.zeros(x.shape, dtype))
        total, peak, sums = jax.lax.fori_loop(0, visits.count, visit, start)
        # For a query without keys, total is 0 and the log-sum-exp is -inf, as required.
        out = (sums / jnp.where(total > 0, total, 1.0)).astype(q.dtype)
        return None, (out, (peak + jnp.log(total)))

    _, (outs, lses) = jax.lax.scan(query_tile, None, (tile_visits(ranges, k.shape[1], tile), queries))
    return _from_query_tiles(outs, q.shape, tile), _from_query_tiles(lses, (*q.shape[:3], 1), tile)[..., 0]


@functools.partial(jax.jit, static_argnames="config")
def _gradients(
    q: Array,
    k: Array,
    v: Array,
    ranges: Array,
    out: Array,
    lse: Array,
    d_out: Array,
    d_lse: Array,
    config: BlockwiseConfig,
) -> tuple[Array, Array, Array]:
    """Computes the gradients of q, k and v in the same two loops (FlashAttention-2, arXiv 2307.08691, algorithm 2).

    With weights p = exp(s - lse): dv = p' do, ds = p (do v' - delta), dq = ds k, dk = ds' q, where
    delta = o do - dlse is one number per row. Scores are computed again from the saved log-sum-exp.
    """
    dtype, tile = accumulation_dtype(q.dtype), config.tile
    delta = (d_out.astype(dtype) * out.astype(dtype)).sum(axis=-1) - d_lse
    fold = functools.partial(_query_tiles, groups=k.shape[2], tile=tile)
    rows = (
        fold(q * config.scale, q.dtype), fold(d_out, q.dtype),
        fold(jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None], dtype), fold(delta[..., None], dtype),
    )  # fmt: skip
    keys, values = _key_tiles(k, tile), _key_tiles(v, tile)
    # Adds to tile j[b] of each row b. For a row that visits fewer tiles than another row, j[b] = J drops the addition.
    add = jax.vmap(lambda x, j, more: x.at[j].add(more, unique_indices=True, mode="drop"))

    def query_tile(
        sums: tuple[Array, Array], inputs: tuple[TileVisits, tuple[Array, ...]]
    ) -> tuple[Any, Array]:
        visits, (x, d_out, lse, delta) = inputs

        def visit(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk, dv = state
            j = visits.order[:, i]
            k_tile, v_tile = _take(keys, j), _take(values, j)
            scores, masked = _scores(x, k_tile, visits.edges, j, config)
            weights = jnp.exp(masked - lse)
            ds = weights * (_einsum("bgmk,bgck->bgmc", d_out, v_tile) - delta)
            if config.softcap is not None:
                ds = ds * (1.0 - (scores / config.softcap) ** 2)  # derivative of the tanh
            dv = add(dv, j, _einsum("bgmc,bgmk->bgck", weights, d_out))
            dk = add(dk, j, _einsum("bgmc,bgmk->bgck", ds, x))
            return dq + _einsum("bgmc,bgck->bgmk", ds, k_tile), dk, dv

        dq, dk, dv = jax.lax.fori_loop(0, visits.count, visit, (jnp.zeros(x.shape, dtype), *sums))
        return (dk, dv), dq

    zeros = (jnp.zeros(keys.shape, dtype), jnp.zeros(values.shape, dtype))
    d_tiles, dq = jax.lax.scan(query_tile, zeros, (tile_visits(ranges, k.shape[1], tile), rows))
    dq = (_from_query_tiles(dq, q.shape, tile) * config.scale).astype(q.dtype)
    dk, dv = (  # [B, J, G, C, K] -> [B, S, G, K]
        x.swapaxes(2, 3).reshape(k.shape[0], -1, *k.shape[2:])[:, : k.shape[1]].astype(like.dtype)
        for x, like in zip(d_tiles, (k, v), strict=True)
    )
    return dq, dk, dv


def _query_tiles(
    x: Float[Array, "B T H K"], dtype: DTypeLike, groups: int, tile: int
) -> Float[Array, "N B G M K"]:
    b, t, h, width = x.shape
    x = jnp.pad(x.astype(dtype), ((0, 0), (0, -t % tile), (0, 0), (0, 0)))
    x = x.reshape(b, -1, tile, groups, h // groups, width).transpose(1, 0, 3, 4, 2, 5)
    return x.reshape(*x.shape[:3], -1, width)


def _from_query_tiles(
    x: Float[Array, "N B G M K"], shape: tuple[int, ...], tile: int
) -> Float[Array, "B T H K"]:
    """Inverts `_query_tiles`."""
    n, b, groups = x.shape[:3]
    x = x.reshape(n, b, groups, -1, tile, shape[3]).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(b, n * tile, *shape[2:])[:, : shape[1]]


def _key_tiles(x: Float[Array, "B S G K"], tile: int) -> Float[Array, "B J G C K"]:
    b, s, groups, width = x.shape
    x = jnp.pad(x, ((0, 0), (0, -s % tile), (0, 0), (0, 0)))
    return x.reshape(b, -1, tile, groups, width).swapaxes(2, 3)


def _take(x: Float[Array, "B J G C K"], j: Int[Array, "B"]) -> Float[Array, "B G C K"]:
    """Selects tile j[b] of each row b."""
    return jax.vmap(lambda y, i: jax.lax.dynamic_index_in_dim(y, i, 0, keepdims=False))(x, j)


def _einsum(equation: str, x: Array, y: Array) -> Array:
    """Computes a product in the dtype of y, with sums in at least fp32."""
    return jnp.einsum(equation, x.astype(y.dtype), y, preferred_element_type=accumulation_dtype(y.dtype))


def _scores(
    x: Float[Array, "B G M K"],
    keys: Float[Array, "B G C K"],
    edges: Int[Array, "B m R 2"],
    j: Int[Array, "B"],
    config: BlockwiseConfig,
) -> tuple[Float[Array, "B G M C"], Float[Array, "B G M C"]]:
    """Computes the scores of key tile j[b], and the same scores with -inf where a row does not attend to the key."""
    scores = apply_softcap(_einsum("bgmk,bgck->bgmc", x, keys), config.softcap)
    tile = scores.shape[-1]
    slot = j[:, None, None, None] * tile + jnp.arange(tile)
    mask: Bool[Array, "B m C"] = ((slot >= edges[..., :1]) & (slot < edges[..., 1:])).any(axis=2)
    by_head = scores.reshape(*scores.shape[:2], -1, *mask.shape[1:])  # all heads of a query share its ranges
    return scores, jnp.where(mask[:, None, None], by_head, -jnp.inf).reshape(scores.shape)
