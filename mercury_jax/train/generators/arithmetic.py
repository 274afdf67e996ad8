"""Written addition and subtraction: `347+585=` -> `932`, with the columns as thinking."""

from __future__ import annotations

import re
from functools import partial

import numpy as np

from mercury_jax.train.generators.base import Generator, Problem, Split, bucket

_FORM = re.compile(r"([0-9]{1,18})([+-])([0-9]{1,18})=")


def addition(digits: int) -> Generator:
    """Sums of two numbers of up to `digits` digits; the test side has exactly that many in both."""
    return _generator(f"add{digits}", digits, "+")


def subtraction(digits: int) -> Generator:
    """Differences of two such numbers, never below zero."""
    return _generator(f"sub{digits}", digits, "-")


def _generator(name: str, digits: int, op: str) -> Generator:
    if not 1 <= digits <= 17:
        raise ValueError(f"digits: {digits}; must be in 1..17")
    return Generator(
        name=name,
        problem=partial(_problem, digits, op),
        canonical=partial(_canonical, op),
        split=partial(_split, name, digits, op),
        check=partial(_check, op),
    )


def _problem(digits: int, op: str, rng: np.random.Generator) -> Problem:
    a, b = _operand(digits, rng), _operand(digits, rng)
    if op == "-":
        a, b = max(a, b), min(a, b)
    return Problem(f"{a}{op}{b}=", str(_value(a, op, b)), columns(a, op, b))


def _operand(digits: int, rng: np.random.Generator) -> int:
    """Mostly of full length; shorter ones teach what a missing column is."""
    n = digits if rng.random() < 0.75 else int(rng.integers(1, digits + 1))
    return int(rng.integers(10 ** (n - 1) if n > 1 else 0, 10**n))


def columns(a: int, op: str, b: int) -> str:
    """The columns of the written sum or difference, lowest digit first: `7+5=12,4+8+1=13,3+5+1=9`.

    The third term is the carry, which the first column cannot have. In a difference the upper digit is
    written with the ten that it borrows: 932-585 is `12-5=7,13-8-1=4,9-5-1=3`, so that no column falls
    below zero.
    """
    steps: list[str] = []
    carry = 0
    for place in range(max(len(str(a)), len(str(b)))):
        p, q = a // 10**place % 10, b // 10**place % 10
        if op == "-":
            carry, down = int(p < q + carry), carry
            p += 10 * carry
            steps.append(f"{p}-{q}{f'-{down}' * (place > 0)}={p - q - down}")
        else:
            steps.append(f"{p}+{q}{f'+{carry}' * (place > 0)}={p + q + carry}")
            carry = (p + q + carry) // 10
    return ",".join(steps)


def _value(a: int, op: str, b: int) -> int:
    return a + b if op == "+" else a - b


def _parse(op: str, text: str) -> tuple[int, int]:
    match = _FORM.fullmatch(text)
    if match is None or match[2] != op or _value(int(match[1]), op, int(match[3])) < 0:
        raise ValueError(f"input: {text!r}; must look like '58{op}34=' with a result of at least 0")
    return int(match[1]), int(match[3])


def _canonical(op: str, text: str) -> str:
    a, b = _parse(op, text)
    if op == "+":
        a, b = sorted((a, b))
    return f"{a}{op}{b}="


def _split(name: str, digits: int, op: str, text: str) -> Split:
    full = all(len(str(number)) == digits for number in _parse(op, text))
    return bucket(name, _canonical(op, text)) if full else "train"


def _check(op: str, text: str, prediction: str) -> bool:
    a, b = _parse(op, text)
    return prediction.strip() == str(_value(a, op, b))
