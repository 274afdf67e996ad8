"""Noise: schedules alpha(t), forward processes, `corrupt`, and the likelihood bound (NELBO) of each process.

Time t runs from 0 (text) to 1 (noise). A schedule gives the probability alpha(t) that a token is unchanged, with
alpha(0) = 1 and alpha(1) = 0. Its derivative is computed by `jax.jvp`, so a schedule is a single function. The
objectives of uniform and hybrid noise, and `mj.score` for such models, integrate `bound_terms` over t; for masks
`objectives.masked` has the weight of the cross-entropy itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray as Key

from mercury_jax.config import NoiseConfig, PositiveFloat, ShareBelowOne, checked, refuse, schedule_values
from mercury_jax.tokenizer import AnyTokenizer

Schedule = Callable[[Array], Array]
Kind = Literal["absorbing", "uniform", "hybrid"]


def linear() -> Schedule:
    """The linear schedule, alpha(t) = 1 - t (MDLM, LLaDA)."""
    return lambda t: 1.0 - t


def cosine() -> Schedule:
    """The cosine schedule, alpha(t) = 1 - cos(pi/2 (1 - t)) (MD4, arXiv 2406.04329, table 4)."""
    # 1 - cos x = 2 sin^2(x / 2), which does not lose digits near t = 1, where cos x is close to 1.
    return lambda t: 2.0 * jnp.sin(0.25 * math.pi * (1.0 - t)) ** 2


@checked
def polynomial(power: PositiveFloat = 2.0) -> Schedule:
    """The polynomial schedule, alpha(t) = 1 - t**power (MD4, arXiv 2406.04329, table 4).

    Args:
        power: The exponent, above 0.

    Returns:
        The schedule.

    Raises:
        ValueError: `power` is not above 0.
    """
    return lambda t: 1.0 - t**power


def interpolated(values: tuple[float, ...]) -> Schedule:
    """A schedule by its values at evenly spaced times from 0 to 1, linear between them.

    Args:
        values: From alpha(0) = 1 to alpha(1) = 0, as a checkpoint holds a schedule that was a function.

    Returns:
        The schedule.
    """

    def alpha(t: Float[Array, "*s"]) -> Float[Array, "*s"]:
        table, last = jnp.asarray(values, t.dtype), len(values) - 2
        at = t * (last + 1)
        low = jnp.clip(at.astype(jnp.int32), 0, last)
        return table[low] + (table[low + 1] - table[low]) * (at - low)

    return alpha


def rate(alpha: Schedule, t: Float[Array, "*s"]) -> tuple[Float[Array, "*s"], Float[Array, "*s"]]:
    """Computes alpha(t) and its derivative alpha'(t), by forward-mode differentiation.

    Args:
        alpha: The schedule, or another elementwise function of time.
        t: Times in [0, 1].

    Returns:
        alpha(t) and alpha'(t), with the shape of t.
    """
    return jax.jvp(alpha, (t,), (jnp.ones_like(t),))


def inverse(alpha: Schedule, value: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Computes the time t with alpha(t) = value, by bisection.

    Args:
        alpha: The schedule, decreasing from 1 to 0.
        value: Values in [0, 1].

    Returns:
        Times with the shape of `value`, accurate to 1e-7.
    """

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        above = alpha(middle) > value
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    # 24 halvings: the interval is then as wide as the spacing of fp32 numbers below 1.
    low, high = jax.lax.fori_loop(0, 24, halve, (jnp.zeros_like(value), jnp.ones_like(value)))
    return 0.5 * (low + high)


class Corruption(NamedTuple):
    """A forward process: a token survives with probability alpha(t), otherwise it is redrawn from the prior.

    Attributes:
        alpha: The schedule.
        prior: prior(key, t) draws one noise token for each element of t (GIDD's prior depends on the time).
        forbidden: Ids that the denoiser never emits.
        mask: The mask id; None for uniform noise.
        kind: What the prior draws: "absorbing" masks, "uniform" any allowed id, "hybrid" both.
        uniform_share: uniform_share(t) -> probability that the prior at time t draws a uniform id instead of the mask.
            None: 0 for absorbing and 1 for uniform noise. Required for hybrid noise.
    """

    alpha: Schedule
    prior: Callable[[Key, Array], Array]
    forbidden: tuple[int, ...]
    mask: int | None
    kind: Kind
    uniform_share: Callable[[Array], Array] | None = None


class Noised(NamedTuple):
    """Tokens at time t, a sample of q(x_t | x_0)."""

    xt: Int[Array, "*s"]
    changed: Bool[Array, "*s"]  # redrawn from the prior, even where the draw equals the token


