"""Our own folder: what `train` and `mercury convert` leave, and what `assets/nano` is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from mercury_jax import checkpoint, models, noise
from mercury_jax.checkpoint import CheckpointError, manifest
from mercury_jax.checkpoint.export import CONFIG
from mercury_jax.config import ModelConfig, NoiseConfig, from_dict, refuse, to_dict
from mercury_jax.hub import assemble, memory
from mercury_jax.hub.unread import MARK, Ids
from mercury_jax.models.quantise import check_whole
from mercury_jax.tokenizer import AnyTokenizer, Tokenizer
from mercury_jax.types import LM, Model, Params

WIDE = {"float32": jnp.float32, "float64": jnp.float64}


def save(
    folder: str | Path,
    lm: LM,
    noise_config: NoiseConfig | None,
    *,
    dtype: Any = None,
    overwrite: bool = True,
) -> Path:
    """Write an LM as a plain folder that `load` reads. dtype: of the stored arrays (default: theirs).

    noise_config: None for an autoregressive model. ValueError for int8 and fp8 parameters.
    """
    check_whole(lm.params)
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
    return checkpoint.export(
        folder, lm.params, about, dtype, tokenizer=lm.tokenizer.proto, overwrite=overwrite
    )


def read_config(data: Mapping[str, Any], dtype: str | None = None, mask: int | None = None) -> ModelConfig:
    """The model's config from what `save` wrote; an unknown architecture is refused."""
    name = data.get("architecture", "transformer")
    if name not in models.CONFIGS:
        raise refuse("architecture", name, ", ".join(models.CONFIGS))
    config = from_dict(models.CONFIGS[name], data["model"])
    changes = {"dtype": dtype, "mask": mask}
    return dataclasses.replace(config, **{k: v for k, v in changes.items() if v is not None})


def load(
    folder: str | Path,
    *,
    dtype: str | None = None,
    quantise: str | None = None,
    mask: int | None = None,
    mesh: Mesh | None = None,
    widen: bool = True,
) -> LM:
    """Read a folder that `save` wrote, after verifying every file's SHA-256.

    dtype: of the arithmetic, instead of the config's (float32, bfloat16, float64 under x64). Parameters are fp32
    (or fp64) where the arithmetic is, else as they are stored; as stored too without `widen`. quantise, mask, mesh:
    as of `mercury_jax.load`.
    Raises CheckpointError for damage, ValueError where tokenizer and model do not belong together.
    """
    assemble.check_kind(quantise)
    found = checkpoint.load_exported(folder)
    data = dict(found.config)
    tokenizer = _tokenizer(found)
    config = read_config(data, dtype, mask)
    _check_tokenizer(tokenizer, config, data)
    if mask is not None:
        tokenizer = tokenizer.with_mask(mask)
    model = models.build(config)
    kind = WIDE.get(config.dtype) if widen else None
    memory.check(model, mesh, kind or config.dtype, quantise, data["name"])
    params = _params(model, found, kind, quantise, mesh)
    described = None if data["noise"] is None else from_dict(NoiseConfig, data["noise"])
    kept_out = tuple(data.get("forbidden", noise.specials(tokenizer, config.vocab)))
    return LM(
        model=model,
        params=params,
        tokenizer=tokenizer,
        corruption=noise.build(described or NoiseConfig(kind="uniform"), config.vocab, config.mask, kept_out),
        name=data["name"],
        card=data.get("card", {}),
        decoding=data.get("decoding", {}),
    )


def noise_of(folder: str | Path) -> NoiseConfig | None:
    """How the model of a folder was noised; None for an autoregressive one."""
    data = manifest.read_json(Path(folder) / CONFIG)["config"]
    return None if data["noise"] is None else from_dict(NoiseConfig, data["noise"])


def _tokenizer(found: checkpoint.Exported) -> AnyTokenizer:
    """Ours, that of the checkpoint which the folder was converted from, or none."""
    if found.tokenizer is None:
        raise CheckpointError(f"{found.path}: tokenizer.model is missing")
    if found.tokenizer.startswith(MARK):
        return Ids.of(found.tokenizer)
    if found.tokenizer[:2] != b"PK":
        return Tokenizer(found.tokenizer)
    from mercury_jax.hub.tokenizer import unpack

    return unpack(found.tokenizer)


def _check_tokenizer(tokenizer: AnyTokenizer, config: ModelConfig, data: Mapping[str, Any]) -> None:
    if tokenizer.vocab_size > config.vocab:  # a model may have ids that stand for nothing
        raise refuse(
            "tokenizer.vocab_size", tokenizer.vocab_size, f"at most {config.vocab}, the model's vocab"
        )
    if tokenizer.fingerprint != data["tokenizer"]:
        raise refuse("tokenizer", tokenizer.fingerprint, f"{data['tokenizer']}, the one it was trained with")


def _params(
    model: Model, found: checkpoint.Exported, kind: Any, quantise: str | None, mesh: Mesh | None
) -> Params:
    """The parameters on their devices, or a refusal that names the first that does not fit."""
    for name, like in assemble.shapes_of(model).items():
        entry = found.tensors.get(name)
        if entry is None or tuple(entry.shape) != tuple(like.shape):
            have = None if entry is None else tuple(entry.shape)
            raise CheckpointError(f"{found.path}: parameter {name} is {have}; the config needs {like.shape}")
    return assemble.own(model, found.read, dtype=kind, quantise=quantise, mesh=mesh)
