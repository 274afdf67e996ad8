"""One model for three tasks, trained in one forward pass: fill masks, repair wrong tokens, predict the next token.

fill     the loss of `masked_elbo`
repair   some visible tokens of a canvas are replaced by wrong ones, and the model predicts the right token in place;
         rules that edit accepted tokens need it (LLaDA2.1, arXiv 2602.08676; GIDD, arXiv 2503.04482)
predict  the encoding pass predicts the next token, so that the model can also decode autoregressively or verify a
         drafted canvas
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mercury_jax import noise
from mercury_jax.config import NonNegativeFloat, Share, checked, refuse
from mercury_jax.training.objectives import objective as parts
from mercury_jax.training.objectives.masked import MaskedCanvases, mask_canvases
from mercury_jax.training.objectives.next_token import next_tokens
from mercury_jax.training.objectives.objective import BOUND, NO_BOUND, Clip, Objective, SmallestTime
from mercury_jax.types import Batch, Key, Loss, Model, Params


@checked
def masked_and_edited(
    *,
    clip: Clip = None,
    least: SmallestTime = 1e-4,
    wrong: Share = 0.3,
    spoiled: Share = 0.5,
    full: Share = 0.3,
    edit: NonNegativeFloat = 2.0,
    right: NonNegativeFloat = 0.15,
    causal: NonNegativeFloat = 1.0,
    prompt: NonNegativeFloat = 0.1,
) -> Objective:
    """masked_elbo + edit * (repair of visible tokens) + causal * (next-token prediction), per editable token.

    When visible tokens may be wrong, the masked part is no longer a bound, and is logged as `weighted_ce` instead of
    `nats_per_token`. With `wrong`, `edit` and `causal` all 0, the objective equals
    `masked_elbo(clip=clip, least=least)`.

    Args:
        clip: Largest weight of the masked part; None for no limit.
        least: The smallest time.
        wrong: Largest share of the visible tokens of a canvas that are replaced. Each canvas draws its own share
            uniformly from [0, wrong].
        spoiled: Share of the partly masked canvases that have wrong tokens. The others show the model what it sees when
            it samples without errors.
        full: Share of canvases without any mask, as when a filled canvas is edited. All of them have wrong tokens.
        edit: Weight of the cross-entropy at visible tokens.
        right: Relative weight of a correct visible token; a wrong one has weight 1.
        causal: Weight of next-token prediction; above 0 only for models with `predicts_next`.
        prompt: Relative weight of a next token in the prompt; one in the answer has weight 1.

    Returns:
        The objective, for absorbing noise.

    Raises:
        ValueError: A weight is negative or a share above 1; or, when the objective is traced, noise that is not
            absorbing or a model that does not predict the next token.
    """
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
        # One forward pass for all three: clean slots predict the next token, canvas positions their own clean token.
        following = next_tokens(model, batch)
        target = jnp.where(following.known, following.token, batch.tokens)
        ce, hit = parts.cross_entropy(model, params, batch, noised.xt, target, noised.t)  # [B, T]
        # Correct visible tokens are scored too, or the model would learn to change every visible token.
        visible = batch.editable & ~noised.masked
        bad, good = visible & (noised.xt != batch.tokens), visible & (noised.xt == batch.tokens)
        scored = jnp.where(noised.masked, noised.weight * ce, 0.0)
        # All three parts are sums over tokens, and the total is divided by the number of editable tokens; fillers of a
        # bidirectional canvas count less.
        weights = parts.token_weights(model, batch)
        total = scored
        if edit:
            total = total + edit * (bad + right * good) * ce
        total = weights * total
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
        return Loss(total.sum(1), weights.sum(1), metrics)

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
    """Removes all masks from some canvases, and replaces visible tokens by wrong ones.

    Half of the replacements are uniform over the ids that may be emitted. The other half are copied from another
    position of the same canvas, because a model confuses tokens of the same kind, such as two digits.

    Args:
        key: Random key.
        model: Its config gives the vocabulary size and the end-of-text id.
        batch: Clean rows.
        noised: The same rows with masks.
        forbidden: Ids that are never emitted.
        wrong: Largest share of the visible tokens of a canvas that are replaced.
        spoiled: Share of the partly masked canvases that have wrong tokens.
        full: Share of canvases whose masks are all removed.

    Returns:
        The rows with fewer masks and with wrong tokens; times and weights are unchanged.
    """
    canvas_key, token_key, uniform_key, copy_key = jax.random.split(key, 4)
    # 1. Three uniform draws per canvas: remove its masks, make it wrong, and how wrong. Row b numbers its canvases from
    #    b * T on, which leaves room for T canvases per row.
    rows, slots = batch.canvas.shape
    number = jnp.maximum(batch.canvas, 0) + slots * jnp.arange(rows)[:, None]
    u = jax.random.uniform(canvas_key, (3, batch.canvas.size))[:, number]  # [3, B, T]
    still_masked = noised.masked & (u[0] >= full)
    share = jnp.where((u[0] < full) | (u[1] < spoiled), wrong * u[2], 0.0)
    replaced = batch.editable & ~still_masked & (jax.random.uniform(token_key, share.shape) < share)
    # 2. Uniform replacements. One may equal the clean token by chance; it then counts as correct.
    drawn = noise.uniform(model.config.vocab, forbidden=forbidden).prior(uniform_key, share)
    # 3. Copies. The first and the last slot of each position's canvas are running maxima and minima over the canvas
    #    edges [B, T]; a source is drawn uniformly between them.
    index = jnp.arange(slots)[None]
    edge = batch.canvas[:, 1:] != batch.canvas[:, :-1]
    opens = jnp.pad(edge, ((0, 0), (1, 0)), constant_values=True)
    closes = jnp.pad(edge, ((0, 0), (0, 1)), constant_values=True)
    first = jax.lax.cummax(jnp.where(opens, index, 0), axis=1)
    last = jax.lax.cummin(jnp.where(closes, index, slots - 1), axis=1, reverse=True)
    place = jax.random.uniform(copy_key, (2, rows, slots))
    # [2, B, T]: two candidates. place < 1, so a candidate is never behind the last slot
    at = first + (place * (last - first + 1)).astype(jnp.int32)
    one, other = (jnp.take_along_axis(batch.tokens, jnp.minimum(x, last), axis=1) for x in at)
    # End-of-text ids fill up short answers and would be most of the copies, so they are replaced by the second one.
    copied = jnp.where(one == model.config.eos, other, one)
    pick = jax.random.bernoulli(jax.random.fold_in(copy_key, 1), 0.5, share.shape)
    xt = jnp.where(still_masked, noised.xt, batch.tokens)
    return noised._replace(xt=jnp.where(replaced, jnp.where(pick, drawn, copied), xt), masked=still_masked)