def absorbing(mask: int, alpha: Schedule | None = None, forbidden: tuple[int, ...] = ()) -> Corruption:
    """Absorbing noise: every corrupted token becomes the mask (D3PM, arXiv 2107.03006; MD4, MDLM).

    Args:
        mask: The mask id, which is never emitted.
        alpha: The schedule; None: linear.
        forbidden: Other ids that are never emitted.

    Returns:
        The forward process.
    """
    prior = lambda key, t: jnp.full(jnp.shape(t), mask, jnp.int32)
    return Corruption(alpha or linear(), prior, tuple({mask, *forbidden}), mask, "absorbing")


def uniform(vocab: int, alpha: Schedule | None = None, forbidden: tuple[int, ...] = ()) -> Corruption:
    """Uniform noise: a corrupted token is redrawn uniformly from the ids that may be emitted (UDLM, DUO).

    Args:
        vocab: Size of the vocabulary.
        alpha: The schedule; None: linear.
        forbidden: Ids that are never emitted or drawn.

    Returns:
        The forward process.
    """
    return Corruption(alpha or linear(), _uniform_ids(vocab, forbidden), tuple(forbidden), None, "uniform")


@checked
def hybrid(vocab: int, mask: int, share: ShareBelowOne = 0.2, forbidden: tuple[int, ...] = ()) -> Corruption:
    """Hybrid noise, a mixture of masks and uniform tokens (GIDD, arXiv 2503.04482, section 3.2, with gamma = 1).

        q_t = [(1 - t) x + t m + c_t u] / (1 + c_t),   c_t = B sqrt(t (1 - t))

    x, m and u are the distributions of the clean token, the mask and a uniform id. B is chosen so that the uniform part
    has probability `share` at t = 1/2.

    Args:
        vocab: Size of the vocabulary.
        mask: The mask id, which is never emitted.
        share: Probability of uniform noise at t = 1/2, 0 <= share < 1.
        forbidden: Other ids that are never emitted or drawn.

    Returns:
        The forward process.

    Raises:
        ValueError: `share` is out of range.
    """
    # B, at least 1e-20: the bound divides by the probability of uniform noise, and is exact in fp32 at this value.
    scale = max(2.0 * share / (1.0 - share), 1e-20)
    # sqrt has an infinite derivative at 0; the minimum keeps alpha' finite at both ends.
    level = lambda t: scale * jnp.sqrt(jnp.maximum(t * (1.0 - t), 1e-12))
    draw = _uniform_ids(vocab, (mask, *forbidden))

    def prior(key: Key, t: Array) -> Array:
        pick, fill = jax.random.split(key)
        c = level(t)
        # A corrupted token is uniform with probability c / (t + c). At t = 1 rounding must not leave any uniform token.
        is_uniform = jax.random.uniform(pick, jnp.shape(t)) * (t + c) < c
        return jnp.where(is_uniform & (t < 1.0) & (share > 0), draw(fill, t), mask)

    alpha = lambda t: (1.0 - t) / (1.0 + level(t))
    share_at = lambda t: level(t) / (t + level(t))
    return Corruption(alpha, prior, tuple({mask, *forbidden}), mask, "hybrid", share_at)


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
    """Samples x_t from q(x_t | x_0) at editable positions; all other tokens are unchanged.

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
    # u in [0, 1), and a token survives if u < alpha: always at t = 0 (alpha = 1), never at t = 1 (alpha = 0).
    changed = editable & (jax.random.uniform(survive, x0.shape) >= corruption.alpha(t))
    return Noised(jnp.where(changed, corruption.prior(fill, t), x0), changed)


class BoundTerms(NamedTuple):
    """The integrand of the continuous-time NELBO: the bound is the integral over t of weight * divergence.

    Attributes:
        weight: Factor that depends on the noise only; 0 at positions that are not scored.
        scale: The weight that a noise token has at this time. GIDD's dynamic weights are weight / scale.
        divergence: Factor that depends on the model, in nats.
        nll: -log p of the clean token in nats; with `posterior`, p is the prediction after the conversion.
        hit: 1.0 if the clean token is the most probable one.
    """

    weight: Float[Array, "*s"]
    scale: Float[Array, "*s"]
    divergence: Float[Array, "*s"]
    nll: Float[Array, "*s"]
    hit: Float[Array, "*s"]


def bound_terms(
    corruption: Corruption,
    logits: Float[Array, "*s V"],
    x0: Int[Array, "*s"],
    xt: Int[Array, "*s"],
    t: Float[Array, "*s"],
    posterior: bool = False,
) -> BoundTerms:
    """Computes the terms of the NELBO for every kind of noise (GIDD, arXiv 2503.04482, theorem 3.3).

        -log p(x0) <= E_t E_xt [ w (KL(q(.|x0) || q(.|p)) + r - log r - 1) ],  r = q(xt|x0) / q(xt|p)

    q(y|p) = alpha p(y) + b(y) is the noised prediction, with b = (1 - alpha) prior. The weight
    w = (b' - alpha'/alpha b)(xt) / q(xt|x0) is the rate at which tokens become xt, divided by the probability of xt.

    For absorbing noise this is -alpha' / (1 - alpha) times the cross-entropy of masked tokens (MD4, MDLM). For uniform
    noise it is the bound of UDLM (arXiv 2412.10193) and DUO (arXiv 2506.10892).

    The bound is tight for a model of p(x | the other tokens of xt), which DUO and GIDD train: q(xt|p) already accounts
    for the token at the position itself. A model of p(x | xt), which a cross-entropy on all tokens trains
    (DiffusionGemma), is converted by dividing p by q(xt | x); set `posterior`.

    Args:
        corruption: The forward process.
        logits: Logits of the clean token at each position; forbidden ids are ignored.
        x0: Clean tokens.
        xt: Tokens at time t.
        t: Times in (0, 1); the terms are singular at both ends.
        posterior: The model predicts p(x | xt). No effect for absorbing noise, since a mask carries no information on
            the token behind it.

    Returns:
        The terms of each position, with the shape of x0.

    Raises:
        ValueError: Hybrid noise has no `uniform_share`.
    """
    if corruption.kind == "hybrid" and corruption.uniform_share is None:
        raise refuse(
            "corruption.uniform_share", None, "a function of time for hybrid noise, as noise.hybrid() gives"
        )
    ids = jnp.arange(logits.shape[-1])
    allowed = jnp.asarray(~np.isin(np.arange(len(ids)), corruption.forbidden))
    # A comparison instead of a gather: the gradient of a gather is a scatter, slow on a CPU.
    pick = lambda x, at: jnp.sum(jnp.where(ids == at[..., None], x, 0.0), axis=-1)
    logits = jnp.where(allowed, logits, -1e30)
    alpha, slope = rate(corruption.alpha, t)
    if corruption.kind == "absorbing":
        # Only masked positions have a term: a visible token is the clean token, for which r = 1 and KL = 0.
        log_p = jax.nn.log_softmax(logits, axis=-1)
        log_x, scale = pick(log_p, x0), -slope / (1.0 - alpha)
        hit = (log_x >= log_p.max(axis=-1)).astype(jnp.float32)
        return BoundTerms(jnp.where(xt == corruption.mask, scale, 0.0), scale, -log_x, -log_x, hit)

    alpha = jnp.maximum(alpha, 1e-20)  # a schedule may reach 0 before t = 1, and alpha is a divisor below
    # b(y), the probability of noise: m for the mask, u for each allowed id; dm and du are their time derivatives.
    share = corruption.uniform_share or jnp.ones_like
    masked = lambda t: (1.0 - corruption.alpha(t)) * (1.0 - share(t))
    each = lambda t: (1.0 - corruption.alpha(t)) * share(t) / allowed.sum()
    (m, dm), (u, du) = rate(masked, t), rate(each, t)
    u = jnp.maximum(u, 1e-30)  # the share of uniform noise may be 0
    own = jnp.log1p(alpha / u)  # log q(x|x) - log q(y|x) for y != x, neither of them the mask
    if posterior:
        # p(x | xt) / q(xt | x) up to a constant: q(xt | x) differs between ids only at x = xt.
        logits = logits - jnp.where(ids == xt[..., None], own[..., None], 0.0)
    log_p = jax.nn.log_softmax(logits, axis=-1)
    log_x = pick(log_p, x0)
    hit = (log_x >= log_p.max(axis=-1)).astype(jnp.float32)
    # lift(y) = log(q(y|p) / u), the log-probability of an id relative to the noise. [..., V]
    lift = jnp.where(allowed, jnp.log1p(jnp.exp(log_p) * (alpha / u)[..., None]), 0.0)
    lift_x = pick(lift, x0)
    # KL(q(.|x0) || q(.|p)): q(y|x0) is alpha + u at y = x0 and u at every other id; both sides agree on the mask.
    kl = (alpha + u) * (own - lift_x) - u * (lift.sum(-1) - lift_x)
    is_clean, is_mask = xt == x0, (xt == corruption.mask if corruption.mask is not None else False)
    log_r = jnp.where(is_clean, own - lift_x, jnp.where(is_mask, 0.0, -pick(lift, xt)))
    # r - 1 - log r. Near r = 1 the difference would lose its digits, so two terms of its Taylor series replace it.
    excess = jnp.where(jnp.abs(log_r) < 1e-2, log_r**2 * (0.5 + log_r / 6.0), jnp.expm1(log_r) - log_r)
    # The weight w by what xt is: the clean token, the mask, or a noise token.
    decay = slope / alpha
    on_mask = (dm - decay * m) / jnp.where(m > 0, m, 1.0)
    scale = du / u - decay
    weight = jnp.where(is_clean, (du - decay * u) / (alpha + u), jnp.where(is_mask, on_mask, scale))
    return BoundTerms(weight, scale, kl + excess, -log_x, hit)


def bound_times(kind: Kind, phi: Float[Array, "*s"]) -> tuple[Float[Array, "*s"], Float[Array, "*s"]]:
    """Maps uniform draws to times for importance sampling of the NELBO.

    For uniform and hybrid noise the weights of noise tokens grow as 1 / t, while noise tokens become rare at small t.
    Drawing small times more often reduces the variance: with t = phi^2 (uniform noise) or t = phi^3 (hybrid noise,
    whose uniform part starts as sqrt(t)) the standard deviation of a sequence's estimate is about a third of the one
    with uniform times.

    Args:
        kind: Kind of noise.
        phi: Uniform draws in [0, 1].

    Returns:
        t and dt / dphi, the importance weight of the integrand at t; both with the shape of phi.
    """
    power, least = {"absorbing": (1, 1e-4), "uniform": (2, 1e-6), "hybrid": (3, 1e-8)}[kind]
    # Times end at 1 - 1e-4: at t = 1 the integrand is 0, but its two factors are singular.
    span = 1.0 - 1e-4 - least
    return least + span * phi**power, span * power * phi ** (power - 1)


def times(key: Key, count: int, least: float = 1e-4, most: float = 1.0) -> Float[Array, "count"]:
    """Draws low-discrepancy times t_i = frac(u + i * golden ratio), with one uniform u, scaled to [least, most].

    Each t_i is uniform, and any run of consecutive times is spread evenly. MD4 (arXiv 2406.04329) uses u + i/n instead,
    for which the number n of canvases would have to be known when tracing.

    Args:
        key: Random key.
        count: Number of times.
        least: The smallest time.
        most: The largest time.

    Returns:
        Times [count].
    """
    golden = 0.6180339887498949
    # Computed by numpy in float64: for large i, i * golden has no correct fraction in float32.
    steps = jnp.asarray((np.arange(count) * golden) % 1.0, jnp.float32)
    t = (jax.random.uniform(key) + steps) % 1.0
    return least + (most - least) * t


SCHEDULES = {"linear": linear, "cosine": cosine}


def schedule(config: NoiseConfig) -> Schedule:
    """Makes the schedule of a config.

    Args:
        config: Name, function or values of the schedule, and the power of a polynomial one.

    Returns:
        alpha(t).

    Raises:
        ValueError: A function does not fall from alpha(0) = 1 to alpha(1) = 0.
    """
    if isinstance(config.schedule, tuple):
        return interpolated(config.schedule)
    if callable(config.schedule):
        schedule_values(config.schedule)  # refuses one that does not fall from 1 to 0
        return config.schedule
    return polynomial(config.power) if config.schedule == "polynomial" else SCHEDULES[config.schedule]()


def build(config: NoiseConfig, vocab: int, mask: int | None, forbidden: tuple[int, ...] = ()) -> Corruption:
    """Makes the forward process of a config.

    Args:
        config: Kind of noise and schedule.
        vocab: Size of the vocabulary.
        mask: The mask id; None only for uniform noise.
        forbidden: Special ids that are never emitted.

    Returns:
        The forward process.

    Raises:
        ValueError: The noise needs a mask id, and none is given.
    """
    if config.kind == "uniform":
        return uniform(vocab, schedule(config), (*(() if mask is None else (mask,)), *forbidden))
    if mask is None:
        raise refuse(
            "model.mask",
            None,
            f"an id: {config.kind} noise needs one, unlike uniform noise. hub.config_of(folder, mask=ID) gives an "
            "autoregressive checkpoint its mask",
        )
    if config.kind == "absorbing":
        return absorbing(mask, schedule(config), forbidden)
    return hybrid(vocab, mask, config.uniform, forbidden)


def specials(tokenizer: AnyTokenizer, vocab: int = 0) -> tuple[int, ...]:
    """Lists the ids that occur in no answer and that noise never draws.

    Args:
        tokenizer: The model's tokenizer.
        vocab: Size of the model's vocabulary; 0 for the size of the tokenizer's.

    Returns:
        The mask id, the padding id unless it also ends answers, and the ids above the tokenizer's last one. The latter
        exist because published models round their vocabulary up (Qwen3: 151,936 ids for 151,669 tokens).
    """
    named = (i for i in (tokenizer.mask, tokenizer.pad) if i is not None and i not in tokenizer.ends)
    return tuple(dict.fromkeys((*named, *range(tokenizer.vocab_size, vocab))))
