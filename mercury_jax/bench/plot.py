"""Accuracy against speed, one curve a rule, one panel a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mercury_jax import install
from mercury_jax.config import refuse
from mercury_jax.evaluate.runner import ONE_A_STEP

MARKS = "osD^v<>Pp*hX"


def check(path: str | Path) -> None:
    """Refuse a plot that could not be made or written, before anything is measured."""
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
        raise refuse("plot", str(path), "a file in a folder that is there")


def plot(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Draw the rows that have an accuracy: tokens a second, log scale, against accuracy with its 95% interval."""
    shown = [r for r in rows if "accuracy" in r]
    if not shown:
        raise refuse("rows", len(rows), "at least one with an accuracy")
    check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(r["task"] for r in shown))
    curves = list(dict.fromkeys(r["curve"] for r in shown))
    figure = Figure(figsize=(6.5 * len(tasks) + 2.5, 6), layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: it would choose a window system
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        _panel(axes, task, [r for r in shown if r["task"] == task], curves)
    lines = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels())}
    columns = 1 + len(lines) // 32
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize="x-small", ncols=columns)
    figure.suptitle(
        f"{shown[0]['model']}, batches of {shown[0]['batch']}, {shown[0]['hardware']}", fontsize="small"
    )
    figure.savefig(path, dpi=150)
    return Path(path)


def _panel(axes: Any, task: str, rows: Sequence[Mapping[str, Any]], curves: Sequence[str]) -> None:
    from matplotlib import colormaps

    colors = colormaps["turbo"]
    for i, curve in enumerate(curves):
        points = sorted((r for r in rows if r["curve"] == curve), key=lambda r: r["tokens_per_second"])
        if not points:
            continue
        x, y = [r["tokens_per_second"] for r in points], [r["accuracy"] for r in points]
        # A Wilson interval is not centred; at 0 and n rounding may put the share a hair outside of it.
        low = [max(r["accuracy"] - r["low"], 0.0) for r in points]
        high = [max(r["high"] - r["accuracy"], 0.0) for r in points]
        color = colors(i / max(len(curves) - 1, 1))
        axes.plot(x, y, color=color, marker=MARKS[i % len(MARKS)], markersize=5, label=curve)
        axes.errorbar(x, y, yerr=(low, high), fmt="none", color=color, alpha=0.3, elinewidth=1)
    slow = [r["accuracy"] for r in rows if r["rule"] == ONE_A_STEP]
    if slow:
        axes.axhline(slow[0], color="gray", linewidth=1, linestyle=":", label=ONE_A_STEP)
    axes.set(
        title=f"{task} (n = {rows[0]['n']})", xlabel="tokens a second", ylabel="accuracy (95%)", xscale="log"
    )
    axes.grid(alpha=0.2)
