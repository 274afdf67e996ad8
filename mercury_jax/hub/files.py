"""A checkpoint folder in Hugging Face's layout: its config.json, and where in which file each tensor lies.

    config.json
    model.safetensors                   or, in several files:
    model.safetensors.index.json        {"weight_map": {"name of a tensor": "name of a file"}}
    model-00001-of-00002.safetensors    ...

The folder comes from a stranger. Nothing in it is executed; nothing outside of it is read, whatever
an index or a symbolic link says; every header is checked before its tensors are listed.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mercury_jax.checkpoint import CheckpointError, manifest
from mercury_jax.checkpoint.header import Entry, brief, decode, wrong
from mercury_jax.checkpoint.tensors import Source, header, read, write
from mercury_jax.config import refuse

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MOST_JSON = 32_000_000  # bytes of a JSON file: an index of 100,000 tensors has about 10 million
SHARD = 5_000_000_000  # bytes of tensors in one file that we write, as transformers has it
FORMAT = {"format": "pt"}  # some versions of transformers refuse a file that does not say so
_BARE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,200}\.safetensors")


class Place(NamedTuple):
    """Where a tensor lies."""

    file: Path
    entry: Entry


class Folder(NamedTuple):
    """A folder that was looked through; no tensor is read yet."""

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, Place]
    notes: list[str]

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """One tensor, or some rows of its first axis, from the file into memory of its own."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {brief(name)}")
        return read(*self.tensors[name], rows)


