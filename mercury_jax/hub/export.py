"""Writing a model: as a folder of ours (`save`), or as a checkpoint for transformers, vLLM and SGLang (`save_hf`).

`convert` does one after loading the other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import DTypeLike

from mercury_jax import checkpoint, models
from mercury_jax.checkpoint.tensors import LazyTensor
from mercury_jax.config import ModelConfig, NoiseConfig, refuse, to_dict
from mercury_jax.hub.families import named_family, writers
from mercury_jax.hub.family import Family, TensorSource
from mercury_jax.hub.folder import CONFIG, SHARD, find, read_json, write_folder
from mercury_jax.hub.load import (
    HEAD,
    Opened,
    check_mask,
    folder_of,
    is_native,
    load_native,
    load_opened,
    native_noise,
    open_folder,
)
from mercury_jax.hub.params import insert, to_theirs
from mercury_jax.hub.tokenizer_files import own_files
from mercury_jax.models.weight_quant import check_not_quantised
from mercury_jax.sharding import path_name
from mercury_jax.tokenizer import Tokenizer
from mercury_jax.types import LM, Params

EXPORTABLE = (
    "a build that a family of checkpoints has. With same_position, qk_norm and no predicts_next: block_causal "
    "with a mask (SDAR; recipe nano_sdar), bidirectional (tiny-A2D; recipe nano_bidirectional). Without a mask: "
    "block_causal with block 1 and predicts_next (Qwen3, or without qk_norm Llama; recipe nano_qwen3)"
)
# Files of a checkpoint that are copied when it is written again.
BESIDE = ("generation_config.json", "preprocessor_config.json", "processor_config.json", "README.md")


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
    """Writes a model in the other layout.

    From "hf" to "hf" of the same family, tensors that our model does not read (a vision tower) are copied one at a
    time, as they are stored, with the checkpoint's own config.json and generation_config.json. A folder of ours and
    another family have no place for them.

    Args:
        source: A folder, or an id on the Hugging Face hub.
        out: A new folder.
        to: "ours" (verified by checksums) or "hf" (for transformers, vLLM, SGLang).
        family: With "hf", the family to write. Default: the source's own, or the first that can hold the model.
        dtype: Of the stored parameters. Default: as they are.
        mask: The mask id, where the checkpoint does not name it.
        progress: Called with the number of bytes of each parameter that was loaded.

    Returns:
        The folder.

    Raises:
        ValueError: No family can hold the model, or an argument is not as above.
    """
    if to not in ("ours", "hf"):
        raise refuse("to", to, "ours, hf")
    folder = folder_of(source)
    check_mask(folder, mask)
    if is_native(folder):
        lm, noise, opened = load_native(folder, mask=mask, as_stored=True), native_noise(folder), None
    else:
        opened = open_folder(folder, mask=mask)
        lm, noise = load_opened(opened, progress=progress), opened.noise
    if to == "ours":
        return save(out, lm, noise, dtype=dtype, overwrite=False)
    if opened is not None and (family is None or named_family(family) is opened.family):
        return _save_again(out, lm, opened, dtype)
    return save_hf(out, lm, family=family, dtype=dtype)


def save(
    folder: str | Path,
    lm: LM,
    noise_config: NoiseConfig | None,
    *,
    dtype: DTypeLike | None = None,
    overwrite: bool = True,
) -> Path:
    """Writes a model as a folder that `load` reads.

    Args:
        folder: Where to.
        lm: The model.
        noise_config: The noise that it was trained with; None for an autoregressive model.
        dtype: Of the stored arrays. Default: theirs.
        overwrite: Replace an earlier model in that folder.

    Returns:
        The folder.

    Raises:
        ValueError: The parameters are quantised, or the folder has other files.
    """
    check_not_quantised(lm.params)
    config = lm.model.config
    about = {
        "name": lm.name,
        "architecture": models.kind(config),
        "model": to_dict(config),
        "noise": None if noise_config is None or config.autoregressive else to_dict(noise_config),
        "forbidden": list(lm.corruption.forbidden),
        "tokenizer": lm.tokenizer.fingerprint,
        "card": dict(lm.card),
        "decoding": dict(lm.decoding),
    }
    proto = lm.tokenizer.proto
    return checkpoint.export(folder, lm.params, about, dtype, tokenizer=proto, overwrite=overwrite)


def save_hf(
    folder: str | Path,
    lm: LM,
    *,
    family: str | None = None,
    dtype: DTypeLike | None = None,
    shard: int = SHARD,
) -> Path:
    """Writes a model as a checkpoint of a family that can hold it.

    A model of our own build is written with its norms' 1 + scale and its embedding's factor multiplied out, which
    changes no logit.

    Args:
        folder: A new folder.
        lm: The model.
        family: Its name. Default: the one that it was loaded from, or the first that holds it exactly.
        dtype: Of the stored parameters. Default: theirs.
        shard: Most bytes in a file.

    Returns:
        The folder.

    Raises:
        ValueError: No family can hold the model, or its parameters are quantised.
    """
    check_not_quantised(lm.params)
    config, params = _multiplied_out(lm.model.config, lm.params)
    chosen = _chosen_family(config, family or lm.card.get("family"), strict=family is not None)
    assert chosen.export is not None
    arrays = lazy_tensors(chosen.names(config), params, dtype)
    return write_folder(folder, chosen.export(config), arrays, shard=shard, extra=_tokenizer_files(lm))


def _save_again(folder: str | Path, lm: LM, opened: Opened, dtype: str | None) -> Path:
    """Writes a model as the checkpoint that it was loaded from, with everything that the model does not read.

    config.json stays as it is; unread tensors are copied one at a time, in the dtype in which they are stored.
    """
    read = lazy_tensors(opened.family.names(opened.config), lm.params, dtype)
    # Under a tied head a copy of the embedding is redundant, and in another dtype it would no longer be equal.
    skip = {tensor.name for tensor in read} | ({HEAD} if opened.config.tied else set())
    carried = [
        LazyTensor(name, entry.shape, entry.dtype, functools.partial(opened.folder.read, name))
        for name, (_, entry) in opened.folder.tensors.items()
        if name not in skip
    ]
    beside = {name: find(opened.folder.path, name) for name in BESIDE}
    extra = {name: path.read_bytes() for name, path in beside.items() if path is not None}
    about = read_json(opened.folder.path, CONFIG)
    if (mask := opened.folder.config.get("mask_token_id")) is not None:  # which may have been an argument
        about["mask_token_id"] = mask
    if dtype is not None:
        about = _with_dtype(about, np.dtype(dtype).name)
    return write_folder(folder, about, [*read, *carried], extra=extra | _tokenizer_files(lm))


def _with_dtype(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A config.json with another dtype under either name of the key, also in its text model's config."""
    found = {k: name if k in ("dtype", "torch_dtype") else v for k, v in config.items()}
    if isinstance(config.get("text_config"), Mapping):
        found["text_config"] = _with_dtype(config["text_config"], name)
    return found


