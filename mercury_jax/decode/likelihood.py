"""Log-likelihoods of texts: the noised canvases that give the bound of a diffusion model, and exact causal passes.

`score.py` calls these functions for `mj.score`, `infill.py` to compare fillings, the server for `prompt_logprobs`. The
canvases are drawn on the host (numpy) and pass through the model in batches of at most `ROWS_PER_PASS` rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax import noise
from mercury_jax.config import refuse
from mercury_jax.decode import inputs
from mercury_jax.decode.state import QUANTUM, bucket, check_equal_lengths
from mercury_jax.decode.token_stats import forbid
from mercury_jax.types import LM, Key, LaidOutDocument, Model, PackedPass, Params


class MaskedDocument(NamedTuple):
    """A document, and N masked versions of its canvases that score it."""

    laid: LaidOutDocument
    masked: np.ndarray  # bool [N, T] which positions are masked
    weight: np.ndarray  # [N, T] weights of the cross-entropies, m / k


class NoisedDocument(NamedTuple):
    """A document, and N times for each of its canvases, at which uniform or hybrid noise is drawn to score it."""

    laid: LaidOutDocument
    time: np.ndarray  # [N, T] time of the canvas that holds each position; 0 outside of canvases
    weight: np.ndarray  # [N, T] 1 / density of the time; 0 at positions that are not scored
    seed: int  # seed of the noise


def noised_document(
    lm: LM, ids: np.ndarray, prompt: int, samples: int, seed: int
) -> MaskedDocument | NoisedDocument:
    """Draws the noised canvases that score a text, by the noise of the model.

    Args:
        ids: Prompt and answer [T].
    """
    laid = lm.model.layout(ids, prompt, all_clean=False)
    rng, kind = np.random.default_rng(seed), lm.corruption.kind
    if kind == "absorbing":
        return MaskedDocument(laid, *draw_masks(laid, samples, rng))
    return NoisedDocument(laid, *draw_times(laid, samples, rng, kind), seed)


def draw_masks(
    laid: LaidOutDocument, samples: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draws the positions to mask: k of the m editable tokens of each canvas.

    Sample i has k = 1 + floor(m ((u + i / N) mod 1)), up to a permutation of the samples. Each k is uniform in 1..m,
    and the N of them are spread evenly, which lowers the variance of their mean.

    Returns:
        Which positions are masked, bool [N, T], and the weights m / k of their cross-entropies [N, T].
    """
    canvas = np.where(laid.editable, laid.canvas, -1)
    masked = np.zeros((samples, len(canvas)), bool)
    weight = np.zeros((samples, len(canvas)))
    for c in np.unique(canvas[canvas >= 0]):
        at = np.flatnonzero(canvas == c)
        # Stratified: one random offset u for all N samples, which divide [0, 1) evenly. [N]
        u = (rng.random() + rng.permutation(samples) / samples) % 1.0
        k = 1 + np.floor(len(at) * u).astype(int)
        # A random permutation of the m tokens in each sample [N, m]; the first k of them are masked.
        rank = rng.random((samples, len(at))).argsort(axis=1).argsort(axis=1)
        masked[:, at] = rank < k[:, None]
        weight[:, at] = (len(at) / k)[:, None]
    return masked, weight


def draw_times(
    laid: LaidOutDocument, samples: int, rng: np.random.Generator, kind: noise.Kind
) -> tuple[np.ndarray, np.ndarray]:
    """Draws a time for each canvas and sample, spread evenly over the samples.

    Returns:
        Times [N, T], 0 outside of canvases; and importance weights, 1 / density of the time [N, T], 0 at positions that
        are not scored.
    """
    time, weight = np.zeros((2, samples, len(laid.canvas)))
    for c in np.unique(laid.canvas[laid.canvas >= 0]):
        phi = (rng.random() + rng.permutation(samples) / samples) % 1.0
        t, density = noise.bound_times(kind, jnp.asarray(phi[:, None]))
        here = laid.canvas == c
        time[:, here], weight[:, here] = t, density * laid.editable[here]
    return time, weight


