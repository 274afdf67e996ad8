"""Countdown: reach the target with + - * / and every number once. `15,44,79,50` -> `44-15=29,79-29=50`.

The last number of the input is the target. Inputs are drawn uniformly from those that can be solved, so numbers and
operations are distributed much as in the public test file cd3_test. For three numbers the thinking is a trace that
lists, for each choice of the last number, what it needs and what the other two give.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from mercury_jax.tasks.task import Problem, Split, Task, hashed_split, is_public_test_problem

_EQUATION = re.compile(r"([0-9]{1,12})([-+*/])([0-9]{1,12})=([0-9]{1,12})")
_LARGEST, _TARGETS = 99, (10, 99)
# No sum or difference of two numbers up to 99 is larger: a larger product could only meet another product.
# With this limit the trace solves 988 of the 1,000 problems of cd3_test at 53 characters on average
# (without a limit all of them, at 78; with + - / alone 919, at 50).
_PRODUCT = 198

Results = dict[str, int]  # operation -> value, in the order - + * /
Equations = list[tuple[int, str, int, int]]  # (a, op, b, value)


def results(p: int, q: int, limit: int) -> Results:
    """Computes what two numbers give, with the larger one first.

    Args:
        p: A number, 0 or more.
        q: Another one.
        limit: The largest product that counts.

    Returns:
        Difference, sum, product up to `limit`, and quotient where it is exact.
    """
    a, b = max(p, q), min(p, q)
    found = {"-": a - b, "+": a + b}
    if a * b <= limit:
        found["*"] = a * b
    if b and a % b == 0:
        found["/"] = a // b
    return found


class Trace(NamedTuple):
    """The thinking for three numbers.

    Attributes:
        text: One line for each choice of the last number.
        solution: The solution that the text shows first: by line, then by need, then by result. None if it shows none.
    """

    text: str
    solution: Equations | None


def trace(numbers: list[int], target: int) -> Trace:
    """Writes the thinking for three numbers: one line for each choice x of the last number, in the given order.

    A line is `x:needs|results`. Needs are the values that x could turn into the target t: `-` |t-x|, `+` t+x, `*`
    t*x, `/` the exact quotient of t and x. Results are what the other two numbers give, written in the same way:
    both sides come from `results`. A value on both sides is a solution. 15,44,79,50 gives

        15:-35+65|-35+123
        44:-6+94|-64+94
        79:-29+129|-29+59

    Args:
        numbers: The three numbers.
        target: The number to reach.

    Returns:
        The lines, and the solution that they show first.
    """
    lines: list[str] = []
    solution: Equations | None = None
    for i, x in enumerate(numbers):
        p, q = numbers[:i] + numbers[i + 1 :]
        needs, made = results(target, x, _PRODUCT), results(p, q, _PRODUCT)
        sides = ["".join(f"{op}{value}" for op, value in side.items()) for side in (needs, made)]
        lines.append(f"{x}:{sides[0]}|{sides[1]}")
        for need in needs.values():
            for op, value in made.items():
                if value == need and solution is None:
                    solution = [(max(p, q), op, min(p, q), value), _last_equation(value, x, target)]
    return Trace("\n".join(lines), solution)


def _last_equation(value: int, x: int, target: int) -> tuple[int, str, int, int]:
    """The equation that turns `value` and `x` into `target`, larger operand first."""
    a, b = max(value, x), min(value, x)
    return a, next(op for op, made in results(a, b, target).items() if made == target), b, target


def solve(numbers: list[int], target: int) -> Equations | None:
    """Finds a solution for any count of numbers, always the same one: depth first, pairs in order, then - + * /.

    Args:
        numbers: At least two numbers.
        target: The number to reach.

    Returns:
        The equations in order; None if there is no solution.
    """
    if len(numbers) == 2:
        p, q = numbers
        reached = target in (p + q, p - q, q - p, p * q) or p == q * target or q == p * target
        return [_last_equation(p, q, target)] if reached else None
    # Replace each pair by what it gives, and solve the smaller problem. Results of 0 are skipped.
    for i, p in enumerate(numbers):
        for j in range(i + 1, len(numbers)):
            q, rest = numbers[j], numbers[:i] + numbers[i + 1 : j] + numbers[j + 1 :]
            for op, value in results(p, q, limit=_LARGEST**2).items():
                tail = solve([*rest, value], target) if value else None
                if tail is not None:
                    return [(max(p, q), op, min(p, q), value), *tail]
    return None


def is_solvable(numbers: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Tells for many problems of three numbers at once whether `trace` shows a solution.

    Args:
        numbers: [N, 3].
        targets: [N].

    Returns:
        bool [N].
    """

    def values(p: np.ndarray, q: np.ndarray, absent: int) -> np.ndarray:
        """`results` on arrays: [4, ...] in the order - + * /, `absent` where an operation gives nothing."""
        a, b = np.maximum(p, q), np.minimum(p, q)
        quotient, remainder = np.divmod(a, b)
        product = np.where(a * b <= _PRODUCT, a * b, absent)
        return np.stack([a - b, a + b, product, np.where(remainder == 0, quotient, absent)])

    needs = values(targets[:, None], numbers, absent=-1)  # [4, N, 3], of each choice of the last number
    made = values(np.roll(numbers, 1, axis=1), np.roll(numbers, 2, axis=1), absent=-2)  # [4, N, 3]
    # Any need of any last number that the other two make: [4, 4, N, 3] -> [N].
    return (needs[:, None] == made).any((0, 1, 3))


