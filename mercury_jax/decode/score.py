"""score(): a bound on log p(completion | prompt); logits(): one denoiser pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from mercury_jax.config import at_least, refuse
from mercury_jax.decode.arguments import check_lm, naming_wrong_params
from mercury_jax.decode.program import QUANTUM, bucket
from mercury_jax.decode.prompts import Prompt, check_seed, normalise
from mercury_jax.decode.read import forbid
from mercury_jax.types import LM, Laid, Model, Params


class Score(NamedTuple):
    """A lower bound on log p in nats, its standard error, and what it was taken over.

    Numbers for one answer; arrays [B], one entry a row, for a list. With canvases of one token (autoregression) the
    bound is exact and the error 0; else one sample alone has no error, which is then NaN.
    """

    log_p: float | np.ndarray
    se: float | np.ndarray
    tokens: int | np.ndarray  # of the answer
    samples: int  # masked canvases for each row; 0: one causal pass, exact

    @property
    def nats_per_token(self) -> float | np.ndarray:
        """-log_p / tokens."""
        return -self.log_p / self.tokens


class Masked(NamedTuple):
    """A document, and the canvases that are drawn from it to score it."""

    laid: Laid
    hidden: np.ndarray  # bool [N, T] which positions are masked
    weight: np.ndarray  # [N, T] of their cross-entropies


def score(lm: LM, prompt: Any, completion: Any, *, samples: int = 32, seed: int = 0) -> Score:
    """Scores answers: a lower bound on log p(completion | prompt), one for each row; exact for autoregressive models.

    k of a canvas's m tokens are masked, k uniform in 1..m, and weighted by m / k; that any-order form of the NELBO has
    less variance than masking each token by itself (LLaDA, arXiv 2502.09992, eq. 6). k is stratified over the samples.

    Args:
        lm: A model of masked diffusion, or an autoregressive one.
        prompt: A text (it may be empty), a conversation or ids; or a list of these with one for each row. A 2-D array
            is a list of rows of ids.
        completion: A text or ids; or a list of these with one for each row. With one prompt, several answers to it.
        samples: Masked canvases that are drawn for each row. An autoregressive model takes one pass and draws none.
        seed: Row i draws its canvases from `seed` + i.

    Returns:
        The scores: arrays [B] where prompt or completion is a list, else numbers.

    Raises:
        ValueError: Before any compute, naming the argument that does not fit: several prompts with one answer or with
            another number of answers, ids that are no whole numbers, a model without masks that is not autoregressive,
            an empty prompt of an autoregressive model whose tokenizer puts no token in front.

    Example:
        >>> mj.score(lm, "import ", ["os", "sys"]).log_p
    """
    check_lm(lm)
    exact_model = lm.model.config.autoregressive
    if lm.corruption.mask is None and not exact_model:
        raise refuse("corruption", "uniform", "absorbing or hybrid noise: this bound counts masks")
    if not isinstance(samples, int) or isinstance(samples, bool):
        raise refuse("samples", samples, "a whole number from 1 on")
    at_least(1, samples=samples)
    pairs, single = _pairs(lm, prompt, completion)
    seed, asked = check_seed(seed), []
    tokens = np.array([len(after) for _, after in pairs])
    if exact_model:
        log_p = -next_token_nats(lm, pairs)
        if single:
            return Score(float(log_p[0]), 0.0, int(tokens[0]), 0)
        return Score(log_p, np.zeros(len(pairs)), tokens, 0)
    for i, (before, after) in enumerate(pairs):
        laid = lm.model.layout(np.asarray(before + after, np.int32), len(before), whole=False)
        asked.append(Masked(laid, *masks(laid, samples, np.random.default_rng((seed + i) % 2**31))))
    nats = weighted_nats(lm, asked)
    spread = nats.std(axis=1, ddof=1) / np.sqrt(samples) if samples > 1 else np.full(len(nats), np.nan)
    # Canvases of one token, which is masked in every sample.
    exact = [bool((m.hidden & (m.weight == 1.0))[:, m.laid.editable].all()) for m in asked]
    log_p, se = -nats.mean(axis=1), np.where(exact, 0.0, spread)
    if single:
        return Score(float(log_p[0]), float(se[0]), int(tokens[0]), samples)
    return Score(log_p, se, tokens, samples)


def _pairs(lm: LM, prompt: Any, completion: Any) -> tuple[list[tuple[list[int], list[int]]], bool]:
    """([(ids of the prompt, ids of the answer)] of each row, whether both were given alone)."""
    before, one_prompt = _prompts(lm, prompt)
    # An answer goes on from its prompt: no mark of a text's beginning stands between them.
    listed = isinstance(completion, Sequence | np.ndarray | jax.Array) and not isinstance(completion, str)
    nothing = [Prompt([], False)] * (max(len(completion), 1) if listed else 1)
    after, one_answer = normalise(lm, completion, behind=nothing, name="completion")
    for i, answer in enumerate(after):
        if answer.chat:
            raise refuse(
                "completion" if one_answer else f"completion[{i}]", "a conversation", "a text, or ids"
            )
    if not one_prompt and (one_answer or len(before) != len(after)):
        answers = "one answer" if one_answer else f"{len(after)} answers"
        allowed = f"a list of {len(before)}, one for each prompt; or one prompt with any number of answers"
        raise refuse("completion", answers, allowed)
    before = before * len(after) if one_prompt else before
    pairs = [(b, a.ids) for b, a in zip(before, after, strict=True)]
    context = lm.model.config.context
    for i, (b, a) in enumerate(pairs):
        if len(b) + len(a) > context:
            name = "prompt and completion" if one_answer else f"prompt and completion of row {i}"
            raise refuse(name, f"{len(b) + len(a)} tokens", f"at most {context}, the context")
    return pairs, one_prompt and one_answer


def _prompts(lm: LM, prompt: Any) -> tuple[list[list[int]], bool]:
    """(ids of each prompt, whether one alone was given); here a prompt may be an empty text."""
    empty = list(lm.tokenizer.begin)
    if isinstance(prompt, str) and not prompt:
        return [empty], True
    if isinstance(prompt, list | tuple) and any(isinstance(p, str) and not p for p in prompt):
        rows = [
            empty if isinstance(p, str) and not p else normalise(lm, [p], name="prompt")[0][0].ids
            for p in prompt
        ]
        return rows, False
    prompts, single = normalise(lm, prompt)
    return [p.ids for p in prompts], single


def masks(laid: Laid, samples: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(which positions to mask [N, T], their weights [N, T]): k of each canvas's m editable tokens.

    k = 1 + floor(m (u + i / N)) over the samples i: every k is uniform in 1..m, together they are
    spread evenly.
    """
    canvas = np.where(laid.editable, laid.canvas, -1)
    hidden = np.zeros((samples, len(canvas)), bool)
    weight = np.zeros((samples, len(canvas)))
    for c in np.unique(canvas[canvas >= 0]):
        at = np.flatnonzero(canvas == c)
        u = (rng.random() + rng.permutation(samples) / samples) % 1.0
        k = 1 + np.floor(len(at) * u).astype(int)
        rank = rng.random((samples, len(at))).argsort(axis=1).argsort(axis=1)
        hidden[:, at] = rank < k[:, None]
        weight[:, at] = (len(at) / k)[:, None]
    return hidden, weight


