"""Sudoku of 9x9 in the same writing: 30 to 45 givens, exactly one solution."""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from mercury_jax.train.generators.base import Generator, Problem, Split, bucket
from mercury_jax.train.generators.sudoku import check, parse, write

_GIVENS = (30, 45)
_SEED_GIVENS = 22  # what a problem starts from; about 8 more cells then make it unique
_ALL = 0x1FF  # nine digits as bits
# Numbers of the row (0..8), the column (9..17) and the box (18..26) of each cell.
_UNITS = [(i // 9, 9 + i % 9, 18 + i // 27 * 3 + i % 9 // 3) for i in range(81)]

Cells = list[int]  # 81 digits, 0 for a blank


def another(givens: Cells, known: Cells | None) -> Cells | None:
    """A solution of the givens other than `known`, or None if there is no other; digits in rising order.

    Depth first at the cell with the fewest candidates. The known digit is tried last, so that another
    solution, where there is one, is met early.
    """
    cells = list(givens)
    free = [_ALL] * 27  # digits still free in each row, column and box, as bits
    blanks: list[int] = []
    for i, digit in enumerate(cells):
        if digit:
            _flip(free, i, 1 << (digit - 1))
        else:
            blanks.append(i)

    def descend() -> bool:
        if not blanks:
            return cells != known
        at, options = _tightest(blanks, free)
        blanks[at], blanks[-1] = blanks[-1], blanks[at]
        i = blanks.pop()
        for bit in _bits(options, known[i] if known else 0):
            _flip(free, i, bit)
            cells[i] = bit.bit_length()
            if descend():
                return True
            _flip(free, i, bit)
        blanks.append(i)
        return False

    return cells if descend() else None


def _flip(free: list[int], i: int, bit: int) -> None:
    """Take a digit from the units of cell i, or give it back."""
    for unit in _UNITS[i]:
        free[unit] ^= bit


def _tightest(blanks: list[int], free: list[int]) -> tuple[int, int]:
    """(position in `blanks`, candidates as bits) of the blank with the fewest candidates."""
    fewest, best = 10, (0, 0)
    for k, i in enumerate(blanks):
        row, column, box = _UNITS[i]
        options = free[row] & free[column] & free[box]
        count = options.bit_count()
        if count < fewest:
            fewest, best = count, (k, options)
            if count < 2:
                break
    return best


def _bits(options: int, last: int) -> list[int]:
    """Each candidate as one bit, in rising order but for the digit `last`."""
    bits = [1 << k for k in range(9) if options >> k & 1]
    bits.sort(key=lambda bit: bit.bit_length() == last)
    return bits


def _solution(rng: np.random.Generator) -> Cells:
    """A solved grid grown from three random boxes on the diagonal, its digits then renamed at random."""
    seed = np.zeros((9, 9), int)
    for start in (0, 3, 6):
        seed[start : start + 3, start : start + 3] = rng.permutation(9).reshape(3, 3) + 1
    full = another(seed.ravel().tolist(), None)
    assert full is not None  # boxes on the diagonal share no unit, so a solution always exists
    return (rng.permutation(9) + 1)[np.array(full) - 1].tolist()


def _problem(rng: np.random.Generator) -> Problem:
    """Show random cells, and one more wherever another solution still differs, until there is no other."""
    known = _solution(rng)
    order = rng.permutation(81).tolist()
    givens = [0] * 81
    for i in order[:_SEED_GIVENS]:
        givens[i] = known[i]
    while (other := another(givens, known)) is not None:
        i = int(rng.choice([i for i in range(81) if other[i] != known[i]]))
        givens[i] = known[i]
    wanted = int(rng.integers(_GIVENS[0], _GIVENS[1] + 1))
    spare = wanted - sum(map(bool, givens))
    for i in [i for i in order if not givens[i]][: max(0, spare)]:
        givens[i] = known[i]
    return Problem(write(np.array(givens).reshape(9, 9)), write(np.array(known).reshape(9, 9)))


@cache
def _members() -> np.ndarray:
    """[27, 81] which cells are in each row, column and box."""
    return np.array([[k in units for units in _UNITS] for k in range(27)], np.uint64)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64: a hash of each entry."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _canonical(text: str) -> str:
    """A hash that all symmetric and relabelled forms share; others share it by rare accident only.

    Colour refinement: a cell's colour is mixed with those of its row, column, box, band, stack and digit,
    where rows and columns play the same part. The least of all 3,359,232 images would be exact, but slow.
    """
    cells = parse(9, text).ravel()
    digit = (cells[None] == np.arange(1, 10)[:, None]).astype(np.uint64)  # [9, 81]
    colour = _mix((cells > 0).astype(np.uint64))
    for _ in range(6):
        units = _mix(_members() @ colour)  # [27]
        lines = units[:18].reshape(6, 3)  # bands and stacks of three
        lines = _mix(lines + np.uint64(3) * _mix(lines.sum(1, keepdims=True))).ravel()
        same = _mix(digit @ colour) @ digit
        boxes = units[18:] @ _members()[18:]
        colour = _mix(colour + lines @ _members()[:18] + np.uint64(5) * boxes + np.uint64(7) * same)
    return f"{int(_mix(colour).sum()):016x}"


def _split(text: str) -> Split:
    return bucket("sudoku9", _canonical(text))


sudoku9 = Generator("sudoku9", _problem, _canonical, _split, partial(check, 9))
