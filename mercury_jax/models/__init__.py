"""Denoisers: `build(config)` gives the record of pure functions that the rest of the house knows."""

from mercury_jax.config import ModelConfig
from mercury_jax.models import dit, gemma, transformer
from mercury_jax.types import Model


def build(config: ModelConfig) -> Model:
    """The model of a config, by the config's type; equal configs give equal functions' results."""
    if isinstance(config, dit.DiTConfig):
        return dit.build(config)
    if isinstance(config, gemma.GemmaConfig):
        return gemma.build(config)
    return transformer.build(config)


CONFIGS: dict[str, type[ModelConfig]] = {
    "transformer": ModelConfig,
    "gemma": gemma.GemmaConfig,
    "dit": dit.DiTConfig,
}


def kind(config: ModelConfig) -> str:
    """The name under which a saved config's type is found again."""
    return next(name for name, made in CONFIGS.items() if type(config) is made)


__all__ = ["CONFIGS", "build", "kind"]
