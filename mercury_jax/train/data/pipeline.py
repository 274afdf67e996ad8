"""From a mixture to batches: streams, weights, packing, and a state from which a run continues exactly.

Row b of every batch is packed by itself, from documents b, b + B, b + 2B, ... of each source. So a batch of B rows
is the same on any number of processes, each of which makes only its own rows. A source of shards fills whole rows
(`filling.py`); all others share rows, document by document.

The layout may change from one batch to the next, in a run whose block grows: sources continue where they are, and the
documents of half-filled rows are laid out again.

This module alone imports grain, for the thread that makes batches ahead.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypedDict

import grain
import numpy as np

from mercury_jax.config import ModelConfig, at_least, one_of, refuse
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.train.data.filling import FilledRow, RowFiller, RowStream, lay_out_rows
from mercury_jax.train.data.packing import (
    DataSplit,
    PackedRow,
    StreamSettings,
    block_size,
    check_blocks,
    pack,
    place,
)
from mercury_jax.train.data.sources import DataSource, Mixture, Stream
from mercury_jax.types import Batch, LaidOutDocument, Layout, RowLayout

OPEN_ROWS = 4  # half-filled rows that each row of the batch keeps; more pack tighter and make a larger state


Streams = Sequence[Stream | RowStream]


class RowState(TypedDict):
    """Where a `RowPacker` is, ready for JSON."""

    next: list[int]  # of each source, how many documents or windows were taken
    offset: list[int]  # of each source, how many tokens of the window after those
    positions: list[int]  # of each source, how many positions they used
    open: list[list[list[int]]]  # of each open row, [source, index] of its documents


class DataState(TypedDict):
    """Where the data of a run are, ready for JSON."""

    data: str  # digest of the mixture and its settings
    batches: int  # that were made
    rows: dict[str, RowState]  # under the row's number in the batch


class RowPacker:
    """Packs one row of every batch, taking documents from the sources by weight."""

    def __init__(
        self, streams: Streams, weights: Sequence[float], rows: int, row: int, seed: int, number: int
    ) -> None:
        """Starts at the first document.

        Args:
            streams: The open sources.
            weights: Their shares of the positions.
            rows: Rows B of a batch.
            row: Positions T of a row.
            seed: Decides where in the mixture the row starts.
            number: Which of the B rows this is.
        """
        self._streams, self._weights, self._rows, self._row = streams, weights, rows, row
        self._number, self._next = number, [0] * len(streams)
        # Each row starts at another point of the mixture, or every row of the first batch would hold the same source.
        phase = np.random.default_rng((seed, number)).random(len(streams))
        self._positions = [int(u * row * w / sum(weights)) for u, w in zip(phase, weights)]
        self._open: list[PackedRow] = []
        self._fillers = {
            s: RowFiller(stream, rows, row, number)
            for s, stream in enumerate(streams)
            if isinstance(stream, RowStream)
        }

    def use(self, streams: Streams) -> None:
        """Continues in another layout, in which the documents of open rows are laid out and placed again."""
        refs = [ref for row in self._open for ref in row.refs]
        self._streams, self._open = streams, []
        for s, index in refs:
            laid = self._document(s, index)
            # No row is closed here: a full one stays open until the next document needs its place.
            if full := place(self._open, (s, index), laid, self._row, len(refs)):
                self._open.append(full)
        for s, filler in self._fillers.items():
            stream = streams[s]
            assert isinstance(stream, RowStream)
            filler.use(stream)

    def next_row(self) -> PackedRow | tuple[int, FilledRow]:
        """Takes documents until a row is full, or a whole row of one source, with the number of that source."""
        while True:
            # The source that is furthest behind its share of the positions, which are what training costs.
            s = min(range(len(self._streams)), key=lambda s: self._positions[s] / self._weights[s])
            stream = self._streams[s]
            if isinstance(stream, RowStream):
                filled = self._fillers[s].next_row()
                self._positions[s] += filled.used
                return s, filled
            # Row b takes the documents b, b + B, b + 2B, ... of each source: no other row has them.
            ref = (s, self._number + self._rows * self._next[s])
            laid = stream.at(ref[1])
            self._next[s] += 1
            self._positions[s] += len(laid.tokens)
            if closed := place(self._open, ref, laid, self._row, OPEN_ROWS):
                return closed

    def get_state(self) -> RowState:
        """How far each source is, and which documents the open rows hold."""
        taken, offset = [*self._next], [0] * len(self._next)
        for s, filler in self._fillers.items():
            taken[s], offset[s] = filler.taken, filler.offset
        rows = [[list(ref) for ref in row.refs] for row in self._open]
        return {"next": taken, "offset": offset, "positions": [*self._positions], "open": rows}

    def set_state(self, state: RowState) -> None:
        """Continues where `state` was taken; the documents of open rows are made again."""
        self._next, self._positions, self._open = list(state["next"]), list(state["positions"]), []
        for s, filler in self._fillers.items():
            filler.set_state(state["next"][s], state["offset"][s])
        # A document is a function of its source and index, so that the state need not hold tokens.
        for refs in state["open"]:
            self._open.append(PackedRow())
            for s, index in refs:
                self._open[-1].add((s, index), self._document(s, index))

    def _document(self, s: int, index: int) -> LaidOutDocument:
        stream = self._streams[s]
        assert isinstance(stream, Stream)  # no row of a source that fills rows is open
        return stream.at(index)


class PackedIterator(grain.DatasetIterator[Batch]):
    """This process's rows of every batch, without end."""

    def __init__(
        self,
        packers: Mapping[int, RowPacker],
        stages: Sequence[tuple[int, Streams]],
        row: int,
        pad: int,
        digest: str,
    ) -> None:
        """Starts at the first batch.

        Args:
            packers: Of each of this process's rows, under its number in the batch; in the layout of the first stage.
            stages: (first batch, the open sources in the layout from there on).
            row: Positions T of a row.
            pad: Id that fills rows up.
            digest: Tells mixtures and settings apart.
        """
        super().__init__()
        self._packers, self._stages, self._streams = packers, stages, stages[0][1]
        self._row, self._pad, self._digest, self._batches = row, pad, digest, 0

    def _enter_stage(self, batch: int) -> None:
        """Takes the layout of a batch."""
        streams = [streams for first, streams in self._stages if first <= batch][-1]
        if streams is not self._streams:
            self._streams = streams
            for packer in self._packers.values():
                packer.use(streams)

    def __next__(self) -> Batch:
        self._enter_stage(self._batches)
        self._batches += 1
        packed, filled = dict[int, PackedRow](), dict[int, dict[int, FilledRow]]()
        for b, packer in enumerate(self._packers.values()):
            row = packer.next_row()
            if isinstance(row, PackedRow):
                packed[b] = row
            else:
                filled.setdefault(row[0], {})[b] = row[1]
        # Rows of one source are laid out at once; then each takes its place in the batch.
        parts = [(list(packed), pack(list(packed.values()), self._row, self._pad))] if packed else []
        for s, rows in filled.items():
            stream = self._streams[s]
            assert isinstance(stream, RowStream)
            parts.append((list(rows), lay_out_rows(stream, list(rows.values()), self._row, self._pad)))
        if len(parts) == 1:
            return parts[0][1]
        numbers = np.argsort([b for places, _ in parts for b in places])
        arrays = (np.concatenate(arrays)[numbers] for arrays in zip(*(part for _, part in parts)))
        return Batch(*arrays)  # pyright: ignore[reportArgumentType]

    def get_state(self) -> DataState:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Where each of this process's rows is."""
        rows = {str(number): packer.get_state() for number, packer in self._packers.items()}
        return {"data": self._digest, "batches": self._batches, "rows": rows}

    def set_state(self, state: DataState) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Continues where `state` was taken; it may hold the rows of other processes too.

        Raises:
            ValueError: It was taken on other data or with other settings, or lacks a row of this process.
        """
        if state["data"] != self._digest:
            raise refuse("state.data", state["data"], f"{self._digest}, same data, seed, rows and blocks")
        missing = [number for number in self._packers if str(number) not in state["rows"]]
        if missing:
            allowed = f"all of this process's, {missing} too"
            raise refuse("state.rows", sorted(map(int, state["rows"])), allowed)
        # A state of an older version has no number of batches, and layouts did not change then.
        self._batches = state.get("batches", 0)
        self._enter_stage(max(0, self._batches - 1))  # the layout in which the open rows were filled
        for number, packer in self._packers.items():
            packer.set_state(state["rows"][str(number)])


class PackedDataset(grain.IterDataset[Batch]):
    """The batches as grain's threads read them: every iterator starts at the first batch."""

    def __init__(self, new_iterator: Callable[[], PackedIterator]) -> None:
        """Holds a function that makes an iterator."""
        super().__init__()
        self._new_iterator = new_iterator

    def __iter__(self) -> PackedIterator:
        return self._new_iterator()


