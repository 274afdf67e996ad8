"""Objectives: functions (key, model, params, batch, corruption) -> Loss, in nats. A recipe holds one as a value.

masked       masked_elbo, llada, cart, score_entropy: masks alone
uniform      uniform_elbo, gidd_elbo, diffusion_gemma: noise that may be any token
edited       masked_and_edited, which also repairs wrong tokens and predicts the next one
next_token   next_token: autoregression
balanced     balanced, which adds to any of them a loss that spreads tokens over experts
objective    what all of them are made of

To add one, write a function with the signature of `Objective` in a file of its own; a recipe uses it as it is.
`mask_canvases` draws the masks of a batch, `denoise` makes the pass, and `reduce_logits` reads its logits, in parts
where all of them are too large.
"""

from mercury_jax.train.objectives.balanced import balanced
from mercury_jax.train.objectives.edited import masked_and_edited
from mercury_jax.train.objectives.masked import (
    cart,
    llada,
    mask_canvases,
    masked_elbo,
    range_variances,
    score_entropy,
)
from mercury_jax.train.objectives.next_token import next_token
from mercury_jax.train.objectives.objective import (
    Objective,
    cross_entropy,
    denoise,
    masked_mean,
    reduce_logits,
)
from mercury_jax.train.objectives.uniform import diffusion_gemma, gidd_elbo, uniform_elbo

__all__ = [
    "Objective", "balanced", "cart", "cross_entropy", "denoise", "diffusion_gemma", "gidd_elbo", "llada",
    "mask_canvases", "masked_and_edited", "masked_elbo", "masked_mean", "next_token", "range_variances",
    "reduce_logits", "score_entropy", "uniform_elbo",
]  # fmt: skip
