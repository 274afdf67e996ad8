"""SDAR and TraDo: Qwen3, dense or with experts, in blocks that see themselves and what is before (arXiv 2510.06303)."""

from typing import Any

from mercury_jax.config import ModelConfig, NoiseConfig
from mercury_jax.hub import family
from mercury_jax.hub.families.qwen_llama import EXPERTS, experts_of, export_config
from mercury_jax.hub.family import Family, register

MASK, BLOCK = 151669, 4  # of every published model whose config.json does not say
TRAINING = ("debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint", "use_deepep")
DENSE_KEYS = family.KEYS.plus(
    family.NO_WINDOW,
    family.NO_BIAS,
    used={"block_size": "int"},
    unused=dict.fromkeys(TRAINING, "training only"),
)
MOE_KEYS = DENSE_KEYS.plus(EXPERTS)


def _export(c: ModelConfig) -> dict[str, Any]:
    kind = ("SDARForCausalLM", "sdar") if c.experts is None else ("SDARMoeForCausalLM", "sdar_moe")
    return export_config(c, *kind, block_size=c.block)


register(
    Family(
        name="SDAR, TraDo",
        architectures=("SDARForCausalLM", "SDARMoeForCausalLM"),
        checkpoints=("JetLM/SDAR-4B-Chat", "JetLM/SDAR-30B-A3B-Chat", "Gen-Verse/TraDo-8B-Instruct"),
        keys=lambda config: MOE_KEYS if "SDARMoeForCausalLM" in config["architectures"] else DENSE_KEYS,
        config=lambda config: family.decoder_config(
            config, default_mask=MASK, qk_norm=True, experts=experts_of(config), pattern="block_causal",
            block=config.get("block_size", BLOCK),
        ),
        noise=NoiseConfig(kind="absorbing"),
        block="4 to 64",
        about="masked blocks, made of Qwen3",
        export=_export,
        licence="MIT",
    )
)  # fmt: skip
