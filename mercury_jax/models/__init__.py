"""Denoisers: `build(config)` returns the `types.Model` of a config, the record of pure functions that others use.

One file per architecture (`transformer`, `gemma`, `dit`); the others hold what they share. `decode` and `train` never
import this package: a `Model` is passed to them.
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
    """Builds the model of a config.

    Args:
        config: A `ModelConfig`, `GemmaConfig` or `DiTConfig`; its type chooses the architecture.
        remat: What a training step keeps of each layer; parameters and results do not depend on it.

    Returns:
        The model. Equal configs give models that compute the same.
    """
    if isinstance(config, dit.DiTConfig):
        return dit.build(config, remat)
    if isinstance(config, gemma.GemmaConfig):
        return gemma.build(config, remat)
    return transformer.build(config, remat)


def kind(config: ModelConfig) -> str:
    """The key of `CONFIGS` under which saved models name their architecture.

    Args:
        config: Of a model.

    Returns:
        The key of its type.

    Raises:
        ValueError: Another type, such as that of `mj.from_function`.
    """
    for name, config_type in CONFIGS.items():
        if type(config) is config_type:
            return name
    allowed = f"{', '.join(CONFIGS)}: the code of a function of one's own cannot be saved; save lm.params"
    raise refuse("architecture", type(config).__name__, allowed)


__all__ = ["CONFIGS", "build", "kind"]
