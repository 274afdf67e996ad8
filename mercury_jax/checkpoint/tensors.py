"""Safetensors files, read and written one tensor at a time.

    8 bytes   n, little-endian
    n bytes   JSON: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}, padded with spaces
    the rest  the tensors, little-endian, row-major, without gaps between them

The `safetensors` package parses and checks every header. This module does what the package does not:

- It limits the length of the header. The package allows 100 MB and then needs up to 20 times as much memory.
- It reads the bytes. The package's numpy interface has no fp8, and it maps the file into memory, which then counts as
  memory of this process.
- It writes one tensor at a time. The package needs all tensors of a file in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from mercury_jax.checkpoint.manifest import CheckpointError, unfit
from mercury_jax.config import refuse

MAX_HEADER = 16_000_000  # bytes, about 150,000 tensors; published files have headers below 2 MB
MAX_AXES, MAX_ELEMENTS = 64, 2**60  # limits of numpy
WRITE_CHUNK = 64_000_000  # bytes: a non-contiguous tensor is copied in pieces of this size
DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "BOOL": np.dtype(np.bool_),
    "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32), "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8),
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorEntry(NamedTuple):
    """One tensor of a file: its dtype, its shape, and the position of its first byte in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class LazyTensor(NamedTuple):
    """A tensor to write. `make` is called when it is written, and returns an array of this shape and dtype."""

    name: str
    shape: Sequence[int]
    dtype: DTypeLike
    make: Callable[[], object]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def header(path: str | Path) -> dict[str, TensorEntry]:
    """Reads and checks the header of a safetensors file, without its tensors."""
    with _open(path) as file:
        start = file.read(8)
    length = int.from_bytes(start, "little")
    if start == b"version " and Path(path).stat().st_size < 1024:
        raise CheckpointError(f"{path} is a Git LFS pointer; allowed: the file itself (git lfs pull)")
    if length > MAX_HEADER and length < Path(path).stat().st_size:
        raise unfit("length of the header", length, f"{MAX_HEADER} bytes at most", path)
    entries: dict[str, TensorEntry] = {}
    try:
        with safe_open(path, framework="numpy") as file:
            # The package has checked that the tensors fill the file without gaps, so their order gives their offsets.
            at = 8 + length
            for name in file.offset_keys():
                about, where = file.get_slice(name), f"{path}: tensor {name[:200]!r}"
                dtype, shape = about.get_dtype(), about.get_shape()
                if dtype not in DTYPES:
                    raise unfit("dtype", dtype, ", ".join(DTYPES), where)
                # numpy limits the product of the axes without zeros, even for an array that an axis of size 0 empties.
                if len(shape) > MAX_AXES or math.prod(max(1, n) for n in shape) > MAX_ELEMENTS:
                    allowed = f"at most {MAX_AXES} axes and {MAX_ELEMENTS} elements"
                    raise CheckpointError(f"{where}: shape is {str(shape)[:200]}; allowed: {allowed}")
                entries[name] = TensorEntry(DTYPES[dtype], tuple(shape), at)
                at += entries[name].nbytes
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no valid safetensors file: {str(error)[:300]}") from None
    return entries


def read(path: str | Path, entry: TensorEntry, rows: slice | None = None) -> np.ndarray:
    """Reads one tensor into newly allocated memory.

    Returns:
        The array, of shape `entry.shape` or with `stop - start` rows.
    """
    shape, start = entry.shape, entry.start
    if rows is not None:
        count = shape[0] if shape else -1
        first, last = rows.start or 0, count if rows.stop is None else rows.stop
        if rows.step not in (None, 1) or not 0 <= first <= last <= count:
            raise refuse("rows", rows, f"a slice of the first axis of shape {shape}, without a step")
        start += first * math.prod(shape[1:]) * entry.dtype.itemsize
        shape = (last - first, *shape[1:])
    size = math.prod(shape) * entry.dtype.itemsize
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
    if entry.dtype == np.bool_ and size and data.max() > 1:
        raise unfit("a byte of a BOOL tensor", int(data.max()), "0 or 1", path)
    return data.view(entry.dtype).reshape(shape)


def write(path: str | Path, tensors: Iterable[LazyTensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file with one tensor in memory at a time.

    The file is renamed into place when it is complete; after an error, an earlier file of that name is unchanged.
    """
    path, ordered = Path(path), in_order(tensors)
    about: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for tensor in ordered:
        name, dtype = tensor.name, np.dtype(tensor.dtype)
        if name in about or name == "__metadata__":
            raise refuse("name of a tensor", name, "each name once, and not __metadata__")
        if dtype not in NAMES:
            raise refuse(f"dtype of tensor {name!r}", str(dtype), ", ".join(map(str, NAMES)))
        offsets = [at, at + tensor.nbytes]
        about[name] = {"dtype": NAMES[dtype], "shape": [*map(int, tensor.shape)], "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(about, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    work = path.with_name(path.name + ".tmp")
    try:
        with work.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in ordered:
                _write_tensor(file, tensor)
            file.flush()
            os.fsync(file.fileno())
        header(work)  # never keep a file that cannot be read again
        work.replace(path)
    except BaseException:
        work.unlink(missing_ok=True)
        raise


def in_order(tensors: Iterable[LazyTensor]) -> list[LazyTensor]:
    """Sorts tensors in the order in which `write` writes them: by falling item size, otherwise as given."""
    return sorted(tensors, key=lambda tensor: -np.dtype(tensor.dtype).itemsize)


def _write_tensor(file: BinaryIO, tensor: LazyTensor) -> None:
    array = np.asarray(tensor.make())
    have, want = (array.dtype, array.shape), (np.dtype(tensor.dtype), tuple(tensor.shape))
    if have != want:
        raise refuse(f"tensor {tensor.name!r}", [str(have[0]), *have[1]], f"{[str(want[0]), *want[1]]}")
    array = np.atleast_1d(array)
    step = max(1, WRITE_CHUNK // max(1, array[:1].nbytes))
    for first in range(0, len(array), step):
        part = np.ascontiguousarray(array[first : first + step])
        file.write(part.reshape(-1).view(np.uint8).data)


def _open(path: str | Path) -> BinaryIO:
    if not Path(path).is_file():  # a pipe would block, and /dev/zero never ends
        raise CheckpointError(f"{path} is missing or not a file")
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
