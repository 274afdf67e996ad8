"""From a source to its endless stream of laid-out examples, each a pure function of (seed, index).

Index i of a source with N examples an epoch is number i mod N of epoch i // N, in an order and with
cuts drawn for that epoch; so to resume is to remember i.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mercury_jax.config import refuse
from mercury_jax.train.data import read
from mercury_jax.train.data.sources import Chat, Generated, Source, Split, Text
from mercury_jax.types import LaidOutDocument

Layout = Callable[[np.ndarray, int, int | None], LaidOutDocument]


class Example(NamedTuple):
    """ids [n], the first `prompt` of them never noised; `fill`: the text ends here, complete it with eos."""

    ids: np.ndarray
    prompt: int
    fill: bool


class Stream(NamedTuple):
    """at(index) -> Laid for any index >= 0; size: examples an epoch, 0 where they never repeat."""

    at: Callable[[int], LaidOutDocument]
    size: int


class Setting(NamedTuple):
    """What all sources of a pipeline share, and the seed of this one."""

    tokenizer: Any
    layout: Layout
    row: int  # positions of a packed row
    seed: tuple[int, ...]
    split: Split


def stream(source: Source, setting: Setting) -> Stream | None:
    """Open a source; None where it has nothing on the wanted side (test). All refusals happen here."""
    if isinstance(source, Generated):
        return _generated(source, setting)
    if isinstance(source, Chat):
        return _chat(source, setting)
    return _text(source, setting)


def lay(setting: Setting, example: Example, place: str) -> LaidOutDocument:
    """The example as the model sees it; ValueError naming `place` when it does not fit a row."""
    laid = setting.layout(example.ids, example.prompt, setting.tokenizer.eos if example.fill else None)
    if len(laid.tokens) > setting.row:
        needs = f"{len(laid.tokens)} positions once laid out"
        raise refuse("row", setting.row, f"{needs} or more, for {place} ({len(example.ids)} tokens)")
    return laid


def block_of(layout: Layout) -> int:
    """The canvas width of a layout: what one token is completed to."""
    return int(layout(np.zeros(1, np.int32), 0, 0).editable.sum())


# --- problems with verifiable answers


def problems(source: Generated, seed: tuple[int, ...], split: Split) -> Callable[[int], Any]:
    """index -> Problem; ValueError for a generator that does not exist."""
    from mercury_jax.train import generators

    if source.name not in generators.ALL:
        raise refuse("generated", source.name, ", ".join(sorted(generators.ALL)))
    generator = generators.ALL[source.name]

    def at(index: int) -> Any:
        index = index if source.distinct is None or split == "test" else index % source.distinct
        return generators.draw(generator, np.random.default_rng((*seed, index)), split)

    return at


def _generated(source: Generated, setting: Setting) -> Stream:
    problem = problems(source, setting.seed, setting.split)

    def at(index: int) -> LaidOutDocument:
        p = problem(index)
        thinking = p.thinking if source.thinking else None
        rng = np.random.default_rng((*setting.seed, 2, index))
        prefilled = setting.split == "train" and rng.random() < source.prefill
        if prefilled and thinking is None:
            thinking = ""
        prompt, response = setting.tokenizer.example(p.input, p.output, thinking)
        given = len(prompt) + (_prefill(setting.tokenizer, response, rng) if prefilled else 0)
        return lay(
            setting,
            Example(np.array(prompt + response, np.int32), given, True),
            f"a problem of {source.name}",
        )

    at(0)  # a row too short for this generator is refused now, not hours later
    return Stream(at, 0)


def _prefill(tokenizer: Any, response: list[int], rng: np.random.Generator) -> int:
    """Tokens of a response that its prompt gives: the opening of the thinking, or all up to its close."""
    marks = tokenizer.thinking
    if marks is None:
        raise refuse("prefill", "a share above 0", "0: this tokenizer has no marks of thinking")
    return len(marks.opening) if rng.random() < 0.5 else response.index(marks.close) + 1


# --- conversations


def _chat(source: Chat, setting: Setting) -> Stream | None:
    found = read.conversations(source, setting.split)
    laid = [lay(setting, _conversation(setting.tokenizer, place, m), place) for place, m in found]
    order = _orders(setting.seed, len(laid))
    return Stream(lambda i: laid[order(i // len(laid))[i % len(laid)]], len(laid)) if laid else None


def _conversation(tok: Any, place: str, messages: read.Messages) -> Example:
    try:
        prompt = tok.render(messages[:-1])
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    ids = [*prompt, *tok.encode(messages[-1]["content"]), tok.eos]
    return Example(np.array(ids, np.int32), len(prompt), True)


def _orders(seed: tuple[int, ...], n: int) -> Callable[[int], np.ndarray]:
    """epoch -> a permutation of n; the last two are kept."""
    return lru_cache(2)(lambda epoch: np.random.default_rng((*seed, epoch)).permutation(n))


# --- running text


class Pieces(NamedTuple):
    """One epoch's cuts [N] into the tokens of all documents, in the order of training."""

    start: np.ndarray
    stop: np.ndarray
    final: np.ndarray  # bool: the document ends here


