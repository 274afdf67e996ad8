"""Models without their weights: configurations by name, and parameters as shapes on a mesh.

`source` resolves MODEL of `mercury bench compile MODEL`: a folder, a recipe, a config.json or one of `PRESETS`.
`abstract_lm` shards that model like `mj.load(mesh=...)`, but with a `jax.ShapeDtypeStruct` for each parameter, so that
its programs can be lowered for any device without memory for the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mercury_jax import hub, models, noise
from mercury_jax.config import (
    ComputeType,
    Experts,
    ModelConfig,
    NoiseConfig,
    nearest,
    one_of,
    refuse,
)
from mercury_jax.hub.load import WIDE, open_checkpoint
from mercury_jax.hub.params import shapes_of
from mercury_jax.hub.tokenizer import IdTokenizer
from mercury_jax.models.gemma import GemmaConfig
from mercury_jax.models.weight_quant import WEIGHT_KINDS, QuantisedWeight
from mercury_jax.sharding import matrix_axes, partition_spec
from mercury_jax.train.recipe import TrainConfig, load_recipe
from mercury_jax.types import LM, Model

# --- configurations by name


class ModelPreset(NamedTuple):
    """A model configuration with a name.

    Attributes:
        config: The configuration.
        noise: The noise that the model was trained with.
        decoding: Sampling settings; see `LM.decoding`.
    """

    config: ModelConfig
    noise: NoiseConfig
    decoding: Mapping[str, Any] = {}


# google/diffusiongemma-26B-A4B-it: global attention in every sixth layer; 128 experts in parallel to a dense MLP.
DIFFUSION_GEMMA = GemmaConfig(
    vocab=262144, width=2816, layers=30, heads=16, kv_heads=8, head_dim=256, ffn=2112, block=256,
    experts=Experts(count=128, active=8, width=704), global_layers=(5, 11, 17, 23, 29), window=1024,
    global_head_dim=512, global_kv_heads=2, keys_as_values=True, self_conditioning=True, encoder_scalars=True,
    context=262144, dtype="bfloat16", pad=0, eos=1,
)  # fmt: skip

# GSAI-ML/LLaDA-8B-Instruct: Llama's architecture without the causal mask and without grouped queries.
LLADA = ModelConfig(
    vocab=126464, width=4096, layers=32, heads=32, kv_heads=32, head_dim=128, ffn=12288, pattern="bidirectional",
    block=32, rope_theta=500_000.0, qk_norm=False, tied=False, zero_centred=False, scale_embed=False,
    norm_eps=1e-5, context=4096, dtype="bfloat16", mask=126336, pad=126081, eos=126081,
)  # fmt: skip


def causal_encoder(
    width: int, layers: int, heads: int, kv_heads: int, head_dim: int, ffn: int
) -> ModelConfig:
    """Makes the configuration of a causal encoder with a block size of 256 and a vocabulary of 32,768 ids.

    Args:
        width, layers, heads, kv_heads, head_dim, ffn: As in `ModelConfig`.

    Returns:
        The configuration, in bf16.
    """
    return ModelConfig(
        vocab=32768, width=width, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn,
        block=256, context=32768, dtype="bfloat16",
    )  # fmt: skip


# The settings of its generation_config.json: entropy bound, temperature schedule, early stopping.
GEMMA_DECODING = {
    "rule": "entropy_bound", "params": {"gamma": 0.1}, "cooling": {"last": 0.4, "first": 0.8},
    "steady": {"patience": 1, "entropy": 0.005}, "temperature": 1.0, "steps": 48, "block": 256,
}  # fmt: skip

MASKED, UNIFORM = NoiseConfig(kind="absorbing"), NoiseConfig(kind="uniform")

PRESETS = {
    "diffusiongemma-26b-a4b": ModelPreset(DIFFUSION_GEMMA, UNIFORM, GEMMA_DECODING),
    "llada-8b": ModelPreset(LLADA, MASKED),
    "mercury-100m": ModelPreset(causal_encoder(768, 12, 12, 4, 64, 2048), MASKED),
    "mercury-350m": ModelPreset(causal_encoder(1024, 24, 16, 8, 64, 3200), MASKED),
    "mercury-1b": ModelPreset(causal_encoder(2048, 20, 16, 8, 128, 5632), MASKED),
}


def find_preset(name: str) -> ModelPreset:
    """Finds a preset by name.

    Args:
        name: A name in `PRESETS`.

    Returns:
        The preset.

    Raises:
        ValueError: There is no such preset; the message suggests the nearest name.
    """
    if name not in PRESETS:
        allowed = f"a folder, a recipe, a config.json, or a name: {nearest(name, list(PRESETS))}"
        raise refuse("MODEL", name, allowed)
    return PRESETS[name]


# --- models


class ModelSource(NamedTuple):
    """A model without its weights.

    Attributes:
        name: The model's name.
        config: Its configuration.
        noise: The noise that it was trained with; None for an autoregressive model.
        stored: Dtype of its parameters.
        decoding: Sampling settings; see `LM.decoding`.
        recipe: The training recipe, if the model was given as one.
    """

    name: str
    config: ModelConfig
    noise: NoiseConfig | None
    stored: Any
    decoding: Mapping[str, Any] = {}
    recipe: TrainConfig | None = None


def source(name: str, dtype: str | None = None) -> ModelSource:
    """Finds a model.

    Args:
        name: A folder, a recipe, a config.json, or a preset.
        dtype: Dtype of the parameters and the computation. Default: the model's own.

    Returns:
        The model without its weights.

    Raises:
        ValueError: There is no such model, or the dtype is unknown.
    """
    found = _found(name)
    if dtype is None:
        return found
    one_of(ComputeType, **{"--dtype": dtype})
    return found._replace(config=dataclasses.replace(found.config, dtype=dtype), stored=jnp.dtype(dtype))


def _found(name: str) -> ModelSource:
    path = Path(name)
    if path.suffix == ".py":
        recipe = load_recipe(path)
        return ModelSource(
            recipe.name, recipe.model_config, recipe.noise, jnp.dtype("float32"), recipe=recipe
        )
    if not path.is_file() and not path.is_dir() and name != hub.NANO.name:
        preset = find_preset(name)
        return ModelSource(name, preset.config, preset.noise, jnp.dtype(preset.config.dtype), preset.decoding)
    opened = open_checkpoint(name)
    config, stored = opened.config, opened.stored_dtype
    if opened.family is None and config.dtype in WIDE:  # in our own layout, `load` converts the parameters
        stored = jnp.dtype(config.dtype)
    return ModelSource(opened.name, config, opened.noise, stored, opened.decoding)


def abstract_lm(found: ModelSource, mesh: Mesh, quantise: str | None = None) -> LM:
    """Makes a model with the shardings of `mj.load(mesh=...)`, whose parameters are only shapes.

    Args:
        found: The model, from `source`.
        mesh: The devices.
        quantise: "int8" or "fp8" for weight matrices in 8 bits.

    Returns:
        A model whose programs can be lowered but not run.
    """
    c = found.config
    model = models.build(c)
    corruption = noise.build(found.noise or NoiseConfig(kind="uniform"), c.vocab, c.mask)
    params = abstract_params(model, mesh, found.stored, quantise)
    return LM(model, params, IdTokenizer.of(c), corruption, found.name, decoding=found.decoding)


def abstract_params(model: Model, mesh: Mesh, dtype: Any, quantise: str | None = None) -> Any:
    """Makes the tree of parameters as shapes with shardings. Scales of quantised matrices are replicated.

    Args:
        model: Pure functions of the model.
        mesh: The devices.
        dtype: Dtype of the parameters that are not quantised.
        quantise: "int8" or "fp8" for weight matrices in 8 bits.

    Returns:
        A nested dict with a `jax.ShapeDtypeStruct`, or a `QuantisedWeight` of two, for each parameter.

    Raises:
        ValueError: An unknown kind of quantisation.
    """
    if quantise is not None and quantise not in WEIGHT_KINDS:
        raise refuse("--quantise", quantise, ", ".join(WEIGHT_KINDS))
    params: dict[str, Any] = {}
    replicated = NamedSharding(mesh, PartitionSpec())
    for path, like in shapes_of(model).items():
        where = NamedSharding(mesh, partition_spec(path, like.shape, model.shardings, mesh))
        axes = None if quantise is None else matrix_axes(path)
        if quantise is None or axes is None:
            value: Any = jax.ShapeDtypeStruct(like.shape, dtype, sharding=where)
        else:
            inputs, batch = axes
            small = WEIGHT_KINDS[quantise](np.ones((1,) * len(like.shape)), inputs, batch)  # for its dtypes
            scale = (*like.shape[:batch], *like.shape[batch + inputs :])
            value = QuantisedWeight(
                jax.ShapeDtypeStruct(like.shape, small.values.dtype, sharding=where),  # pyright: ignore[reportArgumentType]
                jax.ShapeDtypeStruct(scale, small.scale.dtype, sharding=replicated),  # pyright: ignore[reportArgumentType]
            )
        params[path] = value
    return unflatten_dict(params, sep="/")
