"""Denoisers: `build(config)` returns a `types.Model`, the record of pure functions that decoding and training call.

Each architecture has one file (`transformer`, `gemma`, `dit`); the other files hold shared parts. `decode` and
`training` receive a `Model` as an argument.
"""

from mercury_jax.config import ModelConfig, RematPolicy, refuse
from mercury_jax.models import dit, gemma, transformer
from mercury_jax.types import Model

CONFIGS: dict[str, type[ModelConfig]] = {
    "transformer": ModelConfig,
    "gemma": gemma.GemmaConfig,
    "dit": dit.DiTConfig,
}


def build(config: ModelConfig, remat: RematPolicy = "none") -> Model:
    """Builds the model of a config."""
    if isinstance(config, dit.DiTConfig):
        return dit.build(config, remat)
    if isinstance(config, gemma.GemmaConfig):
        return gemma.build(config, remat)
    return transformer.build(config, remat)


def kind(config: ModelConfig) -> str:
    """Returns the name of a config's architecture, a key of `CONFIGS`, as saved models store it."""
    for name, config_type in CONFIGS.items():
        if type(config) is config_type:
            return name
    allowed = f"{', '.join(CONFIGS)}: the code of a function of one's own cannot be saved; save lm.params"
    raise refuse("architecture", type(config).__name__, allowed)


__all__ = ["CONFIGS", "build", "kind"]
