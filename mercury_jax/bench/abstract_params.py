"""Models without their weights: configurations by name, and parameters as shapes on a mesh, or random.

`source` resolves MODEL of `mercury bench compile MODEL`: a folder, a recipe, a config.json or one of `PRESETS`.
`abstract_lm` shards that model like `mj.load(mesh=...)`, but with a `jax.ShapeDtypeStruct` for each parameter, so that
its programs can be lowered for any device without memory for the weights. `random_lm` fills it with random numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from mercury_jax import hub, models, noise, sharding
from mercury_jax.config import (
    ComputeType,
    Experts,
    ModelConfig,
    NoiseConfig,
    Plan,
    at_least,
    nearest,
    one_of,
    refuse,
)
from mercury_jax.decode.defaults import choose_sampler
from mercury_jax.decode.inputs import Prompt
from mercury_jax.decode.request import Request, configure, row_mesh, rows_of
from mercury_jax.decode.session import Session, prefill_program, run_program, run_sharded_program
from mercury_jax.decode.state import first_state, prefill_width
from mercury_jax.hub.family import families
from mercury_jax.hub.load import WIDE, open_checkpoint
from mercury_jax.hub.params import Formats, formats_of, input_shards, param_bytes, quantised_specs, shapes_of
from mercury_jax.hub.tokenizer import IdTokenizer
from mercury_jax.models.gemma import GemmaConfig
from mercury_jax.models.weight_quant import FORMATS, QuantisedWeight
from mercury_jax.sharding import AXES, partition_spec, quantised_axes
from mercury_jax.training.recipe import TrainConfig, load_recipe
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

# Dream-org/Dream-v0-Instruct-7B: Qwen2.5-7B without the causal mask; the logits of a position predict the next one.
DREAM = ModelConfig(
    vocab=152064, width=3584, layers=28, heads=28, kv_heads=4, head_dim=128, ffn=18944, pattern="bidirectional",
    block=32, alignment="shifted", rope_theta=1e6, qkv_bias=True, qk_norm=False, tied=False, zero_centred=False,
    scale_embed=False, norm_eps=1e-6, context=131072, dtype="bfloat16", mask=151666, pad=151643, eos=151643,
)  # fmt: skip

# JetLM/SDAR-30B-A3B-Chat-b32: Qwen3-30B-A3B in causal blocks of 32; 128 experts in every layer, 8 of them active.
SDAR = ModelConfig(
    vocab=151936, width=2048, layers=48, heads=32, kv_heads=4, head_dim=128, ffn=6144,
    experts=Experts(count=128, active=8, width=768), pattern="block_causal", block=32, rope_theta=1e6, qk_norm=True,
    tied=False, zero_centred=False, scale_embed=False, norm_eps=1e-6, context=32768, dtype="bfloat16", mask=151669,
    pad=151643, eos=151643,
)  # fmt: skip

# inclusionAI/LLaDA2.0-mini, 16B: a dense first layer, then 256 experts in 8 groups: 8 of 4 groups, and a shared one.
LLADA2_MINI = ModelConfig(
    vocab=157184, width=2048, layers=20, heads=16, kv_heads=4, head_dim=128, ffn=5120,
    experts=Experts(count=256, active=8, width=512, score="sigmoid", scale=2.5, groups=8, active_groups=4,
                    correction=True, shared=512, dense=(0,)),
    pattern="block_causal", block=32, rope_theta=6e5, rope_fraction=0.5, qk_norm=True, tied=False,
    zero_centred=False, scale_embed=False, norm_eps=1e-6, context=32768, dtype="bfloat16", mask=156895, pad=156892,
    eos=156892,
)  # fmt: skip


def causal_encoder(
    width: int, layers: int, heads: int, kv_heads: int, head_dim: int, ffn: int
) -> ModelConfig:
    """Makes the configuration of a causal encoder with a block size of 256 and a vocabulary of 32,768 ids."""
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


def family_decoding(name: str) -> Mapping[str, Any]:
    """The published sampling settings of a family, which `load` gives its checkpoints too."""
    found = next(family.decoding for family in families() if family.name == name)
    return found({}, {}) if callable(found) else found


PRESETS = {
    "diffusiongemma-26b-a4b": ModelPreset(DIFFUSION_GEMMA, UNIFORM, GEMMA_DECODING),
    "llada-8b": ModelPreset(LLADA, MASKED, family_decoding("LLaDA")),
    "dream-7b": ModelPreset(DREAM, MASKED, family_decoding("Dream")),
    "sdar-30b-a3b": ModelPreset(SDAR, MASKED, family_decoding("SDAR, TraDo")),
    "llada2-mini": ModelPreset(LLADA2_MINI, MASKED, family_decoding("LLaDA2.0, 2.1")),
    "mercury-100m": ModelPreset(causal_encoder(768, 12, 12, 4, 64, 2048), MASKED),
    "mercury-350m": ModelPreset(causal_encoder(1024, 24, 16, 8, 64, 3200), MASKED),
    "mercury-1b": ModelPreset(causal_encoder(2048, 20, 16, 8, 128, 5632), MASKED),
}


def find_preset(name: str) -> ModelPreset:
    """Finds a preset by name."""
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
        formats: Formats of the matrices that the checkpoint has quantised, by path.
    """

    name: str
    config: ModelConfig
    noise: NoiseConfig | None
    stored: Any
    decoding: Mapping[str, Any] = {}
    recipe: TrainConfig | None = None
    formats: Formats = {}


