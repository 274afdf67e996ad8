"""Objectives of noise that may be any token: the bounds of uniform and hybrid noise, and DiffusionGemma's loss.

Under such noise every token of a canvas is scored, corrupted or not: the model is not told which ones are.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax import noise
from mercury_jax.config import at_least, one_of, refuse
from mercury_jax.train.objectives import objective as parts
from mercury_jax.train.objectives.next_token import next_tokens
from mercury_jax.train.objectives.objective import BOUND, NO_BOUND, Normalise, Objective
from mercury_jax.types import Batch, Key, Loss, Model, Params, SelfCond

Weights = Literal["elbo", "dynamic"]


def uniform_elbo(
    *, normalise: Normalise = "token", clip: float | None = None, posterior: bool = False
) -> Objective:
    """The continuous-time NELBO of uniform noise (UDLM, arXiv 2412.10193, eq. 18; DUO, arXiv 2506.10892).

    See `noise.bound_terms`. Times are spread by low discrepancy over the canvases; small ones are drawn more often, see
    `noise.bound_times`.

    Args:
        normalise: What each document or canvas is divided by, see `masked_elbo`.
        clip: Largest weight; then no bound, and logged as `weighted_ce`. None: no limit.
        posterior: The model learns p(x | xt), as DiffusionGemma predicts it, in place of DUO's p(x | other tokens).

    Returns:
        The objective, for uniform noise.
    """
    return _elbo("uniform_elbo", "uniform", "elbo", normalise, clip, posterior)


def gidd_elbo(
    *,
    weights: Weights = "elbo",
    normalise: Normalise = "token",
    clip: float | None = None,
    posterior: bool = False,
) -> Objective:
    """The continuous-time NELBO of masks and uniform noise (GIDD, arXiv 2503.04482, theorem 3.3).

    Args:
        weights: "elbo", those of the bound; or "dynamic" (section 3.4), the bound's relative to that of a noise token
            at the same time: 1 for these, 2 for masks, and little for clean tokens. The paper trains with these and
            reports the bound.
        normalise: What each document or canvas is divided by, see `masked_elbo`.
        clip: Largest weight; None: no limit.
        posterior: As in `uniform_elbo`.

    Returns:
        The objective, for hybrid noise.
    """
    one_of(Weights, weights=weights)
    return _elbo("gidd_elbo", "hybrid", weights, normalise, clip, posterior)


def _elbo(
    name: str,
    kind: noise.Kind,
    weights: Weights,
    normalise: Normalise,
    clip: float | None,
    posterior: bool,
) -> Objective:
    one_of(Normalise, normalise=normalise)
    parts.check_weight(clip, 0.5)
    is_bound = clip is None and weights == "elbo"

    def objective(key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption) -> Loss:
        parts.check_noise(name, corruption, kind)
        time_key, noise_key = jax.random.split(key)
        if weights == "elbo":
            t, density = noise.bound_times(kind, parts.canvas_times(time_key, batch, 0.0))
        else:  # as published: t uniform, weights of about 1
            t, density = parts.canvas_times(time_key, batch, 1e-4, 1.0 - 1e-4), 1.0
        xt, _ = noise.corrupt(noise_key, corruption, batch.tokens, t, batch.editable)

        def reduce(params: Params, logits: Array, x0: Array, xt: Array, t: Array) -> noise.BoundTerms:
            del params
            return noise.bound_terms(corruption, logits, x0, xt, t, posterior)

        hidden = parts.denoise(model, params, batch, xt, t)
        terms = parts.reduce_logits(model, params, hidden, reduce, batch.tokens, xt, t)
        weight = terms.weight * density if weights == "elbo" else terms.weight / terms.scale
        if clip is not None:
            weight = jnp.minimum(weight, clip)
        scored = jnp.where(batch.editable, weight * terms.divergence, 0.0)
        changed = batch.editable & (xt != batch.tokens)
        metrics = {
            BOUND if is_bound else NO_BOUND: (scored.sum(), batch.editable.sum().astype(jnp.float32)),
            "noised_ce": parts.masked_mean(terms.nll, changed),
            "noised_accuracy": parts.masked_mean(terms.hit, changed),
        }
        return parts.normalised(batch, scored, normalise, metrics)

    return objective


def diffusion_gemma(*, encoder: float = 1.0, self_condition: float = 0.5, least: float = 1e-4) -> Objective:
    """DiffusionGemma's fine-tuning loss: the clean tokens of noised canvases, and the next tokens of the encoder.

    The mean over documents of: the mean over its canvases of the mean cross-entropy of all their tokens, corrupted or
    not, with weight 1; plus `encoder` times the mean cross-entropy of the next token, prompt included. It is no bound.

    The published recipe (gemma's adapter to hackable_diffusion) scores one canvas of each document, drawn at random.
    Here all of them are scored in one pass, each at a time of its own: the same expectation, with less variance.

    Args:
        encoder: Weight of the encoder's loss; above 0 only for models with `predicts_next`.
        self_condition: Probability with which a document is denoised with the prediction of a first pass, whose
            gradient is stopped; 0: no first pass. Models without self-conditioning have none.
        least: The smallest distance of t from 0 and 1.

    Returns:
        The objective, for uniform noise.

    Raises:
        ValueError: An argument is out of range.
    """
    at_least(0, encoder=encoder, self_condition=self_condition)
    if self_condition > 1:
        raise refuse("self_condition", self_condition, "a probability, 0 to 1")
    parts.check_weight(None, least, 0.5)

    def objective(key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption) -> Loss:
        parts.check_noise("diffusion_gemma", corruption, "uniform")
        if encoder and not model.config.predicts_next:
            raise refuse("encoder", encoder, "0 for a model whose config has predicts_next = False")
        time_key, noise_key, pick_key = jax.random.split(key, 3)
        t = parts.canvas_times(time_key, batch, least, 1.0 - least)
        xt, _ = noise.corrupt(noise_key, corruption, batch.tokens, t, batch.editable)
        document = parts.documents(batch)
        self_cond = ()
        if model.embed_mixture is not None and self_condition:
            first = _prediction(model, params, batch, xt, t)
            drawn = jax.random.bernoulli(
                pick_key, self_condition, batch.canvas.shape
            )  # one for each document number
            used = jnp.take_along_axis(drawn, document - 1, axis=1) & (batch.canvas >= 0)
            self_cond = jax.tree.map(lambda x: jnp.where(used[..., None], x, 0), first)
        # One pass scores everything: canvases their own tokens, clean slots the next one.
        following = next_tokens(model, batch)
        target = jnp.where(following.known, following.token, batch.tokens)
        hidden = parts.denoise(model, params, batch, xt, t, self_cond)
        reduce = functools.partial(parts.token_cross_entropy, model.config.mask)
        ce, hit = parts.reduce_logits(model, params, hidden, reduce, target)
        decoded, encoded = (
            parts.shares(batch, batch.editable, "canvas"),
            parts.shares(batch, following.known, "answer"),
        )
        changed = batch.editable & (xt != batch.tokens)
        metrics = {
            "canvas_ce": ((ce * decoded).sum(), decoded.sum()),
            "causal_ce": ((ce * encoded).sum(), encoded.sum()),
            "noised_ce": parts.masked_mean(ce, changed),
            "noised_accuracy": parts.masked_mean(hit, changed),
        }
        return Loss((ce * (decoded + encoder * encoded)).sum(1), decoded.sum(1), metrics)

    return objective


def _prediction(
    model: Model, params: Params, batch: Batch, xt: Int[Array, "B T"], t: Float[Array, "B T"]
) -> SelfCond:
    """What `Model.condition` makes of a first pass without self-conditioning; its gradient is stopped."""
    hidden = jax.lax.stop_gradient(parts.denoise(model, params, batch, xt, t))
    frozen = jax.lax.stop_gradient(params)
    return parts.reduce_logits(model, frozen, hidden, lambda params, logits: model.condition(params, logits))
