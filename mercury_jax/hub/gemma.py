"""DiffusionGemma, and the text models of Gemma 4 that it is made from, as transformers 5 names and stores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mercury_jax.config import Experts, ModelConfig, refuse
from mercury_jax.hub import decoder
from mercury_jax.hub.family import Json, Leaf, need, only
from mercury_jax.models.gemma import GemmaConfig

PATTERN = 6  # without `layer_types` every sixth layer is global
OTHERS = (r"vision_tower", r"embed_vision", r"audio_tower", r"embed_audio", r"^lm_head\.weight$")  # text only
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


def text_of(config: Json) -> Json:
    """The text model's part of config.json: all of it where there is no other."""
    return config.get("text_config") or config


def sizes(config: Json, **ours: Any) -> dict[str, Any]:
    """GemmaConfig's fields; `ours` adds what tells DiffusionGemma and Gemma 4 apart."""
    text = text_of(config)
    only(text, "attention_bias", False)
    only(text, "use_bidirectional_attention", "vision", None)
    only(config, "tie_word_embeddings", True)
    activation = text.get("hidden_activation", "gelu_pytorch_tanh")
    only(text, "hidden_activation", *ACTIVATIONS)
    layers = need(text, "num_hidden_layers")
    seen = global_layers(text, layers)
    found = dict(
        vocab=need(text, "vocab_size"), width=need(text, "hidden_size"), layers=layers,
        heads=need(text, "num_attention_heads"), kv_heads=need(text, "num_key_value_heads"),
        head_dim=need(text, "head_dim"), ffn=need(text, "intermediate_size"), tied=True, global_layers=seen,
        window=need(text, "sliding_window"), activation=ACTIVATIONS[activation],
        norm_eps=text.get("rms_norm_eps", 1e-6), context=text.get("max_position_embeddings", 131_072),
        dtype=decoder.dtype_of({**text, **{k: v for k, v in config.items() if k in ("dtype", "torch_dtype")}}),
        **global_sizes(text, seen), **rotations(text), **special_ids(config),
    )  # fmt: skip
    return found | ours


def global_layers(text: Json, layers: int) -> tuple[int, ...]:
    """Layers that see everything; the last one always does, whatever the list says."""
    kinds = text.get("layer_types")
    kinds = ["" if (i + 1) % PATTERN else "full_attention" for i in range(layers)] if kinds is None else kinds
    if len(kinds) != layers:
        raise refuse("config.json: layer_types", f"{len(kinds)} entries", f"{layers}, one a layer")
    return tuple(i for i in range(layers) if kinds[i] == "full_attention" or i == layers - 1)


def global_sizes(text: Json, seen: tuple[int, ...]) -> dict[str, int]:
    """Head width and key heads of the global layers: one for all, whether listed by layer or said once."""
    per_layer = text.get("per_layer_config")
    if per_layer is None:
        heads = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v", True) else None
        width = text.get("global_head_dim", 512)
        return dict(global_head_dim=width, global_kv_heads=heads or need(text, "num_key_value_heads"))
    listed = {int(i): dict(entry) for i, entry in per_layer.items()}
    kinds = {(e.get("head_dim", text["head_dim"]), e.get("num_key_value_heads")) for e in listed.values()}
    if set(listed) - set(seen) or len(kinds) != 1:
        raise refuse("config.json: per_layer_config", sorted(listed), f"the same entry for all of {seen}")
    (width, heads) = kinds.pop()
    return dict(global_head_dim=width, global_kv_heads=heads or need(text, "num_key_value_heads"))


def rotations(text: Json) -> dict[str, float]:
    """Rotary bases of both kinds of layers."""
    found = text.get("rope_parameters") or {}
    near = found.get("sliding_attention") or {"rope_type": "default", "rope_theta": 10_000.0}
    far = found.get("full_attention") or {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    }
    only(near, "rope_type", "default")
    only(far, "rope_type", "proportional", "default")
    fraction = far.get("partial_rotary_factor", 1.0) if far.get("rope_type") == "proportional" else 1.0
    return dict(
        rope_theta=float(near.get("rope_theta", 10_000.0)), global_rope_theta=float(far.get("rope_theta", 1e6)),
        global_rope_fraction=float(fraction), global_rope_factor=float(far.get("factor") or 1.0),
    )  # fmt: skip


def special_ids(config: Json) -> dict[str, Any]:
    """Ids of the text's config, and what the whole checkpoint adds to its ends."""
    text = text_of(config)
    listed = lambda x: [] if x is None else list(x) if isinstance(x, list | tuple) else [x]
    ends = list(dict.fromkeys([*listed(text.get("eos_token_id")), *listed(config.get("eos_token_id"))])) or [
        1
    ]
    pad = text.get("pad_token_id")
    return dict(mask=None, pad=0 if pad is None else pad, eos=ends[0], ends=tuple(ends[1:]))


def experts(text: Json) -> Experts:
    """Experts beside the dense branch."""
    return Experts(
        count=need(text, "num_experts"),
        active=need(text, "top_k_experts"),
        width=need(text, "moe_intermediate_size"),
    )


def diffusion(config: Json) -> GemmaConfig:
    """DiffusionGemma: the soft-capping is fixed in its class, keys are values in every global layer."""
    text = text_of(config)
    mixed = experts(text) if text.get("num_experts") else None
    return GemmaConfig(
        **sizes(
            config, experts=mixed, pattern="causal_encoder", block=config.get("canvas_length") or 256,
            softcap=text.get("final_logit_softcapping", 30.0), keys_as_values=True, self_conditioning=True,
            encoder_scalars=True,
        )
    )  # fmt: skip


