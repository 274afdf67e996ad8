"""From token ids to packed rows: cutting text into pieces, laying documents out for the model, filling rows.

    documents -> cut_pieces -> lay_out (`Model.layout`) -> keep_spans -> place, in rows of T positions -> pack, a Batch

`sources.py` calls the first half for its documents, `pipeline.py` the second half for every row of a batch. All of
it is numpy; evaluation lays its chunks of text out with the same functions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from mercury_jax.config import refuse
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.types import Batch, LaidOutDocument, Layout

DataSplit = Literal["train", "test"]


class Example(NamedTuple):
    """Token ids of one document or of a piece of one.

    Attributes:
        ids: int32 [n].
        prompt: The first `prompt` ids are never noised.
        ends: The text ends here, so that its last canvas is filled up with the end of text.
    """

    ids: np.ndarray
    prompt: int
    ends: bool


class StreamSettings(NamedTuple):
    """What a source needs to make its examples.

    Attributes:
        tokenizer: Encodes texts.
        layout: `Model.layout`, how a document stands in a row.
        row: Positions T of a packed row.
        seed: Decides order, cuts and problems; a different one for each source of a mixture.
        split: "train", or "test" for what training never sees.
        layouts: Every layout of a run whose block changes, so that a text is cut into pieces that fit all of them. The
            block of `layout` is then the largest. (): `layout` alone.
    """

    tokenizer: AnyTokenizer
    layout: Layout
    row: int
    seed: tuple[int, ...]
    split: DataSplit
    layouts: tuple[Layout, ...] = ()


# --- laying documents out


def lay_out(settings: StreamSettings, example: Example, place: str) -> LaidOutDocument:
    """Lays an example out as the model sees it.

    Args:
        settings: Layout and length of a row.
        example: The document.
        place: Where it was read, for the message.

    Returns:
        Clean tokens and canvases, at most `settings.row` positions.

    Raises:
        ValueError: It does not fit a row.
    """
    laid = settings.layout(example.ids, example.prompt, settings.tokenizer.eos if example.ends else None)
    if len(laid.tokens) > settings.row:
        needs = f"{len(laid.tokens)} positions once laid out"
        raise refuse("row", settings.row, f"{needs} or more, for {place} ({len(example.ids)} tokens)")
    return laid


def block_size(layout: Layout) -> int:
    """The canvas width of a layout: one token fills up one canvas."""
    return int(layout(np.zeros(1, np.int32), 0, 0).editable.sum())


def lay_out_piece(settings: StreamSettings, example: Example, place: str) -> LaidOutDocument:
    """Lays a piece of text out in whole canvases, because sampling has no short ones.

    A piece that does not end its text, or that the row cannot hold when it is filled up, loses up to block - 1 tokens
    at its end; other epochs cut elsewhere.

    Args:
        settings: Layout and length of a row.
        example: The piece.
        place: Where it was read, for the message.

    Returns:
        The piece, at most `settings.row` positions.
    """
    ids, prompt, ends = example
    # Filling up tells how many tokens the last canvas lacks.
    filled = settings.layout(ids, prompt, settings.tokenizer.eos)
    added = int(filled.positions.max()) + 1 - len(ids)
    if (ends or not added) and len(filled.tokens) <= settings.row:
        return filled
    whole = _whole_canvases(settings.layout, len(ids), prompt)
    return lay_out(settings, Example(ids[:whole], prompt, False), place)


def _whole_canvases(layout: Layout, n: int, prompt: int) -> int:
    """The most of n tokens that end with a whole canvas; all of them where not one canvas is whole."""
    added = int(layout(np.zeros(n, np.int32), prompt, 0).positions.max()) + 1 - n
    whole = n - (block_size(layout) - added) if added else n
    return whole if whole > prompt else n


def longest_piece(settings: StreamSettings, chunk: int | None) -> int:
    """Finds the longest piece of text that a row holds at any length of the prompt.

    Args:
        settings: Layout and length of a row.
        chunk: The source's own limit, in tokens; None for the longest possible.

    Returns:
        The limit in tokens.

    Raises:
        ValueError: `chunk` is longer than a row holds, or a row does not hold two tokens.
    """
    return min(_longest(layout, settings.row, chunk) for layout in settings.layouts or (settings.layout,))


def check_blocks(blocks: Sequence[tuple[int, int]]) -> None:
    """Checks the blocks of a run whose block changes.

    Every block divides the largest, between whose canvases texts are cut: so they are cut between canvases of all.

    Args:
        blocks: Pairs (first batch, block), one at least.

    Raises:
        ValueError: They do not start at 0, do not rise, or a block does not divide the largest.
    """
    pairs = all(isinstance(pair, tuple) and list(map(type, pair)) == [int, int] for pair in blocks)
    firsts = [first for first, _ in blocks] if pairs else []
    if firsts[:1] != [0] or any(a >= b for a, b in pairwise(firsts)):
        raise refuse("blocks", tuple(blocks), "pairs (first step, block) whose first steps rise, from 0 on")
    largest = max(block for _, block in blocks)
    for _, block in blocks:
        if block < 1 or largest % block:
            raise refuse("blocks", tuple(blocks), f"blocks that divide the largest, {largest}")


def _longest(layout: Layout, row: int, chunk: int | None) -> int:
    """`longest_piece` in one layout."""
    block = block_size(layout)

    def lengths(n: int) -> list[int]:
        """What remains of a piece of n tokens in whole canvases, for each length of the prompt."""
        return [_whole_canvases(layout, n, p) for p in range(min(block, n))]

    def needs(n: int) -> int:
        return max(len(layout(np.zeros(k, np.int32), p, None).tokens) for p, k in enumerate(lengths(n)))

    if needs(2) > row:
        raise refuse("row", row, f"{needs(2)} or more: a text of two tokens needs as much")
    # The first n that does not fit, less one; then less what is cut off at every length of the prompt.
    longest = max(lengths(bisect_right(range(row + block), row, lo=2, key=needs) - 1))
    if chunk is not None and chunk > longest:
        raise refuse("chunk", chunk, f"2..{longest}, what a row of {row} positions holds")
    return chunk or longest


# --- running text


class Pieces(NamedTuple):
    """One epoch's cuts [N] into the tokens of all documents, in the order of training.

    Attributes:
        start: First token of each piece.
        stop: One after its last token.
        final: bool, the document ends here.
    """

    start: np.ndarray
    stop: np.ndarray
    final: np.ndarray


def cut_pieces(lengths: np.ndarray, chunk: int, rng: np.random.Generator) -> Pieces:
    """Cuts documents, one behind the other, into pieces of at most `chunk` tokens, and shuffles the pieces.

    A document longer than `chunk` becomes a random first piece, whole chunks, and the rest. The number of pieces
    depends on the lengths alone, so that every epoch has the same size.

    Args:
        lengths: Tokens of each document [D].
        chunk: Most tokens of a piece.
        rng: Decides the cuts and the order.

    Returns:
        The pieces.
    """
    # A long document of n tokens is  [first | chunk | chunk | ... | last],  first + last = ends = n mod chunk, or
    # chunk more.
    long, rest = lengths > chunk, lengths % chunk
    # The two ragged ends share `ends` tokens: at most 2 chunk, and at least 2 so that neither is empty.
    ends = np.where(2 * rest < chunk, chunk + rest, rest)
    ends = np.where(ends < 2, ends + chunk, ends)
    first = rng.integers(np.maximum(1, ends - chunk), np.minimum(chunk, ends - 1), endpoint=True)
    count = np.where(long, (lengths - ends) // chunk + 2, 1)
    first = np.where(long, first, lengths)

    # All pieces of all documents at once: N = sum(count).
    doc = np.repeat(np.arange(len(lengths)), count)  # [N] the document of each piece
    nth = np.arange(len(doc)) - np.repeat(np.cumsum(count) - count, count)  # [N] its number in the document
    base = np.cumsum(lengths) - lengths  # [D] the first token of each document
    start = np.where(nth == 0, 0, first[doc] + (nth - 1) * chunk)
    stop = np.minimum(first[doc] + nth * chunk, lengths[doc])
    order = rng.permutation(len(doc))
    return Pieces(*(x[order] for x in (base[doc] + start, base[doc] + stop, stop == lengths[doc])))


def keep_spans(laid: LaidOutDocument, rng: np.random.Generator) -> LaidOutDocument:
    """Keeps one random span of each canvas editable; the text around it is known, as in infilling.

    Half of the spans start where the canvas does: so it is when a causal encoder infills, whose canvas begins at the
    hole.

    Args:
        laid: A document.
        rng: Draws the spans.

    Returns:
        The document with fewer editable positions.
    """
    if laid.canvas.max() < 0:  # an autoregressive document
        return laid
    places = np.flatnonzero(laid.editable)  # canvases stand one behind the other, so each is a run of these
    _, first, count = np.unique(laid.canvas[places], return_index=True, return_counts=True)
    u = rng.random((3, len(count)))  # for each canvas: the length, whether to begin at its start, where else
    length = 1 + (u[0] * count).astype(int)
    start = np.where(u[1] < 0.5, 0, (u[2] * (count - length + 1)).astype(int))
    nth = np.arange(len(places)) - np.repeat(first, count)
    inside = (nth >= np.repeat(start, count)) & (nth < np.repeat(start + length, count))
    editable = np.zeros_like(laid.editable)
    editable[places[inside]] = True
    return laid._replace(editable=editable)


# --- rows


@dataclass
class PackedRow:
    """A row that is being filled: its documents, where they came from, and the positions that they use."""

    refs: list[tuple[int, int]] = field(
        default_factory=list
    )  # (source, index): enough to make a document again
    laid: list[LaidOutDocument] = field(default_factory=list)
    used: int = 0

    def add(self, ref: tuple[int, int], laid: LaidOutDocument) -> None:
        """Appends a document.

        Args:
            ref: Number of its source, and its index there.
            laid: The document.
        """
        self.refs.append(ref)
        self.laid.append(laid)
        self.used += len(laid.tokens)


def place(
    rows: list[PackedRow], ref: tuple[int, int], laid: LaidOutDocument, length: int, limit: int
) -> PackedRow | None:
    """Puts a document into the first open row that has room, else into a new one (first fit).

    Args:
        rows: The open rows; changed.
        ref: Number of the document's source, and its index there.
        laid: The document.
        length: Positions of a row.
        limit: Most open rows; before there are more, the fullest is closed.

    Returns:
        The row that was closed, or None.
    """
    n = len(laid.tokens)
    target = next((row for row in rows if row.used + n <= length), None)
    if target is not None:
        target.add(ref, laid)
        return rows.pop(rows.index(target)) if target.used == length else None
    # No room: the fullest row is the one that loses least by being closed.
    closed = rows.pop(max(range(len(rows)), key=lambda i: rows[i].used)) if len(rows) >= limit else None
    rows.append(PackedRow())
    rows[-1].add(ref, laid)
    return closed


def pack(rows: list[PackedRow], length: int, pad: int) -> Batch:
    """Makes a batch of closed rows.

    Args:
        rows: B rows.
        length: Positions T of a row.
        pad: Id that fills the rest of a row. Padding attends to nothing, is not editable and is in no canvas.

    Returns:
        numpy arrays [B, T].
    """
    shape = (len(rows), length)
    tokens, positions = np.full(shape, pad, np.int32), np.zeros(shape, np.int32)
    ranges, editable = np.zeros((*shape, 2, 2), np.int32), np.zeros(shape, bool)
    canvas = np.full(shape, -1, np.int32)
    for b, row in enumerate(rows):
        at = canvases = (
            0  # documents stand one behind the other: ranges and canvases are counted from the row's start
        )
        for laid in row.laid:
            here = slice(at, at + len(laid.tokens))
            tokens[b, here], positions[b, here], editable[b, here] = (
                laid.tokens,
                laid.positions,
                laid.editable,
            )
            not_empty = laid.ranges[..., :1] < laid.ranges[..., 1:]  # an empty range stays at 0
            ranges[b, here] = laid.ranges + at * not_empty
            canvas[b, here] = np.where(laid.canvas < 0, -1, laid.canvas + canvases)
            at, canvases = here.stop, canvases + int(laid.canvas.max()) + 1
    return Batch(tokens, positions, ranges, editable, canvas)  # pyright: ignore[reportArgumentType]