def _text(source: Text, setting: Setting) -> Stream | None:
    chunk = _chunk(source, setting)
    found = read.documents(source, setting.split)
    if not found:
        return None
    tok = setting.tokenizer
    # All tokens stay in memory, 4 bytes each: epochs can then cut anywhere.
    docs = [np.array([*tok.encode(text), tok.eos], np.int32) for _, text in found]
    tokens, lengths = np.concatenate(docs), np.array([len(d) for d in docs])
    block = block_of(setting.layout)
    epoch = lru_cache(2)(lambda e: cut(lengths, chunk, np.random.default_rng((*setting.seed, 0, e))))
    size = len(epoch(0).start)

    def at(index: int) -> LaidOutDocument:
        rng = np.random.default_rng((*setting.seed, 1, index))
        pieces, k = epoch(index // size), index % size
        ids = tokens[pieces.start[k] : pieces.stop[k]]
        # Any prompt length, so that canvases start anywhere in a line and not only at multiples of a block.
        prompt = int(rng.integers(min(block, len(ids))))
        laid = _whole(setting, Example(ids, prompt, bool(pieces.final[k])), source.where)
        infill = setting.split == "train" and rng.random() < source.infill
        return spans(laid, rng) if infill else laid

    return Stream(at, size)


def cut(lengths: np.ndarray, chunk: int, rng: np.random.Generator) -> Pieces:
    """Cut documents of these lengths, one behind the other, into pieces of at most `chunk`, and shuffle them.

    A document longer than `chunk` becomes a random first piece, whole chunks, and the rest. How many
    pieces there are depends on the lengths alone, so that every epoch has the same size.
    """
    long, rest = lengths > chunk, lengths % chunk
    # The two ragged ends share `ends` tokens: at most 2 chunk, and at least 2 so that neither is empty.
    ends = np.where(2 * rest < chunk, chunk + rest, rest)
    ends = np.where(ends < 2, ends + chunk, ends)
    first = rng.integers(np.maximum(1, ends - chunk), np.minimum(chunk, ends - 1), endpoint=True)
    count = np.where(long, (lengths - ends) // chunk + 2, 1)
    first = np.where(long, first, lengths)

    doc = np.repeat(np.arange(len(lengths)), count)
    nth = np.arange(len(doc)) - np.repeat(np.cumsum(count) - count, count)
    base = np.cumsum(lengths) - lengths
    start = np.where(nth == 0, 0, first[doc] + (nth - 1) * chunk)
    stop = np.minimum(first[doc] + nth * chunk, lengths[doc])
    order = rng.permutation(len(doc))
    return Pieces(*(x[order] for x in (base[doc] + start, base[doc] + stop, stop == lengths[doc])))


def _whole(setting: Setting, example: Example, place: str) -> LaidOutDocument:
    """Laid out in whole canvases, as sampling has no short ones.

    A piece that does not end its text, or that the row cannot hold when filled, loses up to block - 1
    tokens at its end; other epochs cut elsewhere.
    """
    ids, prompt, eos = example.ids, example.prompt, setting.tokenizer.eos
    filled = setting.layout(ids, prompt, eos)
    added = _end(filled) - len(ids)
    if (example.fill or not added) and len(filled.tokens) <= setting.row:
        return filled
    kept = _trimmed(setting.layout, len(ids), prompt)
    return lay(setting, Example(ids[:kept], prompt, False), place)


def _end(laid: LaidOutDocument) -> int:
    """Tokens of the document, completion included."""
    return int(laid.positions.max()) + 1


def _trimmed(layout: Layout, n: int, prompt: int) -> int:
    """The most of n tokens that end with a whole canvas; all of them where not one canvas is whole."""
    block = block_of(layout)
    added = _end(layout(np.zeros(n, np.int32), prompt, 0)) - n
    kept = n - (block - added) if added else n
    return kept if kept > prompt else n


def _chunk(source: Text, setting: Setting) -> int:
    """The longest piece that a row holds at any prompt length, or the source's own if that is shorter."""
    block, layout = block_of(setting.layout), setting.layout

    def kept(n: int) -> list[int]:
        return [_trimmed(layout, n, p) for p in range(min(block, n))]

    def needs(n: int) -> int:
        return max(len(layout(np.zeros(k, np.int32), p, None).tokens) for p, k in enumerate(kept(n)))

    if needs(2) > setting.row:
        raise refuse("row", setting.row, f"{needs(2)} or more: a text of two tokens needs as much")
    # The first n that does not fit, less one; then less what is trimmed at every prompt length.
    longest = max(kept(bisect_right(range(setting.row + block), setting.row, lo=2, key=needs) - 1))
    if source.chunk is not None and source.chunk > longest:
        raise refuse("chunk", source.chunk, f"2..{longest}, what a row of {setting.row} positions holds")
    return source.chunk or longest


def spans(laid: LaidOutDocument, rng: np.random.Generator) -> LaidOutDocument:
    """Keep only one random span of each canvas editable; the text around it is known, as in infilling.

    Half of the spans start where the canvas does: so it is when a causal encoder infills, whose canvas
    begins at the hole.
    """
    places = np.flatnonzero(laid.editable)
    _, first, count = np.unique(laid.canvas[places], return_index=True, return_counts=True)
    u = rng.random((3, len(count)))
    length = 1 + (u[0] * count).astype(int)
    start = np.where(u[1] < 0.5, 0, (u[2] * (count - length + 1)).astype(int))
    nth = np.arange(len(places)) - np.repeat(first, count)
    kept = (nth >= np.repeat(start, count)) & (nth < np.repeat(start + length, count))
    editable = np.zeros_like(laid.editable)
    editable[places[kept]] = True
    return laid._replace(editable=editable)
