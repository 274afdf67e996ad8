"""The record of a task, the split of its problems into train, validation and test, and drawing from a side.

The split cannot leak: equivalent problems (a Sudoku and its rotation, a sum and its reverse) share a canonical form,
and the hash of that form decides the side. So a problem's side is the same in every process and every version, and
training needs no list of what is held out. The problems of three public test files are always on the test side.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from mercury_jax.config import checked, refuse

Split = Literal["train", "validation", "test"]
Number = TypeVar("Number", int, np.ndarray)

MASK = 2**64 - 1
HELD_OUT = 16  # one class of equivalent problems in 16 is never trained on
VALIDATION = 4  # of the held-out classes one in 4 is for choosing settings, the others for reporting figures

# 48-bit hashes, see `is_public_test_problem`; lines with # are comments.
_LISTED = (Path(__file__).parent / "public_test_problems.txt").read_text().splitlines()
PUBLIC_TEST_HASHES = frozenset(" ".join(line for line in _LISTED if not line.startswith("#")).split())


class Problem(NamedTuple):
    """A question with its answer.

    Attributes:
        input: Text of the question.
        output: One right answer; `Task.check` accepts every other right answer too.
        thinking: The derivation of the answer; None if the task has none.
    """

    input: str
    output: str
    thinking: str | None = None


class Task(NamedTuple):
    """A task as data. `canonical`, `split` and `check` raise ValueError for an input that the task cannot have.

    Attributes:
        name: The name in `TASKS`.
        about: One line for people.
        generate: generate(rng) draws a problem of any side.
        canonical: canonical(input) is a text that all equivalent problems share.
        split: split(input) is the side of a problem; equivalent problems are on the same side.
        check: check(input, prediction) tells whether the prediction is a right answer.
        max_tokens: Most tokens of an answer with its thinking: whole canvases of 32, as training ends them.
        questions: Number of questions of an evaluation, unless another one is given.
    """

    name: str
    about: str
    generate: Callable[[np.random.Generator], Problem]
    canonical: Callable[[str], str]
    split: Callable[[str], Split]
    check: Callable[[str, str], bool]
    max_tokens: int = 64
    questions: int = 256


@checked
def draw(task: Task, rng: np.random.Generator, split: Split) -> Problem:
    """Draws problems until one is on the wanted side.

    Args:
        task: The task.
        rng: Random numbers; advanced.
        split: The side.

    Returns:
        The problem.

    Raises:
        ValueError: There is no such side.
    """
    while True:
        problem = task.generate(rng)
        if task.split(problem.input) == split:
            return problem


def draw_distinct(task: Task, count: int, seed: int, split: Split = "test") -> list[Problem]:
    """Draws the questions of an evaluation.

    Args:
        task: The task.
        count: Number of problems.
        seed: Equal seeds give equal problems.
        split: The side.

    Returns:
        `count` problems, without repetitions while the task has others.
    """
    rng = np.random.default_rng((seed, *task.name.encode()))
    # A small task may have fewer problems than wanted on this side: after 20 draws each, repetitions fill up.
    found: dict[str, Problem] = {}
    repeated: list[Problem] = []
    while len(found) < count and len(found) + len(repeated) < 20 * count:
        problem = draw(task, rng, split)
        if problem.input in found:
            repeated.append(problem)
        else:
            found[problem.input] = problem
    return [*found.values(), *repeated][:count]


def read_text(path: str | Path, argument: str) -> str:
    """Reads a text file.

    Args:
        path: The file, in UTF-8; one whose name ends in .gz is unpacked.
        argument: What the message calls the path.

    Returns:
        The text.

    Raises:
        ValueError: It cannot be read.
    """
    try:
        if Path(path).suffix == ".gz":
            return gzip.decompress(Path(path).read_bytes()).decode("utf-8-sig")
        return Path(path).read_text(encoding="utf-8-sig")  # without a byte-order mark
    except (OSError, EOFError, zlib.error) as error:  # the last two: cut or damaged
        allowed = f"a file that can be read ({getattr(error, 'strerror', '') or error})"
        raise refuse(argument, str(path), allowed) from None
    except UnicodeDecodeError as error:
        raise refuse(argument, str(path), f"UTF-8 text (byte {error.start} is none)") from None


def read_json_lines(path: str | Path, argument: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Reads a JSONL file with one object a line; blank lines are skipped.

    Args:
        path: The file, in UTF-8.
        argument: What the message calls the path.

    Yields:
        (path:line, object).

    Raises:
        ValueError: It cannot be read, or a line is no object; names the line.
    """
    for place, line in read_lines(path, argument):
        yield place, parse_json_line(place, line)


