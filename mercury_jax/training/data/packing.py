"""From token ids to packed rows: cutting text into pieces, laying documents out for the model, filling rows.

    documents -> cut_pieces -> lay_out (`Model.layout`) -> keep_spans -> place, in rows of T positions -> pack, a Batch

`sources.py` calls the functions up to `keep_spans` for its documents, `pipeline.py` calls `place` and `pack` for each
row of a batch. Everything is numpy. Evaluation lays out its chunks of text with the same functions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from mercury_jax.config import refuse
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.types import Batch, LaidOutDocument, Layout

DataSplit = Literal["train", "test"]


class Example(NamedTuple):
    """Token ids of a document, or of a piece of a document.

    Attributes:
        ids: Token ids, int32 [n].
        prompt: Number of leading ids that are never noised.
        ends: The text ends with the last id, so its last canvas is filled up with end-of-text ids.
    """

    ids: np.ndarray
    prompt: int
    ends: bool


class StreamSettings(NamedTuple):
    """What a source needs to make its examples.

    Attributes:
        tokenizer: Encodes texts.
        layout: `Model.layout`, which arranges the clean tokens and canvases of a document.
        row: Positions T of a packed row.
        seed: Decides order, cuts and problems; different for each source of a mixture.
        split: "train", or "test" for held-out data.
        layouts: All layouts of a run whose block changes; texts are cut into pieces that fit all of them, and `layout`
            is the one of the largest block. (): only `layout`.
    """

    tokenizer: AnyTokenizer
    layout: Layout
    row: int
    seed: tuple[int, ...]
    split: DataSplit
    layouts: tuple[Layout, ...] = ()


# --- laying documents out


def lay_out(settings: StreamSettings, example: Example, place: str) -> LaidOutDocument:
    """Lays out an example as clean tokens and canvases."""
    laid = settings.layout(example.ids, example.prompt, settings.tokenizer.eos if example.ends else None)
    if len(laid.tokens) > settings.row:
        needs = f"{len(laid.tokens)} positions once laid out"
        raise refuse("row", settings.row, f"{needs} or more, for {place} ({len(example.ids)} tokens)")
    return laid


def fill_up(settings: StreamSettings, example: Example, index: int) -> Example:
    """Continues a finished text with end-of-text ids up to a random length, for a layout with one canvas.

    A model that denoises an answer in one canvas must have seen end-of-text at each position behind it, up to the
    longest canvas that it will fill. LLaDA fills up to the longest answer of the batch (arXiv 2502.09992, appendix
    B.1). Here the length of each text is drawn, up to what a row holds: log-uniformly with a preference for short
    canvases, from which the text is learnt. `objective.token_weights` limits the weight of the fillers.

    Args:
        settings: Layout, length of a row and seed. Held-out texts are not filled up, so that their losses do not depend
            on the row.
    """
    if settings.split != "train" or not example.ends:
        return example
    block = _block_of_one_canvas(settings.layout)
    if not block:
        return example  # shorter canvases: decoding ends with the first one that holds an end of text
    own, most = len(example.ids) - example.prompt, settings.row // block * block - example.prompt
    if own >= most:
        return example
    u = np.random.default_rng((*settings.seed, 3, index)).random()
    fill = np.full(int(own * (most / own) ** (u * u)) - own, settings.tokenizer.eos, np.int32)
    return example._replace(ids=np.concatenate([example.ids, fill]))


@lru_cache(64)
def _block_of_one_canvas(layout: Layout) -> int:
    """The block of a layout that puts a whole text into one canvas; 0 for a layout with shorter canvases."""
    block = block_size(layout)
    return block if layout(np.zeros(block + 1, np.int32), 0, 0).canvas.tolist() == [0] * 2 * block else 0


@lru_cache(64)
def block_size(layout: Layout) -> int:
    """Finds the canvas width of a layout, by laying out a text of one token."""
    return int(layout(np.zeros(1, np.int32), 0, 0).editable.sum())


def lay_out_piece(settings: StreamSettings, example: Example, place: str) -> LaidOutDocument:
    """Lays out a piece of text in whole canvases, since sampling never sees a shorter canvas.

    The last canvas is filled up with end-of-text ids if the text ends there and the row has room. Otherwise up to
    block - 1 tokens at the end of the piece are dropped; the cuts of other epochs are elsewhere.
    """
    ids, prompt, ends = example
    # The filled-up layout shows how many tokens the last canvas lacks.
    filled = settings.layout(ids, prompt, settings.tokenizer.eos)
    added = int(filled.positions.max()) + 1 - len(ids)
    if (ends or not added) and len(filled.tokens) <= settings.row:
        return filled
    whole = _whole_canvases(settings.layout, len(ids), prompt)
    return lay_out(settings, Example(ids[:whole], prompt, False), place)


def _whole_canvases(layout: Layout, n: int, prompt: int) -> int:
    """Finds the largest number of tokens up to n that end with a whole canvas; n if no canvas is whole."""
    added = int(layout(np.zeros(n, np.int32), prompt, 0).positions.max()) + 1 - n
    whole = n - (block_size(layout) - added) if added else n
    return whole if whole > prompt else n


def longest_piece(settings: StreamSettings, chunk: int | None) -> int:
    """Finds the largest length of a piece of text such that a row holds it for every length of the prompt."""
    return min(_longest(layout, settings.row, chunk) for layout in settings.layouts or (settings.layout,))


def check_blocks(blocks: Sequence[tuple[int, int]]) -> None:
    """Checks the blocks of a run whose block changes.

    Args:
        blocks: Pairs (first batch, block), at least one.

    Raises:
        ValueError: The first batches do not start at 0 or do not increase, or a block does not divide the largest one.
    """
    # Texts are cut between canvases of the largest block. If it is a multiple of all blocks, these cuts are between
    # canvases in every stage of the run.
    firsts = [first for first, _ in blocks]
    if firsts[:1] != [0] or any(a >= b for a, b in pairwise(firsts)):
        raise refuse("blocks", tuple(blocks), "pairs (first step, block) whose first steps rise, from 0 on")
    largest = max(block for _, block in blocks)
    for _, block in blocks:
        if block < 1 or largest % block:
            raise refuse("blocks", tuple(blocks), f"blocks that divide the largest, {largest}")


def _longest(layout: Layout, row: int, chunk: int | None) -> int:
    """Finds the limit of `longest_piece` for one layout."""
    block = block_size(layout)

    def lengths(n: int) -> list[int]:
        """Lengths after cutting a piece of n tokens to whole canvases, for each length of the prompt."""
        return [_whole_canvases(layout, n, p) for p in range(min(block, n))]

    def needs(n: int) -> int:
        """Largest number of positions that a piece of n tokens needs, over all lengths of the prompt."""
        return max(len(layout(np.zeros(k, np.int32), p, None).tokens) for p, k in enumerate(lengths(n)))

    if needs(2) > row:
        raise refuse("row", row, f"{needs(2)} or more: a text of two tokens needs as much")
    # `needs` does not decrease with n, so a bisection finds the largest n that fits. From it, drop the tokens that are
    # cut off whatever the length of the prompt is.
    longest = max(lengths(bisect_right(range(row + block), row, lo=2, key=needs) - 1))
    if chunk is not None and chunk > longest:
        raise refuse("chunk", chunk, f"2..{longest}, what a row of {row} positions holds")
    return chunk or longest


# --- running text


class Pieces(NamedTuple):
    """The N pieces of one epoch, in the order of training, as indices into the tokens of all documents.

    Attributes:
        start: First token of each piece [N].
        stop: Index after the last token of each piece [N].
        final: Whether the document ends with the piece, bool [N].
    """

    start: np.ndarray
    stop: np.ndarray
    final: np.ndarray


def cut_pieces(lengths: np.ndarray, chunk: int, rng: np.random.Generator) -> Pieces:
    """Cuts documents into pieces of at most `chunk` tokens, at random places, and shuffles the pieces.

    A document longer than `chunk` becomes a first piece of random length, whole chunks, and the rest. The number of
    pieces depends on the lengths only, so all epochs have the same size.

    Args:
        lengths: Tokens of each document [D]; the documents are concatenated.
    """
    # A long document of n tokens is cut as  [first | chunk | chunk | ... | last].  The two ragged ends have together
    # `ends` = n mod chunk tokens, or chunk more, so that the number of pieces does not depend on the random cut.
    long, rest = lengths > chunk, lengths % chunk
    # `ends` is at most 2 chunk, so that each end fits into a piece, and at least 2, so that neither is empty.
    ends = np.where(2 * rest < chunk, chunk + rest, rest)
    ends = np.where(ends < 2, ends + chunk, ends)
    first = rng.integers(np.maximum(1, ends - chunk), np.minimum(chunk, ends - 1), endpoint=True)
    count = np.where(long, (lengths - ends) // chunk + 2, 1)
    first = np.where(long, first, lengths)

    # The pieces of all documents in one array, N = sum(count).
    doc = np.repeat(np.arange(len(lengths)), count)  # [N] document of each piece
    nth = np.arange(len(doc)) - np.repeat(np.cumsum(count) - count, count)  # [N] its number in the document
    base = np.cumsum(lengths) - lengths  # [D] first token of each document
    start = np.where(nth == 0, 0, first[doc] + (nth - 1) * chunk)
    stop = np.minimum(first[doc] + nth * chunk, lengths[doc])
    order = rng.permutation(len(doc))
    return Pieces(*(x[order] for x in (base[doc] + start, base[doc] + stop, stop == lengths[doc])))


def keep_spans(laid: LaidOutDocument, rng: np.random.Generator) -> LaidOutDocument:
    """Keeps one random span of each canvas editable; the text around it is given, as in infilling.

    Half of the spans start at the start of their canvas, because a model with a causal encoder infills with a canvas
    that starts at the gap.
    """
    if laid.canvas.max() < 0:  # an autoregressive document has no canvases
        return laid
    places = np.flatnonzero(laid.editable)  # canvases are contiguous, so each one is a run of these slots
    _, first, count = np.unique(laid.canvas[places], return_index=True, return_counts=True)
    # Three draws per canvas: length of the span, whether it starts with the canvas, and where else it starts.
    u = rng.random((3, len(count)))
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
    """A row that is being filled.

    Attributes:
        refs: (source, index) of each document, enough to make the document again on a resume.
        laid: The documents.
        used: Positions that they use.
    """

    refs: list[tuple[int, int]] = field(default_factory=list)
    laid: list[LaidOutDocument] = field(default_factory=list)
    used: int = 0

    def add(self, ref: tuple[int, int], laid: LaidOutDocument) -> None:
        """Appends a document."""
        self.refs.append(ref)
        self.laid.append(laid)
        self.used += len(laid.tokens)


def place(
    rows: list[PackedRow], ref: tuple[int, int], laid: LaidOutDocument, length: int, limit: int
) -> PackedRow | None:
    """Puts a document into the first open row that has room, else into a new one (first fit)."""
    n = len(laid.tokens)
    target = next((row for row in rows if row.used + n <= length), None)
    if target is not None:
        target.add(ref, laid)
        return rows.pop(rows.index(target)) if target.used == length else None
    # No room: close the fullest row, which wastes the fewest positions.
    closed = rows.pop(max(range(len(rows)), key=lambda i: rows[i].used)) if len(rows) >= limit else None
    rows.append(PackedRow())
    rows[-1].add(ref, laid)
    return closed


def pack(rows: list[PackedRow], length: int, pad: int) -> Batch:
    """Makes a batch from closed rows."""
    shape = (len(rows), length)
    tokens, positions = np.full(shape, pad, np.int32), np.zeros(shape, np.int32)
    ranges, editable = np.zeros((*shape, 2, 2), np.int32), np.zeros(shape, bool)
    canvas = np.full(shape, -1, np.int32)
    for b, row in enumerate(rows):
        # Key ranges and canvas numbers of a document count from its own start; in the row they are shifted.
        at = canvases = 0
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
