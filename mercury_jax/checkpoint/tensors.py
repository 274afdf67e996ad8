"""Safetensors files, one array in memory at a time: the format is in `header.py`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mercury_jax.checkpoint.header import DTYPES, METADATA, MOST_HEADER, Entry, Header, parse, wrong
from mercury_jax.checkpoint.manifest import CheckpointError
from mercury_jax.config import refuse

__all__ = ["DTYPES", "Entry", "Header", "Source", "header", "parse", "read", "write"]

NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK = 64_000_000  # bytes written at a time: an array in another order is copied by as much


class Source(NamedTuple):
    """A tensor to write; `make` returns it, and is called when its turn comes."""

    name: str
    shape: Sequence[int]
    dtype: Any
    make: Callable[[], Any]


def header(path: str | Path) -> Header:
    """What a file holds, checked against its size. Raises CheckpointError; reads no tensor."""
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        if head == b"version " and size < 1024:
            allowed = "the file itself (git lfs pull)"
            raise CheckpointError(f"{path} is a Git LFS pointer; allowed: {allowed}")
        length = int.from_bytes(head, "little")
        head += file.read(length) if length <= min(MOST_HEADER, size) else b""
    return parse(head, size, path)


def read(path: str | Path, entry: Entry, rows: slice | None = None) -> np.ndarray:
    """One tensor, or the rows [a, b) of its first axis, in memory of its own.

    Not mapped: the pages of a mapped file count as this process's memory. Raises CheckpointError
    where the file ends early, ValueError for rows that the tensor lacks.
    """
    shape, skip = _part(entry, rows)
    size = math.prod(shape) * entry.dtype.itemsize
    data = _bytes(path, entry.start + skip, size)
    if entry.dtype == np.bool_ and size and data.max() > 1:
        wrong(path, "a byte of a BOOL tensor", int(data.max()), "0 or 1")
    return data.view(entry.dtype).reshape(shape)


def write(
    path: str | Path,
    arrays: Iterable[Source | tuple[str, Sequence[int], Any, Callable[[], Any]]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write (name, shape, dtype, make) tuples to a file that appears whole or not at all.

    `make` is called in the order of the file, widest types first, so that each array lies at a
    multiple of its items' size. Raises ValueError, naming the tensor, for a name that stands twice,
    a type that the format lacks, and an array that is not as announced.
    """
    path = Path(path)
    sources = in_order(arrays)
    head = _head(sources, metadata, path)
    work = path.with_name(path.name + ".tmp")
    try:
        with work.open("wb") as file:
            file.write(head)
            for source in sources:
                _put(file, source)
            file.flush()
            os.fsync(file.fileno())
        work.replace(path)
    except BaseException:
        work.unlink(missing_ok=True)
        raise


def in_order(
    arrays: Iterable[Source | tuple[str, Sequence[int], Any, Callable[[], Any]]],
) -> list[Source]:
    """The tensors in the order in which `write` asks for them: widest types first."""
    return sorted((Source(*a) for a in arrays), key=lambda source: -np.dtype(source.dtype).itemsize)


def _open(path: str | Path) -> BinaryIO:
    if not Path(path).is_file():  # a pipe would wait, a device never end
        raise CheckpointError(f"{path} is missing or not a file")
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def _part(entry: Entry, rows: slice | None) -> tuple[tuple[int, ...], int]:
    """The shape that is asked for, and how many bytes of the tensor lie before it."""
    if rows is None:
        return entry.shape, 0
    most = entry.shape[0] if entry.shape else -1
    first, last = rows.start or 0, most if rows.stop is None else rows.stop
    if rows.step not in (None, 1) or not 0 <= first <= last <= most:
        raise refuse("rows", rows, f"a slice of the first axis of shape {entry.shape}, without a step")
    rest = entry.shape[1:]
    return (last - first, *rest), first * math.prod(rest) * entry.dtype.itemsize


def _bytes(path: str | Path, start: int, size: int) -> np.ndarray:
    with _open(path) as file:
        try:
            data = np.empty(size, np.uint8)
            file.seek(start)
            got = file.readinto(data)  # pyright: ignore[reportAttributeAccessIssue]
        except MemoryError:
            raise CheckpointError(f"{path}: a tensor of {size} bytes does not fit into memory") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if got != size:
        raise CheckpointError(f"{path} is truncated: {got} bytes at {start}, its header says {size}")
    return data


def _head(sources: Sequence[Source], metadata: Mapping[str, str] | None, path: Path) -> bytes:
    about: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for name, shape, dtype, _ in sources:
        if name in about or name == METADATA:
            raise refuse("name of a tensor", name, f"each name once, and not {METADATA}")
        if np.dtype(dtype) not in NAMES:
            raise refuse(f"dtype of tensor {name!r}", str(np.dtype(dtype)), ", ".join(map(str, NAMES)))
        start, at = at, at + math.prod(shape) * np.dtype(dtype).itemsize
        about[name] = {
            "dtype": NAMES[np.dtype(dtype)],
            "shape": [*map(int, shape)],
            "data_offsets": [start, at],
        }
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    parse(head, len(head) + at, path)  # what we could not read again is not written
    return head


def _put(file: BinaryIO, source: Source) -> None:
    array = np.asarray(source.make())
    have, want = (array.dtype, array.shape), (np.dtype(source.dtype), tuple(source.shape))
    if have != want:
        raise refuse(f"tensor {source.name!r}", [str(have[0]), *have[1]], f"{[str(want[0]), *want[1]]}")
    array = np.atleast_1d(array)
    step = max(1, CHUNK // max(1, array[:1].nbytes))
    for first in range(0, len(array), step):
        part = np.ascontiguousarray(array[first : first + step])
        file.write(part.reshape(-1).view(np.uint8).data)
