"""What can be evaluated, and the questions of each task."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mercury_jax.config import Plan, refuse
from mercury_jax.decode import defaults
from mercury_jax.train import generators
from mercury_jax.train.generators import Generator, Problem, Split
from mercury_jax.types import LM

HELD_OUT = {"test": "held-out", "validation": "validation"}  # `summary["data"]` where no file was given


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task by name. Where it has a generator, that draws its questions and checks the answers.

    limit: questions (code-bpb: chunks of text) unless told otherwise. max_tokens: room for an answer with
    its thinking; whole canvases of 32, as training ends them.
    """

    name: str
    about: str
    limit: int = 256
    generator: Generator | None = None
    max_tokens: int | None = None


class Settings(NamedTuple):
    """What `run` was asked for, checked."""

    file: Path | None
    split: Split  # "test", or "validation" for choosing settings
    limit: int | None  # None: the task's own, or a whole file
    sampler: Any
    plan: Plan | None
    batch: int
    seed: int
    max_tokens: int | None
    progress: Callable[[int, int], None]


def _asked(name: str, max_tokens: int, about: str, limit: int = 256) -> Task:
    return Task(name=name, about=about, limit=limit, generator=generators.ALL[name], max_tokens=max_tokens)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _asked("sudoku4", 32, "4x4 sudokus of 4 to 10 givens, each with one solution"),
        _asked("sudoku9", 96, "9x9 sudokus, each with one solution", limit=64),
        _asked("countdown3", 128, "reach a target with three numbers and + - * /; any valid way counts"),
        _asked("countdown4", 128, "reach a target with four numbers and + - * /; any valid way counts"),
        _asked("add2", 32, "sums of two numbers of two digits"),
        _asked("add3", 64, "sums of two numbers of three digits"),
        Task(
            name="code-bpb",
            about="bound on the bits per byte of held-out files of Python's standard library",
            limit=768,
        ),
        Task(
            name="code-infill",
            about="hide part of a line of those files, or a whole line, and restore it exactly",
            limit=64,
        ),
    )
}


def find(name: str) -> Task:
    """The task of that name; ValueError with the nearest one for a name that no task has."""
    if name in TASKS:
        return TASKS[name]
    near = difflib.get_close_matches(str(name), TASKS, n=1, cutoff=0.3)
    hint = f"{near[0]} is the nearest; all: " if near else ""
    raise refuse("task", name, hint + ", ".join(TASKS))


def problems(task: Task, settings: Settings) -> list[Problem]:
    """The task's questions: from the file, in its order, or drawn from the split."""
    assert task.generator is not None
    if settings.file is not None:
        return read(settings.file, task.generator)[: settings.limit]
    return draw(task.generator, settings.limit or task.limit, settings.seed, settings.split)


def draw(generator: Generator, n: int, seed: int, split: Split = "test") -> list[Problem]:
    """`n` problems of a split, the same for the same seed, without repeats while there are others."""
    rng = np.random.default_rng((seed, *generator.name.encode()))
    found: dict[str, Problem] = {}
    spare: list[Problem] = []
    while len(found) < n and len(found) + len(spare) < 20 * n:
        problem = generators.draw(generator, rng, split)
        if problem.input in found:
            spare.append(problem)
        else:
            found[problem.input] = problem
    return [*found.values(), *spare][:n]


def read(path: str | Path, generator: Generator) -> list[Problem]:
    """Problems of a file with one `{"input", "output"}` a line; ValueError names the line that is none."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise refuse("file", str(path), f"a file that can be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise refuse("file", str(path), f"UTF-8 text (byte {error.start} is none)") from None
    # Not splitlines(): U+2028 and its kin may stand inside a JSON string.
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise refuse("file", str(path), 'at least one line {"input": ..., "output": ...}; this one is empty')
    return [_problem(f"{path}:{number}", line, generator) for number, line in lines]


def _problem(place: str, line: str, generator: Generator) -> Problem:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{place}: no JSON: {error}; allowed: {{"input", "output"}} on each line') from None
    if not isinstance(record, dict):
        raise refuse(f"{place}: line", record, "an object with input and output")
    for key in ("input", "output"):
        if not isinstance(record.get(key), str):
            raise refuse(f"{place}: {key}", record.get(key), "a string")
    try:
        generator.canonical(record["input"])
    except ValueError as error:
        raise ValueError(f"{place}: {error}, as {generator.name} has it") from None
    return Problem(record["input"], record["output"])


def rule_name(lm: LM, sampler: Any) -> str:
    """`threshold(p=0.9)`; knobs that are arrays are left out."""
    rule = defaults.complete_sampler(sampler, lm.corruption).rule
    knobs = ", ".join(f"{k}={v}" for k, v in rule.params.items() if isinstance(v, int | float))
    return f"{rule.name}({knobs})" if knobs else rule.name


def refuse_unused(task: Task, settings: Settings, *names: str) -> None:
    """Options that the task does not use are refused, not ignored."""
    for name in (*names, "file"):
        if getattr(settings, name) not in (None, Plan()):
            raise refuse(name, str(getattr(settings, name)), f"None: {task.name} has no use for it")
