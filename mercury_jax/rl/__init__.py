"""Training on what the model itself decodes, or on preferences: rewards, distillation, pairs. Recipes hold values.

    policy = rl.Rollouts(tasks=("countdown3",), n=8)      # data: problems, answers that the model draws, rewards
    TrainConfig(data=policy, objective=rl.GRPO(estimator="coupled_grpo"), ...)

rollouts   `Rollouts` and `Trajectories`, data that decode with the current parameters or with a teacher's
grpo       `GRPO`, the clipped policy gradient with the log-probability estimates of diffusion models
distill    `FewSteps`, which teaches to decode in one pass what took the teacher several
preferences, vrpo   `Preferences`, pairs of answers in files, and `VRPO`, DPO on the bound of masked diffusion

The loop, the step, checkpoints and logs are those of every other training (`mercury_jax.train`).
"""

from mercury_jax.rl.distill import FewSteps
from mercury_jax.rl.grpo import GRPO
from mercury_jax.rl.preferences import Preferences
from mercury_jax.rl.rollouts import Rollouts, Trajectories
from mercury_jax.rl.vrpo import VRPO

__all__ = ["GRPO", "VRPO", "FewSteps", "Preferences", "Rollouts", "Trajectories"]
