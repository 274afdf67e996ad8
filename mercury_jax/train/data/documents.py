"""Documents of a corpus as they are read for `mercury data pack`: from files of any size, in bounded memory.

    Files(("books/*.txt", "web/*.jsonl.gz"))   text files, JSONL, Parquet, plain or compressed
    HubStream("org/name")                      a Hugging Face dataset, streamed
    Files(("chats.jsonl",), chats=True)        conversations
    Problems(generated("add3"), 100_000)       the problems of a task

Each has `records()`, always in the same order. What costs time, parsing and tokenising, is left to the processes of
`shard_writer.py`: a record is a line or a text as it was read, and `encode_record` makes examples of it.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal, NamedTuple, Protocol

import numpy as np

from mercury_jax import install
from mercury_jax.config import at_least, refuse
from mercury_jax.tasks.task import parse_json_line
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.train.data.packing import DataSplit, Example
from mercury_jax.train.data.sources import (
    Generated,
    encode_turns,
    find_paths,
    read_string,
    read_turns,
    side_of,
)

LONGEST_TEXT = 2**20  # characters: what is longer is cut behind a line, each part a document of its own
LONGEST_LINE = 2**26  # bytes of a line of JSONL
PROBLEMS = 256  # drawn for one record


class Record(NamedTuple):
    """What is read at once.

    Attributes:
        kind: A text; a line of JSON with a text; a line of JSON with a conversation; or numbers of problems.
        place: Where it was read, path:line, for messages.
        value: The text, the line, or (first, one after the last).
        split: The side of problems; "" where the text decides.
        ends: A text ends here; else the next record continues it.
    """

    kind: Literal["text", "json", "chat", "problems"]
    place: str
    value: str | bytes | tuple[int, int]
    split: DataSplit | Literal[""] = ""
    ends: bool = True


class DocumentReader(Protocol):
    """A corpus that can be read."""

    @property
    def prompts(self) -> bool:
        """Whether documents have a prompt, and are never cut."""
        ...

    def facts(self, held_out: float) -> dict[str, Any]:
        """What decides the records, ready for JSON: a pack continues only where these are equal."""
        ...

    def size(self) -> int | None:
        """Bytes of all records; None where that is unknown."""
        ...

    def records(self, held_out: float) -> Iterator[Record]:
        """Reads the corpus; ValueError names the file that cannot be read."""
        ...


@dataclass(frozen=True)
class Files:
    """Text files, JSONL (.jsonl), Parquet (.parquet), also compressed (.gz, .zst).

    Attributes:
        globs: Paths; `**` goes into folders.
        field: Key or column of the text.
        chats: The lines are conversations, {"messages": [{"role", "content"}, ...]}.
    """

    globs: tuple[str, ...]
    field: str = "text"
    chats: bool = False

    @property
    def prompts(self) -> bool:
        """Implements `DocumentReader`."""
        return self.chats

    @functools.cached_property
    def paths(self) -> list[str]:
        """The files, sorted within each glob.

        Raises:
            ValueError: There is none, or one that cannot hold conversations.
        """
        found = list(dict.fromkeys(path for pattern in self.globs for path in find_paths(pattern)))
        for path in found:
            if self.chats and _format(path) != "json":
                raise refuse("chats", path, "files that end in .jsonl, .jsonl.gz or .jsonl.zst")
        return found

    def facts(self, held_out: float) -> dict[str, Any]:
        """Implements `DocumentReader`: names, sizes and times of change."""
        digest = hashlib.blake2b(digest_size=16)
        for path in self.paths:
            stat = os.stat(path)
            digest.update(json.dumps([path, stat.st_size, stat.st_mtime_ns]).encode())
        what = {"globs": list(self.globs), "field": self.field, "chats": self.chats}
        return {**what, "files": len(self.paths), "files_digest": digest.hexdigest()}

    def size(self) -> int | None:
        """Implements `DocumentReader`."""
        if any(path.endswith((".gz", ".zst", ".parquet")) for path in self.paths):
            return None
        return sum(os.path.getsize(path) for path in self.paths)

    def records(self, held_out: float) -> Iterator[Record]:
        """Implements `DocumentReader`.

        Raises:
            ValueError: A file cannot be read.
        """
        read = {"text": _read_text, "json": self._read_lines, "parquet": self._read_table}
        for path in self.paths:
            try:
                yield from read[_format(path)](path)
            except (OSError, EOFError) as error:  # a cut-off .gz raises EOFError
                reason = getattr(error, "strerror", None) or str(error)
                raise refuse("SOURCE", path, f"a file that can be read ({reason})") from None

    def _read_lines(self, path: str) -> Iterator[Record]:
        with _open(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
                if len(line) > LONGEST_LINE:
                    raise refuse(
                        f"{path}:{number}", f"{len(line):,} bytes or more", f"lines up to {LONGEST_LINE:,}"
                    )
                if line.strip():
                    yield Record("chat" if self.chats else "json", f"{path}:{number}", line)

    def _read_table(self, path: str) -> Iterator[Record]:
        parquet = _package("pyarrow.parquet", path)
        with parquet.ParquetFile(path) as file:
            if self.field not in file.schema_arrow.names:
                raise refuse(
                    "field", self.field, ", ".join(file.schema_arrow.names) + f", the columns of {path}"
                )
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=[self.field]):
                for value in batch.column(0):
                    place = f"{path}:{number}"
                    yield from text_records(place, read_string(f"{place}: {self.field}", value.as_py()))
                    number += 1


@dataclass(frozen=True)
class HubStream:
    """A Hugging Face dataset, read as it arrives, without a copy on the disk; needs the package `datasets`.

    Attributes:
        name: Of the dataset, or NAME:CONFIG.
        part: The split of it to read.
        field: Column of the text.
    """

    name: str
    part: str = "train"
    field: str = "text"

    prompts = False

    def facts(self, held_out: float) -> dict[str, Any]:
        """Implements `DocumentReader`."""
        return {"hf": self.name, "part": self.part, "field": self.field}

    def size(self) -> int | None:
        """Implements `DocumentReader`: unknown."""
        return None

    def records(self, held_out: float) -> Iterator[Record]:
        """Implements `DocumentReader`.

        Raises:
            ValueError: The package is missing, or the dataset has no such column.
        """
        datasets = _package("datasets", f"--hf {self.name}")
        name, _, config = self.name.partition(":")
        rows = datasets.load_dataset(name, config or None, split=self.part, streaming=True)
        for number, row in enumerate(rows):
            if self.field not in row:
                raise refuse("field", self.field, ", ".join(row))
            place = f"{self.name}:{number}"
            yield from text_records(place, read_string(f"{place}: {self.field}", row[self.field]))


@dataclass(frozen=True)
class Problems:
    """The first problems of a task, as `data.generated` draws them for the first source of a mixture.

    Attributes:
        source: What `data.generated` returned.
        count: Problems to train on.
        seed: That of the run in which they would be drawn.
    """

    source: Generated
    count: int
    seed: int = 0

    prompts = True

    def __post_init__(self) -> None:
        at_least(1, count=self.count)
        at_least(0, seed=self.seed)
        _ = self.source.task  # refuses a name that is none

    def facts(self, held_out: float) -> dict[str, Any]:
        """Implements `DocumentReader`."""
        source = self.source
        shown = {"generated": source.name, "thinking": source.thinking, "prefill": source.prefill}
        return {**shown, "distinct": source.distinct, "count": self.count, "seed": self.seed}

    def size(self) -> int | None:
        """Implements `DocumentReader`: unknown."""
        return None

    def records(self, held_out: float) -> Iterator[Record]:
        """Implements `DocumentReader`: beside `count` problems that share of more from the task's test side."""
        counts: dict[DataSplit, int] = {"train": self.count, "test": round(held_out * self.count)}
        for split, count in counts.items():
            for first in range(0, count, PROBLEMS):
                numbers = first, min(first + PROBLEMS, count)
                yield Record("problems", f"{self.source.name}:{first}", numbers, split)


