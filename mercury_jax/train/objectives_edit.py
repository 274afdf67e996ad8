"""One set of weights for three readings of a text: fill masks, repair wrong tokens, say the next one.

The masked part is `objectives.masked_elbo`'s. Beside it, some of the canvas's visible tokens are wrong
and are to be repaired in place, which is what rules that edit settled tokens rely on (LLaDA2.1,
arXiv 2602.08676; GIDD, arXiv 2503.04482); and the encoding pass predicts the next token, so that it can
decode autoregressively or verify a drafted canvas. All three come from the same pass over the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mercury_jax import noise
from mercury_jax.config import at_least, refuse
from mercury_jax.train.objectives import (
    BOUND,
    NO_BOUND,
    Objective,
    canvas_times,
    check_masks_only,
    check_weight,
    cross_entropy,
)
from mercury_jax.types import Batch, Key, Loss, Model, Params


def masked_and_edited(
    *,
    clip: float | None = None,
    least: float = 1e-4,
    wrong: float = 0.3,
    spoiled: float = 0.5,
    full: float = 0.3,
    edit: float = 2.0,
    right: float = 0.15,
    causal: float = 1.0,
    prompt: float = 0.1,
) -> Objective:
    """masked_elbo + edit * (repair of visible tokens) + causal * (next clean token), per editable token.

    wrong: the largest share of a canvas's visible tokens that are replaced; each canvas draws its own
    in [0, wrong]. spoiled: share of the canvases with masks that have wrong tokens at all; the others
    keep the masked part what it is while sampling. full: share of canvases without any mask, the
    situation in which a filled canvas is edited; these are all spoiled. right: weight of the
    cross-entropy at a visible token that stands as it should, where a wrong one has 1.
    prompt: weight of a next token that is inside of the prompt, where one of the answer has 1.
    With visible tokens that may be wrong, or canvases that are full, the masked part is no longer a bound, and is
    logged as `weighted_masked_ce` instead of `nats_per_token`.
    wrong, edit and causal at 0 leave exactly `masked_elbo(clip=clip, least=least)`.
    """
    at_least(0, wrong=wrong, spoiled=spoiled, full=full, edit=edit, right=right, causal=causal, prompt=prompt)
    for name, value in {"wrong": wrong, "spoiled": spoiled, "full": full}.items():
        if value > 1:
            raise refuse(name, value, "0 <= share <= 1")
    check_weight(clip, least)
    masked_part = BOUND if clip is None and not wrong else NO_BOUND

    def objective(key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption) -> Loss:
        check_masks_only("masked_and_edited", corruption)
        if causal and not model.config.predicts_next:
            raise refuse("causal", causal, "0 for a model whose config has predicts_next = False")
        draw, spoil = jax.random.split(key)
        t = canvas_times(draw, batch, least)
        noised = noise.corrupt(spoil, corruption, batch.tokens, t, batch.editable)
        alpha, slope = noise.rate(corruption.alpha, t)
        weight = -slope / (1.0 - alpha)
        weight = weight if clip is None else jnp.minimum(weight, clip)
        xt, masked = noised
        if wrong:
            xt, masked = spoil_canvases(
                jax.random.fold_in(key, 1), model, batch, noised, corruption.forbidden,
                wrong=wrong, spoiled=spoiled, full=full,
            )  # fmt: skip
        next_ = next_tokens(batch)
        target = jnp.where(next_.known, next_.token, batch.tokens)
        ce, hit = cross_entropy(model, params, batch, xt, target, t)
        shown = batch.editable & ~masked
        bad, good = shown & (xt != batch.tokens), shown & (xt == batch.tokens)
        in_prompt = jnp.where(next_.answer, 1.0, prompt)
        scored = jnp.where(masked, weight * ce, 0.0)
        repair = edit * (bad + right * good) * ce
        ahead = causal * next_.known * in_prompt * ce
        metrics = {
            masked_part: (scored.sum(), batch.editable.sum().astype(jnp.float32)),
            "masked_ce": _mean(ce, masked),
            "masked_accuracy": _mean(hit, masked),
            "edit_accuracy_wrong": _mean(hit, bad),
            "edit_accuracy_right": _mean(hit, good),
            "causal_ce": _mean(ce, next_.known & next_.answer),
            "causal_accuracy": _mean(hit, next_.known & next_.answer),
        }
        total = scored
        total = total + repair if edit else total
        total = total + ahead if causal else total
        return Loss(total.sum(1), batch.editable.astype(jnp.float32).sum(1), metrics)

    return objective


def next_token() -> Objective:
    """The autoregressive loss: the cross-entropy of each answer token given the clean tokens before it.

    For models whose encoding pass predicts the next token (`ModelConfig.predicts_next`). Nothing is noised, so it
    trains models without a mask too, such as those of Qwen3's build. Exact: -log p of the answer in nats per token.

    Returns:
        The objective. ValueError where it meets a model with predicts_next = False.
    """

    def objective(key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption) -> Loss:
        del key, corruption
        if not model.config.predicts_next:
            raise refuse("predicts_next", False, "True, for the objective next_token")
        next_ = next_tokens(batch)
        target = jnp.where(next_.known, next_.token, batch.tokens)
        ce, hit = cross_entropy(model, params, batch, batch.tokens, target)
        scored = next_.known & next_.answer
        nats, count = _mean(ce, scored)
        metrics = {"nats_per_token": (nats, count), "causal_accuracy": _mean(hit, scored)}
        weight = scored.astype(jnp.float32).sum(1)
        return Loss(jnp.where(scored, ce, 0.0).sum(1), weight, metrics)

    return objective


def spoil_canvases(
    key: Key,
    model: Model,
    batch: Batch,
    noised: noise.Noised,
    forbidden: tuple[int, ...],
    *,
    wrong: float,
    spoiled: float,
    full: float,
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """(tokens that the model sees, which of them are masks): full canvases, and visible tokens replaced.

    Half of the replacements are uniform over the ids that may be emitted, half are copied from another
    place of the same canvas: a digit for a digit is the error that a model makes.
    """
    a, b, c, d = jax.random.split(key, 4)
    here = _canvas_index(batch)
    u = jax.random.uniform(a, (3, batch.canvas.size))[:, here]  # one draw a canvas
    masked = noised.changed & (u[0] >= full)
    share = jnp.where((u[0] < full) | (u[1] < spoiled), wrong * u[2], 0.0)
    spoil = batch.editable & ~masked & (jax.random.uniform(b, share.shape) < share)
    allowed = noise.uniform(model.config.vocab, forbidden=forbidden).prior(c, share)
    copied = _from_canvas(d, model, batch)
    pick = jax.random.bernoulli(jax.random.fold_in(d, 1), 0.5, share.shape)
    xt = jnp.where(masked, noised.xt, batch.tokens)
    return jnp.where(spoil, jnp.where(pick, allowed, copied), xt), masked


class Next(NamedTuple):
    """What an encoding pass is to say at each slot of a packed row."""

    token: Int[Array, "B T"]  # the token behind the one in the slot
    known: Bool[Array, "B T"]  # a clean slot, whose document goes on
    answer: Bool[Array, "B T"]  # the token behind is not part of the prompt


def next_tokens(batch: Batch) -> Next:
    """The next token of every clean slot: in the next slot, or in the document's canvases.

    A document stands as its clean tokens at positions 0, 1, ... and its canvases at positions
    first, first + 1, ... in the slots behind. The token at p + 1 >= first is read from the canvases,
    which hold it even where the clean part ends; before that it stands in the next slot.
    """
    slots = batch.tokens.shape[1]
    index = jnp.arange(slots)[None]
    begins = jax.lax.cummin(jnp.where(batch.canvas >= 0, index, slots - 1), axis=1, reverse=True)
    first = jnp.take_along_axis(batch.positions, begins, axis=1)
    want = batch.positions + 1
    answer = want >= first
    at = jnp.minimum(jnp.where(answer, begins + want - first, index + 1), slots - 1)
    # Behind a document stands padding or another one, both at position 0, where no token is the next.
    known = (batch.canvas < 0) & (jnp.take_along_axis(batch.positions, at, axis=1) == want)
    return Next(jnp.take_along_axis(batch.tokens, at, axis=1), known, answer)


def _canvas_index(batch: Batch) -> Int[Array, "B T"]:
    """Each canvas's number in the batch; row after row, in steps of the row's length."""
    rows, slots = batch.canvas.shape
    return jnp.maximum(batch.canvas, 0) + slots * jnp.arange(rows)[:, None]


def _from_canvas(key: Key, model: Model, batch: Batch) -> Int[Array, "B T"]:
    """The token at a random place of the same canvas; drawn again where that was the end of text.

    Short answers are completed with many of these, which would be most of the copies.
    """
    slots = batch.tokens.shape[1]
    index = jnp.arange(slots)[None]
    edge = batch.canvas[:, 1:] != batch.canvas[:, :-1]
    opens = jnp.pad(edge, ((0, 0), (1, 0)), constant_values=True)
    closes = jnp.pad(edge, ((0, 0), (0, 1)), constant_values=True)
    first = jax.lax.cummax(jnp.where(opens, index, 0), axis=1)
    last = jax.lax.cummin(jnp.where(closes, index, slots - 1), axis=1, reverse=True)
    u = jax.random.uniform(key, (2, *batch.tokens.shape))
    at = first + (u * (last - first + 1)).astype(jnp.int32)  # u < 1, so never behind the last
    one, other = (jnp.take_along_axis(batch.tokens, jnp.minimum(x, last), axis=1) for x in at)
    return jnp.where(one == model.config.eos, other, one)


def _mean(value: Array, where: Array) -> tuple[Array, Array]:
    return jnp.where(where, value, 0.0).sum(), where.astype(jnp.float32).sum()
