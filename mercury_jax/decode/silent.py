"""Replies without an answer, and what makes the next attempt say something.

A chat model may end its text inside its thinking, behind it, or before it has written anything a reader can see.
`sample`, `stream` and the server then continue generation behind a closed thinking, with the first token of the
answer restricted to ids that show text. That holds for any weights.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from mercury_jax.tokenizer import AnyTokenizer


class Room(NamedTuple):
    """The prompt that a continued answer follows, and the tokens it may take."""

    prompt: tuple[int, ...]
    max_tokens: int


def thinks(tokenizer: AnyTokenizer, ids: Iterable[int], opened: bool = False) -> bool:
    """Whether a reply ends inside of its thinking.

    Args:
        tokenizer: Whose marks of thinking count.
        ids: The reply so far.
        opened: The prompt already opened the thinking.

    Returns:
        False also for a tokenizer without marks of thinking.
    """
    marks = tokenizer.thinking
    if marks is None:
        return False
    inside = opened
    for i in ids:
        inside = i == marks.opening[0] or (inside and i != marks.close)
    return inside


def read(tokenizer: AnyTokenizer, prompt: Iterable[int], reply: Iterable[int]) -> tuple[int, ...]:
    """What a silent reply leaves in front of its answer: its thinking, closed.

    What stands behind the thinking shows no text and would take from `max_tokens`, so it is dropped.
    """
    ends = {*tokenizer.ends, tokenizer.pad, tokenizer.end_turn}
    said = itertools.takewhile(lambda i: i not in ends, map(int, reply))
    whole = closed(tokenizer, said, thinks(tokenizer, prompt))
    marks = tokenizer.thinking
    if marks is None or marks.close not in whole:
        return ()
    return whole[: len(whole) - whole[::-1].index(marks.close)]


def closed(tokenizer: AnyTokenizer, ids: Iterable[int], opened: bool = False) -> tuple[int, ...]:
    """The reply with its thinking closed, where it ends inside of it."""
    ids = tuple(ids)
    marks = tokenizer.thinking
    return ids if marks is None or not thinks(tokenizer, ids, opened) else (*ids, marks.close)


def room(
    tokenizer: AnyTokenizer, prompt: Iterable[int], said: tuple[int, ...], max_tokens: int, context: int
) -> Room:
    """Room for an answer behind a closed reply, also where that reply has filled the context.

    Args:
        tokenizer: Whose marks of thinking count.
        prompt: Ids of the prompt; at least one position of the context is left behind it.
        said: The silent reply, its thinking closed.
        max_tokens: Most tokens of the answer.
        context: Positions of prompt and answer.

    Returns:
        The prompt with as much of the reply as leaves a quarter of the remaining context, or `max_tokens` where
        that is less, to the answer; at least one token. A thinking that is cut is closed.
    """
    prompt = tuple(prompt)
    left = context - len(prompt)
    answer = min(max_tokens, max(left - len(said), left // 4, 1))
    kept = said[: left - answer]
    marks = tokenizer.thinking
    if marks is not None and len(kept) < len(said) and thinks(tokenizer, kept):
        kept = (*kept[:-1], marks.close)
    return Room((*prompt, *kept), answer)


@functools.lru_cache(4)
def visible(tokenizer: AnyTokenizer, vocab: int) -> np.ndarray:
    """Which ids show text by themselves, for `shape.allow_bits`.

    Args:
        tokenizer: Whose pieces are looked at.
        vocab: Ids of the model; those beyond the tokenizer's last show nothing.

    Returns:
        uint32 [1, ceil(vocab / 32)], bit v % 32 of word v // 32 for id v.
    """
    hidden = {tokenizer.pad, tokenizer.mask, *tokenizer.ends}
    may = np.array([i not in hidden and _shows(piece) for i, piece in enumerate(tokenizer.pieces[:vocab])])
    may = np.pad(may, (0, -(-vocab // 32) * 32 - len(may)))
    return np.packbits(may, bitorder="little").view(np.uint32)[None]


def _shows(piece: bytes) -> bool:
    try:
        return any(c.isprintable() and not c.isspace() for c in piece.decode())
    except UnicodeDecodeError:  # a part of a character
        return False