def times(canvas: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The time of each canvas, k / m, at all of its positions [N, T]; 0 outside. canvas [T] or [N, T]."""
    t = np.zeros_like(weight)
    for row, index in enumerate(np.broadcast_to(canvas, weight.shape)):
        for c in np.unique(index[index >= 0]):
            at = index == c
            most = weight[row, at].max()
            t[row, at] = 1.0 / most if most else 0.0
    return t


def next_token_nats(lm: LM, pairs: Sequence[tuple[list[int], list[int]]]) -> np.ndarray:
    """-log p of each answer under an autoregressive model, by one causal pass over prompt and answer.

    Args:
        lm: An autoregressive model: its hidden state at position i predicts the token at i + 1.
        pairs: Ids of the prompt and of the answer, one pair for each row.

    Returns:
        float64 [B], nats summed over the answer's tokens.

    Raises:
        ValueError: For a row without any token before its answer: nothing predicts the first one.
    """
    for i, (before, _) in enumerate(pairs):
        if not before:
            name = "prompt" if len(pairs) == 1 else f"prompt of row {i}"
            raise refuse(name, "no token", "at least one: this model predicts tokens from those before them")
    size = bucket(max(len(before) + len(after) - 1 for before, after in pairs), QUANTUM)
    text = np.zeros((len(pairs), size + 1), np.int32)
    scored = np.zeros((len(pairs), size), bool)
    for row, (before, after) in enumerate(pairs):
        n = len(before) + len(after)
        text[row, :n] = [*before, *after]
        scored[row, len(before) - 1 : n - 1] = True
    rows = min(ROWS, len(pairs))
    positions = np.arange(size, dtype=np.int32)
    first = np.stack([np.zeros_like(positions), positions + 1], axis=-1)
    ranges = np.stack([first, np.zeros_like(first)], axis=1)  # [T, 2, 2]: all up to itself, and nothing
    fixed = [jnp.broadcast_to(x, (rows, *x.shape)) for x in (positions, ranges)]
    out = []
    for i in range(0, len(pairs), rows):
        at = np.minimum(np.arange(i, i + rows), len(pairs) - 1)  # the last pass repeats the last row
        given, target = jnp.asarray(text[at, :-1]), jnp.asarray(text[at, 1:])
        with naming_wrong_params(lm):
            ce = _ce(lm.model, lm.corruption.forbidden, lm.params, given, target, *fixed, None)
        out.append(np.where(scored[at], np.asarray(ce), 0.0).sum(axis=1, dtype=np.float64))
    return np.concatenate(out)[: len(pairs)]


ROWS = 16  # samples of one pass


def weighted_nats(lm: LM, asked: Sequence[Masked], quantum: int = QUANTUM) -> np.ndarray:
    """Sum over masked positions of weight * cross-entropy: float64 [B, N], one a row and sample.

    All rows have the same number of samples N. They are padded to one length, a multiple of `quantum`, and run `ROWS`
    canvases a pass, so that a batch is one compiled program.
    """
    assert lm.corruption.mask is not None
    samples, width = len(asked[0].hidden), max(m.hidden.shape[1] for m in asked)
    size, count = bucket(width, quantum), len(asked) * samples
    rows = min(ROWS, 1 << (count - 1).bit_length())
    pad = lambda x: np.pad(x, [(0, size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    fixed = [
        np.stack([pad(x) for x in xs])
        for xs in zip(*((m.laid.tokens, m.laid.positions, m.laid.ranges) for m in asked))
    ]
    noised = np.stack([_padded(np.where(m.hidden, lm.corruption.mask, m.laid.tokens), size) for m in asked])
    weight = np.stack([_padded(m.hidden * m.weight, size) for m in asked]).reshape(count, size)
    when = None
    if lm.model.config.timed:
        when = np.stack([_padded(times(m.laid.canvas, m.weight), size) for m in asked]).reshape(count, size)
    noised, out = noised.reshape(count, size), []
    for i in range(0, count, rows):
        # The last pass repeats its last canvas up to the same number of rows.
        at = np.minimum(np.arange(i, i + rows), count - 1)
        told = None if when is None else jnp.asarray(when[at])
        with naming_wrong_params(lm):
            ce = _ce(
                lm.model, lm.corruption.forbidden, lm.params, jnp.asarray(noised[at]),
                *(jnp.asarray(x[at // samples]) for x in fixed), told,
            )  # fmt: skip
        scored = np.where(weight[at] > 0, np.asarray(ce) * weight[at], 0.0)  # padding may hold any number
        out.append(scored.sum(axis=1, dtype=np.float64))
    return np.concatenate(out)[:count].reshape(len(asked), samples)


def _padded(x: np.ndarray, size: int) -> np.ndarray:
    """x [N, T] as [N, size]."""
    return np.pad(x, [(0, 0), (0, size - x.shape[1])])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ce(
    model: Model,
    forbidden: tuple[int, ...],
    params: Params,
    xt: Int[Array, "B T"],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    ranges: Int[Array, "B T R 2"],
    time: Float[Array, "B T"] | None,
) -> Float[Array, "B T"]:
    told = {} if time is None else {"time": time}
    hidden = model.apply(params, xt, positions, ranges, (), **told)
    logits = jax.vmap(functools.partial(forbid, ids=forbidden))(model.head(params, hidden))
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def logits(lm: LM, canvas: Any, prompt: Any = None, *, time: Any = None) -> Float[Array, "B L V"]:
    """Makes one denoiser pass.

    Args:
        lm: The model.
        canvas: Ids [L] or [B, L] (lists, or an array of numpy or JAX), noise included as it stands.
        prompt: What stands before: None, a text, a conversation or ids, the same for all rows; or a list of these (or
            a 2-D array of ids) with one for each row, which may differ in length.
        time: Of the canvas's noise in 0..1, one number or one a row, for models that are told it; None: the share of
            its tokens that are masks.

    Returns:
        Logits aligned with the canvas, [B, L, V], at least fp32. Of an autoregressive model: of the token behind each
        one of the canvas, which sees none behind it.

    Raises:
        ValueError: Before any compute, naming the argument that does not fit.
    """
    check_lm(lm)
    canvas = _canvas(lm, canvas)
    rows, length = canvas.shape
    prompts, single = ([Prompt([], False)], True) if prompt is None else normalise(lm, prompt)
    if not single and len(prompts) != rows:
        raise refuse(
            "prompt", f"a list of {len(prompts)}", f"one prompt, or {rows}: one for each row of canvas"
        )
    before = [p.ids for p in prompts] * (rows if single else 1)
    sizes = np.array([len(ids) for ids in before])
    if sizes.max() + length > lm.model.config.context:
        raise refuse(
            "canvas", canvas.shape, f"with its prompt at most {lm.model.config.context} tokens, the context"
        )
    text = np.zeros((rows, int(sizes.max()) + length), np.int32)
    for row, ids, tokens in zip(text, before, canvas, strict=True):
        row[: len(ids) + length] = [*ids, *tokens]
    known = np.asarray(lm.model.encodable(jnp.asarray(sizes, jnp.int32)))
    widths = int(known.max()), int((sizes - known).max()) + length
    told = _told(lm, canvas, time)
    with naming_wrong_params(lm):
        return _pass(
            lm.model,
            widths,
            length,
            lm.params,
            jnp.asarray(text),
            jnp.asarray(sizes, jnp.int32),
            jnp.asarray(known),
            told,
        )


def _canvas(lm: LM, canvas: Any) -> np.ndarray:
    """The canvas as whole numbers [B, L]."""
    allowed = "whole numbers [L] or [B, L], rows of one length of 1 or more"
    if isinstance(canvas, Tracer):
        raise refuse("canvas", canvas, f"concrete {allowed}")
    try:
        ids = np.atleast_2d(np.asarray(canvas))
    except ValueError:  # rows of several lengths
        raise refuse("canvas", canvas, allowed) from None
    if ids.ndim != 2 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise refuse("canvas", f"{ids.dtype}{list(ids.shape)}", allowed)
    if ids.min() < 0 or ids.max() >= lm.model.config.vocab:
        raise refuse("canvas", (int(ids.min()), int(ids.max())), f"ids in 0..{lm.model.config.vocab - 1}")
    return ids


def _told(lm: LM, canvas: np.ndarray, time: Any) -> Float[Array, "B"] | None:
    """What a timed model is told of each row's canvas; None for the others."""
    if not lm.model.config.timed:
        if time is not None:
            raise refuse("time", time, "None: this model is not told the time")
        return None
    if time is None:
        if lm.corruption.mask is None:
            raise refuse("time", None, "a number in 0..1: the noise of this model leaves no masks to count")
        time = (canvas == lm.corruption.mask).mean(axis=1)
    t = np.asarray(time, np.float32)
    if t.shape not in ((), (len(canvas),)) or not ((t >= 0) & (t <= 1)).all():
        raise refuse("time", time, f"a number in 0..1, or one for each of the {len(canvas)} rows")
    return jnp.broadcast_to(t, (len(canvas),))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _pass(
    model: Model,
    widths: tuple[int, int],
    length: int,
    params: Params,
    text: Int[Array, "B S"],
    sizes: Int[Array, "B"],
    known: Int[Array, "B"],
    time: Float[Array, "B"] | None,
) -> Float[Array, "B L V"]:
    """Encodes the first `known` tokens of each row and reads the canvas, `length` tokens from `sizes` on.

    widths: tokens of the encoding pass and of the denoising one, as the longest rows need.
    """
    rows, size = text.shape
    told = lambda t: {} if t is None else {"time": t}
    cut = lambda start, width: jnp.take_along_axis(
        text, jnp.minimum(start[:, None] + jnp.arange(width), size - 1), axis=1
    )
    cache, zero = model.empty_cache(rows, size), jnp.zeros((rows,), jnp.int32)
    if widths[0]:
        everyone = jnp.ones((rows,), bool)
        clean = told(None if time is None else jnp.zeros_like(time))
        _, cache = model.forward(
            params, cut(zero, widths[0]), cache, zero, known, known, everyone, (), **clean
        )
    # The tokens of a canvas see each other; those of an autoregressive model only what stands before them.
    causal, rest = jnp.full((rows,), model.config.autoregressive), sizes + length - known
    hidden, _ = model.forward(
        params, cut(known, widths[1]), cache, known, rest, sizes + length, causal, (), **told(time)
    )
    at = (sizes - known)[:, None] + jnp.arange(length)
    return jnp.take_along_axis(model.head(params, hidden), at[..., None], axis=1)
