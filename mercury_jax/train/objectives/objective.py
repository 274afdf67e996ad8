"""What objectives are made of: times of canvases, a pass whose logits are reduced in parts, and normalisation.

An objective noises a laid-out batch, makes a pass, and weighs what it scores. The loss of the batch is
sum(per_example) / sum(weight). The weighted sum per editable token is logged under one of two names: `nats_per_token`
only where its expectation bounds -log p from above (divide by ln 2 and the bytes per token for bits per byte), else
`weighted_ce`, which may lie below the entropy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from mercury_jax import noise, sharding
from mercury_jax.config import refuse
from mercury_jax.types import Batch, Hidden, Key, Loss, Model, PackedPass, Params, SelfCond

Normalise = Literal["token", "answer", "canvas"]

BOUND, NO_BOUND = "nats_per_token", "weighted_ce"  # names of the weighted sum in the metrics
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


# --- arguments


def check_weight(clip: float | None, least: float, most: float = 1.0) -> None:
    """Checks the arguments of a weighted bound.

    Args:
        clip: Largest weight; above 0, or None.
        least: The smallest time.
        most: The largest time.

    Raises:
        ValueError: One of them is out of range.
    """
    if clip is not None and not clip > 0:
        raise refuse("clip", clip, "more than 0, or None")
    if not 0 < least < most:
        raise refuse("least", least, "0 < least < 1" if most == 1.0 else f"0 < least < most = {most}")
    if not most <= 1:
        raise refuse("most", most, "least < most <= 1")


def check_noise(name: str, corruption: noise.Corruption, *kinds: noise.Kind) -> None:
    """Refuses noise that an objective does not score.

    Args:
        name: Of the objective, for the message.
        corruption: The noise of the recipe.
        kinds: What it scores.

    Raises:
        ValueError: The noise is of another kind.
    """
    if corruption.kind not in kinds:
        others = {
            "absorbing": "masked_elbo", "uniform": "uniform_elbo or diffusion_gemma", "hybrid": "gidd_elbo",
        }  # fmt: skip
        allowed = (
            f"{' or '.join(kinds)}, for {name}; {others[corruption.kind]} scores {corruption.kind} noise"
        )
        raise refuse("noise.kind", corruption.kind, allowed)


# --- times, documents and normalisation


def canvas_times(key: Key, batch: Batch, least: float, most: float = 1.0) -> Float[Array, "B T"]:
    """Draws one time per canvas.

    Canvases are numbered through the whole batch, so that their times are spread evenly however many of them a row
    holds.

    Args:
        key: Random key.
        batch: Packed rows.
        least: The smallest time.
        most: The largest time.

    Returns:
        The time of each position's canvas; `most` outside of canvases.
    """
    per_row = batch.canvas.max(axis=1) + 1  # canvases of each row [B]
    index = batch.canvas + (jnp.cumsum(per_row) - per_row)[:, None]
    t = noise.times(key, batch.canvas.size, least, most)
    return jnp.where(batch.canvas >= 0, t[jnp.maximum(index, 0)], most)


def documents(batch: Batch) -> Int[Array, "B T"]:
    """Numbers the documents of each row from 1; padding counts as further documents.

    A document begins at position 0, with its clean tokens or, if it has none, with its first canvas; the canvases
    behind its clean tokens may begin at position 0 too.
    """
    canvas = batch.canvas >= 0
    behind_clean = canvas & ~jnp.pad(canvas[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jnp.cumsum((batch.positions == 0) & ~behind_clean, axis=1)


def sums_by(index: Int[Array, "B T"], values: Shaped[Array, "B T"]) -> Float[Array, "B T"]:
    """Sums values over the positions of each row with the same index.

    Args:
        index: Below T.
        values: To be summed.

    Returns:
        The sum of its index at each position; 0 where the index is negative.
    """

    def row(index: Array, values: Array) -> Array:
        at = jnp.where(index < 0, len(index) + 1, index)
        sums = jnp.zeros(len(index) + 1, jnp.float32).at[at].add(values, mode="drop")
        return jnp.where(index < 0, 0.0, sums[jnp.minimum(at, len(index))])

    return jax.vmap(row)(index, values.astype(jnp.float32))


def shares(batch: Batch, scored: Bool[Array, "B T"], normalise: Normalise) -> Float[Array, "B T"]:
    """How much each scored position counts in the mean.

    Args:
        batch: Packed rows.
        scored: Positions of the mean.
        normalise: "token": 1. "answer": each document is divided by its scored positions. "canvas": each canvas is
            divided by its scored positions, and each document by its canvases.

    Returns:
        Shares, 0 where nothing is scored. They sum to the number of scored positions ("token") or of documents.
    """
    if normalise == "token":
        return scored.astype(jnp.float32)
    document = documents(batch)
    if normalise == "answer":
        return jnp.where(scored, 1.0 / jnp.maximum(sums_by(document, scored), 1.0), 0.0)
    own = jnp.where(scored, 1.0 / jnp.maximum(sums_by(batch.canvas, scored), 1.0), 0.0)
    return own / jnp.maximum(sums_by(document, own), 1.0)  # the shares of a canvas sum to 1


def normalised(
    batch: Batch, values: Float[Array, "B T"], normalise: Normalise, metrics: dict[str, tuple[Array, Array]]
) -> Loss:
    """Makes the loss of values at editable positions.

    Args:
        batch: Packed rows.
        values: Nats; 0 where nothing is scored.
        normalise: See `shares`.
        metrics: Of the loss.

    Returns:
        The loss.
    """
    share = shares(batch, batch.editable, normalise)
    return Loss((values * share).sum(1), share.sum(1), metrics)


def masked_mean(value: Float[Array, "B T"], where: Bool[Array, "B T"]) -> tuple[Array, Array]:
    """A mean over some positions, as (numerator, denominator) for `Loss.metrics`.

    Args:
        value: What is averaged.
        where: The positions.

    Returns:
        The sum of the values, and the number of positions.
    """
    return jnp.where(where, value, 0.0).sum(), where.astype(jnp.float32).sum()


# --- a pass, and what is read from its logits


def denoise(
    model: Model,
    params: Params,
    batch: Batch,
    xt: Int[Array, "B T"],
    t: Float[Array, "B T"] | None = None,
    self_cond: SelfCond = (),
) -> Hidden:
    """Makes a pass over packed rows.

    Args:
        model: The denoiser.
        params: Its parameters.
        batch: Positions and key ranges of the rows.
        xt: Tokens that the model sees.
        t: Time of each position's canvas, an input of timed models; outside of canvases their time is 0, as where they
            encode.
        self_cond: For models with self-conditioning.

    Returns:
        Hidden states, leaves [B, T, ...].
    """
    timed = model.config.timed and t is not None
    time = jnp.where(batch.canvas >= 0, jnp.asarray(t), 0.0) if timed else None
    return model.apply(params, PackedPass(xt, batch.positions, batch.ranges, self_cond, time))


Reduce = Callable[..., Any]  # (params, logits [B, t, V], arrays [B, t]...) -> tree of [B, t, ...]


def reduce_logits(model: Model, params: Params, hidden: Hidden, reduce: Reduce, *arrays: Array) -> Any:
    """Applies the head and reduces its logits, over as many positions at a time as `MAX_LOGITS` allows.

    Args:
        model: The denoiser.
        params: Its parameters.
        hidden: From `denoise`.
        reduce: reduce(params, logits [B, t, V], *arrays [B, t]) -> tree of [B, t, ...].
        *arrays: Arrays [B, T] that `reduce` reads beside the logits.

    Returns:
        The tree over all positions, leaves [B, T, ...].
    """
    size = max(1, MAX_LOGITS // model.config.vocab)
    if jax.tree.leaves(hidden)[0].shape[1] <= size:
        return _reduce(model, reduce, params, hidden, *arrays)
    in_parts = functools.partial(_reduce_in_parts, model._replace(mesh=None), reduce, size)
    return sharding.rowwise(in_parts, model.mesh, params, hidden, *arrays)


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
        t: Time of each position's canvas [B, T].

    Returns:
        -log p(target | xt) in nats, and 1.0 where the target is the most probable id.
    """
    hidden = denoise(model, params, batch, xt, t)
    reduce = functools.partial(token_cross_entropy, model.config.mask)
    return reduce_logits(model, params, hidden, reduce, batch.tokens if target is None else target)


