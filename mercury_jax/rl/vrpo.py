"""VRPO: preference optimisation of diffusion models with variance reduction (LLaDA 1.5, arXiv 2505.19223).

DPO (arXiv 2305.18290) compares log p of two answers under the policy and a reference policy. A masked diffusion model
replaces log p by a Monte Carlo estimate of the ELBO. The log-sigmoid is not linear, so the variance of that estimate
also biases the loss. VRPO reduces the variance: several noise levels with one mask each, and the same masks for the
policy and the reference. `preferences.py` makes the batches.
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
        answers: Answers laid out for the model, padded to S tokens each; every leaf is [B, 2, ...].
        seed: Seed of the masks; the same value in all rows of a microbatch.
        reference: ELBO of each answer under the reference policy, estimated with the same masks, in nats.
    """

    answers: AnswerBatch
    seed: Int[np.ndarray, "B"]
    reference: Float[np.ndarray, "B 2"]

    @property
    def editable(self) -> Bool[Array, "B 2 S"]:
        """Marks the answer tokens, which the loop counts as scored tokens."""
        return jnp.arange(self.answers.slots.shape[-1]) < jnp.asarray(self.answers.lengths)[..., None]


@dataclass(frozen=True, kw_only=True)
class VRPO:
    """DPO loss on ELBO estimates (VRPO, arXiv 2505.19223).

        -log sigmoid(beta [(B(chosen) - B_ref(chosen)) - (B(rejected) - B_ref(rejected))]), averaged over pairs.

    B is the "elbo" estimate of `mj.token_log_probs`, summed over the answer. The three variance reductions of the paper
    are all used: the budget of `samples` forward passes goes to different noise levels, each level has one mask, and
    the policy and the reference see the same masks (antithetic sampling). The levels are stratified in addition.

    Attributes:
        beta: Strength of the regularisation towards the reference policy (DPO's beta).
        samples: Masks drawn for each answer. Each costs a forward and a backward pass.

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
        """Estimates the ELBO of both answers of each pair.

        Args:
            lm: Model and noise; its own parameters are not read.
            params: Parameters of the policy to evaluate.
            answers: `PreferenceBatch.answers`, leaves [B, 2, ...].
            seed: Seed of the masks [B], the same value in all rows.

        Returns:
            The bound on log p of each answer in nats [B, 2].
        """
        # Chosen and rejected answers become rows of one batch, so that a single pass scores both.
        both = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, *x.shape[2:]), answers)  # [2 B, ...]
        key = jax.random.key(jnp.asarray(seed)[0])
        found = token_log_probs(lm, params, both, key, estimator="elbo", samples=self.samples)  # [2 B, S]
        return found.sum(-1).reshape(-1, 2)

    def __call__(
        self, key: Key, model: Model, params: Params, batch: PreferenceBatch, corruption: Corruption
    ) -> Loss:
        """Implements `Objective` for pairs of answers."""
        del key  # masks are drawn from the batch's seed, under which the reference was estimated
        lm = LM(model, params, None, corruption)  # pyright: ignore[reportArgumentType]  # ids need no tokenizer
        # DPO's implicit reward of each answer [B, 2]: how far the policy moved from the reference on it.
        # DPO's implicit reward of each answer [B, 2]: how far the policy moved from the reference on it.
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
