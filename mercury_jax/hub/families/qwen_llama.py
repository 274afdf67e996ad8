"""Qwen2.5, Qwen3 and Llama 3: autoregressive, and what many diffusion models are made from.

The families of such diffusion models (Dream, SDAR, Fast-dLLM v2, A2D, LLaDA2) use the tables of keys, `config_fields`,
`tensor_names` and `export_config` of this file.
"""

from __future__ import annotations

import math
from typing import Any

from mercury_jax.config import Experts, ModelConfig, RopeScaling, refuse
from mercury_jax.hub.family import (
    BOOL,
    COMMON,
    INT,
    LIST,
    NULL,
    NUMBER,
    TEXT,
    ConfigKeys,
    Family,
    Json,
    TensorSource,
    dtype_of,
    need,
    special_ids,
)

# No parameters: rotary frequencies follow from the config, and a tied head repeats the embedding.
IGNORED = (r"rotary_emb\.inv_freq$", r"^lm_head\.weight$")
FULL, SLIDING = "full_attention", "sliding_attention"

# --- keys of config.json

# rope_parameters (rope_scaling before transformers 5) by type
_ROPE = ConfigKeys(
    used={"rope_type": TEXT, "type": TEXT, "rope_theta": NUMBER}, only={"partial_rotary_factor": (1, 1.0)}
)
_LENGTH = {"factor": NUMBER, "original_max_position_embeddings": INT}
ROPES: dict[str, ConfigKeys] = {
    "default": _ROPE,
    "linear": _ROPE.plus(ConfigKeys(used={"factor": NUMBER})),
    "dynamic": _ROPE.plus(ConfigKeys(used={"factor": NUMBER})),
    "llama3": _ROPE.plus(ConfigKeys(used={**_LENGTH, "low_freq_factor": NUMBER, "high_freq_factor": NUMBER})),
    "yarn": _ROPE.plus(
        ConfigKeys(
            used={
                **_LENGTH, "attention_factor": NUMBER + NULL, "beta_fast": NUMBER + NULL, "beta_slow": NUMBER + NULL,
                "mscale": NUMBER + NULL, "mscale_all_dim": NUMBER + NULL, "truncate": BOOL,
            }
        )
    ),
    "longrope": _ROPE.plus(
        ConfigKeys(
            used={
                **_LENGTH, "factor": NUMBER + NULL, "attention_factor": NUMBER + NULL,
                "short_factor": LIST, "long_factor": LIST,
            }
        )
    ),
}  # fmt: skip


def _rope_keys(found: Json) -> ConfigKeys:
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in ROPES:
        raise refuse("config.json: rope_scaling", kind, ", ".join(ROPES))
    return ROPES[kind]


KEYS = COMMON.plus(
    ConfigKeys(
        used={
            "vocab_size": INT, "hidden_size": INT, "intermediate_size": INT, "num_hidden_layers": INT,
            "num_attention_heads": INT, "num_key_value_heads": INT + NULL, "head_dim": INT + NULL,
            "rms_norm_eps": NUMBER, "max_position_embeddings": INT, "original_max_position_embeddings": INT + NULL,
            "rope_theta": NUMBER, "tie_word_embeddings": BOOL,
        },
        only={"hidden_act": ("silu", "swish"), "partial_rotary_factor": (1, 1.0, None), "mlp_bias": (False,)},
        nested={"rope_parameters": _rope_keys, "rope_scaling": _rope_keys},
    )
)  # fmt: skip
NO_WINDOW = ConfigKeys(  # of a model without sliding windows; one may be named there and not used
    used={"layer_types": LIST + NULL},
    only={"use_sliding_window": (False, None)},
    unused=dict.fromkeys(("sliding_window", "max_window_layers"), "use_sliding_window is false"),
)
WINDOW = ConfigKeys(
    used={
        "use_sliding_window": BOOL, "sliding_window": INT + NULL, "max_window_layers": INT, "layer_types": LIST + NULL,
    }
)  # fmt: skip
FIXED_BIAS = ConfigKeys(
    unused={"attention_bias": "the class has biases on queries, keys and values, and no others"}
)
NO_BIAS = ConfigKeys(only={"attention_bias": (False,)})
BIAS = ConfigKeys(used={"attention_bias": BOOL})
EXPERTS = ConfigKeys(
    used={
        "num_experts": INT, "num_local_experts": INT, "num_experts_per_tok": INT, "moe_intermediate_size": INT,
        "norm_topk_prob": BOOL, "decoder_sparse_step": INT, "mlp_only_layers": LIST + NULL,
    }
)  # fmt: skip


