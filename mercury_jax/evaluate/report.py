"""What an evaluation leaves: a summary with its interval, the rows behind it, tables and plots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mercury_jax import install
from mercury_jax.config import refuse

Z = 1.959963984540054  # of a two-sided 95% interval

Summary = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """summary: one JSON-ready object. rows: one for each question, in the order of the questions."""

    summary: Summary
    rows: list[dict[str, Any]] = field(repr=False)

    def __str__(self) -> str:
        return line(self.summary)


def wilson(correct: int, n: int) -> tuple[float, float]:
    """The 95% score interval of a share of `correct` in `n` (Wilson 1927).

    Unlike p +- z se it stays within 0..1 and does not collapse at 0 or n right answers.
    """
    if n < 1:
        raise refuse("n", n, "1 or more")
    if not 0 <= correct <= n:
        raise refuse("correct", correct, f"0..{n}")
    p, z2 = correct / n, Z * Z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def paired(first: Sequence[bool], other: Sequence[bool]) -> tuple[float, float, float]:
    """(mean, low, high) of accuracy(other) - accuracy(first) on the same questions, 95%.

    From the differences question by question: much narrower than two separate intervals suggest. The 0.5
    added to both kinds of change keeps the interval open where no answer changed.
    """
    n = len(first)
    if not n or n != len(other):
        raise refuse("other", len(other), f"{n} answers, to the same questions, at least one")
    won = sum(b and not a for a, b in zip(first, other))
    lost = sum(a and not b for a, b in zip(first, other))
    mean = (won - lost) / n
    up, down = won + 0.5, lost + 0.5
    half = Z * math.sqrt(max(up + down - (up - down) ** 2 / n, 0.0)) / n
    return mean, mean - half, mean + half


def counted(
    rows: Sequence[Mapping[str, Any]], timed: Sequence[tuple[int, int, float]], seconds: float
) -> Summary:
    """The figures of answered rows; timed: (rows, tokens, seconds) of each batch.

    forwards and tokens are means an answer; the passes that encode prompts do not count as forwards.
    seconds is all of the time; tokens_per_second leaves out the first batch where there are others, as
    that one compiles.
    """
    n, correct = len(rows), sum(row["correct"] for row in rows)
    forwards, tokens = (sum(row[name] for row in rows) for name in ("forwards", "tokens"))
    low, high = wilson(correct, n)
    steady = timed[1:] or timed
    return {
        "n": n,
        "correct": correct,
        "accuracy": correct / n,
        "low": low,
        "high": high,
        "forwards": forwards / n,
        "tokens": tokens / n,
        "tokens_per_forward": tokens / max(forwards, 1),
        "tokens_per_second": sum(t for _, t, _ in steady) / max(sum(s for _, _, s in steady), 1e-9),
        "seconds": seconds,
    }


def line(summary: Mapping[str, Any]) -> str:
    """A summary as one sentence for people."""
    if "bits_per_byte" in summary:
        interval = f"95% {summary['low']:.3f}..{summary['high']:.3f}"
        return f"{summary['task']}: {summary['bits_per_byte']:.3f} bits per byte ({interval}, {summary['bytes']} bytes)"
    share = f"{summary['correct']} of {summary['n']} right"
    interval = f"{_percent(summary['accuracy'])}, 95% {_percent(summary['low'])}..{_percent(summary['high'])}"
    cost = (
        f"{summary['forwards']:.1f} forwards an answer, {summary['tokens_per_forward']:.2f} tokens a forward"
    )
    return f"{summary['task']} ({summary['data']}, {summary['rule']}): {share} ({interval}), {cost}"


def table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: one line for each summary of a task with right and wrong answers."""
    head = "| task | questions | rule | right | of | accuracy | 95% interval | forwards | tokens | tokens/forward |"
    lines = [head, "|" + "---|" * 10]
    for s in summaries:
        if "accuracy" not in s:
            continue
        cells = (
            s["task"], s["data"], s["rule"], s["correct"], s["n"], _percent(s["accuracy"]),
            f"{_percent(s['low'])} to {_percent(s['high'])}", f"{s['forwards']:.1f}", f"{s['tokens']:.1f}",
            f"{s['tokens_per_forward']:.2f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def plot(summaries: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Accuracy against forwards an answer, with intervals; one line a task and source of questions."""
    shown = [s for s in summaries if "accuracy" in s]
    if not shown:
        raise refuse("summaries", len(summaries), "at least one with an accuracy")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise refuse(
            "plot", str(path), f"any, once matplotlib is installed: {install.command('plot')}"
        ) from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: it would choose a window system
    axes = figure.add_subplot()
    for task, data in dict.fromkeys((s["task"], s["data"]) for s in shown):
        _draw(axes, f"{task}, {data}", [s for s in shown if (s["task"], s["data"]) == (task, data)])
    axes.set(xlabel="forwards an answer", ylabel="accuracy (95% interval)", ylim=(-0.03, 1.03), xscale="log")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    return Path(path)


def _draw(axes: Any, label: str, summaries: Sequence[Mapping[str, Any]]) -> None:
    points = sorted(summaries, key=lambda s: s["forwards"])
    x, y = [s["forwards"] for s in points], [s["accuracy"] for s in points]
    # A Wilson interval is not centred; at 0 and n rounding may put the share a hair outside of it.
    low = [max(s["accuracy"] - s["low"], 0.0) for s in points]
    high = [max(s["high"] - s["accuracy"], 0.0) for s in points]
    axes.errorbar(x, y, yerr=(low, high), marker="o", capsize=3, label=label)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
