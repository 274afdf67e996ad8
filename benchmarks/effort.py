"""What a reasoning effort does to the answers of a model: accuracy, forward passes and tokens, effort by effort.

    python -m benchmarks.effort --limit 256 --out docs/results/effort-nano.jsonl

Held-out questions are asked as conversations through `mj.sample(lm, questions, effort=...)`, the call of the README.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import mercury_jax as mj
from mercury_jax import tasks
from mercury_jax.compilation import hardware
from mercury_jax.evaluate.runner import wilson

TASKS = {"sudoku4": 32, "add3": 64}  # tokens that an answer may have


def measure(lm: mj.LM, task: str, effort: str | None, limit: int, seed: int) -> dict[str, Any]:
    """Asks held-out questions of one task with one effort.

    Args:
        lm: The model.
        task: A key of `TASKS`.
        effort: A key of `mj.EFFORTS`, or None for a call without one.
        limit: Number of questions.
        seed: Draws the questions.

    Returns:
        One JSON-ready row; forwards and tokens are means an answer, thinking included.
    """
    problems = tasks.draw_distinct(tasks.TASKS[task], limit, seed)
    questions = [[{"role": "user", "content": problem.input}] for problem in problems]
    out = mj.sample(lm, questions, effort=effort, max_tokens=TASKS[task])
    right = sum(tasks.TASKS[task].check(p.input, text) for p, text in zip(problems, out.texts, strict=True))
    low, high = wilson(right, limit)
    return {
        "task": task, "effort": effort, "n": limit, "correct": right, "accuracy": right / limit, "low": low,
        "high": high, "forwards": float(np.mean(out.forwards)), "tokens": float(np.mean(out.lengths)), "seed": seed,
        "model": lm.name, "rule": lm.decoding, "hardware": hardware(),
    }  # fmt: skip


def main() -> None:
    """Prints a table, and writes the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nano", help="a folder, or nano, the embedded model (default)")
    parser.add_argument("--limit", type=int, default=256, help="questions of each task (default 256)")
    parser.add_argument("--seed", type=int, default=0, help="draws the questions (default 0)")
    parser.add_argument("--out", type=Path, help="write one JSON object a line to this file")
    args = parser.parse_args()
    lm, rows = mj.load(None if args.model == "nano" else args.model), []
    for task in TASKS:
        for effort in (None, *mj.EFFORTS):
            row = measure(lm, task, effort, args.limit, args.seed)
            rows.append(row)
            figures = f"{row['accuracy']:6.1%} right (95% {100 * row['low']:.1f} to {100 * row['high']:.1f})"
            print(f"{task:8s} {effort or 'none':8s} {figures}, {row['forwards']:.1f} forwards", flush=True)
    if args.out is not None:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
