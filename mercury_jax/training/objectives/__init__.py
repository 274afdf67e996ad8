"""Training objectives: functions (key, model, params, batch, corruption) -> Loss, in nats.

masked       masked_elbo, llada, cart, score_entropy: absorbing noise (masks)
uniform      uniform_elbo, gidd_elbo, diffusion_gemma: noise tokens from the whole vocabulary
edited       masked_and_edited: masks, repair of wrong tokens and next-token prediction in one pass
next_token   next_token: the autoregressive loss
block_draft  block_draft: a block drafter for a frozen autoregressive model
balanced     balanced: adds a load-balancing loss for mixtures of experts to any other objective
objective    the functions that all objectives share

To add an objective, write a function with the signature of `Objective` and use it as `objective=` in a recipe.
`layout_of` finds the layout of its rows, `mask_canvases` draws the masks of a batch, `denoise` makes the forward pass,
and `reduce_logits` turns its logits into a few numbers per position, in chunks when all logits at once would not fit
into memory.
"""

from mercury_jax.training.objectives.balanced import balanced
from mercury_jax.training.objectives.block_draft import block_draft
from mercury_jax.training.objectives.edited import masked_and_edited
from mercury_jax.training.objectives.masked import (
    cart,
    llada,
    mask_canvases,
    masked_elbo,
    range_variances,
    score_entropy,
)
from mercury_jax.training.objectives.next_token import next_token
from mercury_jax.training.objectives.objective import (
    Objective,
    cross_entropy,
    denoise,
    layout_of,
    masked_mean,
    reduce_logits,
)
from mercury_jax.training.objectives.uniform import diffusion_gemma, gidd_elbo, uniform_elbo

__all__ = [
    "Objective", "balanced", "block_draft", "cart", "cross_entropy", "denoise", "diffusion_gemma", "gidd_elbo",
    "layout_of", "llada", "mask_canvases", "masked_and_edited", "masked_elbo", "masked_mean", "next_token",
    "range_variances", "reduce_logits", "score_entropy", "uniform_elbo",
]  # fmt: skip
