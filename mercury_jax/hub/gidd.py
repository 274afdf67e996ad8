"""GIDD: the diffusion transformer of dvruette/gidd, trained with masks and uniform noise mixed."""

from __future__ import annotations

from typing import Any

from mercury_jax.config import ModelConfig, NoiseConfig
from mercury_jax.hub.dit import CONSTANTS, common, fixed, names, sizes, specials
from mercury_jax.hub.family import Family, Leaf
from mercury_jax.hub.keys import COMMON, INT, NUMBER, Json, Keys
from mercury_jax.models.dit import DiTConfig

_KEYS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "timestep_cond_dim", "max_seq_len")


def _config(config: Json) -> DiTConfig:
    """It is told the time itself, shrunk into [t_eps, 1 - t_eps] as in its training and its sampler."""
    return DiTConfig(
        **sizes(config, *_KEYS),
        **specials(config),
        timed=True,
        level="time",
        level_eps=config.get("t_eps", 1e-4),
    )


def noise(config: Json) -> NoiseConfig:
    """Its share of uniform noise is in config.json."""
    return NoiseConfig(kind="hybrid", uniform=config.get("p_uniform", 0.0))


def _names(config: ModelConfig) -> dict[str, Leaf]:
    return names("", config)


def _export(config: ModelConfig) -> dict[str, Any]:
    c = fixed(config)
    found = dict(zip(_KEYS, (c.width, c.heads, c.layers, c.cond, c.context), strict=True))
    return common(c) | found | dict(architectures=["DIT"], model_type="dit", t_eps=c.level_eps)


GIDD = Family(
    name="GIDD",
    architectures=("DIT",),
    checkpoints=tuple(
        f"dvruette/gidd-{size}-p_unif-{p}" for size in ("small", "base") for p in ("0.0", "0.1", "0.2")
    ),
    keys=COMMON.plus(
        Keys(used={"vocab_size": INT, "t_eps": NUMBER, "p_uniform": NUMBER, **dict.fromkeys(_KEYS, INT)})
    ),
    config=_config,
    names=_names,
    noise=noise,
    about="DiT, GPT-2's tokens, masks and uniform noise mixed (arXiv 2503.04482)",
    ignored=CONSTANTS,
    fits=lambda config: "timestep_cond_dim" in config,
    export=_export,
    licence="MIT",
)
