"""JSON out of order: what a schema fixes is laid on one canvas at once, and typed holes are solved from both sides.

The gate of `constrained.py` commits from the left. Where every object has the same properties, all keys and punctuation
are known before the first pass, so the model sees them on both sides of each value. A hole is a list of JSON texts, one
of which it becomes (enum, boolean, integer), or a text whose end is where the model puts the quotation mark.

    pass 1    each hole at its largest size; the logits at its beginning choose the number of its tokens
    pass 2 .. the log-probability of each choice, summed over its tokens; the choices that are certain enough are
              written, and the most certain one in any case

Every choice is a value of the schema, so every answer is valid. `mj.sample` comes here with `mj.grammar.JSONCanvas`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mercury_jax.config import refuse
from mercury_jax.decode.grammar.complement import NOTES, plain_values
from mercury_jax.decode.grammar.spec import JSONCanvas, Place, check_bounds, grammar_error
from mercury_jax.decode.grammar.vocabulary import vocabulary_of
from mercury_jax.decode.logits import logits
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.types import LM

MOST_CHOICES = 1_024  # of one hole
MOST_TEXT = 64  # characters of a text
MOST_TOKENS = 8  # of a text
_WIDTH = 64  # canvases and prompts are padded to multiples of this, so that few shapes are compiled
_ALLOWED = (
    f"const, enum, boolean, null, an integer with bounds, a text of at most {MOST_TEXT} characters, an object whose "
    "properties are all required"
)

Ids: TypeAlias = tuple[int, ...]


class Choices(NamedTuple):
    """A hole that becomes one of several runs of tokens."""

    texts: tuple[Ids, ...]


class Letters(NamedTuple):
    """A hole for the inside of a text: of each number of tokens, from 0 on, the ids that may stand there.

    None where so many tokens cannot have as many characters as the schema demands.
    """

    ids: tuple[Ids | None, ...]


Part: TypeAlias = Ids | Choices | Letters


class Solved(NamedTuple):
    """Tokens of each row, its passes [B], and the passes of the slowest row."""

    tokens: list[np.ndarray]
    forwards: np.ndarray
    passes: int


class _Row(NamedTuple):
    """A canvas, and the holes that are open: where each begins, and what it may become."""

    canvas: np.ndarray
    holes: list[tuple[int, tuple[Ids, ...]]]


def solve_canvases(
    lm: LM,
    prompts: Sequence[Sequence[int]],
    spec: JSONCanvas,
    most: np.ndarray,
    temperature: float,
    seeds: np.ndarray,
) -> Solved:
    """Decodes one answer to each prompt.

    Args:
        prompts: Ids of each row.
        most: Largest number of tokens of each answer [B].
        temperature: Of the draw among the choices of a hole; 0: the most probable one.
        seeds: One per row, int [B].
    """
    mask = lm.corruption.mask
    if mask is None or lm.model.config.pattern not in ("bidirectional", "causal_encoder"):
        allowed = f"a JSON Schema: {lm.name} has no mask, or no canvas that it reads both ways"
        raise refuse("schema", "a JSONCanvas", allowed)
    parts = canvas_parts(lm.tokenizer, spec)
    largest = sum(map(_largest, parts))
    if largest > min(most):
        raise refuse("max_tokens", int(min(most)), f"at least {largest}: the largest answer of this canvas")
    if not 0 < spec.p <= 1:
        raise refuse("schema.p", spec.p, "a probability above 0")
    rngs = [np.random.default_rng(int(seed)) for seed in seeds]
    sizes = [[_largest(part) for part in parts if not _fixed(part)] for _ in prompts]
    rows = [_laid_out(parts, size, mask) for size in sizes]
    first = _log_probs(lm, prompts, [row.canvas for row in rows])
    quotes = [i for i, piece in enumerate(lm.tokenizer.pieces) if piece.startswith(b'"')]
    rows = [
        _laid_out(parts, _sizes(parts, row, log_p, quotes), mask)
        for row, log_p in zip(rows, first, strict=True)
    ]
    forwards, passes = np.ones(len(rows), int), 1
    while any(row.holes for row in rows):
        log_p = _log_probs(lm, prompts, [row.canvas for row in rows])
        passes += 1
        for i, row in enumerate(rows):
            if row.holes:
                forwards[i] = passes
                _fill(row, log_p[i], spec.p, temperature, rngs[i])
    return Solved([row.canvas for row in rows], forwards, passes)


def canvas_parts(tokenizer: AnyTokenizer, spec: JSONCanvas) -> list[Part]:
    """Divides the answers of a schema into literals and holes.

    Raises:
        GrammarError: Names the place of what has no fixed form.
    """
    check_bounds(spec.schema, spec.name)
    vocabulary = vocabulary_of(tokenizer)

    def ids(text: str) -> Ids:
        found = vocabulary.spell(list(text.encode()))
        if found is None:
            raise grammar_error(Place(spec.name), text, "texts that the tokenizer can write")
        return tuple(found)

    parts, text = list[Part](), ""
    for part in _pieces(spec.schema, Place(spec.name)):
        if isinstance(part, str):
            text += part
            continue
        parts.append(ids(text))
        text = ""
        parts.append(
            Choices(tuple(map(ids, part))) if isinstance(part, list) else _letters(vocabulary.pieces, *part)
        )
    return [*parts, ids(text)] if text else parts


def _letters(pieces: Sequence[bytes], least: int, most: int) -> Letters:
    """The hole of a text of `least` to `most` characters; its tokens have equal shares of these."""
    words = [(i, len(piece)) for i, piece in enumerate(pieces) if piece.isalnum() and piece.isascii()]
    found: list[Ids | None] = [None if least else ()]
    for size in range(1, min(most, MOST_TOKENS) + 1):
        fits = tuple(i for i, length in words if -(-least // size) <= length <= most // size)
        found.append(fits or None)
    if found.count(None) == len(found):
        allowed = f"lengths that a text of at most {MOST_TOKENS} tokens can have"
        raise grammar_error("schema", f"a text of {least} to {most} characters", allowed)
    return Letters(tuple(found))


def _pieces(schema: Any, where: Place) -> Iterator[str | list[str] | tuple[int, int]]:
    """Yields the literals of one schema, the texts that a hole may become, and (least, most) characters of a text."""
    schema = schema if isinstance(schema, Mapping) else {}
    said, kind = schema.keys() - NOTES - {"type"}, schema.get("type")
    values: Sequence[Any] | None = (
        {"boolean": (True, False), "null": (None,)}.get(str(kind)) if not said else None
    )
    if said in ({"const"}, {"enum"}):
        values = plain_values(schema)
    elif said == {"minimum", "maximum"} and kind == "integer":
        values = range(math.ceil(schema["minimum"]), math.floor(schema["maximum"]) + 1)
    if values and len(values) <= MOST_CHOICES:
        yield [json.dumps(value) for value in values]
    elif (
        kind == "string"
        and {"maxLength"} <= said <= {"maxLength", "minLength"}
        and schema["maxLength"] <= MOST_TEXT
    ):
        yield '"'
        yield int(schema.get("minLength", 0)), int(schema["maxLength"])
        yield '"'
    elif (
        kind == "object"
        and "properties" in said
        and said <= {"properties", "required", "additionalProperties"}
    ):
        names = schema["properties"]
        if set(names) != set(schema.get("required", ())):
            raise grammar_error(where / "required", schema.get("required"), "all properties, in a JSONCanvas")
        yield "{"
        for i, (name, inner) in enumerate(names.items()):
            yield f"{', ' if i else ''}{json.dumps(name)}: "
            yield from _pieces(inner, where / "properties" / name)
        yield "}"
    else:
        raise grammar_error(where, schema, f"in a JSONCanvas: {_ALLOWED}")


def _fixed(part: Part) -> bool:
    return not isinstance(part, Choices | Letters)


def _largest(part: Part) -> int:
    """Most tokens of a part."""
    if isinstance(part, Choices):
        return max(map(len, part.texts))
    return len(part.ids) - 1 if isinstance(part, Letters) else len(part)


def _laid_out(parts: Sequence[Part], sizes: Sequence[int], mask: int) -> _Row:
    """A canvas with holes of these sizes; a hole with one choice is none."""
    canvas, holes, left = list[int](), list[tuple[int, tuple[Ids, ...]]](), iter(sizes)
    for part in parts:
        if isinstance(part, Choices):
            size = next(left)
            texts = tuple(text for text in part.texts if len(text) == size)
            holes += [(len(canvas), texts)] if len(texts) > 1 else []
            canvas += [mask] * size if len(texts) != 1 else texts[0]
        elif isinstance(part, Letters):
            size = next(left)
            single = tuple((id,) for id in part.ids[size] or ())
            holes += [(len(canvas) + k, single) for k in range(size)]
            canvas += [mask] * size
        else:
            canvas += part
    return _Row(np.array(canvas, np.int32), holes)


def _sizes(parts: Sequence[Part], row: _Row, log_p: np.ndarray, quotes: list[int]) -> list[int]:
    """The number of tokens of each hole, by the first pass."""
    sizes, at = list[int](), 0
    for part in parts:
        if isinstance(part, Choices):
            mass: dict[int, float] = {}
            for text in part.texts:
                mass[len(text)] = mass.get(len(text), 0.0) + float(np.exp(log_p[at, text[0]]))
            sizes.append(max(mass, key=lambda size: mass[size]))
        elif isinstance(part, Letters):
            ends = np.exp(log_p[at : at + len(part.ids) - 1, quotes]).sum(
                1
            )  # that the text ends before each token
            share = np.append(ends, 1.0) * np.append(1.0, np.cumprod(1.0 - ends))
            sizes.append(
                max((n for n, ids in enumerate(part.ids) if ids is not None), key=lambda n: share[n])
            )
        at += _largest(part)
    return sizes


def _fill(row: _Row, log_p: np.ndarray, p: float, temperature: float, rng: np.random.Generator) -> None:
    """Writes the choices that are certain enough, and the most certain one in any case."""
    drawn = []
    for hole in row.holes:
        at, texts = hole
        ids = np.array(texts)  # [choices, tokens]
        score = log_p[at + np.arange(ids.shape[1]), ids].sum(1)
        share = np.exp(score - score.max())
        share /= share.sum()
        warm = np.exp((score - score.max()) / temperature) if temperature > 0 else share
        pick = int(rng.choice(len(ids), p=warm / warm.sum())) if temperature > 0 else int(score.argmax())
        drawn.append((float(share[pick]), hole, ids[pick]))
    best = max(drawn, key=lambda one: one[0])
    for share, hole, ids in drawn:
        if share >= p or hole is best[1]:
            row.canvas[hole[0] : hole[0] + len(ids)] = ids
            row.holes.remove(hole)


def _log_probs(lm: LM, prompts: Sequence[Sequence[int]], canvases: Sequence[np.ndarray]) -> np.ndarray:
    """Runs one pass over all canvases; behind its answer a canvas holds ends of text.

    Returns:
        Log-probabilities [B, L, V].
    """
    up = lambda size: -(-size // _WIDTH) * _WIDTH
    end = lm.tokenizer.ends[0]
    ids = np.full((len(canvases) + 1, up(max(map(len, canvases)))), end, np.int32)
    for row, canvas in zip(ids, canvases, strict=False):
        row[: len(canvas)] = canvas
    # One more row, whose prompt has the padded length.
    before = [list(map(int, prompt)) for prompt in prompts]
    padded = min(up(max(map(len, before))), lm.model.config.context - ids.shape[1])
    before.append(before[0][:1] * max(padded, max(map(len, before))))
    found = np.asarray(logits(lm, ids, prompt=before), np.float64)[:-1]
    found -= found.max(-1, keepdims=True)
    return found - np.log(np.exp(found).sum(-1, keepdims=True))
