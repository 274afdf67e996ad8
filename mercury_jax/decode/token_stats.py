"""Token statistics: the numbers per position that rules read, computed from all logits at once.

`denoise.py` uses this module if a part of the sampler needs all logits, or if the vocabulary is small; otherwise
`chunked_vocab.py` computes the same numbers over chunks of the vocabulary. This module also draws tokens, and records
the log-probabilities that a request asks for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.types import TokenStats

NEVER = -1e30  # logit of a forbidden id: its probability is 0, and it is finite, so that 0 * NEVER is not NaN
SEARCH_BLOCK = 128  # ids whose weights are summed at once by `search_cdf`


def forbid(
    logits: Float[Array, "L V"], ids: tuple[int, ...], first_id: int | Int[Array, ""] = 0
) -> Float[Array, "L V"]:
    """Sets the logits of some ids to `NEVER`."""
    if not ids:
        return logits
    # A negative column would count from the end: move it past the end, where the scatter drops it.
    column = jnp.asarray(ids, jnp.int32) - first_id
    return logits.at[:, jnp.where(column < 0, logits.shape[-1], column)].set(NEVER, mode="drop")


def most_probable(logits: Float[Array, "*s V"]) -> Int[Array, "*s"]:
    """Returns the first id with the largest logit.

    On a CPU this takes a fifth of the time of `jnp.argmax`, which compares pairs of a value and its index one by one:
    a maximum, and a second pass that searches for it, are both vectorized.
    """
    last = logits.shape[-1] - 1
    largest = logits == logits.max(axis=-1, keepdims=True)
    return jnp.where(largest, jnp.arange(last + 1, dtype=jnp.int32), last).min(axis=-1)


def draw(
    logits: Float[Array, "*s V"], uniforms: Float[Array, "*s"], temperature: Float[Array, ""]
) -> Int[Array, "*s"]:
    """Draws from softmax(logits / temperature) by inverting the CDF; the argmax at temperature 0.

    This needs one uniform number per position instead of Gumbel noise per id: it is five times faster on a CPU, and
    tests can pass the random numbers of a reference implementation.
    """
    greedy = most_probable(logits)
    scaled = logits / jnp.maximum(temperature, 1e-6)[..., None]
    weights = jnp.exp(scaled - scaled.max(-1, keepdims=True))
    drawn = search_cdf(weights, jnp.minimum(uniforms, 1.0 - 1e-6))
    return jnp.where(temperature > 0, drawn, greedy).astype(jnp.int32)


def search_cdf(weights: Float[Array, "*s V"], uniforms: Float[Array, "*s"]) -> Int[Array, "*s"]:
    """Finds the first id at which the cumulative weight exceeds uniform * total.

    The search has two levels: it finds the block of `SEARCH_BLOCK` ids, then the id in the block. A cumulative sum over
    the whole vocabulary takes twice as long and accumulates more rounding error.
    """
    blocks = in_blocks(weights, 0.0)
    block, column = search_blocks(blocks.sum(-1), functools.partial(block_of, blocks), uniforms)
    return block * blocks.shape[-1] + column


def in_blocks(x: Float[Array, "*s V"], fill: float) -> Float[Array, "*s n b"]:
    """Splits the ids into n blocks of b = `SEARCH_BLOCK`, or into one block if there are fewer."""
    *shape, vocab = x.shape
    size = min(SEARCH_BLOCK, vocab)
    full = jnp.pad(x, [(0, 0)] * len(shape) + [(0, -vocab % size)], constant_values=fill)
    return full.reshape(*shape, -1, size)


def block_of(blocks: Float[Array, "*s n b"], block: Int[Array, "*s"]) -> Float[Array, "*s b"]:
    """Returns one block of each position."""
    return jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]


def search_blocks(
    sums: Float[Array, "*s n"],
    weights_of: Callable[[Int[Array, "*s"]], Float[Array, "*s b"]],
    uniforms: Float[Array, "*s"],
) -> tuple[Int[Array, "*s"], Int[Array, "*s"]]:
    """Inverts a cumulative distribution at two levels, from the weights of blocks and those of one block.

    Returns:
        The block, and the index in the block, of the first weight at which the cumulative weight exceeds uniform *
        total.
    """
    # 1. Find the block: the first whose cumulative weight exceeds the target.
    ends = jnp.cumsum(sums, axis=-1)  # [*s, n]
    target = uniforms[..., None] * ends[..., -1:]
    block = jnp.minimum((ends <= target).sum(-1), ends.shape[-1] - 1)
    # 2. Find the weight in the block: the target minus the cumulative weight of the blocks before it.
    inside = weights_of(block)  # [*s, b]
    before = jnp.take_along_axis(ends, block[..., None], axis=-1) - inside.sum(-1, keepdims=True)
    within = jnp.cumsum(inside, axis=-1)
    # The two levels round differently: clip the rest into the block, so that the id found has a positive weight.
    rest = jnp.clip(target - before, 0.0, within[..., -1:] * (1.0 - 1e-6))
    return block, (within <= rest).sum(-1)


def token_stats(
    logits: Float[Array, "L V"], canvas: Int[Array, "L"], sample: Int[Array, "L"], eos: Int[Array, ""]
) -> TokenStats:
    """Computes the statistics of one row from all of its logits."""
    # With e = exp(logit - best): p = e / sum(e), and the entropy is log(sum(e)) + sum(e * (best - logit)) / sum(e).
    best = logits.max(axis=-1, keepdims=True)
    argmax = most_probable(logits)
    # Sums over e are 25 times faster on a CPU than exp(log_softmax) and top_k. Each [L, V] difference is used once, so
    # that XLA fuses it into its sum instead of storing it.
    e = jnp.exp(logits - best)
    total = e.sum(axis=-1)
    p = lambda ids: jnp.take_along_axis(e, ids[:, None], axis=-1)[:, 0] / total
    # The second largest probability, for the margin: the largest one without the argmax.
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
    """Log-probabilities of the model before any logits processor, by position in the text, with k alternatives each.

    They are normalised over the ids that the model may emit, all but `Corruption.forbidden`, as those of `score`.
    """

    chosen: Float[Array, "B S"]  # log-probability of the emitted token
    top_ids: Int[Array, "B S k"]  # the k most probable ids
    top: Float[Array, "B S k"]  # their log-probabilities


class Trajectory(NamedTuple):
    """For each position in the text: the pass that last accepted its token, and the log-probability in that pass."""

    step: Int[Array, "B S"]  # index of the row's denoising or verifying pass; -1: a token of the user
    log_prob: Float[Array, "B S"]  # under the distribution that the token was drawn from


def draw_log_prob(
    logits: Float[Array, "L V"], ids: Int[Array, "L"], temperature: Float[Array, ""]
) -> Float[Array, "L"]:
    """Computes log-probabilities of the distribution that `draw` draws from, softmax(logits / temperature)."""
    log_p = jax.nn.log_softmax(logits / jnp.maximum(temperature, 1e-6), axis=-1)
    return jnp.take_along_axis(log_p, ids[:, None], axis=-1)[:, 0]


def write_changed(
    old: Array,
    fresh: Array,
    changed: Bool[Array, "L"],
    start: Int[Array, ""],
    source: Int[Array, "L"] | None = None,
) -> Array:
    """Writes the values that this pass has changed into an array over the positions of one row's text.

    Args:
        old: Values by position in the text [S, ...].
        fresh: New values for the window [L, ...].

    Returns:
        The updated array [S, ...].
    """
    # Positions that have not changed keep their old value, which moves along with its token.
    here = slice_at(old, start, fresh.shape[0])
    here = here if source is None else here[jnp.maximum(source, 0)]
    which = changed.reshape(-1, *[1] * (fresh.ndim - 1))
    return write_at(old, jnp.where(which, fresh.astype(old.dtype), here), start)


def update_logprobs(
    logprobs: LogprobBuffer,
    logits: Float[Array, "L V"],
    answer: Int[Array, "L"],
    forbidden: tuple[int, ...],
    changed: Bool[Array, "L"],
    start: Int[Array, ""],
    source: Int[Array, "L"] | None,
) -> LogprobBuffer:
    """Writes the log-probabilities of tokens of one row; forbidden ids have no share, as in `score`."""
    k = logprobs.top_ids.shape[-1]
    log_p = jax.nn.log_softmax(forbid(logits, forbidden), axis=-1)
    top, ids = jax.lax.top_k(log_p, max(k, 1))
    chosen = jnp.take_along_axis(log_p, answer[:, None], axis=-1)[:, 0]
    new = LogprobBuffer(chosen, ids[:, :k].astype(jnp.int32), top[:, :k])
    return jax.tree.map(lambda old, fresh: write_changed(old, fresh, changed, start, source), logprobs, new)


def slice_at(x: Array, start: Int[Array, ""], size: int) -> Array:
    """Returns x[start : start + size] along the first axis; x itself if it has this size.

    Args:
        x: Array [S, ...].

    Returns:
        The slice [size, ...].
    """
    return x if x.shape[0] == size else jax.lax.dynamic_slice_in_dim(x, start, size)


def write_at(x: Array, piece: Array, start: Int[Array, ""]) -> Array:
    """Returns x with `piece` written at `start`; the piece itself if it has the shape of x.

    Args:
        x: Array [S, ...].
        piece: Array [L, ...] with L <= S; converted to the dtype of x.

    Returns:
        The updated array [S, ...].
    """
    piece = piece.astype(x.dtype)
    return piece if x.shape == piece.shape else jax.lax.dynamic_update_slice_in_dim(x, piece, start, 0)
