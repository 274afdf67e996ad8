"""Autoregressive models made bidirectional: dllm's tiny-A2D (Qwen2, Qwen3, Llama) and Open-dCoder (Qwen2.5)."""

from __future__ import annotations

from typing import Any

from mercury_jax.config import ModelConfig, NoiseConfig, refuse
from mercury_jax.hub.families import qwen_llama
from mercury_jax.hub.family import ConfigKeys, Family, Json

# architecture -> (model_type, biases on q, k and v, norms of q and k)
KINDS = {
    "A2DQwen2LMHeadModel": ("a2d-qwen2", True, False),
    "A2DQwen3LMHeadModel": ("a2d-qwen3", False, True),
    "A2DLlamaLMHeadModel": ("a2d-llama", False, False),
}


def _with_mask(config: Json) -> Json:
    """The config, if it has a mask id: none of these families has a fixed one."""
    if config.get("mask_token_id") is None:
        raise refuse("mask", None, "an id: neither config.json nor the tokenizer names the mask; pass mask=")
    return config


def _keys(config: Json) -> ConfigKeys:
    architecture = next(a for a in config["architectures"] if a in KINDS)
    bias = qwen_llama.FIXED_BIAS if architecture == "A2DQwen2LMHeadModel" else qwen_llama.NO_BIAS
    known = qwen_llama.KEYS.plus(qwen_llama.NO_WINDOW).plus(bias)
    return known.plus(ConfigKeys(only={"pretraining_tp": (1,)}))


def _config(config: Json) -> ModelConfig:
    _, bias, norm = KINDS[next(a for a in config["architectures"] if a in KINDS)]
    return ModelConfig(
        **qwen_llama.config_fields(
            _with_mask(config), qkv_bias=bias, out_bias=False, qk_norm=norm, pattern="bidirectional", block=32
        )
    )


def _export(c: ModelConfig) -> dict[str, Any]:
    for architecture, (kind, bias, norm) in KINDS.items():
        if (bias, norm) == (c.qkv_bias, c.qk_norm):
            return qwen_llama.export_config(c, architectures=[architecture], model_type=kind)
    raise refuse("qkv_bias, qk_norm", (c.qkv_bias, c.qk_norm), "one of the two, or none")


A2D = Family(
    name="tiny-A2D",
    architectures=tuple(KINDS),
    checkpoints=("dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1", "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1"),
    keys=_keys,
    config=_config,
    names=qwen_llama.tensor_names,
    noise=NoiseConfig(kind="absorbing"),
    about="masked, small, made of Qwen or Llama",
    ignored=qwen_llama.IGNORED,
    export=_export,
    licence="Apache-2.0",
)


def _dcoder_config(config: Json) -> ModelConfig:
    return ModelConfig(
        **qwen_llama.config_fields(
            _with_mask(config), qkv_bias=True, out_bias=False, pattern="bidirectional", block=32,
            alignment="shifted",
        )
    )  # fmt: skip


OPEN_DCODER = Family(
    name="Open-dCoder",
    architectures=("Qwen2ForCausalLM",),
    checkpoints=("fredzzp/open-dcoder-0.5B",),
    keys=qwen_llama.KEYS.plus(qwen_llama.NO_WINDOW).plus(qwen_llama.FIXED_BIAS),
    config=_dcoder_config,
    names=qwen_llama.tensor_names,
    noise=NoiseConfig(kind="absorbing"),
    about="masked, made of Qwen2.5-Coder",
    ignored=qwen_llama.IGNORED,
    # Its config.json is Qwen2.5's, and so is its class; only the mask id distinguishes it.
    fits=lambda config: config.get("mask_token_id") is not None and "auto_map" in config,
    export=lambda c: qwen_llama.export_config(
        c,
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        auto_map={"AutoModelForCausalLM": "modeling_qwen2.Qwen2ForCausalLM"},
    ),
    licence="Apache-2.0",
)
