"""Which rule to use: the most tokens per forward pass among those that lose no accuracy that can be seen.

A rule loses nothing on a set of questions if, of the paired 95% interval of its accuracy minus that of one token per
step, the upper end is 0 or more (it is not significantly worse) and the lower end is above -2 points (a loss of 2
points or more is ruled out). The first condition alone would accept every rule that was asked too few questions; the
second is a test of non-inferiority. Both must hold on each task.

The rule is chosen on one half of the questions, and its figures are those of the other half: the best of many rules
looks better on the questions that chose it than it is.
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
# With fewer questions not even equal answers rule out a loss of MARGIN.
LEAST = math.floor(100 * Z / MARGIN) + 1


class RuleResult(NamedTuple):
    """One rule on one task. Every rule has the same questions in the same order.

    Attributes:
        code: Python that makes the rule.
        right, tokens, forwards: Of each question: whether the answer is right, its tokens, its forward passes.
        made, seconds: Tokens and seconds of the timed batches.
        speedup: Tokens/s over those of one token per step.
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
    """A recommendation, with the figures of the second half of the questions.

    Attributes:
        code: The rule as Python; None where none is recommended.
        reason: Why this rule, or why none.
        tasks: Figures on each task.
        tokens_per_second: Of all questions, as batches were not split.
        speedup: Tokens/s over those of one token per step.
        ruled_out: Whether the second half, too, rules out a loss of MARGIN points on every task.
        considered: How many settings there were.
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
    """Recommends a rule over all tasks.

    Args:
        base: One token per step, one result for each task.
        others: The rules; those that miss a task are left out.
        seed: Splits the questions into two halves.

    Returns:
        The recommendation, or the reason why there is none.

    Raises:
        ValueError: There is no baseline, or a rule has another number of answers.
    """
    if not base:
        raise refuse("base", base, "one result for each task")
    rules = _by_rule(base, others)
    halves = [_halves(len(b.right), seed) for b in base]
    first, second = [h[0] for h in halves], [h[1] for h in halves]
    reason = _uninformative(base, first)
    if reason is not None:
        return Advice(None, None, reason, considered=len(rules))
    faster = [cases for cases in rules if per_forward(cases, first) > per_forward(base, first)]
    # For each of these rules its difference from the baseline on each task.
    differences = [[points(*z) for z in zip(base, cases, first, strict=True)] for cases in faster]
    good = [cases for cases, found in zip(faster, differences) if all(map(loses_nothing, found))]
    if good:
        best = max(good, key=lambda cases: (per_forward(cases, first), _rate(cases) or 0.0))
        return _reported(base, best, second, len(rules))
    if not faster:
        reason = f"none of {len(rules)} settings needs fewer forward passes per token than one token per step"
        return Advice(None, None, reason, considered=len(rules))
    # Of the worst task of each rule, the one whose interval reaches down least.
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
    """(mean, low, high) of the paired difference in accuracy on the chosen questions, in points, with its 95%
    interval.

    Args:
        before: The baseline.
        now: The rule.
        chosen: Indices of the questions.

    Returns:
        (mean, low, high) in points.
    """
    mean, low, high = paired([before.right[i] for i in chosen], [now.right[i] for i in chosen])
    return 100 * mean, 100 * low, 100 * high


def loses_nothing(difference: tuple[float, float, float]) -> bool:
    """Whether a difference of `points` is not significantly negative and rules out a loss of MARGIN points."""
    return difference[2] >= 0 and difference[1] > -MARGIN


def per_forward(cases: Sequence[RuleResult], chosen: Sequence[np.ndarray]) -> float:
    """Tokens per forward pass over the chosen questions of all tasks.

    Args:
        cases: Results of one rule, one for each task.
        chosen: Indices of the questions of each task.

    Returns:
        Sum of tokens over sum of forward passes.
    """
    tokens = sum(c.tokens[i] for c, some in zip(cases, chosen, strict=True) for i in some)
    forwards = sum(c.forwards[i] for c, some in zip(cases, chosen, strict=True) for i in some)
    return tokens / max(forwards, 1)


def _halves(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(seed).permutation(n)
    return np.sort(order[: n // 2]), np.sort(order[n // 2 :])


def _by_rule(base: Sequence[RuleResult], others: Sequence[RuleResult]) -> list[list[RuleResult]]:
    """For each rule that has all tasks its results, in the order of the baseline's tasks."""
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
    """Why these questions cannot tell a harmless rule from a harmful one; None where they can."""
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
    """Tokens per second over all tasks; None where nothing was timed."""
    seconds = sum(c.seconds for c in cases)
    return sum(c.made for c in cases) / seconds if seconds > 0 else None


def _reported(
    base: Sequence[RuleResult], best: list[RuleResult], second: Sequence[np.ndarray], considered: int
) -> Advice:
    """The chosen rule on the second half of the questions, which had no part in the choice."""
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
