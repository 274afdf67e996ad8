"""From a source to its documents; whatever cannot be read is refused here, by name."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from mercury_jax.config import refuse
from mercury_jax.train.data import corpus
from mercury_jax.train.data.sources import Chat, Split, Text

Messages = list[dict[str, str]]
Place = str  # where a document stands, for messages: a path, or path:line


def documents(source: Text, split: Split) -> list[tuple[Place, str]]:
    """The texts of one side, in a fixed order; empty ones are left out.

    ValueError when nothing can be read, or a line of JSONL is broken. The test side may be empty.
    """
    if source.kind == "stdlib":
        return corpus.files(split)
    found = [(place, text) for place, text in _READERS[source.kind](source) if text]
    return _side(source, split, found, [text for _, text in found])


def conversations(source: Chat, split: Split) -> list[tuple[Place, Messages]]:
    """The conversations of one side; each ends in the assistant turn that is learnt."""
    found = [(place, _messages(place, record)) for place, record in _lines(source.where)]
    return _side(source, split, found, [json.dumps(messages) for _, messages in found])


def _side(source: Text | Chat, split: Split, found: list, texts: list[str]) -> list:
    """What falls on the wanted side by a hash of its content, so that equal documents stay together."""
    if not found:
        raise refuse("glob", source.where, "files with at least one document; these are empty")
    held = [_unit(text) < source.held_out for text in texts]
    chosen = [doc for doc, test in zip(found, held) if test == (split == "test")]
    if not chosen and split == "train":
        raise refuse("held_out", source.held_out, f"a share that leaves some of {source.where!r} to train on")
    return chosen


def _unit(text: str) -> float:
    """A number in [0, 1) that is the same for this text in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


def _files(pattern: str) -> Iterator[tuple[str, str]]:
    """(path, text) of every file that the glob finds, sorted."""
    paths = sorted(glob.glob(pattern, recursive=True))
    if not paths:
        raise refuse("glob", pattern, "a glob that finds at least one file")
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                yield path, file.read()
        except IsADirectoryError:
            continue  # `**` finds folders too
        except OSError as error:
            raise refuse("glob", path, f"a file that can be read ({error.strerror})") from None
        except UnicodeDecodeError as error:
            raise refuse("glob", path, f"UTF-8 text (byte {error.start} is none)") from None


def _lines(pattern: str) -> Iterator[tuple[Place, Any]]:
    """(path:line, object) of every line that is not blank."""
    for path, text in _files(pattern):
        # Not splitlines(): U+2028 and its kin may stand inside a JSON string.
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield f"{path}:{number}", _object(f"{path}:{number}", line)


def _object(place: Place, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: no JSON: {error}; allowed: one object on each line") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place}: a {type(record).__name__}; allowed: one object on each line")
    return record


def _jsonl(source: Text) -> Iterator[tuple[Place, str]]:
    for place, record in _lines(source.where):
        yield place, _string(f"{place}: {source.field}", record.get(source.field))


def _string(name: str, value: object) -> str:
    """A text that UTF-8 can write: JSON may spell half of a surrogate pair."""
    if not isinstance(value, str):
        raise refuse(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise refuse(name, value[:40], "valid Unicode, without lone surrogates") from None
    return value


def _messages(place: Place, record: dict[str, Any]) -> Messages:
    """The conversation up to its last assistant turn, checked; of each turn only role and content."""
    messages = record.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise refuse(f"{place}: messages", messages, "a list of objects with role and content")
    turns = [{k: _string(f"{place}: {k}", m.get(k)) for k in ("role", "content")} for m in messages]
    while turns and turns[-1]["role"] != "assistant":
        turns.pop()
    if len(turns) < 2:
        raise refuse(f"{place}: messages", messages, "an assistant turn that follows another turn")
    return turns


def _hf(source: Text) -> Iterator[tuple[Place, str]]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        call = f"hf({source.where!r})"
        raise refuse("source", call, "any, once the package `datasets` is installed") from None
    table = datasets.load_dataset(source.where, split=source.part)
    if source.field not in table.column_names:
        raise refuse("field", source.field, ", ".join(table.column_names))
    for number, value in enumerate(table[source.field]):
        place = f"{source.where}:{number}"
        yield place, _string(f"{place}: {source.field}", value)


_READERS = {"text": lambda source: _files(source.where), "jsonl": _jsonl, "hf": _hf}
