"""All families, and which of them a config.json belongs to."""

from __future__ import annotations

import dataclasses

from mercury_jax.config import ModelConfig, refuse
from mercury_jax.hub import (
    a2d,
    dit,
    dream,
    fast_dllm,
    gemma4,
    gidd,
    llada,
    llada2,
    llada_moe,
    llama,
    qwen,
    sdar,
)
from mercury_jax.hub.family import Family
from mercury_jax.hub.keys import Json

ALL: tuple[Family, ...] = (
    gemma4.DIFFUSION_GEMMA,
    llada.LLADA,
    llada_moe.LLADA_MOE,
    llada2.LLADA2,
    dream.DREAM,
    sdar.SDAR,
    fast_dllm.FAST_DLLM,
    a2d.A2D,
    a2d.OPEN_DCODER,  # before Qwen2.5, whose architecture it names
    dit.MDLM,
    dit.BD3LM,
    dit.DUO,
    gidd.GIDD,
    qwen.QWEN2,
    qwen.QWEN3,
    llama.LLAMA3,
    gemma4.GEMMA4,
    gemma4.GEMMA4_TEXT,
)


def family_of(config: Json) -> Family:
    """By `architectures` and what else the config holds: `model_type` alone misleads (LLaDA-MoE says llada)."""
    named = config.get("architectures") or []
    named = named if isinstance(named, list) and all(isinstance(x, str) for x in named) else []
    for family in ALL:
        if set(named) & set(family.architectures) and family.fits(config):
            return family
    known = ", ".join(name for family in ALL for name in family.architectures)
    raise refuse("config.json: architectures", named, known)


def notes(config: Json, family: Family) -> list[str]:
    """What config.json leaves open: another family has the same one, and a mask."""
    masked = {**config, "mask_token_id": 0}
    return [
        f"config.json fits {other.name} as well, which is {other.about}, and names no mask: read as {family.name}; "
        f"pass mask= (--mask) to read it as {other.name}"
        for other in ALL
        if other is not family
        and set(config["architectures"]) & set(other.architectures)
        and other.fits(masked)
        and not other.fits(config)
    ]


def called(name: str) -> Family:
    """The family of that name, for writing a checkpoint; capitals and spaces do not count."""
    plain = lambda text: "".join(c for c in text.lower() if c.isalnum())
    for family in ALL:
        if plain(name) in {plain(family.name), *map(plain, family.architectures)}:
            return family
    raise refuse("family", name, ", ".join(family.name for family in ALL))


def writers(config: ModelConfig) -> list[Family]:
    """Families that can hold a model of ours with this config, exactly."""
    return [family for family in ALL if family.export is not None and reads_back(family, config)]


def reads_back(family: Family, config: ModelConfig) -> bool:
    """Whether the family's config.json says all that our config does; a block where nothing is cut is no part of it."""
    assert family.export is not None
    try:
        found = family.read(family.export(config))
        free = {"block": config.block} if config.pattern == "bidirectional" else {}
        return dataclasses.replace(found, **free) == config
    except (ValueError, AssertionError, TypeError):
        return False
