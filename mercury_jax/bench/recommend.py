"""Which rule to use: the most tokens a forward among those that lose no accuracy that can be seen.

A rule *loses nothing* on a set of questions where, of the paired 95% interval of its accuracy minus that of
one token a step, the upper end is 0 or more (it is not significantly worse) and the lower end is above
-2 points (a loss of 2 points or more is ruled out). The first alone would welcome every rule that
was asked too few questions; the second is a test of non-inferiority. Both must hold on each task.

The rule is chosen on one half of the questions and its figures are those of the other half: the best of many on
the same questions is better there than it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mercury_jax.config import refuse
from mercury_jax.evaluate.report import Z, paired

MARGIN = 2.0  # points of accuracy
LEAST = (
    math.floor(100 * Z / MARGIN) + 1
)  # with fewer questions not even equal answers rule out a loss of MARGIN


class Case(NamedTuple):
    """One rule on one task, question by question; the same questions in the same order for every rule."""

    rule: str
    code: str  # Python that makes it
    task: str
    right: Sequence[bool]
    tokens: Sequence[int]  # of each answer
    forwards: Sequence[int]
    made: float = 0.0  # tokens of the timed batches
    seconds: float = 0.0  # of the same
    speedup: float | None = None


class Advice(NamedTuple):
    """code: the rule as Python, or None with the reason. tasks: its figures on each, of the second half.

    ruled_out: whether the second half, too, rules out a loss of MARGIN points on every task. Rates of tokens a
    second are of all questions: batches were not split.
    """

    code: str | None
    rule: str | None
    reason: str
    tasks: tuple[dict[str, Any], ...] = ()
    tokens_per_forward: float | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None  # tokens a second over those of one token a step
    ruled_out: bool | None = None
    considered: int = 0


def recommend(base: Sequence[Case], others: Sequence[Case], seed: int = 0) -> Advice:
    """Advice over all tasks of `base` (one token a step, one Case a task). Rules that miss a task are left out."""
    if not base:
        raise refuse("base", base, "one Case a task")
    rules = _by_rule(base, others)
    halves = [_halves(len(b.right), seed) for b in base]
    vacuous = _vacuous(base, [first for first, _ in halves])
    if vacuous:
        return Advice(None, None, vacuous, considered=len(rules))
    first = [h[0] for h in halves]
    best = _best(base, rules, first)
    if best is None:
        return Advice(None, None, _nobody(base, rules, first), considered=len(rules))
    return _reported(base, best, [h[1] for h in halves], len(rules))


def points(before: Case, now: Case, chosen: np.ndarray) -> tuple[float, float, float]:
    """(mean, low, high) of the difference in accuracy on the chosen questions, in points, paired, 95%."""
    mean, low, high = paired([before.right[i] for i in chosen], [now.right[i] for i in chosen])
    return 100 * mean, 100 * low, 100 * high


def loses_nothing(difference: tuple[float, float, float]) -> bool:
    """Not significantly worse, and a loss of MARGIN points or more is ruled out."""
    return difference[2] >= 0 and difference[1] > -MARGIN


def per_forward(cases: Sequence[Case], chosen: Sequence[np.ndarray]) -> float:
    """Tokens over forwards, summed over the chosen questions of all tasks."""
    tokens = sum(c.tokens[i] for c, some in zip(cases, chosen, strict=True) for i in some)
    forwards = sum(c.forwards[i] for c, some in zip(cases, chosen, strict=True) for i in some)
    return tokens / max(forwards, 1)


def _halves(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(seed).permutation(n)
    return np.sort(order[: n // 2]), np.sort(order[n // 2 :])


def _by_rule(base: Sequence[Case], others: Sequence[Case]) -> list[list[Case]]:
    """For each rule its cases, in the order of the baseline's tasks."""
    found: dict[str, dict[str, Case]] = {}
    for case in others:
        found.setdefault(case.rule, {})[case.task] = case
    tasks = [b.task for b in base]
    whole = [cases for cases in found.values() if set(cases) >= set(tasks)]
    for cases in whole:
        for b in base:
            if len(cases[b.task].right) != len(b.right):
                raise refuse(
                    "others", len(cases[b.task].right), f"{len(b.right)} answers, as many as the baseline"
                )
    return [[cases[task] for task in tasks] for cases in whole]


