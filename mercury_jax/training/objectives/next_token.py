"""The autoregressive objective: next-token prediction for autoregressive models and for causal encoders.

`next_tokens` finds the target of every clean slot of a packed row. `edited.py` and `uniform.py` use it too, to train
the encoding pass of a diffusion model to predict the next token in the same forward pass.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mercury_jax import noise
from mercury_jax.config import NonNegativeFloat, checked, refuse
from mercury_jax.training.objectives import objective as parts
from mercury_jax.training.objectives.objective import BOUND, Objective
from mercury_jax.types import Batch, Key, Loss, Model, Params

# Next tokens stand outside of canvases.
NormaliseText = Literal["token", "answer"]


@checked
def next_token(*, normalise: NormaliseText = "token", prompt: NonNegativeFloat = 0.0) -> Objective:
    """The autoregressive loss: the cross-entropy of each answer token given the clean tokens before it.

    For models whose encoding pass predicts the next token (`ModelConfig.predicts_next`). It noises nothing, so the
    model needs no mask id (Qwen3, for example, has none). The loss is exactly -log p of the answer, not a bound.

    Args:
        normalise: "token", or "answer" to divide each document by its scored tokens.
        prompt: Weight of the prompt tokens; answer tokens have weight 1.

    Returns:
        The objective, for any noise.

    Raises:
        ValueError: An argument is out of range; or, when the objective is traced, a model with predicts_next = False.
    """

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
    """The targets of next-token prediction at each slot of a packed row.

    Attributes:
        token: The id of the next token.
        known: The slot holds a clean token that is not the last of its document; otherwise `token` has no meaning.
        answer: The next token belongs to the answer, not to the prompt.
    """

    token: Int[Array, "B T"]
    known: Bool[Array, "B T"]
    answer: Bool[Array, "B T"]


def next_tokens(model: Model, batch: Batch) -> NextTokens:
    """Finds the next token of every clean slot.

    Args:
        model: Its config says whether documents have canvases.
        batch: Packed rows.

    Returns:
        The targets of all slots, leaves [B, T].
    """
    # With canvases, a document is [clean tokens at positions 0, 1, ... | canvases at positions first, first + 1, ...].
    # Block-causal models repeat the answer in both parts; only the last block may be missing in the clean part. So the
    # next token, at position p + 1, is read from the canvases if p + 1 >= first, and from the next slot otherwise.
    slots = batch.tokens.shape[1]
    index = jnp.arange(slots)[None]
    if model.config.autoregressive:
        # No canvases: the whole document is clean, and its editable tokens are the answer.
        after = lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1)))
        return NextTokens(
            after(batch.tokens), after(batch.positions) == batch.positions + 1, after(batch.editable)
        )
    # The slot where the document's canvases begin, and the position of the token there. [B, T]
    begins = jax.lax.cummin(jnp.where(batch.canvas >= 0, index, slots - 1), axis=1, reverse=True)
    first = jnp.take_along_axis(batch.positions, begins, axis=1)
    want = batch.positions + 1
    answer = want >= first
    at = jnp.minimum(jnp.where(answer, begins + want - first, index + 1), slots - 1)  # slot of the next token
    # After its last token a document has no next one: the slot found is padding or the next document, at position 0.
    known = (batch.canvas < 0) & (jnp.take_along_axis(batch.positions, at, axis=1) == want)
    return NextTokens(jnp.take_along_axis(batch.tokens, at, axis=1), known, answer)
