"""Logits processors whose parameters are numbers: temperature, truncation, and penalties.

An autoregressive decoder counts the tokens before a position. On a canvas tokens are decided in any order: what counts
for a position is every decided token, before and behind it, but not the position's own.
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from mercury_jax.decode.ranges import Above, AtLeast, Between, Finite
from mercury_jax.decode.registration import logits_processor
from mercury_jax.decode.sampler import Logits, Param
from mercury_jax.decode.token_stats import NEVER
from mercury_jax.types import View


def keep_forbidden(old: Logits, new: Logits) -> Logits:
    """Returns `new`, finite, with NEVER wherever `old` has it: scaling alone would revive an id, or overflow.

    Args:
        old: Logits before a processor.
        new: Logits after it.

    Returns:
        The new logits.
    """
    return jnp.where(old > NEVER, jnp.clip(new, NEVER, -NEVER), NEVER)


def columns_of(ids: Int[Array, "*s"], first_id: int | Int[Array, ""], size: int) -> Int[Array, "*s"]:
    """Converts ids to columns of a chunk of the vocabulary.

    Args:
        ids: Ids; negative ones are padding.
        first_id: The id of the chunk's first column.
        size: Columns of the chunk.

    Returns:
        The column of each id; `size` for padding and for ids outside of the chunk, so that `mode="drop"` drops it.
    """
    column = ids - first_id
    return jnp.where((ids < 0) | (column < 0), size, column)


@logits_processor(name="temperature", needs_logits=False)
def temperature(logits: Logits, view: View, t: Annotated[Param, AtLeast(0)] = 1.0) -> Logits:
    """Divides the logits by `t`, for everything that is read from them (confidence, entropy).

    The temperature of the draw is a separate parameter, `Sampler.temperature`.

    Args:
        logits: Of one row.
        view: Unused.
        t: Temperature.

    Returns:
        The scaled logits.
    """
    return keep_forbidden(logits, logits / jnp.maximum(t, 1e-6))


@logits_processor(
    name="cooling", needs_logits=False, source="DiffusionGemma, transformers' generation config"
)
def cooling(
    logits: Logits,
    view: View,
    last: Annotated[Param, AtLeast(0)] = 0.4,
    first: Annotated[Param, AtLeast(0)] = 0.8,
) -> Logits:
    """Divides by a temperature that falls linearly in time, from `first` at pure noise to `last` at clean text.

    Args:
        logits: Of one row.
        view: Reads `t`.
        last: Temperature at time 0.
        first: Temperature at time 1.

    Returns:
        The scaled logits.
    """
    return keep_forbidden(logits, logits / jnp.maximum(last + (first - last) * view.t, 1e-6))


@logits_processor(name="top_k")
def top_k(logits: Logits, view: View, k: Annotated[Param, AtLeast(1, integer=True)] = 50) -> Logits:
    """Keeps the `k` most probable ids of each position; ties with the k-th stay.

    Args:
        logits: Of one row.
        view: Unused.
        k: How many ids.

    Returns:
        Logits that are NEVER at all other ids.
    """
    ordered = jnp.sort(logits, axis=-1)[:, ::-1]
    at = jnp.clip(k, 1, logits.shape[-1]) - 1
    return jnp.where(logits >= jax.lax.dynamic_slice_in_dim(ordered, at, 1, axis=1), logits, NEVER)


@logits_processor(name="top_p", source="nucleus sampling, arXiv 1904.09751")
def top_p(logits: Logits, view: View, p: Annotated[Param, Between(0, 1)] = 0.95) -> Logits:
    """Keeps the smallest set of ids whose total probability reaches `p`.

    Args:
        logits: Of one row.
        view: Unused.
        p: Probability of the set; 1 keeps every id.

    Returns:
        Logits that are NEVER at all other ids.
    """
    ordered = jnp.sort(logits, axis=-1)[:, ::-1]
    mass = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    # An id is kept while the mass before it is below p. The first always is; at p = 1 all are, although the sums
    # may round up to 1 before the last one.
    needed = ((before < p) | (p >= 1)).at[:, 0].set(True)
    least = jnp.min(jnp.where(needed, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= least, logits, NEVER)


@logits_processor(name="min_p", source="arXiv 2407.01082")
def min_p(logits: Logits, view: View, p: Annotated[Param, Between(0, 1)] = 0.05) -> Logits:
    """Keeps the ids that are at least `p` times as probable as the most probable one.

    Args:
        logits: Of one row.
        view: Unused.
        p: Share of the largest probability.

    Returns:
        Logits that are NEVER at all other ids.
    """
    least = logits.max(axis=-1, keepdims=True) + jnp.log(jnp.clip(p, 1e-30, 1.0))
    return jnp.where(logits >= least, logits, NEVER)


@logits_processor(name="repetition", needs_logits=False, source="CTRL, arXiv 1909.05858, section 4.1")
def repetition(logits: Logits, view: View, p: Annotated[Param, Above(0)] = 1.0) -> Logits:
    """Divides positive logits by `p`, and multiplies negative ones, of ids in the prompt or the answer.

    Args:
        logits: Of one row.
        view: Reads the counts, the canvas and the answer.
        p: Penalty; 1 changes nothing.

    Returns:
        The penalised logits.

    Departs from the paper: it divides all logits; here, as in the implementations in use, negative ones are
    multiplied, so that they fall as well.
    """
    p = jnp.maximum(p, 1e-6)
    size = logits.shape[-1]
    seen = (answer_counts(view, size) > 0) | (_chunk(view.prompt_counts, view, size) > 0)
    return keep_forbidden(logits, jnp.where(seen, jnp.where(logits > 0, logits / p, logits * p), logits))


@logits_processor(name="presence", needs_logits=False, source="presence_penalty of the OpenAI API")
def presence(logits: Logits, view: View, p: Annotated[Param, Finite()] = 0.0) -> Logits:
    """Subtracts `p` from every id that the answer holds.

    Args:
        logits: Of one row.
        view: Reads the counts, the canvas and the answer.
        p: Penalty; negative values favour repetition.

    Returns:
        The penalised logits.
    """
    return keep_forbidden(logits, logits - p * (answer_counts(view, logits.shape[-1]) > 0))


@logits_processor(name="frequency", needs_logits=False, source="frequency_penalty of the OpenAI API")
def frequency(logits: Logits, view: View, p: Annotated[Param, Finite()] = 0.0) -> Logits:
    """Subtracts `p` for each time that the answer holds an id.

    Args:
        logits: Of one row.
        view: Reads the counts, the canvas and the answer.
        p: Penalty per occurrence; negative values favour repetition.

    Returns:
        The penalised logits.
    """
    return keep_forbidden(logits, logits - p * answer_counts(view, logits.shape[-1]))


def answer_counts(view: View, size: int) -> Int[Array, "L v"]:
    """Counts how often ids occur in the answer, as seen from each position of the window.

    The answer before the window counts for every position, and a decided token for every position but its own. Under
    uniform noise nothing is ever decided: there the previous answer counts instead, but only for the positions behind
    a token, because two equal neighbours would otherwise suppress each other in turn. At time 0 the canvas is a draft
    that is verified from left to right, and a token counts for the positions behind it only. The end of text does not
    count: a run of them at the end would make the position before them avoid ending.

    Args:
        view: Of one row.
        size: Number of ids, from `view.first_id` on.

    Returns:
        Counts [L, size].
    """
    at = jnp.arange(view.canvas.shape[0], dtype=jnp.int32)
    i, j = at[:, None], at[None, :]  # i: the position that looks, j: the token that counts. [L, L]
    decided = (view.editable & ~view.masked) & jnp.where(view.t > 0, i != j, j < i)
    # Under masked noise an open position holds exactly the mask, and so does `noise`. A uniform canvas equals its
    # fresh noise at every open position with probability V^-open, which costs one step's counts and nothing else.
    redrawn = jnp.any(view.masked & (view.canvas != view.noise)) & (view.step > 0)
    counted = jnp.where(view.masked, redrawn & (j < i), decided)
    token = jnp.where(view.masked, view.answer, view.canvas)
    counted &= token != view.eos
    counts = jnp.broadcast_to(_chunk(view.output_counts, view, size), (at.shape[0], size))
    # A scatter of L x L ones is cheaper than one-hot rows [L, V] and their sums.
    column = columns_of(token, view.first_id, size)
    return counts.at[i, column[None, :]].add(counted.astype(counts.dtype), mode="drop")


def _chunk(counts: Int[Array, "V"], view: View, size: int) -> Int[Array, "v"]:
    return jax.lax.dynamic_slice_in_dim(counts, view.first_id, size)
