"""Countdown: reach the target with + - * / and every number once. `15,44,79,50` -> `44-15=29,79-29=50`.

The last number of the input is the target. Inputs are drawn uniformly from those that can be solved, which
spreads numbers and operations much as the public test file cd3_test does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from mercury_jax.train.generators.base import Generator, Problem, Split, bucket, reserved

_EQUATION = re.compile(r"([0-9]{1,12})([-+*/])([0-9]{1,12})=([0-9]{1,12})")
_LARGEST, _TARGETS = 99, (10, 99)
# No sum or difference of two numbers up to 99 is larger: a larger product could only meet another product.
# With this limit the trace solves 988 of the 1,000 problems of cd3_test at 53 characters on average
# (without a limit all of them, at 78; with + - / alone 919, at 50).
_PRODUCT = 198

Results = dict[str, int]  # operation -> value, in the order - + * /
Equations = list[tuple[int, str, int, int]]  # (a, op, b, value)


def results(p: int, q: int, limit: int) -> Results:
    """What two numbers make, larger first: difference, sum, a product up to `limit`, an exact quotient."""
    a, b = max(p, q), min(p, q)
    found = {"-": a - b, "+": a + b}
    if a * b <= limit:
        found["*"] = a * b
    if b and a % b == 0:
        found["/"] = a // b
    return found


def trace(numbers: list[int], target: int) -> str:
    """The thinking for three numbers: one line for each choice x of the last number, in the order given.

    A line is `x:needs|results`. Needs are the values that x could turn into the target t: `-` |t-x|, `+`
    t+x, `*` t*x, `/` the exact quotient of t and x. Results are what the other two numbers make, written
    the same way: both sides are `results`. A value that stands on both is a solution. 15,44,79,50 gives

        15:-35+65|-35+123
        44:-6+94|-64+94
        79:-29+129|-29+59
    """
    lasts = _lasts(numbers, target)
    return "\n".join(f"{x}:{_written(needs)}|{_written(makes)}" for x, _, _, needs, makes in lasts)


def first(numbers: list[int], target: int) -> Equations | None:
    """The solution that the trace shows first, by line, then need, then result. None if it shows none."""
    for x, p, q, needs, makes in _lasts(numbers, target):
        for need in needs.values():
            for op, value in makes.items():
                if value == need:
                    return [(max(p, q), op, min(p, q), value), _last(value, x, target)]
    return None


def _lasts(numbers: list[int], target: int) -> Iterator[tuple[int, int, int, Results, Results]]:
    """Each choice of the last of three numbers: x, the pair, the needs of x, the results of the pair."""
    for i, x in enumerate(numbers):
        p, q = numbers[:i] + numbers[i + 1 :]
        yield x, p, q, results(target, x, _PRODUCT), results(p, q, _PRODUCT)


def _written(values: Results) -> str:
    return "".join(f"{op}{value}" for op, value in values.items())


def _last(value: int, x: int, target: int) -> tuple[int, str, int, int]:
    """The equation that turns `value` and `x` into `target`, larger operand first."""
    a, b = max(value, x), min(value, x)
    return a, next(op for op, made in results(a, b, target).items() if made == target), b, target


def solve(numbers: list[int], target: int) -> Equations | None:
    """A solution for any count of numbers, always the same: depth first, pairs in order, then - + * /."""
    if len(numbers) == 2:
        p, q = numbers
        return [_last(p, q, target)] if _reaches(p, q, target) else None
    for p, q, rest in _pairs(numbers):
        for op, value in results(p, q, limit=_LARGEST**2).items():
            tail = solve([*rest, value], target) if value else None
            if tail is not None:
                return [(max(p, q), op, min(p, q), value), *tail]
    return None


def _reaches(p: int, q: int, target: int) -> bool:
    return target in (p + q, p - q, q - p, p * q) or p == q * target or q == p * target


def _pairs(numbers: list[int]) -> Iterator[tuple[int, int, list[int]]]:
    for i, p in enumerate(numbers):
        for j in range(i + 1, len(numbers)):
            yield p, numbers[j], numbers[:i] + numbers[i + 1 : j] + numbers[j + 1 :]


def _problem3(rng: np.random.Generator) -> Problem:
    """Only 1 draw in 28 can be solved: sieving 64 at once is 3 to 4 times as fast as one by one."""
    while True:
        numbers, targets = _draws(rng, 64, 3)
        hits = np.flatnonzero(_solvable(numbers, targets))
        if len(hits):
            chosen, target = numbers[hits[0]].tolist(), int(targets[hits[0]])
            solution = first(chosen, target)
            assert solution is not None  # the sieve and `first` follow the same rule
            return _written_problem(chosen, target, solution, trace(chosen, target))


def _problem4(rng: np.random.Generator) -> Problem:
    while True:
        numbers, targets = _draws(rng, 1, 4)
        solution = solve(numbers[0].tolist(), int(targets[0]))
        if solution is not None:
            return _written_problem(numbers[0].tolist(), int(targets[0]), solution, None)


def _draws(rng: np.random.Generator, n: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.integers(1, _LARGEST + 1, (n, count)), rng.integers(_TARGETS[0], _TARGETS[1] + 1, n)


def _solvable(numbers: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """bool [N]: whether `first` finds a solution for numbers [N, 3] and targets [N]."""
    needs = _values(targets[:, None], numbers, absent=-1)
    makes = _values(np.roll(numbers, 1, axis=1), np.roll(numbers, 2, axis=1), absent=-2)
    return (needs[:, None] == makes).any((0, 1, 3))


def _values(p: np.ndarray, q: np.ndarray, absent: int) -> np.ndarray:
    """`results` on arrays: [4, ...] in the order - + * /, `absent` where an operation gives nothing."""
    a, b = np.maximum(p, q), np.minimum(p, q)
    quotient, rest = np.divmod(a, b)
    product = np.where(a * b <= _PRODUCT, a * b, absent)
    return np.stack([a - b, a + b, product, np.where(rest == 0, quotient, absent)])


def _written_problem(numbers: list[int], target: int, solution: Equations, thinking: str | None) -> Problem:
    output = ",".join(f"{a}{op}{b}={value}" for a, op, b, value in solution)
    return Problem(",".join(map(str, [*numbers, target])), output, thinking)


def _parse(count: int, text: str) -> tuple[list[int], int]:
    if not re.fullmatch(rf"[0-9]{{1,6}}(,[0-9]{{1,6}}){{{count}}}", text):
        raise ValueError(f"input: {text!r}; must be {count} numbers and the target, separated by commas")
    *numbers, target = map(int, text.split(","))
    return numbers, target


def _canonical(count: int, text: str) -> str:
    numbers, target = _parse(count, text)
    return ",".join(map(str, [*sorted(numbers), target]))


def _split(name: str, count: int, text: str) -> Split:
    canonical = _canonical(count, text)
    return "test" if reserved(name, canonical) else bucket(name, canonical)


def _check(count: int, text: str, prediction: str) -> bool:
    """Whether each equation holds and takes two numbers that are there, until only the target is left."""
    pool, target = _parse(count, text)
    for part in prediction.strip().split(","):
        match = _EQUATION.fullmatch(part)
        if match is None:
            return False
        a, b, value = int(match[1]), int(match[3]), int(match[4])
        if not _holds(a, match[2], b, value) or a not in pool or b not in pool:
            return False
        if a == b and pool.count(a) < 2:
            return False
        pool.remove(a)
        pool.remove(b)
        pool.append(value)
    return pool == [target]


def _holds(a: int, op: str, b: int, value: int) -> bool:
    if op == "/":
        return b != 0 and a == b * value
    return value == {"+": a + b, "-": a - b, "*": a * b}[op]


def _generator(count: int, problem: Callable[[np.random.Generator], Problem]) -> Generator:
    name = f"countdown{count}"
    return Generator(
        name=name,
        problem=problem,
        canonical=partial(_canonical, count),
        split=partial(_split, name, count),
        check=partial(_check, count),
    )


countdown3 = _generator(3, _problem3)
countdown4 = _generator(4, _problem4)