def _generate(count: int, rng: np.random.Generator) -> Problem:
    # With three numbers 1 draw in 28 can be solved: testing 64 at once is 3 to 4 times as fast as one by one.
    tries = 64 if count == 3 else 1
    while True:
        numbers = rng.integers(1, _LARGEST + 1, (tries, count))
        targets = rng.integers(_TARGETS[0], _TARGETS[1] + 1, tries)
        at = int(is_solvable(numbers, targets).argmax()) if count == 3 else 0
        chosen, target = numbers[at].tolist(), int(targets[at])
        text, solution = trace(chosen, target) if count == 3 else (None, solve(chosen, target))
        if solution is not None:
            output = ",".join(f"{a}{op}{b}={value}" for a, op, b, value in solution)
            return Problem(",".join(map(str, [*chosen, target])), output, text)


def _countdown(count: int, words: str) -> Task:
    name, form = f"countdown{count}", rf"[0-9]{{1,6}}(,[0-9]{{1,6}}){{{count}}}"

    def parse(text: str) -> tuple[list[int], int]:
        if not re.fullmatch(form, text):
            raise ValueError(f"input: {text!r}; must be {count} numbers and the target, separated by commas")
        *numbers, target = map(int, text.split(","))
        return numbers, target

    def canonical(text: str) -> str:
        numbers, target = parse(text)
        return ",".join(map(str, [*sorted(numbers), target]))

    def split(text: str) -> Split:
        key = canonical(text)
        return "test" if is_public_test_problem(name, key) else hashed_split(name, key)

    def check(text: str, prediction: str) -> bool:
        """Whether each equation holds and takes two numbers that are left, until only the target is left."""
        left, target = parse(text)
        for part in prediction.strip().split(","):
            match = _EQUATION.fullmatch(part)
            if match is None:
                return False
            a, op, b, value = int(match[1]), match[2], int(match[3]), int(match[4])
            if op == "/":
                holds = b != 0 and a == b * value
            else:
                holds = value == {"+": a + b, "-": a - b, "*": a * b}[op]
            if not holds or a not in left or b not in left or (a == b and left.count(a) < 2):
                return False
            # Both numbers are used up, and the result may be used in their place.
            left.remove(a)
            left.remove(b)
            left.append(value)
        return left == [target]

    about = f"reach a target with {words} numbers and + - * /; any valid way counts"
    return Task(name, about, lambda rng: _generate(count, rng), canonical, split, check, max_tokens=128)


countdown3 = _countdown(3, "three")
countdown4 = _countdown(4, "four")
