"""A saved model as a small plain folder: what `assets/nano` is, and what any saved LM is.

    config.json         the configuration, as the caller gave it
    params.safetensors  arrays by name (`block_0/attention/q/w`)
    tokenizer.model     the tokenizer's bytes, where one was given
    manifest.json       size and SHA-256 of every file

No Orbax, no pickle: any reader of safetensors reads it. Arrays are written and read one at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from mercury_jax.checkpoint import manifest, tensors
from mercury_jax.checkpoint.header import Entry
from mercury_jax.checkpoint.manifest import CheckpointError
from mercury_jax.config import refuse
from mercury_jax.sharding import gather, path_name, spans_processes

FORMAT = 1
CONFIG, PARAMS, TOKENIZER = "config.json", "params.safetensors", "tokenizer.model"


@dataclass(frozen=True)
class Exported:
    """A verified folder: the config, the tokenizer's bytes, and its arrays, each read when asked for."""

    path: Path
    tensors: Mapping[str, Entry] = field(repr=False)  # what is stored, by name
    config: Mapping[str, Any]
    tokenizer: bytes | None = field(default=None, repr=False)
    dtype: Any = None

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """One array, or rows of its first axis; floating numbers in the dtype that was asked for."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path / PARAMS} has no array {name!r}")
        return _cast(tensors.read(self.path / PARAMS, self.tensors[name], rows), self.dtype)

    @property
    def params(self) -> dict[str, Any]:
        """All arrays in a nested dict, by the parts of their names; each access reads them anew."""
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
    dtype: Any = None,
    *,
    tokenizer: bytes | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a nested dict of arrays and a JSON-ready config to `folder`.

    Arrays that are split over several processes are gathered one at a time, so every process must call this; process 0
    writes, and the others return when the folder is complete.

    Args:
        folder: Where to; its parents are made.
        params: Nested dict of arrays.
        config: Written as JSON.
        dtype: Floating arrays are stored so (None: as they are).
        tokenizer: The tokenizer's bytes.
        overwrite: Replace an earlier export, once the new one is complete. What is no export stays.

    Returns:
        The folder.

    Raises:
        ValueError: The folder is not empty, and not an export that may be replaced.
    """
    folder = Path(folder)
    shared = spans_processes(params)
    if shared and jax.process_index():
        for source in tensors.in_order(_sources(params, dtype)):
            source.make()  # takes part in gathering it
    else:
        _write(folder, params, config, dtype, tokenizer, overwrite)
    if shared:
        multihost_utils.sync_global_devices("export")
    return folder


def _write(
    folder: Path, params: Any, config: Mapping[str, Any], dtype: Any, tokenizer: bytes | None, overwrite: bool
) -> None:
    if folder.exists() and any(folder.iterdir()):
        if not overwrite:
            raise refuse("folder", str(folder), "a new or empty folder, or overwrite=True")
        if not (folder / manifest.NAME).is_file() or not (folder / PARAMS).is_file():
            raise refuse("folder", str(folder), "a folder that an earlier export made, to overwrite it")
    work = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    manifest.write_json(work / CONFIG, {"format": FORMAT, "config": config})
    tensors.write(work / PARAMS, _sources(params, dtype))
    if tokenizer is not None:
        (work / TOKENIZER).write_bytes(tokenizer)
    manifest.write(work)
    _replace(work, folder)


def load_exported(folder: str | Path, dtype: Any = None) -> Exported:
    """Open an exported folder after verifying it; floating arrays as `dtype` (default: as stored).

    Every byte is summed up, none is kept: `Exported.read` reads an array. Raises CheckpointError
    naming the file that is missing, truncated or changed.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"folder is {str(folder)!r}; allowed: a folder of a saved model, this one does not exist"
        )
    manifest.verify(folder)
    for name in (CONFIG, PARAMS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing: the folder is not a saved model")
    about = manifest.read_json(folder / CONFIG)
    if about.get("format") != FORMAT:
        allowed = f"{FORMAT}, by this version"
        raise CheckpointError(f"{folder / CONFIG}: {refuse('format', about.get('format'), allowed)}")
    tokenizer = folder / TOKENIZER
    return Exported(
        folder,
        tensors.header(folder / PARAMS),
        about["config"],
        tokenizer.read_bytes() if tokenizer.exists() else None,
        dtype,
    )


def _sources(params: Any, dtype: Any) -> Iterator[tensors.Source]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        kind = np.dtype(dtype if dtype is not None and floating else leaf.dtype)
        yield tensors.Source(path_name(path), leaf.shape, kind, partial(_host, leaf, dtype))


def _host(leaf: Any, dtype: Any) -> np.ndarray:
    # An array keeps what the host has seen of it for as long as it lives. A copy takes that along.
    if not spans_processes(leaf) and isinstance(leaf, jax.Array):
        leaf = jnp.copy(leaf) if len(leaf.devices()) > 1 or jax.default_backend() != "cpu" else leaf
    return _cast(gather(leaf), dtype)


def _cast(array: np.ndarray, dtype: Any) -> np.ndarray:
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    return array.astype(dtype, copy=False) if dtype is not None and floating else array


def _replace(work: Path, folder: Path) -> None:
    """Put `work` in the place of `folder`, which is moved aside first and removed last."""
    old = folder.with_name(folder.name + ".old.tmp")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    work.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
