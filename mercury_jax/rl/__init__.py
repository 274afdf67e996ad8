"""Reinforcement learning, preference optimisation and few-step distillation of diffusion language models.

    policy = rl.Rollouts(tasks=("countdown3",), n=8)      # data: problems, sampled answers, rewards
    TrainConfig(data=policy, objective=rl.GRPO(estimator="coupled_grpo"), ...)

rollouts      `Rollouts` and `Trajectories`: data sampled with the current parameters, or with a teacher's
grpo          `GRPO`, the clipped policy gradient on estimated log-probabilities
answers       `write_answers`, a model's own greedy answers as chats, for the training of a drafter
distill       `FewSteps`, which trains the student to accept in one pass what the teacher accepted in several
preferences   `Preferences`, pairs of answers read from files
vrpo          `VRPO`, DPO on the likelihood bound of masked diffusion

`answer_batch` and `token_log_probs` (`decode.rollout`) give a loop of one's own the estimates that these use.

The training loop, the update, checkpoints and logs are the ones of `mercury_jax.training`.
"""

from mercury_jax.decode.rollout import AnswerBatch, Rollout, answer_batch, token_log_probs
from mercury_jax.rl.distill import FewSteps
from mercury_jax.rl.grpo import GRPO
from mercury_jax.rl.rollouts import Rollouts, Trajectories
from mercury_jax.rl.vrpo import VRPO, Preferences

__all__ = [
    "GRPO", "VRPO", "AnswerBatch", "FewSteps", "Preferences", "Rollout", "Rollouts", "Trajectories", "answer_batch",
    "token_log_probs",
]  # fmt: skip
