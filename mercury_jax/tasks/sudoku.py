"""Sudoku of 4x4 and 9x9: rows of digits joined by newlines, 0 for a blank. Every problem has exactly one solution.

4x4: there are 288 solved grids, 12 with first row 1234, each with 24 namings of its digits. For each of the 12 a table
says which of the 65,536 patterns of givens determine the grid, so a problem is two table look-ups and a renaming.

9x9: a random solved grid shows more and more cells until a depth-first search finds no other solution.

Grids that are rotations, reflections, permutations of rows within bands, or renamings of each other are equivalent:
they are on the same side of the split.
"""

from __future__ import annotations

import itertools
from functools import cache, partial

import numpy as np

from mercury_jax.tasks.task import Problem, Split, Task, hashed_split, is_public_test_problem, mix


def parse_grid(size: int, text: str) -> np.ndarray:
    """Reads a written grid.

    Args:
        size: 4 or 9.
        text: `size` lines of `size` digits.

    Returns:
        Digits [size, size], 0 for a blank.

    Raises:
        ValueError: The text is no such grid.
    """
    rows = text.split("\n")
    digits = "0123456789"[: size + 1]
    if len(rows) != size or any(len(row) != size or set(row) - set(digits) for row in rows):
        raise ValueError(f"input: {text!r}; must be {size} lines of {size} digits, 0 for a blank")
    return np.array([[int(digit) for digit in row] for row in rows], np.int8)


def write_grid(grid: np.ndarray) -> str:
    """The text of a grid of digits [size, size]."""
    return "\n".join("".join(map(str, row)) for row in grid.tolist())


def is_solved(grid: np.ndarray) -> bool:
    """Whether every row, column and box of a grid [size, size] holds each digit once."""
    size = len(grid)
    box = int(size**0.5)
    boxes = grid.reshape(box, box, box, box).swapaxes(1, 2).reshape(size, size)
    units = np.sort(np.concatenate([grid, grid.T, boxes]), axis=1)
    return bool((units == np.arange(1, size + 1)).all())


def check(size: int, text: str, prediction: str) -> bool:
    """Checks an answer.

    Args:
        size: 4 or 9.
        text: The problem.
        prediction: The answer; white space around it is ignored.

    Returns:
        Whether the prediction is a solved grid that keeps the givens.
    """
    givens = parse_grid(size, text)
    try:
        grid = parse_grid(size, prediction.strip())
    except ValueError:
        return False
    return is_solved(grid) and bool((grid == givens)[givens > 0].all())


# --- 4x4

# Weights of 4..10 givens. Four is the fewest that can determine a grid.
_FEWEST_4 = 4
_GIVENS_4 = np.array([2, 2, 3, 4, 6, 4, 3]) / 24


@cache
def solved_4x4() -> np.ndarray:
    """[12, 16] the solved 4x4 grids with first row 1234, row by row."""
    rows = [np.array(row) for row in itertools.permutations((1, 2, 3, 4))]
    found = [np.stack([rows[0], *rest]) for rest in itertools.permutations(rows, 3)]
    return np.stack([grid.ravel() for grid in found if is_solved(grid)]).astype(np.int8)


@cache
def _symmetries_4x4() -> np.ndarray:
    """[128, 16] orders of the cells that map Sudokus to Sudokus; the first moves no cell.

    They permute rows within bands, and bands, the same for columns, and transpose.
    """
    halves = list(itertools.product(((0, 1), (1, 0)), ((2, 3), (3, 2))))
    lines = [(*top, *low) for top, low in halves] + [(*low, *top) for top, low in halves]
    cells = np.arange(16).reshape(4, 4)
    moved = [cells[np.ix_(rows, columns)] for rows in lines for columns in lines]
    return np.stack([order.ravel() for grid in moved for order in (grid, grid.T)])


@cache
def _places_4x4() -> np.ndarray:
    """[128, 16] where each cell goes under each of the symmetries."""
    return np.argsort(_symmetries_4x4(), axis=1)


