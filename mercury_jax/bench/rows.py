"""What a trial says: one JSON-ready row, and the case that a recommendation is made of."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from mercury_jax.bench.decode import Trial
from mercury_jax.bench.questions import Asked, told
from mercury_jax.bench.recommend import Case
from mercury_jax.evaluate import card
from mercury_jax.evaluate.report import paired, wilson
from mercury_jax.evaluate.runner import ONE_A_STEP


def rows(trials: Sequence[Trial], asked: Asked) -> list[dict[str, Any]]:
    """One row a trial, the baseline first."""
    return [_row(trial, trials[0], asked) for trial in trials]


def cases(trials: Sequence[Trial], asked: Asked) -> tuple[Case, list[Case]]:
    """(one token a step, the rules that may be advised) on this task."""
    able = [t for t in trials[1:] if t.refused is None and t.entry.code is not None]
    return _case(trials[0], asked), [_case(t, asked) for t in able]


def _row(trial: Trial, base: Trial, asked: Asked) -> dict[str, Any]:
    """Forwards and tokens are means an answer, rates are of whole batches, times are seconds.

    tokens_per_second = tokens_per_forward of all rows x forwards_per_second: forwards are those of rows, not of
    the device loop. canvases_per_forward: 2 for a rule that reads by blind masks as well.
    """
    about = {"rule": trial.entry.rule, "curve": trial.entry.curve, **told(asked)}
    context = {
        "steps": trial.entry.plan.steps,
        "model": trial.entry.lm.name,
        "hardware": card.hardware(),
        "compared_with": ONE_A_STEP,
    }
    if trial.refused is not None:
        return {**about, "refused": trial.refused, **context}
    return {**about, **_quality(trial, base), **_speed(trial), **context}


def _quality(trial: Trial, base: Trial) -> dict[str, Any]:
    n, correct = len(trial.right), sum(trial.right)
    low, high = wilson(correct, n)
    points = (0.0,) * 3 if trial is base else tuple(100 * x for x in paired(base.right, trial.right))
    same = [np.array_equal(a, b) for a, b in zip(trial.tokens, base.tokens, strict=True)]
    alike = trial.entry.lm.tokenizer.fingerprint == base.entry.lm.tokenizer.fingerprint
    return {
        "n": n,
        "correct": correct,
        "accuracy": correct / n,
        "low": low,
        "high": high,
        **dict(zip(("points", "points_low", "points_high"), points)),
        "agreement": sum(same) / n if alike else None,
    }


def _speed(trial: Trial) -> dict[str, Any]:
    seconds, tokens, n = max(sum(trial.seconds), 1e-9), sum(map(len, trial.tokens)), len(trial.tokens)
    return {
        "forwards": sum(trial.forwards) / n,
        "tokens": tokens / n,
        "tokens_per_forward": tokens / max(sum(trial.forwards), 1),
        "canvases_per_forward": _canvases(trial),
        "forwards_per_second": sum(trial.passes) / seconds,
        "tokens_per_second": sum(trial.made) / seconds,
        "speedup": statistics.median(trial.ratios),
        "pairs": len(trial.ratios),
        "time_to_first_frame": trial.first,
        "time_to_last_token": trial.last,
        "temperature": float(trial.sampler.temperature),
    }


def _canvases(trial: Trial) -> int:
    return 2 if trial.sampler.rule.leave_one_out else 1


def _case(trial: Trial, asked: Asked) -> Case:
    """A pass of twice the width counts as two forwards, so that it is not advised for being wide."""
    return Case(
        rule=trial.entry.rule, code=trial.entry.code or "", task=asked.task.name, right=trial.right,
        tokens=[len(t) for t in trial.tokens], forwards=[n * _canvases(trial) for n in trial.forwards],
        made=sum(trial.made), seconds=sum(trial.seconds), speedup=statistics.median(trial.ratios),
    )  # fmt: skip