def encode_record(
    record: Record, reader: DocumentReader, tokenizer: AnyTokenizer, held_out: float
) -> Iterator[tuple[DataSplit, Example]]:
    """Makes examples of a record.

    Args:
        record: What `reader` has read.
        reader: Says which field, or which problems.
        tokenizer: Encodes texts.
        held_out: Share of the documents that training never sees.

    Yields:
        The side, and the example; its `ends` is unused, as an end of text in the ids says so.

    Raises:
        ValueError: A line is broken; names the file and the line.
    """
    if record.kind == "problems":
        assert isinstance(reader, Problems) and isinstance(record.value, tuple) and record.split
        for i in range(*record.value):
            yield record.split, reader.source.example(tokenizer, i, (reader.seed, 0), record.split)
        return
    assert isinstance(record.value, (str, bytes))
    if record.kind == "chat":
        turns = read_turns(record.place, parse_json_line(record.place, record.value))
        yield side_of(json.dumps(turns), held_out), encode_turns(tokenizer, record.place, turns)
        return
    texts = [record]
    if record.kind == "json":
        assert isinstance(reader, Files)
        value = parse_json_line(record.place, record.value).get(reader.field)
        texts = text_records(record.place, read_string(f"{record.place}: {reader.field}", value))
    for text in texts:
        assert isinstance(text.value, str)
        ids = tokenizer.encode(text.value)
        yield (
            side_of(text.value, held_out),
            Example(np.array([*ids, *[tokenizer.eos] * text.ends]), 0, text.ends),
        )


