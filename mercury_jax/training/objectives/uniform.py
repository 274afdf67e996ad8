"""Objectives for uniform and hybrid noise: the NELBO of UDLM, DUO and GIDD, and DiffusionGemma's loss.

A corrupted token looks like any other token, so the model cannot tell which tokens of a canvas are corrupted. All
tokens of a canvas are therefore scored, corrupted or not.
"""

from __future__ import annotations

import functools
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax import noise
from mercury_jax.config import NonNegativeFloat, Range, Share, checked, refuse
from mercury_jax.training.objectives import objective as parts
from mercury_jax.training.objectives.next_token import next_tokens
from mercury_jax.training.objectives.objective import BOUND, NO_BOUND, Clip, Normalise, Objective
from mercury_jax.types import Batch, Key, Loss, Model, Params, SelfCond

Weights = Literal["elbo", "dynamic"]


@checked
def uniform_elbo(*, normalise: Normalise = "token", clip: Clip = None, posterior: bool = False) -> Objective:
    """The continuous-time NELBO of uniform noise (UDLM, arXiv 2412.10193, eq. 18; DUO, arXiv 2506.10892).

    `noise.bound_terms` computes the integrand. Each canvas has one time; the times are spread by low discrepancy, and
    small times are drawn more often (`noise.bound_times`).

    Args:
        normalise: What each document or canvas is divided by, see `masked_elbo`.
        clip: Largest weight; None: no limit. With a limit the loss is no bound, and is logged as `weighted_ce`.
        posterior: Train the model to predict p(x | xt), as DiffusionGemma does, instead of p(x | the other tokens of
            xt), as DUO does. See `noise.bound_terms`.

    Returns:
        The objective, for uniform noise.

    Raises:
        ValueError: An argument is out of range; or, when the objective is traced, noise that is not uniform.
    """
    return _elbo("uniform_elbo", "uniform", "elbo", normalise, clip, posterior)


@checked
def gidd_elbo(
    *,
    weights: Weights = "elbo",
    normalise: Normalise = "token",
    clip: Clip = None,
    posterior: bool = False,
) -> Objective:
    """The continuous-time NELBO of hybrid noise, masks and uniform tokens (GIDD, arXiv 2503.04482, theorem 3.3).

    Args:
        weights: "elbo": the weights of the bound. "dynamic" (section 3.4): the weights of the bound divided by the
            weight of a noise token at the same time, which gives 1 for noise tokens, 2 for masks and little for clean
            tokens. The paper trains with "dynamic" and reports the bound.
        normalise: What each document or canvas is divided by, see `masked_elbo`.
        clip: Largest weight; None: no limit.
        posterior: As in `uniform_elbo`.

    Returns:
        The objective, for hybrid noise.

    Raises:
        ValueError: An argument is out of range; or, when the objective is traced, noise that is not hybrid.
    """
    return _elbo("gidd_elbo", "hybrid", weights, normalise, clip, posterior)


def _elbo(
    name: str,
    kind: noise.Kind,
    weights: Weights,
    normalise: Normalise,
    clip: float | None,
    posterior: bool,
) -> Objective:
    is_bound = clip is None and weights == "elbo"

    def objective(key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption) -> Loss:
        parts.check_noise(name, corruption, kind)
        # 1. A time per canvas [B, T]. Importance sampling draws t = f(phi) with phi uniform and multiplies by dt/dphi.
        time_key, noise_key = jax.random.split(key)
        if weights == "elbo":
            t, density = noise.bound_times(kind, parts.canvas_times(time_key, batch, 0.0))
        else:  # as published: t is uniform, because the dynamic weights are about 1 at every time
            t, density = parts.canvas_times(time_key, batch, 1e-4, 1.0 - 1e-4), 1.0
        xt, _ = noise.corrupt(noise_key, corruption, batch.tokens, t, batch.editable)

        def reduce(params: Params, logits: Array, x0: Array, xt: Array, t: Array) -> noise.BoundTerms:
            del params
            return noise.bound_terms(corruption, logits, x0, xt, t, posterior)

        # 2. The integrand at each position, reduced from the logits in chunks; it needs clean and noised token and t.
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
        return parts.normalised(model, batch, scored, normalise, metrics)

    return objective


