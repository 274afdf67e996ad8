"""The header of a safetensors file, checked before a byte behind it is trusted.

    8 bytes   n, little-endian
    n bytes   JSON: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}, then spaces
    the rest  the arrays, little-endian, row-major, back to back; offsets count from here

The format: https://github.com/huggingface/safetensors. Whatever the bytes say, the answer is entries
that tile the file, or a `CheckpointError` that names file, tensor, value and what is allowed. The
JSON is walked entry by entry, each of bounded length: parsed at once, 100 MB of `[]` become 2 GB.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import ml_dtypes
import numpy as np

from mercury_jax.checkpoint.manifest import CheckpointError

MOST_HEADER = 100_000_000  # bytes, as the format's own library has it
MOST_ENTRY, MOST_METADATA = 16_384, 16_000_000  # characters of one tensor's entry, of the metadata
MOST_AXES, MOST_BYTES = 64, 2**62  # what numpy can shape and count
METADATA = "__metadata__"
FIELDS = {"dtype", "shape", "data_offsets"}

DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in (
        *(("F64", np.float64), ("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)),
        *(("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E5M2", ml_dtypes.float8_e5m2), ("BOOL", np.bool_)),
        *(("I64", np.int64), ("I32", np.int32), ("I16", np.int16), ("I8", np.int8)),
        *(("U64", np.uint64), ("U32", np.uint32), ("U16", np.uint16), ("U8", np.uint8)),
    )
}


class Entry(NamedTuple):
    """One tensor of a file: its bytes are [start, end) of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class Header(dict[str, Entry]):
    """Entries by name, as the file orders them, and the file's metadata."""

    def __init__(self, entries: Mapping[str, Entry], metadata: Mapping[str, str]):
        super().__init__(entries)
        self.metadata = metadata


def parse(head: bytes, size: int, where: object = "safetensors") -> Header:
    """The header of a file of `size` bytes that begins with `head`: its first 8 + n bytes, or more.

    Raises CheckpointError, which begins with `where`, and nothing else.
    """
    base = 8 + _length(head, size, where)
    try:
        text = head[8:base].decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: the header is no UTF-8: {error}") from None
    entries: dict[str, Entry] = {}
    metadata: dict[str, str] | None = None
    for name, fields in _items(text, where):
        if name in entries or (name == METADATA and metadata is not None):
            wrong(where, "a name in the header", name, "each name once")
        elif name == METADATA:
            metadata = _metadata(fields, where)
        else:
            entries[name] = _entry(fields, base, size, f"{where}: tensor {brief(name)}")
    _tile(entries, base, size, where)
    return Header(entries, metadata or {})


def decode(text: str) -> Any:
    """JSON, strictly: no key twice, no NaN, no lone surrogate. Raises ValueError, and nothing else."""
    try:
        value = _DECODER.decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def wrong(where: object, field: str, value: object, allowed: str) -> NoReturn:
    """Raise in the form of `config.refuse`."""
    raise CheckpointError(f"{where}: {field} is {brief(value)}; allowed: {allowed}")


def brief(value: object) -> str:
    """As in an error: what a file made long is cut short."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_constant)
# Possessive, so that a header that fits nowhere fails in linear time.
_STRING, _SPACE = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', r"[ \t\n\r]*+"
_FLAT = rf'\{{[^{{}}"]*+(?:{_STRING}[^{{}}"]*+)*+\}}'  # an object without objects in it
_ITEM = re.compile(rf"{_SPACE}({_STRING}){_SPACE}:{_SPACE}({_FLAT}){_SPACE}(,|\}}{_SPACE}\Z)", re.DOTALL)
_EMPTY = re.compile(rf"\{{{_SPACE}\}}{_SPACE}")


def _length(head: bytes, size: int, where: object) -> int:
    length = int.from_bytes(head[:8], "little")
    if min(len(head), size) < 8:
        wrong(where, "size of the file", size, "8 bytes that give the header's length, and the header")
    if length > MOST_HEADER:
        wrong(where, "length of the header", length, f"{MOST_HEADER} bytes at most")
    if 8 + length > min(size, len(head)):
        wrong(where, "length of the header", length, f"{size - 8}, where the file ends: it is truncated")
    return length


def _items(text: str, where: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and fields of every entry."""
    if _EMPTY.fullmatch(text):
        return
    if not text.startswith("{"):
        wrong(where, "the header's first character", text[:1], "{")
    at, then = 1, ","
    while then == ",":
        found = _ITEM.match(text, at)
        if not found:
            what = 'an entry "name": {"dtype": ..., "shape": ..., "data_offsets": ...}'
            wrong(where, f"the header at character {at}", text[at : at + 80], what)
        name, fields, then = found.groups()
        size, most = len(name) + len(fields), MOST_METADATA if name == f'"{METADATA}"' else MOST_ENTRY
        if size > most:
            wrong(where, f"length of the entry at character {at}", size, f"{most} characters at most")
        try:
            yield decode(name), decode(fields)
        except ValueError as error:
            wrong(where, f"the header at character {at}", text[at : at + 80], f"JSON ({error})")
        at = found.end()


def _metadata(fields: Mapping[str, Any], where: object) -> dict[str, str]:
    for key, value in fields.items():
        if not isinstance(value, str):
            wrong(where, f"metadata {brief(key)}", value, "a string")
    return dict(fields)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST_BYTES  # True is an int by inheritance


def _entry(fields: Mapping[str, Any], base: int, size: int, where: str) -> Entry:
    if fields.keys() != FIELDS:
        wrong(where, "its list of fields", sorted(fields), "dtype, shape and data_offsets, and no other")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        wrong(where, "dtype", dtype, ", ".join(DTYPES))
    if not isinstance(shape, list) or len(shape) > MOST_AXES or not all(map(_count, shape)):
        wrong(where, "shape", shape, f"a list of at most {MOST_AXES} whole numbers, 0 or more")
    width = DTYPES[dtype].itemsize
    # An axis of 0 makes any shape empty, yet numpy counts the others all the same.
    if math.prod(max(1, n) for n in shape) * width >= MOST_BYTES:
        wrong(where, "shape", shape, f"one of less than {MOST_BYTES} bytes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_count, offsets)):
        wrong(where, "data_offsets", offsets, "a list of two whole numbers, 0 or more")
    start, end = offsets
    if end - start != (wide := math.prod(shape) * width):
        wrong(where, "data_offsets", offsets, f"numbers {wide} apart, the bytes of {dtype} {shape}")
    if base + end > size:
        wrong(where, "data_offsets", offsets, f"{size - base} at most, where the file ends: it is truncated")
    return Entry(DTYPES[dtype], tuple(shape), base + start, base + end)


def _tile(entries: Mapping[str, Entry], base: int, size: int, where: object) -> None:
    """No overlap, no gap, nothing behind the last: every byte of the data is one tensor's."""
    at = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at:
            how = "this overlaps another" if entry.start < at else "this leaves a gap"
            wrong(where, f"offset of tensor {brief(name)}", entry.start - base, f"{at - base}; {how}")
        at = entry.end
    if at != size:
        wrong(where, "size of the file", size, f"{at} bytes, where its last tensor ends")
