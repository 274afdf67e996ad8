"""Accuracy and forward passes of two models on the same held-out problems, paired: for training on rewards and for
distillation.

Run with `python -m benchmarks.rewards BEFORE AFTER --task sudoku4 --most-givens 5 --steps 1`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

import mercury_jax as mj
from mercury_jax.cli import app, arguments
from mercury_jax.cli.arguments import Float, Int, Positional, option
from mercury_jax.rl.rollouts import chats, problems_of, task_reward
from mercury_jax.tasks import Problem


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
    limit: Int = 512
    """Problems."""
    seed: Int = 0
    """Of the problems."""


def answers(source: str, problems: list[tuple[str, Problem]], args: RewardsBenchmark) -> tuple[Any, Any]:
    """Which answers are right, and the forward passes of each."""
    how: dict[str, Any] = {}
    if args.threshold is not None:
        how["sampler"] = mj.rules.threshold(args.threshold)
    if args.temperature:
        how["sampler"] = mj.rules.ancestral()
    if args.steps is not None:
        how["plan"] = mj.Plan(steps=args.steps)
    out = mj.sample(mj.load(source), chats(problems), max_tokens=32, temperature=args.temperature, **how)
    return np.asarray(task_reward(problems)(chats(problems), out.texts)), np.asarray(out.forwards, float)


def run(argv: Sequence[str]) -> int:
    """Compares the models; prints one JSON object and returns the exit code.

    Raises:
        ValueError: An option is wrong.
    """
    args = arguments.read(RewardsBenchmark, argv, "python -m benchmarks.rewards")
    few = lambda p: args.most_givens is None or sum(c in "1234" for c in p.input) <= args.most_givens
    problems = problems_of((args.task,), few, (args.seed, 99), args.limit, "test")
    (a, passes_a), (b, passes_b) = (answers(source, problems, args) for source in (args.before, args.after))
    gain, n = b - a, len(a)
    row = {
        "task": args.task, "most_givens": args.most_givens, "steps": args.steps, "threshold": args.threshold,
        "temperature": args.temperature, "n": n,
        "before": float(a.mean()), "after": float(b.mean()), "gain": float(gain.mean()),
        "gain_95": [float(gain.mean() + z * gain.std(ddof=1) / np.sqrt(n)) for z in (-1.96, 1.96)],
        "forwards_before": float(passes_a.mean()), "forwards_after": float(passes_b.mean()),
        "forwards_ratio": float(passes_b.mean() / passes_a.mean()),
    }  # fmt: skip
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(app.run_script(run))
