"""Checkpoint families: the `Family` record, the registry, and the conversion that Llama-like families share.

A family is one file in `families/`. It describes its checkpoints in a `Family` and passes that to `register`; `load`,
`info`, `convert` and the documentation use the registry. Code outside of this package can register families too.

Every family has a table of the config.json keys that it understands (`allow`). Keys of `WITHOUT_EFFECT`, which no
class reads for its arithmetic, are ignored. Any other key is refused by name, because it could change the arithmetic
(YaRN's `mscale` moves logits by more than 1), unless the user vouches for it (`ignore_config`). Values must have the
types that transformers 5 requires; the string "false", for example, would otherwise count as true.

`decoder_config` and `tensor_names` convert Llama-like and Qwen-like checkpoints, from which many diffusion models are
initialised. The opposite direction, writing config.json, is `families/qwen_llama.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType, FunctionType, NoneType, UnionType
from typing import Any, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np

from mercury_jax.checkpoint.export import Exported
from mercury_jax.config import ComputeType, Experts, ModelConfig, NoiseConfig, RopeScaling, refuse
from mercury_jax.hub import generation
from mercury_jax.hub.folder import Folder
from mercury_jax.hub.params import TensorSource
from mercury_jax.hub.quant_params import QuantisedTensors
from mercury_jax.types import Model

Json = Mapping[str, Any]
# key -> what its value may be, and for nested objects their table; see `allow`
Keys = Mapping[str, Any]
UNUSED = ...
_TYPES: Mapping[type, str] = {
    int: "an integer", float: "a number", bool: "true or false", str: "a string", list: "a list"
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
# Names of keys that change no logit in any family, whatever their value.
WITHOUT_EFFECT = re.compile(
    # who wrote the file, where the code of the reference is; `_`: private to the program that wrote the file
    r"_.*|model_type|auto_map|name_or_path|tokenizer_class|trust_remote_code|unsloth_\w+"
    r"|version|(transformers|peft|config|model|adapter_transformers)_version"
    # ids, which are in the tokenizer, and the task of a classifier
    r"|\w+_token_(id|index)|prefix|id2label|label2id|num_labels|problem_type|finetuning_task|task_specific_params"
    # training
    r"|\w*dropout\w*|initializer_\w+|\w*(aux|z)_loss\w*|gradient_checkpointing\w*"
    # how the reference computes or returns the same numbers
    r"|output_(attentions|hidden_states|router_logits)|use_cache|return_dict|torchscript|use_bfloat16|is_decoder"
    r"|\w*attn_implementation|experts_implementation|chunk_size_feed_forward|tf_legacy_loss|tie_encoder_decoder"
    r"|cross_attention_hidden_size|(use_)?flash_attn|(use_)?flash_attention"
)


def allow(table: Keys) -> dict[str, Any]:
    """Makes a table of the keys that may occur in one object of a config.json; tables are merged by `|`.

    Keys of `WITHOUT_EFFECT`, and the settings of generation (`generation.KEYS`), are known to all tables.

    Args:
        table: Keys, several in one text separated by spaces -> a type or a union of types, for a key that is converted
            to our config; a tuple of the values that our models implement, for a key that could change the arithmetic;
            `UNUSED`, for a key that changes no logit, whatever its value; or the table of an object, or a function from
            the object to its table, for a key whose value is an object or null.

    Example:
        >>> allow({"vocab_size n_heads": int, "rope": (True,), "dropout": UNUSED})
    """
    return {name: kind for names, kind in table.items() for name in names.split()}


def check_keys(keys: Keys, config: Json, file: str, path: str = "") -> list[str]:
    """Refuses the first key of a config.json that is unknown or has a value that is not allowed.

    Returns:
        The keys that are ignored.
    """
    ignored: list[str] = []
    for key, value in config.items():
        where, kind = f"{file}: {path}{key}", keys.get(key)
        shown = value if len(repr(value)) <= 80 else str(value)[:80] + "..."
        if isinstance(kind, type | UnionType):
            types: tuple[Any, ...] = get_args(kind) or (kind,)
            # In JSON, unlike in Python, true is not a number, and an integer is one.
            fits = isinstance(value, (int, *types) if float in types else types)
            if not fits or (isinstance(value, bool) and bool not in types):
                words = " or ".join(_TYPES[one] for one in types if one in _TYPES)
                raise refuse(where, shown, f"a value: {words}{', or null' if NoneType in types else ''}")
        elif isinstance(kind, tuple):
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in kind):
                raise refuse(where, shown, f"{', '.join(map(repr, kind))}; {vouch(path + key)}")
        elif isinstance(kind, Mapping | FunctionType):
            if isinstance(value, Mapping):
                ignored += check_keys(_table(kind, value), value, file, f"{path}{key}.")
            elif value is not None:
                raise refuse(where, shown, "an object, or null")
        elif path in ("", "text_config.", "vision_config.") and (
            WITHOUT_EFFECT.fullmatch(key) or key in generation.KEYS
        ):
            ignored.append(path + key)
        elif kind is not UNUSED:
            unknown = f"{where}={shown!r} is unknown here and could change logits"
            raise ValueError(f"{unknown}. {vouch(path + key)}")
    return ignored


def _table(kind: Any, found: Json) -> Keys:
    """The table of a nested object; empty where the family has none."""
    if isinstance(kind, FunctionType):
        return kind(found)
    return kind if isinstance(kind, Mapping) else {}


def vouch(key: str) -> str:
    """Says how a user loads a checkpoint that has this key of config.json, if no logit depends on the key."""
    return f"If no logit depends on it: ignore_config=[{key!r}] (--ignore-config {key})"


def without(config: Json, keys: Sequence[str], file: str, family: Family) -> dict[str, Any]:
    """Removes the keys of a config.json that the user vouches for."""
    found = copy.deepcopy(dict(config))
    for key in dict.fromkeys(keys):
        kind: Any = family.keys
        inside: Any = {"": found}
        last = ""
        for part in [key] if key in found else key.split("."):  # keys of GGUF have dots
            inside = inside[last]
            if not isinstance(inside, dict) or part not in inside:
                raise refuse("ignore_config", key, f"a key of {file}")
            kind, last = _table(kind, inside).get(part, UNUSED), part
        if not isinstance(kind, tuple | EllipsisType):
            raise refuse("ignore_config", key, f"a key that {family.name} does not read for its logits")
        del inside[last]
    return found


def need(config: Json, *keys: str) -> Any:
    """Returns the value of the first of `keys` that is present and not null."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise refuse(f"config.json: {keys[0]}", None, "a value: this family cannot be built without it")


