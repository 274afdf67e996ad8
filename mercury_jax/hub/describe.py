"""What a checkpoint is and what it needs, told from its config and its headers: no parameter is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from mercury_jax import models
from mercury_jax.checkpoint import manifest, tensors
from mercury_jax.checkpoint.export import CONFIG, PARAMS
from mercury_jax.config import ModelConfig, to_dict
from mercury_jax.hub import memory, native, reading
from mercury_jax.types import Model


def describe(folder: Path, *, native_folder: bool, mask: int | None = None) -> dict[str, Any]:
    """A record of plain values: family, sizes, ids, noise, licence, and bytes per device on 1, 2, 4 and 8 of them.

    folder: a folder, or a config.json of Hugging Face's kind alone.
    """
    return _ours(folder, mask) if native_folder else _theirs(folder, mask)


def _theirs(folder: Path, mask: int | None) -> dict[str, Any]:
    read = reading.open_config if folder.is_file() else reading.open_folder
    opened = read(folder, mask=mask)
    found = reading.card(opened)
    noise = opened.noise
    about = {
        "name": str(opened.folder.config.get("_name_or_path") or folder.resolve().stem),
        "folder": str(folder),
        "family": opened.family.name,
        "architecture": found["architecture"],
        "about": opened.family.about,
        "licence": found["licence"],
        "noise": None if noise is None else to_dict(noise),
    }
    return about | _sizes(opened.model, opened.stored) | {"notes": found["notes"]}


def _ours(folder: Path, mask: int | None) -> dict[str, Any]:
    data = manifest.read_json(folder / CONFIG)["config"]
    config = native.read_config(data, mask=mask)
    header = tensors.header(folder / PARAMS)
    kinds = [entry.dtype for entry in header.values()]
    about = {
        "name": data["name"],
        "folder": str(folder),
        "family": f"mercury_jax, {models.kind(config)}",
        "licence": data.get("card", {}).get("licence"),
        "noise": data["noise"],
        "tokenizer": data["tokenizer"],
    }
    stored = max(set(kinds), key=kinds.count)
    used = np.dtype(config.dtype) if config.dtype in ("float32", "float64") else stored
    return about | _sizes(models.build(config), used) | {"card": data.get("card", {}), "notes": []}


def _sizes(model: Model, kind: Any) -> dict[str, Any]:
    c: ModelConfig = model.config
    found = {
        "parameters": memory.parameters(model),
        "active": memory.active(model),
        "dtype": jnp.dtype(kind).name,
        "vocab": c.vocab,
        "width": c.width,
        "layers": c.layers,
        "heads": c.heads,
        "experts": None if c.experts is None else f"{c.experts.active} of {c.experts.count}",
        "pattern": c.pattern,
        "block": c.block,
        "context": c.context,
        "alignment": c.alignment,
        "timed": c.timed,
        "mask": c.mask,
        "pad": c.pad,
        "eos": [c.eos, *c.ends],
    }
    plan = {n: need._asdict() for n, need in memory.plan(model, kind).items()}
    small = {n: need.params for n, need in memory.plan(model, kind, quantise="int8").items()}
    for n, need in plan.items():
        need["params_int8"] = small[n]
    return found | {"bytes_per_device": plan, "room": memory.room_here()}
