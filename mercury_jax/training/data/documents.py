"""Reading the documents of a corpus, from files of any size in bounded memory, for `mercury data pack` and `chats`.

    Files(("books/*.txt", "web/*.jsonl.gz"))   text files, JSONL, Parquet, plain or compressed
    HubStream("org/name")                      a Hugging Face dataset, streamed
    Files(("chats.jsonl",), chats=True)        conversations, of any form that `conversations` knows
    Problems(generated("add3"), 100_000)       the problems of a task

Each reader yields `records()` in a fixed order. A record is a raw line or text. Parsing and tokenising take most of the
time, so they happen in the worker processes of `shard_writer.py`, which call `encode_record`.
"""

from __future__ import annotations

import codecs
import functools
import gzip
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mercury_jax import install
from mercury_jax.config import NonNegativeInt, PositiveInt, check_fields, refuse
from mercury_jax.tasks.task import parse_json_line
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.training.data.conversations import (
    KEYS,
    BadLines,
    Turns,
    encode_conversation,
    read_conversation,
    read_string,
)
from mercury_jax.training.data.packing import DataSplit, Example
from mercury_jax.training.data.sources import Generated, find_paths, side_of, without_links

LONGEST_TEXT = 2**20  # characters; a longer text is cut after a line, and each part becomes a document
LONGEST_LINE = 2**26  # largest number of bytes of a line of JSONL
BAD_LINE = b"a line that cannot be read"  # stands for a line that `bad_lines="skip"` counts
DECODERS = ("zlib", "zstd", "zstandard", "pyarrow")  # packages whose errors mean a damaged file
PROBLEMS = 256  # problems per record


class Record(NamedTuple):
    """A unit of reading.

    Attributes:
        place: Where it was read, path:line, for messages.
        value: A text; a line of JSON with a text or a conversation, as bytes; or a range of problem numbers.
        split: The side of problems; "" if a hash of the text decides.
        ends: Whether the text ends with this record; otherwise the next record continues it.
    """

    place: str
    value: str | bytes | range
    split: DataSplit | Literal[""] = ""
    ends: bool = True


@runtime_checkable
class DocumentReader(Protocol):
    """A reader of a corpus."""

    @property
    def prompts(self) -> bool:
        """Whether documents have a prompt; such documents are never cut."""
        ...

    def facts(self) -> dict[str, Any]:
        """Describes everything that the records depend on, for JSON: a pack continues only if it is unchanged."""
        ...

    def size(self) -> int | None:
        """Returns the bytes of all records, for a progress bar; None if unknown."""
        ...

    def records(self, held_out: float) -> Iterator[Record]:
        """Reads the corpus.

        Args:
            held_out: Share of the documents that are held out.

        Returns:
            The records, always in the same order.

        Raises:
            ValueError: A file cannot be read. The message names it.
        """
        ...


@dataclass(frozen=True)
class Files:
    """Text files, JSONL (.jsonl), Parquet (.parquet), also compressed (.gz, .zst).

    Attributes:
        globs: Globs of paths; `**` descends into folders.
        field: Key or column of the text.
        chats: The lines and rows are conversations; a file .json is then a list of them.
        turns: The assistant turns of a conversation that are trained on.
        bad_lines: What happens to a line or row without a text or conversation: "stop" with an error that names it, or
            "skip" and count it.
    """

    globs: tuple[str, ...]
    field: str = "text"
    chats: bool = False
    turns: Turns = "last"
    bad_lines: BadLines = "stop"

    @property
    def prompts(self) -> bool:
        """Implements `DocumentReader`."""
        return self.chats

    @functools.cached_property
    def paths(self) -> list[str]:
        """The files, sorted within each glob."""
        return without_links([path for pattern in self.globs for path in find_paths(pattern)])

    def facts(self) -> dict[str, Any]:
        """Implements `DocumentReader`, with a digest of names, sizes and modification times."""
        # Hashing the contents would read the whole corpus once more.
        digest = hashlib.blake2b(digest_size=16)
        for path in self.paths:
            stat = os.stat(path)
            digest.update(json.dumps([path, stat.st_size, stat.st_mtime_ns]).encode())
        what = {"globs": list(self.globs), "field": self.field, "chats": self.chats}
        what |= {"bad_lines": self.bad_lines} if self.bad_lines != "stop" else {}
        what |= {"turns": self.turns} if self.turns != "last" else {}
        return {**what, "files": len(self.paths), "files_digest": digest.hexdigest()}

    def size(self) -> int | None:
        """Implements `DocumentReader`."""
        if any(path.endswith((".gz", ".zst", ".parquet")) for path in self.paths):
            return None  # the size on the disk says little about the size of the text
        return sum(os.path.getsize(path) for path in self.paths)

    def records(self, held_out: float) -> Iterator[Record]:
        """Implements `DocumentReader`."""
        read = {
            "text": _read_text,
            "lines": self._read_lines,
            "parquet": self._read_table,
            "list": _read_list,
        }
        for path in self.paths:
            try:
                yield from read[self._format(path)](path)
            except Exception as error:
                # A cut-off file raises EOFError, a damaged one an error of the package that reads its format.
                package = type(error).__module__.partition(".")[0]
                if not isinstance(error, OSError | EOFError) and package not in DECODERS:
                    raise
                reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
                raise refuse("SOURCE", path, f"a file that can be read ({reason})") from None

    def _format(self, path: str) -> Literal["text", "lines", "list", "parquet"]:
        """Decides by its name how a file is read."""
        name = path.removesuffix(".gz").removesuffix(".zst")
        if name.endswith(".parquet"):
            return "parquet"
        if self.chats and path.endswith(".json"):
            return "list"
        return "lines" if self.chats or name.endswith((".jsonl", ".ndjson")) else "text"

    def _read_lines(self, path: str) -> Iterator[Record]:
        # `readline` with a limit: a file without line breaks would otherwise be read into memory as one line.
        with _open(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
                if len(line) > LONGEST_LINE and self.bad_lines == "skip":
                    while not line.endswith(b"\n") and (line := file.readline(LONGEST_LINE)):
                        pass
                    line = BAD_LINE
                if len(line) > LONGEST_LINE:
                    allowed = f"lines up to {LONGEST_LINE:,}"
                    raise refuse(f"{path}:{number}", f"{len(line):,} bytes or more", allowed)
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield Record(f"{path}:{number}", line)

    def _read_table(self, path: str) -> Iterator[Record]:
        parquet = _package("pyarrow.parquet", path)
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if not self.chats and self.field not in names:
                raise refuse("field", self.field, ", ".join(names) + f", the columns of {path}")
            wanted = [name for name in names if name in KEYS] if self.chats else [self.field]
            batches = file.iter_batches(batch_size=256, columns=wanted or None)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows):
                place = f"{path}:{number}"
                if self.chats:
                    yield _row_record(place, row)
                else:
                    yield from _row_texts(place, row, self)


