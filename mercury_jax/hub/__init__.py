"""Where parameters come from: our own folders, checkpoints in Hugging Face's layout, and the hub by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from mercury_jax.checkpoint import CheckpointError, manifest
from mercury_jax.checkpoint.export import CONFIG, PARAMS
from mercury_jax.config import ModelConfig, refuse
from mercury_jax.hub import describe, families, fetch, native, reading, writing
from mercury_jax.hub.native import save
from mercury_jax.models import cache
from mercury_jax.types import LM

NANO = Path(__file__).parents[1] / "assets" / "nano"  # the embedded default, which "nano" names everywhere
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9._/-]+)?")


def load(
    source: str | Path,
    *,
    dtype: str | None = None,
    quantise: str | None = None,
    kv: str | None = None,
    mask: int | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> LM:
    """An LM from a folder of ours, one in Hugging Face's layout, or an id such as "org/name" or "org/name@revision".

    dtype, quantise, kv, mask, mesh: as of `mercury_jax.load`. Raises ValueError or CheckpointError in words, also for
    a mask that the model would not use.
    """
    cache.check_kind(kv)
    folder = folder_of(source)
    _check_mask(folder, mask)
    how: dict[str, Any] = dict(dtype=dtype, quantise=quantise, mask=mask, mesh=mesh)
    if is_native(folder):
        lm = native.load(folder, **how)
    else:
        name = str(source) if Path(source) != folder else None
        lm = reading.load(folder, **how, name=name, progress=progress)
    return dataclasses.replace(lm, model=cache.kept(lm.model, kv))


def convert(
    source: str | Path,
    out: str | Path,
    *,
    to: str = "ours",
    family: str | None = None,
    dtype: str | None = None,
    mask: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Path:
    """Write a model in the other layout: "ours" (verified by checksums) or "hf" (transformers, vLLM, SGLang).

    From "hf" to "hf" of the same family, tensors that our model does not read (a vision tower) are copied one at a
    time, as they are stored, with the checkpoint's own config.json and generation_config.json. A folder of ours and
    another family have no place for them.

    Args:
        source: A folder, or an id on the Hugging Face hub.
        out: A new folder.
        to: "ours" or "hf".
        family: With "hf", the family to write (None: the source's own, or the first that holds the model).
        dtype: Of the stored parameters (None: as they are).
        mask: The mask id, where the checkpoint does not name it.
        progress: Called with the bytes of each parameter that was loaded.

    Returns:
        The folder.

    Raises:
        ValueError: for a model that no family holds, and for arguments that are not as above.
    """
    if to not in ("ours", "hf"):
        raise refuse("to", to, "ours, hf")
    folder = folder_of(source)
    _check_mask(folder, mask)
    opened = None if is_native(folder) else reading.open_folder(folder, mask=mask)
    if opened is None:
        lm, noise = native.load(folder, mask=mask, widen=False), native.noise_of(folder)
    else:
        lm, noise = reading.load_opened(opened, progress=progress), opened.noise
    if to == "ours":
        return native.save(out, lm, noise, dtype=dtype, overwrite=False)
    if opened is not None and (family is None or families.called(family) is opened.family):
        return writing.again(out, lm, opened, dtype=dtype)
    return writing.to_hf(out, lm, family=family, dtype=dtype)


def config_of(source: str | Path, *, mask: int | None = None, **changes: Any) -> ModelConfig:
    """The config of a saved model, for a recipe that starts from it; `changes` by name.

    config_of("Qwen/Qwen3-0.6B", mask=151669, pattern="bidirectional", predicts_next=False) is a masked diffusion
    model made of an autoregressive one. ValueError for a name that the config does not have.
    """
    folder = folder_of(source)
    if is_native(folder):
        found = native.read_config(manifest.read_json(folder / CONFIG)["config"], mask=mask)
    else:
        found = reading.open_folder(folder, mask=mask).config
    names = [f.name for f in dataclasses.fields(found)]
    for name in changes:
        if name not in names:
            raise refuse("config", name, ", ".join(names))
    return dataclasses.replace(found, **({} if mask is None else {"mask": mask}), **changes)


def info(source: str | Path, *, mask: int | None = None) -> dict[str, Any]:
    """What a checkpoint is, or one of a config.json would be, and what memory it needs; nothing is loaded."""
    alone = Path(source).suffix == ".json" and Path(source).is_file()
    folder = Path(source) if alone else folder_of(source)
    _check_mask(folder, mask)
    return describe.describe(folder, native_folder=is_native(folder), mask=mask)


def takes_mask(source: str | Path, mask: int) -> bool:
    """Whether a checkpoint is one of masked diffusion, once it is told the mask id; nothing is loaded.

    False for an autoregressive model and for one whose noise has no mask. A recipe makes a diffusion model of the
    former (`config_of`).
    """
    return _takes_mask(folder_of(source), mask)


def _takes_mask(path: Path, mask: int) -> bool:
    if is_native(path):
        return native.read_config(manifest.read_json(path / CONFIG)["config"]).mask is not None
    read = reading.open_config if path.is_file() else reading.open_folder
    return read(path, mask=mask).config.mask == mask


def _check_mask(path: Path, mask: int | None) -> None:
    if mask is not None and not _takes_mask(path, mask):
        raise refuse(
            "mask", mask, "None: this model is autoregressive, or its noise has no mask. A recipe makes a masked "
            f"diffusion model of an autoregressive one: model=hub.config_of({str(path)!r}, mask={mask}, "
            "pattern='bidirectional', predicts_next=False), and mercury train --init"
        )  # fmt: skip


def is_native(folder: Path) -> bool:
    """Whether `save` wrote the folder, whatever of it may be missing now."""
    return any((folder / name).is_file() for name in (manifest.NAME, PARAMS))


def folder_of(source: str | Path) -> Path:
    """The folder that a source means; an id is fetched, or found where an earlier call left it."""
    path = Path(source)
    if path.is_dir():
        return path
    if source == NANO.name:
        return NANO
    if isinstance(source, str) and ID.fullmatch(source) and not path.exists():
        return fetch.folder(source)
    raise CheckpointError(
        f"source is {str(source)!r}; allowed: a folder of a saved model, an id such as 'org/name', or nano; "
        "this one does not exist"
    )


__all__ = ["config_of", "convert", "folder_of", "info", "is_native", "load", "save", "takes_mask"]