def _vacuous(base: Sequence[Case], first: Sequence[np.ndarray]) -> str | None:
    """Why no rule could be told from a harmful one on these questions, if so."""
    for b, some in zip(base, first, strict=True):
        if len(some) < LEAST:
            return (
                f"{b.task} has {len(some)} questions to choose by; with fewer than {LEAST} not even a rule that "
                f"changes no answer can be told from one that loses {MARGIN:g} points (ask {2 * LEAST} or more)"
            )
        share = 100 * sum(b.right[i] for i in some) / len(some)
        if share <= MARGIN:
            least = f"a rule could not lose {MARGIN:g} points there"
            return f"one token a step gets {share:.1f}% of {b.task} right: {least}"
    return None


def _best(base: Sequence[Case], rules: list[list[Case]], first: Sequence[np.ndarray]) -> list[Case] | None:
    fast = per_forward(base, first)
    kept = [
        cases
        for cases in rules
        if per_forward(cases, first) > fast
        and all(loses_nothing(points(b, c, some)) for b, c, some in zip(base, cases, first, strict=True))
    ]
    return max(kept, key=lambda cases: (per_forward(cases, first), _rate(cases) or 0.0), default=None)


def _nobody(base: Sequence[Case], rules: list[list[Case]], first: Sequence[np.ndarray]) -> str:
    """Which rule came nearest, and by what it fails."""
    fast = per_forward(base, first)
    faster = [cases for cases in rules if per_forward(cases, first) > fast]
    if not faster:
        return f"none of {len(rules)} settings takes fewer forwards a token than one token a step"
    # Of each its worst task; of these the one whose interval reaches down least.
    worst = [
        min(((points(*z), z[1], len(z[2])) for z in zip(base, cases, first, strict=True)), key=_low)
        for cases in faster
    ]
    (mean, low, high), case, n = max(worst, key=_low)
    why = "significantly worse" if high < 0 else f"a loss of {MARGIN:g} points is not ruled out"
    return (
        f"none of {len(faster)} faster settings keeps the accuracy of one token a step; the nearest, {case.rule}, is "
        f"at {mean:+.1f} points on {case.task} (95% {low:+.1f} to {high:+.1f}, n = {n}): {why}"
    )


def _low(found: tuple[tuple[float, float, float], Case, int]) -> float:
    return found[0][1]


def _reported(
    base: Sequence[Case], best: list[Case], second: Sequence[np.ndarray], considered: int
) -> Advice:
    """The chosen rule on the questions that had no say in choosing it."""
    differences = [points(b, c, some) for b, c, some in zip(base, best, second, strict=True)]
    tasks = tuple(_figures(*z) for z in zip(base, best, second, differences, strict=True))
    figures: dict[str, Any] = dict(
        tasks=tasks, tokens_per_forward=per_forward(best, second), tokens_per_second=_rate(best),
        speedup=_speedup(best), ruled_out=all(map(loses_nothing, differences)), considered=considered,
    )  # fmt: skip
    lost = [c.task for c, d in zip(best, differences, strict=True) if d[2] < 0]
    if lost:
        reason = f"{best[0].rule}, the best on the first half, is significantly worse on the second: {', '.join(lost)}"
        return Advice(None, best[0].rule, reason, **figures)
    reason = f"the most tokens a forward of {considered} settings that lose nothing against one token a step"
    return Advice(best[0].code, best[0].rule, reason, **figures)


def _figures(
    before: Case, now: Case, some: np.ndarray, difference: tuple[float, float, float]
) -> dict[str, Any]:
    share = lambda case: sum(case.right[i] for i in some) / len(some)
    return {
        "task": now.task,
        "n": len(some),
        "accuracy": share(now),
        "accuracy_one_a_step": share(before),
        **dict(zip(("points", "points_low", "points_high"), difference)),
        "tokens_per_forward": per_forward([now], [some]),
        "tokens_per_forward_one_a_step": per_forward([before], [some]),
        "speedup": now.speedup,
    }


def _rate(cases: Sequence[Case]) -> float | None:
    seconds = sum(c.seconds for c in cases)
    return sum(c.made for c in cases) / seconds if seconds > 0 else None


def _speedup(cases: Sequence[Case]) -> float | None:
    """Geometric mean over the tasks of the medians of pairs taken by turns."""
    known = [c.speedup for c in cases if c.speedup]
    return math.exp(sum(map(math.log, known)) / len(known)) if len(known) == len(cases) else None
