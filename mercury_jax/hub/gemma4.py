"""The families of Gemma 4, and how their config.json is written."""

from __future__ import annotations

import functools
from typing import Any

from mercury_jax.config import ModelConfig, NoiseConfig
from mercury_jax.hub import gemma
from mercury_jax.hub.family import Family
from mercury_jax.models.gemma import GemmaConfig

# The reference builds a vision tower whatever it is told; this is the smallest one.
VISION = dict(
    model_type="gemma4_vision", hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=4, patch_size=2, position_embedding_size=4,
)  # fmt: skip


def text_config(c: ModelConfig, kind: str) -> dict[str, Any]:
    """What both families say of their text model."""
    assert isinstance(c, GemmaConfig)
    activation = next(theirs for theirs, ours in gemma.ACTIVATIONS.items() if ours == c.activation)
    overrides = {"head_dim": c.global_head_dim, "num_key_value_heads": c.global_kv_heads}
    found: dict[str, Any] = dict(
        model_type=kind, vocab_size=c.vocab, hidden_size=c.width, intermediate_size=c.ffn, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim,
        hidden_activation=activation, max_position_embeddings=c.context, rms_norm_eps=c.norm_eps, pad_token_id=c.pad,
        eos_token_id=[c.eos, *c.ends] if c.ends else c.eos, bos_token_id=2, tie_word_embeddings=True,
        attention_bias=False, sliding_window=c.window, rope_parameters=_rotations(c), dtype=c.dtype,
        layer_types=["full_attention" if c.is_global(i) else "sliding_attention" for i in range(c.layers)],
        per_layer_config={str(i): overrides for i in c.global_layers},
    )  # fmt: skip
    if c.experts is not None:
        e = c.experts
        found |= dict(num_experts=e.count, top_k_experts=e.active, moe_intermediate_size=e.width)
    return found


def _rotations(c: GemmaConfig) -> dict[str, Any]:
    far: dict[str, Any] = dict(
        rope_type="proportional", rope_theta=c.global_rope_theta, partial_rotary_factor=c.global_rope_fraction
    )
    if c.global_rope_factor != 1.0:
        far["factor"] = c.global_rope_factor
    return dict(sliding_attention=dict(rope_type="default", rope_theta=c.rope_theta), full_attention=far)


def export_diffusion(c: ModelConfig) -> dict[str, Any]:
    """Our config as DiffusionGemma's."""
    return dict(
        architectures=["DiffusionGemmaForBlockDiffusion"], model_type="diffusion_gemma", canvas_length=c.block,
        text_config=text_config(c, "diffusion_gemma_text") | {"final_logit_softcapping": _softcap(c)},
        vision_config=VISION, tie_word_embeddings=True, dtype=c.dtype,
    )  # fmt: skip


def _softcap(c: ModelConfig) -> float | None:
    assert isinstance(c, GemmaConfig)
    return c.softcap


def export_text(c: ModelConfig) -> dict[str, Any]:
    """Our config as that of Gemma 4's text model alone."""
    assert isinstance(c, GemmaConfig)
    return text_config(c, "gemma4_text") | dict(
        architectures=["Gemma4ForCausalLM"], final_logit_softcapping=c.softcap, attention_k_eq_v=c.keys_as_values,
        enable_moe_block=c.experts is not None, hidden_size_per_layer_input=c.per_layer_width,
        vocab_size_per_layer_input=c.per_layer_vocab or c.vocab, num_kv_shared_layers=c.shared_kv,
        use_double_wide_mlp=c.shared_ffn is not None,
    )  # fmt: skip


DIFFUSION_GEMMA = Family(
    name="DiffusionGemma",
    architectures=("DiffusionGemmaForBlockDiffusion",),
    checkpoints=("google/diffusiongemma-26B-A4B-it",),
    keys=gemma.DIFFUSION_KEYS,
    config=gemma.diffusion,
    names=gemma.diffusion_names,
    noise=NoiseConfig(kind="uniform"),
    block="256",
    about="uniform noise, causal encoder, self-conditioning; text only, images are refused",
    ignored=gemma.unread,
    export=export_diffusion,
    licence="Apache-2.0",
    decoding=gemma.decoding,
)

GEMMA4 = Family(
    name="Gemma 4",
    architectures=("Gemma4ForConditionalGeneration",),
    checkpoints=("google/gemma-4-26B-A4B-it", "google/gemma-4-31B-it", "google/gemma-4-E4B-it"),
    keys=gemma.GEMMA4_KEYS,
    config=gemma.autoregressive,
    names=functools.partial(gemma.names, stem="model.language_model."),
    noise=None,
    about="autoregressive; text only, images and sound are refused",
    ignored=gemma.unread,
    licence="Apache-2.0",
)

GEMMA4_TEXT = GEMMA4._replace(
    name="Gemma 4, text",
    architectures=("Gemma4ForCausalLM",),
    checkpoints=(),
    keys=gemma.GEMMA4_TEXT_KEYS,
    names=functools.partial(gemma.names, stem="model."),
    about="autoregressive, the text model alone",
    export=export_text,
)
