"""Qwen2.5, Qwen3 and Qwen3-MoE: autoregressive, and what many diffusion models are made from."""

from __future__ import annotations

from typing import Any

from mercury_jax.config import ModelConfig
from mercury_jax.hub import decoder
from mercury_jax.hub.family import Family
from mercury_jax.hub.keys import Json, Keys

QWEN2_KEYS = decoder.KEYS.plus(decoder.WINDOW).plus(decoder.FIXED_BIAS)
QWEN3_KEYS = decoder.KEYS.plus(decoder.WINDOW).plus(decoder.BIAS)


def qwen2(config: Json) -> ModelConfig:
    """Biases on queries, keys and values, whatever the config says of others."""
    return decoder.autoregressive(config, qkv_bias=True, out_bias=False)


def qwen3_keys(config: Json) -> Keys:
    """With experts a window is one of all layers."""
    if _dense(config):
        return QWEN3_KEYS.plus(Keys(only={"model_type": ("qwen3",)}))
    whole = Keys(
        only={"model_type": ("qwen3_moe",)},
        unused=dict.fromkeys(
            ("max_window_layers", "layer_types"), "every layer has the window, if there is one"
        ),
    )
    return QWEN3_KEYS.plus(decoder.EXPERTS).plus(whole)


def _dense(config: Json) -> bool:
    return "Qwen3ForCausalLM" in config["architectures"]


def qwen3(config: Json) -> ModelConfig:
    """Norms on the queries and keys of each head."""
    if _dense(config):  # 128 is its class's head size, not width / heads
        return decoder.autoregressive({"head_dim": 128, **config}, qk_norm=True)
    plain = {**config, "max_window_layers": 0, "layer_types": None}
    return decoder.autoregressive(plain, qk_norm=True, experts=decoder.experts_of(config))


def _qwen3_export(c: ModelConfig) -> dict[str, Any]:
    kind = ("Qwen3ForCausalLM", "qwen3") if c.experts is None else ("Qwen3MoeForCausalLM", "qwen3_moe")
    return decoder.export(c, architectures=[kind[0]], model_type=kind[1])


QWEN2 = Family(
    name="Qwen2.5",
    architectures=("Qwen2ForCausalLM",),
    checkpoints=("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-Coder-7B-Instruct"),
    keys=QWEN2_KEYS.plus(Keys(only={"model_type": ("qwen2",), "use_mrope": (False,)})),
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
    keys=qwen3_keys,
    config=qwen3,
    names=decoder.names,
    noise=None,
    about="autoregressive, normed queries and keys, dense or with experts",
    ignored=decoder.IGNORED,
    export=_qwen3_export,
    licence="Apache-2.0",
)
