"""Token statistics: what rules need to know of the logits, computed from all of them at once.

`denoise.py` uses this module where a part of the sampler needs all logits or the vocabulary is small; otherwise
`chunked_vocab.py` computes the same numbers over chunks of the vocabulary. The log-probabilities that a caller asks
for are kept here too.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.types import TokenStats

NEVER = -1e30  # a logit that no softmax revives, and that stays finite
SEARCH_BLOCK = 128  # ids whose weights are summed at once by `search_cdf`


def forbid(
    logits: Float[Array, "L V"], ids: tuple[int, ...], first_id: int | Int[Array, ""] = 0
) -> Float[Array, "L V"]:
    """Makes ids impossible.

    Args:
        logits: Of one row, or of a chunk of its vocabulary.
        ids: Ids to forbid; those outside of the chunk are ignored.
        first_id: The id of the first column.

    Returns:
        Logits that are NEVER at these ids.
    """
    if not ids:
        return logits
    column = jnp.asarray(ids, jnp.int32) - first_id
    return logits.at[:, jnp.where(column < 0, logits.shape[-1], column)].set(NEVER, mode="drop")


def most_probable(logits: Float[Array, "*s V"]) -> Int[Array, "*s"]:
    """Returns the first id with the largest logit.

    `argmax` compares pairs of a value and its index one by one on a CPU: a maximum, and the search for it, take a
    fifth of the time.

    Args:
        logits: Where one is NaN, the id is any.

    Returns:
        The ids.
    """
    last = logits.shape[-1] - 1
    largest = logits == logits.max(axis=-1, keepdims=True)
    return jnp.where(largest, jnp.arange(last + 1, dtype=jnp.int32), last).min(axis=-1)


def draw(
    logits: Float[Array, "*s V"], uniforms: Float[Array, "*s"], temperature: Float[Array, ""]
) -> Int[Array, "*s"]:
    """Draws from softmax(logits / temperature) by inverting the CDF; the argmax at temperature 0.

    One uniform per position instead of Gumbel noise per token: five times faster on a CPU, and a test can inject the
    noise of a reference implementation.

    Args:
        logits: At least fp32.
        uniforms: In [0, 1).
        temperature: 0 or more.

    Returns:
        The drawn ids.
    """
    greedy = most_probable(logits)
    scaled = logits / jnp.maximum(temperature, 1e-6)[..., None]
    weights = jnp.exp(scaled - scaled.max(-1, keepdims=True))
    drawn = search_cdf(weights, jnp.minimum(uniforms, 1.0 - 1e-6))
    return jnp.where(temperature > 0, drawn, greedy).astype(jnp.int32)


def search_cdf(weights: Float[Array, "*s V"], uniforms: Float[Array, "*s"]) -> Int[Array, "*s"]:
    """Finds the first id at which the cumulative weight exceeds uniform * total.

    First the block of `SEARCH_BLOCK` ids is found, then the place in it: a cumulative sum over the whole vocabulary
    takes twice as long and accumulates more rounding.

    Args:
        weights: Non-negative, not normalised.
        uniforms: In [0, 1).

    Returns:
        The ids; their weight is never 0.
    """
    *shape, vocab = weights.shape
    # 1. Find the block: the first whose cumulative weight exceeds the target.
    size = min(SEARCH_BLOCK, vocab)
    blocks = jnp.pad(weights, [(0, 0)] * len(shape) + [(0, -vocab % size)]).reshape(*shape, -1, size)
    ends = jnp.cumsum(blocks.sum(-1), axis=-1)  # [*s, blocks]
    target = uniforms[..., None] * ends[..., -1:]
    block = jnp.minimum((ends <= target).sum(-1, keepdims=True), ends.shape[-1] - 1)
    # 2. Find the place in the block, by what the target exceeds the blocks before.
    inside = jnp.take_along_axis(blocks, block[..., None], axis=-2)[..., 0, :]  # [*s, size]
    before = jnp.take_along_axis(ends, block, axis=-1) - inside.sum(-1, keepdims=True)
    sums = jnp.cumsum(inside, axis=-1)
    # Clipped at both ends: however the sums are rounded, the id found has a weight.
    rest = jnp.clip(target - before, 0.0, sums[..., -1:] * (1.0 - 1e-6))
    return block[..., 0] * size + (sums <= rest).sum(-1)


def token_stats(
    logits: Float[Array, "L V"], canvas: Int[Array, "L"], sample: Int[Array, "L"], eos: Int[Array, ""]
) -> TokenStats:
    """Computes the statistics of one row from all of its logits.

    Args:
        logits: After the logits processors.
        canvas: The tokens that the canvas holds now.
        sample: The drawn tokens.
        eos: The id that ends the answer, -1 for none.

    Returns:
        The statistics [L].
    """
    # With e = exp(logit - best): p = e / sum(e), and the entropy is log(sum(e)) + sum(e * (best - logit)) / sum(e).
    best = logits.max(axis=-1, keepdims=True)
    argmax = most_probable(logits)
    # Two sums: on a CPU 25 times faster than exp(log_softmax) and top_k. Each difference has one reader, so that XLA
    # fuses it instead of storing [L, V].
    e = jnp.exp(logits - best)
    total = e.sum(axis=-1)
    p = lambda ids: jnp.take_along_axis(e, ids[:, None], axis=-1)[:, 0] / total
    others = jnp.where(jnp.arange(logits.shape[-1]) == argmax[:, None], 0.0, e)
    return TokenStats(
        argmax=argmax,
        sample=sample,
        p_argmax=1.0 / total,
        p_sample=p(sample),
        p_canvas=p(canvas),
        entropy=jnp.log(total) + jnp.sum(e * (best - logits), axis=-1) / total,
        margin=(1.0 - others.max(axis=-1)) / total,
        p_eos=jnp.where(eos >= 0, p(jnp.full_like(sample, jnp.maximum(eos, 0))), 0.0),
    )


class LogprobBuffer(NamedTuple):
    """Log-probabilities by position of the text, of the model before any logits processor; k alternatives each."""

    chosen: Float[Array, "B S"]  # of the emitted token
    top_ids: Int[Array, "B S k"]
    top: Float[Array, "B S k"]


class Trajectory(NamedTuple):
    """By position of the text: when its token was accepted last, and how probable it was then."""

    step: Int[Array, "B S"]  # the row's denoising or verifying pass, from 0; -1: the user's token
    log_prob: Float[Array, "B S"]  # of the distribution that the token was drawn from


def draw_log_prob(
    logits: Float[Array, "L V"], ids: Int[Array, "L"], temperature: Float[Array, ""]
) -> Float[Array, "L"]:
    """Computes log-probabilities of the distribution that `draw` draws from, softmax(logits / temperature).

    Args:
        logits: After all processors, of one row.
        ids: Drawn tokens.
        temperature: 0 or more; at 0 the argmax has log-probability 0.

    Returns:
        Nats.
    """
    log_p = jax.nn.log_softmax(logits / jnp.maximum(temperature, 1e-6), axis=-1)
    return jnp.take_along_axis(log_p, ids[:, None], axis=-1)[:, 0]


def write_changed(
    old: Array,
    fresh: Array,
    changed: Bool[Array, "L"],
    start: Int[Array, ""],
    source: Int[Array, "L"] | None = None,
) -> Array:
    """Writes what this pass has changed into an array by position of one row's text.

    Args:
        old: [S, ...].
        fresh: Of the window [L, ...].
        changed: Which positions of the window take the fresh value.
        start: Position of the window's first token.
        source: Old index of each position, for rules that insert or delete.

    Returns:
        The array.
    """
    here = slice_at(old, start, fresh.shape[0])
    here = here if source is None else here[jnp.maximum(source, 0)]
    which = changed.reshape(-1, *[1] * (fresh.ndim - 1))
    return write_at(old, jnp.where(which, fresh.astype(old.dtype), here), start)


def update_logprobs(
    logprobs: LogprobBuffer,
    logits: Float[Array, "L V"],
    answer: Int[Array, "L"],
    changed: Bool[Array, "L"],
    start: Int[Array, ""],
    source: Int[Array, "L"] | None = None,
) -> LogprobBuffer:
    """Writes the log-probabilities of one row's tokens that this pass has written.

    Args:
        logprobs: Of one row [S].
        logits: Before any processor; position i of the window is position start + i of the text.
        answer: The window's tokens.
        changed: Which of them this pass has written.
        start: See `logits`.
        source: Old index of each position, for rules that insert or delete.

    Returns:
        The updated log-probabilities.
    """
    k = logprobs.top_ids.shape[-1]
    log_p = jax.nn.log_softmax(logits, axis=-1)
    top, ids = jax.lax.top_k(log_p, max(k, 1))
    chosen = jnp.take_along_axis(log_p, answer[:, None], axis=-1)[:, 0]
    new = LogprobBuffer(chosen, ids[:, :k].astype(jnp.int32), top[:, :k])
    return jax.tree.map(lambda old, fresh: write_changed(old, fresh, changed, start, source), logprobs, new)


def slice_at(x: Array, start: Int[Array, ""], size: int) -> Array:
    """Returns x[start : start + size] along the first axis; x itself where it has this size.

    Args:
        x: Any array.
        start: Index of the first element.
        size: Elements that are kept.

    Returns:
        The slice.
    """
    return x if x.shape[0] == size else jax.lax.dynamic_slice_in_dim(x, start, size)


def write_at(x: Array, piece: Array, start: Int[Array, ""]) -> Array:
    """Returns x with `piece` written at start; the piece itself where it has the shape of x.

    Args:
        x: Any array.
        piece: At most as long.
        start: Index of its first element.

    Returns:
        The array.
    """
    piece = piece.astype(x.dtype)
    return piece if x.shape == piece.shape else jax.lax.dynamic_update_slice_in_dim(x, piece, start, 0)
