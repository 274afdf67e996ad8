"""Rows filled from windows of a large corpus: the fast path of `pipeline.py`, without a Python call per document.

    window(index) -> pieces of text -> RowFiller.next_row, cut where the row ends -> lay_out_rows, all rows at once

A source that fills whole rows opens as a `RowStream`. Its epoch is a shuffled sequence of windows of consecutive
tokens. Each row of the batch has its own windows and takes their pieces one after the other. If the last piece does not
fit, the row takes as many whole canvases of it as fit, and the same row of the next batch continues with the rest. All
cuts are between canvases, so no token is lost and every canvas is whole. The state of a `RowFiller` is two numbers: the
number of its window, and how many tokens of that window were taken.

`permuted` shuffles 0 .. N - 1 without storing the permutation, so that an epoch of any size has a shuffled order that
is the same in all processes. If the block changes during a run, windows are made for the largest block, which is a
multiple of all others.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mercury_jax.tasks.task import mix
from mercury_jax.types import Batch, RowLayout, RowPieces, Spans

AHEAD = 8  # number of windows that a row asks the kernel to read before it needs them
ROUNDS = 6  # four make a Feistel network a strong pseudo-random permutation (Luby and Rackoff 1988)


@dataclass(eq=False)
class TextWindow:
    """Consecutive tokens of a corpus and the pieces of text in them.

    Attributes:
        tokens: Token ids [N]; a view of a memory-mapped file.
        start: Index of the first token of each piece [P].
        stop: Index after the last token of each piece [P].
        prompt: Number of leading tokens of each piece that are never noised [P].
        key: Key of the epoch. Together with `first` it decides which pieces are infilled, and where.
        first: Index of `tokens[0]` in the whole corpus.
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
    """An open source that fills whole rows.

    Attributes:
        window: window(index) -> the pieces of window `index % size` of epoch `index // size`.
        read_ahead: read_ahead(index) asks the kernel to load a window into the page cache, without waiting.
        size: Number of windows of an epoch.
        layout: Lays out rows.
        eos: End-of-text id, which fills up the last canvas of a text.
        infill: Share of the pieces in which only a span of each canvas is editable.
        identity: Digest of the corpus; a saved state of another corpus is refused.
    """

    window: Callable[[int], TextWindow]
    read_ahead: Callable[[int], None]
    size: int
    layout: RowLayout
    eos: int
    infill: float
    identity: str


class RowPart(NamedTuple):
    """Consecutive pieces of one window that a row contains; the first and the last of them may be cut.

    Attributes:
        window: The window.
        begin: Index of the first piece.
        end: Index after the last piece.
        start: First token in the window, inside of piece `begin`.
        stop: Index after the last token, inside of piece `end - 1`.
    """

    window: TextWindow
    begin: int
    end: int
    start: int
    stop: int


class FilledRow(NamedTuple):
    """A row: its pieces, and how many of its T positions they use."""

    parts: list[RowPart]
    used: int


