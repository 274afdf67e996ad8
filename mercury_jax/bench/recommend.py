"""Recommends a decoding rule: the most tokens per forward pass without a measurable loss of accuracy.

The baseline is one token per step. A rule passes on a set of questions if the paired 95% interval of its difference in
accuracy from the baseline meets two conditions:

- The upper end is at least 0: the rule is not significantly worse.
- The lower end is above -2 points: a loss of 2 points or more is ruled out (a test of non-inferiority). Without this
  condition, any rule would pass on a sufficiently small set of questions.

Both must hold on every task. The rule is chosen on one half of the questions and reported on the other half, because
the best of many rules looks better than it is on the questions that it was chosen on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mercury_jax.config import refuse
from mercury_jax.evaluate.runner import Z, paired

MARGIN = 2.0  # points of accuracy
# The least number of questions at which a rule with the baseline's answers rules out a loss of MARGIN.
LEAST = math.floor(100 * Z / MARGIN) + 1


class RuleResult(NamedTuple):
    """The result of one rule on one task. All rules have the same questions in the same order.

    Attributes:
        rule: Name of the rule, with its parameters.
        code: Python expression that makes the rule.
        task: Name of the task.
        right: Whether the answer is right, for each question.
        tokens: Number of tokens of each answer.
        forwards: Number of forward passes of each answer.
        made: Tokens of the timed batches.
        seconds: Seconds of the timed batches.
        speedup: Tokens/s relative to one token per step.
    """

    rule: str
    code: str
    task: str
    right: Sequence[bool]
    tokens: Sequence[int]
    forwards: Sequence[int]
    made: float = 0.0
    seconds: float = 0.0
    speedup: float | None = None


class Advice(NamedTuple):
    """A recommendation, with figures from the second half of the questions.

    Attributes:
        code: Python expression of the rule; None if no rule is recommended.
        rule: Name of the rule.
        reason: Why this rule is recommended, or why none is.
        tasks: Figures on each task.
        tokens_per_forward: Over all tasks.
        tokens_per_second: On all questions, because batches are not split into halves.
        speedup: Tokens/s relative to one token per step, the geometric mean over tasks.
        ruled_out: Whether the second half rules out a loss of MARGIN points on every task as well.
        considered: Number of settings that were compared.
    """

    code: str | None
    rule: str | None
    reason: str
    tasks: tuple[dict[str, Any], ...] = ()
    tokens_per_forward: float | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None
    ruled_out: bool | None = None
    considered: int = 0


def recommend(base: Sequence[RuleResult], others: Sequence[RuleResult], seed: int = 0) -> Advice:
    """Recommends one rule for all tasks."""
    if not base:
        raise refuse("base", base, "one result for each task")
    rules = _by_rule(base, others)
    halves = [_halves(len(b.right), seed) for b in base]
    first, second = [h[0] for h in halves], [h[1] for h in halves]
    reason = _uninformative(base, first)
    if reason is not None:
        return Advice(None, None, reason, considered=len(rules))
    faster = [cases for cases in rules if per_forward(cases, first) > per_forward(base, first)]
    # The difference of each faster rule from the baseline on each task.
    differences = [[points(*z) for z in zip(base, cases, first, strict=True)] for cases in faster]
    good = [cases for cases, found in zip(faster, differences) if all(map(loses_nothing, found))]
    if good:
        best = max(good, key=lambda cases: (per_forward(cases, first), _rate(cases) or 0.0))
        return _reported(base, best, second, len(rules))
    if not faster:
        reason = f"none of {len(rules)} settings needs fewer forward passes per token than one token per step"
        return Advice(None, None, reason, considered=len(rules))
    # No rule passed. Name the one that came closest: the highest lower end on its worst task.
    worst = [
        min(zip(found, cases, first, strict=True), key=lambda one: one[0][1])
        for cases, found in zip(faster, differences)
    ]
    (mean, low, high), case, some = max(worst, key=lambda one: one[0][1])
    why = "significantly worse" if high < 0 else f"a loss of {MARGIN:g} points is not ruled out"
    reason = (
        f"none of {len(faster)} faster settings keeps the accuracy of one token per step; the nearest, {case.rule}, is "
        f"at {mean:+.1f} points on {case.task} (95% {low:+.1f} to {high:+.1f}, n = {len(some)}): {why}"
    )
    return Advice(None, None, reason, considered=len(rules))


def points(before: RuleResult, now: RuleResult, chosen: np.ndarray) -> tuple[float, float, float]:
    """Computes the paired difference in accuracy on some of the questions, with its 95% interval.

    Returns:
        (mean, low, high) of accuracy(now) - accuracy(before), in percentage points.
    """
    mean, low, high = paired([before.right[i] for i in chosen], [now.right[i] for i in chosen])
    return 100 * mean, 100 * low, 100 * high


def loses_nothing(difference: tuple[float, float, float]) -> bool:
    """Says whether a difference is not significantly negative and rules out a loss of MARGIN points.

    Args:
        difference: (mean, low, high) from `points`.
    """
    return difference[2] >= 0 and difference[1] > -MARGIN


def per_forward(cases: Sequence[RuleResult], chosen: Sequence[np.ndarray]) -> float:
    """Computes the tokens per forward pass over the chosen questions of all tasks."""
    tokens = sum(c.tokens[i] for c, some in zip(cases, chosen, strict=True) for i in some)
    forwards = sum(c.forwards[i] for c, some in zip(cases, chosen, strict=True) for i in some)
    return tokens / max(forwards, 1)


def _halves(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(seed).permutation(n)
    return np.sort(order[: n // 2]), np.sort(order[n // 2 :])


def _by_rule(base: Sequence[RuleResult], others: Sequence[RuleResult]) -> list[list[RuleResult]]:
    """Groups results by rule, in the order of the baseline's tasks. Rules that miss a task are left out."""
    found: dict[str, dict[str, RuleResult]] = {}
    for case in others:
        found.setdefault(case.rule, {})[case.task] = case
    whole = [[cases[b.task] for b in base] for cases in found.values() if all(b.task in cases for b in base)]
    for cases in whole:
        for b, case in zip(base, cases, strict=True):
            if len(case.right) != len(b.right):
                allowed = f"{len(b.right)} answers, as many as the baseline"
                raise refuse("others", len(case.right), allowed)
    return whole


