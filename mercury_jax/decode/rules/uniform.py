"""Rules for uniform noise, under which every position stays open and may change in each step.

entropy_bound         accepts positions of low entropy and renoises the others (EB-Sampler)
diffusion_gemma       the sampler preset of DiffusionGemma, with `entropy_bound`
predictor_corrector   samples the reverse process, mixed with a corrector (DUO)
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mercury_jax.config import Between
from mercury_jax.decode import processors, stopping
from mercury_jax.decode.registration import NonNegative, Probability, rule, sampler_preset
from mercury_jax.decode.sampler import Memory, Param, Sampler, accept, propose
from mercury_jax.types import Key, Proposal, View


@rule(
    temperature=1.0,
    needs_logits=False,
    source="EB-Sampler, arXiv 2505.24857, in the form of transformers' generation_diffusion_gemma.py",
)
def entropy_bound(key: Key, view: View, memory: Memory, gamma: NonNegative = 0.1) -> tuple[Proposal, Memory]:
    """Accepts the positions of the lowest entropy whose joint entropy without the last stays below `gamma`.

    Positions are sorted by entropy H, and position i is accepted if cumsum(H)_i - H_i <= gamma. The first position
    always passes. The sum of entropies bounds the dependence between tokens that are drawn in the same step. Under
    uniform noise accepted positions become their drawn tokens, all others are renoised, and the answer is the argmax
    everywhere. Under masked noise the others stay masks.

    Args:
        key: Unused.
        view: Reads `stats`, `masked`, `editable`, `canvas` and `noise`.
        memory: Unused.
        gamma: Bound on the summed entropy, in nats.

    Returns:
        The proposal, and the unchanged memory.
    """
    # A position fits if the open positions of lower entropy sum to at most gamma; of equal entropies the first position
    # counts as lower. Comparing all pairs [L, L] is one kernel, where a sort, its cumulative sum and its inverse are
    # several.
    entropy, at = view.stats.entropy, jnp.arange(view.masked.shape[0])  # [L]
    lower = (entropy < entropy[:, None]) | ((entropy == entropy[:, None]) & (at < at[:, None]))
    summed = jnp.where(lower & view.masked, entropy, 0.0).sum(axis=-1)
    proposal = accept(view, view.masked & (summed <= gamma))
    argmax = jnp.where(view.editable, view.stats.argmax, view.canvas)
    return proposal._replace(answer=jnp.where(is_uniform(view), argmax, proposal.answer)), memory


def is_uniform(view: View) -> Bool[Array, ""]:
    """Says whether the noise is uniform, which a view does not name.

    An open position holds the mask if it equals `view.noise` and has probability 0, since no mask is ever predicted.
    The noise is uniform if some open position does not hold the mask.
    """
    holds_mask = (view.canvas == view.noise) & (view.stats.p_canvas == 0)
    return jnp.any(view.masked & ~holds_mask)


@sampler_preset("transformers' DiffusionGemmaGenerationConfig")
def diffusion_gemma() -> Sampler:
    """Returns DiffusionGemma's own sampler.

    It combines `entropy_bound(0.1)`, a temperature that falls from 0.8 to 0.4, and a block that ends when its answer is
    stable and confident. `Plan(steps=)` sets the number of steps, 48 in the reference.

    Returns:
        The sampler. Its temperature is 1, because the processor `cooling` already divides the logits.
    """
    return Sampler(
        entropy_bound(0.1),
        processors=(processors.cooling(last=0.4, first=0.8),),
        stopping=stopping.steady(entropy=0.005, patience=1),
        temperature=1.0,
    )


@rule(
    noise="uniform",
    temperature=1.0,
    stopping=stopping.never,
    source="Psi-sampler of DUO, arXiv 2506.10892 and 2602.21185; s-sahoo/duo, trainer_base.py",
)
def predictor_corrector(
    key: Key,
    view: View,
    memory: Memory,
    kappa: Probability = 0.95,
    own: Probability = 0.0,
    greedy: Annotated[Param, Between(0, 1, integer=True)] = 1,
) -> tuple[Proposal, Memory]:
    """Samples kappa * q(x_s | x_t, x_0) + (1 - kappa) * q(x_s | x_0), for a drawn x_0.

    The first term, the predictor, is ancestral sampling (kappa = 1). The second term, the corrector, noises the
    prediction x_0 again, so that tokens that the predictor would keep may still change. The answer is the argmax;
    `greedy` chooses the answer of the last step.

    What the model predicts depends on its objective. Cross-entropy (DiffusionGemma) trains p(x_0 | x_t); then drawing
    x_0 from it and x_s from `bridge` is exact. The bounds of DUO and UDLM train a prior x_theta that ignores the token
    at the position itself, with p(x_0 | x_t) proportional to x_theta(x_0) q(x_t | x_0); set own = 1 for these. In both
    cases x_s has the same distribution as in the reference, which computes it as an array [L, V].

    Args:
        key: Three draws per position.
        view: Reads `logits`, `stats`, `canvas`, `noise`, `editable`, `alpha_t` and `alpha_s`.
        memory: Unused.
        kappa: Weight of the predictor; one number, or a `Static` array with one for each step.
        own: 1 for models whose output is a prior that ignores the token at the position itself, otherwise 0.
        greedy: 1: after the last step the answer is the argmax; 0: it is the tokens drawn in that step (the values
            "greedy" and "ancestral" of DUO's `noise_removal`).

    Returns:
        The proposal, and the unchanged memory.
    """
    mix, walk, tilt = jax.random.split(key, 3)
    uniform = lambda k: jax.random.uniform(k, view.canvas.shape)
    allowed = (view.logits > -1e29).sum(-1)
    # Draw x_0. Times N = `allowed`, the weight x_theta(x_0) q(x_t | x_0) is x_theta(x_0) (1 - alpha_t) for any x_0, and
    # N alpha_t x_theta(x_t) more for x_0 = x_t. The latter is `on_canvas`: with own = 1, x_0 is the token of the canvas
    # with its share of the total weight, and otherwise the sample of x_theta. [L]
    on_canvas = view.alpha_t * allowed * view.stats.p_canvas
    stays = uniform(tilt) * (on_canvas + 1.0 - view.alpha_t) < on_canvas * own
    x0 = jnp.where(stays, view.canvas, view.stats.sample)
    # Predictor: x_s is the token of the canvas with probability `old`, x_0 with probability `new`, else fresh noise.
    # Corrector: x_s is x_0 with probability alpha_s, else fresh noise.
    old, new = bridge(x0 == view.canvas, view.alpha_t, view.alpha_s, allowed)
    u = uniform(walk)
    predicted = jnp.where(u < old, view.canvas, jnp.where(u < old + new, x0, view.noise))
    corrected = jnp.where(u < view.alpha_s, x0, view.noise)
    # kappa [] or [steps]: the probability of taking the predictor at a position.
    weight = jnp.asarray(kappa)
    weight = weight[jnp.minimum(view.step, weight.shape[0] - 1)] if weight.ndim else weight
    canvas = jnp.where(uniform(mix) < weight, predicted, corrected)
    drawn = (view.step + 1 >= view.steps) & (jnp.asarray(greedy) == 0)
    keep = lambda new: jnp.where(view.editable, new, view.canvas)
    return propose(view, keep(canvas), keep(jnp.where(drawn, canvas, view.stats.argmax))), memory


def bridge(
    same: Bool[Array, "*s"], alpha_t: Float[Array, ""], alpha_s: Float[Array, ""], allowed: Array
) -> tuple[Float[Array, "*s"], Float[Array, "*s"]]:
    """Computes q(x_s | x_t, x_0) under a uniform prior over N = `allowed` ids.

    With a = alpha_t / alpha_s, q(x_t | x_s) = a [x_t = x_s] + (1 - a) / N and
    q(x_s | x_0) = alpha_s [x_s = x_0] + (1 - alpha_s) / N, Bayes' rule gives

        q(x_s | x_t, x_0) = ( N alpha_t [x_s = x_t = x_0] + (a - alpha_t) [x_s = x_t]
                              + (alpha_s - alpha_t) [x_s = x_0] + (1 - a) (1 - alpha_s) / N )
                            / ( N alpha_t [x_t = x_0] + 1 - alpha_t )

    (UDLM, arXiv 2412.10193; DUO's `_posterior_from_x0`).

    Args:
        same: Whether x_t = x_0 at each position.
        alpha_t: alpha at the time of the canvas.
        alpha_s: alpha at the time after the step.
        allowed: N, the number of ids that may be drawn.

    Returns:
        The probabilities of x_s = x_t and of x_s = x_0, with the shape of `same`. Otherwise x_s is a fresh draw from
        the prior.
    """
    a = alpha_t / jnp.maximum(alpha_s, 1e-9)
    both = jnp.where(same, alpha_t * allowed, 0.0)
    total = jnp.maximum(both + 1.0 - alpha_t, 1e-9)
    return (both + a - alpha_t) / total, (alpha_s - alpha_t) / total + jnp.zeros_like(total)
