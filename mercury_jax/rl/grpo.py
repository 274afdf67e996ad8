"""GRPO for diffusion models: a clipped policy gradient on estimates of each token's log-probability.

A diffusion model has no exact log p of an answer. `estimator` names how it is estimated: diffu-GRPO, coupled-GRPO, the
bound, or along the recorded trajectory (TraceRL); see `mj.token_log_probs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import at_least, one_of, refuse
from mercury_jax.decode.rollout import ESTIMATORS, AnswerBatch, token_log_probs
from mercury_jax.noise import Corruption
from mercury_jax.types import LM, Key, Loss, Model, Params

GroupNorm = Literal["answer", "token"]


class PolicyBatch(NamedTuple):
    """Answers with their advantages: what `GRPO` and `FewSteps` score in place of a `Batch` of documents.

    Attributes:
        answers: Laid out for the model, S tokens each.
        rewards: Of each answer.
        advantages: How much better than the other answers to the same prompt each is.
        seed: Of the masks under which log-probabilities are estimated; the same in all rows.
        old: Log-probabilities of the policy that drew the answers, under the same masks; None: it is the policy that is
            updated.
        reference: Those of the reference policy; None without a penalty.
    """

    answers: AnswerBatch
    rewards: Float[np.ndarray, "B"]
    advantages: Float[np.ndarray, "B"]
    seed: Int[np.ndarray, "B"]
    old: Float[np.ndarray, "B S"] | None = None
    reference: Float[np.ndarray, "B S"] | None = None

    @property
    def editable(self) -> Bool[Array, "B S"]:
        """Tokens of the answers; the loop counts them."""
        return inside(self.answers)


def inside(answers: AnswerBatch) -> Bool[Array, "B S"]:
    """Marks the tokens of the answers, without what fills the last canvas."""
    return jnp.arange(answers.slots.shape[1]) < jnp.asarray(answers.lengths)[:, None]


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Group relative policy optimisation (arXiv 2402.03300) with log-probabilities of a diffusion model.

    Per token: -min(r A, clip(r, 1 - clip, 1 + clip_high) A) + kl (exp(d) - d - 1), with r = exp(new - old) and d =
    reference - new. `Rollouts` makes the batches. The metric `informative` is the share of answers whose advantage is
    not 0: the others, whose group has one reward, teach nothing.

    Attributes:
        estimator: Of log-probabilities: "diffu_grpo" (d1, arXiv 2504.12216), "coupled_grpo" (DiffuCoder, arXiv
            2506.20639), "elbo", or "trajectory" (TraceRL, arXiv 2509.06949).
        samples: Estimates that are averaged; None: one. Not for "trajectory", which draws no masks.
        mask_prompt: Of "diffu_grpo" alone, the share of the prompt's tokens that are masked too; None: 0.15. With 0 it
            is exact for answers that are decoded in one pass.
        passes: Of "trajectory" alone, passes into which the trajectory is merged; None: 4.
        clip: How far below 1 the ratio of new and old probabilities may fall.
        clip_high: How far above 1 it may rise; None: as far.
        kl: Weight of the divergence from the policy that training began with; 0: none.
        normalise: "answer" divides each answer's loss by its length, "token" all of them by all tokens (DAPO).

    Raises:
        ValueError: A field is out of range.
    """

    estimator: str = "coupled_grpo"
    samples: int | None = None
    mask_prompt: float | None = None
    passes: int | None = None
    clip: float = 0.2
    clip_high: float | None = None
    kl: float = 0.0
    normalise: GroupNorm = "answer"

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise refuse("estimator", self.estimator, ", ".join(ESTIMATORS))
        for name, value in self._given.items():
            if name not in ESTIMATORS[self.estimator]:
                raise refuse(
                    name, value, f"None: {self.estimator} takes {', '.join(ESTIMATORS[self.estimator])}"
                )
        one_of(GroupNorm, normalise=self.normalise)
        at_least(0, clip=self.clip, kl=self.kl)
        at_least(0, clip_high=self.clip if self.clip_high is None else self.clip_high)
        at_least(1, samples=1 if self.samples is None else self.samples)
        at_least(1, passes=1 if self.passes is None else self.passes)
        if self.mask_prompt is not None and not 0 <= self.mask_prompt <= 1:
            raise refuse("mask_prompt", self.mask_prompt, "a share, 0 to 1")

    @property
    def _given(self) -> dict[str, Any]:
        """The estimator's options that are not None."""
        options = dict(samples=self.samples, mask_prompt=self.mask_prompt, passes=self.passes)
        return {name: value for name, value in options.items() if value is not None}

    def log_probs(self, lm: LM, params: Params, answers: AnswerBatch, seed: Array) -> Float[Array, "B S"]:
        """Estimates log-probabilities under the masks of a seed.

        Args:
            lm: Model and noise.
            params: Parameters.
            answers: The answers.
            seed: Of the masks, the same in all rows [B].

        Returns:
            Nats of each token, 0 past the end of an answer.
        """
        options: dict[str, Any] = self._given
        if self.estimator == "trajectory":  # the number of passes must be known before tracing
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
        new = self.log_probs(lm, params, batch.answers, jnp.asarray(batch.seed))
        old = jax.lax.stop_gradient(new) if batch.old is None else jnp.asarray(batch.old)
        ratio, advantage = jnp.exp(new - old), jnp.asarray(batch.advantages)[:, None]
        high = self.clip if self.clip_high is None else self.clip_high
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
            gap = jnp.asarray(batch.reference) - new
            divergence = jnp.exp(gap) - gap - 1.0
            loss += self.kl * divergence
            metrics["kl"] = mean(divergence)
        sums = jnp.where(counted, loss, 0.0).sum(1)
        lengths = jnp.maximum(counted.sum(1), 1).astype(jnp.float32)
        if self.normalise == "answer":
            return Loss(sums / lengths, jnp.ones_like(lengths), metrics)
        return Loss(sums, lengths, metrics)