def canvas_times(canvas: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Computes the time of each canvas, its share of masks k / m, at all of its positions; 0 outside of canvases.

    Models that take the time as input get it per position.

    Args:
        canvas: Index of the canvas that holds each position [T] or [N, T]; -1 outside of canvases.
        weight: The weights m / k of `draw_masks` [N, T]; 0 at positions that are not masked.

    Returns:
        Times [N, T].
    """
    t = np.zeros_like(weight)
    for row, index in enumerate(np.broadcast_to(canvas, weight.shape)):
        for c in np.unique(index[index >= 0]):
            at = index == c
            most = weight[row, at].max()
            t[row, at] = 1.0 / most if most else 0.0
    return t


ROWS_PER_PASS = 16  # noised canvases per forward pass of `weighted_nats` and `next_token_nats`


def next_token_nats(lm: LM, pairs: Sequence[tuple[list[int], list[int]]]) -> np.ndarray:
    """Computes -log p of each answer under an autoregressive model, by one causal pass over prompt and answer.

    Returns:
        Nats summed over the answer's tokens, float64 [B].
    """
    for i, (before, _) in enumerate(pairs):
        if not before:
            name = "prompt" if len(pairs) == 1 else f"prompt of row {i}"
            raise refuse(name, "no token", "at least one: this model predicts tokens from those before them")
    size = bucket(max(len(before) + len(after) - 1 for before, after in pairs), QUANTUM)
    text = np.zeros((len(pairs), size + 1), np.int32)
    scored = np.zeros((len(pairs), size), bool)
    for row, (before, after) in enumerate(pairs):
        end = len(before) + len(after)
        text[row, :end] = [*before, *after]
        scored[row, len(before) - 1 : end - 1] = True
    # Position i of the input predicts token i + 1. Causal attention is given as the range of keys that each position
    # sees, the same for all rows.
    at = np.arange(size, dtype=np.int32)
    causal = np.stack([np.zeros_like(at), at + 1], axis=-1)  # [T, 2] keys up to the position itself
    ranges = np.stack([causal, np.zeros_like(causal)], axis=1)  # [T, R, 2], the second range is empty
    shared = np.zeros(len(pairs), int)  # all rows have the same positions and ranges
    ce = _batched_nats(lm, text[:, :-1], text[:, 1:], at[None], ranges[None], shared, None)
    nats = np.where(scored, ce, 0.0).sum(axis=1, dtype=np.float64)
    inputs.refuse_nan(np.isnan(nats), "the scoring pass")
    return nats


MAX_ALTERNATIVES = 20  # of each token in `prefix_log_p`


def prefix_log_p(lm: LM, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores each token of a text as `score` scores a completion of one token, given all tokens before it: exactly.

    The sum over the last tokens is the log-likelihood of decoding them from left to right, one token per pass. A model
    that denoises masks makes one row for each token, an autoregressive model has all of them in one causal pass.

    Returns:
        log p of the tokens after the first [N - 1], the ids of the likeliest tokens in their place [N - 1, K], and
        log p of those [N - 1, K], in descending order.
    """
    config, kind = lm.model.config, lm.corruption.kind
    if not config.autoregressive and kind != "absorbing":
        raise refuse(
            "log-probabilities of a prompt", kind, "a model that denoises masks, or an autoregressive one"
        )
    if not lm.model.hides_padding:
        check_equal_lengths("prefixes", [1, 2])
    step = ROWS_PER_PASS if not config.autoregressive else 4 * ROWS_PER_PASS
    parts = []
    for start in range(1, len(ids), step):
        # The last rows are repeated, so that all passes over texts of a similar length have the same shape.
        at = np.minimum(np.arange(start, start + step), len(ids) - 1)
        if config.autoregressive:  # position i - 1 predicts token i
            size = bucket(len(ids), QUANTUM)
            position = np.arange(size, dtype=np.int32)
            causal = np.stack([np.zeros_like(position), position + 1], axis=-1)
            ranges = np.stack([causal, np.zeros_like(causal)], axis=1)[None]
            text = np.pad(np.asarray(ids, np.int32), (0, size - len(ids)))[None]
            rows = text, position[None], ranges, None
            where, tokens = at[None] - 1, np.asarray(ids, np.int32)[at][None]
        else:
            laid = [lm.model.layout(np.asarray(ids[: i + 1], np.int32), int(i), all_clean=False) for i in at]
            size = bucket(max(len(one.tokens) for one in laid), QUANTUM)
            pad = lambda x, size=size: np.pad(x, [(0, size - len(x))] + [(0, 0)] * (x.ndim - 1))
            stacked = lambda name, laid=laid, pad=pad: np.stack([pad(getattr(one, name)) for one in laid])
            text, editable = stacked("tokens"), stacked("editable")
            time = None
            if config.timed:
                time = np.concatenate(
                    [pad(canvas_times(d.canvas, d.editable[None] * 1.0)[0])[None] for d in laid]
                )
            assert lm.corruption.mask is not None
            noised = np.where(editable, lm.corruption.mask, text)
            rows = noised, stacked("positions"), stacked("ranges"), time
            where = editable.argmax(axis=1)[:, None]
            tokens = np.take_along_axis(text, where, axis=1)
        with inputs.explain_wrong_params(lm):
            given = jax.tree.map(jnp.asarray, (rows, where, tokens))
            found = jax.device_get(_token_log_p(lm.model, lm.corruption, lm.params, *given))
        parts.append([x.reshape(step, *x.shape[2:]) for x in found])
    if not parts:
        return np.zeros(0, np.float32), np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32)
    log_p, top_ids, top = (np.concatenate(x)[: len(ids) - 1] for x in zip(*parts, strict=True))
    return log_p, top_ids, top


