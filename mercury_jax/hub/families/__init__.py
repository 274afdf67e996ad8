"""The checkpoint families, and which of them a config.json or a model belongs to.

To add a family: write its file (see `dream.py` for a short one), and add it to `FAMILIES`.
"""

from __future__ import annotations

import dataclasses

from mercury_jax.config import ModelConfig, refuse
from mercury_jax.hub.families import a2d, dit, dream, fast_dllm, gemma, llada, llada_moe, qwen_llama, sdar
from mercury_jax.hub.family import Family, Json

# In the order in which they are tried, for reading and for writing.
FAMILIES: tuple[Family, ...] = (
    gemma.DIFFUSION_GEMMA,
    llada.LLADA,
    llada_moe.LLADA_MOE,
    llada_moe.LLADA2,
    dream.DREAM,
    sdar.SDAR,
    fast_dllm.FAST_DLLM,
    a2d.A2D,
    a2d.OPEN_DCODER,  # before Qwen2.5, whose architecture it names
    dit.MDLM,
    dit.BD3LM,
    dit.DUO,
    dit.GIDD,
    qwen_llama.QWEN2,
    qwen_llama.QWEN3,
    qwen_llama.LLAMA3,
    gemma.GEMMA4,
    gemma.GEMMA4_TEXT,
)


def family_of(config: Json) -> tuple[Family, list[str]]:
    """Finds the family of a config.json.

    `architectures` decides, with what else the config contains: `model_type` alone is wrong (LLaDA-MoE says llada).

    Args:
        config: config.json.

    Returns:
        (the family, notes about other families that the same config.json would fit if it named a mask).

    Raises:
        ValueError: No family has the architecture.
    """
    named = config.get("architectures") or []
    named = named if isinstance(named, list) and all(isinstance(x, str) for x in named) else []
    able = [family for family in FAMILIES if set(named) & set(family.architectures)]
    found = next((family for family in able if family.fits(config)), None)
    if found is None:
        known = ", ".join(name for family in FAMILIES for name in family.architectures)
        raise refuse("config.json: architectures", named, known)
    return found, [
        f"config.json fits {other.name} as well, which is {other.about}, and names no mask: read as {found.name}; "
        f"pass mask= (--mask) to read it as {other.name}"
        for other in able
        if other is not found and other.fits({**config, "mask_token_id": 0}) and not other.fits(config)
    ]


def named_family(name: str) -> Family:
    """Finds a family by its name or an architecture, whatever the capitals, spaces and dashes.

    Raises:
        ValueError: There is no such family; the message lists all.
    """
    plain = lambda text: "".join(c for c in text.lower() if c.isalnum())
    for family in FAMILIES:
        if plain(name) in {plain(family.name), *map(plain, family.architectures)}:
            return family
    raise refuse("family", name, ", ".join(family.name for family in FAMILIES))


def writers(config: ModelConfig) -> list[Family]:
    """Returns the families whose config.json can say all that our config does."""
    able = []
    for family in FAMILIES:
        if family.export is None:
            continue
        # The block size of a bidirectional model is not part of its config.json.
        free = {"block": config.block} if config.pattern == "bidirectional" else {}
        try:
            if dataclasses.replace(family.read(family.export(config)), **free) == config:
                able.append(family)
        except (ValueError, AssertionError, TypeError):
            continue
    return able