def scan(folder: str | Path) -> Folder:
    """Look through a checkpoint folder. Raises CheckpointError, naming file and tensor."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"folder is {str(folder)!r}; allowed: a folder with {CONFIG} and {SINGLE}, this one does not exist"
        )
    config = read_json(folder, CONFIG)
    return Folder(folder, config, _tensors(folder), _notes(config))


def find(folder: str | Path, name: str) -> Path | None:
    """The file `name` of the folder, or None where there is none.

    A symbolic link may lead to a file of the same folder, or, where the folder is a snapshot in
    Hugging Face's cache, to a blob of the same repository; any other is refused.
    """
    folder = Path(folder)
    path = folder / name
    if not os.path.lexists(path):
        return None
    try:
        root, real = folder.resolve(strict=True), path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # a loop was a RuntimeError until Python 3.13
        raise CheckpointError(f"{path} is a symbolic link that leads nowhere: {error}") from None
    if not any(real.is_relative_to(place) for place in manifest.places(root)):
        where = "a file of the folder; copy the file there to use it"
        raise CheckpointError(f"{path} is a symbolic link to {str(real)!r}; allowed: {where}")
    if not real.is_file():
        raise CheckpointError(f"{path} is no file")
    return real


def read_json(folder: str | Path, name: str) -> dict[str, Any]:
    """The object in a JSON file of the folder, which must be there. Raises CheckpointError."""
    path, real = Path(folder) / name, find(folder, name)
    if real is None:
        raise CheckpointError(f"{path} is missing: the folder is no checkpoint in Hugging Face's layout")
    try:
        with real.open("rb") as file:
            data = file.read(MOST_JSON + 1)
        if len(data) > MOST_JSON:
            wrong(path, "size of the file", real.stat().st_size, f"{MOST_JSON} bytes at most")
        about = decode(data.decode("utf-8"))
    except CheckpointError:
        raise
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not readable as JSON: {error}") from None
    if not isinstance(about, dict):
        wrong(path, "its value", about, "a JSON object")
    return about


def _notes(config: Mapping[str, Any]) -> list[str]:
    if not config.get("auto_map"):
        return []
    return [
        f"{CONFIG}: auto_map names code to run ({str(config['auto_map'])[:200]}); it is ignored, our own is used"
    ]


def _tensors(folder: Path) -> dict[str, Place]:
    if single := find(folder, SINGLE):
        return {name: Place(single, entry) for name, entry in header(single).items()}
    if find(folder, INDEX):
        return _indexed(folder)
    names = sorted(p.name for p in folder.iterdir())
    pickles = [n for n in names if n.lower().endswith(PICKLES)]
    if pickles:
        raise CheckpointError(
            f"{folder} has weights in pickle files only ({', '.join(pickles[:5])}), and reading a pickle runs code; "
            f"allowed: {SINGLE}; convert to safetensors where you trust the files"
        )
    others = [n for n in names if n.endswith(".safetensors")]
    has = f"; it has {', '.join(others[:5])}" if others else ""
    raise CheckpointError(f"{folder} has no weights; allowed: {SINGLE}, or {INDEX} and its files{has}")


def _indexed(folder: Path) -> dict[str, Place]:
    """The tensors of all files that the index names; the index must agree with their headers."""
    index = folder / INDEX
    where = read_json(folder, INDEX).get("weight_map")
    if not isinstance(where, dict) or not where:
        wrong(index, "weight_map", where, "an object of tensors and their files")
    for name, file in where.items():
        if not isinstance(file, str) or not _BARE.fullmatch(file):
            wrong(
                index,
                f"file of tensor {brief(name)}",
                file,
                "the bare name of a .safetensors file in the folder",
            )
    found: dict[str, Place] = {}
    for file in sorted(set(where.values())):
        real = find(folder, file)
        if real is None:
            raise CheckpointError(f"{folder / file} is missing: {INDEX} names it")
        for name, entry in header(real).items():
            if name in found:
                wrong(folder / file, "tensor", name, "each tensor once; another file has it too")
            found[name] = Place(real, entry)
            if where.get(name, file) != file:
                wrong(folder / file, "tensor", name, f"this one in {where[name]}, as {INDEX} says")
    for name, file in where.items():
        if name not in found:
            raise CheckpointError(f"{folder / file} has no tensor {brief(name)}: {INDEX} says that it has")
    return found


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    arrays: Iterable[Source],
    *,
    shard: int = SHARD,
    extra: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a checkpoint that transformers reads, one array in memory at a time; returns its path.

    arrays: as `checkpoint.tensors.write` takes them. shard: most bytes of tensors in one file (a
    bigger tensor has a file of its own). extra: other files by name (the tokenizer's). The folder
    appears whole or not at all; one that has files is refused.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise refuse("folder", str(folder), "a new or empty folder")
    work = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        for name, data in {CONFIG: _json(config), **(extra or {})}.items():
            _put(work / name, data)
        _write_shards(work, list(_split((Source(*a) for a in arrays), shard)))
        manifest.sync_folder(work)
        work.rename(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return folder


def _size(source: Source) -> int:
    return math.prod(source.shape) * np.dtype(source.dtype).itemsize


def _split(sources: Iterable[Source], most: int) -> Iterator[list[Source]]:
    part: list[Source] = []
    size = 0
    for source in sources:
        if part and size + _size(source) > most:
            yield part
            part, size = [], 0
        part.append(source)
        size += _size(source)
    yield part


def _write_shards(folder: Path, parts: Sequence[Sequence[Source]]) -> None:
    files = [f"model-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, len(parts) + 1)]
    where: dict[str, str] = {}
    for file, part in zip(files, parts):
        for source in part:
            if where.setdefault(source.name, file) != file:
                raise refuse("name of a tensor", source.name, "each name once")
    for file, part in zip(files, parts):
        write(folder / (file if len(parts) > 1 else SINGLE), part, FORMAT)
    if len(parts) > 1:
        sources = [s for part in parts for s in part]
        total = {
            "total_size": sum(map(_size, sources)),
            "total_parameters": sum(math.prod(s.shape) for s in sources),
        }
        _put(folder / INDEX, _json({"metadata": total, "weight_map": where}))


def _json(about: Mapping[str, Any]) -> bytes:
    """As transformers writes it, down to the order of the keys."""
    return (json.dumps(about, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _put(path: Path, data: bytes) -> None:
    """Write and flush to the disk: a rename must never overtake the contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
