"""Addition and subtraction as in writing, `347+585=` -> `932`; the columns from right to left are the thinking."""

from __future__ import annotations

import re

import numpy as np

from mercury_jax.tasks.task import Problem, Split, Task, hashed_split

_FORM = re.compile(r"([0-9]{1,18})([+-])([0-9]{1,18})=")
_WORDS = {2: "two", 3: "three", 4: "four"}


def arithmetic(name: str, digits: int, op: str) -> Task:
    """Makes a task of sums or differences of two numbers with up to `digits` digits.

    In the test split both numbers have exactly `digits` digits.

    Args:
        name: Name of the task.
        digits: 1 to 17.
        op: "+", or "-" for differences that are never below zero.

    Returns:
        The task.

    Raises:
        ValueError: `digits` is out of range.
    """
    if not 1 <= digits <= 17:
        raise ValueError(f"digits: {digits}; must be in 1..17")

    def generate(rng: np.random.Generator) -> Problem:
        numbers = []
        for _ in range(2):
            # Most numbers have full length; shorter ones teach the model what to do where a digit is missing.
            n = digits if rng.random() < 0.75 else int(rng.integers(1, digits + 1))
            numbers.append(int(rng.integers(10 ** (n - 1) if n > 1 else 0, 10**n)))
        a, b = numbers
        if op == "-":
            a, b = max(a, b), min(a, b)
        return Problem(f"{a}{op}{b}=", str(a + b if op == "+" else a - b), columns(a, op, b))

    def parse(text: str) -> tuple[int, int]:
        match = _FORM.fullmatch(text)
        if match is None or match[2] != op or (op == "-" and int(match[1]) < int(match[3])):
            raise ValueError(f"input: {text!r}; must look like '58{op}34=' with a result of at least 0")
        return int(match[1]), int(match[3])

    def canonical(text: str) -> str:
        a, b = parse(text)
        if op == "+":
            a, b = sorted((a, b))
        return f"{a}{op}{b}="

    def split(text: str) -> Split:
        # Problems with a shorter number are always in the train split.
        full_length = all(len(str(number)) == digits for number in parse(text))
        return hashed_split(name, canonical(text)) if full_length else "train"

    def check(text: str, prediction: str) -> bool:
        a, b = parse(text)
        return prediction.strip() == str(a + b if op == "+" else a - b)

    about = f"{'sums' if op == '+' else 'differences'} of two numbers of {_WORDS.get(digits, digits)} digits"
    # The columns of two-digit numbers fit into one canvas, the columns of longer numbers do not.
    return Task(name, about, generate, canonical, split, check, max_tokens=32 if digits < 3 else 64)


def columns(a: int, op: str, b: int) -> str:
    """Writes the columns of a sum or difference, lowest digit first: `7+5=12,4+8+1=13,3+5+1=9`.

    The third term is the carry of the column before; the first column has none. In a difference, a column that borrows
    adds the ten to its upper digit, so that no column is negative: 932-585 is `12-5=7,13-8-1=4,9-5-1=3`.

    Args:
        a: The first number, 0 or more.
        op: "+" or "-".
        b: The second number, 0 or more; at most `a` for a difference.

    Returns:
        The columns, joined by commas.
    """
    steps: list[str] = []
    carry = 0
    for place in range(max(len(str(a)), len(str(b)))):
        p, q = a // 10**place % 10, b // 10**place % 10
        if op == "-":
            # Borrow ten if the upper digit is smaller than the lower one plus the previous borrow (`down`).
            carry, down = int(p < q + carry), carry
            p += 10 * carry
            steps.append(f"{p}-{q}{f'-{down}' * (place > 0)}={p - q - down}")
        else:
            steps.append(f"{p}+{q}{f'+{carry}' * (place > 0)}={p + q + carry}")
            carry = (p + q + carry) // 10
    return ",".join(steps)
