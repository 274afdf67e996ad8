"""Qwen2.5, Qwen3 and Qwen3-MoE: autoregressive, and what many diffusion models are made from."""

from __future__ import annotations

from typing import Any

from mercury_jax.config import ModelConfig
from mercury_jax.hub import decoder
from mercury_jax.hub.family import Family, Json


def qwen2(config: Json) -> ModelConfig:
    """Biases on queries, keys and values, whatever the config says of others."""
    return decoder.autoregressive(config, qkv_bias=True)


def qwen3(config: Json) -> ModelConfig:
    """Norms on the queries and keys of each head."""
    return decoder.autoregressive(config, qk_norm=True, experts=decoder.experts_of(config))


def _qwen3_export(c: ModelConfig) -> dict[str, Any]:
    kind = ("Qwen3ForCausalLM", "qwen3") if c.experts is None else ("Qwen3MoeForCausalLM", "qwen3_moe")
    return decoder.export(c, architectures=[kind[0]], model_type=kind[1])


QWEN2 = Family(
    name="Qwen2.5",
    architectures=("Qwen2ForCausalLM",),
    checkpoints=("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-Coder-7B-Instruct"),
    config=qwen2,
    names=decoder.names,
    noise=None,
    about="autoregressive, grouped queries with biases",
    ignored=decoder.IGNORED,
    export=lambda c: decoder.export(c, architectures=["Qwen2ForCausalLM"], model_type="qwen2"),
    licence="Apache-2.0 (3B and 72B: Qwen's own)",
)

QWEN3 = Family(
    name="Qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    checkpoints=("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"),
    config=qwen3,
    names=decoder.names,
    noise=None,
    about="autoregressive, normed queries and keys, dense or with experts",
    ignored=decoder.IGNORED,
    export=_qwen3_export,
    licence="Apache-2.0",
)