def autoregressive(config: Json) -> GemmaConfig:
    """A text model of Gemma 4."""
    text = text_of(config)
    shared = text.get("num_kv_shared_layers") or 0
    own = text.get("hidden_size_per_layer_input", 256)
    doubled = 2 * need(text, "intermediate_size") if text.get("use_double_wide_mlp") and shared else None
    return GemmaConfig(
        **sizes(
            config, experts=experts(text) if text.get("enable_moe_block") else None, pattern="block_causal", block=1,
            predicts_next=True, softcap=text.get("final_logit_softcapping"),
            keys_as_values=bool(text.get("attention_k_eq_v")), shared_kv=shared, shared_ffn=doubled,
            per_layer_width=own, per_layer_vocab=text.get("vocab_size_per_layer_input", 262_144) if own else 0,
        )
    )  # fmt: skip


def names(c: ModelConfig, stem: str) -> dict[str, Leaf]:
    """What both have; `stem` stands before every name."""
    assert isinstance(c, GemmaConfig)
    found = {"embed": Leaf(f"{stem}embed_tokens.weight"), "norm/scale": Leaf(f"{stem}norm.weight")}
    if c.per_layer_width:
        found |= {
            "per_layer/embed": Leaf(f"{stem}embed_tokens_per_layer.weight", fold=2),
            "per_layer/projection/w": Leaf(f"{stem}per_layer_model_projection.weight", 1),
            "per_layer/norm/scale": Leaf(f"{stem}per_layer_projection_norm.weight"),
        }
    for i in range(c.layers):
        found |= _layer(c, i, f"block_{i}/", f"{stem}layers.{i}.")
    return found


def _layer(c: GemmaConfig, i: int, ours: str, theirs: str) -> dict[str, Leaf]:
    norms = _NORMS | (_MIXED if c.experts is not None else {})
    found = {f"{ours}{mine}/scale": Leaf(f"{theirs}{name}.weight") for mine, name in norms.items()}
    found[f"{ours}scalar"] = Leaf(f"{theirs}layer_scalar")
    found |= _attention(c, i, f"{ours}attention/", f"{theirs}self_attn.")
    found |= decoder.feed_forward(f"{ours}mlp/", f"{theirs}mlp.")
    if c.experts is not None:
        found |= {
            f"{ours}moe/router/scale": Leaf(f"{theirs}router.scale"),
            f"{ours}moe/router/w": Leaf(f"{theirs}router.proj.weight", 1),
            f"{ours}moe/router/expert_scale": Leaf(f"{theirs}router.per_expert_scale"),
            f"{ours}moe/gate_up": Leaf(f"{theirs}experts.gate_up_proj", 1, c.experts.count),
            f"{ours}moe/down": Leaf(f"{theirs}experts.down_proj", 1, c.experts.count),
        }
    if c.per_layer_width:
        found |= {
            f"{ours}per_layer/gate/w": Leaf(f"{theirs}per_layer_input_gate.weight", 1),
            f"{ours}per_layer/projection/w": Leaf(f"{theirs}per_layer_projection.weight", 1),
            f"{ours}per_layer/norm/scale": Leaf(f"{theirs}post_per_layer_input_norm.weight"),
        }
    return found


def _attention(c: GemmaConfig, i: int, ours: str, theirs: str) -> dict[str, Leaf]:
    """A layer that shares keys has none; one whose keys are its values has no values."""
    parts = "q" if c.source(i) != i else "qk" if c.keys_as_values and c.is_global(i) else "qkv"
    found = {f"{ours}{p}/w": Leaf(f"{theirs}{p}_proj.weight", 1) for p in parts}
    found |= {f"{ours}{p}_norm/scale": Leaf(f"{theirs}{p}_norm.weight") for p in parts if p != "v"}
    return found | {f"{ours}o/w": Leaf(f"{theirs}o_proj.weight", 2)}


def diffusion_names(c: ModelConfig) -> dict[str, Leaf]:
    """The decoder's names; of the encoder, which has the same weights, only the layers' scalars."""
    stem, told = "model.decoder.", "model.decoder.self_conditioning."
    found = names(c, stem) | decoder.feed_forward("self_conditioning/mlp/", told)
    found["self_conditioning/norm/scale"] = Leaf(f"{told}pre_norm.weight")
    for i in range(c.layers):
        found[f"block_{i}/encoder_scalar"] = Leaf(f"model.encoder.language_model.layers.{i}.layer_scalar")
    return found


def unread(c: ModelConfig) -> tuple[str, ...]:
    """Other senses, and the keys that layers which share those of another still carry along."""
    assert isinstance(c, GemmaConfig)
    shared = [str(i) for i in range(c.layers) if c.source(i) != i]
    keys = (rf"layers\.({'|'.join(shared)})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.",) if shared else ()
    return (*OTHERS, *keys)


def decoding(config: Json, generation: Json) -> Mapping[str, Any]:
    """DiffusionGemma's generation_config.json; a null there is the reference's own default."""
    sampler = generation.get("sampler_config") or {}
    value = lambda key, default: default if generation.get(key) is None else generation[key]
    bound = sampler.get("entropy_bound")
    return {
        "rule": "entropy_bound",
        "knobs": {"gamma": 0.1 if bound is None else bound},
        "cooling": {"last": value("t_min", 0.4), "first": value("t_max", 0.8)},
        "steady": {
            "patience": value("stability_threshold", 1),
            "entropy": value("confidence_threshold", 0.005),
        },
        "temperature": 1.0,
        "steps": value("max_denoising_steps", 48),
        "block": config.get("canvas_length") or 256,
    }
