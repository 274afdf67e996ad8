"""edit(): refine a text in place, all chosen tokens at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from mercury_jax.config import Plan, refuse
from mercury_jax.decode import launch, rules
from mercury_jax.decode.prompts import check_seed, normalise
from mercury_jax.types import LM

Span = tuple[int, int] | str


class Change(NamedTuple):
    """One token that another replaced."""

    at: int  # index of the token within the text
    before: str
    after: str


@dataclass(frozen=True)
class EditOutput:
    """Edited texts; lists have one entry a text."""

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
    text: Any,
    *,
    prompt: Any = None,
    spans: Sequence[Any] | None = None,
    seed: int = 0,
    sampler: Any = None,
    plan: Plan | None = None,
    temperature: Any = None,
    mesh: Mesh | None = None,
) -> EditOutput:
    """Edit a text, or a list of texts, keeping its number of tokens.

    text: a text, ids, or a list of these; every token of it may change, unless spans say otherwise.
    prompt: what stands before it and never changes (a text, a conversation, ids; for a list of texts,
        one for all or a list). spans: what to write anew, the rest being held: (start, end) in
        characters, or a piece of the text; for a list of texts, a list of such lists. They start from
        noise. None: the model chooses. It starts from the text itself, and the rule replaces what the
        model would not have written: by default `rules.blind_editing()`, which asks for each token with
        that token left out; uniform diffusion redraws what it is unsure of.
    sampler, plan, temperature, seed, mesh: as of `sample`. Longer texts are edited block by block.
    Raises ValueError, before any compute, naming the argument that does not fit.
    """
    texts, single = _texts(text)
    rows = [
        _row(lm, t, s, i)
        for i, (t, s) in enumerate(zip(texts, _spans(spans, single, len(texts)), strict=True))
    ]
    before = _prompts(lm, prompt, texts)
    began = time.perf_counter()
    chosen = sampler if sampler is not None else _default(lm, spans)
    job = launch.prepare(
        lm, _request(lm, rows, before, check_seed(seed)), chosen, plan or Plan(), temperature=temperature,
        infilling=True, mesh=mesh,
    )  # fmt: skip
    job, _, _ = launch.advance(lm, job, None)
    launch.refuse_broken(job)
    return _collect(lm, job, rows, before, began)


class Row(NamedTuple):
    """One text as ids, and which of them start from noise; None: the model chooses."""

    ids: np.ndarray
    noised: np.ndarray | None


def _default(lm: LM, spans: Any) -> Any:
    if lm.corruption.mask is None:
        return rules.entropy_bound()
    return rules.blind_editing() if spans is None else rules.threshold()


def _texts(text: Any) -> tuple[list[Any], bool]:
    if isinstance(text, str | np.ndarray) or (
        isinstance(text, Sequence) and len(text) > 0 and isinstance(text[0], int | np.integer)
    ):
        return [text], True
    if not isinstance(text, Sequence) or len(text) == 0:
        raise refuse("text", text, "a text, ids, or a non-empty list of these")
    return list(text), False


def _spans(spans: Any, single: bool, count: int) -> list[Any]:
    if spans is None:
        return [None] * count
    if single:
        return [spans]
    if len(spans) != count:
        raise refuse("spans", f"{len(spans)} lists", f"{count}, one for each text")
    return list(spans)


def _prompts(lm: LM, prompt: Any, texts: Sequence[Any]) -> list[list[int]]:
    count = len(texts)
    if prompt is None:
        return [list(lm.tokenizer.begin) if isinstance(text, str) else [] for text in texts]
    prompts, single = normalise(lm, prompt)
    if not single and len(prompts) != count:
        raise refuse("prompt", f"{len(prompts)} prompts", f"one, or {count}: one for each text")
    ids = [list(p.ids) for p in prompts]
    return ids * count if single else ids


def _row(lm: LM, text: Any, spans: Any, index: int) -> Row:
    name = f"text[{index}]"
    if not isinstance(text, str):
        if spans is not None:
            raise refuse("spans", spans, "None for a text that is given as ids")
        return Row(np.asarray(normalise(lm, text)[0][0].ids, np.int32), None)
    if not text:
        raise refuse(name, text, "a text of at least one character")
    if spans is None:
        return Row(np.asarray(lm.tokenizer.encode(text), np.int32), None)
    cuts = sorted(_place(text, span) for span in spans)
    if not cuts:
        raise refuse("spans", spans, "at least one span, or None")
    pieces, noised, at = [], [], 0
    for start, end in cuts:
        if start < at:
            raise refuse("spans", (start, end), "spans that do not overlap")
        for piece, inside in ((text[at:start], False), (text[start:end], True)):
            ids = lm.tokenizer.encode(piece) if piece else []
            pieces, noised = pieces + list(ids), noised + [inside] * len(ids)
        at = end
    rest = lm.tokenizer.encode(text[at:]) if text[at:] else []
    return Row(np.asarray([*pieces, *rest], np.int32), np.asarray([*noised, *[False] * len(rest)]))


def _place(text: str, span: Any) -> tuple[int, int]:
    """A span as (start, end) in characters."""
    if isinstance(span, str):
        if not span or text.count(span) != 1:
            raise refuse(
                "spans", span, f"a piece that the text holds once; it holds it {text.count(span)} times"
            )
        return text.index(span), text.index(span) + len(span)
    if (
        not isinstance(span, Sequence)
        or len(span) != 2
        or not all(isinstance(i, int | np.integer) for i in span)
    ):
        raise refuse("spans", span, "(start, end) in characters, or a piece of the text")
    start, end = int(span[0]), int(span[1])
    if not 0 <= start < end <= len(text):
        raise refuse("spans", (start, end), f"0 <= start < end <= {len(text)}, the text's characters")
    return start, end


def _request(lm: LM, rows: Sequence[Row], before: Sequence[list[int]], seed: int) -> launch.Request:
    known = np.array([len(b) for b in before])
    total = known + [len(r.ids) for r in rows]
    context = lm.model.config.context
    for i, size in enumerate(total):
        if size > context:
            raise refuse(
                f"text[{i}] and its prompt", f"{size} tokens", f"at most the model's context of {context}"
            )
    text = np.zeros((len(rows), int(total.max())), np.int32)
    given, draft = np.zeros(text.shape, bool), np.zeros(text.shape, bool)
    for i, (row, ids) in enumerate(zip(rows, before, strict=True)):
        text[i, : total[i]] = [*ids, *row.ids]
        given[i, : known[i]] = True
        given[i, known[i] : total[i]] = False if row.noised is None else ~row.noised
        draft[i, known[i] : total[i]] = row.noised is None
    seeds = (seed + np.arange(len(rows))) % 2**31
    return launch.Request(text, given, known, total, seeds, draft=draft)


def _collect(
    lm: LM, job: launch.Job, rows: Sequence[Row], before: Sequence[list[int]], began: float
) -> EditOutput:
    text, forwards = jax.device_get((job.state.text, job.state.forwards))
    tokens = [
        text[i, len(b) : len(b) + len(r.ids)] for i, (r, b) in enumerate(zip(rows, before, strict=True))
    ]
    show = lambda token: lm.tokenizer.decode([int(token)])
    changes = [
        [Change(int(i), show(row.ids[i]), show(new[i])) for i in np.flatnonzero(row.ids != new)]
        for row, new in zip(rows, tokens, strict=True)
    ]
    texts = [lm.tokenizer.decode(t.tolist()) for t in tokens]
    return EditOutput(texts, tokens, changes, forwards[: job.rows], time.perf_counter() - began)