def listed_ids(value: Any) -> list[int]:
    """Returns an `eos_token_id` as a list."""
    found = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(isinstance(x, int) for x in found):
        raise refuse("config.json: eos_token_id", value, "an id, or a list of ids")
    return found


def common_fields(config: Json) -> dict[str, Any]:
    """Converts what every config.json has: the special ids, and the dtype (`dtype`, formerly `torch_dtype`).

    Returns:
        Fields of `ModelConfig`: mask, pad, eos, ends (further ids that end an answer) and dtype. A missing or negative
        padding id becomes `eos`.
    """
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in get_args(ComputeType):
        raise refuse("config.json: dtype", dtype, ", ".join(get_args(ComputeType)))
    ends = listed_ids(config.get("eos_token_id")) or [0]
    pad = config.get("pad_token_id")
    pad = ends[0] if pad is None or pad < 0 else pad
    return dict(mask=config.get("mask_token_id"), pad=pad, eos=ends[0], ends=tuple(ends[1:]), dtype=dtype)


# Keys that transformers writes into the config.json of every model, and keys that other tools are known to add.
COMMON = allow({
    "architectures": list | None, "eos_token_id": int | list | None, "pad_token_id mask_token_id": int | None,
    "dtype torch_dtype": str | None, "is_encoder_decoder add_cross_attention": (False,),
    "pruned_heads": ({}, None), "quantization_config": (None,),
})  # fmt: skip


# --- Llama-like checkpoints: keys of config.json

# Tensors that are not parameters: rotary frequencies are computed from the config, and a tied head is the embedding.
IGNORED = (r"rotary_emb\.inv_freq$", r"^lm_head\.weight$")
# rope_parameters (rope_scaling before transformers 5) by type
_ROPE = allow({"rope_type type": str, "rope_theta": float, "partial_rotary_factor": (1, 1.0)})
_FACTOR = _ROPE | {"factor": float}
_LENGTH = _FACTOR | {"original_max_position_embeddings": int}
ROPES: dict[str, Keys] = {
    "default": _ROPE,
    "linear": _FACTOR,
    "dynamic": _FACTOR,
    "llama3": _LENGTH | allow({"low_freq_factor high_freq_factor": float}),
    "yarn": _LENGTH | allow({
        "attention_factor beta_fast beta_slow mscale mscale_all_dim": float | None, "truncate": bool
    }),
    "longrope": _LENGTH | allow({"factor attention_factor": float | None, "short_factor long_factor": list}),
}  # fmt: skip


