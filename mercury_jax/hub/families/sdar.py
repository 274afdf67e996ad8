"""SDAR and TraDo: Qwen3, dense or with experts, in blocks that see themselves and what is before (arXiv 2510.06303)."""

from __future__ import annotations

from typing import Any

from mercury_jax.config import ModelConfig, NoiseConfig
from mercury_jax.hub.families import qwen_llama
from mercury_jax.hub.family import INT, ConfigKeys, Family, Json

MASK, BLOCK = 151669, 4  # of every published model whose config.json does not say
TRAINING = ("debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint", "use_deepep")


def _keys(config: Json) -> ConfigKeys:
    known = qwen_llama.KEYS.plus(qwen_llama.NO_WINDOW).plus(qwen_llama.NO_BIAS)
    known = known.plus(ConfigKeys(used={"block_size": INT}, unused=dict.fromkeys(TRAINING, "training only")))
    return known.plus(qwen_llama.EXPERTS) if "SDARMoeForCausalLM" in config["architectures"] else known


def _config(config: Json) -> ModelConfig:
    return ModelConfig(
        **qwen_llama.config_fields(
            {"mask_token_id": MASK, **config}, qk_norm=True, experts=qwen_llama.experts_of(config),
            pattern="block_causal", block=config.get("block_size", BLOCK),
        )
    )  # fmt: skip


def _export(c: ModelConfig) -> dict[str, Any]:
    kind = ("SDARForCausalLM", "sdar") if c.experts is None else ("SDARMoeForCausalLM", "sdar_moe")
    return qwen_llama.export_config(c, architectures=[kind[0]], model_type=kind[1], block_size=c.block)


SDAR = Family(
    name="SDAR, TraDo",
    architectures=("SDARForCausalLM", "SDARMoeForCausalLM"),
    checkpoints=("JetLM/SDAR-4B-Chat", "JetLM/SDAR-30B-A3B-Chat", "Gen-Verse/TraDo-8B-Instruct"),
    keys=_keys,
    config=_config,
    names=qwen_llama.tensor_names,
    noise=NoiseConfig(kind="absorbing"),
    block="4 to 64",
    about="masked blocks, made of Qwen3",
    ignored=qwen_llama.IGNORED,
    export=_export,
    licence="MIT",
)
