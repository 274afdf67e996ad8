"""Rows and plots of `mercury bench decode`, and the cases that `recommend` chooses from.

A record is one JSON-ready row for each entry and task. All of them are made from the trials of `decode.run`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mercury_jax import install
from mercury_jax.bench.decode import QuestionSet, Trial
from mercury_jax.bench.recommend import RuleResult
from mercury_jax.config import refuse
from mercury_jax.evaluate import card
from mercury_jax.evaluate.report import paired, wilson
from mercury_jax.evaluate.runner import ONE_A_STEP

MARKERS = "osD^v<>Pp*hX"  # of matplotlib, one for each curve


def records(trials: Sequence[Trial], asked: QuestionSet) -> list[dict[str, Any]]:
    """One record for each trial, the baseline's first.

    Forwards and tokens are means over the answers, rates are of whole batches, times in seconds. tokens_per_second =
    tokens_per_forward of all rows x forwards_per_second: forwards are counted for each row, not for the device loop.
    canvases_per_forward is 2 for a rule that also predicts each token with that token masked. Accuracy has Wilson's
    95% interval, and points is its paired difference from the baseline.

    Args:
        trials: Of `decode.run`, the baseline first.
        asked: Their questions.

    Returns:
        One item for each trial; of a rule that the model cannot run it has `refused`, the reason.
    """
    return [_record(trial, trials[0], asked) for trial in trials]


def _record(trial: Trial, base: Trial, asked: QuestionSet) -> dict[str, Any]:
    about = {
        "rule": trial.entry.rule, "curve": trial.entry.curve, "task": asked.task.name, "seed": asked.seed,
        "batch": asked.batch, "max_tokens": asked.max_tokens, "steps": trial.entry.plan.steps,
        "model": trial.entry.lm.name, "hardware": card.hardware(), "compared_with": ONE_A_STEP,
    }  # fmt: skip
    if trial.refused is not None:
        return about | {"refused": trial.refused}
    n, correct = len(trial.right), sum(trial.right)
    low, high = wilson(correct, n)
    points = (0.0,) * 3 if trial is base else tuple(100 * x for x in paired(base.right, trial.right))
    same = [np.array_equal(a, b) for a, b in zip(trial.tokens, base.tokens, strict=True)]
    # Ids of another tokenizer, such as a twin's, cannot be compared.
    comparable = trial.entry.lm.tokenizer.fingerprint == base.entry.lm.tokenizer.fingerprint
    quality = {
        "n": n,
        "correct": correct,
        "accuracy": correct / n,
        "low": low,
        "high": high,
        **dict(zip(("points", "points_low", "points_high"), points)),
        "agreement": sum(same) / n if comparable else None,
    }
    seconds, tokens = max(sum(trial.seconds), 1e-9), sum(map(len, trial.tokens))
    speed = {
        "forwards": sum(trial.forwards) / n,
        "tokens": tokens / n,
        "tokens_per_forward": tokens / max(sum(trial.forwards), 1),
        "canvases_per_forward": trial.canvases,
        "forwards_per_second": sum(trial.passes) / seconds,
        "tokens_per_second": sum(trial.made) / seconds,
        "speedup": statistics.median(trial.ratios),
        "pairs": len(trial.ratios),
        "time_to_first_frame": trial.first,
        "time_to_last_token": trial.last,
        "temperature": float(trial.sampler.temperature),
    }
    return about | quality | speed


def results(trials: Sequence[Trial], asked: QuestionSet) -> tuple[RuleResult, list[RuleResult]]:
    """(one token per step, the rules that may be recommended) on this task.

    A pass of twice the width counts as two forwards, so that it is not recommended for being wide.

    Args:
        trials: Of `decode.run`, the baseline first.
        asked: Their questions.

    Returns:
        Results for `recommend.recommend`; rules that were refused are left out.
    """
    able = [t for t in trials[1:] if t.refused is None and t.entry.code is not None]
    base, *others = (
        RuleResult(
            rule=t.entry.rule, code=t.entry.code or "", task=asked.task.name, right=t.right,
            tokens=[len(ids) for ids in t.tokens], forwards=[n * t.canvases for n in t.forwards],
            made=sum(t.made), seconds=sum(t.seconds), speedup=statistics.median(t.ratios),
        )
        for t in (trials[0], *able)
    )  # fmt: skip
    return base, others


# --- plot


def check_plot(path: str | Path) -> None:
    """Refuses a plot that could not be made or written, before anything is measured.

    Raises:
        ValueError: matplotlib is missing, the ending is unknown, or the folder does not exist.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise refuse(
            "plot", str(path), f"any, once matplotlib is installed: {install.command('plot')}"
        ) from None
    path = Path(path)
    kinds = (".png", ".pdf", ".svg")
    if path.suffix.lower() not in kinds:
        raise refuse("plot", str(path), f"a file that ends in {', '.join(kinds)}")
    if not path.absolute().parent.is_dir():
        raise refuse("plot", str(path), "a file in a folder that exists")


def plot(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Draws accuracy with its 95% interval against tokens per second on a log scale.

    Args:
        rows: Of `records`, of any number of tasks; those without an accuracy are left out.
        path: A .png, .pdf or .svg file.

    Returns:
        The path. One panel for each task, one curve for each rule.

    Raises:
        ValueError: No row has an accuracy, or the plot cannot be written.
    """
    shown = [r for r in rows if "accuracy" in r]
    if not shown:
        raise refuse("rows", len(rows), "at least one with an accuracy")
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(r["task"] for r in shown))
    curves = list(dict.fromkeys(r["curve"] for r in shown))
    figure = Figure(figsize=(6.5 * len(names) + 2.5, 6), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot, which would look for a window system
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, task in zip(panels, names, strict=True):
        _panel(axes, task, [r for r in shown if r["task"] == task], curves)
    lines = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels())}
    columns = 1 + len(lines) // 32
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize="x-small", ncols=columns)
    title = f"{shown[0]['model']}, batches of {shown[0]['batch']}, {shown[0]['hardware']}"
    figure.suptitle(title, fontsize="small")
    figure.savefig(path, dpi=150)
    return Path(path)


def _panel(axes: Any, task: str, rows: Sequence[Mapping[str, Any]], curves: Sequence[str]) -> None:
    """The curves of one task, and the accuracy of one token per step as a line."""
    from matplotlib import colormaps

    colors = colormaps["turbo"]
    for i, curve in enumerate(curves):
        points = sorted((r for r in rows if r["curve"] == curve), key=lambda r: r["tokens_per_second"])
        if not points:
            continue
        x, y = [r["tokens_per_second"] for r in points], [r["accuracy"] for r in points]
        # Wilson's interval is not centred; at 0 and n rounding may put the accuracy slightly outside it.
        low = [max(r["accuracy"] - r["low"], 0.0) for r in points]
        high = [max(r["high"] - r["accuracy"], 0.0) for r in points]
        color = colors(i / max(len(curves) - 1, 1))
        axes.plot(x, y, color=color, marker=MARKERS[i % len(MARKERS)], markersize=5, label=curve)
        axes.errorbar(x, y, yerr=(low, high), fmt="none", color=color, alpha=0.3, elinewidth=1)
    slow = [r["accuracy"] for r in rows if r["rule"] == ONE_A_STEP]
    if slow:
        axes.axhline(slow[0], color="gray", linewidth=1, linestyle=":", label=ONE_A_STEP)
    axes.set(
        title=f"{task} (n = {rows[0]['n']})",
        xlabel="tokens per second",
        ylabel="accuracy (95%)",
        xscale="log",
    )
    axes.grid(alpha=0.2)
