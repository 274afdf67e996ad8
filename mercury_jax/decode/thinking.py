"""Conversations that think first: where a thinking ends, and answers that would otherwise be empty.

A chat model may end its text inside its thinking, right after it, or before it has written anything that shows.
`sample`, `stream` and the server then continue generation after a closed thinking, with the first token of the
answer restricted to ids that show text. That works for any weights.
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
    """Returns whether a reply ends inside of its thinking.

    Args:
        tokenizer: Its thinking marks count; without any the result is False.
        ids: The reply so far.
        opened: Whether the prompt already opened the thinking.

    Returns:
        Whether the thinking is still open.
    """
    marks = tokenizer.thinking
    if marks is None:
        return False
    inside = opened
    for i in ids:
        inside = i == marks.opening[0] or (inside and i != marks.close)
    return inside


def close_thinking_ids(tokenizer: AnyTokenizer, ids: Iterable[int], opened: bool = False) -> tuple[int, ...]:
    """Returns the reply, with the closing token appended where it ends inside of its thinking.

    Args:
        tokenizer: Its thinking marks count.
        ids: The reply.
        opened: Whether the prompt already opened the thinking.

    Returns:
        The ids.
    """
    ids = tuple(ids)
    marks = tokenizer.thinking
    return ids if marks is None or not is_thinking(tokenizer, ids, opened) else (*ids, marks.close)


def decode_answer(lm: LM, ids: np.ndarray, chat: bool) -> tuple[str | None, str]:
    """Decodes emitted ids to (thinking or None, answer); an answer to a raw text has no thinking.

    Args:
        lm: Its tokenizer decodes.
        ids: Of one answer.
        chat: Whether the prompt was a conversation.

    Returns:
        The thinking or None, and the answer.
    """
    if chat:
        return lm.tokenizer.split_answer(ids.tolist())
    return None, lm.tokenizer.decode(ids.tolist())


def closed_thinking(tokenizer: AnyTokenizer, prompt: Iterable[int], reply: Iterable[int]) -> tuple[int, ...]:
    """Returns what a reply without an answer leaves in front of its continuation: its thinking, closed.

    What follows the thinking shows no text and would take from `max_tokens`, so it is dropped.

    Args:
        tokenizer: Its thinking marks count.
        prompt: Ids of the prompt.
        reply: Ids of the reply.

    Returns:
        Ids up to and with the closing token; () where there is no thinking.
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
    """Makes room for an answer after a closed thinking, also where the thinking has filled the context.

    Args:
        tokenizer: Its thinking marks count.
        prompt: Ids of the prompt; it leaves at least one position of the context.
        thinking: The closed thinking.
        max_tokens: Most tokens of the answer.
        context: Positions of prompt and answer.

    Returns:
        The prompt with as much of the thinking as leaves the answer a quarter of the remaining context (or
        `max_tokens`, where that is less), and the tokens left for the answer, at least one. A thinking that is cut
        is closed.
    """
    prompt = tuple(prompt)
    left = context - len(prompt)
    # Thinking that filled the context gives a quarter of it back to the answer.
    answer = min(max_tokens, max(left - len(thinking), left // 4, 1))
    kept = thinking[: left - answer]
    marks = tokenizer.thinking
    if marks is not None and len(kept) < len(thinking) and is_thinking(tokenizer, kept):
        kept = (*kept[:-1], marks.close)
    return Prompt([*prompt, *kept], True), answer


@functools.lru_cache(4)
def visible_ids(tokenizer: AnyTokenizer, vocab: int) -> np.ndarray:
    """Finds the ids that show text by themselves, as a mask for `processors.allow_bits`.

    Args:
        tokenizer: Its pieces are looked at.
        vocab: Ids of the model; those beyond the tokenizer's last show nothing.

    Returns:
        uint32 [1, ceil(vocab / 32)], bit v % 32 of word v // 32 for the id v.
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
