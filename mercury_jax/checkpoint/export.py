"""A saved model as a plain folder, written by training and `mercury convert`; `assets/nano` is one.

    config.json         the configuration, as the caller gave it
    params.safetensors  arrays by name (`block_0/attention/q/w`)
    tokenizer.model     the tokenizer's bytes, if there is a tokenizer
    manifest.json       size and SHA-256 of every file

The format needs neither Orbax nor pickle: any safetensors reader can open the arrays. They are written and read one at
a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from numpy.typing import DTypeLike

from mercury_jax.checkpoint import manifest, tensors
from mercury_jax.checkpoint.manifest import CheckpointError, SaveFailed, unfit
from mercury_jax.checkpoint.tensors import LazyTensor, TensorEntry
from mercury_jax.config import refuse
from mercury_jax.sharding import gather, path_name, spans_processes

FORMAT = 1
CONFIG, PARAMS, TOKENIZER = "config.json", "params.safetensors", "tokenizer.model"
MAX_ERROR = 500  # bytes of the error message that process 0 sends to the others


@dataclass(frozen=True)
class Exported:
    """A folder opened by `load_exported`; `read` reads its arrays.

    Attributes:
        path: The folder.
        tensors: Dtype and shape of the stored arrays, by name.
        config: The configuration.
        tokenizer: The tokenizer's bytes, or None.
        dtype: Dtype in which floating-point arrays are returned; None: as stored.
    """

    path: Path
    tensors: Mapping[str, TensorEntry] = field(repr=False)
    config: Mapping[str, Any]
    tokenizer: bytes | None = field(default=None, repr=False)
    dtype: DTypeLike | None = None

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Reads one array.

        Returns:
            The array; in `dtype` if it has floating-point numbers.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path / PARAMS} has no array {name!r}")
        array = tensors.read(self.path / PARAMS, self.tensors[name], rows)
        floating = self.dtype is not None and jnp.issubdtype(array.dtype, jnp.floating)
        return array.astype(self.dtype, copy=False) if floating else array

    @property
    def params(self) -> dict[str, Any]:
        """All arrays as a nested dict, keyed by the parts of their paths. Each access reads the file again."""
        tree: dict[str, Any] = {}
        for name in self.tensors:
            *stems, last = name.split("/")
            place: Any = tree
            for stem in stems:
                place = place.setdefault(stem, {}) if isinstance(place, dict) else None
            if not isinstance(place, dict) or last in place:
                raise CheckpointError(f"{self.path / PARAMS}: the array {name!r} lies inside another's name")
            place[last] = self.read(name)
        return tree


def export(
    folder: str | Path,
    params: Any,
    config: Mapping[str, Any],
    dtype: DTypeLike | None = None,
    *,
    tokenizer: bytes | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a nested dict of arrays and a JSON-ready config to a folder.

    Arrays that are sharded over several processes are gathered one at a time, so every process must call this. Process
    0 writes, and the others return when the folder is complete.
    """
    folder = Path(folder)
    ordered = tensors.in_order(_lazy_tensors(params, dtype))
    if not spans_processes(params):
        _write(folder, ordered, config, tokenizer, overwrite)
        return folder
    # Gathering is a collective: process 0 must take part even after it failed to write (a full disk), or the others
    # would wait for it forever. At the end, all processes learn of the failure.
    left, error = deque(ordered), None
    if jax.process_index() == 0:
        try:
            _write(folder, [_removing(tensor, left) for tensor in ordered], config, tokenizer, overwrite)
        except Exception as found:
            error = found
    for tensor in left:
        tensor.make()
    # A collective needs arrays of the same shape on all processes, so the message is sent as bytes of a fixed length.
    text = f"{type(error).__name__}: {error}" if error else ""
    sent = np.frombuffer(text.encode()[:MAX_ERROR].ljust(MAX_ERROR), np.uint8)
    told = bytes(multihost_utils.broadcast_one_to_all(sent)).decode(errors="ignore").strip()
    if error is not None:
        raise error
    if told:
        raise SaveFailed(f"process 0 has not written {folder}: {told}")
    return folder


def _removing(tensor: LazyTensor, left: deque[LazyTensor]) -> LazyTensor:
    """Wraps the first tensor in `left` so that making it also removes it from `left`."""

    def make() -> object:
        left.popleft()
        return tensor.make()

    return tensor._replace(make=make)


def _write(
    folder: Path,
    arrays: Sequence[LazyTensor],
    config: Mapping[str, Any],
    tokenizer: bytes | None,
    overwrite: bool,
) -> None:
    """Writes the files of `export`, through a temporary folder."""
    if folder.exists() and any(folder.iterdir()):
        if not overwrite:
            raise refuse("folder", str(folder), "a new or empty folder, or overwrite=True")
        if not (folder / manifest.NAME).is_file() or not (folder / PARAMS).is_file():
            raise refuse("folder", str(folder), "a folder that an earlier export made, to overwrite it")
    try:
        with manifest.complete_folder(folder) as work:
            manifest.write_json(work / CONFIG, {"format": FORMAT, "config": config})
            tensors.write(work / PARAMS, arrays)
            if tokenizer is not None:
                (work / TOKENIZER).write_bytes(tokenizer)
            manifest.write(work)
    except OSError as error:
        raise SaveFailed(f"{folder} could not be written: {error.strerror or error}") from error


def load_exported(folder: str | Path, dtype: DTypeLike | None = None, *, verify: bool = True) -> Exported:
    """Verifies an exported folder and opens it."""
    folder = Path(folder)
    if not folder.is_dir():
        raise unfit("folder", str(folder), "a folder of a saved model, this one does not exist")
    if verify:
        manifest.verify(folder)
    for name in (CONFIG, PARAMS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing: the folder is not a saved model")
    about = manifest.read_json(folder / CONFIG)
    if about.get("format") != FORMAT:
        raise unfit("format", about.get("format"), f"{FORMAT}, by this version", folder / CONFIG)
    found, tokenizer = tensors.header(folder / PARAMS), folder / TOKENIZER
    return Exported(
        folder, found, about["config"], tokenizer.read_bytes() if tokenizer.exists() else None, dtype
    )


def _lazy_tensors(params: Any, dtype: DTypeLike | None) -> Iterator[LazyTensor]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        kind = np.dtype(dtype if dtype is not None and floating else leaf.dtype)
        yield LazyTensor(path_name(path), leaf.shape, kind, partial(_to_host, leaf, kind))


def _to_host(leaf: Any, dtype: np.dtype) -> np.ndarray:
    # A jax.Array caches its host value as long as it lives. Reading a temporary copy frees that memory with the copy.
    if not spans_processes(leaf) and isinstance(leaf, jax.Array):
        leaf = jnp.copy(leaf) if len(leaf.devices()) > 1 or jax.default_backend() != "cpu" else leaf
    return gather(leaf).astype(dtype, copy=False)
