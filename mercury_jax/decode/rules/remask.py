"""Rules that put masks back: ReMDM's reverse processes, and WINO's draft and verify."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mercury_jax.decode import stop as stops
from mercury_jax.decode.parts import Knob, Memory, rule, settle
from mercury_jax.decode.ranges import Between
from mercury_jax.decode.rules.masked import best
from mercury_jax.types import Key, Proposal, View


@rule(temperature=1.0, stop=stops.never, fits=("masked",), whole=False)
def remdm_cap(
    key: Key, view: View, memory: Memory, *, eta: Annotated[Knob, Between(0, 1)] = 0.008
) -> tuple[Proposal, Memory]:
    """Ancestral decoding that masks each settled token again with probability min(eta, sigma_max).

    ReMDM (arXiv 2503.00307), `remdm-cap`: sigma_max = min(1, (1 - alpha_s) / alpha_t) keeps the
    marginals of the forward process. The paper draws from the nucleus: add shape.top_p(0.9).
    """
    sigma = jnp.minimum(eta, sigma_max(view.keep_t, view.keep_s))
    return remasked(key, view, sigma, view.keep_t, view.keep_s), memory


@rule(temperature=1.0, stop=stops.never, fits=("masked",), whole=False)
def remdm_rescale(
    key: Key, view: View, memory: Memory, *, eta: Annotated[Knob, Between(0, 1)] = 0.015
) -> tuple[Proposal, Memory]:
    """The same with probability eta * sigma_max (ReMDM, `remdm-rescale`); eta in [0, 1]."""
    sigma = eta * sigma_max(view.keep_t, view.keep_s)
    return remasked(key, view, sigma, view.keep_t, view.keep_s), memory


def _sure(canvas: jax.Array, vocab: int) -> jax.Array:
    del vocab
    return jnp.ones(canvas.shape, jnp.float32)


@rule(init=_sure, temperature=1.0, stop=stops.never, fits=("masked",), whole=False)
def remdm_confidence(
    key: Key, view: View, memory: Float[Array, "L"], *, eta: Annotated[Knob, Between(0, 1)] = 1.0
) -> tuple[Proposal, Float[Array, "L"]]:
    """The same, the tokens least sure when they were settled being doubted most.

    sigma_i = eta * sigma_max * softmax(-c)_i over the settled tokens, c_i the probability that token i
    had when it was settled (ReMDM, `remdm-conf`, which has eta 1: at most one token a step on
    average). A token that stood there from the start counts as sure.
    """
    doubt = jnp.where(view.editable & ~view.masked, jnp.exp(-memory), 0.0)
    share = doubt / jnp.maximum(doubt.sum(), 1e-9)
    sigma = jnp.minimum(eta * share, 1.0) * sigma_max(view.keep_t, view.keep_s)
    proposal = remasked(key, view, sigma, view.keep_t, view.keep_s)
    settled = view.masked & (proposal.canvas != view.noise)
    return proposal, jnp.where(settled, view.reading.p_sample, memory).astype(memory.dtype)


@rule(temperature=1.0, stop=stops.never, fits=("masked",), whole=False)
def remdm_loop(
    key: Key,
    view: View,
    memory: Memory,
    *,
    eta: Annotated[Knob, Between(0, 1)] = 0.02,
    t_on: Annotated[Knob, Between(0, 1)] = 0.55,
    t_off: Annotated[Knob, Between(0, 1)] = 0.05,
    alpha_on: Annotated[Knob, Between(0, 1)] = 0.9,
) -> tuple[Proposal, Memory]:
    """Fill most masks early, then revise for a while, then fill the rest (ReMDM, `remdm-loop`).

    The rule has its own schedule over the block's time, whatever the corruption's:

        1 >= t > t_on       alpha = alpha_on (1 - t) / (1 - t_on), nothing is masked again
        t_on >= t > t_off   alpha = alpha_on, a settled token is masked with probability eta
        t_off >= t >= 0     alpha = 1 - (1 - alpha_on) t / t_off, nothing is masked again

    A step belongs to the phase in which it begins. The reference continues that phase's line past
    its end; here alpha(s) is taken where s is.
    """
    keep_t, keep_s = (_plateau(x, t_on, t_off, alpha_on) for x in (view.t, view.s))
    looping = (view.t <= t_on) & (view.t > t_off)
    sigma = jnp.where(looping, jnp.minimum(eta, sigma_max(keep_t, keep_s)), 0.0)
    return remasked(key, view, sigma, keep_t, keep_s), memory


def _plateau(t: Array, t_on: Knob, t_off: Knob, alpha_on: Knob) -> Array:
    rising = alpha_on * (1.0 - t) / jnp.maximum(1.0 - t_on, 1e-6)
    closing = 1.0 - (1.0 - alpha_on) * t / jnp.maximum(t_off, 1e-6)
    return jnp.where(t > t_on, rising, jnp.where(t > t_off, alpha_on, closing))


def sigma_max(keep_t: Float[Array, ""], keep_s: Float[Array, ""]) -> Float[Array, ""]:
    """The most that a settled token may be masked with: min(1, (1 - alpha_s) / alpha_t)."""
    return jnp.minimum(1.0, (1.0 - keep_s) / jnp.maximum(keep_t, 1e-9))


def remasked(key: Key, view: View, sigma: Array, keep_t: Array, keep_s: Array) -> Proposal:
    """One step of ReMDM's reverse process; sigma is one number, or one a position.

    settled -> mask with probability sigma;
    mask -> token with probability (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t), which is 1 in the
    last step, where sigma_max is 0: so nothing stays masked.
    """
    u = jax.random.uniform(key, view.canvas.shape)
    chance = (keep_s - (1.0 - sigma) * keep_t) / jnp.maximum(1.0 - keep_t, 1e-9)
    return reopened(view, settle(view, view.masked & (u < chance)), ~view.masked & (u < sigma))


def reopened(view: View, proposal: Proposal, which: Bool[Array, "L"]) -> Proposal:
    """The proposal with settled tokens turned back into noise; the answer keeps them until others come."""
    return proposal._replace(canvas=jnp.where(view.editable & which, view.noise, proposal.canvas))


def _thirty(canvas: jax.Array, vocab: int) -> jax.Array:
    del canvas, vocab
    return jnp.asarray(30, jnp.int32)


@rule(init=_thirty, fits=("masked",), blind=True, whole=False)
def wino(
    key: Key,
    view: View,
    memory: jax.Array,
    *,
    p: Annotated[Knob, Between(0, 1)] = 0.6,
    p_back: Annotated[Knob, Between(0, 1)] = 0.9,
) -> tuple[Proposal, jax.Array]:
    """Draft boldly, and mask again what a reader blind to it would not have written.

    WINO (arXiv 2507.18578; LLaDA/decoding.py of Feng-Hong/WINO-DLLM). Draft: masks with probability
    above `p`, at most clip(0.7 M, 5, 20) of the M masks, at least one. Verify, in the same pass, the
    tokens that stood before it: those with a blind probability under `p_back` become masks again,
    the least probable first and fewer than were drafted in the step before (the memory; 30 at
    first), so a block of L masks ends within L steps. A step that drafts one token verifies nothing.
    The block ends when no mask is left, as in the reference: the last draft is not verified.
    """
    del key
    c = view.reading.p_sample
    most = jnp.clip(view.masked.sum() * 7 // 10, 5, 20)
    accept = best(c, view.masked & (c > p), most) | best(c, view.masked, jnp.asarray(1))
    drafted = accept.sum()
    seen = view.blind.p_canvas
    wrong = view.editable & ~view.masked & (seen < p_back)
    wrong = best(-seen, wrong, memory - 1) & (drafted > 1)
    return reopened(view, settle(view, accept), wrong), drafted.astype(memory.dtype)
