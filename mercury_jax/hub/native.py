"""Our own folder: what `train` leaves and what `assets/nano` is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mercury_jax import checkpoint, models, noise
from mercury_jax.checkpoint import CheckpointError
from mercury_jax.config import ModelConfig, NoiseConfig, from_dict, refuse, to_dict
from mercury_jax.tokenizer import Tokenizer
from mercury_jax.types import LM, Model, Params


def save(
    folder: str | Path,
    lm: LM,
    noise_config: NoiseConfig,
    *,
    dtype: Any = None,
    overwrite: bool = True,
) -> Path:
    """Write an LM as a plain folder that `load` reads. dtype: of the stored arrays (default: theirs)."""
    about = {
        "name": lm.name,
        "model": to_dict(lm.model.config),
        "noise": to_dict(noise_config),
        "tokenizer": lm.tokenizer.fingerprint,
        "card": dict(lm.card),
    }
    return checkpoint.export(
        folder, jax.device_get(lm.params), about, dtype, tokenizer=lm.tokenizer.proto, overwrite=overwrite
    )


def load(folder: str | Path, *, dtype: str | None = None) -> LM:
    """Read a folder that `save` wrote, after verifying every file's SHA-256.

    dtype: of the arithmetic, instead of the config's (float32, bfloat16, float64 under x64).
    Raises CheckpointError for damage, ValueError where tokenizer and model do not belong together.
    """
    found = checkpoint.load_exported(folder)
    data = dict(found.config)
    if found.tokenizer is None:
        raise CheckpointError(f"{folder}: tokenizer.model is missing")
    tokenizer = Tokenizer(found.tokenizer)
    config = from_dict(ModelConfig, {**data["model"], **({"dtype": dtype} if dtype else {})})
    _check_tokenizer(tokenizer, config, data)
    model = models.build(config)
    params = _fitted(model, found.params, Path(folder))
    kept_out = noise.specials(tokenizer)
    corruption = noise.build(from_dict(NoiseConfig, data["noise"]), config.vocab, config.mask, kept_out)
    return LM(model, params, tokenizer, corruption, data["name"], data.get("card", {}))


def _check_tokenizer(tokenizer: Tokenizer, config: ModelConfig, data: Mapping[str, Any]) -> None:
    if tokenizer.vocab_size != config.vocab:
        raise refuse("tokenizer.vocab_size", tokenizer.vocab_size, f"{config.vocab}, the model's vocab")
    if tokenizer.fingerprint != data["tokenizer"]:
        raise refuse("tokenizer", tokenizer.fingerprint, f"{data['tokenizer']}, the one it was trained with")


def _fitted(model: Model, params: Params, folder: Path) -> Params:
    """The parameters as fp32 on the device, or a refusal that names the first that does not fit."""
    width = jnp.float64 if model.config.dtype == "float64" else jnp.float32
    want = jax.eval_shape(model.init, jax.random.key(0))
    paths = {jax.tree_util.keystr(p): x.shape for p, x in jax.tree_util.tree_flatten_with_path(want)[0]}
    have = {jax.tree_util.keystr(p): x.shape for p, x in jax.tree_util.tree_flatten_with_path(params)[0]}
    for name, shape in paths.items():
        if have.get(name) != shape:
            raise CheckpointError(f"{folder}: parameter {name} is {have.get(name)}; the config needs {shape}")
    return jax.tree.map(lambda x: jnp.asarray(x, width), params)
