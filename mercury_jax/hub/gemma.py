"""DiffusionGemma, and the text models of Gemma 4 that it is made from, as transformers 5 names and stores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mercury_jax.config import Experts, ModelConfig, refuse
from mercury_jax.hub import decoder
from mercury_jax.hub.family import Leaf, need
from mercury_jax.hub.keys import BOOL, COMMON, INT, LIST, NULL, NUMBER, TEXT, Json, Keys
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


_ROPE = Keys(used={"rope_type": TEXT, "rope_theta": NUMBER})
_PROPORTIONAL = _ROPE.plus(Keys(used={"partial_rotary_factor": NUMBER, "factor": NUMBER}))
_LAYER = Keys(used={"head_dim": INT, "num_key_value_heads": INT})


def _global_rope(found: Json) -> Keys:
    return _PROPORTIONAL if found.get("rope_type") == "proportional" else _ROPE


def _layers(found: Json) -> Keys:
    return Keys(nested={index: lambda _: _LAYER for index in found if index.isdecimal()})


ROPES = Keys(nested={"sliding_attention": lambda _: _ROPE, "full_attention": _global_rope})
TEXT_KEYS = COMMON.plus(
    Keys(
        used={
            "vocab_size": INT, "hidden_size": INT, "intermediate_size": INT, "num_hidden_layers": INT,
            "num_attention_heads": INT, "num_key_value_heads": INT, "head_dim": INT, "global_head_dim": INT,
            "num_global_key_value_heads": INT + NULL, "sliding_window": INT, "layer_types": LIST + NULL,
            "max_position_embeddings": INT, "rms_norm_eps": NUMBER, "num_experts": INT + NULL,
            "top_k_experts": INT + NULL, "moe_intermediate_size": INT + NULL,
        },
        only={
            "hidden_activation": tuple(ACTIVATIONS), "attention_bias": (False,), "tie_word_embeddings": (True,),
            "use_bidirectional_attention": ("vision", None),
        },
        nested={"rope_parameters": lambda _: ROPES, "per_layer_config": _layers},
    )
)  # fmt: skip
# What Gemma 4's text model has and DiffusionGemma's has not.
DIFFUSION_TEXT = TEXT_KEYS.plus(
    Keys(
        used={"final_logit_softcapping": NUMBER},
        only={
            "hidden_size_per_layer_input": (0,), "num_kv_shared_layers": (0,), "use_double_wide_mlp": (False,),
        },
        unused={"attention_k_eq_v": "keys are values in every global layer, by its class"},
    )
)  # fmt: skip
GEMMA4_TEXT = TEXT_KEYS.plus(
    Keys(
        used={
            "final_logit_softcapping": NUMBER + NULL, "attention_k_eq_v": BOOL, "enable_moe_block": BOOL,
            "hidden_size_per_layer_input": INT, "vocab_size_per_layer_input": INT, "num_kv_shared_layers": INT,
            "use_double_wide_mlp": BOOL,
        }
    )
)  # fmt: skip
# Around a text model: images and sound are refused, so nothing depends on how they would be read.
SENSES = COMMON.plus(
    Keys(
        only={"tie_word_embeddings": (True,)},
        unused=dict.fromkeys(
            (
                "vision_config", "audio_config", "boi_token_id", "eoi_token_id", "image_token_id", "video_token_id",
                "boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id", "vision_soft_tokens_per_image",
            ),
            "images and sound are not read",
        ),
    )
)  # fmt: skip
DIFFUSION_KEYS = SENSES.plus(
    Keys(
        used={"canvas_length": INT},
        only={"model_type": ("diffusion_gemma",)},
        nested={"text_config": lambda _: DIFFUSION_TEXT},
    )
)
GEMMA4_KEYS = SENSES.plus(
    Keys(only={"model_type": ("gemma4",)}, nested={"text_config": lambda _: GEMMA4_TEXT})
)
GEMMA4_TEXT_KEYS = GEMMA4_TEXT.plus(Keys(only={"model_type": ("gemma4_text",)}))


def text_of(config: Json) -> Json:
    """The text model's part of config.json: all of it where there is no other."""
    return config.get("text_config") or config


