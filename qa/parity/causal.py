"""The autoregressive families: Qwen2.5, Qwen3, Qwen3-MoE and Llama 3, at toy sizes."""

from __future__ import annotations

from typing import Any

from transformers import (  # pyright: ignore[reportMissingImports]
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES = dict(
    vocab_size=97, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=1,
)  # fmt: skip


def rope(theta: float, **more: Any) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


def qwen2() -> tuple[Any, Any]:
    return Qwen2ForCausalLM, Qwen2Config(**SIZES, **rope(1e6), rms_norm_eps=1e-6, tie_word_embeddings=False)


def qwen2_tied() -> tuple[Any, Any]:
    return Qwen2ForCausalLM, Qwen2Config(**SIZES, **rope(1e4), rms_norm_eps=1e-6, tie_word_embeddings=True)


def qwen3() -> tuple[Any, Any]:
    return Qwen3ForCausalLM, Qwen3Config(**SIZES, **rope(1e6), head_dim=10, tie_word_embeddings=True)


def qwen3_moe() -> tuple[Any, Any]:
    """The second layer is dense; the others choose 2 of 5 experts."""
    config = Qwen3MoeConfig(
        **SIZES, **rope(1e6), head_dim=10, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12,
        mlp_only_layers=[1], norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3MoeForCausalLM, config


def llama3() -> tuple[Any, Any]:
    """Scaled as Llama 3.1 is, with an original context so short that every branch of the scaling is used."""
    scaling = dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )  # fmt: skip
    config = LlamaConfig(
        **(SIZES | dict(num_attention_heads=3, num_key_value_heads=1, head_dim=16)), **rope(1e4, **scaling)
    )
    return LlamaForCausalLM, config


def published(config: dict) -> dict:
    """config.json under the names that checkpoints before transformers 5 have."""
    rotary = config.pop("rope_parameters")
    config["rope_theta"] = rotary.pop("rope_theta")
    config["rope_scaling"] = None if rotary["rope_type"] == "default" else rotary
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    if "use_sliding_window" in config:  # a window that is named, and not used
        config |= dict(sliding_window=6, max_window_layers=1)
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    return config
