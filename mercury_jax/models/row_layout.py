"""`Model.layout`: lays out documents in training rows, one document or many rows at a time.

Calling a `DocumentLayout` lays out one document (`masks.layout`). Its other methods do the same arithmetic on arrays of
pieces of running text, with which `training.data` fills whole rows: a batch of rows costs a few numpy calls instead of
one call per piece. Every piece has whole canvases here; `fill` completes the last canvas at the end of a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mercury_jax.config import ModelConfig
from mercury_jax.models import masks
from mercury_jax.types import Batch, Count, LaidOutDocument, PieceSizes, RowPieces, Spans


class Segments(NamedTuple):
    """Runs of adjacent positions with the same key ranges, in the order of rows and positions; arrays [S].

    A segment is a canvas, or part of the clean positions of one piece. `causal` marks segments of clean positions that
    attend causally: the first range of each position ends with the position itself.
    """

    piece: np.ndarray
    length: np.ndarray
    position: np.ndarray  # position of the segment's first token in the document
    slot: np.ndarray  # position of its first token in the row
    ranges: np.ndarray  # [S, 4] two key ranges in the row: start, end, start, end
    editable: np.ndarray  # [S, 2] positions [from, to)
    canvas: np.ndarray  # index of the canvas within the row, -1 for clean segments
    causal: np.ndarray | None


@dataclass(frozen=True)
class DocumentLayout:
    """Lays documents out for a model's attention pattern; the `RowLayout` of every model.

    Attributes:
        config: Its pattern and block size are used.
        clean_fill: Whether a clean part that holds the whole document also holds the ids that complete its last canvas
            (`training.objectives.layout_of`).
    """

    config: ModelConfig
    clean_fill: bool = False

    def __call__(
        self, ids: np.ndarray, prompt: int, fill: int | None = None, all_clean: bool | None = None
    ) -> LaidOutDocument:
        """Lays out one document.

        Args:
            ids: Tokens of the document [n]. `masks.layout` describes all arguments.
        """
        return masks.layout(self.config, ids, prompt, fill, all_clean, self.clean_fill)

    @property
    def block(self) -> int:
        """Tokens of a canvas. The single canvas of a bidirectional model has a multiple of this number."""
        return self.config.block

    def first_canvas(self, prompts: Count) -> Count:
        """Finds the position at which the first canvas starts, from prompt lengths [P] or one length."""
        if self.config.pattern == "causal_encoder":
            return prompts
        if self.config.pattern == "block_causal":
            return prompts // self.block * self.block
        return prompts * 0

    def sizes(self, lengths: Count, prompts: Count) -> PieceSizes[Count]:
        """Counts the positions of pieces whose last canvas is completed."""
        first = self.first_canvas(prompts)
        canvases = -((first - lengths) // self.block)
        if self.config.autoregressive:  # each token occurs once, in the clean part
            return PieceSizes(first, canvases, lengths, lengths)
        if self.config.pattern == "bidirectional":
            clean = lengths * 0
        else:
            filled = first + canvases * self.block
            whole = filled if self.clean_fill else lengths
            clean = whole if self.config.predicts_next else filled - self.block
        return PieceSizes(first, canvases, clean, clean + canvases * self.block)

    def fitting(self, room: int, prompt: int) -> int:
        """Counts the tokens of the longest piece whose whole canvases fit into `room` positions."""
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
            tokens: Tokens of all pieces, int32 [N].
        """
        count, length = shape
        sizes = self.sizes(pieces.length, pieces.prompt)
        # 1. Where each piece starts in its row [P]: slots of all pieces before it, minus the slots of earlier rows.
        before = np.cumsum(sizes.slots) - sizes.slots
        firsts = np.searchsorted(pieces.row, np.arange(count))  # the first piece of each row
        begin = before - before[firsts][pieces.row]
        segments = self._segments(pieces, sizes, begin, firsts)
        if spans is not None:
            noised = np.flatnonzero(segments.canvas >= 0)
            segments.editable[noised] = spans(segments.piece[noised], segments.editable[noised])

        # 2. Repeat the values of each segment over its positions [B * T]. The last segment of a row is extended over
        # the free positions at the end of the row, so that rows stay aligned; step 4 overwrites these positions.
        ends = np.append(firsts[1:], len(begin)) - 1
        used = begin[ends] + sizes.slots[ends]
        lengths = segments.length.copy()
        lengths[np.searchsorted(segments.piece, ends, side="right") - 1] += length - used
        every = lambda values: np.repeat(values, lengths, axis=0)
        slots = np.arange(count * length, dtype=np.int32)
        flat = pieces.row[segments.piece] * length + segments.slot
        positions = slots + every((segments.position - flat).astype(np.int32))
        starts = every(pieces.start[segments.piece].astype(np.int32))
        # what completes a canvas may lie behind the last one
        found = tokens.take(positions + starts, mode="clip")
        editable = (positions >= every(segments.editable[:, 0])) & (
            positions < every(segments.editable[:, 1])
        )
        ranges, canvas = every(segments.ranges), every(segments.canvas)
        if segments.causal is not None:
            own = slots % length + 1
            np.copyto(ranges[:, 1], own, where=every(segments.causal))

        # 3. Completed canvases: the last `short` positions of a piece lie past its tokens and get `fill`; with
        #    `clean_fill`, so do the last ones of its clean part.
        short = sizes.first + sizes.canvases * self.block - pieces.length
        filled_clean = (sizes.clean,) if self.clean_fill and self.config.predicts_next else ()
        for end in (sizes.slots, *filled_clean):
            after = pieces.row * length + begin + end - np.cumsum(short)
            found[np.repeat(after, short) + np.arange(short.sum())] = fill
        found, positions, canvas = (x.reshape(shape) for x in (found, positions, canvas))
        ranges, editable = ranges.reshape(*shape, 2, 2), editable.reshape(shape)
        # 4. Padding: free positions at the end of a row attend to nothing.
        for row, end in enumerate(used):
            if end < length:
                found[row, end:], positions[row, end:], canvas[row, end:] = pad, 0, -1
                ranges[row, end:], editable[row, end:] = 0, False
        return Batch(found, positions, ranges, editable, canvas)  # pyright: ignore[reportArgumentType]

    def _segments(
        self, pieces: RowPieces, sizes: PieceSizes[np.ndarray], begin: np.ndarray, firsts: np.ndarray
    ) -> Segments:
        """Cuts pieces into segments.

        Args:
            begin: Slot of its row at which each piece starts [P].
            firsts: Index of the first piece of each row [B].
        """
        block, number = self.block, np.arange(len(begin))
        # one causal segment; what is editable is predicted by the tokens before it
        if self.config.autoregressive:
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
        n = nth - clean_segments[piece]  # index of the canvas in its piece, negative for clean segments
        noised = n >= 0
        position = np.where(noised, first + n * block, 0 if causal else nth * block)
        inside = np.where(noised, clean + n * block, position)  # slot relative to the start of the piece
        length = np.where(noised, block, clean if causal else np.minimum(block, clean - position))
        # A canvas attends to the clean positions before it and to itself, a clean block to all positions up to its end.
        seen = np.where(noised, position, position + length)
        slot = start + inside
        zero = np.zeros_like(slot)
        ranges = [
            np.where(seen > 0, start, zero), np.where(seen > 0, start + seen, zero),
            np.where(noised, slot, zero), np.where(noised, slot + block, zero),
        ]  # fmt: skip
        editable = [np.maximum(position, pieces.prompt[piece]) * noised, (position + block) * noised]
        canvases = np.cumsum(sizes.canvases) - sizes.canvases  # canvases of all pieces before, over all rows
        canvas = np.where(noised, (canvases - canvases[firsts][pieces.row])[piece] + n, -1)
        return Segments(
            piece, length, position, slot, np.stack(ranges, 1).astype(np.int32),
            np.stack(editable, 1).astype(np.int32), canvas.astype(np.int32), ~noised if causal else None,
        )  # fmt: skip
