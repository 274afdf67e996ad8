"""Distillation to few steps: the student learns to accept in one pass what the teacher accepted in several.

`rl.Trajectories` decodes the teacher's answers once and records which pass accepted each token. The student sees the
canvas as it was before one of these passes, and predicts every token that was still masked (self-distillation through
time, arXiv 2410.21035). Following dParallel (arXiv 2509.26488), the loss also lowers the student's entropy at
positions where its prediction is already right, so that confidence rules accept these tokens earlier.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mercury_jax.config import NonNegativeFloat, PositiveFloat, Share, check_fields
from mercury_jax.decode.rollout import masked_answer_logits
from mercury_jax.noise import Corruption
from mercury_jax.rl.grpo import PolicyBatch
from mercury_jax.types import LM, Key, Loss, Model, Params


@dataclass(frozen=True, kw_only=True)
class FewSteps:
    """Cross-entropy of the teacher's tokens given an earlier canvas of its trajectory, plus an entropy penalty.

    For each answer a pass s is drawn uniformly from the passes of its trajectory (passes are counted within each
    canvas), and the tokens accepted in pass s or later are masked. The loss of a masked token is

        CE(teacher's token) + certainty * [argmax p = teacher's token] * H(p^(1/temperature)),

    averaged over the masked tokens of the batch. Answers with reward 0 do not count. Needs `rl.Trajectories` as data.

    Attributes:
        certainty: Weight of the entropy term.
        temperature: Temperature of the distribution whose entropy is minimised. Below 1 the distribution is sharper, so
            that positions that are already confident have almost no gradient.
        early: Probability of s = 0, that is of masking the whole answer; otherwise s is uniform.

    Raises:
        ValueError: A field is out of range.
    """

    certainty: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.5
    early: Share = 0.5

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(
        self, key: Key, model: Model, params: Params, batch: PolicyBatch, corruption: Corruption
    ) -> Loss:
        """Implements `Objective` for batches of answers."""
        lm = LM(model, params, None, corruption)  # pyright: ignore[reportArgumentType]  # ids need no tokenizer
        answers = jax.tree.map(jnp.asarray, batch.answers)
        pass_key, early_key = jax.random.split(key)
        # 1. One pass s per answer [B]. `order` [B, S] is the rank within its canvas of the pass that accepted a token,
        #    or -1 where no pass did.
        rows = answers.order.shape[:1]
        passes = jnp.max(answers.order, axis=1) + 1
        start = jnp.floor(jax.random.uniform(pass_key, rows) * passes)
        start = jnp.where(jax.random.uniform(early_key, rows) < self.early, 0, start)
        # 2. The canvas before pass s: tokens accepted in s or later are masked again. [B, S]
        known = answers.order >= 0
        masked = (answers.order >= start[:, None]) & known
        logits, target = masked_answer_logits(lm, params, answers, masked)  # [B, S, V], [B, S]
        log_p = jax.nn.log_softmax(logits, axis=-1)
        ce = -jnp.take_along_axis(log_p, target[..., None], axis=-1)[..., 0]
        # 3. Entropy only where the argmax is the teacher's token: elsewhere it would make a wrong token more certain.
        right = (logits.argmax(-1) == target) & masked
        sharp = jax.nn.log_softmax(logits / self.temperature, axis=-1)
        # An id of probability 0 has log p = -inf, and 0 * -inf would be NaN.
        entropy = -jnp.sum(jnp.exp(sharp) * jnp.where(jnp.isfinite(sharp), sharp, 0.0), axis=-1)
        # A wrong answer is no target: the student would learn the teacher's mistakes.
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