def _uninformative(base: Sequence[RuleResult], first: Sequence[np.ndarray]) -> str | None:
    """Explains why these questions cannot tell a harmless rule from a harmful one; None if they can."""
    for b, some in zip(base, first, strict=True):
        if len(some) < LEAST:
            return (
                f"{b.task} has {len(some)} questions to choose by; with fewer than {LEAST} not even a rule that "
                f"changes no answer can be told from one that loses {MARGIN:g} points (ask {2 * LEAST} or more)"
            )
        share = 100 * sum(b.right[i] for i in some) / len(some)
        if share <= MARGIN:
            least = f"a rule could not lose {MARGIN:g} points there"
            return f"one token per step gets {share:.1f}% of {b.task} right: {least}"
    return None


def _rate(cases: Sequence[RuleResult]) -> float | None:
    """Computes tokens per second over all tasks; None if nothing was timed."""
    seconds = sum(c.seconds for c in cases)
    return sum(c.made for c in cases) / seconds if seconds > 0 else None


def _reported(
    base: Sequence[RuleResult], best: list[RuleResult], second: Sequence[np.ndarray], considered: int
) -> Advice:
    """Reports the chosen rule on the second half of the questions, which were not used to choose it."""
    tasks, differences = [], []
    for before, now, some in zip(base, best, second, strict=True):
        differences.append(points(before, now, some))
        accuracy, base_accuracy = (sum(case.right[i] for i in some) / len(some) for case in (now, before))
        tasks.append({
            "task": now.task, "n": len(some), "accuracy": accuracy, "accuracy_one_a_step": base_accuracy,
            **dict(zip(("points", "points_low", "points_high"), differences[-1])),
            "tokens_per_forward": per_forward([now], [some]),
            "tokens_per_forward_one_a_step": per_forward([before], [some]), "speedup": now.speedup,
        })  # fmt: skip
    speedups = [c.speedup for c in best if c.speedup]
    figures: dict[str, Any] = dict(
        tasks=tuple(tasks), tokens_per_forward=per_forward(best, second), tokens_per_second=_rate(best),
        speedup=statistics.geometric_mean(speedups) if len(speedups) == len(best) else None,
        ruled_out=all(map(loses_nothing, differences)), considered=considered,
    )  # fmt: skip
    lost = [c.task for c, d in zip(best, differences, strict=True) if d[2] < 0]
    if lost:
        reason = f"{best[0].rule}, the best on the first half, is significantly worse on the second: {', '.join(lost)}"
        return Advice(None, best[0].rule, reason, **figures)
    reason = f"the most tokens per forward pass of {considered} settings that lose nothing against one token per step"
    return Advice(best[0].code, best[0].rule, reason, **figures)
