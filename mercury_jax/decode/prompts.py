"""Prompts: what a user may pass, as ids, checked in words before any compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mercury_jax.config import refuse
from mercury_jax.types import LM

MOST_TOKENS = 1_000_000  # of max_tokens: beyond this a number is a mistake


class Prompt(NamedTuple):
    """One prompt as ids, and whether it was a conversation."""

    ids: list[int]
    chat: bool


def normalise(
    lm: LM, prompt: Any, thinking: bool = False, behind: Sequence[Prompt] = ()
) -> tuple[list[Prompt], bool]:
    """(prompts, whether one alone was given).

    Takes a text, a conversation (a list of {"role", "content"}), ids, or a list of any of these.
    thinking: the answer to a conversation must begin with its thinking. behind: what these go on from,
    one for each, answers included.
    """
    old = lambda i: behind[i] if i < len(behind) else None
    if _is_one(prompt):
        return [_one(lm, prompt, "prompt", thinking, old(0))], True
    if not isinstance(prompt, Sequence) or len(prompt) == 0:
        raise refuse("prompt", prompt, "a text, a list of messages, ids, or a non-empty list of these")
    return [_one(lm, p, f"prompt[{i}]", thinking, old(i)) for i, p in enumerate(prompt)], False


def _is_one(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1
    return (
        isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping | int | np.integer)
    )


def _one(lm: LM, prompt: Any, name: str, thinking: bool, behind: Prompt | None) -> Prompt:
    turn = [lm.tokenizer.end_turn] if behind is not None and behind.chat else []
    if isinstance(prompt, str):
        if not prompt:
            raise refuse(name, prompt, "a text of at least one character")
        ids = lm.tokenizer.encode(prompt)
        return Prompt([*(lm.tokenizer.begin if behind is None else turn), *ids], False)
    if isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
        write = lm.tokenizer.follow if turn else lm.tokenizer.render
        return Prompt(write(prompt, thinking=thinking), True)
    return Prompt([*turn, *_ids(lm, prompt, name)], False)


def _ids(lm: LM, prompt: Any, name: str) -> list[int]:
    try:
        ids = [int(i) for i in prompt]
    except (TypeError, ValueError):
        raise refuse(name, prompt, "a text, a list of messages, or a list of ids") from None
    if not ids:
        raise refuse(name, prompt, "at least one token")
    for i in ids:
        if not 0 <= i < lm.model.config.vocab:
            raise refuse(f"{name} id", i, f"0..{lm.model.config.vocab - 1}")
    return ids


def check_room(lm: LM, prompts: Sequence[Prompt], max_tokens: Any) -> int:
    """max_tokens as an int; refuses what is no count, and prompts that leave no room for it."""
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int | np.integer):
        raise refuse("max_tokens", max_tokens, "a whole number from 1 on")
    if not 1 <= max_tokens <= MOST_TOKENS:
        raise refuse("max_tokens", max_tokens, f"1..{MOST_TOKENS}")
    context = lm.model.config.context
    for i, prompt in enumerate(prompts):
        if len(prompt.ids) >= context:
            raise refuse(
                f"prompt[{i}]", f"{len(prompt.ids)} tokens", f"fewer than the model's context of {context}"
            )
        if len(prompt.ids) + max_tokens > context:
            room = context - len(prompt.ids)
            raise refuse("max_tokens", max_tokens, f"1..{room}: the model's context is {context} tokens")
    return int(max_tokens)


def check_seed(seed: Any) -> int:
    """A seed that a key can be made of."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**31:
        raise refuse("seed", seed, "a whole number in 0..2**31 - 1")
    return int(seed)
