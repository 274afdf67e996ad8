"""Checkpoint folders in Hugging Face's layout: downloads them, finds their files, and reads their headers.

    config.json
    model.safetensors                   or, in several files:
    model.safetensors.index.json        {"weight_map": {"name of a tensor": "name of a file"}}
    model-00001-of-00002.safetensors    ...

A folder may come from an untrusted source. No code in it is executed, and no file outside of it is read, even if an
index or a symbolic link points there. Every header is checked before its tensors are listed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mercury_jax import install
from mercury_jax.checkpoint import CheckpointError, manifest, tensors, unfit
from mercury_jax.checkpoint.tensors import TensorEntry
from mercury_jax.config import brief, refuse

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MAX_JSON = 32_000_000  # bytes of a JSON file; an index of 100,000 tensors has about 10 million
_BARE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,200}\.safetensors")
# The files that are downloaded: weights and JSON, but neither pickles nor code.
_DOWNLOADED = [
    "*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "README.md", "additional_chat_templates/*"
]  # fmt: skip


class Folder(NamedTuple):
    """A checkpoint folder with its config.json and headers, before any tensor is read.

    Attributes:
        path: The folder.
        config: Contents of config.json.
        tensors: Dtype, shape and position of each tensor, by name.
        files: The file of each tensor, by name.
        notes: Messages for the user about what was ignored.
        orders: Of tensors whose rows are stored in another order: where each row is.
        documents: Contents of tokenizer files that are in no file of their own (`hub.gguf`).
        licence: The licence, where it is in no README.md.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, Path]
    notes: list[str]
    orders: Mapping[str, np.ndarray] = MappingProxyType({})
    documents: Mapping[str, bytes] | None = None
    licence: str | None = None

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Reads one tensor."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {brief(name)}")
        if name in self.orders:
            return tensors.read(self.files[name], self.tensors[name])[self.orders[name]][rows or slice(None)]
        return tensors.read(self.files[name], self.tensors[name], rows)


# Errors of `huggingface_hub` by class -> what they mean.
_REFUSALS = {
    "GatedRepoError": "the model is gated; accept its terms on the hub, then `hf auth login`",
    "RepositoryNotFoundError": "the hub has no model of this name, or shows it only to its owner (`hf auth login`)",
    "RevisionNotFoundError": "the model has no such revision",
    "LocalEntryNotFoundError": "the hub could not be reached",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set",
}


def download(source: str) -> Path:
    """Downloads a checkpoint from the Hugging Face hub, or finds it in the cache of `huggingface_hub`."""
    name, _, revision = source.partition("@")
    try:
        import huggingface_hub
    except ImportError:
        allowed = f"a folder, or an id with the extra that fetches it: {install.command('hub')}"
        raise refuse("source", source, allowed) from None
    try:
        found = huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=_DOWNLOADED)
    except Exception as error:  # the library raises errors of whatever HTTP client it uses
        words = (
            f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
            if str(error)
            else repr(error)
        )
        names = (kind.__name__ for kind in type(error).__mro__)
        reason = next((_REFUSALS[name] for name in names if name in _REFUSALS), words)
        raise CheckpointError(
            f"source is {source!r}: there is no such folder, and from the Hugging Face hub it could not be fetched: "
            f"{reason}"
        ) from None
    return Path(found)