@checked
def diffusion_gemma(
    *,
    encoder: NonNegativeFloat = 1.0,
    self_condition: Share = 0.5,
    least: Annotated[float, Range(0, 0.5, open_low=True, open_high=True)] = 1e-4,
) -> Objective:
    """DiffusionGemma's fine-tuning loss: denoising of the canvases, and next-token prediction of the encoder.

    The loss of a document is the mean cross-entropy of all tokens of its canvases, corrupted or not, plus `encoder`
    times the mean cross-entropy of the next token. Next tokens are those of the prompt, of the answer, and the
    end-of-text ids that complete the last canvas; each of them has the same weight. Each canvas of a document has the
    same weight, and each document of the batch. The loss is no bound on the likelihood.

    Departs from the published recipe (gemma's adapter to hackable_diffusion), which scores one randomly drawn canvas of
    each document. Here all canvases are scored in one forward pass, each at its own time. The expectation is the same,
    the variance smaller.

    Another departure: the first token of an answer is always scored as a next token. In gemma, where prompts are padded
    at their end, it is scored only behind a prompt without padding.

    Args:
        encoder: Weight of next-token prediction; above 0 only for models with `predicts_next`.
        self_condition: Probability that a document is denoised with the prediction of a first pass as an additional
            input. No gradient flows through the first pass. 0: no first pass. Ignored by models without
            self-conditioning.
        least: The smallest distance of t from 0 and from 1.

    Returns:
        The objective, for uniform noise.

    Raises:
        ValueError: An argument is out of range; or, when the objective is traced, noise that is not uniform or a model
            that does not predict the next token.
    """

    def objective(key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption) -> Loss:
        parts.check_noise("diffusion_gemma", corruption, "uniform")
        if encoder and not model.config.predicts_next:
            raise refuse("encoder", encoder, "0 for a model whose config has predicts_next = False")
        time_key, noise_key, pick_key = jax.random.split(key, 3)
        t = parts.canvas_times(time_key, batch, least, 1.0 - least)
        xt, _ = noise.corrupt(noise_key, corruption, batch.tokens, t, batch.editable)
        document = parts.documents(batch)
        # Self-conditioning: a first pass predicts the clean tokens, and a random choice of documents sees its result.
        # Both kinds of documents are in every batch, since the first denoising step of sampling has no prediction.
        self_cond = ()
        if model.embed_mixture is not None and self_condition:
            first = _prediction(model, params, batch, xt, t)
            # one for each document number
            drawn = jax.random.bernoulli(pick_key, self_condition, batch.canvas.shape)
            used = jnp.take_along_axis(drawn, document - 1, axis=1) & (batch.canvas >= 0)
            self_cond = jax.tree.map(lambda x: jnp.where(used[..., None], x, 0), first)
        # One forward pass for both parts: canvas positions predict their own clean token, clean slots the next token.
        # Next tokens are scored as in gemma's `hackable_diffusion_adapter`: `CanvasChunker` (data/data.py) completes
        # the last canvas with end-of-text ids, `SequenceTargetShift` (same file) makes every token of prompt and
        # canvases behind another one a target, and `EncoderARLoss` (hd/sft_model.py) is their mean over each example.
        following = next_tokens(model, batch)
        target = jnp.where(following.known, following.token, batch.tokens)
        hidden = parts.denoise(model, params, batch, xt, t, self_cond)
        reduce = functools.partial(parts.token_cross_entropy, model.config.mask)
        ce, hit = parts.reduce_logits(model, params, hidden, reduce, target)
        # Each part is a mean per document: `decoded` and `encoded` are the weights of its positions. [B, T]
        decoded, encoded = (
            parts.shares(batch, parts.token_weights(model, batch), "canvas"),
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

    vars(objective)["clean_fill"] = bool(encoder)
    return objective


def _prediction(
    model: Model, params: Params, batch: Batch, xt: Int[Array, "B T"], t: Float[Array, "B T"]
) -> SelfCond:
    """Makes a first pass without self-conditioning and turns its logits into the input of the second one.

    Gradients are stopped at the hidden states and at the parameters: the first pass is only an input.
    """
    hidden = jax.lax.stop_gradient(parts.denoise(model, params, batch, xt, t))
    frozen = jax.lax.stop_gradient(params)
    return parts.reduce_logits(model, frozen, hidden, lambda params, logits: model.condition(params, logits))
