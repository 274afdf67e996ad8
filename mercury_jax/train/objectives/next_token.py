"""The autoregressive objective: predict the next clean token, of autoregressive models and of causal encoders."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mercury_jax import noise
from mercury_jax.config import at_least, one_of, refuse
from mercury_jax.train.objectives import objective as parts
from mercury_jax.train.objectives.objective import BOUND, Normalise, Objective
from mercury_jax.types import Batch, Key, Loss, Model, Params


def next_token(*, normalise: Normalise = "token", prompt: float = 0.0) -> Objective:
    """The autoregressive loss: the cross-entropy of each answer token given the clean tokens before it.

    For models whose encoding pass predicts the next token (`ModelConfig.predicts_next`). Nothing is noised, so it
    trains models without a mask too, such as those of Qwen3's build. Exact: -log p of the answer in nats per token.

    Args:
        normalise: "token", or "answer": each document is divided by its scored tokens.
        prompt: Weight of the prompt's tokens; those of the answer have 1.

    Returns:
        The objective.

    Raises:
        ValueError: An argument is out of range; or, when the objective is traced, a model with predicts_next = False.
    """
    if normalise == "canvas":
        raise refuse("normalise", normalise, "token or answer: next tokens stand outside of canvases")
    one_of(Normalise, normalise=normalise)
    at_least(0, prompt=prompt)

    def objective(key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption) -> Loss:
        del key, corruption
        if not model.config.predicts_next:
            raise refuse("predicts_next", False, "True, for the objective next_token")
        following = next_tokens(model, batch)
        target = jnp.where(following.known, following.token, batch.tokens)
        ce, hit = parts.cross_entropy(model, params, batch, batch.tokens, target)
        answer = following.known & following.answer
        weight = answer + prompt * (following.known & ~following.answer)
        share = parts.shares(batch, weight > 0, normalise) * weight
        metrics = {BOUND: parts.masked_mean(ce, answer), "causal_accuracy": parts.masked_mean(hit, answer)}
        return Loss((ce * share).sum(1), share.sum(1), metrics)

    return objective


class NextTokens(NamedTuple):
    """What an encoding pass should predict at each slot of a packed row.

    Attributes:
        token: The token after the one in the slot.
        known: The slot is clean, and its document continues.
        answer: The token after it is not part of the prompt.
    """

    token: Int[Array, "B T"]
    known: Bool[Array, "B T"]
    answer: Bool[Array, "B T"]


def next_tokens(model: Model, batch: Batch) -> NextTokens:
    """Finds the next token of every clean slot: in the next slot, or in the document's canvases.

    A document of an autoregressive model is all clean; its editable tokens are the answer. Elsewhere a document stands
    as its clean tokens at positions 0, 1, ... and its canvases at positions first, first + 1, ... in the slots behind.
    The token at p + 1 >= first is read from the canvases, which hold it even where the clean part ends; before that it
    stands in the next slot.

    Args:
        model: Tells whether documents have canvases.
        batch: Packed rows.

    Returns:
        The targets of all slots.
    """
    slots = batch.tokens.shape[1]
    index = jnp.arange(slots)[None]
    if model.config.autoregressive:
        after = lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1)))
        return NextTokens(
            after(batch.tokens), after(batch.positions) == batch.positions + 1, after(batch.editable)
        )
    # The slot where the document's canvases begin, and the position of the token there.
    begins = jax.lax.cummin(jnp.where(batch.canvas >= 0, index, slots - 1), axis=1, reverse=True)
    first = jnp.take_along_axis(batch.positions, begins, axis=1)
    want = batch.positions + 1
    answer = want >= first
    at = jnp.minimum(jnp.where(answer, begins + want - first, index + 1), slots - 1)
    # Behind a document stands padding or another one, both at position 0, where no token is the next.
    known = (batch.canvas < 0) & (jnp.take_along_axis(batch.positions, at, axis=1) == want)
    return NextTokens(jnp.take_along_axis(batch.tokens, at, axis=1), known, answer)
