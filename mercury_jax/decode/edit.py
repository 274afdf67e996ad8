"""edit(): refine a text in place, all chosen tokens at once.

The text becomes the canvas of an ordinary session: `given` marks the tokens to keep, `draft` those from which editing
starts, and all others start as noise. `infill.py` also fills holes of unknown length.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from mercury_jax.config import Plan, refuse
from mercury_jax.decode.defaults import default_editor, default_sampler
from mercury_jax.decode.inputs import Ids, Prompts, Seeds, check_lm, encode_prompts, prompt_rows, row_seeds
from mercury_jax.decode.request import Request, start
from mercury_jax.decode.sampler import Param, SamplerLike, check_sampler
from mercury_jax.decode.session import Session, advance, check_nan
from mercury_jax.decode.state import Rows
from mercury_jax.types import LM, Key

Span: TypeAlias = tuple[int, int] | str


class Change(NamedTuple):
    """One token that was replaced by another one."""

    at: int  # index of the token within the text
    before: str  # text of the old token
    after: str  # text of the new token


@dataclass(frozen=True)
class EditOutput:
    """Edited texts; lists and arrays have one entry per text.

    Attributes:
        texts: The edited texts.
        tokens: Ids of the edited texts, without the prompt.
        changes: Tokens that changed, in the order of the text.
        forwards: int [B], denoising passes of each row (NFE).
        seconds: Wall time of decoding, compilation included.
    """

    texts: list[str]
    tokens: list[np.ndarray] = field(repr=False)
    changes: list[list[Change]]
    forwards: np.ndarray
    seconds: float

    @property
    def text(self) -> str:
        """The first edited text."""
        return self.texts[0]


def edit(
    lm: LM,
    text: str | Ids | Sequence[str | Ids],
    *,
    prompt: Prompts | None = None,
    spans: Sequence[Span] | Sequence[Sequence[Span]] | None = None,
    seed: Seeds = 0,
    sampler: SamplerLike | None = None,
    plan: Plan | None = None,
    temperature: Param | Sequence[float] | None = None,
    mesh: Mesh | None = None,
) -> EditOutput:
    """Edits a text, or a list of texts, keeping its number of tokens.

    The text is treated as a finished answer: as in training, end-of-text tokens fill its last block. The model sees
    these tokens, and they never change.

    Args:
        lm: A diffusion model.
        text: A text, ids (a list or an array), or a list of these; a 2-D array is a list of ids. Every token may
            change, unless `spans` are given. Mask ids among the ids are filled in.
        prompt: The context before the text, which never changes: a text, a conversation or ids. With a list of texts,
            one prompt for all, or a list. Give the question if the text is the answer to one, as in training.
        spans: The parts to rewrite; the rest is kept. A span is (start, end) in characters or a piece of the text, and
            for ids (start, end) in tokens. With a list of texts, a list of span lists. Spans start from noise and keep
            their number of tokens ("syz" may be three tokens where "sys" is one); `infill` with an open `Hole()` tries
            other lengths. None: editing starts from the text itself, and the rule replaces tokens that the model finds
            improbable.
        seed: Text i uses the seed `seed + i`; or a list with one seed per text; or keys, as in `sample`.
        sampler: A rule or a `Sampler`. None, with spans: the default of the model. None, without spans:
            `rules.blind_editing()`, which judges each token by a prediction that does not see this token, and so needs
            no training on wrong tokens. Models with shifted logits have no such predictions and use
            `rules.editing()`. Models trained on uniform noise always use `rules.entropy_bound()`, which redraws
            uncertain tokens.
        plan: Block length, steps and cache reuse, as in `sample`. A text longer than a block is edited block by block.
        temperature: Sampling temperature of tokens, one number or one per text. 0: argmax. None: that of the rule.
        mesh: Mesh over whose `data` axis the rows are sharded.

    Returns:
        The edited texts, and the tokens that changed.

    Raises:
        ValueError: Names the argument that does not fit, before any compute.

    Example:
        >>> mj.edit(lm, "1243\\n4312\\n3421\\n2124", prompt=[{"role": "user", "content": "0200\\n4302\\n3401\\n0004"}])
    """
    check_lm(lm)
    if lm.model.config.autoregressive:
        allowed = "a diffusion model: only its tokens see both sides"
        raise refuse("lm", f"{lm.name}, an autoregressive model", allowed)
    request = Request(
        seed=seed,
        sampler=sampler,
        plan=Plan() if plan is None else plan,
        temperature=temperature,
        mesh=mesh,
        infilling=True,
    ).checked()
    encoded, single = encode_prompts(lm, text, begin=False, name="text")
    texts: list[Any] = [text] if single else list(text)
    for i, one in enumerate(encoded):
        if one.chat:
            raise refuse(f"text[{i}]", texts[i], "a text, or ids")
        texts[i] = texts[i] if isinstance(texts[i], str) else np.asarray(one.ids, np.int32)
    edited = [EncodedText(np.asarray(one.ids, np.int32), None) for one in encoded]
    if spans is not None:
        pairs = zip(texts, _span_lists(spans, single, len(texts)), strict=True)
        edited = [_encode_spans(lm, one, chosen) for one, chosen in pairs]
    if prompt is None:
        prompts = [list(lm.tokenizer.begin) if isinstance(one, str) else [] for one in texts]
    else:
        prompts = prompt_rows(lm, prompt, len(texts), row="text")
    began = time.perf_counter()
    rows = _rows(lm, edited, prompts, request.plan, row_seeds(seed, len(texts), each="text"))
    session = start(lm, _with_sampler(lm, request, spans)._replace(rows=rows))
    session, _, _ = advance(lm, session, None)
    check_nan(session)
    return _collect(lm, session, edited, prompts, began)


class EncodedText(NamedTuple):
    """One text as ids, with the tokens to rewrite."""

    ids: np.ndarray  # int [t]
    # bool [t], tokens that start as noise; None: editing starts from the text itself
    noised: np.ndarray | None


def _with_sampler(lm: LM, request: Request, spans: Any) -> Request:
    """Sets the default sampler if the request has none; refuses rules that change the number of tokens."""
    if request.sampler is None:
        if spans is not None and lm.corruption.mask is not None:
            return request._replace(sampler=default_sampler(lm, request.temperature), temperature=None)
        return request._replace(sampler=default_editor(lm))
    rule = check_sampler(request.sampler).rule
    if rule.variable_length and rule.name != "levenshtein":  # levenshtein restores the length of each run
        raise refuse("sampler.rule", rule.name, "a rule that keeps the number of tokens")
    return request


def _span_lists(spans: Any, single: bool, count: int) -> list[Any]:
    """Returns one list of spans per text."""
    if isinstance(spans, str) or not isinstance(spans, Sequence):
        raise refuse("spans", spans, "a list of (start, end) or pieces of the text, or None")
    if single:
        return [spans]
    if len(spans) != count:
        raise refuse("spans", f"{len(spans)} lists", f"{count}, one for each text")
    return list(spans)


def _encode_spans(lm: LM, text: Any, spans: Any) -> EncodedText:
    """Encodes one text piece by piece, so that every span begins and ends at a token boundary."""
    if isinstance(spans, str) or not isinstance(spans, Sequence):
        raise refuse("spans", spans, "for each text a list of (start, end) or pieces of it")
    cuts = sorted(_span_range(text, span) for span in spans)
    if not cuts:
        raise refuse("spans", spans, "at least one span, or None")
    pieces, at = [], 0  # (text, whether it starts from noise)
    for start_, end in cuts:
        if start_ < at:
            raise refuse("spans", (start_, end), "spans that do not overlap")
        pieces += [(text[at:start_], False), (text[start_:end], True)]
        at = end
    if not isinstance(text, str):  # ids, whose spans are in tokens
        flags = [np.full(len(piece), inside) for piece, inside in [*pieces, (text[at:], False)]]
        return EncodedText(text, np.concatenate(flags))
    ids: list[int] = []
    noised: list[bool] = []
    for piece, inside in [*pieces, (text[at:], False)]:
        new = lm.tokenizer.encode(piece) if piece else []
        ids += new
        noised += [inside] * len(new)
    return EncodedText(np.asarray(ids, np.int32), np.asarray(noised))


def _span_range(text: str, span: Any) -> tuple[int, int]:
    """Converts a span to (start, end), in characters of a text or in tokens of ids."""
    is_text = isinstance(text, str)
    if isinstance(span, str) and is_text:
        count = text.count(span)
        if not span or count != 1:
            found = f"the text holds it {count} times" if span else "it is empty"
            raise ValueError(f"spans is {span!r}: {found}; a span must be a piece that it holds once")
        return text.index(span), text.index(span) + len(span)
    pair = isinstance(span, Sequence) and len(span) == 2 and not isinstance(span, str)
    if not pair or not all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in span):
        pieces = "(start, end) in characters, or a piece of the text"
        raise refuse(
            "spans", span, pieces if is_text else "(start, end) in tokens, for a text that is given as ids"
        )
    first, last = int(span[0]), int(span[1])
    if not 0 <= first < last <= len(text):
        unit = "characters" if is_text else "tokens"
        raise refuse("spans", (first, last), f"0 <= start < end <= {len(text)}, the text's {unit}")
    return first, last


def _rows(
    lm: LM, texts: Sequence[EncodedText], prompts: Sequence[list[int]], plan: Plan, seeds: np.ndarray | Key
) -> Rows:
    """Makes the rows [prompt, text, end-of-text tokens], in which all tokens are given except those that may change."""
    committed = np.array([len(ids) for ids in prompts])
    text_end = committed + [len(text.ids) for text in texts]
    context = lm.model.config.context
    for i, size in enumerate(text_end):
        if size > context:
            allowed = f"at most the model's context of {context}"
            raise refuse(f"text[{i}] and its prompt", f"{size} tokens", allowed)
    # End-of-text tokens fill the last canvas, as `Model.layout` does in training. The model has never seen a canvas
    # that ends with the text, and its predictions on one are poor.
    causal_encoder = lm.model.config.pattern == "causal_encoder"
    block = (causal_encoder and plan.block) or lm.model.config.block
    # In a causal-encoder model, canvases begin after the prompt and are as long as the plan's block. In other models
    # blocks count from the start of the row.
    behind = text_end - committed if causal_encoder else text_end
    eos = lm.model.config.eos
    # A model without an end-of-text id, or whose block is the whole context, gets no such tokens.
    end = text_end if eos < 0 or block >= context else np.minimum(context, text_end + -behind % block)
    tokens = np.full((len(texts), int(end.max())), max(eos, 0), np.int32)
    given, draft = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, bool)
    for i, (text, ids) in enumerate(zip(texts, prompts, strict=True)):
        # Tokens to rewrite are neither given nor drafts: they start as noise.
        inside = slice(committed[i], text_end[i])
        tokens[i, : text_end[i]] = [*ids, *text.ids]
        given[i, : committed[i]] = given[i, text_end[i] : end[i]] = True
        given[i, inside] = False if text.noised is None else ~text.noised
        draft[i, inside] = text.noised is None
    return Rows(tokens, given, committed, end, seeds, draft=draft)


def _collect(
    lm: LM, session: Session, texts: Sequence[EncodedText], prompts: Sequence[list[int]], began: float
) -> EditOutput:
    """Extracts the edited texts from the state of a finished session."""
    tokens, nfe = jax.device_get((session.state.tokens, session.state.nfe))
    rows = enumerate(zip(texts, prompts, strict=True))
    edited = [tokens[i, len(ids) : len(ids) + len(text.ids)] for i, (text, ids) in rows]
    show = lambda token: lm.tokenizer.decode([int(token)])
    changes = [
        [Change(int(i), show(text.ids[i]), show(new[i])) for i in np.flatnonzero(text.ids != new)]
        for text, new in zip(texts, edited, strict=True)
    ]
    decoded = [lm.tokenizer.decode(ids.tolist()) for ids in edited]
    return EditOutput(decoded, edited, changes, nfe[: session.rows], time.perf_counter() - began)
