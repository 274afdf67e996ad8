"""A gap between two texts, as the engine takes it."""

from __future__ import annotations

from typing import NamedTuple

from mercury_jax.types import LM


class Ask(NamedTuple):
    """What the engine gets: prompt and suffix as in `Job`. max_tokens: most that the answer can need (None: any
    number); chat: whether the answer is a turn of a conversation (`Reply(chat=)`)."""

    prompt: tuple[int, ...]
    suffix: tuple[int, ...] | None
    max_tokens: int | None = None
    chat: bool = False


def filled(lm: LM, before: str, behind: str, max_tokens: int | None = None) -> Ask:
    """What stands between two texts, or goes on behind the first where there is no second.

    The engine puts them into the order that the model wants. It begins with at least one token, so a gap at the
    beginning of a file has a line end before it.
    """
    tok = lm.tokenizer
    prompt = (*tok.begin, *tok.encode(before)) or tuple(tok.encode("\n"))
    return Ask(prompt, tuple(tok.encode(behind)) if behind else None, max_tokens)
