"""One set of weights with three uses: fill masks, repair wrong tokens, predict the next one.

The masked part is that of `masked_elbo`. Beside it, some of the canvas's visible tokens are wrong and are to be
repaired in place, which is what rules that edit accepted tokens rely on (LLaDA2.1, arXiv 2602.08676; GIDD, arXiv
2503.04482); and the encoding pass predicts the next token, so that it can decode autoregressively or verify a drafted
canvas. All three come from the same pass over the batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mercury_jax import noise
from mercury_jax.config import at_least, refuse
from mercury_jax.train.objectives import objective as parts
from mercury_jax.train.objectives.masked import MaskedCanvases, mask_canvases
from mercury_jax.train.objectives.next_token import next_tokens
from mercury_jax.train.objectives.objective import BOUND, NO_BOUND, Objective
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

    With visible tokens that may be wrong, or canvases that are full, the masked part is no longer a bound, and is
    logged as `weighted_ce` instead of `nats_per_token`. `wrong`, `edit` and `causal` at 0 leave exactly
    `masked_elbo(clip=clip, least=least)`.

    Args:
        clip: Largest weight of the masked part; None for no limit.
        least: The smallest time.
        wrong: The largest share of a canvas's visible tokens that are replaced; each canvas draws its own share in
            [0, wrong].
        spoiled: Share of the canvases with masks that have wrong tokens at all; the others are what sampling sees.
        full: Share of canvases without any mask, the situation in which a filled canvas is edited; all of these are
            spoiled.
        edit: Weight of the cross-entropy at visible tokens.
        right: Weight, within that part, of a visible token that is correct; a wrong one has 1.
        causal: Weight of the next token; above 0 only for models with `predicts_next`.
        prompt: Weight, within that part, of a next token inside of the prompt; one of the answer has 1.

    Returns:
        The objective.

    Raises:
        ValueError: A weight is negative or a share above 1; and, when the objective is traced, noise that is not
            absorbing or a model that does not predict the next token.
    """
    at_least(0, wrong=wrong, spoiled=spoiled, full=full, edit=edit, right=right, causal=causal, prompt=prompt)
    for name, value in {"wrong": wrong, "spoiled": spoiled, "full": full}.items():
        if value > 1:
            raise refuse(name, value, "0 <= share <= 1")
    parts.check_weight(clip, least)
    masked_part = BOUND if clip is None and not wrong else NO_BOUND

    def objective(key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption) -> Loss:
        parts.check_noise("masked_and_edited", corruption, "absorbing")
        if causal and not model.config.predicts_next:
            raise refuse("causal", causal, "0 for a model whose config has predicts_next = False")
        noised = mask_canvases(key, batch, corruption, clip, least)
        if wrong:
            noised = spoil_canvases(
                jax.random.fold_in(key, 1), model, batch, noised, corruption.forbidden,
                wrong=wrong, spoiled=spoiled, full=full,
            )  # fmt: skip
        # One pass scores everything: clean slots predict the next token, canvases their own.
        following = next_tokens(model, batch)
        target = jnp.where(following.known, following.token, batch.tokens)
        ce, hit = parts.cross_entropy(model, params, batch, noised.xt, target, noised.t)
        visible = batch.editable & ~noised.masked
        bad, good = visible & (noised.xt != batch.tokens), visible & (noised.xt == batch.tokens)
        scored = jnp.where(noised.masked, noised.weight * ce, 0.0)
        # The three parts are sums over the tokens, divided by the number of editable tokens.
        total = scored
        if edit:
            total = total + edit * (bad + right * good) * ce
        if causal:
            total = total + causal * following.known * jnp.where(following.answer, 1.0, prompt) * ce
        answer = following.known & following.answer
        editable = batch.editable.astype(jnp.float32)
        metrics = {
            masked_part: (scored.sum(), editable.sum()),
            "masked_ce": parts.masked_mean(ce, noised.masked),
            "masked_accuracy": parts.masked_mean(hit, noised.masked),
            "edit_accuracy_wrong": parts.masked_mean(hit, bad),
            "edit_accuracy_right": parts.masked_mean(hit, good),
            "causal_ce": parts.masked_mean(ce, answer),
            "causal_accuracy": parts.masked_mean(hit, answer),
        }
        return Loss(total.sum(1), editable.sum(1), metrics)

    return objective


def spoil_canvases(
    key: Key,
    model: Model,
    batch: Batch,
    noised: MaskedCanvases,
    forbidden: tuple[int, ...],
    *,
    wrong: float,
    spoiled: float,
    full: float,
) -> MaskedCanvases:
    """Makes some canvases full, and replaces visible tokens by wrong ones.

    Half of the replacements are uniform over the ids that may be emitted, half are copied from another place of the
    same canvas: a digit for a digit is the error that a model makes.

    Args:
        key: Random key.
        model: Gives the vocabulary and the end of text.
        batch: Clean rows.
        noised: The same rows with masks.
        forbidden: Ids that are never emitted.
        wrong: Largest share of the visible tokens of a canvas that are replaced.
        spoiled: Share of the canvases with masks that have wrong tokens.
        full: Share of the canvases without any mask.

    Returns:
        The rows with fewer masks and with wrong tokens; times and weights are unchanged.
    """
    canvas_key, token_key, uniform_key, copy_key = jax.random.split(key, 4)
    # One draw a canvas: canvases are numbered row after row, in steps of the row's length.
    rows, slots = batch.canvas.shape
    number = jnp.maximum(batch.canvas, 0) + slots * jnp.arange(rows)[:, None]
    u = jax.random.uniform(canvas_key, (3, batch.canvas.size))[:, number]  # [3, B, T]
    still_masked = noised.masked & (u[0] >= full)
    share = jnp.where((u[0] < full) | (u[1] < spoiled), wrong * u[2], 0.0)
    replaced = batch.editable & ~still_masked & (jax.random.uniform(token_key, share.shape) < share)
    # A replacement may equal the token by chance; it then counts as correct.
    drawn = noise.uniform(model.config.vocab, forbidden=forbidden).prior(uniform_key, share)
    # First and last slot of the canvas at each slot, by running maxima and minima over the edges. [B, T]
    index = jnp.arange(slots)[None]
    edge = batch.canvas[:, 1:] != batch.canvas[:, :-1]
    opens = jnp.pad(edge, ((0, 0), (1, 0)), constant_values=True)
    closes = jnp.pad(edge, ((0, 0), (0, 1)), constant_values=True)
    first = jax.lax.cummax(jnp.where(opens, index, 0), axis=1)
    last = jax.lax.cummin(jnp.where(closes, index, slots - 1), axis=1, reverse=True)
    place = jax.random.uniform(copy_key, (2, rows, slots))
    at = first + (place * (last - first + 1)).astype(
        jnp.int32
    )  # [2, B, T]; place < 1, so never behind the last
    one, other = (jnp.take_along_axis(batch.tokens, jnp.minimum(x, last), axis=1) for x in at)
    # Drawn again where it is the end of text, which fills up short answers and would be most of the copies.
    copied = jnp.where(one == model.config.eos, other, one)
    pick = jax.random.bernoulli(jax.random.fold_in(copy_key, 1), 0.5, share.shape)
    xt = jnp.where(still_masked, noised.xt, batch.tokens)
    return noised._replace(xt=jnp.where(replaced, jnp.where(pick, drawn, copied), xt), masked=still_masked)
