"""The questions of a run, and how they are cut into batches."""

from __future__ import annotations

from typing import Any, NamedTuple

from mercury_jax.config import at_least, refuse
from mercury_jax.decode.inputs import check_seed
from mercury_jax.evaluate import TASKS, tasks
from mercury_jax.evaluate.tasks import Task
from mercury_jax.train.generators import Problem, Split

ASKED = tuple(name for name, task in TASKS.items() if task.generator is not None)


class Asked(NamedTuple):
    """A task's questions and how they are put."""

    task: Task
    problems: list[Problem]
    max_tokens: int
    batch: int
    seed: int
    alone: int  # how many are streamed one by one for the latencies

    def message(self, i: int) -> list[dict[str, str]]:
        """Question i as a conversation."""
        return [{"role": "user", "content": self.problems[i].input}]

    def right(self, i: int, answer: str) -> bool:
        """Whether the task's own check accepts an answer to question i."""
        assert self.task.generator is not None
        return bool(self.task.generator.check(self.problems[i].input, answer))


class Batch(NamedTuple):
    """Questions decoded together; the last batch is filled up by repeating its last one."""

    number: int
    chosen: list[int]
    filled: list[int]


def ask(
    name: str,
    *,
    limit: int = 512,
    batch: int = 64,
    split: Split = "validation",
    seed: int = 0,
    max_tokens: int | None = None,
    alone: int = 3,
) -> Asked:
    """The held-out questions of a task; all is checked before anything is compiled.

    A rule is chosen on the validation split, so that its figures on the test split are those of fresh questions.
    """
    at_least(1, limit=limit, batch=batch, max_tokens=1 if max_tokens is None else max_tokens)
    at_least(0, alone=alone)
    task = tasks.find(name)
    if task.generator is None:
        raise refuse("task", name, f"one with questions to answer: {', '.join(ASKED)}")
    problems = tasks.draw(task.generator, limit, check_seed(seed), split)
    most = max_tokens or task.max_tokens or 64
    return Asked(task, problems, most, min(batch, limit), seed, min(alone, limit))


def batches(asked: Asked) -> list[Batch]:
    """By length, so that rows of a batch are alike and their shapes few."""
    order = sorted(range(len(asked.problems)), key=lambda i: len(asked.problems[i].input))
    cut = [order[at : at + asked.batch] for at in range(0, len(order), asked.batch)]
    return [Batch(i, part, part + part[-1:] * (asked.batch - len(part))) for i, part in enumerate(cut)]


def told(asked: Asked) -> dict[str, Any]:
    """What a row says of them."""
    return {"task": asked.task.name, "seed": asked.seed, "batch": asked.batch, "max_tokens": asked.max_tokens}
