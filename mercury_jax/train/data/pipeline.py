"""From a mixture to batches: streams, weights, packing, and a state from which all goes on exactly."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import grain
import numpy as np

from mercury_jax.config import ModelConfig, at_least, one_of, refuse
from mercury_jax.train.data import packing, read
from mercury_jax.train.data.sources import Chat, Generated, Mixture, Source, Split
from mercury_jax.train.data.streams import Layout, Setting, Stream, problems, stream
from mercury_jax.types import Batch

OPEN_ROWS = 4  # half-filled rows that each row of the batch keeps; more pack tighter and make a larger state


def check_fit(tokenizer: Any, config: ModelConfig) -> None:
    """Refuses a tokenizer that the model was not made for.

    The model's vocabulary may be larger than the tokenizer's, as that of published models is: `noise.specials` forbids
    the ids in between.

    Args:
        tokenizer: Anything with `vocab_size`, `mask`, `pad` and `eos`.
        config: The model's.

    Raises:
        ValueError: The tokenizer has more ids than the model, or another mask, padding or end of text.
    """
    if tokenizer.vocab_size > config.vocab:
        raise refuse("vocab", config.vocab, f"{tokenizer.vocab_size} or more, the size of the tokenizer")
    for name in ("pad", "eos") if config.autoregressive else ("mask", "pad", "eos"):
        if getattr(tokenizer, name) != getattr(config, name):
            raise refuse(name, getattr(config, name), f"{getattr(tokenizer, name)}, as in the tokenizer")


class Packed(grain.IterDataset):
    """Batches without end; opening it reads, tokenises and checks every source.

    Row b of every batch is packed by itself, from documents b, b + B, b + 2B, ... of each source. So a batch of B
    rows is the same on any number of processes, each of which makes only its own rows.
    """

    def __init__(
        self, mixture: Mixture, tokenizer: Any, layout: Layout, *,
        rows: int, row: int, seed: int, split: Split, index: int, count: int,
    ):  # fmt: skip
        super().__init__()
        at_least(0, seed=seed, index=index)
        at_least(1, rows=rows, row=row, count=count)
        one_of(Split, split=split)
        if index >= count:
            raise refuse("index", index, f"0..{count - 1}, one of {count} processes")
        if rows % count:
            raise refuse("rows", rows, f"a multiple of {count}, the processes that share a batch")
        self.rows, self.row, self.pad, self.seed = rows, row, tokenizer.pad, seed
        self.own = range(index * rows // count, (index + 1) * rows // count)
        opened = [
            (stream(source, Setting(tokenizer, layout, row, (seed, number), split)), weight)
            for number, (source, weight) in enumerate(mixture.sources)
        ]
        self.streams: list[Stream] = [s for s, _ in opened if s is not None]
        self.weights = [w for s, w in opened if s is not None]
        if not self.streams:
            raise refuse("split", split, "train: no source of this mixture holds anything out")
        plain = dataclasses.asdict(mixture), [s.size for s in self.streams], _probe(tokenizer, layout)
        facts = (*plain, rows, row, seed, split)
        self.digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()

    def __iter__(self) -> PackedIterator:
        return PackedIterator(self)


class PackedIterator(grain.DatasetIterator):
    """This process's rows of every batch."""

    def __init__(self, data: Packed):
        super().__init__()
        self._data = data
        self._packers = {number: RowPacker(data, number) for number in data.own}

    def __next__(self) -> Batch:
        rows = [packer.next() for packer in self._packers.values()]
        return packing.batch(rows, self._data.row, self._data.pad)

    def get_state(self) -> dict[str, Any]:
        """Where each of this process's rows is, under its number in the batch."""
        rows = {str(number): packer.get_state() for number, packer in self._packers.items()}
        return {"data": self._data.digest, "rows": rows}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; it may hold the rows of other processes too.

        Raises:
            ValueError: It was taken on other data or with other settings, or lacks a row of this process.
        """
        if state["data"] != self._data.digest:
            raise refuse("state.data", state["data"], f"{self._data.digest}, same data, seed and rows")
        missing = [number for number in self._packers if str(number) not in state["rows"]]
        if missing:
            raise refuse(
                "state.rows", sorted(map(int, state["rows"])), f"all of this process's, {missing} too"
            )
        for number, packer in self._packers.items():
            packer.set_state(state["rows"][str(number)])


class RowPacker:
    """Packs one row of every batch; the state is how far each source is and which documents the open rows hold."""

    def __init__(self, data: Packed, number: int):
        self._data, self._number = data, number
        self._next = [0] * len(data.streams)
        # Each row starts at another point of the mixture, or every row of the first batch would hold the same source.
        phase = np.random.default_rng((data.seed, number)).random(len(data.streams))
        total = sum(data.weights)
        self._positions = [int(u * data.row * w / total) for u, w in zip(phase, data.weights)]
        self._open: list[packing.Row] = []

    def next(self) -> packing.Row:
        """Lays out documents until a row is full."""
        data = self._data
        while True:
            # The source furthest behind its share of the positions, which are what training costs.
            s = min(range(len(data.streams)), key=lambda s: self._positions[s] / data.weights[s])
            ref = (s, self._number + data.rows * self._next[s])
            laid = data.streams[s].at(ref[1])
            self._next[s] += 1
            self._positions[s] += len(laid.tokens)
            if closed := packing.place(self._open, ref, laid, data.row, OPEN_ROWS):
                return closed

    def get_state(self) -> dict[str, Any]:
        rows = [[list(ref) for ref in row.refs] for row in self._open]
        return {"next": [*self._next], "positions": [*self._positions], "open": rows}

    def set_state(self, state: dict[str, Any]) -> None:
        self._next, self._positions = list(state["next"]), list(state["positions"])
        self._open = [self._row(refs) for refs in state["open"]]

    def _row(self, refs: list[list[int]]) -> packing.Row:
        row = packing.Row()
        for s, index in refs:
            row.add((s, index), self._data.streams[s].at(index))
        return row


def _probe(tokenizer: Any, layout: Layout) -> list[int | str]:
    """What tells tokenizers and layouts apart: the text of resumed documents must be the same."""
    laid = layout(np.zeros(100, np.int32), 1, 0)
    shape = [len(laid.tokens), int(laid.positions.max()), int(laid.ranges.sum())]
    return [tokenizer.vocab_size, getattr(tokenizer, "fingerprint", ""), *shape]


def build(
    mixture: Mixture,
    tokenizer: Any,
    layout: Layout,
    *,
    rows: int,
    row: int,
    seed: int,
    split: Split = "train",
    index: int = 0,
    count: int = 1,
    prefetch: int = 2,
) -> grain.DatasetIterator[Batch]:
    """Batches without end, made in a thread; `get_state()` is JSON-ready, `set_state()` exact.

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
        prefetch: Batches that the thread makes ahead; 0 for no thread.

    Returns:
        An iterator of numpy batches [B / count, T].

    Raises:
        ValueError: Before any batch, when a source cannot be read or does not fit a row.
    """
    data = Packed(
        mixture, tokenizer, layout, rows=rows, row=row, seed=seed, split=split, index=index, count=count
    )  # fmt: skip
    if not prefetch:
        return iter(data)
    return iter(grain.experimental.ThreadPrefetchIterDataset(data, prefetch_buffer_size=prefetch))


def held_out(
    mixture: Mixture,
    tokenizer: Any,
    layout: Layout,
    *,
    rows: int,
    row: int,
    seed: int = 0,
    batches: int = 8,
    index: int = 0,
    count: int = 1,
) -> list[Batch]:
    """The first batches of the test side: always the same for the same arguments, see `build`.

    Text is never infilled here, so that its loss is a bound on whole canvases. Sources that hold
    nothing out are left aside; ValueError when all do.
    """
    at_least(1, batches=batches)
    part = {"index": index, "count": count}
    test = build(mixture, tokenizer, layout, rows=rows, row=row, seed=seed, split="test", prefetch=0, **part)
    return list(islice(test, batches))


# --- texts, from which a tokenizer learns

_PIECE = 8_000  # characters: of a long file some parts, so that a small budget sees many files


def texts(mixture: Mixture, budget_bytes: int, seed: int = 0) -> Iterator[str]:
    """Texts of the train side, about `budget_bytes` of UTF-8, the sources in proportion to their weights.

    Problems come as prompt, thinking and answer, a line each. Finite sources are passed once.
    """
    at_least(1, budget_bytes=budget_bytes)
    opened = [(_raw(s, (seed, n)), w) for n, (s, w) in enumerate(mixture.sources)]
    return _weighted(opened, budget_bytes)


def _weighted(opened: list[tuple[Iterator[str], float]], budget: int) -> Iterator[str]:
    given = dict.fromkeys(range(len(opened)), 0)
    while given and budget > 0:
        n = min(given, key=lambda n: given[n] / opened[n][1])
        text = next(opened[n][0], None)
        if text is None:
            del given[n]
            continue
        given[n] += (size := len(text.encode()))
        budget -= size
        yield text


def _raw(source: Source, seed: tuple[int, ...]) -> Iterator[str]:
    if isinstance(source, Generated):
        return _written(source, seed)
    if isinstance(source, Chat):
        whole = ["\n".join(m["content"] for m in turns) for _, turns in read.conversations(source, "train")]
    else:
        whole = [text for _, text in read.documents(source, "train")]
    pieces = [text[i : i + _PIECE] for text in whole for i in range(0, len(text), _PIECE)]
    return (pieces[i] for i in np.random.default_rng(seed).permutation(len(pieces)))


def _written(source: Generated, seed: tuple[int, ...]) -> Iterator[str]:
    at, index = problems(source, seed, "train"), 0
    while True:
        p = at(index)
        thinking = [p.thinking] if source.thinking and p.thinking else []
        yield "\n".join([p.input, *thinking, p.output])
        index += 1
