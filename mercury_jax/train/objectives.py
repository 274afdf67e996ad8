"""Objectives: (key, model, params, batch, corruption) -> Loss, in nats.

Every objective noises a laid-out batch, makes one pass, and weighs the cross-entropy of the
positions that were noised. The batch's loss is sum(per_example) / sum(weight).

The weighted cross-entropy per editable token is logged under one of two names. It is `nats_per_token` only where
its expectation bounds -log p from above (divide by ln 2 and the bytes per token for bits per byte). With a clipped
weight, or with visible tokens that may be wrong, it is no bound and may lie below the entropy: there it is
`weighted_masked_ce`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax import noise, sharding
from mercury_jax.config import one_of, refuse
from mercury_jax.types import Batch, Key, Loss, Model, PackedPass, Params

Objective = Callable[[Key, Model, Params, Batch, noise.Corruption], Loss]
Normalise = Literal["token", "canvas"]

BOUND, NO_BOUND = "nats_per_token", "weighted_masked_ce"  # names of the weighted cross-entropy in the metrics
LOGITS = 1 << 23  # of a row at a time, 32 MB in fp32: 256 positions of 32,768 ids, 32 of 262,144


def masked_elbo(
    *, normalise: Normalise = "token", clip: float | None = None, least: float = 1e-4
) -> Objective:
    """The absorbing continuous-time NELBO (MD4 eq. 5, arXiv 2406.04329; MDLM, arXiv 2406.07524).

    E_t sum_i [x_t^i = mask] * (-alpha'(t) / (1 - alpha(t))) * CE_i, one t per canvas, t spread by
    low discrepancy in [least, 1]. normalise: "token" divides by the editable tokens of the batch;
    "canvas" divides each canvas by its own tokens first (LLaDA's normalisation, arXiv 2502.09992,
    algorithm 2). clip limits the weight: less variance, and no longer a bound on the likelihood, so that the
    metric is then called `weighted_masked_ce` instead of `nats_per_token`.
    ValueError for noise that is not absorbing: where visible tokens may be noise too, the bound has further terms.
    """
    one_of(Normalise, normalise=normalise)
    check_weight(clip, least)

    def objective(key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption) -> Loss:
        check_masks_only("masked_elbo", corruption)
        draw, spoil = jax.random.split(key)
        t = canvas_times(draw, batch, least)
        noised = noise.corrupt(spoil, corruption, batch.tokens, t, batch.editable)
        alpha, slope = noise.rate(corruption.alpha, t)
        weight = -slope / (1.0 - alpha)
        weight = weight if clip is None else jnp.minimum(weight, clip)
        ce, right = cross_entropy(model, params, batch, noised.xt, t=t)
        scored = jnp.where(noised.changed, weight * ce, 0.0)
        return _loss(scored, batch, normalise, ce, right, noised.changed, BOUND if clip is None else NO_BOUND)

    return objective


def llada(*, clip: float | None = None, least: float = 1e-3) -> Objective:
    """The same bound with LLaDA's normalisation: each answer by its own length, then the mean."""
    return masked_elbo(normalise="canvas", clip=clip, least=least)


def autoregressive() -> Objective:
    """The plain autoregressive loss: every canvas fully noised, every editable token scored.

    With the block-causal pattern at block 1 that is -sum log p(x_i | x_<i), exactly: each mask
    sees the clean tokens before it. With longer blocks it scores one-step parallel prediction.
    """

    def objective(key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption) -> Loss:
        del key
        check_masks_only("autoregressive", corruption)
        assert corruption.mask is not None  # absorbing noise has one
        xt = jnp.where(batch.editable, corruption.mask, batch.tokens)
        ce, right = cross_entropy(model, params, batch, xt, t=jnp.ones(xt.shape))
        scored = jnp.where(batch.editable, ce, 0.0)
        return _loss(scored, batch, "token", ce, right, batch.editable, BOUND)

    return objective


def check_weight(clip: float | None, least: float) -> None:
    """Refuses a limit of the weight, or a smallest time, that makes no sense."""
    if clip is not None and not clip > 0:
        raise refuse("clip", clip, "more than 0, or None")
    if not 0 < least < 1:
        raise refuse("least", least, "0 < least < 1")


def check_masks_only(name: str, corruption: noise.Corruption) -> None:
    """Refuses noise other than masks: an objective that scores masks alone is wrong under it.

    Under hybrid noise the mask-only sum is 1.4 times the entropy for an exact denoiser, and uniform noise has no masks.
    """
    if corruption.kind != "absorbing":
        allowed = f"absorbing, for {name}, which scores masks alone"
        if corruption.kind == "uniform":
            allowed += "; models of uniform noise (DiffusionGemma, DUO) cannot be trained yet"
        raise refuse("noise.kind", corruption.kind, allowed)


def canvas_times(key: Key, batch: Batch, least: float) -> Float[Array, "B T"]:
    """One time per canvas, the same at each of its positions; other positions get 1.

    Canvases are numbered through the whole batch, so that their times are spread evenly however
    many of them a row holds.
    """
    per_row = batch.canvas.max(axis=1) + 1
    index = batch.canvas + (jnp.cumsum(per_row) - per_row)[:, None]
    t = noise.times(key, batch.canvas.size, least)
    return jnp.where(batch.canvas >= 0, t[jnp.maximum(index, 0)], 1.0)


def cross_entropy(
    model: Model, params: Params, batch: Batch, xt: Array, target: Array | None = None, t: Array | None = None
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(-log p(target | xt) in nats, whether it is the most probable id) at every position.

    target [B, T]: what each position is to say; None: its own clean token. t [B, T]: the time of each canvas,
    which a timed model is told; outside of canvases it is told 0, as where it encodes.
    """
    told = model.config.timed and t is not None
    time = jnp.where(batch.canvas >= 0, jnp.asarray(t), 0.0) if told else None
    target = batch.tokens if target is None else target
    hidden = model.apply(params, PackedPass(xt, batch.positions, batch.ranges, time=time))
    size = max(1, LOGITS // model.config.vocab)
    if target.shape[1] <= size:
        return _judged(model, params, hidden, target)
    parts = functools.partial(_in_parts, model._replace(mesh=None), size)
    return sharding.rowwise(parts, model.mesh, params, hidden, target)


def _judged(
    model: Model, params: Params, hidden: Any, target: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    rows = functools.partial(sharding.constrain_rows, mesh=model.mesh)
    logits = rows(model.head(params, jax.tree.map(rows, hidden)))
    ids = jnp.arange(logits.shape[-1])
    if model.config.mask is not None:
        # The mask is never data: without it the model is the SUBS parameterisation of MDLM. A sum, because of a
        # choice a loop over parts keeps both sides, in the logits' shape.
        logits = logits + jnp.where(ids == model.config.mask, -1e30, 0.0)
    # A comparison instead of a gather: the gradient of a gather is a scatter, slow on a CPU.
    chosen = jnp.sum(jnp.where(ids == target[..., None], logits, 0.0), axis=-1)
    ce = jax.nn.logsumexp(logits, axis=-1) - chosen
    return ce, (chosen >= logits.max(axis=-1)).astype(jnp.float32)


def _in_parts(
    model: Model, size: int, params: Params, hidden: Any, target: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """`_judged` over `size` positions at a time; the gradient makes each part again.

    So logits of few positions exist at a time, in both directions, for four products at the head instead of three.
    """
    slots = target.shape[1]
    parts = -(-slots // size)
    fill = parts * size - slots

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, fill), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], parts, size, *x.shape[2:]), 1, 0)

    @functools.partial(jax.checkpoint, prevent_cse=False)  # in a loop nothing is merged anyway
    def part(_: None, given: tuple[Any, Array]) -> tuple[None, tuple[Array, Array]]:
        return None, _judged(model, params, *given)

    _, found = jax.lax.scan(part, None, jax.tree.map(cut, (hidden, target)))
    whole = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :slots]
    return whole(found[0]), whole(found[1])


def _loss(
    scored: Array, batch: Batch, normalise: str, ce: Array, right: Array, noised: Array, name: str
) -> Loss:
    editable = batch.editable.astype(jnp.float32)
    if normalise == "canvas":
        share = _share_of_canvas(batch)
        per_example, weight = (scored * share).sum(1), (editable * share).sum(1)
    else:
        per_example, weight = scored.sum(1), editable.sum(1)
    hit = noised.astype(jnp.float32)
    metrics = {
        name: (scored.sum(), editable.sum()),
        "masked_ce": ((ce * hit).sum(), hit.sum()),
        "masked_accuracy": ((right * hit).sum(), hit.sum()),
    }
    return Loss(per_example, weight, metrics)


def _share_of_canvas(batch: Batch) -> Float[Array, "B T"]:
    """1 / (editable tokens of the canvas that a position belongs to); 0 outside of canvases."""
    same = (batch.canvas[:, :, None] == batch.canvas[:, None, :]) & (batch.canvas >= 0)[:, :, None]
    count = (same & batch.editable[:, None, :]).sum(-1)
    return jnp.where(count > 0, 1.0 / jnp.maximum(count, 1), 0.0)
