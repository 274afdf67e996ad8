"""mercury_jax: diffusion language models in JAX. Train them, load them, sample from them.

import mercury_jax as mj

lm = mj.load()
print(mj.sample(lm, [{"role": "user", "content": "347+585="}]).text)  # 932
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mercury_jax import hub
    from mercury_jax.api import train
    from mercury_jax.config import ModelConfig, NoiseConfig, Plan, Refresh
    from mercury_jax.decode import grammar, rules, shape, stop
    from mercury_jax.decode.edit import EditOutput, edit
    from mercury_jax.decode.effort import EFFORTS, Effort
    from mercury_jax.decode.infill import Hole, infill
    from mercury_jax.decode.output import LogProbs, Output, Session
    from mercury_jax.decode.parts import Sampler, propose, rule, settle, shaper
    from mercury_jax.decode.ranges import Above, AtLeast, Between
    from mercury_jax.decode.sample import sample
    from mercury_jax.decode.score import Score, logits, score
    from mercury_jax.decode.stream import stream
    from mercury_jax.hub.load import load
    from mercury_jax.sharding import mesh
    from mercury_jax.tokenizer import Tokenizer
    from mercury_jax.train.recipe import TrainConfig
    from mercury_jax.types import LM

# Loaded at first use: importing the package stays quick, and sampling never loads the trainer.
_PUBLIC = {
    "config": ("ModelConfig", "NoiseConfig", "Plan", "Refresh"),
    "decode": ("grammar", "rules", "shape", "stop"),
    "decode.edit": ("EditOutput", "edit"),
    "decode.effort": ("EFFORTS", "Effort"),
    "decode.infill": ("Hole", "infill"),
    "decode.output": ("LogProbs", "Output", "Session"),
    "decode.parts": ("Sampler", "propose", "rule", "settle", "shaper"),
    "decode.ranges": ("Above", "AtLeast", "Between"),
    "decode.sample": ("sample",),
    "decode.score": ("Score", "logits", "score"),
    "decode.stream": ("stream",),
    "hub": ("hub",),
    "hub.load": ("load",),
    "sharding": ("mesh",),
    "tokenizer": ("Tokenizer",),
    "train.recipe": ("TrainConfig",),
    "types": ("LM",),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = [
    "EFFORTS", "LM", "Above", "AtLeast", "Between", "EditOutput", "Effort", "Hole", "LogProbs", "ModelConfig",
    "NoiseConfig", "Output", "Plan", "Refresh", "Sampler", "Score", "Session", "Tokenizer", "TrainConfig", "edit",
    "grammar", "hub", "infill", "load", "logits", "mesh", "propose", "rule", "rules", "sample", "score", "settle",
    "shape", "shaper", "stop", "stream", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mercury_jax' has no attribute {name!r}; it has {', '.join(__all__)}")
    home = importlib.import_module(f"mercury_jax.{_HOME[name]}")
    if name == "hub":
        value = home
    elif name in _PUBLIC["decode"]:
        value = importlib.import_module(f"mercury_jax.decode.{name}")
    else:
        value = getattr(home, name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """`mj.train` stays a function when the import system binds the submodule of the same name."""

    @property
    def train(self) -> Any:
        return importlib.import_module("mercury_jax.api").train

    @train.setter
    def train(self, module: ModuleType) -> None:
        del module


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