@functools.partial(jax.jit, static_argnums=(0, 1))
def _token_log_p(
    model: Model,
    corruption: noise.Corruption,
    params: Params,
    rows: tuple[Int[Array, "B T"], Int[Array, "B T"], Int[Array, "B T R 2"], Float[Array, "B T"] | None],
    where: Int[Array, "B K"],
    tokens: Int[Array, "B K"],
) -> tuple[Float[Array, "B K"], Int[Array, "B K A"], Float[Array, "B K A"]]:
    """Computes log p of one token at each of some positions, and of the A likeliest ones there.

    `rows` are the tokens, positions, ranges and times of a packed pass.
    """
    tokens_given, positions, ranges, time = rows
    hidden = model.apply(params, PackedPass(tokens_given, positions, ranges, time=time))
    hidden = jnp.take_along_axis(hidden, where[..., None], axis=1)
    logits = jax.vmap(functools.partial(forbid, ids=corruption.forbidden))(model.head(params, hidden))
    log_p = jax.nn.log_softmax(logits)
    top, top_ids = jax.lax.top_k(log_p, min(MAX_ALTERNATIVES, log_p.shape[-1]))
    return jnp.take_along_axis(log_p, tokens[..., None], axis=-1)[..., 0], top_ids, top


def weighted_nats(
    lm: LM,
    documents: Sequence[MaskedDocument | NoisedDocument],
    quantum: int = QUANTUM,
    posterior: bool = False,
    guidance: float = 0.0,
) -> np.ndarray:
    """Computes the bound of each sample of each document: the weighted sum of its cross-entropies.

    Under uniform and hybrid noise, it sums the terms of `noise.bound_terms` instead. The documents are padded to the
    same length and run `ROWS_PER_PASS` canvases per pass, so that a batch needs one compilation.

    Returns:
        Nats, float64 [B, N].
    """
    samples, width = documents[0].weight.shape[0], max(d.weight.shape[1] for d in documents)
    if not lm.model.hides_padding:
        check_equal_lengths("rows", [d.weight.shape[1] for d in documents])
    size, count = bucket(width, quantum) if lm.model.hides_padding else width, len(documents) * samples
    pad = lambda x: np.pad(x, [(0, size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    stacked = lambda name: np.stack([pad(getattr(d.laid, name)) for d in documents])
    tokens, positions, ranges = stacked("tokens"), stacked("positions"), stacked("ranges")
    wide = lambda x: np.pad(x, [(0, 0), (0, size - x.shape[1])])  # [N, T] -> [N, size]
    flat = lambda rows: np.stack([wide(x) for x in rows]).reshape(count, size)
    # The B * N noised canvases in one batch axis; `document` is the index of the document of each.
    document = np.arange(count) // samples
    noised: list[np.ndarray] = []
    for d in documents:
        if isinstance(d, MaskedDocument):
            assert lm.corruption.mask is not None
            noised.append(np.where(d.masked, lm.corruption.mask, d.laid.tokens))
        else:
            padded = wide(d.time), pad(d.laid.tokens), pad(d.laid.editable)
            xt = _noised(lm.corruption, jax.random.key(d.seed), *map(jnp.asarray, padded))
            noised.append(np.asarray(xt)[:, : d.weight.shape[1]])
    weight = flat(d.masked * d.weight if isinstance(d, MaskedDocument) else d.weight for d in documents)
    time = None
    if isinstance(documents[0], NoisedDocument):
        time = flat(d.time for d in documents if isinstance(d, NoisedDocument))
    elif lm.model.config.timed:
        time = flat(canvas_times(d.laid.canvas, d.weight) for d in documents)
    xt, negative = flat(noised), None
    if guidance:
        assert lm.corruption.mask is not None
        prompt = stacked("editable")[document] == 0
        negative = np.where(prompt, lm.corruption.mask, xt), guidance
    nats = _batched_nats(lm, xt, tokens[document], positions, ranges, document, time, posterior, negative)
    nats = np.where(weight > 0, nats, 0.0) * weight  # padding may hold any number
    nats = nats.sum(axis=1, dtype=np.float64).reshape(len(documents), samples)
    inputs.refuse_nan(np.isnan(nats).any(axis=1), "the scoring pass")
    return nats


@functools.partial(jax.jit, static_argnums=0)
def _noised(
    corruption: noise.Corruption,
    key: Key,
    time: Float[Array, "N T"],
    tokens: Int[Array, "T"],
    editable: Bool[Array, "T"],
) -> Int[Array, "N T"]:
    """Draws N noised versions of a document, each position at its time.

    Each position has its own key, so that the draws do not depend on the padded length.
    """
    rows, slots = time.shape
    at = jnp.arange(slots)

    def position(key: Key, t: Array, token: Array, editable: Array, at: Array) -> Array:
        return noise.corrupt(jax.random.fold_in(key, at), corruption, token, t, editable).xt

    row = lambda key, t: jax.vmap(position, (None, 0, 0, 0, 0))(key, t, tokens, editable, at)
    return jax.vmap(row)(jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows)), time)


def _batched_nats(
    lm: LM,
    xt: np.ndarray,
    tokens: np.ndarray,
    positions: np.ndarray,
    ranges: np.ndarray,
    layout: np.ndarray,
    time: np.ndarray | None,
    posterior: bool = False,
    negative: tuple[np.ndarray, float] | None = None,
) -> np.ndarray:
    """Computes nats [B, T] in passes of the same shape, so that one compilation serves all of them.

    Row b has the positions and key ranges of index layout[b]: the samples of a document share them. `negative` holds
    the tokens of the unconditional branch [B, T] and the weight of the guidance.
    """
    count, out = len(xt), []
    rows = min(ROWS_PER_PASS, 1 << (count - 1).bit_length())
    for i in range(0, count, rows):
        # Fill up the last pass with copies of the last row.
        at = np.minimum(np.arange(i, i + rows), count - 1)
        arrays = (
            xt[at],
            tokens[at],
            positions[layout[at]],
            ranges[layout[at]],
            None if time is None else time[at],
            None if negative is None else (negative[0][at], np.float32(negative[1])),
        )
        with inputs.explain_wrong_params(lm):
            given = jax.tree.map(jnp.asarray, arrays)
            out.append(np.asarray(_nats(lm.model, lm.corruption, posterior, lm.params, *given)))
    return np.concatenate(out)[:count]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _nats(
    model: Model,
    corruption: noise.Corruption,
    posterior: bool,
    params: Params,
    xt: Int[Array, "B T"],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    ranges: Int[Array, "B T R 2"],
    time: Float[Array, "B T"] | None,
    negative: tuple[Int[Array, "B T"], Float[Array, ""]] | None,
) -> Float[Array, "B T"]:
    """Computes -log p of each token, predicted from the noised tokens `xt`, with guidance if there is a `negative`.

    Under uniform and hybrid noise it computes the term of the bound at the time of each position instead.
    """
    given = PackedPass(xt, positions, ranges, time=time if model.config.timed else None)
    logits = model.head(params, model.apply(params, given))
    if negative is not None:
        masked, weight = negative
        logits += weight * (logits - model.head(params, model.apply(params, given._replace(tokens=masked))))
    if corruption.kind != "absorbing" and not model.config.autoregressive:
        assert time is not None
        t = jnp.where(time > 0, time, 0.5)  # outside of canvases any time will do: the weight there is 0
        terms = noise.bound_terms(corruption, logits, tokens, xt, t, posterior)
        # The terms clip the probabilities, which hides NaN.
        return jnp.where(jnp.isnan(logits).any(-1), jnp.nan, terms.weight * terms.divergence)
    logits = jax.vmap(functools.partial(forbid, ids=corruption.forbidden))(logits)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen
