"""nano distilled to fewer forward passes: the student accepts in one pass what took the teacher several.

    mercury train configs/distill_nano.py        # two CPU cores: about ten minutes
    mercury eval add3 --model runs/distill_nano/model

The teacher is the embedded model. Its answers to Sudokus with few givens and to sums are decoded with their
trajectories; those that are right become the targets of the student, from every canvas of the trajectory. With
threshold(0.99) the student takes 1.2 and 1.3 passes where the teacher takes 2.4 and 4.8, and all of 512 answers of each
are right (docs/training.md).
"""

import dataclasses

from mercury_jax import rl
from mercury_jax.decode import rules
from mercury_jax.tasks import Problem
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import TrainConfig, load_recipe


def few_givens(problem: Problem) -> bool:
    """Sums, and Sudokus with at most five givens."""
    return sum(cell in "1234" for cell in problem.input) <= 5 or "+" in problem.input


def config() -> TrainConfig:
    base = load_recipe("nano")
    return dataclasses.replace(
        base,
        name="distill_nano",
        init="nano",
        objective=rl.FewSteps(certainty=1.0, temperature=0.5, early=0.5),
        data=rl.Trajectories(
            tasks=("sudoku4", "add3"), only=few_givens, sampler=rules.threshold(0.99), max_tokens=32
        ),
        optim=OptimConfig(optimizer="muon", lr=2e-3, warmup=20, decay="wsd", final=0.02, tail=0.4),
        steps=300,
        batch=64,
        row=96,
        ema=0.98,
        eval_every=100,
        eval_batches=1,
        sample_every=0,
        save_every=100,
        log_every=10,
    )
