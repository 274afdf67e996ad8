"""GRPO for diffusion models: a clipped policy gradient on estimates of each token's log-probability.

A diffusion model has no tractable log p of an answer. `GRPO.estimator` selects an estimate: diffu-GRPO, coupled-GRPO,
the ELBO, or the product along the recorded decoding trajectory (TraceRL); `mj.rl.token_log_probs` defines them.
`rollouts.py` makes the batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import NonNegativeFloat, PositiveInt, Share, check_fields, refuse, refuse_if
from mercury_jax.decode.rollout import ESTIMATORS, AnswerBatch, token_log_probs
from mercury_jax.noise import Corruption
from mercury_jax.types import LM, Key, Loss, Model, Params

GroupNorm = Literal["answer", "token"]


class PolicyBatch(NamedTuple):
    """Answers with their advantages: what `GRPO` and `FewSteps` score instead of a `Batch` of documents.

    Attributes:
        answers: B answers laid out for the model, padded to S tokens each.
        rewards: Reward of each answer.
        advantages: Advantage of each answer relative to the other answers to the same prompt.
        seed: Seed of the masks under which log-probabilities are estimated; the same value in all rows.
        old: Log-probability of each token under the policy that sampled the answers, estimated with the same masks, in
            nats. None when the sampling policy is the one being updated.
        reference: The same under the reference policy; None without a KL penalty.
    """

    answers: AnswerBatch
    rewards: Float[np.ndarray, "B"]
    advantages: Float[np.ndarray, "B"]
    seed: Int[np.ndarray, "B"]
    old: Float[np.ndarray, "B S"] | None = None
    reference: Float[np.ndarray, "B S"] | None = None

    @property
    def editable(self) -> Bool[Array, "B S"]:
        """Marks the answer tokens, which the loop counts as scored tokens."""
        return inside(self.answers)


def inside(answers: AnswerBatch) -> Bool[Array, "B S"]:
    """Marks the tokens of each answer, without the padding behind it.

    Args:
        answers: B answers padded to S tokens.

    Returns:
        True at the first `lengths[b]` tokens of row b [B, S].
    """
    return jnp.arange(answers.slots.shape[1]) < jnp.asarray(answers.lengths)[:, None]


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Group relative policy optimisation (GRPO, arXiv 2402.03300, eq. 3) with estimated log-probabilities.

    The loss of a token is

        -min(r A, clip(r, 1 - clip, 1 + clip_high) A) + kl (exp(d) - d - 1),

    with the ratio r = exp(new - old), the advantage A of its answer, and d = reference - new; the last term is the
    estimate of KL(new || reference) of GRPO, eq. 4. `rl.Rollouts` makes the batches. The metric `informative` is the
    share of answers whose advantage is not 0: a group in which all rewards are equal has no gradient.

    Attributes:
        estimator: Estimate of the log-probabilities: "diffu_grpo" (d1, arXiv 2504.12216), "coupled_grpo" (DiffuCoder,
            arXiv 2506.20639), "elbo", or "trajectory" (TraceRL, arXiv 2509.06949).
        samples: Number of estimates that are averaged; None: one. Not for "trajectory", which draws no masks.
        mask_prompt: For "diffu_grpo" only: share of the prompt tokens that are masked too; None: 0.15. With 0 the
            estimate is exact for answers that were decoded in one pass.
        ratios: For "coupled_grpo" only: range of the share of tokens that are masked; None: (0.2, 0.8).
        passes: For "trajectory" only: number of forward passes into which the trajectory is merged; None: 4.
        clip: How far the ratio r may fall below 1.
        clip_high: How far r may rise above 1 (DAPO's clip-higher, arXiv 2503.14476); None: `clip`.
        kl: Weight of the KL penalty against the parameters in `init`; 0: none.
        normalise: "answer" divides the loss of each answer by its length (GRPO); "token" divides the sum over all
            answers by the number of all tokens (DAPO).

    Raises:
        ValueError: A field is out of range.
    """

    estimator: str = "coupled_grpo"
    samples: PositiveInt | None = None
    mask_prompt: Share | None = None
    ratios: tuple[float, float] | None = None
    passes: PositiveInt | None = None
    clip: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat | None = None
    kl: NonNegativeFloat = 0.0
    normalise: GroupNorm = "answer"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.estimator not in ESTIMATORS:
            raise refuse("estimator", self.estimator, ", ".join(ESTIMATORS))
        options = ESTIMATORS[self.estimator]
        allowed = f"None: {self.estimator} takes {', '.join(options)}"
        refuse_if(self, *((name not in options, name, allowed) for name in self._given))

    @property
    def _given(self) -> dict[str, Any]:
        """The estimator's options that are not None."""
        options = dict(
            samples=self.samples, mask_prompt=self.mask_prompt, ratios=self.ratios, passes=self.passes
        )
        return {name: value for name, value in options.items() if value is not None}

    def log_probs(self, lm: LM, params: Params, answers: AnswerBatch, seed: Array) -> Float[Array, "B S"]:
        """Estimates the log-probability of each answer token.

        Args:
            lm: Model and noise; its own parameters are not read.
            params: Parameters of the policy to evaluate.
            answers: B answers padded to S tokens.
            seed: Seed of the masks [B], the same value in all rows. Equal seeds give equal masks, which makes estimates
                under different parameters comparable.

        Returns:
            log p of each token in nats [B, S]; 0 behind the end of an answer.
        """
        options: dict[str, Any] = self._given
        if self.estimator == "trajectory":
            # By default the number of passes depends on the recorded trajectory; under jit it must be static.
            options, key = {"passes": 4, **options}, None
        else:
            key = jax.random.key(jnp.asarray(seed)[0])
        return token_log_probs(lm, params, answers, key, estimator=self.estimator, **options)

    def __call__(
        self, key: Key, model: Model, params: Params, batch: PolicyBatch, corruption: Corruption
    ) -> Loss:
        """Implements `Objective` for batches of answers."""
        del key  # masks are drawn from the batch's seed, under which `old` was estimated
        lm = LM(model, params, None, corruption)  # pyright: ignore[reportArgumentType]  # ids need no tokenizer
        new = self.log_probs(lm, params, batch.answers, jnp.asarray(batch.seed))  # [B, S]
        # On-policy the ratio is 1 everywhere, but its gradient is that of log p: the policy gradient.
        old = jax.lax.stop_gradient(new) if batch.old is None else jnp.asarray(batch.old)
        ratio, advantage = jnp.exp(new - old), jnp.asarray(batch.advantages)[:, None]  # [B, S], [B, 1]
        high = self.clip if self.clip_high is None else self.clip_high
        # The minimum is pessimistic: it removes the gradient once the ratio has moved past the clip range in the
        # direction that the advantage favours, and keeps it where the update must be undone.
        clipped = jnp.clip(ratio, 1.0 - self.clip, 1.0 + high)
        loss = -jnp.minimum(ratio * advantage, clipped * advantage)
        counted = inside(batch.answers)
        mean = lambda x: (jnp.where(counted, x, 0.0).sum(), counted.sum().astype(jnp.float32))
        rows = jnp.float32(len(ratio))
        metrics = {
            "reward": (jnp.asarray(batch.rewards, jnp.float32).sum(), rows),
            "informative": ((advantage != 0).astype(jnp.float32).sum(), rows),
            "answer_tokens": (counted.sum().astype(jnp.float32), rows),
            "clipped": mean((ratio * advantage > clipped * advantage).astype(jnp.float32)),
        }
        if batch.reference is not None:
            # Schulman's k3 estimate of the KL divergence: unbiased, and never negative for a single token.
            gap = jnp.asarray(batch.reference) - new
            divergence = jnp.exp(gap) - gap - 1.0
            loss += self.kl * divergence
            metrics["kl"] = mean(divergence)
        # The update divides sum(per_example) by sum(weight): weight 1 averages over answers, lengths over tokens.
        sums = jnp.where(counted, loss, 0.0).sum(1)
        lengths = jnp.maximum(counted.sum(1), 1).astype(jnp.float32)
        if self.normalise == "answer":
            return Loss(sums / lengths, jnp.ones_like(lengths), metrics)
        return Loss(sums, lengths, metrics)