def scan(folder: str | Path) -> Folder:
    """Reads config.json and all headers of a checkpoint folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise unfit("folder", str(folder), f"a folder with {CONFIG} and {SINGLE}, this one does not exist")
    config, notes = read_json(folder, CONFIG), []
    if config.get("auto_map"):
        code = str(config["auto_map"])[:200]
        notes.append(f"{CONFIG}: auto_map names code to run ({code}); it is ignored, our own is used")
    return Folder(folder, config, *_find_tensors(folder), notes)


def find(folder: str | Path, name: str) -> Path | None:
    """Finds a file of a folder, and refuses a symbolic link to a file elsewhere.

    Allowed targets are files of the same folder and, in the cache of `huggingface_hub`, blobs of the same repository.
    """
    folder = Path(folder)
    path = folder / name
    if not os.path.lexists(path):
        return None
    try:
        root, real = folder.resolve(strict=True), path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # a loop was a RuntimeError until Python 3.13
        raise CheckpointError(f"{path} is a symbolic link that leads nowhere: {error}") from None
    inside = real.is_relative_to(root) or any(real.is_relative_to(r) for r in manifest.allowed_roots(root))
    if not inside:
        allowed = "a file of the folder; copy the file there to use it"
        raise CheckpointError(f"{path} is a symbolic link to {str(real)!r}; allowed: {allowed}")
    if not real.is_file():
        raise CheckpointError(f"{path} is no file")
    return real


def read_json(folder: str | Path, name: str, *, optional: bool = False) -> dict[str, Any]:
    """Reads a JSON object, and refuses duplicate keys, NaN, infinities and lone surrogates."""
    path, real = Path(folder) / name, find(folder, name)
    if real is None and optional:
        return {}
    if real is None:
        if (Path(folder) / "adapter_config.json").exists():
            raise CheckpointError(
                f"{path} is missing: the folder is an adapter; load its base with adapter= (--adapter)"
            )
        raise CheckpointError(f"{path} is missing: the folder is no checkpoint in Hugging Face's layout")
    if (size := real.stat().st_size) > MAX_JSON:
        raise unfit("size of the file", size, f"{MAX_JSON} bytes at most", path)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key stands twice")
        return dict(pairs)

    def no_constant(text: str) -> NoReturn:
        raise ValueError(f"{text} is no JSON")

    try:
        data = real.read_bytes()
        about = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=no_constant)
        if b"\\u" in data:
            json.dumps(about, ensure_ascii=False).encode()  # fails for a lone surrogate
    except RecursionError:
        raise CheckpointError(f"{path} is not readable as JSON: it is nested too deeply") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not readable as JSON: {error}") from None
    if not isinstance(about, dict):
        raise unfit("its value", about, "a JSON object", path)
    return about


def _find_tensors(folder: Path) -> tuple[dict[str, TensorEntry], dict[str, Path]]:
    """Lists the tensors and the file of each. The index must agree with the headers of the files that it names."""
    if single := find(folder, SINGLE):
        entries = tensors.header(single)
        return entries, dict.fromkeys(entries, single)
    if not find(folder, INDEX):
        names = sorted(p.name for p in folder.iterdir())
        if pickles := [n for n in names if n.lower().endswith(PICKLES)]:
            raise CheckpointError(
                f"{folder} has weights in pickle files only ({', '.join(pickles[:5])}), and reading a pickle runs "
                f"code; allowed: {SINGLE}; convert to safetensors where you trust the files"
            )
        others = [n for n in names if n.endswith(".safetensors")]
        has = f"; it has {', '.join(others[:5])}" if others else ""
        raise CheckpointError(f"{folder} has no weights; allowed: {SINGLE}, or {INDEX} and its files{has}")
    index = folder / INDEX
    weight_map = read_json(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise unfit("weight_map", weight_map, "an object of tensors and their files", index)
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _BARE_NAME.fullmatch(file):
            allowed = "the bare name of a .safetensors file in the folder"
            raise unfit(f"file of tensor {brief(name)}", file, allowed, index)
    entries, files = dict[str, TensorEntry](), dict[str, Path]()
    for file in sorted(set(weight_map.values())):
        real = find(folder, file)
        if real is None:
            raise CheckpointError(f"{folder / file} is missing: {INDEX} names it")
        for name, entry in tensors.header(real).items():
            if name in entries:
                raise unfit("tensor", name, "each tensor once; another file has it too", folder / file)
            if weight_map.get(name, file) != file:
                raise unfit("tensor", name, f"this one in {weight_map[name]}, as {INDEX} says", folder / file)
            entries[name], files[name] = entry, real
    for name, file in weight_map.items():
        if name not in entries:
            raise CheckpointError(f"{folder / file} has no tensor {brief(name)}: {INDEX} says that it has")
    return entries, files
