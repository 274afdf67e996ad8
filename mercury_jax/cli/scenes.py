"""What the demo asks: held-out sudokus and sums, whose answers are checked, and the start of a function."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

TRIES = 5
DRAWN = 8

# Beginnings that the standard library knows well; a model of this size writes its idiom, not its logic.
PYTHON = (
    "def __repr__(self):\n",
    "def __init__(self, name, value):\n",
    "def close(self):\n",
)


class Scene(NamedTuple):
    """One question. check: whether an answer is right, None where nobody can say."""

    title: str
    before: str  # what stands in front of the answer on the screen
    prompt: Any
    max_tokens: int
    check: Callable[[str], bool | None]
    right: str = ""
    wrong: str = ""
    remark: Callable[[str], str] = lambda text: ""


class Act(NamedTuple):
    """Questions of one kind: `draw(attempt)`."""

    draw: Callable[[int], Scene]

    @property
    def first(self) -> Scene:
        return self.draw(0)


def scenes(seed: int) -> list[Act]:
    """The three acts; `seed` draws their questions."""
    return [
        Act(lambda attempt: _sudoku(seed, attempt)),
        Act(lambda attempt: _sum(seed, attempt)),
        Act(lambda attempt: _python(PYTHON[(seed + attempt) % len(PYTHON)])),
    ]


def _problem(name: str, seed: int, attempt: int) -> tuple[Any, Any]:
    """A held-out problem; of a few the one with the most blanks, which has most to show."""
    import numpy as np

    from mercury_jax.train import generators

    generator, rng = generators.ALL[name], np.random.default_rng((seed, attempt))
    drawn = [generators.draw(generator, rng, "test") for _ in range(DRAWN)]
    return generator, max(drawn, key=lambda p: p.input.count("0")) if name == "sudoku4" else drawn[0]


def _sudoku(seed: int, attempt: int) -> Scene:
    generator, problem = _problem("sudoku4", seed, attempt)
    return Scene(
        title="A 4x4 sudoku that training never saw",
        before=problem.input.replace("0", ".") + "\n\n",
        prompt=[{"role": "user", "content": problem.input}],
        max_tokens=32,
        check=lambda text: generator.check(problem.input, text),
        right="every row, column and box has each digit once, and the givens stand",
        wrong=problem.output.replace("\n", " / "),
    )


def _sum(seed: int, attempt: int) -> Scene:
    generator, problem = _problem("add3", seed, attempt)
    return Scene(
        title="A sum, worked out column by column before it answers",
        before=problem.input + "\n",
        prompt=[{"role": "user", "content": problem.input}],
        max_tokens=64,
        check=lambda text: generator.check(problem.input, text),
        right=f"{problem.input}{problem.output}",
        wrong=problem.output,
    )


def _python(start: str) -> Scene:
    def remark(text: str) -> str:
        whole = (start + text).rpartition("\n")[0]
        return "Its whole lines parse as Python." if _parses(whole) else "It does not parse as Python."

    return Scene(
        title="Python, in the manner of the standard library it read",
        before=start,
        prompt=start,
        max_tokens=64,
        check=lambda text: None,
        remark=remark,
    )


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    return True