def _rope_keys(found: Json) -> Keys:
    """Selects the table of keys of `rope_parameters` by its type."""
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in ROPES:
        raise refuse("config.json: rope_scaling", kind, ", ".join(ROPES))
    return ROPES[kind]


KEYS = COMMON | allow({
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads": int,
    "max_position_embeddings": int,
    "num_key_value_heads head_dim original_max_position_embeddings": int | None,
    "rms_norm_eps rope_theta": float, "tie_word_embeddings": bool,
    "hidden_act": ("silu", "swish"), "partial_rotary_factor": (1, 1.0, None), "mlp_bias": (False,),
    "rope_parameters rope_scaling": _rope_keys,
})  # fmt: skip
NO_WINDOW = allow({  # of a model without sliding windows; one may be named there and not used
    "layer_types": list | None, "use_sliding_window": (False, None), "sliding_window max_window_layers": UNUSED,
})  # fmt: skip
WINDOW = allow({
    "use_sliding_window": bool, "sliding_window": int | None, "max_window_layers": int, "layer_types": list | None,
})  # fmt: skip
NO_BIAS = {"attention_bias": (False,)}
BIAS = {"attention_bias": bool}

# Qwen2's class, and diffusion models made from it. By the class, queries, keys and values have biases.
QWEN2_KEYS = KEYS | NO_WINDOW | {"attention_bias": UNUSED}


# --- config.json -> our config


def decoder_config(config: Json, *, default_mask: int | None = None, **ours: Any) -> ModelConfig:
    """Converts a config.json of this kind.

    Args:
        **ours: Fields of `ModelConfig` that the family adds or overrides.
    """
    heads, width = need(config, "num_attention_heads"), need(config, "hidden_size")
    if heads < 1:
        raise refuse("config.json: num_attention_heads", heads, "1 or more")
    theta, scaling = _rope_of(config)
    context = config.get("max_position_embeddings", 2048)
    if scaling is not None and scaling.kind == "dynamic":  # here the key means the original context
        context = round(context * max(scaling.factor, 1.0))
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    bias = bool(config.get("attention_bias", False))
    fields = dict(
        vocab=need(config, "vocab_size"), width=width, layers=need(config, "num_hidden_layers"), heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads, head_dim=width // heads if head_dim is None else head_dim,
        ffn=need(config, "intermediate_size"), rope_theta=theta, rope_scaling=scaling, qk_norm=False,
        qkv_bias=bias, out_bias=bias, mlp_bias=config.get("mlp_bias", False),
        tied=config.get("tie_word_embeddings", False), zero_centred=False, scale_embed=False,
        norm_eps=config.get("rms_norm_eps", 1e-6), context=context, **_window_fields(config),
        **common_fields({"mask_token_id": default_mask, **config}),
    )  # fmt: skip
    return ModelConfig(**(fields | ours))


def _window_fields(config: Json) -> dict[str, Any]:
    """Converts the sliding window: its layers are listed in `layer_types`, or start at `max_window_layers`."""
    layers, kinds = need(config, "num_hidden_layers"), config.get("layer_types")
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    if kinds is None:
        first = config.get("max_window_layers", 28)
        full = range(layers if window is None else min(max(first, 0), layers))
    else:
        check_layer_types(kinds, layers)
        full = [i for i in range(layers) if kinds[i] == FULL]
        if window is None and len(full) < layers:
            raise refuse("config.json: layer_types", SLIDING, f"{FULL}: no sliding window is used")
    return {} if window is None or len(full) == layers else dict(window=window, global_layers=tuple(full))


def check_layer_types(kinds: list[str], layers: int) -> None:
    """Checks `layer_types`."""
    if len(kinds) != layers:
        raise refuse("config.json: layer_types", f"{len(kinds)} entries", f"{layers}, one a layer")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise refuse("config.json: layer_types", kind, f"{FULL}, {SLIDING}")


