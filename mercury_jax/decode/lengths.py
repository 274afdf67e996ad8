"""Holes of open length, for models that neither insert nor stop: fill several lengths, keep the likeliest.

For each length n the model fills n masks between the same texts. What is compared is
log p(filling, following text | text before), by the any-order bound of `score`: a filling of the
wrong length leaves the text behind it improbable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mercury_jax.decode.holes import Filled, Hole, Row, whole
from mercury_jax.decode.program import QUANTUM
from mercury_jax.decode.score import Masked, masks, weighted_nats
from mercury_jax.types import LM

BEHIND = 16  # tokens of following text that are scored with the filling
SAMPLES = 8  # draws of each bound

Fill = Callable[[Sequence[Row], int], Filled]


class Grid(NamedTuple):
    """How finely shapes and lengths are told apart; a coarse one is quick, and few programs do for all.

    quantum: texts and canvases take multiples of so many positions. growth: from one length to try to the next.
    rows: the lengths of an open hole are tried in batches of a multiple of so many.
    """

    quantum: int = QUANTUM
    growth: float = 1.25
    rows: int = 1


def candidates(most: int, growth: float = Grid().growth) -> list[int]:
    """Lengths to try: 1, each next one by `growth` longer (1.25: every one up to 8), and `most` itself."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, max(sizes[-1] + 1, int(sizes[-1] * growth))))
    return sizes


def fill(lm: LM, rows: Sequence[Row], seed: int, fill_sized: Fill, grid: Grid = Grid()) -> Filled:
    """Rows with open holes, filled; each open hole is decided from left to right."""
    chosen = [[_start(p) for p in row] for row in rows]
    forwards = np.zeros(len(rows), int)
    done = [Filled([], np.zeros(0, int))] * len(rows)
    for i, row in enumerate(rows):
        opens = [j for j, p in enumerate(row) if isinstance(p, Hole) and p.tokens is None]
        for j in opens or [-1]:
            sizes = candidates(row[j].most, grid.growth) if j >= 0 else [0]
            tries = [_with(chosen[i], j, n) for n in sizes]
            spare = -len(tries) % grid.rows if j >= 0 else 0
            tried = fill_sized(tries + spare * tries[-1:], seed)
            nats = [_nats(lm, t, f, max(j, 0), grid.quantum) for t, f in zip(tries, tried.fillings)]
            best = int(np.argmin(nats)) if len(tries) > 1 else 0
            chosen[i] = tries[best]
            forwards[i] += int(tried.forwards[: len(tries)].sum())
            done[i] = Filled([tried.fillings[best]], forwards[i : i + 1])
    return Filled([f.fillings[0] for f in done], forwards)


def _start(part: object) -> object:
    """An open hole begins at a guess, until it is decided itself."""
    return Hole(max(1, part.most // 4)) if isinstance(part, Hole) and part.tokens is None else part


def _with(row: Row, at: int, size: int) -> Row:
    return [Hole(size) if j == at else p for j, p in enumerate(row)] if at >= 0 else list(row)


def _nats(lm: LM, row: Row, fillings: Sequence[np.ndarray], at: int, quantum: int) -> float:
    """-log p(filling and what follows it | what stands before it), a bound."""
    parts, left = [], iter(fillings)
    for p in row:
        parts.append(np.asarray(next(left) if isinstance(p, Hole) else p, np.int32))
    before = np.concatenate([*parts[:at], np.zeros(0, np.int32)])
    ids = whole(row, fillings)[: len(before) + len(parts[at]) + BEHIND]
    if len(before) == 0:  # a bound needs a token to condition on; the first one is not scored
        before = ids[:1]
    if len(ids) <= len(before):
        return 0.0
    laid = lm.model.layout(ids, len(before), all_clean=False)
    asked = Masked(laid, *masks(laid, SAMPLES, np.random.default_rng(0)))
    return float(weighted_nats(lm, [asked], quantum).mean())
