"""Compares accuracy and forward passes of two models on the same problems, before and after RL or distillation.

Confidence intervals count classes of equivalent problems. There are hundreds of thousands of 4x4 Sudokus with few
givens, but most are rotations, reflections or renamings of a few.

Run with `python -m benchmarks.rewards BEFORE AFTER --task sudoku4 --most-givens 5 --steps 1`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from scipy import stats

import mercury_jax as mj
from benchmarks.script import run_script
from mercury_jax.cli import arguments
from mercury_jax.cli.arguments import Float, Int, OptionalInt, Positional, option
from mercury_jax.config import at_least, refuse
from mercury_jax.rl.rollouts import chats, problems_of, task_reward
from mercury_jax.tasks import TASKS, Problem


@dataclass(frozen=True, kw_only=True)
class RewardsBenchmark:
    """Compare two models on the same held-out problems.

    examples:
      python -m benchmarks.rewards nano runs/grpo_sudoku/model --most-givens 5 --steps 1
      python -m benchmarks.rewards nano runs/distill_nano/model --task add3 --threshold 0.99
    """

    before: Annotated[Positional[str], option("BEFORE")]
    """The first model."""
    after: Annotated[Positional[str], option("AFTER")]
    """The second model."""
    task: Annotated[str, option("TASK")] = "sudoku4"
    """Of which held-out problems are asked."""
    most_givens: Annotated[int | None, option("N")] = None
    """Only Sudokus with at most this many givens."""
    steps: Annotated[int | None, option("N")] = None
    """Denoising steps of a block. Default: the rule decides."""
    threshold: Annotated[float | None, option("P")] = None
    """Decode by threshold(P). Default: the model's own rule."""
    temperature: Float = 0.0
    """Above 0, tokens are drawn, by the rule `ancestral`; 0 takes the most probable ones."""
    max_tokens: OptionalInt = None
    """Most tokens of an answer. Default: 32, or 128 for sudoku9."""
    limit: Int = 512
    """Problems."""
    seed: Int = 0
    """Of the problems."""

    def __post_init__(self):
        at_least(1, **{"--limit": self.limit})
        if self.max_tokens is not None:
            at_least(1, **{"--max-tokens": self.max_tokens})
        if self.task not in TASKS:
            raise refuse("--task", self.task, ", ".join(sorted(TASKS)))
        if self.most_givens is not None and not self.task.startswith("sudoku"):
            raise refuse("--most-givens", self.most_givens, f"a Sudoku as --task; {self.task} has no givens")
        if self.threshold is not None and self.temperature:
            raise refuse(
                "--threshold", self.threshold, "--temperature 0: drawn tokens use the rule ancestral"
            )


def answers(source: str, problems: list[tuple[str, Problem]], args: RewardsBenchmark) -> tuple[Any, Any]:
    """Decodes the problems with one model.

    Args:
        source: The model, as `mj.load` takes it.
        problems: Pairs (name of the task, problem).
        args: Options of the benchmark.

    Returns:
        1.0 for each correct answer and 0.0 for others [n], and the forward passes of each answer [n].
    """
    how: dict[str, Any] = {}
    if args.threshold is not None:
        how["sampler"] = mj.rules.threshold(args.threshold)
    if args.temperature:
        how["sampler"] = mj.rules.ancestral()
    if args.steps is not None:
        how["plan"] = mj.Plan(steps=args.steps)
    out = mj.sample(
        mj.load(source),
        chats(problems),
        max_tokens=args.max_tokens or (128 if args.task == "sudoku9" else 32),
        temperature=args.temperature,
        **how,
    )
    return np.asarray(task_reward(problems)(chats(problems), out.texts)), np.asarray(out.forwards, float)


def clustered_interval(gain: np.ndarray, classes: Sequence[str]) -> tuple[float, float] | None:
    """Computes a 95% confidence interval of a mean over problems that belong to classes of equivalent problems.

    A model answers rotations or renamings of a puzzle alike, so the problems of a class are not independent. The number
    of classes, not of problems, decides how precise the mean is: the interval uses a cluster-robust standard error, and
    Student's t distribution with (number of classes - 1) degrees of freedom.

    Args:
        gain: Gain of each problem [n].
        classes: Class of each problem [n].

    Returns:
        Both ends of the interval; None if there is only one class, which has no variance between classes.
    """
    names, index = np.unique(np.asarray(classes), return_inverse=True)
    k, mean = len(names), float(gain.mean())
    if k < 2:
        return None
    # Deviations are summed within each class before they are squared: errors of a class may all have the same sign.
    sums = np.bincount(index, gain - mean)
    se = np.sqrt(k / (k - 1) * (sums**2).sum()) / len(gain)
    z = float(stats.t.ppf(0.975, k - 1))
    return mean - z * se, mean + z * se


def run(argv: Sequence[str]) -> int:
    """Compares the models and prints one JSON object.

    Args:
        argv: Command-line arguments.

    Returns:
        The exit code.

    Raises:
        ValueError: An option is wrong, or contradicts another.
    """
    args = arguments.read(RewardsBenchmark, argv, "python -m benchmarks.rewards")
    few = lambda p: args.most_givens is None or sum(c in "123456789" for c in p.input) <= args.most_givens
    try:
        problems = problems_of((args.task,), few, (args.seed, 99), args.limit, "test")
    except ValueError:
        raise refuse(
            "--most-givens", args.most_givens, f"more givens: no problem of {args.task} has so few"
        ) from None
    (a, passes_a), (b, passes_b) = (answers(source, problems, args) for source in (args.before, args.after))
    # Both models answer the same problems: the variance of the paired difference is smaller than of two means.
    gain, classes = b - a, [TASKS[name].canonical(problem.input) for name, problem in problems]
    row = {
        "task": args.task, "most_givens": args.most_givens, "steps": args.steps, "threshold": args.threshold,
        "temperature": args.temperature, "n": len(a), "classes": len(set(classes)),
        "before": float(a.mean()), "after": float(b.mean()), "gain": float(gain.mean()),
        "gain_95": clustered_interval(gain, classes),
        "forwards_before": float(passes_a.mean()), "forwards_after": float(passes_b.mean()),
        "forwards_ratio": float(passes_b.mean() / passes_a.mean()),
    }  # fmt: skip
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(run_script(run))
