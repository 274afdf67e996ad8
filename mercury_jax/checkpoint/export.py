"""A saved model as a small plain folder: what `assets/nano` is, and what any saved LM is.

    config.json      the configuration, as the caller gave it
    params.npz       arrays by name (`block_0/attention/q/w`); bfloat16 as its bits in uint16
    tokenizer.model  the tokenizer's bytes, where one was given
    manifest.json    size and SHA-256 of every file

No Orbax, no pickle: numpy alone reads it.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax.checkpoint import manifest
from mercury_jax.checkpoint.manifest import CheckpointError
from mercury_jax.config import refuse
from mercury_jax.sharding import name_of

FORMAT = 1
CONFIG, PARAMS, TOKENIZER = "config.json", "params.npz", "tokenizer.model"
BITS = ".bfloat16"  # suffix of an array whose uint16 values are bfloat16 bits: npz knows no bfloat16


@dataclass(frozen=True)
class Exported:
    """What `load_exported` read: numpy params in a nested dict, the config, the tokenizer's bytes."""

    params: Any = field(repr=False)
    config: Mapping[str, Any]
    tokenizer: bytes | None = field(default=None, repr=False)


def export(
    folder: str | Path,
    params: Any,
    config: Mapping[str, Any],
    dtype: Any = None,
    *,
    tokenizer: bytes | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a nested dict of arrays and a JSON-ready config to `folder`; returns its path.

    dtype: floating arrays are stored so (default: as they are). A folder that exists is refused,
    or with `overwrite` replaced once the new one is complete; one that is no export stays.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        if not overwrite:
            raise refuse("folder", str(folder), "a new or empty folder, or overwrite=True")
        if not (folder / manifest.NAME).is_file() or not (folder / PARAMS).is_file():
            raise refuse("folder", str(folder), "a folder that an earlier export made, to overwrite it")
    work = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    manifest.write_json(work / CONFIG, {"format": FORMAT, "config": config})
    np.savez(work / PARAMS, **_pack(params, dtype))  # pyright: ignore[reportArgumentType]
    if tokenizer is not None:
        (work / TOKENIZER).write_bytes(tokenizer)
    manifest.write(work)
    _replace(work, folder)
    return folder


def load_exported(folder: str | Path, dtype: Any = None) -> Exported:
    """Read an exported folder after verifying it; floating arrays as `dtype` (default: as stored).

    Raises CheckpointError naming the file that is missing, truncated or changed.
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
        _unpack(folder / PARAMS, dtype),
        about["config"],
        tokenizer.read_bytes() if tokenizer.exists() else None,
    )


def _pack(params: Any, dtype: Any) -> dict[str, np.ndarray]:
    packed = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        array = _cast(np.asarray(leaf), dtype)
        if array.dtype == jnp.bfloat16:
            packed[name_of(path) + BITS] = array.view(np.uint16)
        else:
            packed[name_of(path)] = array
    return packed


def _unpack(path: Path, dtype: Any) -> dict[str, Any]:
    params: dict[str, Any] = {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for name in arrays.files:
                array = arrays[name]
                if name.endswith(BITS):
                    name, array = name.removesuffix(BITS), array.view(jnp.bfloat16)
                *folders, last = name.split("/")
                place = params
                for part in folders:
                    place = place.setdefault(part, {})
                place[last] = _cast(array, dtype)
    except (ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is not readable as plain arrays: {error}") from None
    return params


def _cast(array: np.ndarray, dtype: Any) -> np.ndarray:
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    return array.astype(dtype) if dtype is not None and floating else array


def _replace(work: Path, folder: Path) -> None:
    """Put `work` in the place of `folder`, which is moved aside first and removed last."""
    old = folder.with_name(folder.name + ".old.tmp")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    work.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
