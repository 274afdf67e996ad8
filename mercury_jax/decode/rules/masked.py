"""Rules for masked (absorbing) diffusion: which masks become tokens in this step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode.parts import Knob, Memory, rule, settle
from mercury_jax.types import Key, Proposal, View


@rule
def confidence(key: Key, view: View, memory: Memory) -> tuple[Proposal, Memory]:
    """The most confident masks first, spread evenly over the steps that are left.

    LLaDA's low-confidence remasking (arXiv 2502.09992, algorithm 5); with as many steps as tokens
    it settles one token a step.
    """
    del key
    return settle(view, best(view.reading.p_sample, view.masked, share(view))), memory


@rule
def threshold(key: Key, view: View, memory: Memory, *, p: Knob = 0.9) -> tuple[Proposal, Memory]:
    """Every mask whose drawn token has probability above `p`, and at least the best one.

    Fast-dLLM's confidence-aware parallel decoding (arXiv 2505.22618).
    """
    del key
    sure = view.masked & (view.reading.p_sample > p)
    return settle(view, sure | best(view.reading.p_sample, view.masked, jnp.asarray(1))), memory


@rule
def random(key: Key, view: View, memory: Memory) -> tuple[Proposal, Memory]:
    """Masks in random order, spread evenly over the steps that are left (LLaDA's random remasking)."""
    score = jax.random.uniform(key, view.canvas.shape)
    return settle(view, best(score, view.masked, share(view))), memory


@rule(temperature=1.0)
def ancestral(key: Key, view: View, memory: Memory) -> tuple[Proposal, Memory]:
    """Each mask is drawn with probability (alpha_s - alpha_t) / (1 - alpha_t).

    The reverse process itself (MDLM, arXiv 2406.07524, eq. 6): with many steps it samples from
    the model's own distribution.
    """
    chance = (view.keep_s - view.keep_t) / jnp.maximum(1.0 - view.keep_t, 1e-9)
    accept = view.masked & (jax.random.uniform(key, view.canvas.shape) < chance)
    return settle(view, accept), memory


def share(view: View) -> Int[Array, ""]:
    """How many masks this step must settle, so that the steps that are left suffice."""
    left = jnp.maximum(view.steps - view.step, 1)
    return -(-view.masked.sum() // left)


def best(score: Float[Array, "L"], among: Bool[Array, "L"], count: Int[Array, ""]) -> Bool[Array, "L"]:
    """The `count` highest scores among the given positions; ties go to the left."""
    order = jnp.argsort(jnp.where(among, -score, jnp.inf), stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]))
    return among & (rank < count)
