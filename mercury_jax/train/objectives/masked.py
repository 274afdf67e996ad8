"""The bound on the likelihood under masks, and what every objective is made of.

An objective noises a laid-out batch, makes one pass, and weighs the cross-entropy of the positions that were noised.
The loss of the batch is sum(per_example) / sum(weight).

The weighted cross-entropy per editable token is logged under one of two names. It is `nats_per_token` only where its
expectation bounds -log p from above (divide by ln 2 and the bytes per token for bits per byte). With a clipped weight,
or with visible tokens that may be wrong, it is no bound and may lie below the entropy: there it is
`weighted_masked_ce`.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax import noise, sharding
from mercury_jax.config import one_of, refuse
from mercury_jax.types import Batch, Hidden, Key, Loss, Model, PackedPass, Params

Normalise = Literal["token", "canvas"]

BOUND, NO_BOUND = "nats_per_token", "weighted_masked_ce"  # names of the weighted cross-entropy in the metrics
MAX_LOGITS = 1 << 23  # of a row at a time, 32 MB in fp32: 256 positions of 32,768 ids, 32 of 262,144


@runtime_checkable
class Objective(Protocol):
    """A training objective: noises a batch, makes a pass and scores it. It is traced once, and differentiated."""

    def __call__(
        self, key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption, /
    ) -> Loss:
        """Scores a batch.

        Args:
            key: For the noise; another one at each step.
            model: Pure functions of the denoiser.
            params: Its parameters, by which the loss is differentiated.
            batch: Clean packed rows [B, T].
            corruption: The forward process of the recipe.

        Returns:
            Sums over the tokens of each row, in nats, and what they are divided by.
        """
        ...


def masked_elbo(
    *, normalise: Normalise = "token", clip: float | None = None, least: float = 1e-4
) -> Objective:
    """The absorbing continuous-time NELBO (MD4 eq. 5, arXiv 2406.04329; MDLM, arXiv 2406.07524).

    E_t sum_i [x_t^i = mask] * (-alpha'(t) / (1 - alpha(t))) * CE_i, one t per canvas, t spread by low discrepancy in
    [least, 1].

    Args:
        normalise: "token" divides by the editable tokens of the batch; "canvas" divides each canvas by its own tokens
            first (LLaDA's normalisation, arXiv 2502.09992, algorithm 2).
        clip: Largest weight. Less variance, and no longer a bound on the likelihood: the metric is then called
            `weighted_masked_ce` instead of `nats_per_token`. None: no limit.
        least: The smallest time, above 0.

    Returns:
        The objective. It refuses noise that is not absorbing: where visible tokens may be noise too, the bound has
        further terms.
    """
    one_of(Normalise, normalise=normalise)
    check_weight(clip, least)

    def objective(key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption) -> Loss:
        check_absorbing("masked_elbo", corruption)
        noised = noise_canvases(key, batch, corruption, clip, least)
        return _masked_loss(model, params, batch, noised, normalise, BOUND if clip is None else NO_BOUND)

    return objective


def llada(*, clip: float | None = None, least: float = 1e-3) -> Objective:
    """`masked_elbo` with LLaDA's normalisation: each answer by its own length, then the mean.

    Args:
        clip: Largest weight; None for no limit.
        least: The smallest time.

    Returns:
        The objective.
    """
    return masked_elbo(normalise="canvas", clip=clip, least=least)


def autoregressive() -> Objective:
    """The plain autoregressive loss: every canvas fully noised, every editable token scored.

    With the block-causal pattern at block 1 that is -sum log p(x_i | x_<i), exactly: each mask sees the clean tokens
    before it. With longer blocks it scores one-step parallel prediction.
    """

    def objective(key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption) -> Loss:
        del key
        mask = check_absorbing("autoregressive", corruption)
        xt = jnp.where(batch.editable, mask, batch.tokens)
        ones = jnp.ones(xt.shape)
        noised = NoisedCanvases(t=ones, xt=xt, masked=batch.editable, weight=ones)
        return _masked_loss(model, params, batch, noised, "token", BOUND)

    return objective


def _masked_loss(
    model: Model, params: Params, batch: Batch, noised: NoisedCanvases, normalise: Normalise, name: str
) -> Loss:
    """The weighted cross-entropy of masked positions, logged as `name`."""
    ce, right = cross_entropy(model, params, batch, noised.xt, t=noised.t)
    scored = jnp.where(noised.masked, noised.weight * ce, 0.0)
    editable = batch.editable.astype(jnp.float32)
    if normalise == "canvas":
        # The share of a position is 1 / (editable tokens of its canvas), 0 outside of canvases: [B, T, T] -> [B, T].
        same = (batch.canvas[:, :, None] == batch.canvas[:, None, :]) & (batch.canvas >= 0)[:, :, None]
        count = (same & batch.editable[:, None, :]).sum(-1)
        share = jnp.where(count > 0, 1.0 / jnp.maximum(count, 1), 0.0)
        per_example, weight = (scored * share).sum(1), (editable * share).sum(1)
    else:
        per_example, weight = scored.sum(1), editable.sum(1)
    metrics = {
        name: (scored.sum(), editable.sum()),
        "masked_ce": masked_mean(ce, noised.masked),
        "masked_accuracy": masked_mean(right, noised.masked),
    }
    return Loss(per_example, weight, metrics)


# --- what objectives are made of


def check_weight(clip: float | None, least: float) -> None:
    """Checks the arguments of a weighted bound.

    Args:
        clip: Largest weight; above 0, or None.
        least: The smallest time; between 0 and 1.

    Raises:
        ValueError: One of them is out of range.
    """
    if clip is not None and not clip > 0:
        raise refuse("clip", clip, "more than 0, or None")
    if not 0 < least < 1:
        raise refuse("least", least, "0 < least < 1")


def check_absorbing(name: str, corruption: noise.Corruption) -> int:
    """Refuses noise other than masks, for objectives that score masks alone.

    Under hybrid noise the sum over masks is 1.4 times the entropy for an exact denoiser; uniform noise has no masks.

    Args:
        name: Of the objective, for the message.
        corruption: The noise of the recipe.

    Returns:
        The mask id.

    Raises:
        ValueError: The noise is not absorbing.
    """
    if corruption.kind != "absorbing" or corruption.mask is None:
        allowed = f"absorbing, for {name}, which scores masks alone"
        if corruption.kind == "uniform":
            allowed += "; models of uniform noise (DiffusionGemma, DUO) cannot be trained yet"
        raise refuse("noise.kind", corruption.kind, allowed)
    return corruption.mask


class NoisedCanvases(NamedTuple):
    """A batch with masks.

    Attributes:
        t: Time of each position's canvas; 1 outside of canvases.
        xt: Tokens at time t.
        masked: Positions that were masked.
        weight: -alpha'(t) / (1 - alpha(t)), at most `clip`.
    """

    t: Float[Array, "B T"]
    xt: Int[Array, "B T"]
    masked: Bool[Array, "B T"]
    weight: Float[Array, "B T"]


def noise_canvases(
    key: Key, batch: Batch, corruption: noise.Corruption, clip: float | None, least: float
) -> NoisedCanvases:
    """Draws a time for each canvas, and the noise of its editable tokens at that time.

    Args:
        key: Random key.
        batch: Clean rows.
        corruption: The forward process.
        clip: Largest weight; None for no limit.
        least: The smallest time.

    Returns:
        Noised tokens with their times and weights.
    """
    time_key, noise_key = jax.random.split(key)
    t = canvas_times(time_key, batch, least)
    xt, masked = noise.corrupt(noise_key, corruption, batch.tokens, t, batch.editable)
    # At t -> 0 masks are rare and the weight is large: 1/t for the linear schedule.
    alpha, slope = noise.rate(corruption.alpha, t)
    weight = -slope / (1.0 - alpha)
    return NoisedCanvases(t, xt, masked, weight if clip is None else jnp.minimum(weight, clip))


def canvas_times(key: Key, batch: Batch, least: float) -> Float[Array, "B T"]:
    """Draws one time per canvas.

    Canvases are numbered through the whole batch, so that their times are spread evenly however many of them a row
    holds.

    Args:
        key: Random key.
        batch: Packed rows.
        least: The smallest time.

    Returns:
        The time of each position's canvas; 1 outside of canvases.
    """
    per_row = batch.canvas.max(axis=1) + 1  # canvases of each row [B]
    index = batch.canvas + (jnp.cumsum(per_row) - per_row)[:, None]
    t = noise.times(key, batch.canvas.size, least)
    return jnp.where(batch.canvas >= 0, t[jnp.maximum(index, 0)], 1.0)


def masked_mean(value: Float[Array, "B T"], where: Bool[Array, "B T"]) -> tuple[Array, Array]:
    """A mean over some positions, as (numerator, denominator) for `Loss.metrics`.

    Args:
        value: What is averaged.
        where: The positions.

    Returns:
        The sum of the values, and the number of positions.
    """
    return jnp.where(where, value, 0.0).sum(), where.astype(jnp.float32).sum()


def cross_entropy(
    model: Model, params: Params, batch: Batch, xt: Array, target: Array | None = None, t: Array | None = None
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Makes a pass and scores every position.

    Args:
        model: The denoiser.
        params: Its parameters.
        batch: Positions and key ranges of the rows.
        xt: Tokens that the model sees [B, T].
        target: The id that each position should predict [B, T]; None: its own clean token.
        t: Time of each position's canvas [B, T], an input of timed models; outside of canvases their time is 0, as
            where they encode.

    Returns:
        -log p(target | xt) in nats, and 1.0 where the target is the most probable id.
    """
    timed = model.config.timed and t is not None
    time = jnp.where(batch.canvas >= 0, jnp.asarray(t), 0.0) if timed else None
    target = batch.tokens if target is None else target
    hidden = model.apply(params, PackedPass(xt, batch.positions, batch.ranges, time=time))
    # The head is applied to as many positions at a time as MAX_LOGITS allows.
    size = max(1, MAX_LOGITS // model.config.vocab)
    if target.shape[1] <= size:
        return _score(model, params, hidden, target)
    in_parts = functools.partial(_score_in_parts, model._replace(mesh=None), size)
    return sharding.rowwise(in_parts, model.mesh, params, hidden, target)


def _score(
    model: Model, params: Params, hidden: Hidden, target: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    rows = functools.partial(sharding.constrain_rows, mesh=model.mesh)
    logits = rows(model.head(params, jax.tree.map(rows, hidden)))  # [B, T, V]
    ids = jnp.arange(logits.shape[-1])
    if model.config.mask is not None:
        # The mask is never data: without it the model is the SUBS parameterisation of MDLM. A sum, because of a
        # choice a loop over parts keeps both sides, in the logits' shape.
        logits = logits + jnp.where(ids == model.config.mask, -1e30, 0.0)
    # A comparison instead of a gather: the gradient of a gather is a scatter, slow on a CPU.
    chosen = jnp.sum(jnp.where(ids == target[..., None], logits, 0.0), axis=-1)
    ce = jax.nn.logsumexp(logits, axis=-1) - chosen
    return ce, (chosen >= logits.max(axis=-1)).astype(jnp.float32)


def _score_in_parts(
    model: Model, size: int, params: Params, hidden: Hidden, target: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """`_score` over `size` positions at a time; the gradient computes each part again.

    So logits of few positions exist at a time, in both directions, for four products at the head instead of three.
    """
    slots = target.shape[1]
    parts = -(-slots // size)

    def cut(x: Array) -> Array:
        """[B, T, ...] -> [parts, B, size, ...], the last part padded."""
        x = jnp.pad(x, ((0, 0), (0, parts * size - slots), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], parts, size, *x.shape[2:]), 1, 0)

    @functools.partial(jax.checkpoint, prevent_cse=False)  # in a loop nothing is merged anyway
    def part(_: None, inputs: tuple[Hidden, Array]) -> tuple[None, tuple[Array, Array]]:
        return None, _score(model, params, *inputs)

    _, found = jax.lax.scan(part, None, jax.tree.map(cut, (hidden, target)))
    ce, right = (jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :slots] for x in found)
    return ce, right
