"""Checkpoint folders in Hugging Face's layout: finding, reading and writing their files.

    config.json
    model.safetensors                   or, in several files:
    model.safetensors.index.json        {"weight_map": {"name of a tensor": "name of a file"}}
    model-00001-of-00002.safetensors    ...

A folder comes from the internet. Nothing in it is executed, and nothing outside of it is read, whatever an index or a
symbolic link says. Every header is checked before its tensors are listed.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mercury_jax import install
from mercury_jax.checkpoint import CheckpointError, manifest, tensors
from mercury_jax.checkpoint.tensors import LazyTensor, TensorEntry
from mercury_jax.config import refuse

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MAX_JSON = 32_000_000  # bytes of a JSON file; an index of 100,000 tensors has about 10 million
SHARD = 5_000_000_000  # bytes of tensors in one file that we write, as in transformers
_BARE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,200}\.safetensors")
# What a model needs, and nothing that could run: no pickle, no code.
_DOWNLOADED = [
    "*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "README.md", "additional_chat_templates/*"
]  # fmt: skip


class StoredTensor(NamedTuple):
    """A tensor of a folder: its file, and its place in that file."""

    file: Path
    entry: TensorEntry


class Folder(NamedTuple):
    """A checkpoint folder whose config.json and headers were read; no tensor is read yet.

    Attributes:
        path: The folder.
        config: config.json.
        tensors: Its tensors by name.
        notes: What was ignored, for the user.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]
    notes: list[str]

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Reads one tensor.

        Args:
            name: Its name.
            rows: Only these rows of the first axis. Default: all.

        Returns:
            The array, in memory of its own.

        Raises:
            CheckpointError: There is no such tensor, or its file is damaged.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {_short(name)}")
        return tensors.read(*self.tensors[name], rows)


def download(source: str) -> Path:
    """Downloads a checkpoint from the Hugging Face hub, or finds it in the cache of `huggingface_hub`.

    Args:
        source: "org/name" or "org/name@revision".

    Returns:
        The folder.

    Raises:
        ValueError: `huggingface_hub` is not installed.
        CheckpointError: The hub cannot be reached or has no such model.
    """
    name, _, revision = source.partition("@")
    try:
        import huggingface_hub
    except ImportError:
        allowed = f"a folder, or an id with the extra that fetches it: {install.command('hub')}"
        raise refuse("source", source, allowed) from None
    try:
        found = huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=_DOWNLOADED)
    except Exception as error:  # the library raises errors of whatever HTTP client it uses
        words = str(error).strip().split("\n")[0][:300]
        raise CheckpointError(
            f"source is {source!r}, and it could not be fetched ({type(error).__name__}: {words}); allowed: a folder "
            "of a saved model, or an id that the hub has, with a network"
        ) from None
    return Path(found)


