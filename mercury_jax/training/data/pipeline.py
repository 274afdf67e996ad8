"""From a mixture to batches: weighted sources, packing, and a state from which a run resumes exactly.

Row b of the batches is packed independently of the other rows, from documents b, b + B, b + 2B, ... of each source. A
batch of B rows is therefore the same with any number of processes, and each process makes only its own rows. A source
of shards fills whole rows (`filling.py`); documents of all other sources share rows.

The layout may change between two batches, in a run whose block changes: sources continue at their position, and the
documents of open rows are laid out again.

Only this module imports grain, for the thread that prepares batches in advance.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, cast

import numpy as np
from grain.experimental import ThreadPrefetchDatasetIterator

from mercury_jax.config import ModelConfig, NonNegativeInt, PositiveInt, checked, refuse
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.training.data.filling import FilledRow, RowFiller, RowStream, lay_out_rows
from mercury_jax.training.data.packing import (
    DataSplit,
    PackedRow,
    StreamSettings,
    block_size,
    check_blocks,
    pack,
    place,
)
from mercury_jax.training.data.sources import DataSource, Mixture, Stream
from mercury_jax.types import Batch, LaidOutDocument, Layout, RowLayout

OPEN_ROWS = 4  # open rows per row of the batch; more of them pack tighter, but make the state larger


Streams = Sequence[Stream | RowStream]


class RowState(TypedDict):
    """Position of a `RowPacker`, ready for JSON. The first three lists have an entry per source."""

    next: list[int]  # documents taken; for a `RowStream`, windows that are used up
    offset: list[int]  # tokens taken of the next window; 0 for other sources
    positions: list[int]  # row positions used so far
    open: list[list[list[int]]]  # for each open row, [source, index] of its documents


# Position of a run in its data, ready for JSON: `data`, everything that decides which tokens a batch holds, by name;
# `batches`, the number of batches made; `rows`, the `RowState` of each row by its number in the batch.
DataState = dict[str, Any]


class RowPacker:
    """Packs row `number` of every batch, taking documents from the sources in proportion to their weights."""

    def __init__(
        self, streams: Streams, weights: Sequence[float], rows: int, row: int, seed: int, number: int
    ) -> None:
        """Starts at the first document."""
        self._streams, self._weights, self._rows, self._row = streams, weights, rows, row
        self._number, self._next = number, [0] * len(streams)
        # Each row starts at a random point of the mixture. Otherwise all rows of the first batch would be filled from
        # the same source.
        phase = np.random.default_rng((seed, number)).random(len(streams))
        self._positions = [int(u * row * w / sum(weights)) for u, w in zip(phase, weights)]
        self._open: list[PackedRow] = []
        self._fillers = {
            s: RowFiller(stream, rows, row, number)
            for s, stream in enumerate(streams)
            if isinstance(stream, RowStream)
        }

    def use(self, streams: Streams) -> None:
        """Continues in another layout; the documents of open rows are laid out and placed again."""
        self._streams = streams
        refs, self._open = [ref for row in self._open for ref in row.refs], []
        for ref in refs:
            # `place` may close a row that is exactly full. It goes back to the open rows, since no batch asked for it.
            if full := place(self._open, ref, self._document(ref), self._row, len(refs)):
                self._open.append(full)
        for s, filler in self._fillers.items():
            filler.use(cast(RowStream, streams[s]))

    def next_row(self) -> PackedRow | tuple[int, FilledRow]:
        """Takes documents until a row is closed."""
        while True:
            # The next document comes from the source that is furthest behind its share. Shares are measured in row
            # positions, canvases included, because positions are what training costs.
            s = min(range(len(self._streams)), key=lambda s: self._positions[s] / self._weights[s])
            if s in self._fillers:
                filled = self._fillers[s].next_row()
                self._positions[s] += filled.used
                return s, filled
            # Row b takes the documents b, b + B, b + 2B, ... of each source: no other row has them.
            ref = (s, self._number + self._rows * self._next[s])
            laid = self._document(ref)
            self._next[s] += 1
            self._positions[s] += len(laid.tokens)
            if closed := place(self._open, ref, laid, self._row, OPEN_ROWS):
                return closed

    def get_state(self) -> RowState:
        """Returns the position in each source, and the documents of the open rows."""
        taken, offset = [*self._next], [0] * len(self._next)
        for s, filler in self._fillers.items():
            taken[s], offset[s] = filler.taken, filler.offset
        rows = [[list(ref) for ref in row.refs] for row in self._open]
        return {"next": taken, "offset": offset, "positions": [*self._positions], "open": rows}

    def set_state(self, state: RowState) -> None:
        """Continues from a saved position."""
        self._next, self._positions, self._open = list(state["next"]), list(state["positions"]), []
        for s, filler in self._fillers.items():
            filler.set_state(state["next"][s], state["offset"][s])
        # A document is a pure function of its source and its index, so the state holds no tokens.
        for refs in state["open"]:
            self._open.append(PackedRow())
            for s, index in refs:
                self._open[-1].add((s, index), self._document((s, index)))
        # An earlier version laid documents out shorter, without what `packing.fill_up` adds.
        if any(row.used > self._row for row in self._open):
            self.use(self._streams)

    def _document(self, ref: tuple[int, int]) -> LaidOutDocument:
        return cast(Stream, self._streams[ref[0]]).at(ref[1])  # a `RowStream` has no documents in open rows


class PackedIterator(Iterator[Batch]):
    """An endless iterator over this process's rows of the batches."""

    def __init__(
        self,
        packers: Mapping[int, RowPacker],
        stages: Sequence[tuple[int, Streams]],
        row: int,
        pad: int,
        facts: dict[str, Any],
    ) -> None:
        """Starts at the first batch.

        Args:
            facts: Everything that decides which tokens a batch holds; a state that was saved with others is refused.
        """
        self._packers, self._stages, self._streams = packers, stages, stages[0][1]
        self._row, self._pad, self._facts, self._batches = row, pad, facts, 0

    def _enter_stage(self, batch: int) -> None:
        """Switches all packers to the layout of a batch, if it is another one."""
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
        # The rows of each `RowStream` are laid out together, and all packed rows together. `numbers` then restores the
        # order of the rows in the batch.
        parts = [(list(packed), pack(list(packed.values()), self._row, self._pad))] if packed else []
        for s, rows in filled.items():
            stream = cast(RowStream, self._streams[s])
            parts.append((list(rows), lay_out_rows(stream, list(rows.values()), self._row, self._pad)))
        if len(parts) == 1:
            return parts[0][1]
        numbers = np.argsort([b for places, _ in parts for b in places])
        arrays = (np.concatenate(arrays)[numbers] for arrays in zip(*(part for _, part in parts)))
        return Batch(*arrays)  # pyright: ignore[reportArgumentType]

    def epochs(self) -> float:
        """How often the rows so far have read the source that they read most often; 0 if no source repeats."""
        taken = [packer.get_state()["next"] for packer in self._packers.values()]
        sizes = [stream.size for stream in self._streams]
        return max((sum(n[s] for n in taken) / size for s, size in enumerate(sizes) if size), default=0.0)

    def get_state(self) -> DataState:
        """Returns the position of each row of this process."""
        rows = {str(number): packer.get_state() for number, packer in self._packers.items()}
        return {"data": self._facts, "batches": self._batches, "rows": rows}

    def set_state(self, state: DataState) -> None:
        """Continues from a saved position."""
        _check_same_data(state["data"], self._facts)
        missing = [number for number in self._packers if str(number) not in state["rows"]]
        if missing:
            allowed = f"all of this process's, {missing} too"
            raise refuse("state.rows", sorted(map(int, state["rows"])), allowed)
        # States of older versions have no number of batches; their runs had a single layout.
        self._batches = state.get("batches", 0)
        self._enter_stage(max(0, self._batches - 1))  # the layout in which the open rows were filled
        for number, packer in self._packers.items():
            packer.set_state(state["rows"][str(number)])


