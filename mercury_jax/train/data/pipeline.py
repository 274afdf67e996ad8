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

OPEN_ROWS = 16  # rows that wait for documents that fit; more pack tighter and make a larger state


def check_fit(tokenizer: Any, config: ModelConfig) -> None:
    """ValueError unless the model was made for this tokenizer."""
    if tokenizer.vocab_size != config.vocab:
        raise refuse("vocab", config.vocab, f"{tokenizer.vocab_size}, the size of the tokenizer")
    for name in ("mask", "pad", "eos"):
        if getattr(tokenizer, name) != getattr(config, name):
            raise refuse(name, getattr(config, name), f"{getattr(tokenizer, name)}, as in the tokenizer")


class Packed(grain.IterDataset):
    """Batches without end; opening it reads, tokenises and checks every source."""

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
        self.rows, self.row, self.pad, self.index, self.count = rows, row, tokenizer.pad, index, count
        opened = [
            (stream(source, Setting(tokenizer, layout, row, (seed, number), split)), weight)
            for number, (source, weight) in enumerate(mixture.sources)
        ]
        self.streams: list[Stream] = [s for s, _ in opened if s is not None]
        self.weights = [w for s, w in opened if s is not None]
        if not self.streams:
            raise refuse("split", split, "train: no source of this mixture holds anything out")
        plain = dataclasses.asdict(mixture), [s.size for s in self.streams], _probe(tokenizer, layout)
        facts = (*plain, rows, row, seed, split, index, count)
        self.digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()

    def __iter__(self) -> PackedIterator:
        return PackedIterator(self)


class PackedIterator(grain.DatasetIterator):
    """Its state: how far each source is, how many positions it gave, which documents the open rows hold."""

    def __init__(self, data: Packed):
        super().__init__()
        self._data = data
        self._next = [0] * len(data.streams)
        self._positions = [0] * len(data.streams)
        self._open: list[packing.Row] = []

    def __next__(self) -> Batch:
        data, closed = self._data, []
        while len(closed) < data.rows:
            # The source furthest behind its share of the positions, which are what training costs.
            s = min(range(len(data.streams)), key=lambda s: self._positions[s] / data.weights[s])
            ref = (s, data.index + data.count * self._next[s])
            laid = data.streams[s].at(ref[1])
            self._next[s] += 1
            self._positions[s] += len(laid.tokens)
            done = packing.place(self._open, ref, laid, data.row, OPEN_ROWS)
            closed += [done] if done else []
        return packing.batch(closed, data.row, data.pad)

    def get_state(self) -> dict[str, Any]:
        rows = [[list(ref) for ref in row.refs] for row in self._open]
        told = {"next": [*self._next], "positions": [*self._positions], "open": rows}
        return {"data": self._data.digest, **told}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. ValueError when that was on other data or with other settings."""
        if state["data"] != self._data.digest:
            raise refuse("state.data", state["data"], f"{self._data.digest}, same data, seed and rows")
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
    """Batches [rows, row] without end, made in a thread; `get_state()` is JSON-ready, `set_state()` exact.

    layout: `Model.layout`. index, count: this process and how many there are; each reads its own
    documents. prefetch: batches that the thread makes ahead (0: no thread). ValueError, before any
    batch, when a source cannot be read or does not fit a row.
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
) -> list[Batch]:
    """The first batches of the test side: always the same for the same arguments.

    Text is never infilled here, so that its loss is a bound on whole canvases. Sources that hold
    nothing out are left aside; ValueError when all do.
    """
    at_least(1, batches=batches)
    test = build(mixture, tokenizer, layout, rows=rows, row=row, seed=seed, split="test", prefetch=0)
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
