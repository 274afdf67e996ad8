"""Fast-dLLM v2: Qwen2.5 in causal blocks, its logits still one position ahead (arXiv 2509.26328)."""

from __future__ import annotations

from typing import Any

from mercury_jax.config import ModelConfig, NoiseConfig
from mercury_jax.hub import decoder
from mercury_jax.hub.family import Family, Json

MASK, BLOCK = 151665, 32


def config(config: Json) -> ModelConfig:
    """Fast-dLLM v2's config.json; `bd_size` is the block."""
    plain = {"mask_token_id": MASK, **config, "use_sliding_window": False}
    block = config.get("bd_size") or BLOCK
    return ModelConfig(
        **decoder.sizes(plain, qkv_bias=True, pattern="block_causal", block=block, alignment="shifted")
    )


def export(c: ModelConfig) -> dict[str, Any]:
    """Our config as Fast-dLLM v2's."""
    return decoder.export(
        c, architectures=["Fast_dLLM_QwenForCausalLM"], model_type="Fast_dLLM_Qwen", bd_size=c.block
    )


FAST_DLLM = Family(
    name="Fast-dLLM v2",
    architectures=("Fast_dLLM_QwenForCausalLM",),
    checkpoints=("Efficient-Large-Model/Fast_dLLM_v2_1.5B", "Efficient-Large-Model/Fast_dLLM_v2_7B"),
    config=config,
    names=decoder.names,
    noise=NoiseConfig(kind="absorbing"),
    block="32",
    about="masked blocks, made of Qwen2.5",
    ignored=decoder.IGNORED,
    export=export,
    licence="Apache-2.0",
)
