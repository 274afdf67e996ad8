"""Noise: schedules alpha(t), the corruption processes that use them, and `corrupt`, which applies one to tokens.

Time t runs from 0 (text) to 1 (noise). A schedule gives the probability alpha(t) that a token is unchanged; alpha(0)
= 1 and alpha(1) = 0. Derivatives come from `jax.jvp`, so that each schedule is written once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import NoiseConfig, refuse
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.types import Key

Schedule = Callable[[Array], Array]
Kind = Literal["absorbing", "uniform", "hybrid"]


def linear() -> Schedule:
    """alpha(t) = 1 - t (MDLM, LLaDA)."""
    return lambda t: 1.0 - t


def cosine() -> Schedule:
    """alpha(t) = 1 - cos(pi/2 (1 - t)) (MD4, arXiv 2406.04329, table 4)."""
    return lambda t: 1.0 - jnp.cos(0.5 * math.pi * (1.0 - t))


def polynomial(power: float = 2.0) -> Schedule:
    """alpha(t) = 1 - t**power (MD4, table 4).

    Args:
        power: Above 0.

    Returns:
        The schedule.

    Raises:
        ValueError: If power is not above 0.
    """
    if not power > 0:
        raise refuse("power", power, "more than 0")
    return lambda t: 1.0 - t**power


def rate(alpha: Schedule, t: Float[Array, "*s"]) -> tuple[Float[Array, "*s"], Float[Array, "*s"]]:
    """Computes alpha(t) and its derivative, by forward-mode differentiation.

    Args:
        alpha: The schedule.
        t: Times in 0..1.

    Returns:
        alpha(t) and alpha'(t), with the shape of t.
    """
    return jax.jvp(alpha, (t,), (jnp.ones_like(t),))


class Corruption(NamedTuple):
    """A forward process: a token survives with probability alpha(t), otherwise it is redrawn from the prior.

    Attributes:
        alpha: The schedule.
        prior: prior(key, t) draws one noise token for each element of t (GIDD's prior depends on the time).
        forbidden: Ids that the denoiser never emits.
        mask: The absorbing id, or None.
        kind: What the prior draws: the mask alone, any id, or both.
    """

    alpha: Schedule
    prior: Callable[[Key, Array], Array]
    forbidden: tuple[int, ...]
    mask: int | None
    kind: Kind


class Noised(NamedTuple):
    """Tokens at time t."""

    xt: Int[Array, "*s"]
    changed: Bool[Array, "*s"]  # redrawn from the prior, even where the draw equals the token


def absorbing(mask: int, alpha: Schedule | None = None, forbidden: tuple[int, ...] = ()) -> Corruption:
    """Noise of one mask id (D3PM absorbing, MD4, MDLM).

    Args:
        mask: The mask id, which is never emitted.
        alpha: The schedule; None: linear.
        forbidden: Further ids that are never emitted.

    Returns:
        The forward process.
    """
    prior = lambda key, t: jnp.full(jnp.shape(t), mask, jnp.int32)
    return Corruption(alpha or linear(), prior, tuple({mask, *forbidden}), mask, "absorbing")


def uniform(vocab: int, alpha: Schedule | None = None, forbidden: tuple[int, ...] = ()) -> Corruption:
    """Noise that is drawn uniformly from the ids that may be emitted (UDLM, DUO, DiffusionGemma).

    Args:
        vocab: Size of the vocabulary.
        alpha: The schedule; None: linear.
        forbidden: Ids that are never emitted or drawn.

    Returns:
        The forward process.
    """
    return Corruption(alpha or linear(), _uniform_ids(vocab, forbidden), tuple(forbidden), None, "uniform")


def hybrid(vocab: int, mask: int, share: float = 0.2, forbidden: tuple[int, ...] = ()) -> Corruption:
    """Mask and uniform noise mixed (GIDD, arXiv 2503.04482, section 3.2, with gamma = 1).

    q_t = [(1 - t) x + t m + c_t u] / (1 + c_t), c_t = B sqrt(t (1 - t)), and B such that the uniform part has
    probability `share` at t = 1/2.

    Args:
        vocab: Size of the vocabulary.
        mask: The mask id, which is never emitted.
        share: Share of uniform noise at t = 1/2, 0 <= share < 1.
        forbidden: Further ids that are never emitted or drawn.

    Returns:
        The forward process.

    Raises:
        ValueError: If share is out of range.
    """
    if not 0 <= share < 1:
        raise refuse("share", share, "0 <= share < 1")
    scale = 2.0 * share / (1.0 - share)
    # sqrt has an infinite derivative at 0; the minimum keeps alpha' finite at both ends.
    level = lambda t: scale * jnp.sqrt(jnp.maximum(t * (1.0 - t), 1e-12))
    draw = _uniform_ids(vocab, (mask, *forbidden))

    def prior(key: Key, t: Array) -> Array:
        pick, fill = jax.random.split(key)
        c = level(t)
        is_uniform = jax.random.uniform(pick, jnp.shape(t)) * (t + c) < c
        return jnp.where(is_uniform & (t < 1.0), draw(fill, t), mask)

    alpha = lambda t: (1.0 - t) / (1.0 + level(t))
    return Corruption(alpha, prior, tuple({mask, *forbidden}), mask, "hybrid")


def _uniform_ids(vocab: int, forbidden: tuple[int, ...]) -> Callable[[Key, Array], Array]:
    allowed = jnp.asarray(np.setdiff1d(np.arange(vocab), np.asarray(forbidden, np.int64)), jnp.int32)
    if allowed.size == 0:
        raise refuse("forbidden", forbidden, "at least one id of the vocabulary must remain")
    return lambda key, t: allowed[jax.random.randint(key, jnp.shape(t), 0, allowed.size)]


def corrupt(
    key: Key,
    corruption: Corruption,
    x0: Int[Array, "*s"],
    t: Float[Array, "*s"],
    editable: Bool[Array, "*s"],
) -> Noised:
    """Draws x_t from q(x_t | x_0) at editable positions; all other tokens are unchanged.

    Args:
        key: Random key.
        corruption: The forward process.
        x0: Clean tokens.
        t: Time of each position, with the shape of x0.
        editable: Positions that may be noised.

    Returns:
        The noised tokens, and which of them were redrawn.
    """
    survive, fill = jax.random.split(key)
    # u < alpha survives: at t = 0 (alpha = 1) always, at t = 1 (alpha = 0) never.
    changed = editable & (jax.random.uniform(survive, x0.shape) >= corruption.alpha(t))
    return Noised(jnp.where(changed, corruption.prior(fill, t), x0), changed)


def times(key: Key, count: int, least: float = 1e-4) -> Float[Array, "count"]:
    """Low-discrepancy times t_i = frac(u + i * golden ratio), with one u for all, scaled to [least, 1].

    Each t_i alone is uniform, and any run of consecutive ones is spread evenly, however many of them a batch uses
    (MD4 uses u + i/n, which needs n).

    Args:
        key: Random key.
        count: Number of times.
        least: The smallest time.

    Returns:
        Times [count].
    """
    golden = 0.6180339887498949
    # Reduced in float64 by numpy: i * golden loses its fraction in float32 for large i.
    steps = jnp.asarray((np.arange(count) * golden) % 1.0, jnp.float32)
    t = (jax.random.uniform(key) + steps) % 1.0
    return least + (1.0 - least) * t


SCHEDULES = {"linear": linear, "cosine": cosine}


def schedule(config: NoiseConfig) -> Schedule:
    """The schedule of a config."""
    return polynomial(config.power) if config.schedule == "polynomial" else SCHEDULES[config.schedule]()


def build(config: NoiseConfig, vocab: int, mask: int | None, forbidden: tuple[int, ...] = ()) -> Corruption:
    """The corruption process of a config.

    Args:
        config: Kind of noise and schedule.
        vocab: Size of the vocabulary.
        mask: The mask id; None only for uniform noise.
        forbidden: Special ids that are never emitted.

    Returns:
        The forward process.

    Raises:
        ValueError: If the noise needs a mask id and there is none.
    """
    if config.kind == "uniform":
        return uniform(vocab, schedule(config), (*(() if mask is None else (mask,)), *forbidden))
    if mask is None:
        raise refuse(
            "model.mask",
            None,
            f"an id: {config.kind} noise needs one. hub.config_of(folder, mask=ID) gives an autoregressive checkpoint "
            "its mask; models of uniform noise (DiffusionGemma, DUO) cannot be trained yet",
        )
    if config.kind == "absorbing":
        return absorbing(mask, schedule(config), forbidden)
    return hybrid(vocab, mask, config.uniform, forbidden)


def specials(tokenizer: AnyTokenizer, vocab: int = 0) -> tuple[int, ...]:
    """Ids that are in no answer and that noise never draws.

    Args:
        tokenizer: The model's tokenizer.
        vocab: Size of the model's vocabulary; 0 for the tokenizer's own.

    Returns:
        The mask, the padding if it does not end answers too, and the ids after the tokenizer's last one: published
        models round their vocabulary up (Qwen3: 151,936 for 151,669 tokens).
    """
    named = (i for i in (tokenizer.mask, tokenizer.pad) if i is not None and i not in tokenizer.ends)
    return tuple(dict.fromkeys((*named, *range(tokenizer.vocab_size, vocab))))
