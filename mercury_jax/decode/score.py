"""Likelihoods and logits: `mj.score`, a bound on log p(completion | prompt), and `mj.logits`, one denoising pass.

`score` draws noised canvases of prompt + completion on the host (numpy), runs them through the model in passes of at
most `ROWS_PER_PASS` rows, and averages the weighted cross-entropies. Training objectives use the same bounds, from
`mercury_jax.noise`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from mercury_jax import noise
from mercury_jax.config import refuse
from mercury_jax.decode import inputs
from mercury_jax.decode.answer_text import closed_thinking
from mercury_jax.decode.sample import sample
from mercury_jax.decode.state import QUANTUM, bucket, check_equal_lengths
from mercury_jax.decode.token_stats import forbid, write_at
from mercury_jax.types import LM, Key, LaidOutDocument, Model, PackedPass, Params, Pass


class Score(NamedTuple):
    """A lower bound on log p in nats, with its standard error.

    The fields are numbers for one answer, and arrays [B] for a list of answers. The bound is exact, with `se` 0, for
    autoregressive models and for canvases of one token. Otherwise `se` is NaN if `samples` is 1.

    Attributes:
        log_p: Log-likelihood of each answer, or its bound: the mean over the samples.
        se: Standard error of that mean.
        tokens: Number of tokens of each answer.
        samples: Noised canvases per row; 0: one causal pass, exact.
    """

    log_p: float | np.ndarray
    se: float | np.ndarray
    tokens: int | np.ndarray
    samples: int

    @property
    def nats_per_token(self) -> float | np.ndarray:
        """-log_p / tokens."""
        return -self.log_p / self.tokens


def _first_score(scores: Score) -> Score:
    """Returns the score of the first row, as numbers."""
    return Score(float(scores.log_p[0]), float(scores.se[0]), int(scores.tokens[0]), scores.samples)  # type: ignore


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


def score(
    lm: LM,
    prompt: inputs.Prompts,
    completion: inputs.Prompts,
    *,
    samples: int = 32,
    seed: int = 0,
    posterior: bool = False,
    guidance: float = 0.0,
    thinking: bool | str | Sequence[bool | str] | None = None,
) -> Score:
    """Scores answers: a lower bound on log p(completion | prompt), one per row; exact for autoregressive models.

    For masked noise, each sample masks k of the m tokens of a canvas, with k uniform in 1..m, and weights their
    cross-entropies by m / k. This form of the NELBO has a lower variance than masking each token independently (LLaDA,
    arXiv 2502.09992, eq. 6). For uniform and hybrid noise it is the bound of `noise.bound_terms` (UDLM, DUO; GIDD). k
    and the times are stratified over the samples.

    Args:
        lm: A diffusion model with any kind of noise, or an autoregressive one.
        prompt: A text (it may be empty), a conversation or ids; or a list of these with one per row. A 2-D array
            is a list of rows of ids.
        completion: A text or ids; or a list of these with one per row. With a single prompt, all of them answer it.
        samples: Number of noised canvases per row. An autoregressive model runs one causal pass instead.
        seed: Row i draws its canvases from `seed` + i.
        posterior: For uniform and hybrid noise: whether the model predicts p(token | canvas), as models trained by
            the cross-entropy of all tokens do (DiffusionGemma), or p(token | the other tokens of the canvas), as DUO
            and GIDD do. Both settings give a bound; the wrong one is loose.
        guidance: Weight w of classifier-free guidance, as in `mj.sample(..., negative="masked")`: logits
            l + w (l - u), where u are those with a mask in place of each prompt token (LLaDA's `cfg`). Masked noise
            only. The bound is then that of the guided predictions. Costs two passes.
        thinking: What precedes the answer to a conversation, in its thinking section; one for all prompts, or a list
            with one per prompt. True: what the model thinks with `mj.sample(..., effort="medium", seed=seed)`, the same
            for all answers to a prompt. A text: this thinking. False: no thinking. None is refused for a conversation
            and an answer as text if the tokenizer has a thinking section: a model that thinks before it answers gives
            an answer without thinking a misleading score.

    Returns:
        The scores: arrays [B] if prompt or completion is a list, otherwise numbers.

    Raises:
        ValueError: Before any compute, naming the argument. Several prompts need the same number of answers; ids must
            be whole numbers; `posterior` does not apply to masked noise, nor `guidance` to another; an autoregressive
            model needs at least one token before the answer. Or afterwards, naming the row: its logits are NaN.

    The probabilities are normalised over the ids that the model may emit (all but `Corruption.forbidden`, such as the
    mask), as those of `Output.logprobs`.

    Example:
        >>> mj.score(lm, "import ", ["os", "sys"]).log_p
        >>> chat = [{"role": "user", "content": "347+585="}]
        >>> mj.score(lm, chat, ["932", "931", "832"], thinking=True).log_p.argmax()
        0
    """
    inputs.check_lm(lm)
    causal, kind = lm.model.config.autoregressive, lm.corruption.kind
    if posterior and (causal or kind == "absorbing"):
        allowed = (
            "False: masks say nothing of the token" if not causal else "False: this model is autoregressive"
        )
        raise refuse("posterior", True, allowed)
    if isinstance(guidance, bool) or not isinstance(guidance, Real) or not np.isfinite(float(guidance)):
        raise refuse("guidance", guidance, "a finite number")
    if guidance and (causal or kind != "absorbing"):
        raise refuse("guidance", guidance, "0: this model does not denoise masks")
    samples = inputs.check_whole("samples", samples, 1, inputs.MAX_TOKENS)
    seed, documents = inputs.check_seed(seed), []
    pairs, single = _pairs(lm, prompt, completion, thinking, seed)
    tokens = np.array([len(after) for _, after in pairs])
    if causal:
        scores = Score(-next_token_nats(lm, pairs), np.zeros(len(pairs)), tokens, 0)
        return _first_score(scores) if single else scores
    for i, (before, after) in enumerate(pairs):
        text = np.asarray(before + after, np.int32)
        documents.append(noised_document(lm, text, len(before), samples, (seed + i) % 2**31))
    nats = weighted_nats(lm, documents, posterior=posterior, guidance=guidance)
    error = nats.std(axis=1, ddof=1) / np.sqrt(samples) if samples > 1 else np.full(len(nats), np.nan)
    # Exact if every editable token is alone in its canvas: masked in each sample, with weight m / k = 1.
    once = lambda d: (
        isinstance(d, MaskedDocument) and (d.masked & (d.weight == 1.0))[:, d.laid.editable].all()
    )
    exact = [bool(once(d)) for d in documents]
    scores = Score(-nats.mean(axis=1), np.where(exact, 0.0, error), tokens, samples)
    return _first_score(scores) if single else scores


def _pairs(
    lm: LM, prompt: Any, completion: Any, thinking: Any, seed: int
) -> tuple[list[tuple[list[int], list[int]]], bool]:
    """Encodes the prompt and the answer of each row, and says whether a single one of each was given."""
    # Unlike in `sample`, a prompt may be the empty text: it consists of the tokens that begin any text, if any.
    texts = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(texts, list | tuple) and "" in [t for t in texts if isinstance(t, str)]:
        empty = inputs.Prompt(list(lm.tokenizer.begin), False)
        encode = lambda t: empty if isinstance(t, str) and not t else inputs.encode_prompts(lm, [t])[0][0]
        prompts = [encode(t) for t in texts]
        before, one_prompt = [p.ids for p in prompts], isinstance(prompt, str)
    else:
        prompts, one_prompt = inputs.encode_prompts(lm, prompt)
        before = [p.ids for p in prompts]
    chats = [i for i, p in enumerate(prompts) if p.chat]
    if thinking is None and lm.tokenizer.thinking is not None and chats and _has_text(completion):
        why = "False, True or a text: this model may think before it answers a conversation"
        raise refuse("thinking", None, why)
    thoughts = inputs.per_prompt("thinking", thinking, len(prompts), functools.partial(_check_thinking, lm))
    for i, thought in enumerate(thoughts):
        if thought and not prompts[i].chat:
            raise refuse("thinking", thinking, f"False or None for prompt[{i}], which is no conversation")
    # An answer continues its prompt: no begin-of-text token comes between them.
    after, one_answer = inputs.encode_prompts(lm, completion, begin=False, name="completion")
    for i, answer in enumerate(after):
        if answer.chat:
            name = "completion" if one_answer else f"completion[{i}]"
            raise refuse(name, "a conversation", "a text, or ids")
    if not one_prompt and (one_answer or len(before) != len(after)):
        answers = "one answer" if one_answer else f"{len(after)} answers"
        allowed = f"a list of {len(before)}, one for each prompt; or one prompt with any number of answers"
        raise refuse("completion", answers, allowed)
    if any(thoughts):
        most = max(len(answer.ids) for answer in after)
        conversations = [prompt] if one_prompt else list(prompt)
        before = [
            _with_thinking(lm, one, thought, most, seed + i) if thought else ids
            for i, (one, thought, ids) in enumerate(zip(conversations, thoughts, before, strict=True))
        ]
    before = before * len(after) if one_prompt else before
    pairs = [(b, a.ids) for b, a in zip(before, after, strict=True)]
    context = lm.model.config.context
    for i, (b, a) in enumerate(pairs):
        if len(b) + len(a) > context:
            name = "prompt and completion" if one_answer else f"prompt and completion of row {i}"
            raise refuse(name, f"{len(b) + len(a)} tokens", f"at most {context}, the context")
    return pairs, one_prompt and one_answer


def _has_text(completion: Any) -> bool:
    return isinstance(completion, str) or (
        isinstance(completion, list | tuple) and any(isinstance(one, str) for one in completion)
    )


def _check_thinking(lm: LM, name: str, value: Any) -> bool | str:
    """Checks the thinking before one answer."""
    if not isinstance(value, bool | str | None):
        raise refuse(name, value, "True, False, or the text of the thinking")
    if value and lm.tokenizer.thinking is None:
        raise refuse(name, value, f"False: the tokenizer of {lm.name} has no thinking section")
    return value or False


def _with_thinking(lm: LM, prompt: Any, thinking: bool | str, most: int, seed: int) -> list[int]:
    """Returns the ids of a conversation and its closed thinking section, given as text or sampled (True)."""
    [encoded], marks = inputs.encode_prompts(lm, [prompt], thinking=True)[0], lm.tokenizer.thinking
    assert marks is not None
    if isinstance(thinking, str):
        return [*encoded.ids, *lm.tokenizer.encode(thinking), marks.close]
    reply = sample(lm, prompt, effort="medium", max_tokens=most, seed=seed % 2**31).tokens[0]
    closed = closed_thinking(lm.tokenizer, encoded.ids, reply)
    return [*encoded.ids, *closed] if closed else inputs.encode_prompts(lm, [prompt])[0][0].ids


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


def logits(
    lm: LM,
    canvas: inputs.Ids | Sequence[inputs.Ids],
    prompt: inputs.Prompts | None = None,
    *,
    time: float | Sequence[float] | np.ndarray | None = None,
) -> Float[Array, "B L V"]:
    """Runs one denoising pass over a canvas and returns its logits.

    Args:
        lm: The model.
        canvas: Ids [L] or [B, L] (lists, or an array of numpy or JAX), including masks and noise.
        prompt: The tokens before the canvas: None, a text, a conversation or ids, the same for all rows; or a list of
            these (or a 2-D array of ids) with one per row, which may differ in length.
        time: Time of the canvas in [0, 1], one number or one per row, for models that take it. None: the share of masks
            in the canvas.

    `lm`, arrays of ids and times may be traced: the function can be called under `jit`, `vmap` and `grad`. The values
    of traced ids and times are not checked, nor are NaN logits.

    Returns:
        Logits [B, L, V] aligned with the canvas, at least fp32, of all ids. For an autoregressive model, entry i
        predicts the token after position i of the canvas from the tokens up to it.

    Raises:
        ValueError: Before any compute, naming the argument that does not fit; or the logits are NaN.

    Example:
        >>> mask = lm.corruption.mask
        >>> mj.logits(lm, [mask] * 8, prompt="import ").argmax(-1)
        >>> jax.grad(lambda lm: mj.logits(lm, canvas)[0, 0, 7])(lm).params
    """
    inputs.check_lm(lm)
    ids = _ids(lm, canvas, "canvas")
    rows, length = ids.shape
    if isinstance(prompt, Tracer):
        traced = _ids(lm, prompt, "prompt")
        if len(traced) not in (1, rows):
            raise refuse("prompt", prompt, f"ids [P], or [{rows}, P]: one prompt for each row of canvas")
        sizes = np.full(rows, traced.shape[1])
    else:
        before = [[]] * rows if prompt is None else inputs.prompt_rows(lm, prompt, rows, row="row of canvas")
        sizes = np.array([len(prefix) for prefix in before])
    if sizes.max() + length > lm.model.config.context:
        allowed = f"with its prompt at most {lm.model.config.context} tokens, the context"
        raise refuse("canvas", ids.shape, allowed)
    if not lm.model.hides_padding:
        check_equal_lengths("prompts", sizes)
    prefixes: Any = np.zeros((rows, int(sizes.max()) + length), np.int32)
    if isinstance(prompt, Tracer):
        prefixes = jnp.asarray(prefixes).at[:, : int(sizes.max())].set(traced)
    else:
        for row, prefix in zip(prefixes, before, strict=True):
            row[: len(prefix)] = prefix
    # `known`: how many tokens of the prompt can be encoded to the KV cache. The rest, such as an incomplete block of a
    # block-diffusion model, is fed together with the canvas. [B]
    with jax.ensure_compile_time_eval():
        known = np.asarray(lm.model.encodable(jnp.asarray(sizes, jnp.int32)))
    widths = int(known.max()), int((sizes - known).max()) + length
    arrays = (prefixes, ids, sizes.astype(np.int32), known.astype(np.int32), _times(lm, ids, time))
    with inputs.explain_wrong_params(lm):
        out = _pass(lm.model, widths, length, lm.params, *arrays)
    if not isinstance(out, Tracer):
        inputs.refuse_nan(np.asarray(jnp.isnan(out).any(axis=(1, 2))), "the denoising pass")
    return out


def _ids(lm: LM, ids: Any, name: str) -> Any:
    """Checks ids and returns them as whole numbers [B, L]: a numpy array, or the traced array."""
    allowed = "whole numbers [L] or [B, L], rows of one length of 1 or more"
    try:
        rows = jnp.atleast_2d(ids) if isinstance(ids, Tracer) else np.atleast_2d(np.asarray(ids))
    except ValueError:  # rows of several lengths
        raise refuse(name, ids, allowed) from None
    if rows.ndim != 2 or rows.size == 0 or not jnp.issubdtype(rows.dtype, jnp.integer):
        raise refuse(name, f"{rows.dtype}{list(rows.shape)}", allowed)
    if not isinstance(ids, Tracer) and (rows.min() < 0 or rows.max() >= lm.model.config.vocab):
        raise refuse(name, (int(rows.min()), int(rows.max())), f"ids in 0..{lm.model.config.vocab - 1}")
    return rows


def _times(lm: LM, canvas: Any, time: Any) -> Float[Array, "B"] | None:
    """Returns the time of each row's canvas [B]; None for models that take no time."""
    if not lm.model.config.timed:
        if time is not None:
            raise refuse("time", time, "None: this model takes no time")
        return None
    if time is None:
        if lm.corruption.mask is None:
            raise refuse("time", None, "a number in 0..1: the noise of this model leaves no masks to count")
        time = (canvas == lm.corruption.mask).mean(axis=1)
    if isinstance(time, Tracer) and time.shape in ((), (len(canvas),)):
        return jnp.broadcast_to(jnp.asarray(time, jnp.float32), (len(canvas),))
    t = np.zeros(0) if isinstance(time, Tracer) else np.asarray(time)
    t = t.astype(np.float32) if t.dtype.kind in "iuf" else np.full((), np.nan, np.float32)
    if t.shape not in ((), (len(canvas),)) or not ((t >= 0) & (t <= 1)).all():
        raise refuse("time", time, f"a number in 0..1, or one for each of the {len(canvas)} rows")
    return jnp.broadcast_to(t, (len(canvas),))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _pass(
    model: Model,
    widths: tuple[int, int],
    length: int,
    params: Params,
    prefixes: Int[Array, "B S"],
    canvas: Int[Array, "B L"],
    sizes: Int[Array, "B"],
    known: Int[Array, "B"],
    time: Float[Array, "B"] | None,
) -> Float[Array, "B L V"]:
    """Encodes the first `known` tokens of each row, and denoises its canvas of `length` tokens at position `sizes`.

    `widths` holds the number of tokens of the encoding and of the denoising pass that the longest row needs.
    """
    rows, size = prefixes.shape
    text = jax.vmap(write_at)(prefixes, canvas, sizes)
    places = lambda start, width: jnp.minimum(start[:, None] + jnp.arange(width), size - 1)
    cut = lambda start, width: jnp.take_along_axis(text, places(start, width), axis=1)
    cache, zero = model.empty_cache(rows, size), jnp.zeros((rows,), jnp.int32)
    if widths[0]:
        everyone = jnp.ones((rows,), bool)
        clean = None if time is None else jnp.zeros_like(time)
        given = Pass(
            cut(zero, widths[0]), cache, zero, known, known, everyone, time=clean, length=sizes + length
        )
        _, cache = model.forward(params, given)
    # Attention within the canvas is bidirectional, in an autoregressive model causal.
    causal, rest = jnp.full((rows,), model.config.autoregressive), sizes + length - known
    given = Pass(cut(known, widths[1]), cache, known, rest, sizes + length, causal, time=time)
    hidden, _ = model.forward(params, given)
    # The pass also held the prompt tokens that were not encoded: take the columns of the canvas. [B, L]
    at = (sizes - known)[:, None] + jnp.arange(length)
    return jnp.take_along_axis(model.head(params, hidden), at[..., None], axis=1)
