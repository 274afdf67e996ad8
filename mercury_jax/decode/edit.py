"""Editing: `mj.edit` refines a text in place, all chosen tokens at once.

A row consists of the prompt, the text, and end-of-text tokens that complete the last canvas. Spans to rewrite start
from noise; without spans, editing starts from the text itself, and the rule replaces tokens.
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
from mercury_jax.decode import rules
from mercury_jax.decode.defaults import default_sampler
from mercury_jax.decode.inputs import Ids, Prompts, Seeds, check_lm, encode_prompts, prompt_rows, row_seeds
from mercury_jax.decode.request import Request, start
from mercury_jax.decode.sampler import Param, SamplerLike, check_sampler
from mercury_jax.decode.session import Session, advance, check_nan
from mercury_jax.decode.state import Rows
from mercury_jax.types import LM, Key

Span: TypeAlias = tuple[int, int] | str


class Change(NamedTuple):
    """One token that another one replaced."""

    at: int  # index of the token within the text
    before: str
    after: str


@dataclass(frozen=True)
class EditOutput:
    """Edited texts; lists have one entry per text."""

    texts: list[str]
    tokens: list[np.ndarray] = field(repr=False)
    changes: list[list[Change]]
    forwards: np.ndarray  # forward passes of each row (NFE)
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

    A text is edited as a finished answer: as in training, end-of-text tokens complete its last canvas. The model sees
    these tokens, and they never change.

    Args:
        lm: A diffusion model.
        text: A text, ids (a list or an array), or a list of these; a 2-D array is a list of rows of ids. Without
            `spans` every token may change. Masks among the ids are filled in.
        prompt: The tokens before the text, which never change: a text, a conversation or ids; for a list of texts, one
            for all of them or a list. A text that answers something needs it as its prompt, as in training.
        spans: The parts of the text to rewrite; everything else is kept. A list of (start, end) in characters, or of
            substrings that occur once; for ids, (start, end) in tokens. For a list of texts, a list of such lists.
            Spans start from noise and keep their number of tokens, not of characters ("syz" may be three tokens where
            "sys" is one); `infill` with an open `Hole()` tries other lengths. None: editing starts from the text
            itself, and the rule replaces tokens that the model would not have written.
        seed: Text i draws from seed + i; or a list with one seed per text; or keys, as in `sample`.
        sampler: A rule or a `Sampler`. None depends on the model and on `spans`. Models trained on uniform noise:
            `rules.entropy_bound()`, which redraws uncertain tokens. Otherwise, with spans: the default of the model;
            without: `rules.blind_editing()`, which judges each token by its leave-one-out prediction and so needs no
            training on wrong tokens, or `rules.editing()` if the model has no such predictions (shifted logits).
        plan: Block, steps and cache reuse, as in `sample`. A text longer than a block is edited block by block.
        temperature: Temperature of drawn tokens, one number or one per text (None: the rule's default; 0: argmax).
        mesh: Shard the rows over its `data` axis.

    Returns:
        The edited texts, and each token that changed.

    Raises:
        ValueError: Before any compute, naming the argument that does not fit.

    Example:
        >>> mj.edit(lm, "1243\\n4312\\n3421\\n2124", prompt=[{"role": "user", "content": "0200\\n4302\\n3401\\n0004"}])
    """
    check_lm(lm)
    if lm.model.config.autoregressive:
        allowed = "a diffusion model: only its tokens see both sides"
        raise refuse("lm", f"{lm.name}, an autoregressive model", allowed)
    request = Request(
        seed=seed, sampler=sampler, plan=plan, temperature=temperature, mesh=mesh, infilling=True
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
    """A text as ids, and which of them start from noise."""

    ids: np.ndarray  # int [N]
    noised: np.ndarray | None  # bool [N]; None: editing starts from the text itself


def _with_sampler(lm: LM, request: Request, spans: Any) -> Request:
    """Adds the default sampler if the request has none; refuses a rule that would change the number of tokens."""
    if request.sampler is None:
        if lm.corruption.mask is None:
            return request._replace(sampler=rules.entropy_bound())
        if spans is not None:
            return request._replace(sampler=default_sampler(lm, request.temperature), temperature=None)
        blind = lm.model.leave_one_out and lm.model.config.alignment != "shifted"
        return request._replace(sampler=rules.blind_editing() if blind else rules.editing())
    rule = check_sampler(request.sampler).rule
    if rule.variable_length and rule.name != "levenshtein":  # which restores the length of each run
        raise refuse("sampler.rule", rule.name, "a rule that keeps the number of tokens")
    return request


def _span_lists(spans: Any, single: bool, count: int) -> list[Any]:
    """Checks `spans` and returns one list of spans per text."""
    if isinstance(spans, str) or not isinstance(spans, Sequence):
        raise refuse("spans", spans, "a list of (start, end) or pieces of the text, or None")
    if single:
        return [spans]
    if len(spans) != count:
        raise refuse("spans", f"{len(spans)} lists", f"{count}, one for each text")
    return list(spans)


def _encode_spans(lm: LM, text: Any, spans: Any) -> EncodedText:
    """Encodes one text with spans that start from noise.

    The pieces between the ends of spans are encoded one by one, so that no token crosses the end of a span.
    """
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
    """Converts a span to (start, end), in characters for a text and in tokens for ids."""
    is_text = isinstance(text, str)
    if isinstance(span, str) and is_text:
        count = text.count(span)
        if not span or count != 1:
            raise refuse("spans", span, f"a piece that the text holds once; it holds it {count} times")
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
    """Builds the rows of prompt, text and end-of-text tokens. Tokens that may change are not `given`.

    Without spans the text is a `draft`: its tokens are on the canvas from the first step.
    """
    committed = np.array([len(ids) for ids in prompts])
    text_end = committed + [len(text.ids) for text in texts]
    context = lm.model.config.context
    for i, size in enumerate(text_end):
        if size > context:
            allowed = f"at most the model's context of {context}"
            raise refuse(f"text[{i}] and its prompt", f"{size} tokens", allowed)
    # End-of-text tokens complete the last canvas, as `Model.layout` does in training. The model has never seen a canvas
    # that ends with the text, and predicts it badly.
    causal_encoder = lm.model.config.pattern == "causal_encoder"
    block = (causal_encoder and plan.block) or lm.model.config.block
    # The canvases of a causal encoder begin after the prompt, and are as wide as the plan's block.
    behind = text_end - committed if causal_encoder else text_end
    eos = lm.model.config.eos
    # Without an end-of-text token, or without blocks, the row ends with the text.
    end = text_end if eos < 0 or block >= context else np.minimum(context, text_end + -behind % block)
    tokens = np.full((len(texts), int(end.max())), max(eos, 0), np.int32)
    given, draft = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, bool)
    for i, (text, ids) in enumerate(zip(texts, prompts, strict=True)):
        inside = slice(committed[i], text_end[i])
        tokens[i, : text_end[i]] = [*ids, *text.ids]
        given[i, : committed[i]] = given[i, text_end[i] : end[i]] = True
        given[i, inside] = False if text.noised is None else ~text.noised
        draft[i, inside] = text.noised is None
    return Rows(tokens, given, committed, end, seeds, draft=draft)


def _collect(
    lm: LM, session: Session, texts: Sequence[EncodedText], prompts: Sequence[list[int]], began: float
) -> EditOutput:
    """Reads the edited texts from the state of a finished session."""
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