def sizes(config: Json, **ours: Any) -> dict[str, Any]:
    """GemmaConfig's fields; `ours` adds what tells DiffusionGemma and Gemma 4 apart."""
    text = text_of(config)
    activation = text.get("hidden_activation", "gelu_pytorch_tanh")
    layers = need(text, "num_hidden_layers")
    seen = global_layers(text, layers)
    found = dict(
        vocab=need(text, "vocab_size"), width=need(text, "hidden_size"), layers=layers,
        heads=need(text, "num_attention_heads"), kv_heads=need(text, "num_key_value_heads"),
        head_dim=need(text, "head_dim"), ffn=need(text, "intermediate_size"), tied=True, global_layers=seen,
        window=need(text, "sliding_window"), activation=ACTIVATIONS[activation],
        norm_eps=text.get("rms_norm_eps", 1e-6), context=text.get("max_position_embeddings", 131_072),
        dtype=decoder.dtype_of({**text, **{k: v for k, v in config.items() if k in ("dtype", "torch_dtype")}}),
        **rotations(text), **special_ids(config),
    )  # fmt: skip
    return found | ours


def global_layers(text: Json, layers: int) -> tuple[int, ...]:
    """Layers that see everything; the last one always does, whatever the list says."""
    kinds = text.get("layer_types")
    kinds = (
        [decoder.SLIDING if (i + 1) % PATTERN else decoder.FULL for i in range(layers)]
        if kinds is None
        else kinds
    )
    decoder.check_layer_types([*kinds[:-1], decoder.FULL], layers)
    return tuple(i for i in range(layers) if kinds[i] == decoder.FULL or i == layers - 1)


def global_sizes(text: Json, own_heads: bool) -> dict[str, int]:
    """Head width and key heads of the global layers: one for all, whether listed by layer or said once.

    own_heads: `num_global_key_value_heads` counts, where nothing is listed. A layer that is not listed has the sizes
    of the sliding layers; `{}` and null list none.
    """
    heads, width = need(text, "num_key_value_heads"), need(text, "head_dim")
    if "per_layer_config" not in text:
        wide = text.get("num_global_key_value_heads") if own_heads else None
        return dict(
            global_head_dim=text.get("global_head_dim", 512), global_kv_heads=heads if wide is None else wide
        )
    layers = need(text, "num_hidden_layers")
    listed = {int(i): entry for i, entry in (text["per_layer_config"] or {}).items()}
    size = lambda i: (
        listed.get(i, {}).get("head_dim", width),
        listed.get(i, {}).get("num_key_value_heads", heads),
    )
    seen = global_layers(text, layers)
    kinds = {size(i) for i in seen}
    if len(kinds) != 1 or any(size(i) != (width, heads) for i in listed if i not in seen):
        raise refuse(
            "config.json: per_layer_config",
            sorted(listed),
            f"the same entry for each of the global layers {list(seen)}, and none for the others",
        )
    (global_width, global_heads) = kinds.pop()
    return dict(global_head_dim=global_width, global_kv_heads=global_heads)


def rotations(text: Json) -> dict[str, float]:
    """Rotary bases of both kinds of layers."""
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


def special_ids(config: Json) -> dict[str, Any]:
    """Ids of the text's config, and what the whole checkpoint adds to its ends."""
    text = text_of(config)
    found = [id for some in (text, config) for id in decoder.listed_ids(some.get("eos_token_id"))]
    ends = list(dict.fromkeys(found)) or [1]
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
    text = need(config, "text_config")
    mixed = experts(text) if text.get("num_experts") else None
    return GemmaConfig(
        **sizes(
            config, experts=mixed, pattern="causal_encoder", block=config.get("canvas_length", 256),
            **global_sizes(text, own_heads=True),
            softcap=text.get("final_logit_softcapping", 30.0), keys_as_values=True, self_conditioning=True,
            encoder_scalars=True,
        )
    )  # fmt: skip


def autoregressive(config: Json) -> GemmaConfig:
    """A text model of Gemma 4."""
    text = text_of(config)
    shared, same = text.get("num_kv_shared_layers", 0), text.get("attention_k_eq_v", False)
    own = text.get("hidden_size_per_layer_input", 256)
    doubled = 2 * need(text, "intermediate_size") if text.get("use_double_wide_mlp") and shared else None
    return GemmaConfig(
        **sizes(
            config, experts=experts(text) if text.get("enable_moe_block") else None, pattern="block_causal", block=1,
            predicts_next=True, **global_sizes(text, own_heads=same), softcap=text.get("final_logit_softcapping"),
            keys_as_values=same, shared_kv=shared, shared_ffn=doubled,
            per_layer_width=own, per_layer_vocab=text.get("vocab_size_per_layer_input", 262_144) if own else 0,
        )
    )  # fmt: skip


def names(c: ModelConfig, stem: str) -> dict[str, Leaf]:
    """What both have; `stem` stands before every name."""
    assert isinstance(c, GemmaConfig)
    found = {"embed": Leaf(f"{stem}embed_tokens.weight"), "norm/scale": Leaf(f"{stem}norm.weight")}
    if not c.tied:
        found["head"] = Leaf("lm_head.weight", 1)
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