def scan(folder: str | Path) -> Folder:
    """Reads config.json and all headers of a checkpoint folder.

    Args:
        folder: The folder.

    Returns:
        Its contents.

    Raises:
        CheckpointError: Names the file, and the tensor if there is one, that is missing or damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        allowed = f"a folder with {CONFIG} and {SINGLE}, this one does not exist"
        raise CheckpointError(f"folder is {str(folder)!r}; allowed: {allowed}")
    config, notes = read_json(folder, CONFIG), []
    if config.get("auto_map"):
        code = str(config["auto_map"])[:200]
        notes.append(f"{CONFIG}: auto_map names code to run ({code}); it is ignored, our own is used")
    return Folder(folder, config, _find_tensors(folder), notes)


def find(folder: str | Path, name: str) -> Path | None:
    """Finds a file of a folder.

    A symbolic link may lead to a file of the same folder or, in a snapshot of the cache of `huggingface_hub`, to a
    blob of the same repository.

    Args:
        folder: The folder.
        name: The file's name in it.

    Returns:
        The file, without symbolic links; None if there is none.

    Raises:
        CheckpointError: It is a link that leads elsewhere or nowhere, or not a file.
    """
    folder = Path(folder)
    path = folder / name
    if not os.path.lexists(path):
        return None
    try:
        root, real = folder.resolve(strict=True), path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # a loop was a RuntimeError until Python 3.13
        raise CheckpointError(f"{path} is a symbolic link that leads nowhere: {error}") from None
    if not any(real.is_relative_to(place) for place in manifest.allowed_roots(root)):
        allowed = "a file of the folder; copy the file there to use it"
        raise CheckpointError(f"{path} is a symbolic link to {str(real)!r}; allowed: {allowed}")
    if not real.is_file():
        raise CheckpointError(f"{path} is no file")
    return real


def read_json(folder: str | Path, name: str, *, optional: bool = False) -> dict[str, Any]:
    """Reads a JSON object strictly: no key twice, no NaN, no lone surrogate.

    Args:
        folder: The folder.
        name: The file's name in it.
        optional: Return {} where the file does not exist.

    Returns:
        The object.

    Raises:
        CheckpointError: The file is missing, too large, or not a JSON object.
    """
    path, real = Path(folder) / name, find(folder, name)
    if real is None and optional:
        return {}
    if real is None:
        raise CheckpointError(f"{path} is missing: the folder is no checkpoint in Hugging Face's layout")
    try:
        with real.open("rb") as file:
            data = file.read(MAX_JSON + 1)
        if len(data) > MAX_JSON:
            _wrong(path, "size of the file", real.stat().st_size, f"{MAX_JSON} bytes at most")
        about = _JSON.decode(data.decode("utf-8"))
        if b"\\u" in data:
            json.dumps(about, ensure_ascii=False).encode()  # fails for a lone surrogate
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"{path} is not readable as JSON: it is nested too deeply") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not readable as JSON: {error}") from None
    if not isinstance(about, dict):
        _wrong(path, "its value", about, "a JSON object")
    return about


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _wrong(where: object, field: str, value: object, allowed: str) -> NoReturn:
    raise CheckpointError(f"{where}: {field} is {_short(value)}; allowed: {allowed}")


def _find_tensors(folder: Path) -> dict[str, StoredTensor]:
    if single := find(folder, SINGLE):
        return {name: StoredTensor(single, entry) for name, entry in tensors.header(single).items()}
    if find(folder, INDEX):
        return _indexed_tensors(folder)
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


def _indexed_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of all files that the index names; the index must agree with their headers."""
    index = folder / INDEX
    weight_map = read_json(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _wrong(index, "weight_map", weight_map, "an object of tensors and their files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _BARE_NAME.fullmatch(file):
            allowed = "the bare name of a .safetensors file in the folder"
            _wrong(index, f"file of tensor {_short(name)}", file, allowed)
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        real = find(folder, file)
        if real is None:
            raise CheckpointError(f"{folder / file} is missing: {INDEX} names it")
        for name, entry in tensors.header(real).items():
            if name in found:
                _wrong(folder / file, "tensor", name, "each tensor once; another file has it too")
            found[name] = StoredTensor(real, entry)
            if weight_map.get(name, file) != file:
                _wrong(folder / file, "tensor", name, f"this one in {weight_map[name]}, as {INDEX} says")
    for name, file in weight_map.items():
        if name not in found:
            raise CheckpointError(f"{folder / file} has no tensor {_short(name)}: {INDEX} says that it has")
    return found


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    arrays: Iterable[LazyTensor],
    *,
    shard: int = SHARD,
    extra: Mapping[str, bytes] | None = None,
) -> Path:
    """Writes a checkpoint that transformers reads, with one tensor in memory at a time.

    The folder appears when it is complete.

    Args:
        folder: A new or empty folder.
        config: config.json.
        arrays: The tensors.
        shard: Most bytes of tensors in one file; a larger tensor has a file of its own.
        extra: Contents of other files by name, such as the tokenizer's.

    Returns:
        The folder.

    Raises:
        ValueError: The folder has files, or a tensor is not as announced.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise refuse("folder", str(folder), "a new or empty folder")
    work = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        for name, data in {CONFIG: _json_bytes(config), **(extra or {})}.items():
            _write_file(work / name, data)
        _write_shards(work, list(arrays), shard)
        manifest.sync_folder(work)
        work.rename(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return folder


def _write_shards(folder: Path, arrays: list[LazyTensor], limit: int) -> None:
    shards: list[list[LazyTensor]] = [[]]
    size = 0
    for tensor in arrays:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    count = len(shards)
    files = (
        [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)] if count > 1 else [SINGLE]
    )
    weight_map: dict[str, str] = {}
    for file, shard in zip(files, shards):
        for tensor in shard:
            if weight_map.setdefault(tensor.name, file) != file:
                raise refuse("name of a tensor", tensor.name, "each name once")
    for file, shard in zip(files, shards):
        tensors.write(folder / file, shard, {"format": "pt"})  # transformers wants to see this
    if count > 1:
        total = {
            "total_size": sum(t.nbytes for t in arrays),
            "total_parameters": sum(math.prod(t.shape) for t in arrays),
        }
        _write_file(folder / INDEX, _json_bytes({"metadata": total, "weight_map": weight_map}))


def _json_bytes(about: Mapping[str, Any]) -> bytes:
    """JSON as transformers writes it, down to the order of the keys."""
    return (json.dumps(about, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _write_file(path: Path, data: bytes) -> None:
    """Writes and flushes to the disk, so that no later rename can overtake the contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