def token_cross_entropy(
    mask: int | None, params: Params, logits: Float[Array, "B T V"], target: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Scores positions; a `Reduce` once `mask` is bound.

    Args:
        mask: An id that counts as impossible, or None.
        params: Unused.
        logits: Of each position.
        target: The ids.

    Returns:
        -log p(target) in nats, and 1.0 where it is the most probable id.
    """
    del params
    logits = without(mask, logits)
    chosen = logit_of(logits, target)
    return jax.nn.logsumexp(logits, axis=-1) - chosen, (chosen >= logits.max(axis=-1)).astype(jnp.float32)


def without(mask: int | None, logits: Float[Array, "*s V"]) -> Float[Array, "*s V"]:
    """Makes the mask impossible, which is never data: the SUBS parameterisation of MDLM (arXiv 2406.07524).

    Args:
        mask: Its id; None leaves all as they are.
        logits: Of each position.

    Returns:
        The logits without the mask.
    """
    if mask is None:
        return logits
    # A sum, because of a choice a loop over parts keeps both sides, in the logits' shape.
    return logits + jnp.where(jnp.arange(logits.shape[-1]) == mask, -1e30, 0.0)


def logit_of(logits: Float[Array, "*s V"], ids: Int[Array, "*s"]) -> Float[Array, "*s"]:
    """Picks the logit of one id at each position.

    Args:
        logits: Of each position.
        ids: The ids.

    Returns:
        Their logits.
    """
    # A comparison instead of a gather: the gradient of a gather is a scatter, slow on a CPU.
    return jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == ids[..., None], logits, 0.0), axis=-1)


def _reduce(model: Model, reduce: Reduce, params: Params, hidden: Hidden, *arrays: Array) -> Any:
    rows = functools.partial(sharding.constrain_rows, mesh=model.mesh)
    return reduce(params, rows(model.head(params, jax.tree.map(rows, hidden))), *arrays)


def _reduce_in_parts(
    model: Model, reduce: Reduce, size: int, params: Params, hidden: Hidden, *arrays: Array
) -> Any:
    """`_reduce` over `size` positions at a time; the gradient computes each part again.

    So logits of few positions exist at a time, in both directions, for four products at the head instead of three.
    """
    slots = jax.tree.leaves(hidden)[0].shape[1]
    parts = -(-slots // size)

    def cut(x: Array) -> Array:
        """[B, T, ...] -> [parts, B, size, ...], the last part padded."""
        x = jnp.pad(x, ((0, 0), (0, parts * size - slots), *[(0, 0)] * (x.ndim - 2)), mode="edge")
        return jnp.moveaxis(x.reshape(x.shape[0], parts, size, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :slots]

    @functools.partial(jax.checkpoint, prevent_cse=False)  # in a loop nothing is merged anyway
    def part(_: None, inputs: tuple[Hidden, tuple[Array, ...]]) -> tuple[None, Any]:
        return None, _reduce(model, reduce, params, inputs[0], *inputs[1])

    _, found = jax.lax.scan(part, None, jax.tree.map(cut, (hidden, arrays)))
    return jax.tree.map(join, found)
