"""VRPO: preference optimisation of diffusion models with estimates of little variance (LLaDA 1.5, arXiv 2505.19223).

DPO (arXiv 2305.18290) compares log p of two answers under the policy and a reference. Here log p is the bound of masked
diffusion, an estimate. Its variance, which also biases the loss, is reduced by several strata of noise with one mask
each, and by the same masks for policy and reference. `Preferences` makes the batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import at_least, refuse
from mercury_jax.decode.rollout import AnswerBatch, token_log_probs
from mercury_jax.decode.state import ArrayLike
from mercury_jax.noise import Corruption
from mercury_jax.types import LM, Key, Loss, Model, Params


class PreferenceBatch(NamedTuple):
    """Pairs of answers to the same prompt, the preferred one first: what `VRPO` scores.

    Attributes:
        answers: Laid out for the model, S tokens each; every leaf is [B, 2, ...].
        seed: Of the masks; the same in all rows of a microbatch.
        reference: The reference policy's estimates of the bound under these masks, in nats.
    """

    answers: AnswerBatch
    seed: Int[np.ndarray, "B"]
    reference: Float[np.ndarray, "B 2"]

    @property
    def editable(self) -> Bool[Array, "B 2 S"]:
        """Tokens of the answers; the loop counts them."""
        return jnp.arange(self.answers.slots.shape[-1]) < jnp.asarray(self.answers.lengths)[..., None]


@dataclass(frozen=True, kw_only=True)
class VRPO:
    """-log sigmoid(beta [(B(chosen) - B_ref(chosen)) - (B(rejected) - B_ref(rejected))]), the mean over pairs.

    B is the estimate "elbo" of `token_log_probs`, summed over the answer. Policy and reference see the same masks
    (antithetic sampling), and the number of masks is stratified over the samples, one mask each, which are the three
    techniques of the paper.

    Attributes:
        beta: How strongly the policy is kept at the reference.
        samples: Masks of each answer. All of them are passes with a gradient.

    Raises:
        ValueError: A field is out of range.
    """

    beta: float = 0.1
    samples: int = 8

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise refuse("beta", self.beta, "more than 0")
        at_least(1, samples=self.samples)

    def bounds(self, lm: LM, params: Params, answers: AnswerBatch, seed: ArrayLike) -> Float[Array, "B 2"]:
        """Estimates the bound on log p of both answers of each pair.

        Args:
            lm: Model and noise.
            params: Parameters.
            answers: Of `PreferenceBatch`.
            seed: Of the masks, the same in all rows [B].

        Returns:
            Nats.
        """
        both = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, *x.shape[2:]), answers)  # [2 B, ...]
        key = jax.random.key(jnp.asarray(seed)[0])
        found = token_log_probs(lm, params, both, key, estimator="elbo", samples=self.samples)
        return found.sum(-1).reshape(-1, 2)

    def __call__(
        self, key: Key, model: Model, params: Params, batch: PreferenceBatch, corruption: Corruption
    ) -> Loss:
        """Implements `Objective` for pairs of answers."""
        del key  # masks are drawn from the batch's seed, under which the reference was estimated
        lm = LM(model, params, None, corruption)  # pyright: ignore[reportArgumentType]  # ids need no tokenizer
        rewards = self.beta * (
            self.bounds(lm, params, batch.answers, batch.seed) - jnp.asarray(batch.reference)
        )
        margin = rewards[:, 0] - rewards[:, 1]
        rows = jnp.float32(len(margin))
        metrics = {
            "margin": (margin.sum(), rows),
            "accuracy": ((margin > 0).sum().astype(jnp.float32), rows),
            "chosen_reward": (rewards[:, 0].sum(), rows),
            "rejected_reward": (rewards[:, 1].sum(), rows),
        }
        return Loss(-jax.nn.log_sigmoid(margin), jnp.ones_like(margin), metrics)
