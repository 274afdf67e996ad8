"""Autoregressive models made bidirectional: dllm's tiny-A2D (Qwen2, Qwen3, Llama) and Open-dCoder (Qwen2.5)."""

import functools
from typing import Any

from mercury_jax.config import ModelConfig, NoiseConfig, refuse
from mercury_jax.hub import family
from mercury_jax.hub.families.qwen_llama import export_config
from mercury_jax.hub.family import ConfigKeys, Family, Json, register

# architecture -> (model_type, biases on q, k and v, norms of q and k)
KINDS = {
    "A2DQwen2LMHeadModel": ("a2d-qwen2", True, False),
    "A2DQwen3LMHeadModel": ("a2d-qwen3", False, True),
    "A2DLlamaLMHeadModel": ("a2d-llama", False, False),
}


def _keys(config: Json) -> ConfigKeys:
    biased = "A2DQwen2LMHeadModel" in config["architectures"]
    known = family.QWEN2_KEYS if biased else family.KEYS.plus(family.NO_WINDOW, family.NO_BIAS)
    return known.plus(only={"pretraining_tp": (1,)})


def _config(config: Json, alignment: str = "same_position") -> ModelConfig:
    """None of these families has a fixed mask id."""
    if config.get("mask_token_id") is None:
        raise refuse("mask", None, "an id: neither config.json nor the tokenizer names the mask; pass mask=")
    named = [KINDS[name] for name in config["architectures"] if name in KINDS]
    _, bias, norm = named[0] if named else ("qwen2", True, False)
    return family.decoder_config(
        config,
        qkv_bias=bias,
        out_bias=False,
        qk_norm=norm,
        pattern="bidirectional",
        block=32,
        alignment=alignment,
    )


def _export(c: ModelConfig) -> dict[str, Any]:
    for architecture, (kind, bias, norm) in KINDS.items():
        if (bias, norm) == (c.qkv_bias, c.qk_norm):
            return export_config(c, architecture, kind)
    raise refuse("qkv_bias, qk_norm", (c.qkv_bias, c.qk_norm), "one of the two, or none")


register(
    Family(
        name="tiny-A2D",
        architectures=tuple(KINDS),
        checkpoints=("dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1", "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1"),
        keys=_keys,
        config=_config,
        noise=NoiseConfig(kind="absorbing"),
        about="masked, small, made of Qwen or Llama",
        export=_export,
        licence="Apache-2.0",
        rank=1,
    ),
    Family(
        name="Open-dCoder",
        architectures=("Qwen2ForCausalLM",),
        checkpoints=("fredzzp/open-dcoder-0.5B",),
        keys=family.QWEN2_KEYS,
        config=functools.partial(_config, alignment="shifted"),
        noise=NoiseConfig(kind="absorbing"),
        about="masked, made of Qwen2.5-Coder",
        # Its config.json is Qwen2.5's, and so is its class; only the mask id distinguishes it.
        fits=lambda config: config.get("mask_token_id") is not None and "auto_map" in config,
        export=lambda c: export_config(
            c, "Qwen2ForCausalLM", "qwen2", auto_map={"AutoModelForCausalLM": "modeling_qwen2.Qwen2ForCausalLM"}
        ),
        licence="Apache-2.0",
        rank=1,
    ),
)  # fmt: skip