class PrefetchedIterator(ThreadPrefetchDatasetIterator[Batch]):
    """An iterator whose batches a thread of grain prepares in advance."""

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_exit():  # then the names of grain's modules are gone, and its own `__del__` raises
            super().__del__()


@checked
def build(
    mixture: Mixture,
    tokenizer: AnyTokenizer,
    layout: Layout | Sequence[tuple[int, Layout]],
    *,
    rows: PositiveInt,
    row: PositiveInt,
    seed: NonNegativeInt,
    split: DataSplit = "train",
    index: NonNegativeInt = 0,
    count: PositiveInt = 1,
    prefetch: int = 2,
) -> PackedIterator | PrefetchedIterator:
    """Opens a mixture and packs it into an endless iterator of batches, which can be resumed exactly.

    Args:
        layout: `Model.layout`, which arranges the clean tokens and canvases of a document. If the block changes during
            the run, pairs (first batch, layout): batch n >= 0 has the layout of the last pair whose first batch is at
            most n.
    """
    if index >= count:
        raise refuse("index", index, f"0..{count - 1}, one of {count} processes")
    if rows % count:
        raise refuse("rows", rows, f"a multiple of {count}, the processes that share a batch")
    stages = [(0, layout)] if isinstance(layout, Layout) else list(layout)
    firsts, layouts = [first for first, _ in stages], tuple(layout for _, layout in stages)
    check_blocks([(first, block_size(layout)) for first, layout in stages])
    # 1. Each source, opened in each layout. A source without held-out data is left out of the test split.
    opened, sources, weights = list[list[Stream | RowStream]](), list[DataSource](), list[float]()
    for number, (source, weight) in enumerate(mixture.sources):
        settings = StreamSettings(
            tokenizer, max(layouts, key=block_size), row, (seed, number), split, layouts
        )
        if found := open_in_layouts(source, settings):
            opened.append(found)
            sources.append(source)
            weights.append(weight)
    if not opened:
        allowed = "train: no source of this mixture holds anything out. Set eval_every to 0, or held_out"
        raise refuse("split", split, allowed)
    # 2. Everything that decides which tokens a batch holds. A source with an identity is known by its content, wherever
    #    its files are. A layout is a function, so it is represented by what it makes of an example.
    probes = [layout(np.zeros(100, np.int32), 1, 0) for layout in layouts]
    facts: dict[str, Any] = {
        "seed": seed, "batch": rows, "row": row, "blocks": firsts,
        "model's layout": [[len(x.tokens), int(x.positions.max()), int(x.ranges.sum())] for x in probes],
        "tokenizer": getattr(tokenizer, "fingerprint", "") or tokenizer.vocab_size,
        "sources": [_facts_of(*source) for source in zip(sources, weights, (s for s, *_ in opened))],
    }  # fmt: skip
    facts = json.loads(json.dumps(facts))  # as a checkpoint returns them
    # 3. One packer for each row of this process.
    own = range(index * rows // count, (index + 1) * rows // count)
    streams = list(zip(*opened))  # [layout][source]
    packers = {number: RowPacker(streams[0], weights, rows, row, seed, number) for number in own}
    batches = PackedIterator(packers, list(zip(firsts, streams)), row, tokenizer.pad, facts)
    return PrefetchedIterator(batches, prefetch) if prefetch else batches


def _facts_of(source: DataSource, weight: float, stream: Stream | RowStream) -> dict[str, Any]:
    """Describes a source for a resumed run; `where` is not compared if the content is known."""
    assert dataclasses.is_dataclass(source) and not isinstance(source, type)
    facts = {"source": type(source).__name__, **dataclasses.asdict(source)}
    return {**facts, "weight": weight, "examples": stream.size, "content": stream.identity}


def _check_same_data(saved: Any, now: dict[str, Any]) -> None:
    """Refuses a saved state of other data, and names what differs."""

    def check(name: str, had: Any, has: Any) -> None:
        if had != has:
            raise refuse(name, has, f"{had!r}, as in the checkpoint to resume")

    if not isinstance(saved, dict):
        return  # an earlier version saved a digest, in which paths were part of the data
    # A state of an earlier version lacks what was added later.
    for name in ("seed", "batch", "row", "blocks"):
        check(name, saved.get(name, now[name]), now[name])
    check("data", f"{len(saved['sources'])} sources", f"{len(now['sources'])} sources")
    same_run = "resume with what the run was started with, or start another run (--out)"
    for name in ("tokenizer", "model's layout"):
        if saved.get(name, now[name]) != now[name]:
            raise ValueError(f"the {name} is another one than in the checkpoint to resume; {same_run}")
    for i, (had, has) in enumerate(zip(saved["sources"], now["sources"])):
        where = f"data, source {i + 1}: {has.get('where') or has['source']}"
        # Equal content may come from another place, and with or without bad lines.
        skipped = ("content", "examples", *(("where", "bad_lines") if has["content"] else ()))
        for name in (name for name in has if name in had and name not in skipped):
            check(f"{name} ({where})", had[name], has[name])
        if had.get("content") != has["content"] or had.get("examples") != has["examples"]:
            raise ValueError(f"{where} has other content than in the checkpoint to resume; {same_run}")


def open_in_layouts(source: DataSource, settings: StreamSettings) -> list[Stream | RowStream]:
    """Opens a source in each of `settings.layouts`, such that an index means the same text in all of them."""
    layouts, opened = settings.layouts, source.open(settings)
    if opened is None or len(layouts) == 1:
        return [] if opened is None else [opened]
    if isinstance(opened, RowStream):  # its windows were made for the largest block; only the layout differs
        return [opened._replace(layout=layout) for layout in layouts if isinstance(layout, RowLayout)]
    if opened.in_layout is not None:
        return [opened.in_layout(layout) for layout in layouts]
    # A user's source without `in_layout` is opened again. The number of examples is all that can be checked.
    again = [source.open(settings._replace(layout=layout)) for layout in layouts]
    same = [stream for stream in again if isinstance(stream, Stream) and stream.size == opened.size]
    if len(same) < len(layouts):
        allowed = "a source with the same examples in every block, for a run whose block changes"
        raise refuse("data", type(source).__name__, allowed)
    return [*same]


@checked
def texts(mixture: Mixture, budget_bytes: PositiveInt, seed: int = 0) -> Iterator[str]:
    """Samples training texts to train a tokenizer on, from the sources in proportion to their weights.

    A problem becomes a text of prompt, thinking and answer, one per line. A finite source is read once.
    """
    opened = [(source.texts((seed, n)), weight) for n, (source, weight) in enumerate(mixture.sources)]
    taken = dict.fromkeys(range(len(opened)), 0)  # bytes taken from each source that is not exhausted

    def weighted() -> Iterator[str]:
        budget = budget_bytes
        while taken and budget > 0:
            # The next text comes from the source that is furthest behind its share of the bytes.
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


def check_fit(tokenizer: AnyTokenizer, config: ModelConfig, origin: str = "the tokenizer") -> None:
    """Refuses a tokenizer that does not fit the model.

    The model's vocabulary may be larger than the tokenizer's, since published models round it up; `noise.specials`
    forbids the additional ids.
    """
    if tokenizer.vocab_size > config.vocab:
        raise refuse("model.vocab", config.vocab, f"{tokenizer.vocab_size} or more, the size of {origin}")
    # Gemma's tokenizer names a mask; a model without masks never emits it.
    for name in ("pad", "eos") if config.mask is None else ("mask", "pad", "eos"):
        if getattr(tokenizer, name) != getattr(config, name):
            allowed = f"{getattr(tokenizer, name)}, as in {origin}"
            raise refuse(f"model.{name}", getattr(config, name), allowed)