def source(
    name: str, dtype: str | None = None, mask: int | None = None, ignore_config: Sequence[str] = ()
) -> ModelSource:
    """Finds a model."""
    found = _found(name, mask, ignore_config)
    if dtype is None:
        return found
    one_of(ComputeType, **{"--dtype": dtype})
    return found._replace(config=dataclasses.replace(found.config, dtype=dtype), stored=jnp.dtype(dtype))


def _found(name: str, mask: int | None, ignore_config: Sequence[str]) -> ModelSource:
    path = Path(name)
    stored = path.suffix != ".py" and (path.is_file() or path.is_dir() or name == hub.NANO.name)
    if not stored and (mask is not None or ignore_config):
        raise refuse("MODEL", name, "a folder or a config.json, beside --mask or --ignore-config")
    if path.suffix == ".py":
        recipe = load_recipe(path)
        return ModelSource(
            recipe.name, recipe.model_config, recipe.noise, jnp.dtype("float32"), recipe=recipe
        )
    if not stored:
        preset = find_preset(name)
        return ModelSource(name, preset.config, preset.noise, jnp.dtype(preset.config.dtype), preset.decoding)
    opened = open_checkpoint(name, mask=mask, ignore_config=ignore_config)
    config, dtype = opened.config, opened.stored_dtype
    if opened.family is None and config.dtype in WIDE:  # in our own layout, `load` converts the parameters
        dtype = jnp.dtype(config.dtype)
    formats = {} if opened.quantised is None else opened.quantised.formats
    return ModelSource(opened.name, config, opened.noise, dtype, opened.decoding, formats=formats)


def abstract_lm(found: ModelSource, mesh: Mesh, quantise: str | None = None) -> LM:
    """Makes a model with the shardings of `mj.load(mesh=...)`, whose parameters are only shapes."""
    c = found.config
    if quantise is not None and found.formats:
        raise refuse("--quantise", quantise, "none: the checkpoint is quantised")
    model = models.build(c)
    corruption = noise.build(found.noise or NoiseConfig(kind="uniform"), c.vocab, c.mask)
    params = abstract_params(model, mesh, found.stored, quantise or found.formats)
    return LM(model, params, IdTokenizer.of(c), corruption, found.name, decoding=found.decoding)


def weight_bytes(found: ModelSource, sizes: Mapping[str, int], quantise: str | None = None) -> int:
    """Computes the bytes of the weights on each device, by arithmetic."""
    _check_quantise(quantise)
    mesh = AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)
    return param_bytes(models.build(found.config), mesh, found.stored, quantise)


def _check_quantise(quantise: str | None) -> None:
    if quantise is not None and quantise not in FORMATS:
        raise refuse("--quantise", quantise, ", ".join(FORMATS))


def abstract_params(model: Model, mesh: Mesh, dtype: Any, quantise: str | Formats | None = None) -> Any:
    """Makes the tree of parameters as shapes with shardings. Scales of outputs are replicated.

    Args:
        dtype: Dtype of the parameters that are not quantised.

    Returns:
        A nested dict with a `jax.ShapeDtypeStruct`, or a quantised matrix of these, for each parameter.
    """
    if isinstance(quantise, str):
        _check_quantise(quantise)
    params: dict[str, Any] = {}
    formats = formats_of(model, quantise)
    for path, like in shapes_of(model).items():
        spec = partition_spec(path, like.shape, model.shardings, mesh)
        axes, kind = quantised_axes(path), formats.get(path)
        if kind is None or axes is None:
            params[path] = jax.ShapeDtypeStruct(like.shape, dtype, sharding=NamedSharding(mesh, spec))
            continue
        arrays = kind.divisible(input_shards(like.shape, path, model, mesh)).shapes(like.shape, *axes)
        found: Any = (
            None
            if x is None or one is None
            else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, one))
            for x, one in zip(arrays, quantised_specs(arrays, like.shape, path, model, mesh), strict=True)
        )
        params[path] = type(arrays)(*found)
    return unflatten_dict(params, sep="/")


