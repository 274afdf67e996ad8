"""Rules for uniform noise, where no position is ever closed: what is not kept is redrawn."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mercury_jax.decode import shape, stop as stops
from mercury_jax.decode.parts import Knob, Memory, Sampler, propose, rule, settle, tell
from mercury_jax.decode.ranges import AtLeast, Between
from mercury_jax.types import Key, Proposal, View


@rule(temperature=1.0, whole=False)
def entropy_bound(
    key: Key, view: View, memory: Memory, *, gamma: Annotated[Knob, AtLeast(0)] = 0.1
) -> tuple[Proposal, Memory]:
    """The surest positions whose joint entropy beyond the last stays under `gamma` nats.

    EB-Sampler (arXiv 2505.24857) in DiffusionGemma's form: sort by entropy, accept i while
    cumsum(H) - H_i <= gamma (the first always is). Under uniform noise every position is open in
    every step: the accepted become their draws, all others fresh noise, and the answer is the argmax
    everywhere (transformers' generation_diffusion_gemma.py). Under masked noise the others stay
    masks, and the answer holds the draws.
    """
    del key
    entropy = jnp.where(view.masked, view.reading.entropy, jnp.inf)
    order = jnp.argsort(entropy, stable=True)
    ordered = jnp.where(jnp.isfinite(entropy), entropy, 0.0)[order]
    fits = jnp.cumsum(ordered) - ordered <= gamma
    accept = jnp.zeros_like(fits).at[order].set(fits) & view.masked
    proposal = settle(view, accept)
    answer = jnp.where(is_uniform(view), likeliest(view), proposal.answer)
    return proposal._replace(answer=answer), memory


def diffusion_gemma() -> Sampler:
    """DiffusionGemma's own sampler: gamma 0.1, temperature 0.8 to 0.4, stop when stable and confident.

    The defaults of transformers' DiffusionGemmaGenerationConfig; the number of steps, 48 there,
    is the plan's. Tokens are drawn at temperature 1 from the logits that `cooling` has divided.
    """
    return Sampler(
        entropy_bound(0.1),
        shape=(shape.cooling(last=0.4, first=0.8),),
        stop=stops.steady(entropy=0.005, patience=1),
        temperature=1.0,
    )


tell(diffusion_gemma, {}, {})


def is_uniform(view: View) -> Bool[Array, ""]:
    """Whether the noise is uniform: an open position that does not stand under an impossible mask."""
    under_mask = (view.canvas == view.noise) & (view.reading.p_canvas == 0)
    return jnp.any(view.masked & ~under_mask)


def likeliest(view: View) -> Array:
    """The argmax wherever the rule may write."""
    return jnp.where(view.editable, view.reading.argmax, view.canvas)


@rule(temperature=1.0, stop=stops.never, fits=("uniform",))
def predictor_corrector(
    key: Key,
    view: View,
    memory: Memory,
    *,
    kappa: Annotated[Knob, Between(0, 1)] = 0.95,
    own: Annotated[Knob, Between(0, 1)] = 0.0,
) -> tuple[Proposal, Memory]:
    """kappa * q(x_s | x_t, x_0) + (1 - kappa) * q(x_s | x_0), for a drawn x_0; the answer is the argmax.

    The Psi-sampler of DUO (arXiv 2506.10892 and 2602.21185; s-sahoo/duo, trainer_base.py). kappa 1 is
    ancestral sampling; the corrector noises the prediction anew, so that every token gets another
    chance. The answer, and with it the last step, is DUO's greedy tail.

    A model trained by cross-entropy (DiffusionGemma) gives p(x_0 | x_t): then drawing x_0 from it and
    x_s from `bridge` is exact. DUO's and UDLM's bounds train another output, a prior x_theta that
    has not yet taken the position's own token into account, with p(x_0 | x_t) proportional to
    x_theta(x_0) q(x_t | x_0): for those, own = 1. In both cases this samples what the reference
    computes over the vocabulary, without an array of that size.
    """
    mix, walk, tilt = jax.random.split(key, 3)
    uniform = lambda k: jax.random.uniform(k, view.canvas.shape)
    allowed = (view.logits > -1e29).sum(-1)
    # sum over x_0 of x_theta q(x_t | x_0): this share of the posterior stands on x_t itself.
    hit = view.keep_t * allowed * view.reading.p_canvas
    stays = uniform(tilt) * (hit + 1.0 - view.keep_t) < hit * own
    x0 = jnp.where(stays, view.canvas, view.reading.sample)
    old, new = bridge(x0 == view.canvas, view.keep_t, view.keep_s, allowed)
    u = uniform(walk)
    predicted = jnp.where(u < old, view.canvas, jnp.where(u < old + new, x0, view.noise))
    corrected = jnp.where(u < view.keep_s, x0, view.noise)
    canvas = jnp.where(uniform(mix) < kappa, predicted, corrected)
    return propose(view, jnp.where(view.editable, canvas, view.canvas), likeliest(view)), memory


def bridge(
    same: Bool[Array, "*s"], keep_t: Float[Array, ""], keep_s: Float[Array, ""], allowed: Array
) -> tuple[Float[Array, "*s"], Float[Array, "*s"]]:
    """q(x_s | x_t, x_0) under a uniform prior over N = `allowed` ids, as (weight on x_t, weight on x_0).

    With a = alpha_t / alpha_s, q(x_t | x_s) = a [x_t = x_s] + (1 - a) / N and
    q(x_s | x_0) = alpha_s [x_s = x_0] + (1 - alpha_s) / N, Bayes' rule gives

        q(x_s | x_t, x_0) = ( N alpha_t [x_s = x_t = x_0] + (a - alpha_t) [x_s = x_t]
                              + (alpha_s - alpha_t) [x_s = x_0] + (1 - a) (1 - alpha_s) / N )
                            / ( N alpha_t [x_t = x_0] + 1 - alpha_t )

    (UDLM, arXiv 2412.10193; DUO's `_posterior_from_x0`). What the two weights leave
    is a fresh draw from the prior. same: x_t = x_0.
    """
    a = keep_t / jnp.maximum(keep_s, 1e-9)
    both = jnp.where(same, keep_t * allowed, 0.0)
    total = jnp.maximum(both + 1.0 - keep_t, 1e-9)
    return (both + a - keep_t) / total, (keep_s - keep_t) / total + jnp.zeros_like(total)
