"""GRPO on 4x4 Sudokus with few givens, each answered in one forward pass.

    mercury train configs/grpo_sudoku.py         # two CPU cores: a few minutes
    mercury report runs/grpo_sudoku              # curves: reward, accuracy

The embedded model solves nearly all of these in two passes and 38% of them in one. The policy is that one pass: all 16
cells are drawn at once, each from its own distribution, and the reward is 1 for a solved Sudoku. Then the log-
probability of an answer is the sum over its tokens, exactly, so the estimator is that of d1 without masks in the
prompt.
"""

import dataclasses

from mercury_jax import rl
from mercury_jax.config import Plan
from mercury_jax.decode import rules
from mercury_jax.tasks import Problem
from mercury_jax.train.optim import OptimConfig
from mercury_jax.train.recipe import TrainConfig, load_recipe


def few_givens(problem: Problem) -> bool:
    return sum(cell in "1234" for cell in problem.input) <= 5


def config() -> TrainConfig:
    base = load_recipe("nano")
    return dataclasses.replace(
        base,
        name="grpo_sudoku",
        init="nano",
        objective=rl.GRPO(estimator="diffu_grpo", mask_prompt=0.0),
        data=rl.Rollouts(
            tasks=("sudoku4",),
            only=few_givens,
            n=8,
            max_tokens=32,
            sampler=rules.ancestral(),
            plan=Plan(steps=1),
        ),
        optim=OptimConfig(lr=2e-4, warmup=5, decay="constant", weight_decay=0.0),
        steps=300,
        batch=64,
        row=64,
        ema=0.95,
        eval_every=50,
        eval_batches=4,
        sample_every=0,
        save_every=100,
        log_every=5,
    )