class RowFiller:
    """Fills row `number` of every batch from a source."""

    def __init__(self, stream: RowStream, rows: int, row: int, number: int) -> None:
        """Starts at the first window."""
        self._stream, self._rows, self._row, self._number = stream, rows, row, number
        self.set_state(0, 0)

    def use(self, stream: RowStream) -> None:
        """Continues in another layout, from the next boundary between two canvases of that layout."""
        self._stream, self._window = stream, None

    def set_state(self, taken: int, offset: int) -> None:
        """Continues from a saved position."""
        self.taken, self.offset = taken, offset
        self._window: TextWindow | None = None
        self._read_ahead = taken  # number of windows that the kernel was asked to read

    def next_row(self) -> FilledRow:
        """Takes pieces until no whole canvas fits into the row any more."""
        layout, room, parts = self._stream.layout, self._row, list[RowPart]()
        while room >= layout.block:
            window = self._window or self._open_window()
            begin, count = bisect_right(window.stops, self.offset), len(window.stops)
            if begin == count:  # the window is used up
                self.taken, self.offset, self._window = self.taken + 1, 0, None
                continue
            # 1. As many whole pieces as fit, from `begin` on. `_ends` holds the cumulative slots of the pieces, so one
            #    bisection finds the last one. If an earlier row took the start of the first piece, its rest has no
            #    prompt and needs a number of slots of its own.
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
            # 2. As many whole canvases of the next piece as fit into the remaining slots.
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
                break  # the row is full; otherwise it continues with the next window
        return FilledRow(parts, self._row - room)

    def _open_window(self) -> TextWindow:
        # Row b takes the windows b, b + B, b + 2B, ..., counted through all epochs: no other row has them.
        index = lambda taken: self._number + self._rows * taken
        for taken in range(self._read_ahead, self.taken + AHEAD):
            self._stream.read_ahead(index(taken))
        self._read_ahead = self.taken + AHEAD
        layout, window = self._stream.layout, self._stream.window(index(self.taken))
        # The window was made for the largest block, with prompts of up to block - 1 tokens. In a smaller block whole
        # canvases of such a prompt can be trained on; the canvas boundaries stay where they were.
        window = self._window = replace(window, prompt=window.prompt % layout.block)
        # After a change of the block the offset may lie inside of a canvas of the new block. The rest of that canvas,
        # fewer than `block` tokens, is skipped.
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
    """Lays out several rows of one source at once, in numpy without a loop over pieces."""
    # 1. The tokens of all parts of all rows, concatenated [N], and the bounds of all pieces [P].
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
    # 2. The first and the last piece of each part may be cut; a piece that lost its start has no prompt.
    last = np.cumsum(counts) - 1
    first = last - counts + 1
    begins = np.array([p.start for p in parts])
    prompt[first] *= start[first] == begins
    start[first], stop[last] = begins, [p.stop for p in parts]
    # 3. From indices into a window to indices into `tokens`, where the parts are concatenated.
    sizes = np.array([p.stop - p.start for p in parts])
    moved = every(np.cumsum(sizes) - sizes - begins)
    rows = np.repeat(np.arange(len(filled)), [len(one.parts) for one in filled])
    pieces = RowPieces(every(rows), start + moved, stop - start, prompt)
    spans = None
    if stream.infill:
        # Infilling is a function of the epoch and the piece's place in the corpus, not of the order of calls.
        number = (every([p.window.first for p in parts]) + start).astype(np.uint64)
        keys = mix(number ^ every(np.array([p.window.key for p in parts], np.uint64)))
        spans = infilled(keys, stream.infill)
    shape = len(filled), row
    return stream.layout.rows(tokens, pieces, shape, fill=stream.eos, pad=pad, spans=spans)


def infilled(keys: np.ndarray, share: float) -> Spans:
    """Makes the function that keeps one random span of each canvas editable, as `packing.keep_spans` does.

    Args:
        keys: Random key of each piece, uint64 [P].
    """
    chosen = uniform(keys) < share

    def narrow(piece: np.ndarray, editable: np.ndarray) -> np.ndarray:
        # Three uniform numbers per canvas: the length, whether the span starts with the canvas, and where else.
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


# --- random numbers and permutations: functions of a key and an index, without state and without arrays of size N


def key_of(*parts: object) -> int:
    """Hashes plain values, such as a seed and a name, to a 64-bit key."""
    return int.from_bytes(hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest(), "little")


def uniform(hashes: np.ndarray) -> np.ndarray:
    """Turns hashes into uniform numbers.

    Returns:
        float64 in [0, 1), made of the upper 53 bits, the precision of a float64.
    """
    return (hashes >> np.uint64(11)) * 2.0**-53


def permuted(index: int, size: int, key: int) -> int:
    """Maps an index to its place in the shuffled order that a key defines: a permutation of 0 .. size - 1.

    A generalised Feistel cipher with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    # Indices are the cells l + width * r of a grid of at least `size` cells, as square as possible.
    width = math.isqrt(size - 1) + 1
    height = -(-size // width)
    while True:
        r, l = divmod(index, width)
        # A round adds a hash of one coordinate to the other one, which can be undone. So the rounds permute the grid.
        for number in range(ROUNDS):
            if number % 2:
                r = (r + mix(key + number ^ l << 8)) % height
            else:
                l = (l + mix(key + number ^ r << 8)) % width
        index = l + width * r
        # The grid has fewer than 2 sqrt(size) extra cells. An index that lands on one of them is encrypted again, which
        # keeps the map a permutation of the indices below `size`.
        if index < size:
            return index
