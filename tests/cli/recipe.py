"""A small valid recipe."""

RECIPE = """
from mercury_jax.config import ModelConfig
from mercury_jax.training import data
from mercury_jax.training.objectives import masked_elbo
from mercury_jax.training.recipe import TrainConfig

def config():
    return TrainConfig(
        name="tiny", model=ModelConfig(vocab=400, width=16), objective=masked_elbo(),
        data=data.mixture((data.stdlib(), 1.0)), out="OUT",
    )
"""
