"""Sequential Monte Carlo against best-of-n at equal passes, on held-out 4x4 Sudokus with four givens.

    python -m benchmarks.search --limit 256 --out docs/results/search-nano.jsonl

Both are the public calls, `mj.best_of_n` and `mj.smc`, with the same sampler, seeds, number of answers and
steps. The reward is verifiable and partial: the share of satisfied constraints. The intervals of the
differences are paired over the puzzles.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import mercury_jax as mj
from mercury_jax import tasks
from mercury_jax.compilation import hardware
from mercury_jax.evaluate.runner import wilson

TEMPERATURES = (1.0, 1.5, 2.0)
BATCH = 64  # puzzles of a call
GIVENS = 4  # the fewest that can determine a grid


def puzzles(count: int, seed: int, split: tasks.Split = "test") -> list[tasks.Problem]:
    """Draws distinct Sudokus with four givens.

    Args:
        count: How many.
        seed: Draws them.
        split: The side; the settings were chosen on "train".

    Returns:
        The problems, the same for the same seed.
    """
    rng, found = np.random.default_rng((seed, 5)), {}
    while len(found) < count:
        problem = tasks.draw(tasks.TASKS["sudoku4"], rng, split)
        if sum(cell in "1234" for cell in problem.input) == GIVENS:
            found[problem.input] = problem
    return list(found.values())


def constraints(prompts: Sequence[Any], texts: Sequence[str]) -> list[float]:
    """The reward: the share of 13 constraints that a grid does not violate; 0 for a text that is no grid.

    Rows, columns and boxes hold no digit twice, and the givens are kept. A finished grid has 1 exactly if it
    is the solution. Undecided tokens are `_` and violate nothing.

    Args:
        prompts: Conversations whose first message is the puzzle.
        texts: Answers, finished or not. A token is a character.

    Returns:
        One number in 0..1 per text.
    """
    found = []
    for prompt, text in zip(prompts, texts, strict=True):
        given, grid = prompt[0]["content"], text[:19]
        fits = all(
            b == "_" or (b in "1234" if a != "\n" else b == a) for a, b in zip(given, grid, strict=False)
        )
        if len(grid) < len(given) or text[19:].strip("_") or not fits:
            found.append(0.0)
            continue
        rows = [grid[i : i + 4] for i in (0, 5, 10, 15)]
        boxes = [rows[i][j : j + 2] + rows[i + 1][j : j + 2] for i in (0, 2) for j in (0, 2)]
        units = [*rows, *("".join(column) for column in zip(*rows, strict=True)), *boxes]
        digits = [[cell for cell in unit if cell != "_"] for unit in units]
        kept = all(a in ("0", b) or b == "_" for a, b in zip(given, grid, strict=True))
        found.append((sum(len(set(unit)) == len(unit) for unit in digits) + kept) / 13)
    return found


class Setting(NamedTuple):
    """How both calls decode, and how `smc` steers."""

    n: int = 4  # answers of each puzzle
    steps: int = 8
    scale: float = 30.0
    temper: float = 0.0
    ess: float = 0.9
    undecided: str = "_"  # what the reward sees of an undecided token; "": the guess


def compare(
    lm: mj.LM,
    problems: Sequence[tasks.Problem],
    seed: int,
    setting: Setting,
    temperatures: Sequence[float] = TEMPERATURES,
) -> Iterator[dict[str, Any]]:
    """Solves puzzles by both calls.

    Args:
        lm: The model.
        problems: From `puzzles`.
        seed: Of the draws.
        setting: Of both calls.
        temperatures: Of the drawn tokens; higher ones make single answers worse.

    Yields:
        A JSON-ready record for each temperature and call; that of `smc` has the paired differences.
    """
    for temperature in temperatures:
        how: dict[str, Any] = dict(
            reward=constraints, n=setting.n, max_tokens=32, temperature=temperature, sampler=mj.rules.ancestral(),
            plan=mj.Plan(steps=setting.steps),
        )  # fmt: skip
        steering = dict(
            scale=setting.scale, temper=setting.temper, ess=setting.ess, undecided=setting.undecided or None
        )
        best = _solve(lm, problems, seed, mj.best_of_n, how)
        smc = _solve(lm, problems, seed, mj.smc, how | steering)
        for name, (solved, rewards, measured) in (("best of n", best), ("smc", smc)):
            low, high = wilson(int(solved.sum()), len(problems))
            record = dict(
                method=name, temperature=temperature, **setting._asdict(), seed=seed, puzzles=len(problems),
                solved=float(solved.mean()), low=low, high=high, reward=float(rewards.mean()), **measured,
            )  # fmt: skip
            if name == "smc":
                record |= _difference("solved", solved, best[0]) | _difference("reward", rewards, best[1])
            yield record | {"rule": "ancestral", "model": lm.name, "hardware": hardware()}


def _solve(
    lm: mj.LM, problems: Sequence[tasks.Problem], seed: int, search: Any, how: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Whether each puzzle is solved [N], the reward of its answer [N], and means over the puzzles."""
    solved, rewards, forwards, resamplings = [], [], [], []
    for i in range(0, len(problems), BATCH):
        some = problems[i : i + BATCH]
        out = search(
            lm, [[{"role": "user", "content": p.input}] for p in some], seed=seed + i * how["n"], **how
        )
        solved += [
            tasks.TASKS["sudoku4"].check(p.input, text) for p, text in zip(some, out.texts, strict=True)
        ]
        rewards += out.rewards.tolist()
        forwards += out.forwards.tolist()
        resamplings += out.resamplings.tolist()
    means = {"forwards": float(np.mean(forwards)), "resamplings": float(np.mean(resamplings))}
    return np.array(solved, float), np.array(rewards), means


def _difference(name: str, ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """The mean paired difference with its 95% interval (normal approximation)."""
    each = ours - theirs
    half = 1.96 * each.std(ddof=1) / np.sqrt(len(each)) if len(each) > 1 else float("nan")
    mean = float(each.mean())
    return {f"{name}_gain": mean, f"{name}_gain_low": mean - half, f"{name}_gain_high": mean + half}


def line(row: Mapping[str, Any]) -> str:
    """A record for people."""
    text = (
        f"T {row['temperature']:.1f} {row['method']:10} solved {row['solved']:6.1%} of {row['puzzles']} "
        f"(95% {100 * row['low']:.1f} to {100 * row['high']:.1f}), reward {row['reward']:.3f}, "
        f"{row['forwards']:.1f} forwards a puzzle"
    )
    if "solved_gain" not in row:
        return text
    gain, low, high = (100 * row[f"solved_gain{end}"] for end in ("", "_low", "_high"))
    return (
        f"{text}; {gain:+.1f} points (paired {low:+.1f} to {high:+.1f}), {row['resamplings']:.1f} resamplings"
    )


def main() -> None:
    """Prints a table, and writes the records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder (default: the embedded model)")
    parser.add_argument("--limit", type=int, default=256, help="puzzles (default 256)")
    parser.add_argument("--seed", type=int, default=0, help="draws puzzles and tokens (default 0)")
    for name, default in Setting()._asdict().items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default {default}")
    parser.add_argument("--out", type=Path, help="write one JSON object a line to this file")
    args = parser.parse_args()
    setting, rows = Setting(*(getattr(args, name) for name in Setting._fields)), []
    for row in compare(mj.load(args.model), puzzles(args.limit, args.seed), args.seed, setting):
        rows.append(row)
        print(line(row), flush=True)
    if args.out is not None:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