# --- config.json -> our config


def config_fields(config: Json, **ours: Any) -> dict[str, Any]:
    """Converts a config.json of this kind.

    Args:
        config: config.json.
        **ours: Fields of `ModelConfig` that the family adds or overrides.

    Returns:
        Fields of `ModelConfig`.

    Raises:
        ValueError: A value is missing or not supported.
    """
    heads, width = need(config, "num_attention_heads"), need(config, "hidden_size")
    if heads < 1:
        raise refuse("config.json: num_attention_heads", heads, "1 or more")
    theta, scaling = _rope_of(config)
    # Rotary embeddings whose frequencies change with the length are only built up to the original context.
    context = config.get("max_position_embeddings", 2048)
    context = min(context, scaling.original) if scaling is not None and scaling.bounded else context
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    bias = bool(config.get("attention_bias", False))
    found = dict(
        vocab=need(config, "vocab_size"), width=width, layers=need(config, "num_hidden_layers"), heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads, head_dim=width // heads if head_dim is None else head_dim,
        ffn=need(config, "intermediate_size"), rope_theta=theta, rope_scaling=scaling, qk_norm=False,
        qkv_bias=bias, out_bias=bias, mlp_bias=config.get("mlp_bias", False),
        tied=config.get("tie_word_embeddings", False),
        zero_centred=False, scale_embed=False, norm_eps=config.get("rms_norm_eps", 1e-6),
        context=context, dtype=dtype_of(config), **special_ids(config), **_window_fields(config),
    )  # fmt: skip
    return found | ours


def autoregressive(config: Json, **ours: Any) -> ModelConfig:
    """Returns the config of a model that only predicts the next token; arguments as of `config_fields`."""
    causal: dict[str, Any] = dict(pattern="block_causal", block=1, predicts_next=True, mask=None)
    return ModelConfig(**(config_fields(config) | causal | ours))


def _window_fields(config: Json) -> dict[str, Any]:
    """Layers with a sliding window: those of `layer_types`, or without it all from `max_window_layers` on."""
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
    if window is None or len(full) == layers:
        return {}
    return dict(window=window, global_layers=tuple(full))


def check_layer_types(kinds: list[Any], layers: int) -> None:
    """Checks `layer_types`.

    Args:
        kinds: One kind of attention a layer.
        layers: The number of layers.

    Raises:
        ValueError: The list has another length, or a kind that we do not build.
    """
    if len(kinds) != layers:
        raise refuse("config.json: layer_types", f"{len(kinds)} entries", f"{layers}, one a layer")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise refuse("config.json: layer_types", kind, f"{FULL}, {SLIDING}")


