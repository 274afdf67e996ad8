"""Rows filled from windows of a large corpus: the fast path of `pipeline.py`, without a call for each document.

    window(index) -> pieces of text -> RowFiller.next_row, cut where the row ends -> lay_out_rows, all rows at once

A source that fills whole rows opens as a `RowStream`. Its epoch is a number of windows of consecutive tokens, in a
shuffled order. Every row of the batch takes windows of its own, piece after piece, and goes on in the next row with the
rest of a piece that the row could not hold. Cuts are always between canvases, so that nothing is lost and every canvas
is whole. Where a row filler is, are two numbers: its window, and the first token of it that was not taken.

Where the block changes during a run, the windows are those of the largest block, which all others divide.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mercury_jax.train.data.shuffle import mix, uniform
from mercury_jax.types import Batch, RowLayout, RowPieces, Spans

AHEAD = 8  # windows that a row asks the kernel to read before it needs them


@dataclass(eq=False)
class TextWindow:
    """Consecutive tokens of a corpus and the pieces of text in them.

    Attributes:
        tokens: The tokens [N]; a view of a mapped file.
        start: First token of each piece [P].
        stop: One after its last token [P].
        prompt: How many of its tokens are never noised [P].
        key: Of this epoch; decides with `first` what is infilled.
        first: Number of the first token in the corpus.
    """

    tokens: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    prompt: np.ndarray
    key: int
    first: int

    @cached_property
    def stops(self) -> list[int]:
        """`stop` as a list, whose elements Python reads faster."""
        return self.stop.tolist()


class RowStream(NamedTuple):
    """The rows of one source.

    Attributes:
        window: window(index) finds the pieces of window index mod `size` of epoch index // `size`.
        read_ahead: read_ahead(index) asks the kernel to read a window that will be needed.
        size: Windows of an epoch.
        layout: Lays out rows.
        eos: Id that completes the last canvas of a text.
        infill: Share of the pieces in which only a span of each canvas is editable.
        identity: Tells corpora apart: a state of one does not continue another.
    """

    window: Callable[[int], TextWindow]
    read_ahead: Callable[[int], None]
    size: int
    layout: RowLayout
    eos: int
    infill: float
    identity: str


class RowPart(NamedTuple):
    """Pieces of one window that stand in a row: `begin` to `end`, of which the first and the last may be cut.

    Attributes:
        window: Where they are from.
        begin: Number of the first piece.
        end: One more than that of the last.
        start: First token, in the window.
        stop: One after the last token.
    """

    window: TextWindow
    begin: int
    end: int
    start: int
    stop: int


class FilledRow(NamedTuple):
    """A row: its pieces, and the positions that they use."""

    parts: list[RowPart]
    used: int


class RowFiller:
    """Takes one row of every batch from a source."""

    def __init__(self, stream: RowStream, rows: int, row: int, number: int) -> None:
        """Starts at the first window.

        Args:
            stream: The open source.
            rows: Rows B of a batch.
            row: Positions T of a row.
            number: Which of the B rows this is: it takes the windows number, number + B, number + 2B, ...
        """
        self._stream, self._rows, self._row, self._number = stream, rows, row, number
        self.set_state(0, 0)

    def use(self, stream: RowStream) -> None:
        """Continues in another layout, at the next place between two of its canvases."""
        self._stream, self._window = stream, None

    def set_state(self, taken: int, offset: int) -> None:
        """Continues where the two numbers were read.

        Args:
            taken: Windows of which nothing is left.
            offset: Tokens of the next window that were taken.
        """
        self.taken, self.offset = taken, offset
        self._window: TextWindow | None = None
        self._read_ahead = taken  # windows that the kernel was asked for

    def next_row(self) -> FilledRow:
        """Takes pieces until the row is full."""
        layout, room, parts = self._stream.layout, self._row, list[RowPart]()
        while room >= layout.block:
            window = self._window or self._open_window()
            begin, count = bisect_right(window.stops, self.offset), len(window.stops)
            if begin == count:
                self.taken, self.offset, self._window = self.taken + 1, 0, None
                continue
            # 1. Whole pieces, from `begin` on; of the first one the start may be gone, with its prompt.
            start, slots = int(window.start[begin]), self._slots[begin]
            prompt = int(window.prompt[begin])
            if self.offset > start:
                start, prompt = self.offset, 0
                slots = layout.sizes(window.stops[begin] - start, 0).slots
            first, before = start, self._ends[begin] - slots
            stop, end = start, bisect_right(self._ends, before + room, lo=begin)
            if end > begin:
                stop = window.stops[end - 1]
                room -= self._ends[end - 1] - before
            # 2. As many canvases of the next piece as fit into what is left.
            if end < count:
                if end > begin:
                    start, prompt = int(window.start[end]), int(window.prompt[end])
                taken = layout.fitting(room, prompt)
                if taken:
                    end, stop = end + 1, start + taken
                    room -= layout.sizes(taken, prompt).slots
            if end > begin:
                parts.append(RowPart(window, begin, end, first, stop))
                self.offset = stop
            if end < count or stop < window.stops[-1]:
                break
        return FilledRow(parts, self._row - room)

    def _open_window(self) -> TextWindow:
        # Window b, b + B, b + 2B, ... of the epochs one after the other: no other row has them.
        index = lambda taken: self._number + self._rows * taken
        for taken in range(self._read_ahead, self.taken + AHEAD):
            self._stream.read_ahead(index(taken))
        self._read_ahead = self.taken + AHEAD
        layout, window = self._stream.layout, self._stream.window(index(self.taken))
        # Of a prompt of a larger block whole canvases are learnt. Their edges stay where they were.
        window = self._window = replace(window, prompt=window.prompt % layout.block)
        # A smaller block may have ended within a canvas: what is left of it, below a block, is not used.
        cut = bisect_right(window.stops, self.offset)
        if cut < len(window.stops) and self.offset > window.start[cut]:
            canvas = int(window.start[cut]) + layout.first_canvas(int(window.prompt[cut]))
            whole = self.offset + (canvas - self.offset) % layout.block
            self.offset = min(whole, window.stops[cut])
        slots = layout.sizes(window.stop - window.start, window.prompt).slots
        self._slots: list[int] = slots.tolist()
        self._ends: list[int] = np.cumsum(slots).tolist()
        return window


def lay_out_rows(stream: RowStream, filled: Sequence[FilledRow], row: int, pad: int) -> Batch:
    """Lays out rows of one source.

    Args:
        stream: The source.
        filled: Its rows.
        row: Positions T.
        pad: Id that fills the rest of a row.

    Returns:
        numpy arrays [len(filled), T].
    """
    parts = [part for one in filled for part in one.parts]
    tokens = np.concatenate(
        [p.window.tokens[p.start : p.stop] for p in parts], dtype=np.int32, casting="unsafe"
    )
    counts = np.array([p.end - p.begin for p in parts])
    every = lambda values: np.repeat(np.array(values), counts)
    start, stop, prompt = (
        np.concatenate([field[p.begin : p.end] for field, p in zip(fields, parts)])
        for fields in (
            [p.window.start for p in parts], [p.window.stop for p in parts], [p.window.prompt for p in parts]
        )
    )  # fmt: skip
    # The first and the last piece of a part may be cut; the rest of a cut piece has no prompt.
    last = np.cumsum(counts) - 1
    first = last - counts + 1
    begins = np.array([p.start for p in parts])
    prompt[first] *= start[first] == begins
    start[first], stop[last] = begins, [p.stop for p in parts]
    # The parts stand one behind the other in `tokens`.
    sizes = np.array([p.stop - p.start for p in parts])
    moved = every(np.cumsum(sizes) - sizes - begins)
    rows = np.repeat(np.arange(len(filled)), [len(one.parts) for one in filled])
    pieces = RowPieces(every(rows), start + moved, stop - start, prompt)
    spans = None
    if stream.infill:
        number = (every([p.window.first for p in parts]) + start).astype(np.uint64)
        keys = mix(number ^ every(np.array([p.window.key for p in parts], np.uint64)))
        spans = infilled(keys, stream.infill)
    shape = len(filled), row
    return stream.layout.rows(tokens, pieces, shape, fill=stream.eos, pad=pad, spans=spans)


def infilled(keys: np.ndarray, share: float) -> Spans:
    """Keeps one random span of each canvas editable in a share of the pieces, as `packing.keep_spans` does.

    Args:
        keys: Of each piece, uint64 [P].
        share: Of the pieces.

    Returns:
        The function that narrows canvases.
    """
    chosen = uniform(keys) < share

    def narrow(piece: np.ndarray, editable: np.ndarray) -> np.ndarray:
        among = np.flatnonzero(chosen[piece])
        low, high = editable[among].T
        own = keys[piece[among]] + low.astype(np.uint64)
        u = [uniform(mix(own ^ np.uint64(lane << 56))) for lane in (1, 2, 3)]
        count = high - low
        length = 1 + (u[0] * count).astype(np.int32)
        start = low + np.where(u[1] < 0.5, 0, (u[2] * (count - length + 1)).astype(np.int32))
        narrowed = editable.copy()
        narrowed[among] = np.stack([start, start + length], 1)
        return narrowed

    return narrow
