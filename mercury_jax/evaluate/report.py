"""What an evaluation is given and what it leaves: settings, a summary with its interval, rows, tables and plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mercury_jax import install
from mercury_jax.config import Plan, refuse
from mercury_jax.decode import defaults
from mercury_jax.decode.sampler import SamplerLike
from mercury_jax.tasks import Split
from mercury_jax.types import LM

Z = 1.959963984540054  # of a two-sided 95% interval

Summary = dict[str, Any]  # one JSON object


class EvalSettings(NamedTuple):
    """The arguments of `runner.run`, checked.

    Attributes:
        file: Questions instead of the held-out ones.
        split: "test" for figures, "validation" for choosing settings.
        limit: Most questions; None: the task's own number, or a whole file.
        sampler: A rule or a sampler; None: the model's own.
        plan: How blocks are decoded; None: the default.
        batch: Rows that are decoded together.
        seed: Draws the questions, and the tokens where the sampler is random.
        max_tokens: Most tokens of an answer; None: the task's own.
        progress: progress(done, of), called after every batch.
    """

    file: Path | None
    split: Split
    limit: int | None
    sampler: SamplerLike | None
    plan: Plan | None
    batch: int
    seed: int
    max_tokens: int | None
    progress: Callable[[int, int], None]


@dataclass(frozen=True)
class EvalReport:
    """The result of an evaluation; `str()` gives one sentence.

    Attributes:
        summary: One JSON object.
        rows: One for each question, in the order of the questions.
    """

    summary: Summary
    rows: list[dict[str, Any]] = field(repr=False)

    def __str__(self) -> str:
        return line(self.summary)


def rule_name(lm: LM, sampler: SamplerLike) -> str:
    """Names a rule with its parameters: `threshold(p=0.9)`; parameters that are arrays are left out.

    Args:
        lm: The model that is decoded.
        sampler: A rule or a sampler.

    Returns:
        The name.
    """
    rule = defaults.complete_sampler(sampler, lm.corruption).rule
    values = ", ".join(f"{k}={v}" for k, v in rule.params.items() if isinstance(v, int | float))
    return f"{rule.name}({values})" if values else rule.name


# --- statistics


def wilson(correct: int, n: int) -> tuple[float, float]:
    """The 95% score interval of a share (Wilson 1927).

    Unlike p +- z se it stays within 0..1 and does not collapse at 0 or n right answers.

    Args:
        correct: Right answers.
        n: All answers.

    Returns:
        (low, high).

    Raises:
        ValueError: `n` is below 1, or `correct` not in 0..n.
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
    """The difference of two accuracies on the same questions, with its 95% interval.

    From the differences question by question: much narrower than two separate intervals suggest. The 0.5 that is added
    to both kinds of change keeps the interval open where no answer changed.

    Args:
        first: Whether each answer is right.
        other: The same for the other answers.

    Returns:
        (mean, low, high) of accuracy(other) - accuracy(first).

    Raises:
        ValueError: There are no answers, or not equally many.
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


def summarise(
    rows: Sequence[Mapping[str, Any]], timed: Sequence[tuple[int, int, float]], seconds: float
) -> Summary:
    """Sums up answered questions.

    Args:
        rows: One for each question, with `correct`, `forwards` and `tokens`.
        timed: (rows, tokens, seconds) of each batch.
        seconds: All of the time.

    Returns:
        Accuracy with its interval. forwards and tokens are means per answer; passes that encode prompts do not count as
        forwards. tokens_per_second leaves out the first batch if there are others, as that one compiles.
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


# --- for people


def line(summary: Mapping[str, Any]) -> str:
    """A summary as one sentence."""
    s = summary
    if "bits_per_byte" in s:
        interval = f"95% {s['low']:.3f}..{s['high']:.3f}"
        return f"{s['task']}: {s['bits_per_byte']:.3f} bits per byte ({interval}, {s['bytes']} bytes)"
    interval = f"{s['accuracy']:.1%}, 95% {s['low']:.1%}..{s['high']:.1%}"
    cost = f"{s['forwards']:.1f} forwards an answer, {s['tokens_per_forward']:.2f} tokens a forward"
    return f"{s['task']} ({s['data']}, {s['rule']}): {s['correct']} of {s['n']} right ({interval}), {cost}"


def table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table: one line for each summary of a task with right and wrong answers."""
    head = "| task | questions | rule | right | of | accuracy | 95% interval | forwards | tokens | tokens/forward |"
    lines = [head, "|" + "---|" * 10]
    for s in summaries:
        if "accuracy" not in s:
            continue
        cells = (
            s["task"], s["data"], s["rule"], s["correct"], s["n"], f"{s['accuracy']:.1%}",
            f"{s['low']:.1%} to {s['high']:.1%}", f"{s['forwards']:.1f}", f"{s['tokens']:.1f}",
            f"{s['tokens_per_forward']:.2f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def plot(summaries: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Plots accuracy against forwards per answer, with intervals; one line per task and source of questions.

    Args:
        summaries: Those without an accuracy are left out.
        path: The image.

    Returns:
        `path`.

    Raises:
        ValueError: There is nothing to plot, or matplotlib is missing.
    """
    shown = [s for s in summaries if "accuracy" in s]
    if not shown:
        raise refuse("summaries", len(summaries), "at least one with an accuracy")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        allowed = f"any, once matplotlib is installed: {install.command('plot')}"
        raise refuse("plot", str(path), allowed) from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: it would choose a window system
    axes = figure.add_subplot()
    for task, data in dict.fromkeys((s["task"], s["data"]) for s in shown):
        points = [s for s in shown if (s["task"], s["data"]) == (task, data)]
        points.sort(key=lambda s: s["forwards"])
        # A Wilson interval is not centred; at 0 and n rounding may put the share just outside of it.
        low = [max(s["accuracy"] - s["low"], 0.0) for s in points]
        high = [max(s["high"] - s["accuracy"], 0.0) for s in points]
        x, y = [s["forwards"] for s in points], [s["accuracy"] for s in points]
        axes.errorbar(x, y, yerr=(low, high), marker="o", capsize=3, label=f"{task}, {data}")
    axes.set(xlabel="forwards an answer", ylabel="accuracy (95% interval)", ylim=(-0.03, 1.03), xscale="log")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    return Path(path)