def _rope_of(config: Json) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters`, or from `rope_theta` and `rope_scaling` before transformers 5."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("rope_parameters") and config.get("rope_scaling"):
        raise refuse("config.json: rope_scaling", config["rope_scaling"], "null beside rope_parameters")
    theta = float(found.get("rope_theta", config.get("rope_theta", 10_000.0)))
    if not theta > 1:
        raise refuse("config.json: rope_theta", theta, "more than 1")
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind == "default":
        return theta, None
    most = config.get("max_position_embeddings", 2048)
    if kind == "linear":
        return theta, RopeScaling(kind=kind, factor=float(need(found, "factor")))
    if kind == "dynamic":
        most = need(config, "max_position_embeddings")
        return theta, RopeScaling(kind=kind, factor=float(need(found, "factor")), original=most)
    # A length beside rope_parameters, as in Phi 3, overrides the one within.
    original = config.get("original_max_position_embeddings")
    original = found.get("original_max_position_embeddings", most) if original is None else original
    if original < 2:
        raise refuse("config.json: original_max_position_embeddings", original, "2 or more")
    return theta, _long_context_scaling(kind, found, original, most)


def _long_context_scaling(kind: Any, found: Json, original: int, most: int) -> RopeScaling:
    """The kinds that extend a model from `original` to `most` positions."""
    if kind == "llama3":
        low, high = need(found, "low_freq_factor"), need(found, "high_freq_factor")
        factor = float(need(found, "factor"))
        return RopeScaling(kind=kind, factor=factor, original=original, low=float(low), high=float(high))
    if kind == "yarn":
        factor = float(need(found, "factor"))
        return RopeScaling(
            kind=kind, factor=factor, original=original, fast=float(found.get("beta_fast") or 32),
            slow=float(found.get("beta_slow") or 1), attention=_yarn_attention(found, factor),
            truncate=found.get("truncate", True),
        )  # fmt: skip
    short, long = (tuple(map(float, need(found, f"{name}_factor"))) for name in ("short", "long"))
    factor = found.get("factor")
    attention = found.get("attention_factor")
    if attention is None:
        factor = most / original if factor is None else factor
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        kind=kind, factor=most / original, original=original, attention=float(attention), short=short, long=long
    )  # fmt: skip


def _yarn_attention(found: Json, factor: float) -> float:
    """What multiplies cos and sin: as given, or DeepSeek's ratio of two scales, or YaRN's 0.1 ln(factor) + 1."""
    given, top, bottom = (found.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    scale = lambda m: 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0
    if given is not None:
        return float(given)
    return scale(top) / scale(bottom) if top and bottom else scale(1.0)


def experts_of(config: Json, **ours: Any) -> Experts | None:
    """Converts Qwen3's mixture of experts.

    Args:
        config: config.json.
        **ours: Fields of `Experts` that the family adds or overrides.

    Returns:
        The experts; None if the model has none.

    Raises:
        ValueError: A value is missing, or two contradict each other.
    """
    counts = {config[key] for key in ("num_experts", "num_local_experts") if key in config}
    if not any(counts):
        return None
    if len(counts) > 1:
        raise refuse("config.json: num_local_experts", sorted(counts), "the same number as num_experts")
    layers, step = need(config, "num_hidden_layers"), config.get("decoder_sparse_step", 1)
    if step < 1:
        raise refuse("config.json: decoder_sparse_step", step, "1 or more")
    plain = set(config.get("mlp_only_layers") or [])
    found: dict[str, Any] = dict(
        count=need(config, "num_experts", "num_local_experts"), active=need(config, "num_experts_per_tok"),
        width=need(config, "moe_intermediate_size"), renormalise=bool(config.get("norm_topk_prob", False)),
        dense=tuple(i for i in range(layers) if i in plain or (i + 1) % step),
    )  # fmt: skip
    return Experts(**(found | ours))


# --- tensor names


def tensor_names(c: ModelConfig) -> dict[str, TensorSource]:
    """Returns where each parameter is, by its path."""
    stem = "model."
    found = {
        "embed": TensorSource(f"{stem}embed_tokens.weight"),
        "norm/scale": TensorSource(f"{stem}norm.weight"),
    }
    if not c.tied:
        found["head"] = TensorSource("lm_head.weight", 1)
    for i in range(c.layers):
        ours, theirs = f"block_{i}/", f"{stem}layers.{i}."
        found |= {
            f"{ours}attention_norm/scale": TensorSource(f"{theirs}input_layernorm.weight"),
            f"{ours}mlp_norm/scale": TensorSource(f"{theirs}post_attention_layernorm.weight"),
            **_attention_names(c, f"{ours}attention/", f"{theirs}self_attn."),
        }
        if c.experts is None or i in c.experts.dense:
            found |= mlp_names(f"{ours}mlp/", f"{theirs}mlp.", c.mlp_bias)
        else:
            found |= expert_names(c.experts, f"{ours}moe/", f"{theirs}mlp.")
    return found


def _attention_names(c: ModelConfig, ours: str, theirs: str) -> dict[str, TensorSource]:
    found = {f"{ours}{p}/w": TensorSource(f"{theirs}{p}_proj.weight", 1) for p in "qkv"}
    found[f"{ours}o/w"] = TensorSource(f"{theirs}o_proj.weight", 2)
    if c.qkv_bias:
        found |= {f"{ours}{p}/b": TensorSource(f"{theirs}{p}_proj.bias", fold=2) for p in "qkv"}
    if c.out_bias:
        found[f"{ours}o/b"] = TensorSource(f"{theirs}o_proj.bias")
    if c.qk_norm:
        found |= {f"{ours}{p}_norm/scale": TensorSource(f"{theirs}{p}_norm.weight") for p in "qk"}
    return found


def mlp_names(ours: str, theirs: str, bias: bool = False) -> dict[str, TensorSource]:
    """Returns where gate, up and down of a dense layer are.

    Args:
        ours: Precedes the names of our parameters.
        theirs: Precedes the names of the file's tensors.
        bias: Whether they have biases.

    Returns:
        Sources by path.
    """
    parts = ("gate", "up", "down")
    found = {f"{ours}{p}/w": TensorSource(f"{theirs}{p}_proj.weight", 1) for p in parts}
    return found | ({f"{ours}{p}/b": TensorSource(f"{theirs}{p}_proj.bias") for p in parts} if bias else {})


def expert_names(e: Experts, ours: str, theirs: str) -> dict[str, TensorSource]:
    """Returns where the router and gate, up and down of each expert are.

    Args:
        e: The experts.
        ours: Precedes the names of our parameters.
        theirs: Precedes the names of the file's tensors.

    Returns:
        Sources by path.
    """
    each = f"{theirs}experts.{{e}}."
    return {
        f"{ours}router": TensorSource(f"{theirs}gate.weight", 1),
        f"{ours}gate_up": TensorSource((f"{each}gate_proj.weight", f"{each}up_proj.weight"), 1, e.count),
        f"{ours}down": TensorSource(f"{each}down_proj.weight", 1, e.count),
    }


# --- our config -> config.json


def export_config(c: ModelConfig, **theirs: Any) -> dict[str, Any]:
    """Converts our config to a config.json that transformers reads.

    Args:
        c: Our config.
        **theirs: Keys that the family adds or overrides.

    Returns:
        The object.
    """
    s = c.rope_scaling
    longest = round(s.original * s.factor) if s is not None and s.kind == "longrope" else c.context
    found: dict[str, Any] = dict(
        vocab_size=c.vocab, hidden_size=c.width, num_hidden_layers=c.layers, num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads, head_dim=c.head_dim, intermediate_size=c.ffn, hidden_act="silu",
        rope_theta=c.rope_theta, rope_scaling=None if s is None else _exported_scaling(s), rms_norm_eps=c.norm_eps,
        max_position_embeddings=longest, tie_word_embeddings=c.tied, attention_bias=c.qkv_bias,
        pad_token_id=c.pad, eos_token_id=[c.eos, *c.ends] if c.ends else c.eos, torch_dtype=c.dtype,
    )  # fmt: skip
    if c.mask is not None:
        found["mask_token_id"] = c.mask
    if c.mlp_bias:
        found["mlp_bias"] = True
    if c.window is not None:
        kinds = [FULL if c.is_global(i) else SLIDING for i in range(c.layers)]
        found |= dict(use_sliding_window=True, sliding_window=c.window, layer_types=kinds)
    if c.experts is not None:
        e = c.experts
        found |= dict(
            num_experts=e.count, num_experts_per_tok=e.active, moe_intermediate_size=e.width,
            norm_topk_prob=e.renormalise, mlp_only_layers=list(e.dense), decoder_sparse_step=1,
        )  # fmt: skip
    return found | theirs


def _exported_scaling(s: RopeScaling) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": s.kind}
    if s.kind != "longrope":
        found["factor"] = s.factor
    if s.kind not in ("linear", "dynamic"):
        found["original_max_position_embeddings"] = s.original
    if s.kind == "llama3":
        found |= {"low_freq_factor": s.low, "high_freq_factor": s.high}
    if s.kind == "yarn":
        found |= dict(beta_fast=s.fast, beta_slow=s.slow, attention_factor=s.attention, truncate=s.truncate)
    if s.kind == "longrope":
        found |= {"short_factor": list(s.short), "long_factor": list(s.long), "attention_factor": s.attention}
    return found


# --- the families


QWEN2 = Family(
    name="Qwen2.5",
    architectures=("Qwen2ForCausalLM",),
    checkpoints=("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-Coder-7B-Instruct"),
    keys=KEYS.plus(WINDOW)
    .plus(FIXED_BIAS)
    .plus(ConfigKeys(only={"model_type": ("qwen2",), "use_mrope": (False,)})),
    # Biases on queries, keys and values, whatever the config says about others.
    config=lambda config: autoregressive(config, qkv_bias=True, out_bias=False),
    names=tensor_names,
    noise=None,
    about="autoregressive, grouped queries with biases",
    ignored=IGNORED,
    export=lambda c: export_config(c, architectures=["Qwen2ForCausalLM"], model_type="qwen2"),
    licence="Apache-2.0 (3B and 72B: Qwen's own)",
)


def _qwen3_keys(config: Json) -> ConfigKeys:
    known = KEYS.plus(WINDOW).plus(BIAS)
    if "Qwen3ForCausalLM" in config["architectures"]:
        return known.plus(ConfigKeys(only={"model_type": ("qwen3",)}))
    why = "every layer has the window, if there is one"
    all_layers = {"max_window_layers": why, "layer_types": why}
    return known.plus(EXPERTS).plus(ConfigKeys(only={"model_type": ("qwen3_moe",)}, unused=all_layers))


def _qwen3_config(config: Json) -> ModelConfig:
    if "Qwen3ForCausalLM" in config["architectures"]:  # the class's head size is 128, not width / heads
        return autoregressive({"head_dim": 128, **config}, qk_norm=True)
    plain = {**config, "max_window_layers": 0, "layer_types": None}
    return autoregressive(plain, qk_norm=True, experts=experts_of(config))


def _qwen3_export(c: ModelConfig) -> dict[str, Any]:
    kind = ("Qwen3ForCausalLM", "qwen3") if c.experts is None else ("Qwen3MoeForCausalLM", "qwen3_moe")
    return export_config(c, architectures=[kind[0]], model_type=kind[1])


QWEN3 = Family(
    name="Qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    checkpoints=("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"),
    keys=_qwen3_keys,
    config=_qwen3_config,
    names=tensor_names,
    noise=None,
    about="autoregressive, normed queries and keys, dense or with experts",
    ignored=IGNORED,
    export=_qwen3_export,
    licence="Apache-2.0",
)

LLAMA3 = Family(
    name="Llama 3",
    architectures=("LlamaForCausalLM",),
    checkpoints=("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B-Instruct"),
    keys=KEYS.plus(BIAS).plus(
        ConfigKeys(
            used={"mlp_bias": BOOL},
            only={
                "model_type": ("llama",), "pretraining_tp": (1,), "sliding_window": (None,),
                "use_sliding_window": (False,),
            },
            unused={"max_sequence_length": "max_position_embeddings says it"},
        )
    ),
    config=autoregressive,
    names=tensor_names,
    noise=None,
    about="autoregressive; TinyLlama and other models of the same build too",
    ignored=IGNORED,
    export=lambda c: export_config(c, architectures=["LlamaForCausalLM"], model_type="llama"),
    licence="Llama community licence",
)  # fmt: skip
