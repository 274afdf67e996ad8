"""From a mixture to batches: streams, weights, packing, and a state from which a run continues exactly.

Row b of every batch is packed by itself, from documents b, b + B, b + 2B, ... of each source. So a batch of B rows
is the same on any number of processes, each of which makes only its own rows. A source of shards fills whole rows
(`filling.py`); all others share rows, document by document.

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
from mercury_jax.train.data.packing import DataSplit, PackedRow, StreamSettings, pack, place
from mercury_jax.train.data.sources import Mixture, Stream
from mercury_jax.types import Batch, Layout

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
                stream = self._streams[s]
                assert isinstance(stream, Stream)  # no row of a source that fills rows is open
                self._open[-1].add((s, index), stream.at(index))


class PackedIterator(grain.DatasetIterator[Batch]):
    """This process's rows of every batch, without end."""

    def __init__(
        self, packers: Mapping[int, RowPacker], streams: Streams, row: int, pad: int, digest: str
    ) -> None:
        """Starts at the first batch.

        Args:
            packers: Of each of this process's rows, under its number in the batch.
            streams: The open sources.
            row: Positions T of a row.
            pad: Id that fills rows up.
            digest: Tells mixtures and settings apart.
        """
        super().__init__()
        self._packers, self._streams = packers, streams
        self._row, self._pad, self._digest = row, pad, digest

    def __next__(self) -> Batch:
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
        return {"data": self._digest, "rows": rows}

    def set_state(self, state: DataState) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Continues where `state` was taken; it may hold the rows of other processes too.

        Raises:
            ValueError: It was taken on other data or with other settings, or lacks a row of this process.
        """
        if state["data"] != self._digest:
            raise refuse("state.data", state["data"], f"{self._digest}, same data, seed and rows")
        missing = [number for number in self._packers if str(number) not in state["rows"]]
        if missing:
            allowed = f"all of this process's, {missing} too"
            raise refuse("state.rows", sorted(map(int, state["rows"])), allowed)
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
    layout: Layout,
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
        layout: `Model.layout`, how a document stands in a row.
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
        ValueError: Before any batch, when a source cannot be read or does not fit a row.
    """
    at_least(0, seed=seed, index=index)
    at_least(1, rows=rows, row=row, count=count)
    one_of(DataSplit, split=split)
    if index >= count:
        raise refuse("index", index, f"0..{count - 1}, one of {count} processes")
    if rows % count:
        raise refuse("rows", rows, f"a multiple of {count}, the processes that share a batch")
    streams, weights = list[Stream | RowStream](), list[float]()
    for number, (source, weight) in enumerate(mixture.sources):
        opened = source.open(StreamSettings(tokenizer, layout, row, (seed, number), split))
        if opened is not None:
            streams.append(opened)
            weights.append(weight)
    if not streams:
        raise refuse("split", split, "train: no source of this mixture holds anything out")
    # Resumed documents must be the same: tokenizers and layouts are told apart by what they make of an example.
    laid = layout(np.zeros(100, np.int32), 1, 0)
    probe = [tokenizer.vocab_size, getattr(tokenizer, "fingerprint", "")]
    probe += [len(laid.tokens), int(laid.positions.max()), int(laid.ranges.sum())]
    sizes = [[s.size, s.identity] if s.identity else s.size for s in streams]
    facts = (dataclasses.asdict(mixture), sizes, probe, rows, row, seed, split)
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()
    own = range(index * rows // count, (index + 1) * rows // count)

    data = PackedDataset(
        lambda: PackedIterator(
            {number: RowPacker(streams, weights, rows, row, seed, number) for number in own},
            streams,
            row,
            tokenizer.pad,
            digest,
        )
    )
    if not prefetch:
        return iter(data)
    return iter(grain.experimental.ThreadPrefetchIterDataset(data, prefetch_buffer_size=prefetch))


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
