"""Whole documents into rows of T positions, first fit, with a bounded number of rows open."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mercury_jax.types import Batch, LaidOutDocument

Ref = tuple[int, int]  # (source, index): enough to make a document again


@dataclass
class Row:
    """An unfinished row: its documents, and where they came from."""

    refs: list[Ref] = field(default_factory=list)
    laid: list[LaidOutDocument] = field(default_factory=list)
    used: int = 0

    def add(self, ref: Ref, laid: LaidOutDocument) -> None:
        self.refs.append(ref)
        self.laid.append(laid)
        self.used += len(laid.tokens)


def place(rows: list[Row], ref: Ref, laid: LaidOutDocument, length: int, limit: int) -> Row | None:
    """Put a document into the first open row that has room, else into a new one.

    Changes `rows`. When there would be more than `limit`, the fullest is closed and returned.
    """
    n = len(laid.tokens)
    target = next((row for row in rows if row.used + n <= length), None)
    if target is not None:
        target.add(ref, laid)
        return rows.pop(rows.index(target)) if target.used == length else None
    closed = rows.pop(max(range(len(rows)), key=lambda i: rows[i].used)) if len(rows) >= limit else None
    rows.append(Row())
    rows[-1].add(ref, laid)
    return closed


def batch(rows: list[Row], length: int, pad: int) -> Batch:
    """Closed rows as one Batch [B, T]. Padding sees nothing, is not editable and stands in no canvas."""
    shape = (len(rows), length)
    arrays: dict[str, Any] = dict(
        tokens=np.full(shape, pad, np.int32),
        positions=np.zeros(shape, np.int32),
        ranges=np.zeros((*shape, 2, 2), np.int32),
        editable=np.zeros(shape, bool),
        canvas=np.full(shape, -1, np.int32),
    )
    out = Batch(**arrays)
    for b, row in enumerate(rows):
        _fill(Batch(*(x[b] for x in out)), row)
    return out


def _fill(out: Any, row: Row) -> None:
    """Write a row's documents one behind the other, ranges and canvases moved by what stands before."""
    at = canvases = 0
    for laid in row.laid:
        here = slice(at, at + len(laid.tokens))
        out.tokens[here], out.positions[here] = laid.tokens, laid.positions
        out.editable[here] = laid.editable
        live = laid.ranges[..., :1] < laid.ranges[..., 1:]  # an empty range stays where it is
        out.ranges[here] = laid.ranges + at * live
        out.canvas[here] = np.where(laid.canvas < 0, -1, laid.canvas + canvases)
        at, canvases = here.stop, canvases + int(laid.canvas.max()) + 1
