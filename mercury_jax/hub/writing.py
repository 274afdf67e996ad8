"""Our parameters as a checkpoint in Hugging Face's layout, for transformers, vLLM and SGLang."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mercury_jax import models
from mercury_jax.checkpoint.tensors import Source
from mercury_jax.config import ModelConfig, refuse
from mercury_jax.hub import assemble, families, files, tokenizer_json
from mercury_jax.hub.family import Family, Leaf
from mercury_jax.hub.reading import HEAD, Opened
from mercury_jax.models.weight_quant import check_not_quantised
from mercury_jax.sharding import path_name
from mercury_jax.tokenizer import Tokenizer
from mercury_jax.types import LM, Params

EXPORTABLE = (
    "a build that a family of checkpoints has. With same_position, qk_norm and no predicts_next: block_causal "
    "with a mask (SDAR; recipe nano_sdar), bidirectional (tiny-A2D; recipe nano_bidirectional). Without a mask: "
    "block_causal with block 1 and predicts_next (Qwen3, or without qk_norm Llama; recipe nano_qwen3)"
)


def to_hf(
    folder: str | Path, lm: LM, *, family: str | None = None, dtype: Any = None, shard: int = files.SHARD
) -> Path:
    """Write an LM as a checkpoint of a family that can hold it; returns the folder's path.

    family: its name (None: the one that it was loaded from, or the first that holds it exactly). dtype: of the
    stored parameters (None: theirs). shard: most bytes in a file. A model of our own build is written with its
    norms' 1 + scale and its embedding's factor multiplied out, which changes no logit.
    Raises ValueError where no family holds it, and for int8 and fp8 parameters.
    """
    check_not_quantised(lm.params)
    config, params = plain(lm.model.config, lm.params)
    chosen = _family(config, family or lm.card.get("family"), strict=family is not None)
    assert chosen.export is not None
    about = chosen.export(config)
    arrays = sources(chosen.names(config), params, dtype)
    return files.write_folder(folder, about, arrays, shard=shard, extra=_tokenizer_files(lm))


# Beside the tokenizer's files, what belongs to the checkpoint and would be lost.
BESIDE = ("generation_config.json", "preprocessor_config.json", "processor_config.json", "README.md")


def again(folder: str | Path, lm: LM, opened: Opened, *, dtype: Any = None, shard: int = files.SHARD) -> Path:
    """Write an LM as the checkpoint that it was loaded from, with everything in that one which the model does not read.

    Args:
        folder: A new folder.
        lm: The model, loaded from `opened`.
        opened: The checkpoint. Its config.json is written as it is; its unread tensors are copied one at a time, in
            the dtype in which they are stored.
        dtype: Of the parameters (None: theirs).
        shard: Most bytes in a file.

    Returns:
        The folder's path.
    """
    read = sources(opened.family.names(opened.config), lm.params, dtype)
    theirs = opened.folder.tensors
    # Under a tied head a copy of the embedding says nothing, and in another dtype it would no longer be equal.
    skip = {source.name for source in read} | ({HEAD} if opened.config.tied else set())
    carried = [
        Source(name, place.entry.shape, place.entry.dtype, functools.partial(opened.folder.read, name))
        for name, place in theirs.items()
        if name not in skip
    ]
    beside = {name: files.find(opened.folder.path, name) for name in BESIDE}
    extra = {name: path.read_bytes() for name, path in beside.items() if path is not None}
    about = files.read_json(opened.folder.path, files.CONFIG)
    if (mask := opened.folder.config.get("mask_token_id")) is not None:  # which may have been an argument
        about["mask_token_id"] = mask
    if dtype is not None:
        about = _retyped(about, dtype)
    return files.write_folder(
        folder, about, [*read, *carried], shard=shard, extra=extra | _tokenizer_files(lm)
    )


def _retyped(config: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """A config.json whose dtype is another, under whichever of its names it stands; that of its text model, too."""
    name = np.dtype(dtype).name
    found = {k: name if k in ("dtype", "torch_dtype") else v for k, v in config.items()}
    if isinstance(config.get("text_config"), Mapping):
        found["text_config"] = _retyped(config["text_config"], dtype)
    return found


def _tokenizer_files(lm: LM) -> dict[str, bytes]:
    tok = lm.tokenizer
    return dict(tokenizer_json.files_of(tok) if isinstance(tok, Tokenizer) else tok.files)


def _family(config: ModelConfig, wanted: str | None, strict: bool) -> Family:
    able = families.writers(config)
    if wanted is not None and (strict or any(f.name == wanted for f in able)):
        found = families.called(wanted)
        if found in able:
            return found
        raise refuse("family", wanted, _names(able) + ", which hold this model exactly")
    if not able:
        about = (
            f"{config.pattern} (block {config.block}), {models.kind(config)}, alignment {config.alignment}, "
        )
        about += f"qk_norm {config.qk_norm}, qkv_bias {config.qkv_bias}, predicts_next {config.predicts_next}"
        raise refuse("model", about, EXPORTABLE)
    return able[0]


def _names(able: list[Family]) -> str:
    return ", ".join(f.name for f in able) or "none"


def plain(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Our own build as others have it: norms multiply by their scale, embeddings by nothing; the same logits."""
    if type(config) is not ModelConfig or not (config.zero_centred or config.scale_embed):
        return config, params
    flat = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    if config.scale_embed:
        if config.tied:
            flat["head"] = flat["embed"].T
        flat["embed"] = flat["embed"] * config.width**0.5
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        assemble.insert(tree, path, 1.0 + leaf if config.zero_centred and path.endswith("/scale") else leaf)
    tied = config.tied and not config.scale_embed
    return dataclasses.replace(config, zero_centred=False, scale_embed=False, tied=tied), tree


def sources(names: Mapping[str, Leaf], params: Params, dtype: Any = None) -> list[Source]:
    """The tensors of the files, each made from our leaves when its turn to be written comes."""
    flat = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    made: dict[str, list[str]] = {}
    shape: dict[str, tuple[int, ...]] = {}
    for path, leaf in names.items():
        for name, size in assemble.files_shapes(leaf, flat[path].shape):
            made.setdefault(name, []).append(path)
            shape[name] = size
    take = _Kept(lambda path: _host(flat[path], dtype))
    kind = lambda name: np.dtype(dtype or flat[made[name][0]].dtype)
    return [Source(n, shape[n], kind(n), functools.partial(_tensor, n, made[n], names, take)) for n in made]


def _tensor(name: str, paths: list[str], names: Mapping[str, Leaf], take: Callable[[str], Any]) -> np.ndarray:
    """One tensor of the files, joined from the rows that our leaves hold of it."""
    parts = [
        (names[path].rows or (0, 0, 0), assemble.theirs_of(names[path], take(path))[name]) for path in paths
    ]
    if len(parts) == 1:
        return parts[0][1]
    return np.concatenate([part for _, part in sorted(parts, key=lambda p: p[0])], axis=0)


class _Kept:
    """The last leaf that was fetched: the tensors of one leaf are written one after the other."""

    def __init__(self, fetch: Callable[[str], np.ndarray]):
        self.fetch, self.path, self.value = fetch, "", np.zeros(0)

    def __call__(self, path: str) -> np.ndarray:
        if path != self.path:
            self.value = self.fetch(path)
            self.path = path
        return self.value


def _host(leaf: Any, dtype: Any) -> np.ndarray:
    host = np.asarray(jax.device_get(leaf))
    return host if dtype is None else host.astype(dtype, copy=False)