def text_records(place: str, text: str | Callable[[int], str]) -> Iterator[Record]:
    """Cuts a text that is longer than `LONGEST_TEXT` behind a line, or in a line that is longer itself.

    Args:
        place: Where it was read.
        text: The text, or a function that reads a given number of characters of it.

    Yields:
        Its parts, of which the last one ends; nothing for an empty text.
    """
    read = io.StringIO(text, newline="").read if isinstance(text, str) else text
    rest = read(LONGEST_TEXT + 1)
    while len(rest) > LONGEST_TEXT:
        at = rest.rfind("\n", 0, LONGEST_TEXT) + 1 or LONGEST_TEXT
        yield Record("text", place, rest[:at], ends=False)
        rest = rest[at:] + read(at)
    if rest:
        yield Record("text", place, rest)


def _read_text(path: str) -> Iterator[Record]:
    """One file is one text."""
    with io.TextIOWrapper(_open(path), encoding="utf-8") as file:
        try:
            yield from text_records(path, file.read)
        except UnicodeDecodeError as error:
            raise refuse("SOURCE", path, f"UTF-8 text ({error.reason})") from None


def _format(path: str) -> Literal["text", "json", "parquet"]:
    """How a file is read, by its name."""
    name = path.removesuffix(".gz").removesuffix(".zst")
    if name.endswith(".parquet"):
        return "parquet"
    return "json" if name.endswith((".jsonl", ".ndjson")) else "text"


def _open(path: str) -> IO[bytes]:
    """A file as bytes, decompressed while it is read."""
    if path.endswith(".gz"):
        return gzip.open(path, "rb")  # pyright: ignore[reportReturnType]
    if path.endswith(".zst"):
        file = open(path, "rb")  # noqa: SIM115  closed by the reader
        return io.BufferedReader(_package("zstandard", path).ZstdDecompressor().stream_reader(file), 2**20)
    return open(path, "rb")


def _package(name: str, needed_by: str) -> Any:
    """Imports a package of the extra `data`, or says how to install it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        allowed = f"any, once the package `{name.partition('.')[0]}` is installed: {install.command('data')}"
        raise refuse("SOURCE", needed_by, allowed) from None
