"""What a checkpoint is and what memory it needs, from its config and headers: no parameter is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax import models
from mercury_jax.checkpoint import manifest, tensors
from mercury_jax.checkpoint.export import CONFIG, PARAMS
from mercury_jax.config import to_dict
from mercury_jax.hub.load import check_mask, folder_of, is_native, native_config, open_config, open_folder
from mercury_jax.hub.params import count_parameters, free_memory, memory_plan
from mercury_jax.types import Model


def info(source: str | Path, *, mask: int | None = None) -> dict[str, Any]:
    """Describes a checkpoint, or what a config.json alone would be; nothing is loaded.

    Args:
        source: A folder, an id on the Hugging Face hub, or a config.json in Hugging Face's form.
        mask: The mask id, where the checkpoint does not name it.

    Returns:
        JSON-ready values: family, sizes, ids, noise, licence, and bytes per device on 1, 2, 4 and 8 devices.

    Raises:
        ValueError: The model is not supported.
        CheckpointError: A file is missing or damaged.
    """
    alone = Path(source).suffix == ".json" and Path(source).is_file()
    folder = Path(source) if alone else folder_of(source)
    check_mask(folder, mask)
    if not alone and is_native(folder):
        data = manifest.read_json(folder / CONFIG)["config"]
        config = native_config(data, mask=mask)
        kinds = [entry.dtype for entry in tensors.header(folder / PARAMS).values()]
        stored = max(set(kinds), key=kinds.count)
        about = {
            "name": data["name"],
            "folder": str(folder),
            "family": f"mercury_jax, {models.kind(config)}",
            "licence": data.get("card", {}).get("licence"),
            "noise": data["noise"],
            "tokenizer": data["tokenizer"],
        }
        dtype = np.dtype(config.dtype) if config.dtype in ("float32", "float64") else stored
        more = {"card": data.get("card", {}), "notes": []}
        return about | _sizes(models.build(config), dtype) | more
    opened = open_config(folder, mask=mask) if alone else open_folder(folder, mask=mask)
    card, noise = opened.card, opened.noise
    about = {
        "name": str(opened.folder.config.get("_name_or_path") or folder.resolve().stem),
        "folder": str(folder),
        "family": opened.family.name,
        "architecture": card["architecture"],
        "about": opened.family.about,
        "licence": card["licence"],
        "noise": None if noise is None else to_dict(noise),
    }
    return about | _sizes(opened.model, opened.stored_dtype) | {"notes": card["notes"]}


def _sizes(model: Model, dtype: np.dtype) -> dict[str, Any]:
    c, devices = model.config, jax.local_devices()
    total, active = count_parameters(model)
    plan = {n: need._asdict() for n, need in memory_plan(model, dtype).items()}
    for n, need in memory_plan(model, dtype, quantise="int8").items():
        plan[n]["params_int8"] = need.params
    return {
        "parameters": total,
        "active": active,
        "dtype": jnp.dtype(dtype).name,
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
        "bytes_per_device": plan,
        "room": {"devices": len(devices), "kind": devices[0].device_kind, "bytes": free_memory(devices)},
    }
