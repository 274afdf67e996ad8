"""Small checkpoints with random weights in the published format of a family, to try a command or to test a program.

`tiny_random` writes what a family's authors publish, at a millionth of the size: the build of the model, the names and
layout of the tensors, config.json, a tokenizer and a chat template. The text that such a model writes means nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from mercury_jax import models, noise
from mercury_jax.config import Experts, ModelConfig, refuse
from mercury_jax.hub.export import save_hf
from mercury_jax.hub.load import NANO, load
from mercury_jax.models.gemma import GemmaConfig
from mercury_jax.types import LM

CONTEXT = 512
PLAIN: Mapping[str, Any] = dict(
    width=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, zero_centred=False, scale_embed=False, tied=False
)  # fmt: skip
EXPERTS = Experts(count=4, active=2, width=32)
BUILDS: Mapping[str, Mapping[str, Any]] = {
    "LLaDA": dict(kv_heads=4, pattern="bidirectional", block=32, qk_norm=False, norm_eps=1e-5),
    "LLaDA-MoE": dict(
        kv_heads=4, pattern="bidirectional", block=32, experts=dataclasses.replace(EXPERTS, renormalise=False)
    ),
    "LLaDA2.0, 2.1": dict(
        pattern="block_causal", block=32,
        experts=dataclasses.replace(
            EXPERTS, score="sigmoid", groups=2, active_groups=1, correction=True, shared=32, dense=(0,)
        ),
    ),
    "Dream": dict(pattern="bidirectional", block=32, qk_norm=False, qkv_bias=True, alignment="shifted"),
    "Fast-dLLM v2": dict(pattern="block_causal", block=32, qk_norm=False, qkv_bias=True, alignment="shifted"),
    "SDAR, TraDo": dict(pattern="block_causal", block=4),
    "Qwen3": dict(pattern="block_causal", block=1, predicts_next=True, mask=None),
    "DiffusionGemma": dict(
        block=32, window=16, global_layers=(1,), global_head_dim=32, global_kv_heads=1, keys_as_values=True,
        self_conditioning=True, encoder_scalars=True, experts=EXPERTS, mask=None,
    ),
}  # fmt: skip


def tiny_random(family: str, folder: str | Path, *, seed: int = 0, head_scale: float = 1.0) -> Path:
    """Writes a small checkpoint with random weights, in the format in which a family's authors publish theirs.

    It has two layers of width 64 (some 200,000 parameters), a context of 512 tokens, and the tokenizer and the chat
    template of the embedded model. Every command takes it in place of a published checkpoint.

    Args:
        family: One of `BUILDS`; case, spaces and punctuation are ignored.
        folder: The new folder.
        seed: Of the weights.
        head_scale: Factor of the output head. At 1 all predictions are nearly uniform; at 8 some are certain, so that
            decoding rules differ in their passes.

    Returns:
        The folder.

    Raises:
        ValueError: No such family, the folder holds files, or `head_scale` is given for DiffusionGemma, whose head is
            its embedding table.

    Example:
        >>> lm = mj.load(mj.hub.tiny_random("LLaDA", "tiny-llada"))
    """
    plain = lambda name: re.sub(r"\W", "", name.lower())
    name = next((known for known in BUILDS if plain(known) == plain(family)), None)
    if name is None:
        raise refuse("family", family, "; ".join(BUILDS))
    tokenizer = load(NANO).tokenizer
    ids = dict(
        vocab=tokenizer.vocab_size + 8,  # more ids than the tokenizer, as published models have
        mask=tokenizer.mask,
        pad=tokenizer.pad,
        eos=tokenizer.eos,
        context=CONTEXT,
    )
    if name == "DiffusionGemma":
        sizes = {key: x for key, x in PLAIN.items() if key not in ("zero_centred", "scale_embed", "tied")}
        config: ModelConfig = GemmaConfig(**{**sizes, **ids, **BUILDS[name]})
    else:
        config = ModelConfig(**{**PLAIN, **ids, **BUILDS[name]})
    model = models.build(config)
    params = jax.jit(model.init)(jax.random.key(seed))
    if head_scale != 1.0:
        if "head" not in params:
            raise refuse("head_scale", head_scale, f"1.0 for {name}, whose head is its embedding table")
        params = {**params, "head": head_scale * params["head"]}
    lm = LM(model, params, tokenizer, noise.uniform(config.vocab))  # a checkpoint does not say its noise
    return save_hf(folder, lm, family=name)