def build(
    mixture: Mixture,
    tokenizer: AnyTokenizer,
    layout: Layout | Sequence[tuple[int, Layout]],
    *,
    rows: int,
    row: int,
    seed: int,
    split: DataSplit = "train",
    index: int = 0,
    count: int = 1,
    prefetch: int = 2,
) -> grain.DatasetIterator[Batch]:
    """Opens a mixture and packs it into batches without end; `get_state()` is ready for JSON, `set_state()` exact.

    Args:
        mixture: Sources and their weights.
        tokenizer: Encodes texts; its `pad` fills rows up.
        layout: `Model.layout`, how a document stands in a row. Where it changes during the run, pairs (first batch,
            layout): batch n, from 0, has the layout of the last pair whose first batch is at most n.
        rows: Rows B of a batch, over all processes.
        row: Positions T of a row.
        seed: Decides order, cuts and problems, for any number of processes alike.
        split: "train", or "test" for what training never sees.
        index: Which part of the rows this process makes: rows index * B / count up to (index + 1) * B / count.
        count: Into how many parts the rows are split.
        prefetch: Batches that a thread makes ahead; 0 for no thread.

    Returns:
        An iterator of numpy batches [B / count, T].

    Raises:
        ValueError: Before any batch, when a source cannot be read or does not fit a row; or when blocks do not fit each
            other (`packing.check_blocks`).
    """
    at_least(0, seed=seed, index=index)
    at_least(1, rows=rows, row=row, count=count)
    one_of(DataSplit, split=split)
    if index >= count:
        raise refuse("index", index, f"0..{count - 1}, one of {count} processes")
    if rows % count:
        raise refuse("rows", rows, f"a multiple of {count}, the processes that share a batch")
    stages = [(0, layout)] if isinstance(layout, Layout) else list(layout)
    firsts, layouts = [first for first, _ in stages], tuple(layout for _, layout in stages)
    check_blocks([(first, block_size(layout)) for first, layout in stages])
    opened, weights = list[list[Stream | RowStream]](), list[float]()  # of each source, in each layout
    for number, (source, weight) in enumerate(mixture.sources):
        settings = StreamSettings(
            tokenizer, max(layouts, key=block_size), row, (seed, number), split, layouts
        )
        if found := open_in_layouts(source, settings):
            opened.append(found)
            weights.append(weight)
    if not opened:
        raise refuse("split", split, "train: no source of this mixture holds anything out")
    # Resumed documents must be the same: tokenizers and layouts are told apart by what they make of an example.
    probes = list[list[int]]()
    for layout in layouts:
        laid = layout(np.zeros(100, np.int32), 1, 0)
        probes.append([len(laid.tokens), int(laid.positions.max()), int(laid.ranges.sum())])
    probe = [tokenizer.vocab_size, getattr(tokenizer, "fingerprint", ""), *probes[0]]
    sizes = [[s.size, s.identity] if s.identity else s.size for s, *_ in opened]
    facts = (dataclasses.asdict(mixture), sizes, probe, rows, row, seed, split)
    facts += (firsts, probes) if len(stages) > 1 else ()
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()
    own = range(index * rows // count, (index + 1) * rows // count)
    streams = list(zip(*opened))  # of each layout, those of all sources

    data = PackedDataset(
        lambda: PackedIterator(
            {number: RowPacker(streams[0], weights, rows, row, seed, number) for number in own},
            list(zip(firsts, streams)),
            row,
            tokenizer.pad,
            digest,
        )
    )
    if not prefetch:
        return iter(data)
    return iter(grain.experimental.ThreadPrefetchIterDataset(data, prefetch_buffer_size=prefetch))


def open_in_layouts(source: DataSource, settings: StreamSettings) -> list[Stream | RowStream]:
    """Opens a source in each of `settings.layouts`; an index means the same text in all of them.

    Args:
        source: One source of a mixture.
        settings: Its `layout` is the one of the largest block.

    Returns:
        The streams; none where the source has nothing on this side.

    Raises:
        ValueError: The source cannot be read, does not fit a row, or has other examples in another layout.
    """
    layouts, opened = settings.layouts, source.open(settings)
    if opened is None or len(layouts) == 1:
        return [] if opened is None else [opened]
    if isinstance(opened, RowStream):
        return [opened._replace(layout=layout) for layout in layouts if isinstance(layout, RowLayout)]
    if opened.in_layout is not None:
        return [opened.in_layout(layout) for layout in layouts]
    again = [source.open(settings._replace(layout=layout)) for layout in layouts]
    same = [stream for stream in again if isinstance(stream, Stream) and stream.size == opened.size]
    if len(same) < len(layouts):
        allowed = "a source with the same examples in every block, for a run whose block changes"
        raise refuse("data", type(source).__name__, allowed)
    return [*same]


def texts(mixture: Mixture, budget_bytes: int, seed: int = 0) -> Iterator[str]:
    """Reads texts of the train side, from which a tokenizer is trained, the sources in proportion to their weights.

    Problems come as prompt, thinking and answer, a line each. Finite sources are passed once.

    Args:
        mixture: Sources and their weights.
        budget_bytes: About how many bytes of UTF-8.
        seed: Decides which texts.

    Returns:
        An iterator of texts; the sources are read before it starts.
    """
    at_least(1, budget_bytes=budget_bytes)
    opened = [(source.texts((seed, n)), weight) for n, (source, weight) in enumerate(mixture.sources)]
    taken = dict.fromkeys(range(len(opened)), 0)  # bytes of each source that has more

    def weighted() -> Iterator[str]:
        budget = budget_bytes
        while taken and budget > 0:
            # The source that is furthest behind its share of the bytes.
            n = min(taken, key=lambda n: taken[n] / opened[n][1])
            text = next(opened[n][0], None)
            if text is None:
                del taken[n]
                continue
            size = len(text.encode())
            taken[n] += size
            budget -= size
            yield text

    return weighted()


def check_fit(tokenizer: AnyTokenizer, config: ModelConfig) -> None:
    """Refuses a tokenizer that the model was not made for.

    The model's vocabulary may be larger than the tokenizer's, as that of published models is: `noise.specials` forbids
    the ids in between.

    Args:
        tokenizer: Its size and its special ids are compared.
        config: The model's.

    Raises:
        ValueError: The tokenizer has more ids than the model, or another mask, padding or end of text.
    """
    if tokenizer.vocab_size > config.vocab:
        raise refuse("vocab", config.vocab, f"{tokenizer.vocab_size} or more, the size of the tokenizer")
    # Gemma's tokenizer names a mask; a model without masks never emits it.
    for name in ("pad", "eos") if config.mask is None else ("mask", "pad", "eos"):
        if getattr(tokenizer, name) != getattr(config, name):
            raise refuse(name, getattr(config, name), f"{getattr(tokenizer, name)}, as in the tokenizer")
