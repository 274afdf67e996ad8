"""The functions that all objectives share: sampling times, the forward pass, reducing logits, normalisation.

An objective noises a laid-out batch, makes a forward pass, and weights the cross-entropies. The loss of the batch is
sum(per_example) / sum(weight). The weighted sum per editable token is logged under one of two names: `nats_per_token`
if its expectation is an upper bound on -log p (divide by ln 2 and by the bytes per token for bits per byte), otherwise
`weighted_ce`, which may lie below the entropy of the data.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any, Literal, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from mercury_jax import noise, sharding
from mercury_jax.config import PositiveFloat, Range, refuse
from mercury_jax.types import Batch, Hidden, Key, Layout, Loss, Model, PackedPass, Params, SelfCond

Normalise = Literal["token", "answer", "canvas"]
Clip: TypeAlias = PositiveFloat | None  # largest weight; None: no limit
SmallestTime: TypeAlias = Annotated[float, Range(0, 1, open_low=True, open_high=True)]

BOUND, NO_BOUND = "nats_per_token", "weighted_ce"  # names of the weighted sum in the metrics
FILLERS = 0.25  # largest weight of all fillers of a canvas, relative to its text
# Logits of a row that exist at once, 32 MB in fp32: 256 positions of 32,768 ids, or 32 positions of 262,144 ids.
MAX_LOGITS = 1 << 23


@runtime_checkable
class Objective(Protocol):
    """A training objective: noises a batch, makes a forward pass and scores it.

    It is traced under jit and differentiated with respect to `params`. An attribute `clean_fill = True` asks for rows
    whose clean parts hold the end-of-text ids that complete the last canvas (`layout_of`).
    """

    def __call__(
        self, key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption, /
    ) -> Loss:
        """Scores a batch.

        Args:
            key: Random key of the noise; a different one at each step.
            model: Pure functions of the denoiser.
            params: Parameters of the denoiser.
            batch: Clean packed rows [B, T].
            corruption: The forward process of the recipe.

        Returns:
            The loss of each row, summed over its tokens in nats, and the weight by which the sum over rows is divided.
        """
        ...


def layout_of(objective: Objective, model: Model) -> Layout:
    """Finds the layout of the rows that an objective scores, for `training.data.build`.

    Args:
        objective: The objective.
        model: The denoiser.

    Returns:
        `Model.layout`; for an objective with `clean_fill`, one whose clean part also holds the end-of-text ids that
        complete the last canvas of a text.
    """
    if not getattr(objective, "clean_fill", False):
        return model.layout
    return dataclasses.replace(model.layout, clean_fill=True)  # pyright: ignore[reportArgumentType]


# --- arguments


def check_noise(name: str, corruption: noise.Corruption, *kinds: noise.Kind) -> None:
    """Refuses noise that an objective cannot score.

    Args:
        name: Name of the objective, for the message.
        corruption: The noise of the recipe.
        *kinds: The kinds of noise that the objective supports.

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
    """Draws one time per canvas, by low discrepancy over all canvases of the batch (`noise.times`).

    Args:
        key: Random key.
        batch: Packed rows.
        least: The smallest time.
        most: The largest time.

    Returns:
        The time of each position's canvas [B, T]; `most` outside of canvases.
    """
    # Canvases are numbered through the whole batch: the times of consecutive numbers are spread evenly, so the batch
    # covers [least, most] well however the canvases are divided among its rows.
    per_row = batch.canvas.max(axis=1) + 1  # number of canvases of each row [B]
    index = batch.canvas + (jnp.cumsum(per_row) - per_row)[:, None]
    t = noise.times(key, batch.canvas.size, least, most)
    return jnp.where(batch.canvas >= 0, t[jnp.maximum(index, 0)], most)


