"""Addition and subtraction as in writing, `347+585=` -> `932`; the columns from right to left are the thinking."""

from __future__ import annotations

import re
from typing import Annotated

import numpy as np

from mercury_jax.config import Between, checked
from mercury_jax.tasks.task import Problem, Split, Task, hashed_split

_FORM = re.compile(r"(?:What is )?([0-9]{1,18}) ?([+-]) ?([0-9]{1,18}) ?[=?]?")
# As people type into a chat.
TYPED = ("{a}{op}{b}", "{a} {op} {b} =", "{a} {op} {b}", "What is {a}{op}{b}?", "What is {a} {op} {b}?")
_WORDS = {2: "two", 3: "three", 4: "four"}


@checked
def arithmetic(
    name: str, digits: Annotated[int, Between(1, 17)], op: str, forms: tuple[str, ...] = ()
) -> Task:
    """Makes a task of sums or differences of two numbers with up to `digits` digits.

    Longer numbers are more frequent than shorter ones. Every form of a question, and every order of the numbers of a
    sum, is on the same side of the split. Two numbers of one digit are always on the train side.

    Args:
        name: Name of the task.
        digits: 1 to 17.
        op: "+", or "-" for differences that are never below zero.
        forms: Half of the questions have one of these forms, the others the form `347+585=`.

    Returns:
        The task.

    Raises:
        ValueError: `digits` is out of range.
    """

    def generate(rng: np.random.Generator) -> Problem:
        numbers = []
        for _ in range(2):
            n = int(rng.integers(1, digits + 1, 2).max())  # the larger one: longer numbers are harder
            numbers.append(int(rng.integers(10 ** (n - 1) if n > 1 else 0, 10**n)))
        a, b = numbers
        if op == "-":
            a, b = max(a, b), min(a, b)
        form = forms[int(rng.integers(len(forms)))] if forms and rng.random() < 0.5 else "{a}{op}{b}="
        return Problem(form.format(a=a, op=op, b=b), str(a + b if op == "+" else a - b), columns(a, op, b))

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
        # There are only 55 sums of two numbers of one digit: none is held out.
        return hashed_split(name, canonical(text)) if max(parse(text)) > 9 else "train"

    def check(text: str, prediction: str) -> bool:
        a, b = parse(text)
        return prediction.strip() == str(a + b if op == "+" else a - b)

    about = f"{'sums' if op == '+' else 'differences'} of two numbers of up to {_WORDS.get(digits, digits)} digits"
    # The columns of two-digit numbers fit into one canvas, the columns of longer numbers do not.
    return Task(name, about, generate, canonical, split, check, max_tokens=32 if digits < 3 else 64)


def columns(a: int, op: str, b: int) -> str:
    """Writes the columns of a sum or difference, lowest digit first: `7+5=12,4+8+1=13,3+5+1=09`.

    The third term is the carry of the column before; the first column has none. The sum of a column has two digits, so
    that the place of a column does not depend on the digits and all columns can be written at once. In a difference, a
    column that borrows adds the ten to its upper digit, so that no column is negative: 932-585 is
    `12-5=7,13-8-1=4,9-5-1=3`.

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
            steps.append(f"{p}+{q}{f'+{carry}' * (place > 0)}={p + q + carry:02}")
            carry = (p + q + carry) // 10
    return ",".join(steps)
