"""Fast-dLLM v2: Qwen2.5 in causal blocks, its logits still one position ahead (arXiv 2509.26328)."""

from __future__ import annotations

from typing import Any

from mercury_jax.config import ModelConfig, NoiseConfig
from mercury_jax.hub import decoder
from mercury_jax.hub.family import Family
from mercury_jax.hub.keys import INT, Json, Keys

MASK, BLOCK = 151665, 32


def config(config: Json) -> ModelConfig:
    """Fast-dLLM v2's config.json; `bd_size` is the block."""
    return ModelConfig(
        **decoder.sizes(
            {"mask_token_id": MASK, **config}, qkv_bias=True, out_bias=False, pattern="block_causal",
            block=config.get("bd_size", BLOCK), alignment="shifted",
        )
    )  # fmt: skip


def export(c: ModelConfig) -> dict[str, Any]:
    """Our config as Fast-dLLM v2's."""
    return decoder.export(
        c, architectures=["Fast_dLLM_QwenForCausalLM"], model_type="Fast_dLLM_Qwen", bd_size=c.block
    )


FAST_DLLM = Family(
    name="Fast-dLLM v2",
    architectures=("Fast_dLLM_QwenForCausalLM",),
    checkpoints=("Efficient-Large-Model/Fast_dLLM_v2_1.5B", "Efficient-Large-Model/Fast_dLLM_v2_7B"),
    keys=decoder.KEYS.plus(decoder.NO_WINDOW)
    .plus(decoder.FIXED_BIAS)
    .plus(Keys(used={"bd_size": INT}, unused={"conplemenrary_mask": "training only"})),
    config=config,
    names=decoder.names,
    noise=NoiseConfig(kind="absorbing"),
    block="32",
    about="masked blocks, made of Qwen2.5",
    ignored=decoder.IGNORED,
    export=export,
    licence="Apache-2.0",
)