@cache
def _unique_4x4() -> tuple[np.ndarray, ...]:
    """For each number of givens: [N, 2] (index of grid, pattern of givens) of the problems with one solution."""
    namings = np.array(list(itertools.permutations((1, 2, 3, 4))), np.int8)
    every = namings[:, solved_4x4() - 1].reshape(-1, 16)  # [288, 16]
    bits = 1 << np.arange(16)
    patterns = np.arange(1 << 16)
    counts = ((patterns[:, None] & bits) > 0).sum(1)
    pairs: list[np.ndarray] = []
    # A pattern of givens determines a grid if it is not inside the cells where another grid agrees with it.
    for i, grid in enumerate(solved_4x4()):
        agree = ((every == grid) * bits).sum(1)  # [288] cells where each other grid agrees, as bits
        unique = np.ones(1 << 16, bool)
        for other in np.unique(agree[agree != 0xFFFF]):
            unique &= (patterns & ~other) != 0  # givens inside of `other` fit both grids
        pairs += [np.stack([np.full(unique.sum(), i), patterns[unique]], axis=1)]
    table = np.concatenate(pairs)
    return tuple(table[counts[table[:, 1]] == _FEWEST_4 + k] for k in range(len(_GIVENS_4)))


def _generate_4x4(rng: np.random.Generator) -> Problem:
    edges = np.cumsum(_GIVENS_4)[:-1]
    # First the number of givens by weight, then any problem with that many, then names for the digits.
    table = _unique_4x4()[int(np.searchsorted(edges, rng.random(), side="right"))]
    index, pattern = table[rng.integers(len(table))].tolist()
    grid = (rng.permutation(4) + 1)[solved_4x4()[index] - 1].reshape(4, 4)
    shown = (pattern >> np.arange(16).reshape(4, 4)) & 1
    return Problem(write_grid(grid * shown), write_grid(grid))


def _images_4x4(text: str) -> tuple[str, str]:
    """(the grid with its digits renamed in order of appearance, the least of its 128 renamed symmetric images)."""
    cells, orders = parse_grid(4, text).ravel(), _symmetries_4x4()
    # The new name of a digit is the number of digits that appear before it, and blanks (0) before all; [128, 5].
    first = np.full((len(orders), 5), 16)
    first[:, 0] = -1
    for digit in np.unique(cells[cells > 0]):
        first[:, digit] = _places_4x4()[:, cells == digit].min(1)
    names = (first[:, :, None] > first[:, None, :]).sum(2)
    images = np.take_along_axis(names, cells[orders], 1)  # [128, 16]
    least = images[np.argmin(images @ 5 ** np.arange(15, -1, -1))]
    return write_grid(images[0].reshape(4, 4)), write_grid(least.reshape(4, 4))


def _split_4x4(text: str) -> Split:
    """By the class, except for the public test files, where a problem stands for its renamings only.

    There are just 13 classes with four givens: to hold out whole classes would leave none for training.
    """
    renamed, least = _images_4x4(text)
    return "test" if is_public_test_problem("sudoku4", renamed) else hashed_split("sudoku4", least)


# --- 9x9