# --- random parameters


def random_lm(found: ModelSource, quantise: str | None = None) -> LM:
    """Makes a model with random weights on the first device, by one jitted call that is quick to compile."""
    lm = abstract_lm(found, sharding.mesh(devices=jax.devices()[:1]), quantise)
    return dataclasses.replace(lm, params=jax.block_until_ready(_random_params(lm.params)))


def _random_params(like: Any) -> Any:
    """Arrays in the shapes of parameters, made by one program: uniform with deviation 0.02, and ones for vectors."""
    leaves, tree = jax.tree.flatten(like, is_leaf=lambda x: isinstance(x, QuantisedWeight))

    def fill() -> Any:
        made = []
        for seed, x in enumerate(leaves):
            if isinstance(x, QuantisedWeight):
                bytes = (_hashed(x.values.shape, seed) >> 24).astype(jnp.uint8)
                values = jax.lax.bitcast_convert_type(bytes, jnp.int8).astype(x.values.dtype)
                # 74 is the standard deviation of uniform bytes.
                made.append(type(x)(values, jnp.full(x.scale.shape, 0.02 / 74, x.scale.dtype)))
            elif len(x.shape) < 2:
                made.append(jnp.ones(x.shape, x.dtype))
            else:
                uniform = (_hashed(x.shape, seed) >> 8).astype(jnp.float32) * 2.0**-24 - 0.5
                made.append((uniform * (0.02 * math.sqrt(12))).astype(x.dtype))
        return jax.tree.unflatten(tree, made)

    return jax.jit(fill, out_shardings=jax.tree.map(lambda x: x.sharding, like))()


def _hashed(shape: tuple[int, ...], seed: int) -> jax.Array:
    """A hash of each index by the finaliser of MurmurHash3: one fused loop, where JAX's generators need several."""
    h = jnp.full(shape, (seed * 0x9E3779B9 + 0x7F4A7C15) % 2**32, jnp.uint32)
    for axis, prime in zip(range(len(shape)), (0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1)):
        h = h * jnp.uint32(0x9E3779B1) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(prime)
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def abstract_session(
    lm: LM, rows: int, context: int, answer: int | None = None, mesh: Mesh | None = None
) -> tuple[Session, int | None]:
    """Makes the session of a call with `jax.ShapeDtypeStruct`s instead of arrays.

    Returns:
        The session, and the tokens per prefill pass; None if prompts are so short that `step` encodes them.
    """
    config = lm.model.config
    answer = min(config.block, context - 1) if answer is None else answer
    at_least(1, rows=rows, answer=answer)
    if not answer < context <= config.context:
        raise refuse("context", context, f"{answer + 1}..{config.context}: the model's context")
    prompts = [Prompt([config.pad] * (context - answer), False)] * rows
    sampler, plan = choose_sampler(lm, None, Plan(), None)
    request = Request(sampler=sampler, plan=plan, mesh=mesh, rows=rows_of(prompts, answer, 0))
    decode_config, sampling, padded = configure(lm, request)
    state = jax.eval_shape(lambda: first_state(decode_config, sampling, padded))
    on = sharding.model_parallel_mesh(lm.params)
    # `eval_shape` drops shardings, and the lowered program needs the sharding of the cache
    if on is not None:
        place = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        shardings = sharding.cache_shardings(state.cache, on)
        state = state._replace(cache=jax.tree.map(place, state.cache, shardings))
    session = Session(decode_config, state, rows, row_mesh(lm, mesh))
    width = prefill_width(decode_config, padded.tokens.shape[1])
    return session, None if int(np.max(padded.committed)) <= decode_config.own_prefill else width


def lower_run(lm: LM, session: Session, passes: int | None = None) -> jax.stages.Lowered:
    """Lowers the decoding loop for the devices in the shardings of the parameters."""
    varying = lm.params, session.state, passes
    if session.mesh is None:
        return run_program.lower(session.config, *varying)
    return run_sharded_program.lower(session.config, session.mesh, *varying)


def lower_prefill(lm: LM, session: Session, width: int) -> jax.stages.Lowered:
    """Lowers the prefill loop of long prompts for the devices in the shardings of the parameters."""
    return prefill_program.lower(session.config, lm.params, session.state, width)
