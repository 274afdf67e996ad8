"""Objectives of masked diffusion: the bound (MD4, MDLM), LLaDA's and BD3-LM's forms, Dream's CART, SEDD's loss.

All of them replace tokens by masks and score the masked positions. They share `mask_canvases`, and differ in
the weight of each cross-entropy:

    masked_elbo     -alpha'(t) / (1 - alpha(t)), which is 1/t for the linear schedule
    llada           the same, with each answer divided by its own length
    cart            how many visible tokens are near
    score_entropy   the weight of masked_elbo, and a penalty on the normaliser of the logits
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax import noise
from mercury_jax.config import Range, checked, refuse
from mercury_jax.training.objectives import objective as parts
from mercury_jax.training.objectives.objective import (
    BOUND,
    NO_BOUND,
    Clip,
    Normalise,
    Objective,
    SmallestTime,
)
from mercury_jax.types import Batch, Key, Loss, Model, Params

# The loss omits the integral over t below `least`. It is logged as a bound if `least` is at most this value.
BOUND_FROM = 1e-2


class MaskedCanvases(NamedTuple):
    """A batch whose canvases are partly masked.

    Attributes:
        t: Time of each position's canvas; the largest time outside of canvases.
        xt: Tokens at time t: the clean token or the mask.
        masked: The masked positions.
        weight: Weight of the cross-entropy at each position, -alpha'(t) / (1 - alpha(t)), at most `clip`.
    """

    t: Float[Array, "B T"]
    xt: Int[Array, "B T"]
    masked: Bool[Array, "B T"]
    weight: Float[Array, "B T"]


@checked
def masked_elbo(
    *,
    normalise: Normalise = "token",
    clip: Clip = None,
    least: SmallestTime = 1e-4,
    most: Annotated[float, Range(0, 1, open_low=True)] = 1.0,
    complementary: bool = False,
) -> Objective:
    """The absorbing continuous-time NELBO (MD4 eq. 5, arXiv 2406.04329; MDLM, arXiv 2406.07524).

        E_t sum_i [x_t^i = mask] * (-alpha'(t) / (1 - alpha(t))) * CE_i

    Each canvas has one time t, and the times are spread by low discrepancy in [least, most].

    Args:
        normalise: "token" divides the sum by the editable tokens of the batch, of which the end-of-text ids that fill
            up a canvas count less (`objective.token_weights`). "answer" first divides each document by
            its editable tokens, as LLaDA's SFT does; "canvas" first divides each canvas.
        clip: Largest weight; None: no limit. A limit lowers the variance, but the loss is then no bound on the
            likelihood, and is logged as `weighted_ce` instead of `nats_per_token`.
        least: The smallest time, above 0.
        most: The largest time. BD3-LM (arXiv 2503.09573, section 5) trains on a range [least, most] chosen by
            `range_variances`; this is no bound either.
        complementary: Also score a second copy of the batch with the complementary masks, so that every token is scored
            once (LLaDA2, arXiv 2512.15745). The expectation is the same at twice the compute.

    Returns:
        The objective, for absorbing noise. With other noise, visible tokens may be wrong and the bound has more terms
        (`gidd_elbo`).

    Raises:
        ValueError: An argument is out of range; or, when the objective is traced, noise that is not absorbing.
    """
    if not least < most:
        raise refuse("least", least, f"0 < least < most = {most}")
    name = BOUND if clip is None and least <= BOUND_FROM and most == 1.0 else NO_BOUND

    def objective(key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption) -> Loss:
        parts.check_noise("masked_elbo", corruption, "absorbing")
        noised = mask_canvases(key, batch, corruption, clip, least, most)
        if not complementary:
            return _masked_loss(model, params, batch, noised, normalise, name)
        # Both copies go through the model as one batch of 2 B rows.
        both = jax.tree.map(
            lambda a, b: jnp.concatenate([a, b]), noised, complement(noised, batch, corruption, clip)
        )
        twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
        loss = _masked_loss(model, params, twice, both, normalise, name)
        fold = lambda x: x.reshape(2, -1).sum(0)  # rows i and B + i are the same documents
        return Loss(fold(loss.per_example), fold(loss.weight), loss.metrics)

    return objective


def llada(*, clip: Clip = None, least: SmallestTime = 1e-3) -> Objective:
    """LLaDA's SFT loss (arXiv 2502.09992, algorithm 2): the mean over answers of the loss per token of each answer.

    LLaDA's pre-training loss (algorithm 1) is `masked_elbo(least=1e-3)`.

    Args:
        clip: Largest weight; None for no limit.
        least: The smallest time.

    Returns:
        The objective, for absorbing noise.

    Raises:
        ValueError: As for `masked_elbo`.

    Departs from the reference: LLaDA counts each end-of-text id that fills up an answer as any other token; here those
    of a bidirectional canvas together count at most a quarter of its other tokens (`objective.token_weights`).
    """
    return masked_elbo(normalise="answer", clip=clip, least=least)


@checked
def cart(
    *,
    p: Annotated[float, Range(0, 1, open_low=True)] = 0.3,
    normalise: Normalise = "token",
    least: SmallestTime = 1e-3,
) -> Objective:
    """Dream's context-adaptive token-level weights (CART, arXiv 2508.15487, section 3.2).

    Masks near visible tokens count more. The weight 1/t is replaced by

        w_i = 1/2 sum over visible j of p (1 - p)^(|i - j| - 1),

    where j runs over the positions of the same document. The loss is no bound on the likelihood.

    Args:
        p: Parameter of the geometric distribution of distances, 0 < p <= 1. Smaller values reach further.
        normalise: See `masked_elbo`.
        least: The smallest time.

    Returns:
        The objective, for models that see whole documents (pattern "bidirectional").

    Raises:
        ValueError: An argument is out of range.
    """

    def objective(key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption) -> Loss:
        parts.check_noise("cart", corruption, "absorbing")
        if model.config.pattern != "bidirectional":
            allowed = "bidirectional, for cart: distances are those in the document"
            raise refuse("pattern", model.config.pattern, allowed)
        noised = mask_canvases(key, batch, corruption, None, least, 1.0)
        weight = cart_weights(noised.masked, parts.documents(batch), p)
        return _masked_loss(model, params, batch, noised._replace(weight=weight), normalise, NO_BOUND)

    return objective


def cart_weights(masked: Bool[Array, "B T"], document: Int[Array, "B T"], p: float) -> Float[Array, "B T"]:
    """Computes the weights of `cart`.

    Args:
        masked: The masked positions.
        document: Number of each position's document.
        p: Parameter of the geometric distribution.

    Returns:
        The weight of each position. Only the weights of masked positions are used.
    """
    # The sum over visible j < i is a linear recurrence, y_i = visible_(i-1) + (1 - p) y_(i-1), that restarts at each
    # document. An associative scan evaluates it in O(log T) steps; the sum over j > i is the same from the right.
    visible = (~masked).astype(jnp.float32)

    def from_left(visible: Array, document: Array) -> Array:
        same = document[:, 1:] == document[:, :-1]
        decay = jnp.pad(jnp.where(same, 1.0 - p, 0.0), ((0, 0), (1, 0)))
        before = jnp.pad(jnp.where(same, visible[:, :-1], 0.0), ((0, 0), (1, 0)))
        # Composition of the affine maps y -> decay * y + before, each stored as the pair (decay, before).
        combine = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
        return jax.lax.associative_scan(combine, (decay, before), axis=1)[1]

    flip = lambda x: jnp.flip(x, axis=1)
    return 0.5 * p * (from_left(visible, document) + flip(from_left(flip(visible), flip(document))))


@checked
def score_entropy(*, normalise: Normalise = "token", least: SmallestTime = 1e-4) -> Objective:
    """SEDD's diffusion-weighted denoising score entropy (arXiv 2310.16834, eq. 5) for absorbing noise.

    The loss of a mask whose clean token is x, with q = alpha / (1 - alpha) and the score s_y = q exp(logit_y):

        -alpha'/alpha [sum_y s_y - q log s_x + q (log q - 1)].

    With Z = logsumexp(logits), this equals the weight of `masked_elbo` times (CE + e^Z - 1 - Z). The extra term is 0 if
    the exponentials of the logits sum to 1 and positive otherwise, so the loss is a bound for any logits. Under uniform
    noise, the score entropy of a model that predicts clean tokens is `uniform_elbo`.

    Args:
        normalise: See `masked_elbo`.
        least: The smallest time.

    Returns:
        The objective, for absorbing noise.

    Raises:
        ValueError: An argument is out of range; or, when the objective is traced, noise that is not absorbing.
    """

    def objective(key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption) -> Loss:
        parts.check_noise("score_entropy", corruption, "absorbing")
        noised = mask_canvases(key, batch, corruption, None, least, 1.0)

        def reduce(params: Params, logits: Array, target: Array) -> tuple[Array, Array, Array]:
            ce, hit = parts.token_cross_entropy(model.config.mask, params, logits, target)
            z = jax.nn.logsumexp(parts.without(model.config.mask, logits), axis=-1)
            # expm1, since e^Z - 1 would lose digits near the optimum Z = 0.
            return ce, jnp.expm1(z) - z, hit

        hidden = parts.denoise(model, params, batch, noised.xt, noised.t)
        ce, penalty, hit = parts.reduce_logits(model, params, hidden, reduce, batch.tokens)
        scored = jnp.where(noised.masked, noised.weight * (ce + penalty), 0.0)
        metrics = _metrics(BOUND, scored, ce, hit, noised.masked, batch)
        return parts.normalised(model, batch, scored, normalise, metrics)

    return objective


def mask_canvases(
    key: Key, batch: Batch, corruption: noise.Corruption, clip: float | None, least: float, most: float = 1.0
) -> MaskedCanvases:
    """Draws a time for each canvas, and the masks of its editable tokens at that time.

    Args:
        key: Random key.
        batch: Clean rows.
        corruption: The forward process.
        clip: Largest weight; None for no limit.
        least: The smallest time.
        most: The largest time.

    Returns:
        Noised tokens with their times and weights, leaves [B, T].
    """
    # 1. A time per canvas. 2. Each editable token is masked with probability 1 - alpha(t), independently.
    time_key, noise_key = jax.random.split(key)
    t = parts.canvas_times(time_key, batch, least, most)
    xt, masked = noise.corrupt(noise_key, corruption, batch.tokens, t, batch.editable)
    # 3. The weight of the bound. For t -> 0 masks are rare and the weight is large: 1/t for the linear schedule.
    alpha, slope = noise.rate(corruption.alpha, t)
    weight = -slope / (1.0 - alpha)
    return MaskedCanvases(t, xt, masked, weight if clip is None else jnp.minimum(weight, clip))


def complement(
    noised: MaskedCanvases, batch: Batch, corruption: noise.Corruption, clip: float | None
) -> MaskedCanvases:
    """Masks exactly the editable tokens that `mask_canvases` left visible (LLaDA2, arXiv 2512.15745).

    Args:
        noised: From `mask_canvases`.
        batch: Clean rows.
        corruption: The forward process.
        clip: Largest weight; None for no limit.

    Returns:
        The complementary canvases. Their time, an input of time-conditioned models, is the t' with
        alpha(t') = 1 - alpha(t).
    """
    masked = batch.editable & ~noised.masked
    xt = jnp.where(masked, jnp.asarray(corruption.mask), batch.tokens)
    # A token is masked here with probability p' = alpha(t). The bound is the integral of CE / p dp over the mask rate
    # p = 1 - alpha(t), dp = -alpha'(t) dt. Replacing p by p' gives the weight -alpha'(t) / alpha(t).
    alpha, slope = noise.rate(corruption.alpha, noised.t)
    weight = jnp.where(alpha > 0, -slope / jnp.where(alpha > 0, alpha, 1.0), 0.0)
    t = noise.inverse(corruption.alpha, 1.0 - alpha)
    return MaskedCanvases(t, xt, masked, weight if clip is None else jnp.minimum(weight, clip))


def range_variances(
    key: Key,
    model: Model,
    params: Params,
    batches: Sequence[Batch],
    corruption: noise.Corruption,
    ranges: Sequence[tuple[float, float]],
) -> dict[tuple[float, float], float]:
    """Measures the variance of the loss for several ranges of time (BD3-LM, arXiv 2503.09573, section 5).

    Train with `masked_elbo(least=, most=)` on the range with the smallest variance. BD3-LM repeats this search at every
    evaluation.

    Args:
        key: Random key; all ranges are measured with the same draws.
        model: The denoiser.
        params: Parameters of the denoiser.
        batches: At least two batches.
        corruption: The forward process.
        ranges: Pairs (least, most).

    Returns:
        For each range, the variance over batches of the loss per token.

    Raises:
        ValueError: There are fewer than two batches, or a pair is not 0 < least < most <= 1.
    """
    if len(batches) < 2:
        raise refuse("batches", len(batches), "2 or more, whose losses vary")

    def variance(least: float, most: float) -> float:
        found = masked_elbo(least=least, most=most)
        loss = jax.jit(lambda key, params, batch: found(key, model, params, batch, corruption))
        losses = [loss(jax.random.fold_in(key, i), params, batch) for i, batch in enumerate(batches)]
        return float(jnp.var(jnp.stack([x.per_example.sum() / x.weight.sum() for x in losses]), ddof=1))

    return {pair: variance(*pair) for pair in ranges}


def _masked_loss(
    model: Model, params: Params, batch: Batch, noised: MaskedCanvases, normalise: Normalise, name: str
) -> Loss:
    """Computes the weighted cross-entropy of masked positions; its sum is logged as `name`."""
    ce, hit = parts.cross_entropy(model, params, batch, noised.xt, t=noised.t)
    scored = jnp.where(noised.masked, noised.weight * ce, 0.0)
    metrics = _metrics(name, scored, ce, hit, noised.masked, batch)
    return parts.normalised(model, batch, scored, normalise, metrics)


def _metrics(
    name: str, scored: Array, ce: Array, hit: Array, masked: Array, batch: Batch
) -> dict[str, tuple[Array, Array]]:
    return {
        name: (scored.sum(), batch.editable.sum().astype(jnp.float32)),
        "masked_ce": parts.masked_mean(ce, masked),
        "masked_accuracy": parts.masked_mean(hit, masked),
    }
