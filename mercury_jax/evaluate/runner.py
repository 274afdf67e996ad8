"""run(): a task's questions in, a report out; compare(): the same questions by several rules."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mercury_jax.config import Plan, refuse
from mercury_jax.decode import defaults, rules, sample as sampling
from mercury_jax.decode.inputs import check_seed
from mercury_jax.evaluate import blanks, code, tasks
from mercury_jax.evaluate.report import Report, Summary, counted, paired
from mercury_jax.evaluate.tasks import Settings, Task
from mercury_jax.train.generators import Problem, Split
from mercury_jax.types import LM

# What a parallel rule is compared with: the surest token first, one a step, each the argmax.
ONE_A_STEP = "one token a step"

_OF_CODE = {"code-bpb": code.bits_per_byte, "code-infill": blanks.infills}


def run(
    lm: LM,
    task: str,
    *,
    file: str | Path | None = None,
    split: Split = "test",
    limit: int | None = None,
    sampler: Any = None,
    plan: Plan | None = None,
    batch: int = 64,
    seed: int = 0,
    max_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Evaluate `lm` on one of `TASKS`.

    file: lines of {"input", "output"} instead of the held-out split. split: "test" for figures, or "validation" for
    choosing settings. limit: how many questions (None: the task's own number, or the whole file). sampler, plan: as in
    `sample`; None is the model's own. batch: rows decoded together.
    seed: draws the questions, and the tokens where the sampler is random. progress(done, of): called
    after every batch. The same arguments give the same answers; only the seconds differ.
    Raises ValueError, before any compute, for what does not fit.
    """
    found = tasks.find(task)
    settings = Settings(
        file=None if file is None else Path(file),
        split=_held_out(found, split),
        limit=_count("limit", limit),
        sampler=sampler,
        plan=plan,
        batch=_count("batch", batch) or 64,
        seed=check_seed(seed),
        max_tokens=_count("max_tokens", max_tokens),
        progress=progress or (lambda done, of: None),
    )
    if found.generator is not None:
        return _answers(lm, found, settings)
    return _OF_CODE[found.name](lm, found, settings)


def compare(
    lm: LM, task: str, samplers: Mapping[str, tuple[Any, Plan | None]] | None = None, **settings: Any
) -> list[Summary]:
    """The same questions by each (sampler, plan), named; summaries in that order.

    None: one token a step against the model's own sampler. settings: as of `run`. From the second on a
    summary also has `forwards_share`, its forwards over the first's, and `points` with `points_low` and
    `points_high`: by how many points of accuracy it is better, with a paired 95% interval.
    """
    chosen = standard(lm) if samplers is None else samplers
    if not chosen:
        raise refuse("samplers", chosen, "at least one name with (sampler, plan)")
    reports = [run(lm, task, sampler=s, plan=p, **settings) for s, p in chosen.values()]
    named = [{**r.summary, "rule": name} for name, r in zip(chosen, reports)]
    right = [[row["correct"] for row in r.rows] for r in reports]
    return [named[0], *(_against(named[0], right[0], s, r) for s, r in zip(named[1:], right[1:]))]


def standard(lm: LM) -> dict[str, tuple[Any, Plan | None]]:
    """The rules of our cards: one token a step, and what `sample` uses where no sampler is named."""
    return {
        ONE_A_STEP: (rules.confidence(), None),
        tasks.rule_name(lm, defaults.default_sampler(lm)): (None, None),
    }


def _against(first: Summary, before: Sequence[bool], summary: Summary, now: Sequence[bool]) -> Summary:
    if "accuracy" not in summary:
        raise refuse("task", summary["task"], "a task with right and wrong answers")
    points = [100 * x for x in paired(before, now)]
    share = summary["forwards"] / max(first["forwards"], 1e-9)
    return {**summary, "forwards_share": share, **dict(zip(("points", "points_low", "points_high"), points))}


def _held_out(task: Task, split: Split) -> Split:
    if split not in tasks.HELD_OUT:
        raise refuse("split", split, ", ".join(tasks.HELD_OUT))
    if split != "test" and task.generator is None:
        raise refuse("split", split, f"test: {task.name} has no other held-out side")
    return split


def _count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise refuse(name, value, "a whole number from 1 on")
    return int(value)


def _answers(lm: LM, task: Task, settings: Settings) -> Report:
    """Ask every question as a user's turn, and check what is said after any thinking."""
    assert task.generator is not None
    asked = tasks.problems(task, settings)
    most = settings.max_tokens or task.max_tokens or 64
    sampler = defaults.default_sampler(lm) if settings.sampler is None else settings.sampler
    named, plan = tasks.rule_name(lm, sampler), settings.plan or Plan()
    rows: list[dict[str, Any]] = [{} for _ in asked]
    began, timed = time.perf_counter(), []
    for chosen, filled in _batches(asked, settings.batch):
        out = sampling.sample(
            lm, [[{"role": "user", "content": asked[i].input}] for i in filled], max_tokens=most,
            seed=(settings.seed + sum(n for n, _, _ in timed)) % 2**31, sampler=sampler, plan=plan,
        )  # fmt: skip
        for at, i in enumerate(chosen):
            rows[i] = _row(asked[i], task.generator.check, out, at)
        timed.append((len(chosen), sum(out.lengths[: len(chosen)]), out.seconds))
        settings.progress(sum(n for n, _, _ in timed), len(asked))
    about = dict(rule=named, steps=plan.steps, block=plan.block, max_tokens=most)
    data = tasks.HELD_OUT[settings.split] if settings.file is None else settings.file.name
    common = dict(task=task.name, data=data, seed=settings.seed, batch=settings.batch, **about)
    return Report(common | counted(rows, timed, time.perf_counter() - began), rows)


def _batches(asked: Sequence[Problem], size: int) -> list[tuple[list[int], list[int]]]:
    """(the questions of a batch, the same filled up to `size` by repeating the last).

    By length, so that rows of a batch are alike and their shapes few: each new shape is a compilation.
    """
    size = min(size, len(asked))
    order = sorted(range(len(asked)), key=lambda i: len(asked[i].input))
    cut = [order[at : at + size] for at in range(0, len(order), size)]
    return [(part, part + part[-1:] * (size - len(part))) for part in cut]


def _row(
    problem: Problem, check: Callable[[str, str], bool], out: sampling.Output, at: int
) -> dict[str, Any]:
    return {
        "input": problem.input,
        "output": problem.output,
        "prediction": out.texts[at],
        "thinking": out.thinking[at],
        "correct": bool(check(problem.input, out.texts[at])),
        "forwards": int(out.forwards[at]),
        "tokens": out.lengths[at],
        "finish": out.finish[at],
    }
