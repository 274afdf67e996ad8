"""DiffusionGemma, and the text models of Gemma 4 from which it is initialised, in the layout of transformers 5.

DiffusionGemma reads text and images. Of Gemma 4 only text is supported: images and audio are refused, and the tensors
of their towers are not read. `hub.convert` to the same family copies these tensors unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from mercury_jax.config import Experts, ModelConfig, NoiseConfig, refuse
from mercury_jax.hub import family, generation
from mercury_jax.hub.family import UNUSED, Family, Json, Keys, allow, need, register
from mercury_jax.hub.params import TensorSource
from mercury_jax.images import VisionConfig
from mercury_jax.models.gemma import GemmaConfig

PATTERN = 6  # without `layer_types`, every sixth layer has global attention
# Tensors that are not parameters of the text model.
OTHER_MODALITIES = (r"vision_tower", r"embed_vision", r"audio_tower", r"embed_audio", r"^lm_head\.weight$")
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}
_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_MIXED = {
    "mlp_branch_norm": "post_feedforward_layernorm_1",
    "moe_norm": "pre_feedforward_layernorm_2",
    "moe_branch_norm": "post_feedforward_layernorm_2",
}

_ROPE: Keys = {"rope_type": str, "rope_theta": float}
_PROPORTIONAL = _ROPE | allow({"partial_rotary_factor factor": float})
_LAYER = allow({"head_dim num_key_value_heads": int})
ROPES: Keys = {
    "sliding_attention": _ROPE,
    "full_attention": lambda found: _PROPORTIONAL if found.get("rope_type") == "proportional" else _ROPE,
}
TEXT_KEYS = family.COMMON | allow({
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads": int,
    "num_key_value_heads head_dim global_head_dim sliding_window max_position_embeddings": int,
    "num_global_key_value_heads num_experts top_k_experts moe_intermediate_size": int | None,
    "layer_types": list | None, "rms_norm_eps": float,
    "hidden_activation": tuple(ACTIVATIONS), "attention_bias": (False,), "tie_word_embeddings": (True,),
    "use_bidirectional_attention": ("vision", None),
    "rope_parameters": ROPES, "per_layer_config": lambda found: {i: _LAYER for i in found if i.isdecimal()},
})  # fmt: skip
# The reference implementation of DiffusionGemma does not have these options of Gemma 4's text model.
DIFFUSION_INNER_KEYS = TEXT_KEYS | allow({
    "final_logit_softcapping": float, "hidden_size_per_layer_input num_kv_shared_layers": (0,),
    "use_double_wide_mlp": (False,),
    "attention_k_eq_v": UNUSED,  # keys are values in every global layer, by its class
})  # fmt: skip
GEMMA4_INNER_KEYS = TEXT_KEYS | allow({
    "final_logit_softcapping": float | None, "attention_k_eq_v enable_moe_block use_double_wide_mlp": bool,
    "hidden_size_per_layer_input vocab_size_per_layer_input num_kv_shared_layers": int,
})  # fmt: skip
# The reference implementation always builds a vision tower, so the config.json of a text-only model describes a
# minimal one.
VISION = dict(
    model_type="gemma4_vision", hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=4, patch_size=2, position_embedding_size=4,
)  # fmt: skip
# The keys beside `text_config`. Images and audio are refused, so no logit depends on the unused ones.
MULTIMODAL = family.COMMON | allow({
    "tie_word_embeddings": (True,),
    "vision_config audio_config boi_token_id eoi_token_id image_token_id video_token_id boa_token_id": UNUSED,
    "eoa_token_id eoa_token_index audio_token_id vision_soft_tokens_per_image": UNUSED,
})  # fmt: skip
VISION_KEYS = family.COMMON | allow({
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim": int,
    "patch_size pooling_kernel_size position_embedding_size": int, "rms_norm_eps": float, "standardize": bool,
    "hidden_activation": tuple(ACTIVATIONS), "attention_bias": (False, None), "use_clipped_linears": (False,),
    "model_type": ("gemma4_vision",), "rope_parameters": {"rope_type": ("axial", "default"), "rope_theta": float},
    # `head_dim` is the size of all heads; the processor says how many soft tokens an image has.
    "global_head_dim default_output_length max_position_embeddings": UNUSED,
})  # fmt: skip
DIFFUSION_KEYS = MULTIMODAL | {
    "canvas_length": int, "model_type": ("diffusion_gemma",), "text_config": DIFFUSION_INNER_KEYS,
    "vision_config": VISION_KEYS,
    **allow({"boi_token_id eoi_token_id image_token_id vision_soft_tokens_per_image": int | None}),
}  # fmt: skip
GEMMA4_KEYS = MULTIMODAL | {"model_type": ("gemma4",), "text_config": GEMMA4_INNER_KEYS}
GEMMA4_TEXT_KEYS = GEMMA4_INNER_KEYS | {"model_type": ("gemma4_text",)}


def _text_of(config: Json) -> Json:
    """Returns the text model's part of config.json, which is all of it for a text-only checkpoint."""
    return config.get("text_config") or config


