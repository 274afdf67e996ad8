"""mercury_jax: diffusion language models in JAX. Train them, load them, sample from them.

import mercury_jax as mj

lm = mj.load()
print(mj.sample(lm, [{"role": "user", "content": "347+585="}]).text)  # 932
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mercury_jax import decode as _decode

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mercury_jax import hub, rl
    from mercury_jax.api import train
    from mercury_jax.config import ModelConfig, NoiseConfig, Plan, Refresh
    from mercury_jax.decode import grammar, presets, processors, questions, rules, stopping
    from mercury_jax.decode.decide import decide
    from mercury_jax.decode.decoder import Decoder, decoder
    from mercury_jax.decode.defaults import EFFORTS
    from mercury_jax.decode.edit import edit
    from mercury_jax.decode.infill import Hole, infill
    from mercury_jax.decode.inputs import Effort
    from mercury_jax.decode.methods import cache_refresh
    from mercury_jax.decode.methods.block_drafter import with_block_drafter
    from mercury_jax.decode.methods.drafting import Draft
    from mercury_jax.decode.registration import logits_processor, rule, stopping_criterion
    from mercury_jax.decode.request import prompt_ids
    from mercury_jax.decode.rollout import rollout
    from mercury_jax.decode.sample import Output, sample
    from mercury_jax.decode.sampler import LogitsProcessor, Rule, Sampler, StoppingCriterion
    from mercury_jax.decode.score import Score, logits, score
    from mercury_jax.decode.search import best_of_n, smc
    from mercury_jax.decode.session import Session
    from mercury_jax.decode.state import Method
    from mercury_jax.decode.stream import stream
    from mercury_jax.hub.drafters import load_drafter
    from mercury_jax.hub.function import from_function
    from mercury_jax.hub.load import load
    from mercury_jax.models.transformer import soft_masking
    from mercury_jax.sharding import mesh
    from mercury_jax.tokenizer import Tokenizer
    from mercury_jax.training.recipe import TrainConfig
    from mercury_jax.types import LM, Proposal, TokenStats, View

# Imported at first use: importing the package stays fast, and sampling never imports the trainer.
_PUBLIC = {
    "config": ("ModelConfig", "NoiseConfig", "Plan", "Refresh"),
    "decode": ("grammar", "presets", "processors", "questions", "rules", "stopping"),
    "decode.state": ("Method",),
    "decode.decide": ("decide",),
    "decode.decoder": ("Decoder", "decoder"),
    "decode.defaults": ("EFFORTS",),
    "decode.inputs": ("Effort",),
    "decode.methods": ("cache_refresh",),
    "decode.methods.block_drafter": ("with_block_drafter",),
    "decode.methods.drafting": ("Draft",),
    "decode.edit": ("edit",),
    "decode.infill": ("Hole", "infill"),
    "decode.search": ("best_of_n", "smc"),
    "decode.request": ("prompt_ids",),
    "decode.rollout": ("rollout",),

    "decode.sample": ("Output", "sample"),
    "decode.registration": ("logits_processor", "rule", "stopping_criterion"),
    "decode.sampler": ("LogitsProcessor", "Rule", "Sampler", "StoppingCriterion"),
    "decode.score": ("Score", "logits", "score"),
    "decode.session": ("Session",),
    "decode.stream": ("stream",),
    "hub": ("hub",),
    "hub.drafters": ("load_drafter",),
    "hub.function": ("from_function",),
    "hub.load": ("load",),
    "models.transformer": ("soft_masking",),
    "rl": ("rl",),
    "sharding": ("mesh",),
    "tokenizer": ("Tokenizer",),
    "api": ("train",),
    "training.recipe": ("TrainConfig",),
    "types": ("LM", "Proposal", "TokenStats", "View"),
}  # fmt: skip
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = [
    "EFFORTS", "LM", "Decoder", "Draft", "Effort", "Hole", "LogitsProcessor", "Method", "ModelConfig",
    "NoiseConfig", "Output", "Plan", "Proposal", "Refresh", "Rule", "Sampler", "Score", "Session",
    "StoppingCriterion", "TokenStats", "Tokenizer", "TrainConfig", "View", "best_of_n", "cache_refresh",
    "decide", "decoder", "edit", "from_function", "grammar", "hub", "infill", "load", "load_drafter", "logits",
    "logits_processor", "mesh", "presets", "processors", "prompt_ids", "questions", "rl", "rollout", "rule",
    "rules", "sample", "score", "smc", "soft_masking", "stopping", "stopping_criterion", "stream", "train",
    "with_block_drafter",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'mercury_jax' has no attribute {name!r}; it has {', '.join(__all__)}")
    home = importlib.import_module(f"mercury_jax.{_HOME[name]}")
    if name in ("hub", "rl"):
        value = home
    elif home.__name__.endswith((".decode", ".methods")):  # a module
        value = importlib.import_module(f"{home.__name__}.{name}")
    else:
        value = getattr(home, name)
    globals()[name] = value
    return value


def _pictures() -> _decode.Pictures:
    """What draws the answers of a call, imported when one is shown."""
    from mercury_jax.viz import html, plots

    return _decode.Pictures(html.output_html, html.stream_html, html.frame_html, plots.plot, plots.save)


_decode.pictures = _pictures


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
