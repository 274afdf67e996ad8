"""Fast-dLLM v2: Qwen2.5 in causal blocks; logits at position i predict token i + 1 (arXiv 2509.26328)."""

from __future__ import annotations

from mercury_jax.config import ModelConfig, NoiseConfig
from mercury_jax.hub.families import qwen_llama
from mercury_jax.hub.family import INT, ConfigKeys, Family, Json

MASK, BLOCK = 151665, 32


def _config(config: Json) -> ModelConfig:
    return ModelConfig(
        **qwen_llama.config_fields(
            {"mask_token_id": MASK, **config}, qkv_bias=True, out_bias=False, pattern="block_causal",
            block=config.get("bd_size", BLOCK), alignment="shifted",
        )
    )  # fmt: skip


FAST_DLLM = Family(
    name="Fast-dLLM v2",
    architectures=("Fast_dLLM_QwenForCausalLM",),
    checkpoints=("Efficient-Large-Model/Fast_dLLM_v2_1.5B", "Efficient-Large-Model/Fast_dLLM_v2_7B"),
    keys=qwen_llama.KEYS.plus(qwen_llama.NO_WINDOW)
    .plus(qwen_llama.FIXED_BIAS)
    .plus(ConfigKeys(used={"bd_size": INT}, unused={"conplemenrary_mask": "training only"})),
    config=_config,
    names=qwen_llama.tensor_names,
    noise=NoiseConfig(kind="absorbing"),
    block="32",
    about="masked blocks, made of Qwen2.5",
    ignored=qwen_llama.IGNORED,
    export=lambda c: qwen_llama.export_config(
        c, architectures=["Fast_dLLM_QwenForCausalLM"], model_type="Fast_dLLM_Qwen", bd_size=c.block
    ),
    licence="Apache-2.0",
)