def _fields(config: Json, **ours: Any) -> dict[str, Any]:
    """Converts the fields of `GemmaConfig` that both models have; `ours` adds the others."""
    text = _text_of(config)
    # Both levels of config.json may list ids that end an answer; the text model's come first.
    ends = [i for part in (text, config) for i in family.listed_ids(part.get("eos_token_id"))]
    dtype = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    common = family.common_fields({**text, **dtype, "eos_token_id": list(dict.fromkeys(ends)) or [1]})
    pad = text.get("pad_token_id")
    fields = common | dict(
        vocab=need(text, "vocab_size"), width=need(text, "hidden_size"), layers=need(text, "num_hidden_layers"),
        heads=need(text, "num_attention_heads"), kv_heads=need(text, "num_key_value_heads"),
        head_dim=need(text, "head_dim"), ffn=need(text, "intermediate_size"), tied=True,
        global_layers=_global_layers(text), window=need(text, "sliding_window"),
        activation=ACTIVATIONS[text.get("hidden_activation", "gelu_pytorch_tanh")],
        norm_eps=text.get("rms_norm_eps", 1e-6), context=text.get("max_position_embeddings", 131_072),
        mask=None, pad=0 if pad is None else pad, **_rope_fields(text),
    )  # fmt: skip
    return fields | ours


def _global_layers(text: Json) -> tuple[int, ...]:
    """Lists the layers with global attention. The last layer always has it, even if `layer_types` differs."""
    layers, kinds = need(text, "num_hidden_layers"), text.get("layer_types")
    if kinds is None:
        kinds = [family.SLIDING if (i + 1) % PATTERN else family.FULL for i in range(layers)]
    family.check_layer_types([*kinds[:-1], family.FULL], layers)
    return tuple(i for i in range(layers) if kinds[i] == family.FULL or i == layers - 1)


def _global_sizes(text: Json, own_heads: bool) -> dict[str, int]:
    """Converts head width and number of KV heads of the global layers, which must be equal in all of them.

    `per_layer_config` lists the sizes by layer; a layer that is not listed has the sizes of the sliding layers, so
    `{}` or null gives all layers these. Without the key, `global_head_dim` and `num_global_key_value_heads` apply to
    all global layers; the latter only if `own_heads`.
    """
    heads, width = need(text, "num_key_value_heads"), need(text, "head_dim")
    if "per_layer_config" not in text:
        wide = text.get("num_global_key_value_heads") if own_heads else None
        return dict(
            global_head_dim=text.get("global_head_dim", 512), global_kv_heads=heads if wide is None else wide
        )
    listed = {int(i): entry for i, entry in (text["per_layer_config"] or {}).items()}
    size = lambda entry: (entry.get("head_dim", width), entry.get("num_key_value_heads", heads))
    layers = _global_layers(text)
    sizes = {size(listed.get(i, {})) for i in layers}
    if len(sizes) != 1 or any(
        size(entry) != (width, heads) for i, entry in listed.items() if i not in layers
    ):
        allowed = f"the same entry for each of the global layers {list(layers)}, and none for the others"
        raise refuse("config.json: per_layer_config", sorted(listed), allowed)
    (global_width, global_heads) = sizes.pop()
    return dict(global_head_dim=global_width, global_kv_heads=global_heads)


