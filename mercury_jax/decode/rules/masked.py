"""Rules for masked (absorbing) diffusion: which masks become tokens in this step."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode.parts import Knob, Memory, rule, settle
from mercury_jax.decode.ranges import Between
from mercury_jax.types import Key, Proposal, View


@rule(whole=False)
def confidence(key: Key, view: View, memory: Memory) -> tuple[Proposal, Memory]:
    """The most confident masks first, spread evenly over the steps that are left.

    LLaDA's low-confidence remasking (arXiv 2502.09992, algorithm 5); with as many steps as tokens
    it settles one token a step.
    """
    del key
    return settle(view, best(view.reading.p_sample, view.masked, share(view))), memory


@rule(whole=False)
def threshold(
    key: Key, view: View, memory: Memory, *, p: Annotated[Knob, Between(0, 1)] = 0.9
) -> tuple[Proposal, Memory]:
    """Every mask whose drawn token has probability above `p`, and at least the best one.

    Fast-dLLM's confidence-aware parallel decoding (arXiv 2505.22618).
    """
    del key
    sure = view.masked & (view.reading.p_sample > p)
    return settle(view, sure | best(view.reading.p_sample, view.masked, jnp.asarray(1))), memory


@rule(whole=False)
def random(key: Key, view: View, memory: Memory) -> tuple[Proposal, Memory]:
    """Masks in random order, spread evenly over the steps that are left (LLaDA's random remasking)."""
    score = jax.random.uniform(key, view.canvas.shape)
    return settle(view, best(score, view.masked, share(view))), memory


@rule(temperature=1.0, fits=("masked",), whole=False)
def ancestral(key: Key, view: View, memory: Memory) -> tuple[Proposal, Memory]:
    """Each mask is drawn with probability (alpha_s - alpha_t) / (1 - alpha_t).

    The reverse process itself (MDLM, arXiv 2406.07524, eq. 6): with many steps it samples from
    the model's own distribution.
    """
    chance = (view.keep_s - view.keep_t) / jnp.maximum(1.0 - view.keep_t, 1e-9)
    accept = view.masked & (jax.random.uniform(key, view.canvas.shape) < chance)
    return settle(view, accept), memory


@rule(temperature=1.0, fits=("masked",), whole=False)
def first_hitting(key: Key, view: View, memory: Memory) -> tuple[Proposal, Memory]:
    """One mask a step, anywhere, drawn from its own distribution; the last step draws all that are left.

    The first-hitting sampler (arXiv 2409.02908; `first_hitting` in bd3lms `diffusion.py`): the reverse
    process without the passes in which nothing happens. With as many steps as masks it samples exactly
    from a denoiser that is not told the time. The times of the hits, which the reference draws for
    denoisers that are told, are left out.
    """
    score = jax.random.uniform(key, view.canvas.shape)
    count = jnp.where(view.step + 1 >= view.steps, view.canvas.shape[0], 1)
    return settle(view, best(score, view.masked, count)), memory


def share(view: View) -> Int[Array, ""]:
    """How many masks this step must settle, so that the steps that are left suffice.

    Under uniform noise nothing stays settled, and it is how many positions should stand after this step.
    """
    left = jnp.maximum(view.steps - view.step, 1)
    waiting = view.masked.sum()
    absorbing = jnp.all((view.canvas == view.noise) | ~view.masked)  # by chance else: 1 / V ** L
    return jnp.where(absorbing, -(-waiting // left), -(-waiting * (view.step + 1) // view.steps))


def quota(view: View) -> Int[Array, ""]:
    """This step's number of tokens in LLaDA's fixed schedule, whatever the steps before have settled.

    The block's positions divided by its steps, one more in the first ones where that leaves a rest
    (`get_num_transfer_tokens`). Unlike `share` it does not fall when a block is ahead.
    """
    every, rest = jnp.divmod(view.editable.sum(), view.steps)
    return every + (view.step < rest)


def rank(score: Float[Array, "L"], among: Bool[Array, "L"]) -> Int[Array, "L"]:
    """Each position's place by score, 0 the highest; the given ones come first, ties go to the left."""
    order = jnp.argsort(jnp.where(among, -score, jnp.inf), stable=True)
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]))


def best(score: Float[Array, "L"], among: Bool[Array, "L"], count: Int[Array, ""]) -> Bool[Array, "L"]:
    """The `count` highest scores among the given positions; ties go to the left."""
    return among & (rank(score, among) < count)
