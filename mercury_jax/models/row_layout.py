"""`Model.layout`: how documents stand in training rows, one at a time or many rows at once.

Calling a `DocumentLayout` lays out one document (`masks.layout`). Its other methods are the same arithmetic for arrays
of pieces of running text, which `train.data` fills whole rows with: a row of pieces costs a few numpy calls, not a call
for each piece. Here every piece has whole canvases; the last one of a text that ends is completed with `fill`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mercury_jax.config import ModelConfig
from mercury_jax.models import masks
from mercury_jax.types import Batch, Count, LaidOutDocument, PieceSizes, RowPieces, Spans


class Segments(NamedTuple):
    """Runs of positions with the same key ranges, in the order of rows and positions, all [S].

    A segment is a canvas or a part of the clean positions of one piece. `causal` marks clean positions each of which
    attends to its piece up to itself: their ranges end with themselves.
    """

    piece: np.ndarray
    length: np.ndarray
    position: np.ndarray  # of its first token in the document
    slot: np.ndarray  # of its first token in the row
    ranges: np.ndarray  # [S, 4]
    editable: np.ndarray  # [S, 2] positions [from, to)
    canvas: np.ndarray
    causal: np.ndarray | None


@dataclass(frozen=True)
class DocumentLayout:
    """Lays documents out for a model's attention pattern; the `RowLayout` of every model.

    Attributes:
        config: Its pattern and block size.
    """

    config: ModelConfig

    def __call__(
        self, ids: np.ndarray, prompt: int, fill: int | None = None, all_clean: bool | None = None
    ) -> LaidOutDocument:
        """Lays out one document.

        Args:
            ids: See `masks.layout`, as for the other arguments.
            prompt: Number of tokens at its start that are never noised.
            fill: Id that completes the last canvas.
            all_clean: Keep the whole document in the clean part.

        Returns:
            The document.
        """
        return masks.layout(self.config, ids, prompt, fill, all_clean)

    @property
    def block(self) -> int:
        """Tokens of a canvas; those of a bidirectional model's one canvas are a multiple of it."""
        return self.config.block

    def first_canvas(self, prompts: Count) -> Count:
        """Finds where the first canvas of each document starts: the prompts [P] -> positions [P]; or of one."""
        if self.config.pattern == "causal_encoder":
            return prompts
        if self.config.pattern == "block_causal":
            return prompts // self.block * self.block
        return prompts * 0

    def sizes(self, lengths: Count, prompts: Count) -> PieceSizes[Count]:
        """Counts the positions of pieces whose last canvas is completed.

        Args:
            lengths: Tokens of each piece [P]; or of one, whose sizes Python counts faster than numpy.
            prompts: Tokens at its start that are never noised [P].

        Returns:
            The sizes.
        """
        first = self.first_canvas(prompts)
        canvases = -((first - lengths) // self.block)
        if self.config.autoregressive:  # each token stands once, as a clean one
            return PieceSizes(first, canvases, lengths, lengths)
        if self.config.pattern == "bidirectional":
            clean = lengths * 0
        else:
            clean = lengths if self.config.predicts_next else first + (canvases - 1) * self.block
        return PieceSizes(first, canvases, clean, clean + canvases * self.block)

    def fitting(self, room: int, prompt: int) -> int:
        """Counts the tokens of the longest piece whose whole canvases fit into `room` positions.

        Args:
            room: Positions.
            prompt: Tokens at the piece's start that are never noised.

        Returns:
            Tokens; 0 where not one canvas fits.
        """
        first = self.first_canvas(prompt)
        if self.config.autoregressive:
            return room if room > prompt else 0
        if self.config.pattern == "bidirectional":
            canvases = room // self.block
        elif self.config.predicts_next:  # first + canvases * block clean positions, and the canvases
            canvases = (room - first) // (2 * self.block)
        else:  # the clean part ends where the last canvas starts
            canvases = ((room - first) // self.block + 1) // 2
        return first + canvases * self.block if canvases > 0 else 0

    def rows(
        self,
        tokens: np.ndarray,
        pieces: RowPieces,
        shape: tuple[int, int],
        *,
        fill: int,
        pad: int,
        spans: Spans | None = None,
    ) -> Batch:
        """Lays out rows of pieces.

        Args:
            tokens: The pieces' tokens, int32 [N].
            pieces: The pieces, which fit their rows; each row has one at least.
            shape: Rows B and positions T.
            fill: Id that completes a last canvas.
            pad: Id that fills the rest of a row.
            spans: Narrows what is editable in each canvas; None keeps all of it.

        Returns:
            numpy arrays [B, T], equal to those of the pieces laid out one by one and packed.
        """
        count, length = shape
        sizes = self.sizes(pieces.length, pieces.prompt)
        # Where each piece starts in its row: the slots before it, less those of the rows before.
        before = np.cumsum(sizes.slots) - sizes.slots
        firsts = np.searchsorted(pieces.row, np.arange(count))  # the first piece of each row
        begin = before - before[firsts][pieces.row]
        segments = self._segments(pieces, sizes, begin, firsts)
        if spans is not None:
            noised = np.flatnonzero(segments.canvas >= 0)
            segments.editable[noised] = spans(segments.piece[noised], segments.editable[noised])

        # The rest of a row belongs to its last segment, until it is overwritten below.
        ends = np.append(firsts[1:], len(begin)) - 1
        used = begin[ends] + sizes.slots[ends]
        lengths = segments.length.copy()
        lengths[np.searchsorted(segments.piece, ends, side="right") - 1] += length - used
        every = lambda values: np.repeat(values, lengths, axis=0)
        slots = np.arange(count * length, dtype=np.int32)
        flat = pieces.row[segments.piece] * length + segments.slot
        positions = slots + every((segments.position - flat).astype(np.int32))
        starts = every(pieces.start[segments.piece].astype(np.int32))
        found = tokens.take(
            positions + starts, mode="clip"
        )  # what completes a canvas may lie behind the last one
        editable = (positions >= every(segments.editable[:, 0])) & (
            positions < every(segments.editable[:, 1])
        )
        ranges, canvas = every(segments.ranges), every(segments.canvas)
        if segments.causal is not None:
            own = slots % length + 1
            np.copyto(ranges[:, 1], own, where=every(segments.causal))

        # What completes a last canvas stands at the end of its piece.
        short = sizes.first + sizes.canvases * self.block - pieces.length
        after = pieces.row * length + begin + sizes.slots - np.cumsum(short)
        found[np.repeat(after, short) + np.arange(short.sum())] = fill
        found, positions, canvas = (x.reshape(shape) for x in (found, positions, canvas))
        ranges, editable = ranges.reshape(*shape, 2, 2), editable.reshape(shape)
        for row, end in enumerate(used):
            if end < length:
                found[row, end:], positions[row, end:], canvas[row, end:] = pad, 0, -1
                ranges[row, end:], editable[row, end:] = 0, False
        return Batch(found, positions, ranges, editable, canvas)  # pyright: ignore[reportArgumentType]

    def _segments(
        self, pieces: RowPieces, sizes: PieceSizes[np.ndarray], begin: np.ndarray, firsts: np.ndarray
    ) -> Segments:
        """Cuts pieces, which begin at the slots `begin` [P] of their rows, into segments."""
        block, number = self.block, np.arange(len(begin))
        if (
            self.config.autoregressive
        ):  # one causal segment; what is editable is predicted by the tokens before it
            zeros = np.zeros_like(begin)
            ranges = np.stack([begin, begin, zeros, zeros], 1).astype(np.int32)
            editable = np.stack([pieces.prompt, pieces.length], 1).astype(np.int32)
            outside = np.full(len(begin), -1, np.int32)
            return Segments(
                number, sizes.slots, zeros, begin, ranges, editable, outside, np.ones(len(begin), bool)
            )
        if self.config.pattern == "bidirectional":  # one canvas, which attends to itself
            zeros = np.zeros_like(begin)
            ranges = np.stack([begin, begin + sizes.slots, zeros, zeros], 1).astype(np.int32)
            editable = np.stack([pieces.prompt, sizes.slots], 1).astype(np.int32)
            canvas = (number - firsts[pieces.row]).astype(np.int32)
            return Segments(number, sizes.slots, zeros, begin, ranges, editable, canvas, None)
        causal = self.config.pattern == "causal_encoder"
        clean_segments = (sizes.clean > 0).astype(int) if causal else -(-sizes.clean // block)
        count = clean_segments + sizes.canvases
        piece = np.repeat(number, count)
        nth = np.arange(len(piece)) - np.repeat(np.cumsum(count) - count, count)
        first, clean, start = sizes.first[piece], sizes.clean[piece], begin[piece]
        n = nth - clean_segments[piece]  # number of the canvas in its piece, below 0 for clean segments
        noised = n >= 0
        position = np.where(noised, first + n * block, 0 if causal else nth * block)
        inside = np.where(noised, clean + n * block, position)  # slot in the piece
        length = np.where(noised, block, clean if causal else np.minimum(block, clean - position))
        # A canvas attends to the clean positions before it and to itself, a clean block to all up to its end.
        seen = np.where(noised, position, position + length)
        slot = start + inside
        zero = np.zeros_like(slot)
        ranges = [
            np.where(seen > 0, start, zero), np.where(seen > 0, start + seen, zero),
            np.where(noised, slot, zero), np.where(noised, slot + block, zero),
        ]  # fmt: skip
        editable = [np.maximum(position, pieces.prompt[piece]) * noised, (position + block) * noised]
        canvases = np.cumsum(sizes.canvases) - sizes.canvases  # of the pieces before, in all rows
        canvas = np.where(noised, (canvases - canvases[firsts][pieces.row])[piece] + n, -1)
        return Segments(
            piece, length, position, slot, np.stack(ranges, 1).astype(np.int32),
            np.stack(editable, 1).astype(np.int32), canvas.astype(np.int32), ~noised if causal else None,
        )  # fmt: skip