_GIVENS_9 = (30, 45)
_FIRST_GIVENS_9 = 22  # where a problem starts; about 8 more cells then make it unique
_ALL_DIGITS = 0x1FF  # nine digits as bits
# Numbers of the row (0..8), the column (9..17) and the box (18..26) of each cell.
_UNITS = [(i // 9, 9 + i % 9, 18 + i // 27 * 3 + i % 9 // 3) for i in range(81)]

Cells = list[int]  # 81 digits, 0 for a blank


def another_solution(givens: Cells, known: Cells | None) -> Cells | None:
    """Searches depth first for a solution of a 9x9 grid, at the cell with the fewest candidates.

    Args:
        givens: The grid.
        known: A solution that does not count; its digits are tried last, so that another one is found early.

    Returns:
        A solution other than `known`; None if there is no other.
    """
    cells = list(givens)
    free = [_ALL_DIGITS] * 27  # digits that are free in each row, column and box, as bits
    blanks: list[int] = []

    def flip(i: int, bit: int) -> None:
        """Takes a digit from the units of cell i, or gives it back."""
        for unit in _UNITS[i]:
            free[unit] ^= bit

    def descend() -> bool:
        if not blanks:
            return cells != known
        # The blank with the fewest candidates: a digit is one if its row, column and box all still need it.
        fewest, at, candidates = 10, 0, 0
        for k, i in enumerate(blanks):
            row, column, box = _UNITS[i]
            options = free[row] & free[column] & free[box]
            if options.bit_count() < fewest:
                fewest, at, candidates = options.bit_count(), k, options
                if fewest < 2:
                    break
        # Swapping with the last one makes removal cheap; the order of blanks does not matter.
        blanks[at], blanks[-1] = blanks[-1], blanks[at]
        i = blanks.pop()
        bits = [1 << k for k in range(9) if candidates >> k & 1]
        last = known[i] if known else 0
        for bit in sorted(bits, key=lambda bit: bit.bit_length() == last):
            flip(i, bit)
            cells[i] = bit.bit_length()
            if descend():
                return True
            flip(i, bit)
        blanks.append(i)
        return False

    for i, digit in enumerate(cells):
        if digit:
            flip(i, 1 << (digit - 1))
        else:
            blanks.append(i)
    return cells if descend() else None


def _generate_9x9(rng: np.random.Generator) -> Problem:
    # A solved grid grows from three random boxes on the diagonal, which share no unit. Then its digits are renamed.
    boxes = np.zeros((9, 9), int)  # so a solution always exists
    for start in (0, 3, 6):
        boxes[start : start + 3, start : start + 3] = rng.permutation(9).reshape(3, 3) + 1
    solved = np.array(another_solution(boxes.ravel().tolist(), None))
    known = (rng.permutation(9) + 1)[solved - 1].tolist()
    # Show random cells, and one more wherever another solution still differs, until there is no other.
    order = rng.permutation(81).tolist()
    givens = [0] * 81
    for i in order[:_FIRST_GIVENS_9]:
        givens[i] = known[i]
    while (other := another_solution(givens, known)) is not None:
        i = int(rng.choice([i for i in range(81) if other[i] != known[i]]))
        givens[i] = known[i]
    # A number of givens is drawn; a problem that needed more keeps them all.
    spare = int(rng.integers(_GIVENS_9[0], _GIVENS_9[1] + 1)) - sum(map(bool, givens))
    for i in [i for i in order if not givens[i]][: max(0, spare)]:
        givens[i] = known[i]
    return Problem(write_grid(np.array(givens).reshape(9, 9)), write_grid(np.array(known).reshape(9, 9)))


def _canonical_9x9(text: str) -> str:
    """A hash that all symmetric and renamed forms share; others share it by rare accident only.

    Colour refinement: a cell's colour is mixed with those of its row, column, box, band, stack and digit, where rows
    and columns have the same role. The least of all 3,359,232 images would be exact, but slow.
    """
    cells = parse_grid(9, text).ravel()
    digit = (cells[None] == np.arange(1, 10)[:, None]).astype(np.uint64)  # [9, 81] where each digit is
    members = np.array([[k in units for units in _UNITS] for k in range(27)], np.uint64)  # [27, 81]
    colour = mix((cells > 0).astype(np.uint64))  # [81]
    # After six rounds the colour of every cell depends on all of the grid.
    for _ in range(6):
        units = mix(members @ colour)  # [27]
        lines = units[:18].reshape(6, 3)  # bands and stacks of three lines
        lines = mix(lines + np.uint64(3) * mix(lines.sum(1, keepdims=True))).ravel()
        same = mix(digit @ colour) @ digit  # [81]
        boxes = units[18:] @ members[18:]  # [81]
        colour = mix(colour + lines @ members[:18] + np.uint64(5) * boxes + np.uint64(7) * same)
    return f"{int(mix(colour).sum()):016x}"


sudoku4 = Task(
    "sudoku4", "4x4 sudokus of 4 to 10 givens, each with one solution",
    _generate_4x4, lambda text: _images_4x4(text)[1], _split_4x4, partial(check, 4), max_tokens=32,
)  # fmt: skip
sudoku9 = Task(
    "sudoku9", "9x9 sudokus, each with one solution",
    _generate_9x9, _canonical_9x9, lambda text: hashed_split("sudoku9", _canonical_9x9(text)), partial(check, 9),
    max_tokens=96, questions=64,
)  # fmt: skip
