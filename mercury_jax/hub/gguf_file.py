"""The header of a GGUF file, as llama.cpp writes it: metadata, and type, shape and position of each tensor.

    4 bytes   "GGUF"
    uint32    version, 2 or 3
    uint64    number of tensors, then of metadata entries
    entries   key, type, value; an array has the type of its items and their number, a text its number of bytes
    tensors   name, number of axes, axes (the innermost first), type, offset
    padding   to a multiple of `general.alignment`; offsets count from here

A file may come from an untrusted source. Every length is compared with what is left of the file before anything is
read, and the header may have `MAX_HEADER` bytes and `MAX_ITEMS` items. The reader of the `gguf` package checks neither:
it takes seconds for a vocabulary, and does not end if an array is said to have 2^60 items. We use the package for what
types of tensors exist and for their numbers.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mercury_jax import install
from mercury_jax.checkpoint import CheckpointError, unfit
from mercury_jax.checkpoint.tensors import MAX_ELEMENTS
from mercury_jax.config import brief, refuse
from mercury_jax.hub.quant_config import BlockType

MAX_HEADER = 64_000_000  # bytes; a vocabulary of 262,144 tokens takes about 10 million
MAX_ITEMS = 4_000_000  # of all arrays together
MAX_TEXT = 4_000_000  # bytes of one text; the largest known are chat templates of 20,000
VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GgufTensor(NamedTuple):
    """One tensor: its type, its shape with the outermost axis first, and where its bytes are."""

    kind: BlockType
    shape: tuple[int, ...]
    file: Path
    start: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) // self.kind.numbers * self.kind.nbytes


class GgufFile(NamedTuple):
    """The header of a GGUF file, or the headers of all parts of a split one."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of a GGUF file; for the first part of a split one, those of the other parts too."""
    kinds = _kinds()
    found, named = _read_part(path, kinds), _SPLIT.fullmatch(path.name)
    count = found.metadata.get("split.count", 1)
    if count in (0, 1):
        return found
    if named is None or int(named[3]) != count or int(named[2]) != 1:
        raise unfit("split.count", count, "as in the name of its first file, NAME-00001-of-00003.gguf", path)
    for number in range(2, count + 1):
        part = path.with_name(f"{named[1]}-{number:05d}-of-{count:05d}.gguf")
        more = _read_part(part, kinds).tensors
        if twice := sorted(set(more) & set(found.tensors)):
            raise unfit("tensor", twice[0], "each tensor once; another part has it too", part)
        found.tensors.update(more)
    return found


@functools.cache
def _kinds() -> Mapping[int, BlockType]:
    """The types of tensors by their number in a file: floats, and blocks that the package can dequantise."""
    try:
        import gguf
    except ImportError:
        raise refuse("source", "a GGUF file, and gguf is not installed", install.command("hub")) from None
    found = dict[int, BlockType]()
    for kind, (numbers, nbytes) in gguf.GGML_QUANT_SIZES.items():
        with contextlib.suppress(NotImplementedError):  # integers, and blocks of activations
            gguf.dequantize(np.zeros((1, nbytes), np.uint8), kind)
            found[int(kind)] = BlockType(kind.name, numbers, nbytes)
    return found


class _Header:
    """Reads values one after the other. Each read is checked against what is left of the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file, self.items = path, file, MAX_ITEMS
        self.size = path.stat().st_size
        self.left = min(self.size, MAX_HEADER)

    def take(self, count: int) -> bytes:
        """Reads bytes."""
        self.left -= count
        data = b"" if self.left < 0 else self.file.read(count)
        if len(data) < count:
            reason = (
                "truncated" if self.size <= MAX_HEADER else f"longer than {MAX_HEADER} bytes or truncated"
            )
            raise CheckpointError(f"{self.path}: its header is {reason}")
        return data

    def number(self, form: str) -> Any:
        """Reads a number, of a format of `struct`."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        """Reads a text."""
        length = self.number("Q")
        if length > MAX_TEXT:
            raise unfit("length of a text", length, f"at most {MAX_TEXT} bytes", self.path)
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: a text is no UTF-8: {error}") from None

    def value(self, kind: int) -> Any:
        """Reads a value: a text, a number, or a list of either."""
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            value = self.number(self._form(kind))
            # The shortest decimal number that rounds to this fp32 is the one that was meant: 1e-05.
            return float(str(np.float32(value))) if _SCALARS[kind] == "f" else value
        inside, count = self.number("I"), self.number("Q")
        self.items -= count
        if self.items < 0:
            raise unfit("length of an array", count, f"{MAX_ITEMS} items at most, in all arrays", self.path)
        if inside == _TEXT:
            return [self.text() for _ in range(count)]
        form = np.dtype(f"<{self._form(inside)}")
        return np.frombuffer(self.take(count * form.itemsize), form).tolist()

    def _form(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise unfit(
                "type of a value", kind, f"{', '.join(map(str, [*_SCALARS, _TEXT, _ARRAY]))}", self.path
            )
        return _SCALARS[kind]


def _read_part(path: Path, kinds: Mapping[int, BlockType]) -> GgufFile:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing or not a file")
    with path.open("rb") as file:
        header = _Header(path, file)
        if (magic := header.take(4)) != b"GGUF":
            raise unfit("first bytes", magic, "GGUF", path)
        version = header.number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            allowed = f"{', '.join(map(str, VERSIONS))}, in little-endian order"
            raise unfit("version", "big-endian" if swapped else version, allowed, path)
        count, entries = header.number("Q"), header.number("Q")
        metadata = dict[str, Any]()
        for _ in range(entries):
            key = header.text()
            if key in metadata:
                raise unfit("key", brief(key), "each key once", path)
            metadata[key] = header.value(header.number("I"))
        found = [_read_tensor(header, kinds) for _ in range(count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise unfit("general.alignment", alignment, "a power of 2", path)
        first = -(-file.tell() // alignment) * alignment
    tensors = dict[str, GgufTensor]()
    for name, tensor in found:
        tensor = tensor._replace(start=first + tensor.start)
        if name in tensors:
            raise unfit("tensor", brief(name), "each tensor once", path)
        if tensor.start + tensor.nbytes > header.size:
            raise CheckpointError(f"{path} is truncated: tensor {brief(name)} ends after the file")
        tensors[name] = tensor
    return GgufFile(metadata, tensors)


def _read_tensor(header: _Header, kinds: Mapping[int, BlockType]) -> tuple[str, GgufTensor]:
    """Reads the name of a tensor and the rest of its entry; its position counts from the first tensor's."""
    name, axes = header.text(), header.number("I")
    where = f"{header.path}: tensor {brief(name)}"
    if not 1 <= axes <= 4:
        raise unfit("axes", axes, "1 to 4", where)
    shape = tuple(header.number("Q") for _ in range(axes))[::-1]
    number, start = header.number("I"), header.number("Q")
    if number not in kinds:
        raise unfit("type", number, ", ".join(f"{n} ({kind.name})" for n, kind in kinds.items()), where)
    if math.prod(max(1, n) for n in shape) > MAX_ELEMENTS or start > header.size:
        raise unfit("shape and offset", (shape, start), f"at most {MAX_ELEMENTS} elements in the file", where)
    if shape[-1] % (kind := kinds[number]).numbers:
        raise unfit("inputs", shape[-1], f"a multiple of {kind.numbers}, the block of {kind.name}", where)
    return name, GgufTensor(kind, shape, header.path, start)
