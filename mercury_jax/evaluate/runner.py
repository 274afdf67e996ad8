"""The tasks by name; `run` asks a task's questions, `compare` asks the same questions by several rules."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mercury_jax import tasks
from mercury_jax.config import Plan, nearest, refuse
from mercury_jax.decode import defaults, rules, sample as sampling
from mercury_jax.decode.inputs import check_seed
from mercury_jax.decode.sampler import SamplerLike
from mercury_jax.evaluate import code
from mercury_jax.evaluate.report import EvalReport, EvalSettings, Summary, paired, rule_name, summarise
from mercury_jax.tasks import Split, Task
from mercury_jax.types import LM

# What a parallel rule is compared with: the most confident token first, one per step, each the argmax.
ONE_A_STEP = "one token a step"
HELD_OUT = {"test": "held-out", "validation": "validation"}  # `summary["data"]` where no file was given


class Evaluation(NamedTuple):
    """A task as `mercury eval` runs it.

    Attributes:
        name: The name in `TASKS`.
        about: One line for people.
        run: Evaluates a model.
        task: Draws the questions and checks the answers; None for the code tasks.
        unused: Settings that the task does not use, which are refused.
    """

    name: str
    about: str
    run: Callable[[LM, EvalSettings], EvalReport]
    task: Task | None = None
    unused: tuple[str, ...] = ()


def answer_questions(task: Task, lm: LM, settings: EvalSettings) -> EvalReport:
    """Asks every question as a user's turn, and checks the answer after any thinking.

    Args:
        task: Draws the questions and checks the answers.
        lm: The model.
        settings: Which questions, and how they are decoded.

    Returns:
        Accuracy and cost, with one row per question.
    """
    if settings.file is not None:
        asked = tasks.read_problems(settings.file, task)[: settings.limit]
    else:
        asked = tasks.draw_distinct(task, settings.limit or task.questions, settings.seed, settings.split)
    most = settings.max_tokens or task.max_tokens
    sampler = defaults.default_sampler(lm) if settings.sampler is None else settings.sampler
    named, plan = rule_name(lm, sampler), settings.plan or Plan()
    # By length, so that rows of a batch are alike and their shapes few: each new shape is a compilation. The last batch
    # is filled up by repeating its last question.
    size = min(settings.batch, len(asked))
    order = sorted(range(len(asked)), key=lambda i: len(asked[i].input))
    rows: list[dict[str, Any]] = [{} for _ in asked]
    began, timed = time.perf_counter(), list[tuple[int, int, float]]()
    for done in range(0, len(order), size):
        chosen = order[done : done + size]
        filled = chosen + chosen[-1:] * (size - len(chosen))
        out = sampling.sample(
            lm, [[{"role": "user", "content": asked[i].input}] for i in filled], max_tokens=most,
            seed=(settings.seed + done) % 2**31, sampler=sampler, plan=plan,
        )  # fmt: skip
        for at, i in enumerate(chosen):
            rows[i] = {
                "input": asked[i].input,
                "output": asked[i].output,
                "prediction": out.texts[at],
                "thinking": out.thinking[at],
                "correct": bool(task.check(asked[i].input, out.texts[at])),
                "forwards": int(out.forwards[at]),
                "tokens": out.lengths[at],
                "finish": out.finish[at],
            }
        timed.append((len(chosen), sum(out.lengths[: len(chosen)]), out.seconds))
        settings.progress(done + len(chosen), len(asked))
    data = HELD_OUT[settings.split] if settings.file is None else settings.file.name
    about = {"task": task.name, "data": data, "seed": settings.seed, "batch": settings.batch, "rule": named}
    about |= {"steps": plan.steps, "block": plan.block, "max_tokens": most}
    return EvalReport(about | summarise(rows, timed, time.perf_counter() - began), rows)


TASKS: dict[str, Evaluation] = {
    **{
        task.name: Evaluation(task.name, task.about, functools.partial(answer_questions, task), task)
        for task in tasks.TASKS.values()
    },
    "code-bpb": Evaluation(
        "code-bpb",
        "bound on the bits per byte of held-out files of Python's standard library",
        code.bits_per_byte,
        unused=("sampler", "plan", "max_tokens", "file"),
    ),
    "code-infill": Evaluation(
        "code-infill",
        "hide part of a line of those files, or a whole line, and restore it exactly",
        code.infill_lines,
        unused=("max_tokens", "file"),
    ),
}


def find(name: str) -> Evaluation:
    """Finds a task by name.

    Raises:
        ValueError: There is no such task; names the nearest one.
    """
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
    progress: Callable[[int, int], None] | None = None,
) -> EvalReport:
    """Evaluates a model on one task. The same arguments give the same answers; only the seconds differ.

    Args:
        lm: The model.
        task: A name in `TASKS`.
        file: Lines of {"input", "output"} instead of the held-out questions.
        split: "test" for figures, or "validation" for choosing settings.
        limit: Most questions; None: the task's own number, or the whole file.
        sampler: As in `mj.sample`; None: the model's own.
        plan: As in `mj.sample`; None: the default.
        batch: Rows that are decoded together.
        seed: Draws the questions, and the tokens where the sampler is random.
        max_tokens: Most tokens of an answer with its thinking; None: the task's own.
        progress: progress(done, of), called after every batch.

    Returns:
        The report.

    Raises:
        ValueError: Before any compute, for what does not fit.
    """
    found = find(task)
    if split not in HELD_OUT:
        raise refuse("split", split, ", ".join(HELD_OUT))
    if split != "test" and found.task is None:
        raise refuse("split", split, f"test: {task} has no other held-out side")
    for name, value in {"limit": limit, "batch": batch, "max_tokens": max_tokens}.items():
        if value is None and name != "batch":
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise refuse(name, value, "a whole number from 1 on")
    settings = EvalSettings(
        None if file is None else Path(file), split, limit, sampler, plan, batch, check_seed(seed), max_tokens,
        progress or (lambda done, of: None),
    )  # fmt: skip
    for name in found.unused:
        if getattr(settings, name) not in (None, Plan()):
            raise refuse(name, str(getattr(settings, name)), f"None: {task} has no use for it")
    return found.run(lm, settings)


def compare(
    lm: LM,
    task: str,
    samplers: Mapping[str, tuple[SamplerLike | None, Plan | None]] | None = None,
    **settings: Any,
) -> list[Summary]:
    """Asks the same questions by several rules.

    Args:
        lm: The model.
        task: A name in `TASKS`.
        samplers: (sampler, plan) by name; None: one token per step, and what `mj.sample` uses without a sampler.
        **settings: Further arguments of `run`.

    Returns:
        Summaries in the order of `samplers`. From the second on a summary also has `forwards_share`, its forwards over
        the first's, and `points` with `points_low` and `points_high`: by how many points of accuracy it is better, with
        a paired 95% interval.

    Raises:
        ValueError: There is no sampler, or the task has no right and wrong answers.
    """
    if samplers is None:
        own = rule_name(lm, defaults.default_sampler(lm))
        samplers = {ONE_A_STEP: (rules.confidence(), None), own: (None, None)}
    if not samplers:
        raise refuse("samplers", samplers, "at least one name with (sampler, plan)")
    reports = [run(lm, task, sampler=s, plan=p, **settings) for s, p in samplers.values()]
    named = [{**r.summary, "rule": name} for name, r in zip(samplers, reports)]
    right = [[row["correct"] for row in r.rows] for r in reports]
    return [named[0], *(compared(named[0], right[0], s, r) for s, r in zip(named[1:], right[1:]))]


def compared(first: Summary, before: Sequence[bool], summary: Summary, now: Sequence[bool]) -> Summary:
    """Adds to a summary how it compares with the first one, as `compare` returns it.

    Args:
        first: The summary of the first rule.
        before: Whether each of its answers is right.
        summary: Another summary on the same questions.
        now: Whether each of its answers is right.

    Returns:
        The other summary with `forwards_share` and `points`.

    Raises:
        ValueError: The task has no right and wrong answers.
    """
    if "accuracy" not in summary:
        raise refuse("task", summary["task"], "a task with right and wrong answers")
    mean, low, high = (100 * x for x in paired(before, now))
    share = summary["forwards"] / max(first["forwards"], 1e-9)
    return {**summary, "forwards_share": share, "points": mean, "points_low": low, "points_high": high}