def read_lines(path: str | Path, argument: str) -> Iterator[tuple[str, str]]:
    """Reads the lines of a JSONL file without parsing them; blank lines are skipped.

    Args:
        path: The file, in UTF-8.
        argument: What the message calls the path.

    Yields:
        (path:line, line).
    """
    # Not splitlines(): a JSON string may contain U+2028 and other characters at which that splits.
    for number, line in enumerate(read_text(path, argument).split("\n"), 1):
        if line.strip():
            yield f"{path}:{number}", line


def parse_json_line(place: str, line: str | bytes) -> dict[str, object]:
    """Reads one line of JSONL.

    Args:
        place: Where it stands, path:line, for messages.
        line: The text, or its bytes in UTF-8.

    Returns:
        The object.

    Raises:
        ValueError: The line is no object.
    """
    try:
        record = json.loads(line.decode() if isinstance(line, bytes) else line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON: {error}; allowed: one object on each line") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place}: a {type(record).__name__}; allowed: one object on each line")
    return record


def read_problems(path: str | Path, task: Task) -> list[Problem]:
    """Reads problems from a file with one {"input", "output"} a line.

    Args:
        path: A JSONL file.
        task: The task that the inputs must belong to.

    Returns:
        The problems, in the order of the file.

    Raises:
        ValueError: The file has no problem, or a line is none; names the line.
    """
    problems: list[Problem] = []
    for place, record in read_json_lines(path, "file"):
        question, answer = record.get("input"), record.get("output")
        for key, value in {"input": question, "output": answer}.items():
            if not isinstance(value, str):
                raise refuse(f"{place}: {key}", value, "a string")
        try:
            task.canonical(str(question))
        except ValueError as error:
            hint = "any other question and its answer are of the task exact"
            raise ValueError(f"{place}: {error}, for the task {task.name}; {hint}") from None
        problems.append(Problem(str(question), str(answer)))
    if not problems:
        allowed = 'at least one line {"input": ..., "output": ...}; this one is empty'
        raise refuse("file", str(path), allowed)
    return problems


def mix(x: Number) -> Number:
    """Hashes 64-bit integers with the output function of SplitMix64 (Steele et al. 2014).

    Args:
        x: An integer, or an array of uint64.

    Returns:
        The hash of each integer.
    """
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def hashed_split(name: str, canonical: str) -> Split:
    """Decides the side of a class of equivalent problems by a hash of its canonical form.

    Args:
        name: Name of the task.
        canonical: The form that all problems of the class share.

    Returns:
        The side: 1 in `HELD_OUT` classes is held out, 1 in `VALIDATION` of those for validation.
    """
    digest = hashlib.blake2b(f"{name}:{canonical}".encode(), digest_size=8).digest()
    # One hash gives two independent choices: the remainder holds a class out, the quotient says for what.
    index, remainder = divmod(int.from_bytes(digest, "big"), HELD_OUT)
    if remainder:
        return "train"
    return "test" if index % VALIDATION else "validation"


def is_public_test_problem(name: str, key: str) -> bool:
    """Tells whether a problem is in one of the public test files sudoku_4x4_4, sudoku_4x4_8 and cd3_test.

    Args:
        name: Name of the task.
        key: The canonical form for countdown3; for sudoku4 the grid with its digits renamed in order of appearance.

    Returns:
        True if `public_test_problems.txt` lists the 48-bit hash of the problem. The files themselves are not copied.
    """
    return hashlib.blake2b(f"{name}:{key}".encode(), digest_size=6).hexdigest() in PUBLIC_TEST_HASHES
