"""Likelihoods and logits: `mj.score`, a bound on log p(completion | prompt), and `mj.logits`, one denoising pass.

`score` averages the weighted cross-entropies of noised canvases of prompt + completion, which `likelihood.py` draws and
passes through the model. Training objectives use the same bounds, from `mercury_jax.noise`.
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
from jaxtyping import Array, Float, Int

from mercury_jax.config import refuse
from mercury_jax.decode import inputs
from mercury_jax.decode.answer_text import closed_thinking
from mercury_jax.decode.likelihood import MaskedDocument, next_token_nats, noised_document, weighted_nats
from mercury_jax.decode.sample import sample
from mercury_jax.decode.state import check_equal_lengths
from mercury_jax.decode.token_stats import write_at
from mercury_jax.types import LM, Model, Params, Pass


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
