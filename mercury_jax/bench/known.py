"""Configurations by name: models whose shape is known, built without their weights."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mercury_jax.config import Experts, ModelConfig, NoiseConfig, refuse
from mercury_jax.models.gemma import GemmaConfig


class Known(NamedTuple):
    """config: of the model. noise: it was trained with. decoding: as `LM.decoding`."""

    config: Callable[[], ModelConfig]
    noise: NoiseConfig
    about: str
    decoding: Mapping[str, Any] = {}


def diffusion_gemma() -> GemmaConfig:
    """google/diffusiongemma-26B-A4B-it: every sixth layer sees everything, 128 experts beside a dense branch."""
    return GemmaConfig(
        vocab=262144, width=2816, layers=30, heads=16, kv_heads=8, head_dim=256, ffn=2112, block=256,
        experts=Experts(count=128, active=8, width=704), global_layers=(5, 11, 17, 23, 29), window=1024,
        global_head_dim=512, global_kv_heads=2, keys_as_values=True, self_conditioning=True, encoder_scalars=True,
        context=262144, dtype="bfloat16", pad=0, eos=1,
    )  # fmt: skip


def llada() -> ModelConfig:
    """GSAI-ML/LLaDA-8B-Instruct: Llama's build without its mask, every head with keys of its own."""
    return ModelConfig(
        vocab=126464, width=4096, layers=32, heads=32, kv_heads=32, head_dim=128, ffn=12288, pattern="bidirectional",
        block=32, rope_theta=500_000.0, qk_norm=False, tied=False, zero_centred=False, scale_embed=False,
        norm_eps=1e-5, context=4096, dtype="bfloat16", mask=126336, pad=126081, eos=126081,
    )  # fmt: skip


def ours(width: int, layers: int, heads: int, kv_heads: int, head_dim: int, ffn: int) -> ModelConfig:
    """A causal encoder of our own with a canvas of 256 and 32,768 ids."""
    return ModelConfig(
        vocab=32768, width=width, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn,
        block=256, context=32768, dtype="bfloat16",
    )  # fmt: skip


# How its generation_config.json asks to be decoded (entropy bound, temperatures, early end).
GEMMA_DECODING = {
    "rule": "entropy_bound", "knobs": {"gamma": 0.1}, "cooling": {"last": 0.4, "first": 0.8},
    "steady": {"patience": 1, "entropy": 0.005}, "temperature": 1.0, "steps": 48, "block": 256,
}  # fmt: skip

MASKED, UNIFORM = NoiseConfig(kind="absorbing"), NoiseConfig(kind="uniform")

ALL = {
    "diffusiongemma-26b-a4b": Known(
        diffusion_gemma, UNIFORM, "DiffusionGemma, 26B parameters, 4B of them active", GEMMA_DECODING
    ),
    "llada-8b": Known(llada, MASKED, "LLaDA 8B"),
    "mercury-100m": Known(lambda: ours(768, 12, 12, 4, 64, 2048), MASKED, "ours, 100M parameters"),
    "mercury-350m": Known(lambda: ours(1024, 24, 16, 8, 64, 3200), MASKED, "ours, 350M parameters"),
    "mercury-1b": Known(lambda: ours(2048, 20, 16, 8, 128, 5632), MASKED, "ours, 1B parameters"),
}


def find(name: str) -> Known:
    """The configuration of that name; ValueError names the nearest."""
    if name not in ALL:
        close = difflib.get_close_matches(name, ALL, n=1, cutoff=0.3)
        hint = f"{close[0]} is the nearest; all: " if close else ""
        raise refuse("MODEL", name, f"a folder, a recipe, a config.json, or a name: {hint}{', '.join(ALL)}")
    return ALL[name]