def documents(batch: Batch) -> Int[Array, "B T"]:
    """Numbers the documents of each row.

    Args:
        batch: Packed rows.

    Returns:
        The number of each position's document [B, T], counted from 1 within the row. Padding, whose positions are all
        0, counts as one document per slot.
    """
    # A document starts at position 0: with its clean tokens, or with its first canvas if it has no clean tokens. Behind
    # clean tokens the first canvas may be at position 0 again, and does not start another document.
    canvas = batch.canvas >= 0
    behind_clean = canvas & ~jnp.pad(canvas[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jnp.cumsum((batch.positions == 0) & ~behind_clean, axis=1)


def sums_by(index: Int[Array, "B T"], values: Shaped[Array, "B T"]) -> Float[Array, "B T"]:
    """Sums values over the positions of a row that have the same index, and returns the sum at each of them.

    Args:
        index: Group of each position, at most T; negative for positions without a group.
        values: The values to sum.

    Returns:
        At each position the sum over its group, in fp32; 0 where the index is negative.
    """

    def row(index: Array, values: Array) -> Array:
        # Positions without a group scatter out of bounds, where mode="drop" ignores them.
        at = jnp.where(index < 0, len(index) + 1, index)
        sums = jnp.zeros(len(index) + 1, jnp.float32).at[at].add(values, mode="drop")
        return jnp.where(index < 0, 0.0, sums[jnp.minimum(at, len(index))])

    return jax.vmap(row)(index, values.astype(jnp.float32))


def token_weights(model: Model, batch: Batch) -> Float[Array, "B T"]:
    """Weighs the editable positions: 1, but less for the fillers of a long canvas.

    A bidirectional model denoises an answer in one canvas, which end-of-text ids fill up (`packing.fill_up`). They are
    easy to predict and may be many: those of a canvas count together at most `FILLERS` times as much as its other
    tokens, so that the text is learnt as fast as without them.

    Args:
        model: Its config names the pattern and the end-of-text id.
        batch: Packed rows.

    Returns:
        Weights, 0 where nothing is editable.
    """
    weights = batch.editable.astype(jnp.float32)
    if model.config.pattern != "bidirectional":
        return weights
    # An end of text behind an end of text is a filler; the first one is part of the text.
    ended = batch.tokens == model.config.eos
    filler = batch.editable & ended & jnp.pad(ended[:, :-1], ((0, 0), (1, 0)))
    limit = sums_by(batch.canvas, batch.editable & ~filler) / jnp.maximum(sums_by(batch.canvas, filler), 1.0)
    return jnp.where(filler, jnp.minimum(FILLERS * limit, 1.0), weights)


def shares(batch: Batch, weights: Shaped[Array, "B T"], normalise: Normalise) -> Float[Array, "B T"]:
    """Computes the weight of each scored position in the mean of the loss.

    Args:
        batch: Packed rows.
        weights: Relative weight of each position, 0 where nothing is scored; or the scored positions, bool.
        normalise: "token": the weights themselves. "answer": the weights of a document sum to 1. "canvas": the weights
            of a document sum to 1, and are divided equally among its canvases.

    Returns:
        Weights, 0 at positions that are not scored.
    """
    weights = weights.astype(jnp.float32)
    if normalise == "token":
        return weights
    document = documents(batch)
    if normalise == "answer":
        return weights / jnp.maximum(sums_by(document, weights), 1.0)
    own = weights / jnp.maximum(sums_by(batch.canvas, weights), 1.0)
    return own / jnp.maximum(sums_by(document, own), 1.0)  # the shares of a canvas sum to 1


def normalised(
    model: Model,
    batch: Batch,
    values: Float[Array, "B T"],
    normalise: Normalise,
    metrics: dict[str, tuple[Array, Array]],
) -> Loss:
    """Normalises weighted cross-entropies at editable positions into a `Loss`.

    Args:
        model: The denoiser, see `token_weights`.
        batch: Packed rows.
        values: Weighted cross-entropies in nats; 0 where nothing is scored.
        normalise: See `shares`.
        metrics: Metrics to log, each as (numerator, denominator).

    Returns:
        The loss, with leaves [B].
    """
    share = shares(batch, token_weights(model, batch), normalise)
    return Loss((values * share).sum(1), share.sum(1), metrics)


def masked_mean(value: Float[Array, "B T"], where: Bool[Array, "B T"]) -> tuple[Array, Array]:
    """Computes a mean over selected positions, as (numerator, denominator) for `Loss.metrics`.

    Args:
        value: Values to average.
        where: The selected positions.

    Returns:
        The sum of the selected values, and their number; two scalars.
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
    """Makes a forward pass over packed rows.

    Args:
        model: The denoiser.
        params: Parameters of the denoiser.
        batch: Positions and key ranges of the rows.
        xt: Noised tokens, the input of the model.
        t: Time of each position's canvas; only time-conditioned models read it.
        self_cond: Prediction of an earlier pass, for models with self-conditioning.

    Returns:
        Hidden states, leaves [B, T, ...].
    """
    # Clean tokens outside of canvases are at time 0, as they are when sampling encodes them.
    timed = model.config.timed and t is not None
    time = jnp.where(batch.canvas >= 0, jnp.asarray(t), 0.0) if timed else None
    return model.apply(params, PackedPass(xt, batch.positions, batch.ranges, self_cond, time))


Reduce = Callable[..., Any]  # (params, logits [B, t, V], arrays [B, t]...) -> tree of [B, t, ...]


def reduce_logits(model: Model, params: Params, hidden: Hidden, reduce: Reduce, *arrays: Array) -> Any:
    """Applies the head and reduces its logits, at most `MAX_LOGITS` logits of a row at a time.

    Args:
        model: The denoiser.
        params: Parameters of the denoiser.
        hidden: From `denoise`, leaves [B, T, ...].
        reduce: reduce(params, logits [B, t, V], *arrays [B, t]) -> tree of [B, t, ...]. Positions must be independent.
        *arrays: Arrays [B, T] that `reduce` reads in addition to the logits.

    Returns:
        The tree over all positions, leaves [B, T, ...].
    """
    size = max(1, MAX_LOGITS // model.config.vocab)
    if jax.tree.leaves(hidden)[0].shape[1] <= size:
        return _reduce(model, reduce, params, hidden, *arrays)
    # Each device loops over the positions of its own rows: inside the loop no mesh is needed.
    in_parts = functools.partial(_reduce_in_parts, model._replace(mesh=None), reduce, size)
    return sharding.rowwise(in_parts, model.mesh, params, hidden, *arrays)


def cross_entropy(
    model: Model, params: Params, batch: Batch, xt: Array, target: Array | None = None, t: Array | None = None
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Makes a forward pass and computes the cross-entropy of every position.

    Args:
        model: The denoiser.
        params: Parameters of the denoiser.
        batch: Positions and key ranges of the rows.
        xt: Noised tokens, the input of the model [B, T].
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
    """Computes the cross-entropy of target ids. With `mask` bound it is a `Reduce`.

    Args:
        mask: The mask id, which gets probability 0; None for models without a mask.
        params: Unused; part of the signature of `Reduce`.
        logits: Logits of each position.
        target: Target id of each position.

    Returns:
        -log p(target) in nats, and 1.0 where it is the most probable id.
    """
    del params
    logits = without(mask, logits)
    chosen = logit_of(logits, target)
    return jax.nn.logsumexp(logits, axis=-1) - chosen, (chosen >= logits.max(axis=-1)).astype(jnp.float32)


def without(mask: int | None, logits: Float[Array, "*s V"]) -> Float[Array, "*s V"]:
    """Sets the probability of the mask id to 0, since clean data never contains it (SUBS, MDLM, arXiv 2406.07524).

    Args:
        mask: The mask id; None returns the logits unchanged.
        logits: Logits of each position.

    Returns:
        The logits, with about -1e30 at the mask id.
    """
    if mask is None:
        return logits
    # Addition of a [V] vector, not `jnp.where`: the gradient of `where` in a scan over chunks would keep an array of
    # the shape of the logits.
    return logits + jnp.where(jnp.arange(logits.shape[-1]) == mask, -1e30, 0.0)


def logit_of(logits: Float[Array, "*s V"], ids: Int[Array, "*s"]) -> Float[Array, "*s"]:
    """Selects the logit of one id at each position.

    Args:
        logits: Logits of each position.
        ids: One id for each position.

    Returns:
        The logits of these ids.
    """
    # A comparison instead of a gather: the gradient of a gather is a scatter, slow on a CPU.
    return jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == ids[..., None], logits, 0.0), axis=-1)


def _reduce(model: Model, reduce: Reduce, params: Params, hidden: Hidden, *arrays: Array) -> Any:
    rows = functools.partial(sharding.constrain_rows, mesh=model.mesh)
    return reduce(params, rows(model.head(params, jax.tree.map(rows, hidden))), *arrays)


def _reduce_in_parts(
    model: Model, reduce: Reduce, size: int, params: Params, hidden: Hidden, *arrays: Array
) -> Any:
    """Applies `_reduce` to chunks of `size` positions, with rematerialisation in the backward pass.

    Only the logits of one chunk exist at a time, in both directions. The price is a fourth matrix product at the head:
    two in the forward pass (one of them recomputed) and two in the backward pass.
    """
    slots = jax.tree.leaves(hidden)[0].shape[1]
    parts = -(-slots // size)

    def cut(x: Array) -> Array:
        """[B, T, ...] -> [parts, B, size, ...], the last part padded."""
        x = jnp.pad(x, ((0, 0), (0, parts * size - slots), *[(0, 0)] * (x.ndim - 2)), mode="edge")
        return jnp.moveaxis(x.reshape(x.shape[0], parts, size, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        """[parts, B, size, ...] -> [B, T, ...], without the padding."""
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :slots]

    # `jax.checkpoint` guards against common-subexpression elimination, which cannot happen across steps of a scan.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def part(_: None, inputs: tuple[Hidden, tuple[Array, ...]]) -> tuple[None, Any]:
        return None, _reduce(model, reduce, params, inputs[0], *inputs[1])

    _, found = jax.lax.scan(part, None, jax.tree.map(cut, (hidden, arrays)))
    return jax.tree.map(join, found)
