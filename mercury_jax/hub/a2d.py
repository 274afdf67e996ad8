"""Autoregressive models made bidirectional: dllm's tiny-A2D (Qwen2, Qwen3, Llama) and Open-dCoder (Qwen2.5)."""

from __future__ import annotations

from typing import Any

from mercury_jax.config import ModelConfig, NoiseConfig, refuse
from mercury_jax.hub import decoder
from mercury_jax.hub.family import Family
from mercury_jax.hub.keys import Json, Keys

# architecture -> model_type, biases on q, k and v, norms of q and k
KINDS = {
    "A2DQwen2LMHeadModel": ("a2d-qwen2", True, False),
    "A2DQwen3LMHeadModel": ("a2d-qwen3", False, True),
    "A2DLlamaLMHeadModel": ("a2d-llama", False, False),
}


BIASES = {"A2DQwen2LMHeadModel": decoder.FIXED_BIAS}


def keys(config: Json) -> Keys:
    """Those of the model it was made of."""
    known = decoder.KEYS.plus(decoder.NO_WINDOW)
    return known.plus(
        BIASES.get(next(a for a in config["architectures"] if a in KINDS), decoder.NO_BIAS)
    ).plus(Keys(only={"pretraining_tp": (1,)}))


def config(config: Json) -> ModelConfig:
    """That of the model it was made of; the mask is the tokenizer's."""
    _, bias, norm = KINDS[next(a for a in config["architectures"] if a in KINDS)]
    return ModelConfig(
        **decoder.sizes(
            masked(config), qkv_bias=bias, out_bias=False, qk_norm=norm, pattern="bidirectional", block=32
        )
    )


def masked(config: Json) -> Json:
    """The config, if it has a mask: none of these families fixes one."""
    if config.get("mask_token_id") is None:
        raise refuse("mask", None, "an id: neither config.json nor the tokenizer names the mask; pass mask=")
    return config


def export(c: ModelConfig) -> dict[str, Any]:
    """Our config as A2D's."""
    for architecture, (kind, bias, norm) in KINDS.items():
        if (bias, norm) == (c.qkv_bias, c.qk_norm):
            return decoder.export(c, architectures=[architecture], model_type=kind)
    raise refuse("qkv_bias, qk_norm", (c.qkv_bias, c.qk_norm), "one of the two, or none")


def dcoder(config: Json) -> ModelConfig:
    """Open-dCoder's config.json is Qwen2.5's, its class too; only the mask id tells it apart."""
    return ModelConfig(
        **decoder.sizes(
            masked(config),
            qkv_bias=True,
            out_bias=False,
            pattern="bidirectional",
            block=32,
            alignment="shifted",
        )
    )


A2D = Family(
    name="tiny-A2D",
    architectures=tuple(KINDS),
    checkpoints=("dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1", "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1"),
    keys=keys,
    config=config,
    names=decoder.names,
    noise=NoiseConfig(kind="absorbing"),
    about="masked, small, made of Qwen or Llama",
    ignored=decoder.IGNORED,
    export=export,
    licence="Apache-2.0",
)

OPEN_DCODER = Family(
    name="Open-dCoder",
    architectures=("Qwen2ForCausalLM",),
    checkpoints=("fredzzp/open-dcoder-0.5B",),
    keys=decoder.KEYS.plus(decoder.NO_WINDOW).plus(decoder.FIXED_BIAS),
    config=dcoder,
    names=decoder.names,
    noise=NoiseConfig(kind="absorbing"),
    about="masked, made of Qwen2.5-Coder",
    ignored=decoder.IGNORED,
    fits=lambda config: config.get("mask_token_id") is not None and "auto_map" in config,
    export=lambda c: decoder.export(
        c,
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        auto_map={"AutoModelForCausalLM": "modeling_qwen2.Qwen2ForCausalLM"},
    ),
    licence="Apache-2.0",
)
