"""Sudoku of 4x4: rows of digits joined by newlines, 0 for a blank. Every problem has exactly one solution.

There are 288 solved grids: 12 with first row 1234, each under 24 relabellings. For each of the 12 a table
says which of the 65,536 patterns of givens determine it, so that a problem is two table look-ups and a
relabelling.
"""

from __future__ import annotations

import itertools
from functools import cache, partial

import numpy as np

from mercury_jax.train.generators.base import Generator, Problem, Split, bucket, reserved

# Weights of 4..10 givens. Four is the fewest that can determine a grid.
_GIVENS = np.array([2, 2, 3, 4, 6, 4, 3]) / 24
_FIRST = 4


def parse(size: int, text: str, field: str = "input") -> np.ndarray:
    """[size, size] digits of a written grid, 0 for a blank. ValueError for any other text."""
    rows = text.split("\n")
    digits = "0123456789"[: size + 1]
    if len(rows) != size or any(len(row) != size or set(row) - set(digits) for row in rows):
        raise ValueError(f"{field}: {text!r}; must be {size} lines of {size} digits, 0 for a blank")
    return np.array([[int(digit) for digit in row] for row in rows], np.int8)


def write(grid: np.ndarray) -> str:
    """The text of a grid of digits [size, size]."""
    return "\n".join("".join(map(str, row)) for row in grid.tolist())


def solved(grid: np.ndarray) -> bool:
    """Whether every row, column and box of the grid holds each digit once."""
    size = len(grid)
    box = int(size**0.5)
    boxes = grid.reshape(box, box, box, box).swapaxes(1, 2).reshape(size, size)
    units = np.sort(np.concatenate([grid, grid.T, boxes]), axis=1)
    return bool((units == np.arange(1, size + 1)).all())


def check(size: int, text: str, prediction: str) -> bool:
    """Whether the prediction is a solved grid that keeps the givens of the input."""
    givens = parse(size, text)
    try:
        grid = parse(size, prediction.strip())
    except ValueError:
        return False
    return solved(grid) and bool((grid == givens)[givens > 0].all())


def relabel(cells: np.ndarray, size: int) -> np.ndarray:
    """[..., N] digits renamed in the order in which they first appear; blanks stay 0."""
    seen = cells[..., None] == np.arange(1, size + 1)  # [..., N, size]
    first = np.where(seen.any(-2), seen.argmax(-2), cells.shape[-1])  # [..., size]
    name = 1 + (first[..., None, :] < first[..., :, None]).sum(-1)  # 1 + the digits that appear before
    return (seen * name[..., None, :]).sum(-1)


@cache
def grids() -> np.ndarray:
    """[12, 16] the solved grids with first row 1234, row by row."""
    rows = [np.array(row) for row in itertools.permutations((1, 2, 3, 4))]
    found = [np.stack([rows[0], *rest]) for rest in itertools.permutations(rows, 3)]
    return np.stack([grid.ravel() for grid in found if solved(grid)]).astype(np.int8)


@cache
def symmetries() -> np.ndarray:
    """[128, 16] cell orders that map sudokus to sudokus; the first moves no cell.

    They permute rows within bands, and bands, the same for columns, and transpose.
    """
    halves = list(itertools.product(((0, 1), (1, 0)), ((2, 3), (3, 2))))
    lines = [(*top, *low) for top, low in halves] + [(*low, *top) for top, low in halves]
    cells = np.arange(16).reshape(4, 4)
    moved = [cells[np.ix_(rows, columns)] for rows in lines for columns in lines]
    return np.stack([order.ravel() for grid in moved for order in (grid, grid.T)])


@cache
def _unique() -> tuple[np.ndarray, ...]:
    """For each number of givens: [N, 2] (index of grid, pattern) of the problems with one solution."""
    labels = np.array(list(itertools.permutations((1, 2, 3, 4))), np.int8)
    every = labels[:, grids() - 1].reshape(-1, 16)  # [288, 16]
    bits = 1 << np.arange(16)
    patterns = np.arange(1 << 16)
    counts = ((patterns[:, None] & bits) > 0).sum(1)
    pairs: list[np.ndarray] = []
    for i, grid in enumerate(grids()):
        agree = ((every == grid) * bits).sum(1)  # where each other grid agrees; givens inside it fit both
        others = np.unique(agree[agree != 0xFFFF])
        one = np.ones(1 << 16, bool)
        for other in others:
            one &= (patterns & ~other) != 0
        pairs += [np.stack([np.full(one.sum(), i), patterns[one]], axis=1)]
    table = np.concatenate(pairs)
    return tuple(table[counts[table[:, 1]] == _FIRST + k] for k in range(len(_GIVENS)))


@cache
def _edges() -> np.ndarray:
    return np.cumsum(_GIVENS)[:-1]


def _problem4(rng: np.random.Generator) -> Problem:
    table = _unique()[int(np.searchsorted(_edges(), rng.random(), side="right"))]
    index, pattern = table[rng.integers(len(table))].tolist()
    grid = (rng.permutation(4) + 1)[grids()[index] - 1].reshape(4, 4)
    shown = (pattern >> np.arange(16).reshape(4, 4)) & 1
    return Problem(write(grid * shown), write(grid))


def _canonical4(text: str) -> str:
    return _least(_images(text))


def _images(text: str) -> np.ndarray:
    """[128, 16] each symmetric image with its digits renamed in order of appearance; row 0 is unmoved."""
    return relabel(parse(4, text).ravel()[symmetries()], 4)


def _least(images: np.ndarray) -> str:
    return write(images[np.argmin(images @ 5 ** np.arange(15, -1, -1))].reshape(4, 4))


def _split4(text: str) -> Split:
    """By the class, except for the public test files, where a problem stands for its relabellings only.

    There are just 13 classes with four givens: to reserve whole classes would leave none for training.
    """
    images = _images(text)
    if reserved("sudoku4", write(images[0].reshape(4, 4))):
        return "test"
    return bucket("sudoku4", _least(images))


sudoku4 = Generator("sudoku4", _problem4, _canonical4, _split4, partial(check, 4))
