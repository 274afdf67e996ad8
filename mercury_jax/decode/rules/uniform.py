"""Rules that accept by entropy; on uniform diffusion they refill what they reject with noise."""

from __future__ import annotations

import jax.numpy as jnp

from mercury_jax.decode.parts import Knob, Memory, rule, settle
from mercury_jax.types import Key, Proposal, View


@rule(temperature=1.0)
def entropy_bound(key: Key, view: View, memory: Memory, *, gamma: Knob = 0.1) -> tuple[Proposal, Memory]:
    """The surest positions whose joint entropy beyond the last stays under `gamma` nats.

    EB-Sampler (arXiv 2505.24857) in DiffusionGemma's form: sort by entropy, accept i while
    cumsum(H) - H_i <= gamma (the first always is). Under uniform noise every position is open in
    every step: the rejected ones are redrawn from the prior, and the answer is the argmax.
    """
    del key
    entropy = jnp.where(view.masked, view.reading.entropy, jnp.inf)
    order = jnp.argsort(entropy, stable=True)
    ordered = jnp.where(jnp.isfinite(entropy), entropy, 0.0)[order]
    fits = jnp.cumsum(ordered) - ordered <= gamma
    accept = jnp.zeros_like(fits).at[order].set(fits) & view.masked
    return settle(view, accept), memory