def _tokenizer_files(lm: LM) -> dict[str, bytes]:
    tok = lm.tokenizer
    return dict(own_files(tok) if isinstance(tok, Tokenizer) else tok.files)


def _chosen_family(config: ModelConfig, wanted: str | None, strict: bool) -> Family:
    able = writers(config)
    if wanted is not None and (strict or any(f.name == wanted for f in able)):
        found = named_family(wanted)
        if found in able:
            return found
        names = ", ".join(f.name for f in able) or "none"
        raise refuse("family", wanted, f"{names}, which hold this model exactly")
    if not able:
        about = (
            f"{config.pattern} (block {config.block}), {models.kind(config)}, alignment {config.alignment}, "
        )
        about += f"qk_norm {config.qk_norm}, qkv_bias {config.qkv_bias}, predicts_next {config.predicts_next}"
        raise refuse("model", about, EXPORTABLE)
    return able[0]


def _multiplied_out(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Our own build as other libraries have it, with the same logits: norms scale by `scale`, embeddings by 1."""
    if type(config) is not ModelConfig or not (config.zero_centred or config.scale_embed):
        return config, params
    flat = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    if config.scale_embed:
        if config.tied:
            flat["head"] = flat["embed"].T
        flat["embed"] = flat["embed"] * config.width**0.5
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        insert(tree, path, 1.0 + leaf if config.zero_centred and path.endswith("/scale") else leaf)
    tied = config.tied and not config.scale_embed
    return dataclasses.replace(config, zero_centred=False, scale_embed=False, tied=tied), tree


def lazy_tensors(
    names: Mapping[str, TensorSource], params: Params, dtype: DTypeLike | None = None
) -> list[LazyTensor]:
    """Lists the tensors of a checkpoint; each is made from our parameters when it is written.

    Args:
        names: Where each parameter is, by path: `Family.names`.
        params: Our parameters.
        dtype: Of the tensors. Default: that of the parameters.

    Returns:
        The tensors.
    """
    flat = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    paths: dict[str, list[str]] = {}  # of our parameters, for each tensor; several if they are rows of it
    shapes: dict[str, tuple[int, ...]] = {}
    for path, source in names.items():
        for name, shape in source.shapes(flat[path].shape).items():
            paths.setdefault(name, []).append(path)
            shapes[name] = shape

    @functools.lru_cache(maxsize=1)  # the tensors of one parameter are written one after the other
    def host(path: str) -> np.ndarray:
        array = np.asarray(jax.device_get(flat[path]))
        return array if dtype is None else array.astype(dtype, copy=False)

    def make(name: str) -> np.ndarray:
        parts = [((names[p].rows or (0,))[0], to_theirs(names[p], host(p))[name]) for p in paths[name]]
        if len(parts) == 1:
            return parts[0][1]
        return np.concatenate([part for _, part in sorted(parts, key=lambda p: p[0])], axis=0)

    kind = lambda name: np.dtype(dtype or flat[paths[name][0]].dtype)
    return [LazyTensor(name, shapes[name], kind(name), functools.partial(make, name)) for name in paths]
