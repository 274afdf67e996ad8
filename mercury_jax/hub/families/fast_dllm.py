"""Fast-dLLM v2: Qwen2.5 in causal blocks; logits at position i predict token i + 1 (arXiv 2509.26328)."""

from mercury_jax.config import NoiseConfig
from mercury_jax.hub import family
from mercury_jax.hub.families.qwen_llama import export_config
from mercury_jax.hub.family import Family, register

MASK, BLOCK = 151665, 32  # where config.json does not say

register(
    Family(
        name="Fast-dLLM v2",
        architectures=("Fast_dLLM_QwenForCausalLM",),
        checkpoints=("Efficient-Large-Model/Fast_dLLM_v2_1.5B", "Efficient-Large-Model/Fast_dLLM_v2_7B"),
        keys=family.QWEN2_KEYS.plus(
            used={"bd_size": "int"}, unused={"conplemenrary_mask": "training only"}
        ),
        config=lambda config: family.decoder_config(
            config, default_mask=MASK, qkv_bias=True, out_bias=False, pattern="block_causal",
            block=config.get("bd_size", BLOCK), alignment="shifted",
        ),
        noise=NoiseConfig(kind="absorbing"),
        block="32",
        about="masked blocks, made of Qwen2.5",
        export=lambda c: export_config(c, "Fast_dLLM_QwenForCausalLM", "Fast_dLLM_Qwen", bd_size=c.block),
        licence="Apache-2.0",
    )
)  # fmt: skip
