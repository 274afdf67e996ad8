"""Objectives: functions (key, model, params, batch, corruption) -> Loss, in nats. A recipe holds one as a value.

masked   masks alone: masked_elbo, llada, autoregressive; and what every objective is made of
edited   masked_and_edited, which also repairs wrong tokens and predicts the next one; next_token

To add one, write a function with the signature of `Objective` in a file of its own; a recipe uses it as it is.
`noise_canvases` draws the noise of a batch, `cross_entropy` makes the pass, in parts where all logits are too large.
"""

from mercury_jax.train.objectives.edited import masked_and_edited, next_token
from mercury_jax.train.objectives.masked import (
    Objective,
    autoregressive,
    cross_entropy,
    llada,
    masked_elbo,
    masked_mean,
    noise_canvases,
)

__all__ = [
    "Objective", "autoregressive", "cross_entropy", "llada", "masked_and_edited", "masked_elbo", "masked_mean",
    "next_token", "noise_canvases",
]  # fmt: skip