@dataclass(frozen=True)
class HubStream:
    """A Hugging Face dataset, streamed without a copy on the disk; needs the package `datasets`.

    Attributes:
        name: Name of the dataset, NAME:CONFIG, or a folder that `Dataset.save_to_disk` has written.
        part: Split of the dataset.
        field: Column of the text.
        chats: The rows are conversations.
        turns: The assistant turns of a conversation that are trained on.
        bad_lines: What happens to a row without a text or conversation: "stop" with an error, or "skip" and count it.
    """

    name: str
    part: str = "train"
    field: str = "text"
    chats: bool = False
    turns: Turns = "last"
    bad_lines: BadLines = "stop"

    @property
    def prompts(self) -> bool:
        """Implements `DocumentReader`."""
        return self.chats

    def facts(self) -> dict[str, Any]:
        """Implements `DocumentReader`."""
        facts = {"hf": self.name, "part": self.part, "field": self.field}
        facts |= {"bad_lines": self.bad_lines} if self.bad_lines != "stop" else {}
        return facts | {"turns": self.turns} if self.chats else facts

    def size(self) -> int | None:
        """Implements `DocumentReader`: unknown."""
        return None

    def records(self, held_out: float) -> Iterator[Record]:
        """Implements `DocumentReader`."""
        datasets = _package("datasets", f"--hf {self.name}")
        for number, row in enumerate(self._rows(datasets)):
            place = f"{self.name}:{number}"
            if self.chats:
                yield _row_record(place, row)
                continue
            if self.field not in row:
                raise refuse("field", self.field, ", ".join(row))
            yield from _row_texts(place, row, self)

    def _rows(self, datasets: Any) -> Iterable[Any]:
        saved = [
            os.path.exists(os.path.join(self.name, name)) for name in ("state.json", "dataset_dict.json")
        ]
        name, _, config = self.name.partition(":")
        try:
            if not any(saved):
                return datasets.load_dataset(name, config or None, split=self.part, streaming=True)
            rows = datasets.load_from_disk(self.name)
        except Exception as error:  # of the package, the network or the file system
            reason = str(error).split("\n")[0]
            raise refuse("SOURCE", self.name, f"a dataset that can be read ({reason})") from None
        if isinstance(rows, Mapping) and self.part not in rows:
            raise refuse("part", self.part, ", ".join(rows))
        return rows[self.part] if isinstance(rows, Mapping) else rows


@dataclass(frozen=True)
class Problems:
    """The first problems of a task, as `data.generated` draws them for the first source of a mixture.

    Attributes:
        source: The source, from `data.generated`.
        count: Number of problems to train on.
        seed: Seed of the training run that would draw the same problems.
    """

    source: Generated
    count: PositiveInt
    seed: NonNegativeInt = 0

    prompts = True

    def __post_init__(self) -> None:
        check_fields(self)

    def facts(self) -> dict[str, Any]:
        """Implements `DocumentReader`."""
        source = self.source
        shown = {"generated": source.name, "thinking": source.thinking, "prefill": source.prefill}
        return {**shown, "distinct": source.distinct, "count": self.count, "seed": self.seed}

    def size(self) -> int | None:
        """Implements `DocumentReader`: unknown."""
        return None

    def records(self, held_out: float) -> Iterator[Record]:
        """Implements `DocumentReader`: `count` problems, then `held_out * count` more from the task's test side."""
        counts: dict[DataSplit, int] = {"train": self.count, "test": round(held_out * self.count)}
        for split, count in counts.items():
            for first in range(0, count, PROBLEMS):
                numbers = range(first, min(first + PROBLEMS, count))
                yield Record(f"{self.source.name}:{first}", numbers, split)


