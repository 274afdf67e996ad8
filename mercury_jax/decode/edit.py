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
from mercury_jax.decode import defaults, launch, rules
from mercury_jax.decode.arguments import check_lm, checked_mesh, checked_plan
from mercury_jax.decode.parts import checked_sampler
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

    A text is edited as a finished answer: as in training, end-of-text completes its last canvas up to the block. The
    model sees these tokens, and they never change.

    Args:
        lm: A diffusion model.
        text: A text, ids, or a list of these. Every token may change, unless `spans` say otherwise. Mask ids among the
            ids are filled in.
        prompt: What stands before the text and never changes: a text, a conversation or ids; for a list of texts, one
            for all or a list.
        spans: What to write anew, the rest being held: (start, end) in characters, or a piece of the text; for a list
            of texts, a list of such lists. Spans start from noise and keep their number of tokens ("syz" may be three
            where "sys" is one): `infill` with an open `Hole()` tries other lengths. A text that answers something
            needs it as `prompt`, as in training. None: editing starts from the text itself, and the rule replaces
            what the model would not have written.
        seed: Row i draws from `seed` + i.
        sampler: A rule or a `Sampler`. None: with spans the model's default; without, `rules.blind_editing()`, which
            judges each token with that token left out and so needs no training on wrong tokens. A model with shifted
            logits cannot be asked so and takes `rules.editing()`; one trained on uniform noise always takes
            `rules.entropy_bound()`, which redraws what it is unsure of.
        plan: Block, steps and cache reuse, as of `sample`. A text longer than a block is edited block by block.
        temperature: Of drawn tokens (None: the rule's own; 0: argmax).
        mesh: Spreads the rows over its `data` axis.

    Returns:
        The edited texts, and each token that changed.

    Raises:
        ValueError: Before any compute, naming the argument that does not fit.

    Example:
        >>> mj.edit(lm, "1243\\n4312\\n3421\\n2124", prompt=[{"role": "user", "content": "0200\\n4302\\n3401\\n0004"}])
    """
    check_lm(lm)
    if lm.model.config.autoregressive:
        raise refuse(
            "lm", f"{lm.name}, an autoregressive model", "a diffusion model: only its tokens see both sides"
        )
    plan, mesh = checked_plan(plan), checked_mesh(mesh)
    texts, single = _texts(text)
    rows = [
        _row(lm, t, s, i)
        for i, (t, s) in enumerate(zip(texts, _spans(spans, single, len(texts)), strict=True))
    ]
    before = _prompts(lm, prompt, texts)
    began = time.perf_counter()
    chosen = _sampler(lm, sampler, spans)
    job = launch.prepare(
        lm, _request(lm, rows, before, plan, check_seed(seed)), chosen, plan, temperature=temperature,
        infilling=True, mesh=mesh,
    )  # fmt: skip
    job, _, _ = launch.advance(lm, job, None)
    launch.refuse_broken(job)
    return _collect(lm, job, rows, before, began)


class Row(NamedTuple):
    """One text as ids, and which of them start from noise; None: the model chooses."""

    ids: np.ndarray
    noised: np.ndarray | None


def _sampler(lm: LM, sampler: Any, spans: Any) -> Any:
    """The sampler, or the default one; refuses a rule that would change the number of tokens."""
    if sampler is None:
        if lm.corruption.mask is None:
            return rules.entropy_bound()
        if spans is not None:
            return defaults.sampler(lm)
        return rules.editing() if lm.model.config.alignment == "shifted" else rules.blind_editing()
    rule = checked_sampler(sampler).rule
    if rule.grows and rule.name != "levenshtein":  # which fills each run up again
        raise refuse("sampler.rule", rule.name, "a rule that keeps the number of tokens")
    return sampler


def _texts(text: Any) -> tuple[list[Any], bool]:
    """(texts, whether one alone was given), each a text or checked by `_row` as ids."""
    if isinstance(text, jax.Array):
        text = np.asarray(text)
    one = lambda x: isinstance(x, int | float | np.integer | np.floating)
    if isinstance(text, np.ndarray) and text.ndim == 2:
        return list(text), False
    if isinstance(text, str | np.ndarray) or (isinstance(text, Sequence) and len(text) > 0 and one(text[0])):
        return [text], True
    if not isinstance(text, Sequence) or len(text) == 0:
        raise refuse("text", text, "a text, ids, or a non-empty list of these")
    return list(text), False


def _spans(spans: Any, single: bool, count: int) -> list[Any]:
    if spans is None:
        return [None] * count
    if isinstance(spans, str) or not isinstance(spans, Sequence):
        raise refuse("spans", spans, "a list of (start, end) or pieces of the text, or None")
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
        ids, one = normalise(lm, text, name=name)
        if not one or ids[0].chat:
            raise refuse(name, text, "a text, or ids")
        return Row(np.asarray(ids[0].ids, np.int32), None)
    if not text:
        raise refuse(name, text, "a text of at least one character")
    if spans is None:
        return Row(np.asarray(lm.tokenizer.encode(text), np.int32), None)
    if isinstance(spans, str) or not isinstance(spans, Sequence):
        raise refuse("spans", spans, "for each text a list of (start, end) or pieces of it")
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


def _request(
    lm: LM, rows: Sequence[Row], before: Sequence[list[int]], plan: Plan, seed: int
) -> launch.Request:
    """Rows of prompt, text and fill; prompt, fill and what lies outside of the spans are given."""
    known = np.array([len(b) for b in before])
    said = known + [len(r.ids) for r in rows]
    context = lm.model.config.context
    for i, size in enumerate(said):
        if size > context:
            raise refuse(
                f"text[{i}] and its prompt", f"{size} tokens", f"at most the model's context of {context}"
            )
    total = np.array([min(context, n + _fill(lm, k, n, plan)) for k, n in zip(known, said, strict=True)])
    text = np.full((len(rows), int(total.max())), lm.model.config.eos, np.int32)
    given, draft = np.zeros(text.shape, bool), np.zeros(text.shape, bool)
    for i, (row, ids) in enumerate(zip(rows, before, strict=True)):
        text[i, : said[i]] = [*ids, *row.ids]
        given[i, : known[i]] = given[i, said[i] : total[i]] = True
        given[i, known[i] : said[i]] = False if row.noised is None else ~row.noised
        draft[i, known[i] : said[i]] = row.noised is None
    seeds = (seed + np.arange(len(rows))) % 2**31
    return launch.Request(text, given, known, total, seeds, draft=draft)


def _fill(lm: LM, known: int, said: int, plan: Plan) -> int:
    """How many end-of-text tokens complete the last canvas of a row of `said` tokens, `known` of them the prompt.

    It is `masks.layout`'s fill: an answer in training always fills its canvas, so a canvas that ends with the text is
    one that the model has never seen, and reads badly.
    """
    config = lm.model.config
    if (
        config.pattern == "causal_encoder"
    ):  # canvases begin behind the prompt, and are as wide as the plan's block
        return -(said - known) % (plan.block or config.block)
    return -said % config.block


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
