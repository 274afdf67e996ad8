"""Thinking sections: where the thinking of a chat model ends, and how an empty answer is avoided.

A chat model may end its text inside its thinking, directly after it, or before any visible character. `sample`,
`stream` and the server then close the thinking section and continue generation, with the first token of the answer
restricted to ids that show text. This works with any weights.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import numpy as np

from mercury_jax.decode.inputs import Prompt
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.types import LM


def is_thinking(tokenizer: AnyTokenizer, ids: Iterable[int], opened: bool = False) -> bool:
    """Says whether a reply ends inside its thinking section."""
    marks = tokenizer.thinking
    if marks is None:
        return False
    inside = opened
    for i in ids:
        inside = i == marks.opening[0] or (inside and i != marks.close)
    return inside


def close_thinking_ids(tokenizer: AnyTokenizer, ids: Iterable[int], opened: bool = False) -> tuple[int, ...]:
    """Appends the closing token to a reply that ends inside its thinking section."""
    ids = tuple(ids)
    marks = tokenizer.thinking
    return ids if marks is None or not is_thinking(tokenizer, ids, opened) else (*ids, marks.close)


def decode_answer(lm: LM, ids: np.ndarray, chat: bool) -> tuple[str | None, str]:
    """Decodes emitted ids to (thinking or None, answer); an answer to a raw text has no thinking."""
    if chat:
        return lm.tokenizer.split_answer(ids.tolist())
    return None, lm.tokenizer.decode(ids.tolist())


def closed_thinking(tokenizer: AnyTokenizer, prompt: Iterable[int], reply: Iterable[int]) -> tuple[int, ...]:
    """Returns the closed thinking section of a reply without an answer; generation continues after it.

    The ids after the thinking section show no text and would use up `max_tokens`, so they are dropped.
    """
    ends = {*tokenizer.ends, tokenizer.pad, tokenizer.end_turn}
    text = itertools.takewhile(lambda i: i not in ends, map(int, reply))
    closed = close_thinking_ids(tokenizer, text, is_thinking(tokenizer, prompt))
    marks = tokenizer.thinking
    if marks is None or marks.close not in closed:
        return ()
    return closed[: len(closed) - closed[::-1].index(marks.close)]


def continuation_prompt(
    tokenizer: AnyTokenizer, prompt: Iterable[int], thinking: tuple[int, ...], max_tokens: int, context: int
) -> tuple[Prompt, int]:
    """Builds the prompt for an answer after a closed thinking section, even if thinking has filled the context.

    Thinking is cut so that the answer can have a quarter of the context after the prompt, or `max_tokens` if that is
    less. A thinking section that is cut is closed again.
    """
    prompt = tuple(prompt)
    left = context - len(prompt)
    # The answer gets what the thinking section leaves, and at least a quarter of the context after the prompt.
    answer = min(max_tokens, max(left - len(thinking), left // 4, 1))
    kept = thinking[: left - answer]
    marks = tokenizer.thinking
    if marks is not None and len(kept) < len(thinking) and is_thinking(tokenizer, kept):
        kept = (*kept[:-1], marks.close)
    return Prompt([*prompt, *kept], True), answer


@functools.lru_cache(4)
def visible_ids(tokenizer: AnyTokenizer, vocab: int) -> np.ndarray:
    """Finds the ids that show text by themselves, as a mask for `processors.allow_bits`.

    Returns:
        uint32 [1, ceil(vocab / 32)]; bit v % 32 of word v // 32 belongs to id v.
    """

    def shows(piece: bytes) -> bool:
        try:
            return any(c.isprintable() and not c.isspace() for c in piece.decode())
        except UnicodeDecodeError:  # a part of a character
            return False

    hidden = {tokenizer.pad, tokenizer.mask, *tokenizer.ends}
    visible = np.array([i not in hidden and shows(piece) for i, piece in enumerate(tokenizer.pieces[:vocab])])
    visible = np.pad(visible, (0, -(-vocab // 32) * 32 - len(visible)))
    return np.packbits(visible, bitorder="little").view(np.uint32)[None]
