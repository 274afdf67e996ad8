"""SDAR and TraDo: Qwen3, dense or with experts, in blocks that see themselves and what is before (arXiv 2510.06303)."""

from __future__ import annotations

from typing import Any

from mercury_jax.config import ModelConfig, NoiseConfig
from mercury_jax.hub import decoder
from mercury_jax.hub.family import Family
from mercury_jax.hub.keys import INT, Json, Keys

MASK, BLOCK = 151669, 4  # of every published model whose config.json is silent


TRAINING = ("debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint", "use_deepep")


def keys(config: Json) -> Keys:
    """Qwen3's, and how it was trained."""
    known = decoder.KEYS.plus(decoder.NO_WINDOW).plus(decoder.NO_BIAS)
    known = known.plus(Keys(used={"block_size": INT}, unused=dict.fromkeys(TRAINING, "training only")))
    return known.plus(decoder.EXPERTS) if "SDARMoeForCausalLM" in config["architectures"] else known


def config(config: Json) -> ModelConfig:
    """SDAR's config.json."""
    return ModelConfig(
        **decoder.sizes(
            {"mask_token_id": MASK, **config}, qk_norm=True, experts=decoder.experts_of(config),
            pattern="block_causal", block=config.get("block_size", BLOCK),
        )
    )  # fmt: skip


def export(c: ModelConfig) -> dict[str, Any]:
    """Our config as SDAR's."""
    kind = ("SDARForCausalLM", "sdar") if c.experts is None else ("SDARMoeForCausalLM", "sdar_moe")
    return decoder.export(c, architectures=[kind[0]], model_type=kind[1], block_size=c.block)


SDAR = Family(
    name="SDAR, TraDo",
    architectures=("SDARForCausalLM", "SDARMoeForCausalLM"),
    checkpoints=("JetLM/SDAR-4B-Chat", "JetLM/SDAR-30B-A3B-Chat", "Gen-Verse/TraDo-8B-Instruct"),
    keys=keys,
    config=config,
    names=decoder.names,
    noise=NoiseConfig(kind="absorbing"),
    block="4 to 64",
    about="masked blocks, made of Qwen3",
    ignored=decoder.IGNORED,
    export=export,
    licence="MIT",
)
