"""Evaluation of a model on tasks: `run` evaluates one task, `compare` evaluates it with several decoding rules.

`TASKS` holds the tasks by name; `code.py` adds the code tasks. This file also has the statistics of a summary (Wilson
and paired intervals), and writes summaries as sentences, tables and plots.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from mercury_jax import install, tasks
from mercury_jax.compilation import compilations
from mercury_jax.config import Plan, nearest, refuse
from mercury_jax.decode import defaults, rules, sample as sampling
from mercury_jax.decode.inputs import check_seed
from mercury_jax.decode.sampler import SamplerLike
from mercury_jax.tasks import Split, Task
from mercury_jax.types import LM

T = TypeVar("T")
Out = TypeVar("Out")
Z = 1.959963984540054  # normal quantile of a two-sided 95% interval

Summary = dict[str, Any]  # one JSON object
# What a rule is compared with: the same weights left to right with a KV cache, where a model predicts the next token,
# and the most confident position of the canvas, one token per step.
LEFT_TO_RIGHT, ONE_A_STEP = "left to right", "one token a step"
HELD_OUT = {"test": "held-out", "validation": "validation"}  # `summary["data"]` without a file


class EvalSettings(NamedTuple):
    """The arguments of `run`; `check` checks them.

    Attributes:
        file: A file with questions, instead of the held-out ones.
        split: "test" to report figures, "validation" to choose settings.
        limit: Largest number of questions; None: the task's default, or the whole file.
        sampler: A rule or a sampler; None: the model's default.
        plan: Block size and steps; None: the default.
        batch: Rows that are decoded together.
        seed: Seed of the questions, and of the sampled tokens.
        max_tokens: Largest number of tokens of an answer; None: the task's default.
        samples: Answers per question; of the task `exact` only, as all fields below but the last.
        examples: Another such file, whose first questions are shown with their answers.
        shots: Number of these; None: 4.
        prompts: "chat" or "text"; None: a conversation if the model has a chat template.
        template: A text with {input} in the place of the question.
        progress: Called after every batch as progress(done, total).
    """

    file: Path | None = None
    split: Split = "test"
    limit: int | None = None
    sampler: SamplerLike | None = None
    plan: Plan | None = None
    batch: int = 64
    seed: int = 0
    max_tokens: int | None = None
    samples: int = 1
    examples: Path | None = None
    shots: int | None = None
    prompts: Literal["chat", "text"] | None = None
    template: str | None = None
    progress: Callable[[int, int], None] = lambda done, of: None


OF_EXACT = ("samples", "examples", "shots", "prompts", "template")


@dataclass(frozen=True)
class EvalReport:
    """The result of an evaluation; `str()` gives one sentence.

    Attributes:
        summary: One JSON object.
        rows: One record per question, in the order of the questions.
    """

    summary: Summary
    rows: list[dict[str, Any]] = field(repr=False)

    def __str__(self) -> str:
        return line(self.summary)


def rule_name(lm: LM, sampler: SamplerLike) -> str:
    """Names a rule with its parameters, such as `threshold(p=0.9)`. Parameters that are arrays are left out."""
    rule = defaults.complete_sampler(sampler, lm.corruption).rule
    values = ", ".join(f"{k}={v}" for k, v in rule.params.items() if isinstance(v, int | float))
    return f"{rule.name}({values})" if values else rule.name


class Evaluation(NamedTuple):
    """A task as `mercury eval` runs it.

    Attributes:
        name: The name in `TASKS`.
        about: Description in one line.
        run: Evaluates a model.
        check: Checks the settings that only this kind of task uses.
        unused: Settings that the task does not use, and that are therefore refused.
        splits: Held-out sides that it has.
        task: Draws the questions and checks the answers; None for tasks that are not in `mercury_jax.tasks`.
    """

    name: str
    about: str
    run: Callable[[LM, EvalSettings], EvalReport]
    check: Callable[[EvalSettings], None] = lambda settings: None
    unused: tuple[str, ...] = ()
    splits: tuple[Split, ...] = ("test", "validation")
    task: Task | None = None


Grade = Callable[[Sequence[int], Sequence[str]], list[dict[str, Any]]]


def in_batches(
    items: Sequence[T], settings: EvalSettings, decode: Callable[[Sequence[T], int], Out]
) -> Iterator[tuple[Sequence[T], Out, bool]]:
    """Decodes items in batches of one size; the last one is filled up by repeating its last item.

    If every batch compiled a program, the last is decoded again, so that there is a time without compilation.

    Args:
        decode: Called with the items of a batch, and its seed.

    Yields:
        The items without those that fill up, what `decode` returned, and whether it compiled a program.
    """
    size, measured = min(settings.batch, len(items)), False
    for done in range(0, len(items), size):
        chosen = items[done : done + size]
        filled, seed = [*chosen, *[chosen[-1]] * (size - len(chosen))], (settings.seed + done) % 2**31
        before, out = compilations(), decode(filled, seed)
        if compilations() > before and not measured and done + size >= len(items):
            before, out = compilations(), decode(filled, seed)
        measured |= compilations() == before
        yield chosen, out, compilations() > before
        settings.progress(done + len(chosen), len(items))


def answer(
    lm: LM,
    prompts: Sequence[Any],
    settings: EvalSettings,
    max_tokens: int,
    grade: Grade,
    stop: Sequence[str] = (),
) -> tuple[list[dict[str, Any]], list[tuple[int, int, float]], Summary]:
    """Decodes an answer to each prompt, `settings.batch` at a time, and grades it.

    Returns:
        One row per prompt; (rows, tokens, seconds) of each batch that compiled no program; the settings, for a summary.
    """
    sampler, plan = defaults.choose_sampler(lm, settings.sampler, settings.plan or Plan(), None)
    # Sort the prompts by length, so that the rows of a batch have similar lengths and few shapes are compiled.
    texts = [p if isinstance(p, str) else "".join(message["content"] for message in p) for p in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(texts[i]))
    rows: list[dict[str, Any]] = [{} for _ in prompts]
    timed = list[tuple[int, int, float]]()
    decode = lambda filled, seed: sampling.sample(
        lm, [prompts[i] for i in filled], max_tokens=max_tokens, seed=seed, sampler=sampler, plan=plan,
        stop=list(stop) or None,
    )  # fmt: skip
    for chosen, out, compiled in in_batches(order, settings, decode):
        graded = grade(chosen, out.texts[: len(chosen)])
        for at, i in enumerate(chosen):
            prompt = prompts[i]
            rows[i] = {
                "input": prompt if isinstance(prompt, str) else prompt[-1]["content"],
                "prediction": out.texts[at],
                "thinking": out.thinking[at],
                **graded[at],
                "forwards": int(out.forwards[at]),
                "tokens": out.lengths[at],
                "finish": out.finish[at],
            }
        if not compiled:
            timed.append((len(chosen), sum(out.lengths[: len(chosen)]), out.seconds))
    about = {"seed": settings.seed, "batch": settings.batch, "rule": rule_name(lm, sampler)}
    return rows, timed, about | {"steps": plan.steps, "block": plan.block, "max_tokens": max_tokens}


def answer_questions(task: Task, lm: LM, settings: EvalSettings) -> EvalReport:
    """Asks every question as a user turn, and checks the answer without its thinking."""
    if settings.file is not None:
        asked = tasks.read_problems(settings.file, task)[: settings.limit]
    else:
        asked = tasks.draw_distinct(task, settings.limit or task.questions, settings.seed, settings.split)
    began = time.perf_counter()

    def grade(chosen: Sequence[int], texts: Sequence[str]) -> list[dict[str, Any]]:
        pairs = [(asked[i], text) for i, text in zip(chosen, texts, strict=True)]
        return [{"output": q.output, "correct": bool(task.check(q.input, text))} for q, text in pairs]

    prompts = [[{"role": "user", "content": question.input}] for question in asked]
    rows, timed, about = answer(lm, prompts, settings, settings.max_tokens or task.max_tokens, grade)
    data = HELD_OUT[settings.split] if settings.file is None else settings.file.name
    found = {"task": task.name, "data": data, **about}
    return EvalReport(found | summarise(rows, timed, time.perf_counter() - began), rows)


def check_file(task: Task, settings: EvalSettings) -> None:
    """Reads the questions of a file, to refuse bad lines."""
    if settings.file is not None:
        tasks.read_problems(settings.file, task)


TASKS: dict[str, Evaluation] = {
    **{
        task.name: Evaluation(
            task.name,
            task.about,
            functools.partial(answer_questions, task),
            check=functools.partial(check_file, task),
            unused=OF_EXACT,
            task=task,
        )
        for task in tasks.TASKS.values()
    },
}


def find(name: str) -> Evaluation:
    """Finds a task by name.

    Args:
        name: A name in `TASKS`.

    Returns:
        The task.

    Raises:
        ValueError: There is no such task; the message suggests the nearest name.
    """
    if name in ("gsm8k", "humaneval", "mbpp"):
        raise refuse("task", name, "of published sets those of `python -m mercury_jax.evaluate.harness`")
    if name not in TASKS:
        raise refuse("task", name, nearest(str(name), list(TASKS)))
    return TASKS[name]


def run(
    lm: LM,
    task: str,
    *,
    file: str | Path | None = None,
    split: Split = "test",
    limit: int | None = None,
    sampler: SamplerLike | None = None,
    plan: Plan | None = None,
    batch: int = 64,
    seed: int = 0,
    max_tokens: int | None = None,
    samples: int = 1,
    examples: str | Path | None = None,
    shots: int | None = None,
    prompts: Literal["chat", "text"] | None = None,
    template: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EvalReport:
    """Evaluates a model on one task. Equal arguments give equal answers; only the measured times differ.

    Args:
        lm: The model.
        task: A name in `TASKS`.
        file: A JSON Lines file of {"input", "output"}, which the task "exact" needs; of another task these are
            problems of its kind, instead of the held-out ones.
        split: "test" to report figures, or "validation" to choose settings.
        limit: Largest number of questions; None: the task's default, or the whole file.
        sampler: As in `mj.sample`; None: the model's default.
        plan: As in `mj.sample`; None: the default.
        batch: Rows that are decoded together.
        seed: Seed of the questions, and of the sampled tokens.
        max_tokens: Largest number of tokens of an answer with its thinking; None: the task's default.
        samples: Answers per question, for pass@k. This and what follows is for the task "exact" only.
        examples: Another such file; its first questions are shown before each question, with their answers.
        shots: Number of these examples; None: 4.
        prompts: "chat" for conversations, "text" for texts that are continued; None: as the model has a chat template
            or not.
        template: A text with {input} in the place of the question.
        progress: Called after every batch as progress(done, total).

    Returns:
        The report.

    Raises:
        ValueError: An argument is not allowed; raised before any compute.
    """
    settings = EvalSettings(
        None if file is None else Path(file), split, limit, sampler, plan, batch, check_seed(seed), max_tokens, samples,
        None if examples is None else Path(examples), shots, prompts, template,
        progress or (lambda done, of: None),
    )  # fmt: skip
    return check(task, settings).run(lm, settings)


def check(task: str, settings: EvalSettings) -> Evaluation:
    """Checks the settings of a task without a model, so that a command can refuse them before it loads one.

    Args:
        task: A name in `TASKS`.
        settings: As `run` takes them. The lines of a file are read.

    Returns:
        The task.

    Raises:
        ValueError: A setting is not allowed.
    """
    found, split = find(task), settings.split
    if split not in found.splits:
        others = "" if len(found.splits) > 1 else f": {task} has no other held-out side"
        raise refuse("split", split, ", ".join(found.splits) + others)
    for name in ("limit", "batch", "max_tokens", "samples", "shots"):
        value = getattr(settings, name)
        if value is None and EvalSettings._field_defaults[name] is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise refuse(name, value, "a whole number from 1 on")
    check_seed(settings.seed)
    for name in found.unused:
        default = EvalSettings._field_defaults[name]
        if getattr(settings, name) not in (default, Plan()):
            raise ValueError(f"{name} is {getattr(settings, name)}: {task} has no use for it; leave it out")
    found.check(settings)
    return found


def compare(
    lm: LM,
    task: str,
    samplers: Mapping[str, tuple[SamplerLike | None, Plan | None]] | None = None,
    **settings: Any,
) -> list[Summary]:
    """Evaluates several decoding rules on the same questions.

    Args:
        lm: The model.
        task: A name in `TASKS`.
        samplers: (sampler, plan) by name. None: left to right with a KV cache if the model predicts the next token, one
            token per step, and the model's default.
        **settings: Other arguments of `run`.

    Returns:
        Summaries in the order of `samplers`. All but the first also have `compared_with`, the name of the first,
        `forwards_share`, the forward passes relative to it, and `points` with `points_low` and `points_high`, the
        difference in accuracy from it in percentage points with its paired 95% interval.

    Raises:
        ValueError: There is no sampler, or the task has no right and wrong answers.
    """
    if samplers is None:
        own = rule_name(lm, defaults.default_sampler(lm))
        samplers = {ONE_A_STEP: (rules.confidence(), None), own: (None, None)}
        if lm.model.config.predicts_next and task in tasks.TASKS:  # an infill needs what follows the hole
            samplers = {LEFT_TO_RIGHT: (rules.autoregressive(), None), **samplers}
    if not samplers:
        raise refuse("samplers", samplers, "at least one name with (sampler, plan)")
    reports = [run(lm, task, sampler=s, plan=p, **settings) for s, p in samplers.values()]
    named = [{**r.summary, "rule": name} for name, r in zip(samplers, reports)]
    right = [[row["correct"] for row in r.rows] for r in reports]
    return [named[0], *(compared(named[0], right[0], s, r) for s, r in zip(named[1:], right[1:]))]


def compared(first: Summary, before: Sequence[bool], summary: Summary, now: Sequence[bool]) -> Summary:
    """Adds the comparison with the first rule to a summary; see `compare`."""
    if "accuracy" not in summary:
        raise refuse("task", summary["task"], "a task with right and wrong answers")
    mean, low, high = (100 * x for x in paired(before, now))
    share = summary["forwards"] / max(first["forwards"], 1e-9)
    return {
        **summary, "compared_with": first["rule"], "forwards_share": share, "points": mean, "points_low": low,
        "points_high": high,
    }  # fmt: skip


# --- statistics


def wilson(correct: float, n: int) -> tuple[float, float]:
    """Computes the 95% score interval of a proportion (Wilson 1927).

    Unlike p +- z se, it stays within [0, 1] and does not shrink to a point at 0 or n right answers.

    Args:
        correct: Number of right answers; with several answers per question their share, times the questions.
        n: Number of answers, or of questions.

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
    """Computes the difference of two accuracies on the same questions, with its 95% interval.

    Only questions whose answer changed contribute to the variance, so the interval is much narrower than two separate
    intervals suggest. Adding 0.5 to the numbers of gained and lost answers keeps its width above 0 if none changed.

    Returns:
        (mean, low, high) of accuracy(other) - accuracy(first).
    """
    n = len(first)
    if not n or n != len(other):
        raise refuse("other", len(other), f"{n} answers, to the same questions, at least one")
    won = sum(b and not a for a, b in zip(first, other))
    lost = sum(a and not b for a, b in zip(first, other))
    mean = (won - lost) / n
    # Normal approximation of the mean of values in {-1, 0, 1}: the sum has variance up + down - (up - down)^2 / n.
    up, down = won + 0.5, lost + 0.5
    half = Z * math.sqrt(max(up + down - (up - down) ** 2 / n, 0.0)) / n
    return mean, mean - half, mean + half