def _rope_of(config: Json) -> tuple[float, RopeScaling | None]:
    """Converts `rope_parameters`, or `rope_theta` and `rope_scaling` from before transformers 5.

    Returns:
        (theta, scaling); scaling is None for plain rotary embeddings.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("rope_parameters") and config.get("rope_scaling"):
        raise refuse("config.json: rope_scaling", config["rope_scaling"], "null beside rope_parameters")
    theta = float(found.get("rope_theta", config.get("rope_theta", 10_000.0)))
    if not theta > 1:
        raise refuse("config.json: rope_theta", theta, "more than 1")
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind == "default":
        return theta, None
    longest = config.get("max_position_embeddings", 2048)
    factor = 0.0 if kind == "longrope" else float(need(found, "factor"))
    if kind == "linear":
        return theta, RopeScaling(kind=kind, factor=factor)
    if kind == "dynamic":
        return theta, RopeScaling(kind=kind, factor=factor, original=need(config, "max_position_embeddings"))
    # As in transformers, a length at the top level of config.json (Phi 3) overrides the one in rope_parameters.
    original = config.get("original_max_position_embeddings")
    original = found.get("original_max_position_embeddings", longest) if original is None else original
    if original < 2:
        raise refuse("config.json: original_max_position_embeddings", original, "2 or more")
    if kind == "llama3":
        low, high = float(need(found, "low_freq_factor")), float(need(found, "high_freq_factor"))
        return theta, RopeScaling(kind=kind, factor=factor, original=original, low=low, high=high)
    attention = found.get("attention_factor")
    if kind == "yarn":
        # YaRN scales queries and keys by 0.1 ln(factor) + 1 (arXiv 2309.00071); DeepSeek by a ratio of two such terms.
        if attention is None:
            scale = lambda m: 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0
            top, bottom = found.get("mscale"), found.get("mscale_all_dim")
            attention = scale(top) / scale(bottom) if top and bottom else scale(1.0)
        return theta, RopeScaling(
            kind=kind, factor=factor, original=original, fast=float(found.get("beta_fast") or 32),
            slow=float(found.get("beta_slow") or 1), attention=float(attention), truncate=found.get("truncate", True),
        )  # fmt: skip
    # longrope: one factor per rotary frequency, for contexts up to `original` and beyond it.
    short, long = (tuple(map(float, need(found, f"{name}_factor"))) for name in ("short", "long"))
    if attention is None:
        stretch = longest / original if found.get("factor") is None else found["factor"]
        attention = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return theta, RopeScaling(
        kind=kind, factor=longest / original, original=original, attention=float(attention), short=short, long=long
    )  # fmt: skip


# --- tensor names


def tensor_names(c: ModelConfig) -> dict[str, TensorSource]:
    """Maps the parameters of a Llama-like model to the tensors of its checkpoint."""
    sources = {
        "embed": TensorSource("model.embed_tokens.weight"),
        "norm/scale": TensorSource("model.norm.weight"),
    }
    if not c.tied:
        sources["head"] = TensorSource("lm_head.weight", 1)
    for i in range(c.layers):
        ours, theirs = f"block_{i}/", f"model.layers.{i}."
        sources[f"{ours}attention_norm/scale"] = TensorSource(f"{theirs}input_layernorm.weight")
        sources[f"{ours}mlp_norm/scale"] = TensorSource(f"{theirs}post_attention_layernorm.weight")
        mine, attention = f"{ours}attention/", f"{theirs}self_attn."
        for p in "qkv":
            sources[f"{mine}{p}/w"] = TensorSource(f"{attention}{p}_proj.weight", 1)
            if c.qkv_bias:
                sources[f"{mine}{p}/b"] = TensorSource(f"{attention}{p}_proj.bias", fold=2)
            if c.qk_norm and p != "v":
                sources[f"{mine}{p}_norm/scale"] = TensorSource(f"{attention}{p}_norm.weight")
        sources[f"{mine}o/w"] = TensorSource(f"{attention}o_proj.weight", 2)
        if c.out_bias:
            sources[f"{mine}o/b"] = TensorSource(f"{attention}o_proj.bias")
        if c.experts is None or i in c.experts.dense:
            sources |= mlp_names(f"{ours}mlp/", f"{theirs}mlp.", c.mlp_bias)
        else:
            sources |= expert_names(c.experts, f"{ours}moe/", f"{theirs}mlp.")
    return sources


def mlp_names(ours: str, theirs: str, bias: bool = False) -> dict[str, TensorSource]:
    """Maps gate, up and down of a dense MLP to the tensors of a checkpoint."""
    parts = ("gate", "up", "down")
    sources = {f"{ours}{p}/w": TensorSource(f"{theirs}{p}_proj.weight", 1) for p in parts}
    return sources | ({f"{ours}{p}/b": TensorSource(f"{theirs}{p}_proj.bias") for p in parts} if bias else {})


def expert_names(e: Experts, ours: str, theirs: str) -> dict[str, TensorSource]:
    """Maps the router and the experts' gate, up and down to the tensors of a checkpoint.

    The checkpoint has one tensor per expert; our parameters stack them, with gate and up concatenated.
    """
    each = f"{theirs}experts.{{e}}."
    return {
        f"{ours}router": TensorSource(f"{theirs}gate.weight", 1),
        f"{ours}gate_up": TensorSource((f"{each}gate_proj.weight", f"{each}up_proj.weight"), 1, e.count),
        f"{ours}down": TensorSource(f"{each}down_proj.weight", 1, e.count),
    }


# --- families and their registry


class Family(NamedTuple):
    """One family of checkpoints.

    Attributes:
        name: The name that users see.
        architectures: Values of `architectures` in config.json that may belong to this family; `fits` decides.
        checkpoints: Ids of published models on the Hugging Face hub.
        keys: The keys that config.json may have, or a function from config.json to them.
        config: config.json -> our config; ValueError if it is not supported. Call `read`, which checks the keys first.
        noise: The noise that the models were trained with, or a function from config.json to it; None for
            autoregressive models.
        names: Our config -> the tensors of each parameter, by path ("block_0/attention/q/w").
        block: Block sizes of the published models, for tables.
        about: One line, for tables.
        ignored: Regular expressions of tensors that are not read, or a function from our config to them.
        fits: config.json with a known architecture -> whether it belongs to this family. For architectures that
            several families have.
        export: Our config -> config.json; None if the family cannot be written.
        licence: Licence of the published models.
        decoding: Published sampling settings, with the keys of `hub.generation`; generation_config.json overrides
            them. Or a function (config.json, generation_config.json) -> settings.
        aliases: Module -> other modules that share its weight in the reference implementation. LoRA adapters are
            written for each of them.
        rank: Order in which families are tried, for reading and for writing. 0: diffusion models with an architecture
            of their own. 1: diffusion models that share an architecture or layout with a family of rank 0 or 2. 2:
            autoregressive models.
    """

    name: str
    architectures: tuple[str, ...]
    checkpoints: tuple[str, ...]
    keys: Keys | Callable[[Json], Keys]
    config: Callable[[Json], ModelConfig]
    noise: NoiseConfig | Callable[[Json], NoiseConfig] | None
    names: Callable[[ModelConfig], dict[str, TensorSource]] = tensor_names
    about: str = ""
    block: str = "any"
    ignored: tuple[str, ...] | Callable[[ModelConfig], tuple[str, ...]] = IGNORED
    fits: Callable[[Json], bool] = lambda config: True
    export: Callable[[ModelConfig], dict[str, Any]] | None = None
    licence: str = "see the checkpoint"
    decoding: Mapping[str, Any] | Callable[[Json, Json], Mapping[str, Any]] = {}
    aliases: Callable[[str], tuple[str, ...]] = lambda module: ()
    rank: int = 0

    def read(self, config: Json, file: str = "config.json") -> ModelConfig:
        """Checks the keys of a config.json and converts it to our config."""
        self.ignored_keys(config, file)
        return self.config(config)

    def ignored_keys(self, config: Json, file: str) -> list[str]:
        """Checks the keys of a config.json."""
        return check_keys(_table(self.keys, config), config, f"{file} ({self.name})")

    def uses(self, tensor: str, config: ModelConfig) -> bool:
        """Says whether a tensor of a checkpoint must be a parameter of the model."""
        patterns = self.ignored(config) if callable(self.ignored) else self.ignored
        return not any(re.search(pattern, tensor) for pattern in patterns)


# --- the registry

_REGISTERED: list[Family] = []


def register(*found: Family) -> None:
    """Adds families to the registry. Importing `mercury_jax.hub` registers those of this package.

    Args:
        *found: The families.

    Raises:
        ValueError: Another family has the same name.

    Example:
        >>> hub.register(DREAM._replace(name="Mine", architectures=("MyModel",), checkpoints=()))
    """
    for family in found:
        if any(family.name == other.name for other in _REGISTERED):
            raise refuse("name of a family", family.name, "a name that no other family has")
        _REGISTERED.append(family)
    _REGISTERED.sort(key=lambda family: family.rank)


def families() -> tuple[Family, ...]:
    """Returns all families, in the order in which they are tried."""
    return tuple(_REGISTERED)


def family_of(config: Json) -> tuple[Family, list[str]]:
    """Finds the family of a config.json, by `architectures` and `Family.fits`.

    `model_type` is not used: LLaDA-MoE has the model type of LLaDA.

    Returns:
        (the family, notes for the user). A note names another family that would fit if config.json named a mask id.
    """
    named = config.get("architectures") or []
    named = named if isinstance(named, list) and all(isinstance(x, str) for x in named) else []
    able = [family for family in _REGISTERED if set(named) & set(family.architectures)]
    found = next((family for family in able if family.fits(config)), None)
    if found is None:
        known = ", ".join(name for family in _REGISTERED for name in family.architectures)
        raise refuse("config.json: architectures", named, known)
    return found, [
        f"config.json fits {other.name} as well, which is {other.about}, and names no mask: read as {found.name}; "
        f"pass mask= (--mask) to read it as {other.name}"
        for other in able
        if other is not found and other.fits({**config, "mask_token_id": 0}) and not other.fits(config)
    ]


def named_family(name: str) -> Family:
    """Finds a family by its name or one of its architectures."""
    plain = lambda text: "".join(c for c in text.lower() if c.isalnum())
    for family in families():
        if plain(name) in map(plain, (family.name, *family.architectures)):
            return family
    raise refuse("family", name, ", ".join(family.name for family in families()))


def writers(config: ModelConfig) -> list[Family]:
    """Finds the families that can hold a model: writing and reading config.json gives back the same config."""
    able = []
    # Fields that config.json does not have and that change no logit: a bidirectional model can be decoded with any
    # block size, and `predicts_next` only says whether a causal encoder was trained to predict, too.
    named = {"bidirectional": ("block",), "causal_encoder": ("predicts_next",)}.get(config.pattern, ())
    free = {name: getattr(config, name) for name in named}
    for family in families():
        try:
            if family.export is not None:
                again = family.read(family.export(config))
                able += [family] if dataclasses.replace(again, **free) == config else []
        except (ValueError, AssertionError, TypeError):
            continue
    return able


def plain_build(config: ModelConfig) -> ModelConfig:
    """Converts the config of our own architecture to plain RMSNorm and unscaled embeddings, as other libraries have.

    Our norms multiply by 1 + scale (`zero_centred`) and our embeddings are multiplied by sqrt(width) (`scale_embed`).

    Returns:
        The config of a model with the same logits, once both factors are multiplied into the parameters
        (`export._multiplied_out`). A tied head is untied if the embedding is scaled. Other configs are unchanged.
    """
    if type(config) is not ModelConfig or not (config.zero_centred or config.scale_embed):
        return config
    tied = config.tied and not config.scale_embed
    return dataclasses.replace(config, zero_centred=False, scale_embed=False, tied=tied)


FLOATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclasses.dataclass(frozen=True)
class Opened:
    """A checkpoint with its converted config, before any tensor is read.

    Attributes:
        path: The folder, or the config.json.
        folder: Its files and the headers of its tensors; an `Exported` in our own layout.
        family: The checkpoint family; None in our own layout.
        name: The model's name.
        config: The config, converted to ours.
        model: The model built from `config`.
        noise: The noise that it was trained with; None for an autoregressive model.
        card: Metadata. In Hugging Face's layout: family, architecture, licence and notes.
        decoding: Sampling settings of the reference implementation; see `LM.decoding`.
        quantised: The matrices that the checkpoint has quantised; None without any.
        lost: Notes about settings of generation that are not applied.
    """

    path: Path
    folder: Folder | Exported
    family: Family | None
    name: str
    config: ModelConfig
    model: Model
    noise: NoiseConfig | None
    card: Mapping[str, Any]
    decoding: Mapping[str, Any]
    quantised: QuantisedTensors | None = None
    lost: tuple[str, ...] = ()

    @property
    def stored_dtype(self) -> np.dtype:
        """The dtype in which most bytes of the unquantised tensors are stored; without tensors, that of the config."""
        sizes: dict[np.dtype, int] = {}
        skip = set() if self.quantised is None else self.quantised.tensors()
        for name, entry in self.folder.tensors.items():
            if name not in skip and (self.quantised is None or entry.dtype.name in FLOATS):
                sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
        return max(sizes, key=lambda kind: sizes[kind]) if sizes else np.dtype(jnp.dtype(self.config.dtype))
