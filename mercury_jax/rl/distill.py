"""Distillation to few steps: the student learns to accept in one pass what the teacher accepted in several.

The teacher's answers are decoded once, with the pass that accepted each token. From the canvas before any of these
passes the student predicts all tokens that are still masked (self-distillation through time, arXiv 2410.21035; on the
trajectories of decoding and with a push towards certainty where it is right: dParallel, arXiv 2509.26488).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mercury_jax.config import at_least, refuse
from mercury_jax.decode.rollout import masked_answer_logits
from mercury_jax.noise import Corruption
from mercury_jax.rl.grpo import PolicyBatch
from mercury_jax.types import LM, Key, Loss, Model, Params


@dataclass(frozen=True, kw_only=True)
class FewSteps:
    """Cross-entropy of the teacher's tokens from an earlier canvas of its trajectory, and the entropy where it is
    right.

    For each answer a pass s of its trajectory is drawn, uniform over its passes; what was accepted in s or later is
    masked. Per masked token: CE + certainty * H(p^(1/temperature)) where the most probable token is the teacher's.
    Answers whose reward is 0 are left out.

    Attributes:
        certainty: Weight of the entropy.
        temperature: Of the distribution whose entropy is reduced: below 1, only what is uncertain has a gradient.
        early: Share of the answers of which all tokens are masked (s = 0), beside the uniform draw.

    Raises:
        ValueError: A field is out of range.
    """

    certainty: float = 1.0
    temperature: float = 0.5
    early: float = 0.5

    def __post_init__(self) -> None:
        at_least(0, certainty=self.certainty, early=self.early)
        if not self.temperature > 0:
            raise refuse("temperature", self.temperature, "more than 0")
        if self.early > 1:
            raise refuse("early", self.early, "a share, 0 to 1")

    def __call__(
        self, key: Key, model: Model, params: Params, batch: PolicyBatch, corruption: Corruption
    ) -> Loss:
        """Implements `Objective` for batches of answers."""
        lm = LM(model, params, None, corruption)  # pyright: ignore[reportArgumentType]  # ids need no tokenizer
        answers = jax.tree.map(jnp.asarray, batch.answers)
        pass_key, early_key = jax.random.split(key)
        rows = answers.order.shape[:1]
        passes = jnp.max(answers.order, axis=1) + 1
        start = jnp.floor(jax.random.uniform(pass_key, rows) * passes)
        start = jnp.where(jax.random.uniform(early_key, rows) < self.early, 0, start)
        known = answers.order >= 0
        masked = (answers.order >= start[:, None]) & known
        logits, target = masked_answer_logits(lm, params, answers, masked)
        log_p = jax.nn.log_softmax(logits, axis=-1)
        ce = -jnp.take_along_axis(log_p, target[..., None], axis=-1)[..., 0]
        right = (logits.argmax(-1) == target) & masked
        sharp = jax.nn.log_softmax(logits / self.temperature, axis=-1)
        entropy = -jnp.sum(jnp.exp(sharp) * jnp.where(jnp.isfinite(sharp), sharp, 0.0), axis=-1)
        kept = masked & (jnp.asarray(batch.rewards) > 0)[:, None]
        loss = jnp.where(kept, ce + self.certainty * jnp.where(right, entropy, 0.0), 0.0)
        count = kept.sum(1).astype(jnp.float32)
        mean = lambda x: (jnp.where(kept, x, 0.0).sum(), count.sum())
        metrics = {
            "teacher_ce": mean(ce), "right": mean(right.astype(jnp.float32)), "entropy": mean(entropy),
            "teacher_right": ((jnp.asarray(batch.rewards) > 0).sum().astype(jnp.float32), jnp.float32(len(count))),
            "teacher_passes": (passes.sum().astype(jnp.float32), jnp.float32(len(count))),
        }  # fmt: skip
        return Loss(loss.sum(1), count, metrics)