def _rope_fields(text: Json) -> dict[str, float]:
    """Converts the rotary embeddings of sliding and global layers, which have different bases."""
    found = text.get("rope_parameters")
    if found is None:
        found = {
            "sliding_attention": {"rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        }
    near, far = need(found, "sliding_attention"), need(found, "full_attention")
    for name, rope, allowed in (("sliding", near, ("default",)), ("full", far, ("proportional", "default"))):
        if rope.get("rope_type", "default") not in allowed:
            where = f"config.json: rope_parameters.{name}_attention.rope_type"
            raise refuse(where, rope["rope_type"], ", ".join(allowed))
    fraction = far.get("partial_rotary_factor", 1.0) if far.get("rope_type") == "proportional" else 1.0
    return dict(
        rope_theta=float(need(near, "rope_theta")), global_rope_theta=float(need(far, "rope_theta")),
        global_rope_fraction=float(fraction), global_rope_factor=float(far.get("factor", 1.0)),
    )  # fmt: skip


def _vision(config: Json) -> VisionConfig | None:
    """Converts the vision tower; None without one. A missing key has the default of the reference."""
    found = config.get("vision_config")
    if found is None or found == VISION:
        return None
    value = lambda key, default: default if found.get(key) is None else found[key]
    ids = {"placeholder": "image_token_id", "begin": "boi_token_id", "end": "eoi_token_id"}
    named = {ours: config[key] for ours, key in ids.items() if config.get(key) is not None}
    activation: Any = ACTIVATIONS[value("hidden_activation", "gelu_pytorch_tanh")]
    return VisionConfig(
        width=value("hidden_size", 768), layers=value("num_hidden_layers", 16), heads=value("num_attention_heads", 12),
        kv_heads=value("num_key_value_heads", 12), head_dim=value("head_dim", 64), ffn=value("intermediate_size", 3072),
        patch=value("patch_size", 16), pool=value("pooling_kernel_size", 3),
        positions=value("position_embedding_size", 10_240),
        rope_theta=float(value("rope_parameters", {}).get("rope_theta", 100.0)),
        norm_eps=value("rms_norm_eps", 1e-6), activation=activation,
        standardise=value("standardize", False), tokens=config.get("vision_soft_tokens_per_image") or 280,
        bidirectional=_text_of(config).get("use_bidirectional_attention") == "vision", **named,
    )  # fmt: skip


def _experts(text: Json) -> Experts:
    """Converts the mixture of experts, which is added to the dense MLP of each layer."""
    count, active = need(text, "num_experts"), need(text, "top_k_experts")
    return Experts(count=count, active=active, width=need(text, "moe_intermediate_size"))


def _diffusion_config(config: Json) -> GemmaConfig:
    """Converts config.json of DiffusionGemma.

    In the reference implementation, logits are always soft-capped, and global layers always use their keys as values.
    """
    text = need(config, "text_config")
    mixed = _experts(text) if text.get("num_experts") else None
    return GemmaConfig(
        **_fields(
            config, experts=mixed, pattern="causal_encoder", block=config.get("canvas_length", 256),
            **_global_sizes(text, own_heads=True),
            softcap=text.get("final_logit_softcapping", 30.0), keys_as_values=True, self_conditioning=True,
            encoder_scalars=True, vision=_vision(config),
        )
    )  # fmt: skip


def _gemma4_config(config: Json) -> GemmaConfig:
    """Converts config.json of Gemma 4, an autoregressive model: blocks of one token."""
    text = _text_of(config)
    shared, same = text.get("num_kv_shared_layers", 0), text.get("attention_k_eq_v", False)
    own = text.get("hidden_size_per_layer_input", 256)
    doubled = 2 * need(text, "intermediate_size") if text.get("use_double_wide_mlp") and shared else None
    return GemmaConfig(
        **_fields(
            config, experts=_experts(text) if text.get("enable_moe_block") else None, pattern="block_causal", block=1,
            predicts_next=True, **_global_sizes(text, own_heads=same), softcap=text.get("final_logit_softcapping"),
            keys_as_values=same, shared_kv=shared, shared_ffn=doubled,
            per_layer_width=own, per_layer_vocab=text.get("vocab_size_per_layer_input", 262_144) if own else 0,
        )
    )  # fmt: skip


def _names(c: ModelConfig, stem: str) -> dict[str, TensorSource]:
    """Maps the parameters that both models have to tensors; `stem` precedes every name of a tensor."""
    assert isinstance(c, GemmaConfig)
    sources = {
        "embed": TensorSource(f"{stem}embed_tokens.weight"),
        "norm/scale": TensorSource(f"{stem}norm.weight"),
    }
    if not c.tied:
        sources["head"] = TensorSource("lm_head.weight", 1)
    if c.per_layer_width:
        sources |= {
            "per_layer/embed": TensorSource(f"{stem}embed_tokens_per_layer.weight", fold=2),
            "per_layer/projection/w": TensorSource(f"{stem}per_layer_model_projection.weight", 1),
            "per_layer/norm/scale": TensorSource(f"{stem}per_layer_projection_norm.weight"),
        }
    norms = _NORMS | (_MIXED if c.experts is not None else {})
    for i in range(c.layers):
        ours, theirs = f"block_{i}/", f"{stem}layers.{i}."
        sources |= {
            f"{ours}{mine}/scale": TensorSource(f"{theirs}{name}.weight") for mine, name in norms.items()
        }
        sources[f"{ours}scalar"] = TensorSource(f"{theirs}layer_scalar")
        # Some layers reuse the keys and values of an earlier layer and have only q. Global layers may use their keys
        # as values and have no v.
        parts = "q" if c.source(i) != i else "qk" if c.keys_as_values and c.is_global(i) else "qkv"
        mine, attention = f"{ours}attention/", f"{theirs}self_attn."
        for p in parts:
            sources[f"{mine}{p}/w"] = TensorSource(f"{attention}{p}_proj.weight", 1)
            if p != "v":
                sources[f"{mine}{p}_norm/scale"] = TensorSource(f"{attention}{p}_norm.weight")
        sources[f"{mine}o/w"] = TensorSource(f"{attention}o_proj.weight", 2)
        sources |= family.mlp_names(f"{ours}mlp/", f"{theirs}mlp.")
        if c.experts is not None:
            sources |= {
                f"{ours}moe/router/scale": TensorSource(f"{theirs}router.scale"),
                f"{ours}moe/router/w": TensorSource(f"{theirs}router.proj.weight", 1),
                f"{ours}moe/router/expert_scale": TensorSource(f"{theirs}router.per_expert_scale"),
                f"{ours}moe/gate_up": TensorSource(f"{theirs}experts.gate_up_proj", 1, c.experts.count),
                f"{ours}moe/down": TensorSource(f"{theirs}experts.down_proj", 1, c.experts.count),
            }
        if c.per_layer_width:
            sources |= {
                f"{ours}per_layer/gate/w": TensorSource(f"{theirs}per_layer_input_gate.weight", 1),
                f"{ours}per_layer/projection/w": TensorSource(f"{theirs}per_layer_projection.weight", 1),
                f"{ours}per_layer/norm/scale": TensorSource(f"{theirs}post_per_layer_input_norm.weight"),
            }
    return sources


def _diffusion_names(c: ModelConfig) -> dict[str, TensorSource]:
    """Maps the parameters of DiffusionGemma. Encoder and decoder share all weights except the layers' scalars."""
    stem, conditioning = "model.decoder.", "model.decoder.self_conditioning."
    sources = _names(c, stem) | family.mlp_names("self_conditioning/mlp/", conditioning)
    sources["self_conditioning/norm/scale"] = TensorSource(f"{conditioning}pre_norm.weight")
    for i in range(c.layers):
        encoder = f"model.encoder.language_model.layers.{i}.layer_scalar"
        sources[f"block_{i}/encoder_scalar"] = TensorSource(encoder)
    assert isinstance(c, GemmaConfig)
    return sources if c.vision is None else sources | _vision_names(c.vision)


def _vision_names(c: VisionConfig) -> dict[str, TensorSource]:
    """Maps the parameters of the vision tower and of the projection behind it."""
    stem = "model.encoder.vision_tower."
    sources = {
        "vision/patch/w": TensorSource(f"{stem}patch_embedder.input_proj.weight", 1),
        "vision/positions": TensorSource(f"{stem}patch_embedder.position_embedding_table"),
        "vision/projection/w": TensorSource("model.encoder.embed_vision.embedding_projection.weight", 1),
    }
    if c.standardise:
        sources |= {f"vision/{name}": TensorSource(f"{stem}{name}") for name in ("std_bias", "std_scale")}
    for i in range(c.layers):
        ours, theirs = f"vision/block_{i}/", f"{stem}encoder.layers.{i}."
        sources |= {
            f"{ours}{mine}/scale": TensorSource(f"{theirs}{name}.weight") for mine, name in _NORMS.items()
        }
        for p in "qkvo":
            matrix = TensorSource(f"{theirs}self_attn.{p}_proj.linear.weight", 2 if p == "o" else 1)
            sources[f"{ours}attention/{p}/w"] = matrix
        for p in "qk":
            sources[f"{ours}attention/{p}_norm/scale"] = TensorSource(f"{theirs}self_attn.{p}_norm.weight")
        for p in ("gate", "up", "down"):
            sources[f"{ours}mlp/{p}/w"] = TensorSource(f"{theirs}mlp.{p}_proj.linear.weight", 1)
    return sources


def _encoder_module(module: str) -> tuple[str, ...]:
    """Finds the encoder module that shares its weight with a decoder module."""
    decoder, encoder = "model.decoder.layers.", "model.encoder.language_model.layers."
    return (module.replace(decoder, encoder, 1),) if module.startswith(decoder) else ()


def _ignored(c: ModelConfig) -> tuple[str, ...]:
    """Lists tensors to ignore: other modalities, and unused k and v of layers that reuse another layer's."""
    assert isinstance(c, GemmaConfig)
    shared = [str(i) for i in range(c.layers) if c.source(i) != i]
    keys = (rf"layers\.({'|'.join(shared)})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.",) if shared else ()
    return (*OTHER_MODALITIES, *keys)


def _decoding(config: Json, generation: Json) -> Mapping[str, Any]:
    """Converts DiffusionGemma's generation_config.json; a missing or null key has the reference's default."""
    sampler = generation.get("sampler_config") or {}
    value = lambda key, default: default if generation.get(key) is None else generation[key]
    bound = sampler.get("entropy_bound")
    return {
        "rule": "entropy_bound",
        "params": {"gamma": 0.1 if bound is None else bound},
        "cooling": {"last": value("t_min", 0.4), "first": value("t_max", 0.8)},
        "steady": {
            "patience": value("stability_threshold", 1),
            "entropy": value("confidence_threshold", 0.005),
        },
        "temperature": 1.0,
        "steps": value("max_denoising_steps", 48),
        "block": config.get("canvas_length") or 256,
        "source": "transformers DiffusionGemmaGenerationConfig; generation_config.json",
    }


# --- our config -> config.json


def _vision_config(v: VisionConfig) -> dict[str, Any]:
    """Converts the vision tower to the keys of `vision_config`."""
    return dict(
        model_type="gemma4_vision", hidden_size=v.width, intermediate_size=v.ffn, num_hidden_layers=v.layers,
        num_attention_heads=v.heads, num_key_value_heads=v.kv_heads, head_dim=v.head_dim, patch_size=v.patch,
        pooling_kernel_size=v.pool, position_embedding_size=v.positions, rms_norm_eps=v.norm_eps,
        rope_parameters=dict(rope_type="axial", rope_theta=v.rope_theta), standardize=v.standardise,
        hidden_activation=next(theirs for theirs, ours in ACTIVATIONS.items() if ours == v.activation),
    )  # fmt: skip


def _text_config(c: ModelConfig, kind: str) -> dict[str, Any]:
    """Converts our config to the keys of the text model that both families have."""
    assert isinstance(c, GemmaConfig)
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == c.activation)
    overrides = {"head_dim": c.global_head_dim, "num_key_value_heads": c.global_kv_heads}
    far: dict[str, Any] = dict(
        rope_type="proportional", rope_theta=c.global_rope_theta, partial_rotary_factor=c.global_rope_fraction
    )
    if c.global_rope_factor != 1.0:
        far["factor"] = c.global_rope_factor
    near = dict(rope_type="default", rope_theta=c.rope_theta)
    found: dict[str, Any] = dict(
        model_type=kind, vocab_size=c.vocab, hidden_size=c.width, intermediate_size=c.ffn, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim,
        hidden_activation=activation, max_position_embeddings=c.context, rms_norm_eps=c.norm_eps, pad_token_id=c.pad,
        eos_token_id=[c.eos, *c.ends] if c.ends else c.eos, bos_token_id=2, tie_word_embeddings=True,
        attention_bias=False, sliding_window=c.window, dtype=c.dtype,
        rope_parameters=dict(sliding_attention=near, full_attention=far),
        layer_types=[family.FULL if c.is_global(i) else family.SLIDING for i in range(c.layers)],
        per_layer_config={str(i): overrides for i in c.global_layers},
    )  # fmt: skip
    if c.experts is not None:
        e = c.experts
        found |= dict(num_experts=e.count, top_k_experts=e.active, moe_intermediate_size=e.width)
    return found


def export_diffusion(c: ModelConfig) -> dict[str, Any]:
    """Converts our config to DiffusionGemma's config.json."""
    assert isinstance(c, GemmaConfig)
    text, v = _text_config(c, "diffusion_gemma_text") | {"final_logit_softcapping": c.softcap}, c.vision
    images: dict[str, Any] = {"vision_config": VISION}
    if v is not None:
        images = dict(
            vision_config=_vision_config(v), image_token_id=v.placeholder, boi_token_id=v.begin, eoi_token_id=v.end,
            vision_soft_tokens_per_image=v.tokens,
        )  # fmt: skip
        text["use_bidirectional_attention"] = "vision" if v.bidirectional else None
    return dict(
        architectures=["DiffusionGemmaForBlockDiffusion"],
        model_type="diffusion_gemma",
        canvas_length=c.block,
        text_config=text,
        tie_word_embeddings=True,
        dtype=c.dtype,
        **images,
    )


def _export_text(c: ModelConfig) -> dict[str, Any]:
    """Converts our config to the config.json of Gemma 4's text model without a vision tower."""
    assert isinstance(c, GemmaConfig)
    return _text_config(c, "gemma4_text") | dict(
        architectures=["Gemma4ForCausalLM"], final_logit_softcapping=c.softcap, attention_k_eq_v=c.keys_as_values,
        enable_moe_block=c.experts is not None, hidden_size_per_layer_input=c.per_layer_width,
        vocab_size_per_layer_input=c.per_layer_vocab or c.vocab, num_kv_shared_layers=c.shared_kv,
        use_double_wide_mlp=c.shared_ffn is not None,
    )  # fmt: skip


DIFFUSION_GEMMA = Family(
    name="DiffusionGemma",
    architectures=("DiffusionGemmaForBlockDiffusion",),
    checkpoints=("google/diffusiongemma-26B-A4B-it",),
    keys=DIFFUSION_KEYS,
    config=_diffusion_config,
    names=_diffusion_names,
    noise=NoiseConfig(kind="uniform"),
    block="256",
    about="uniform noise, causal encoder, self-conditioning; reads text and images",
    ignored=_ignored,
    export=export_diffusion,
    licence="Apache-2.0",
    decoding=_decoding,
    aliases=_encoder_module,
)

GEMMA4 = Family(
    name="Gemma 4",
    architectures=("Gemma4ForConditionalGeneration",),
    checkpoints=("google/gemma-4-26B-A4B-it", "google/gemma-4-31B-it", "google/gemma-4-E4B-it"),
    keys=GEMMA4_KEYS,
    config=_gemma4_config,
    names=functools.partial(_names, stem="model.language_model."),
    noise=None,
    about="autoregressive; text only, images and audio are refused",
    ignored=_ignored,
    licence="Apache-2.0",
    decoding=generation.GREEDY,
    rank=2,
)

GEMMA4_TEXT = GEMMA4._replace(
    name="Gemma 4, text",
    architectures=("Gemma4ForCausalLM",),
    checkpoints=(),
    keys=GEMMA4_TEXT_KEYS,
    names=functools.partial(_names, stem="model."),
    about="autoregressive, the text model alone",
    export=_export_text,
)

register(DIFFUSION_GEMMA, GEMMA4, GEMMA4_TEXT)