def summarise(
    rows: Sequence[Mapping[str, Any]],
    timed: Sequence[tuple[int, int, float]],
    seconds: float,
    samples: int = 1,
) -> Summary:
    """Summarises answered questions.

    Returns:
        Accuracy with its interval, and costs. `n` counts questions; the interval of several answers per question is as
        wide as that of one, which is never too narrow. `forwards` and `tokens` are means per answer; passes that encode
        prompts do not count as forwards. `tokens_per_second` is without compilation, `seconds` with it.
    """
    n, correct = len(rows), sum(row["correct"] for row in rows)
    forwards, tokens = (sum(row[name] for row in rows) for name in ("forwards", "tokens"))
    low, high = wilson(correct / samples, n // samples)
    return {
        "n": n // samples,
        "correct": correct / samples if samples > 1 else correct,
        "accuracy": correct / n,
        "low": low,
        "high": high,
        "forwards": forwards / n,
        "tokens": tokens / n,
        "tokens_per_forward": tokens / max(forwards, 1),
        "tokens_per_second": sum(t for _, t, _ in timed) / max(sum(s for _, _, s in timed), 1e-9),
        "seconds": seconds,
    }


# --- sentences, tables and plots


def line(summary: Mapping[str, Any]) -> str:
    """Writes a summary as one sentence."""
    s = summary
    if "bits_per_byte" in s:
        interval = f"95% {s['low']:.3f}..{s['high']:.3f}"
        return f"{s['task']}: {s['bits_per_byte']:.3f} bits per byte ({interval}, {s['bytes']} bytes)"
    interval = f"{s['accuracy']:.1%}, 95% {s['low']:.1%}..{s['high']:.1%}"
    cost = f"{s['forwards']:.1f} forwards an answer, {s['tokens_per_forward']:.2f} tokens a forward"
    right = f"{s['correct']:.4g} of {s['n']} right ({interval})"
    if s.get("samples", 1) > 1:
        right += "".join(f", {name} {value:.1%}" for name, value in s.items() if name.startswith("pass@"))
    return f"{s['task']} ({s['data']}, {s['rule']}): {right}, {cost}"


def table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Writes a Markdown table with one line per summary that has an accuracy."""
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
        summaries: The summaries; those without an accuracy are left out.
        path: The image file.

    Returns:
        `path`.

    Raises:
        ValueError: There is nothing to plot, or matplotlib is missing.
    """
    shown = [s for s in summaries if "accuracy" in s]
    if not shown:
        raise refuse("summaries", len(summaries), "at least one with an accuracy")
    install.check("plot", "matplotlib", "plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot, which would look for a window system
    axes = figure.add_subplot()
    for task, data in dict.fromkeys((s["task"], s["data"]) for s in shown):
        points = [s for s in shown if (s["task"], s["data"]) == (task, data)]
        points.sort(key=lambda s: s["forwards"])
        # A Wilson interval is not centred. At 0 or n right answers, rounding may put the accuracy just outside of it.
        low = [max(s["accuracy"] - s["low"], 0.0) for s in points]
        high = [max(s["high"] - s["accuracy"], 0.0) for s in points]
        x, y = [s["forwards"] for s in points], [s["accuracy"] for s in points]
        axes.errorbar(x, y, yerr=(low, high), marker="o", capsize=3, label=f"{task}, {data}")
    axes.set(xlabel="forwards an answer", ylabel="accuracy (95% interval)", ylim=(-0.03, 1.03), xscale="log")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    return Path(path)