def encode_record(
    record: Record, reader: DocumentReader, tokenizer: AnyTokenizer, held_out: float
) -> Iterator[tuple[DataSplit, Example]]:
    """Makes examples from a record."""
    if isinstance(record.value, range):
        assert isinstance(reader, Problems) and record.split
        for i in record.value:
            yield record.split, reader.source.example(tokenizer, i, (reader.seed, 0), record.split)
        return
    texts = [record]
    if isinstance(record.value, bytes):
        assert isinstance(reader, Files | HubStream)
        values = parse_json_line(record.place, record.value)
        if reader.chats:
            conversation = read_conversation(record.place, values)
            side = side_of(conversation.text, held_out)
            for example in encode_conversation(tokenizer, record.place, conversation, reader.turns):
                yield side, example
            return
        text = read_string(f"{record.place}: {reader.field}", values.get(reader.field))
        texts = text_records(record.place, text)
    for part in texts:
        assert isinstance(part.value, str)
        ids = np.array([*tokenizer.encode(part.value), *[tokenizer.eos] * part.ends])
        yield side_of(part.value, held_out), Example(ids, 0, part.ends)


def text_records(place: str, text: str | Callable[[int], str]) -> Iterator[Record]:
    """Splits a text into parts of at most `LONGEST_TEXT` characters, after a line break if there is one."""
    # One character more than a part is read, to know whether the text continues.
    read = io.StringIO(text, newline="").read if isinstance(text, str) else text
    rest = read(LONGEST_TEXT + 1)
    while len(rest) > LONGEST_TEXT:
        at = rest.rfind("\n", 0, LONGEST_TEXT) + 1 or LONGEST_TEXT
        yield Record(place, rest[:at], ends=False)
        rest = rest[at:] + read(at)
    if rest:
        yield Record(place, rest)


def _row_record(place: str, row: Any) -> Record:
    """Makes a record of a row with a conversation; values that JSON does not have become text."""
    return Record(place, json.dumps(row, default=str).encode())


def _row_texts(place: str, row: Mapping[str, Any], reader: Files | HubStream) -> Iterator[Record]:
    """Makes the records of the text of a row."""
    if row[reader.field] is None and reader.bad_lines == "skip":
        yield Record(place, BAD_LINE)
    else:
        yield from text_records(place, read_string(f"{place}: {reader.field}", row[reader.field]))


def _read_list(path: str) -> Iterator[Record]:
    """Reads a file that is one JSON list of objects."""
    try:
        rows = json.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise refuse("SOURCE", path, f"a JSON list of conversations ({error})") from None
    if not isinstance(rows, list):
        raise refuse(
            "SOURCE", path, "a JSON list of conversations; a file with one in each line ends in .jsonl"
        )
    yield from (_row_record(f"{path}[{number}]", row) for number, row in enumerate(rows))


def _read_text(path: str) -> Iterator[Record]:
    """Reads a file that is one text."""
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig") as file:
        try:
            yield from text_records(path, file.read)
        except UnicodeDecodeError as error:
            raise refuse("SOURCE", path, f"UTF-8 text ({error.reason})") from None


def _open(path: str) -> IO[bytes]:
    """Opens a file as a stream of bytes, decompressed while it is read."""
    if path.endswith(".gz"):
        return gzip.open(path, "rb")  # pyright: ignore[reportReturnType]
    if path.endswith(".zst"):
        return io.BufferedReader(_Parts(_decompressed(path)), 2**20)
    return open(path, "rb")


class _Parts(io.RawIOBase):
    """A file of the bytes of an iterator."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts, self._rest = parts, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._rest = part
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _decompressed(path: str) -> Iterator[bytes]:
    """Decompresses all frames of a .zst file; the package's `stream_reader` does not notice that a file is cut off."""
    make = _package("zstandard", path).ZstdDecompressor()
    with open(path, "rb") as file:
        frame = None
        for data in iter(lambda: file.read(2**17), b""):
            while data:
                frame = frame or make.decompressobj()
                yield frame.decompress(data)
                data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        if frame is not None:
            raise EOFError("it is cut off")


def _package(name: str, needed_by: str) -> Any:
    """Imports a package of the extra `data`; an error says how to install it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        allowed = f"any, once the package `{name.partition('.')[0]}` is installed: {install.command('data')}"
        raise refuse("SOURCE", needed_by, allowed) from None
