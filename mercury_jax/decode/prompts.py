"""Prompts: what a user may pass, as ids, checked in words before any compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from mercury_jax import chat
from mercury_jax.config import refuse
from mercury_jax.types import LM

MOST_TOKENS = 1_000_000  # of max_tokens: beyond this a number is a mistake


class Prompt(NamedTuple):
    """One prompt as ids, and whether it was a conversation."""

    ids: list[int]
    chat: bool


def normalise(
    lm: LM, prompt: Any, thinking: bool = False, behind: Sequence[Prompt] = (), name: str = "prompt"
) -> tuple[list[Prompt], bool]:
    """Prompts as ids, checked before any compute.

    Args:
        lm: Its tokenizer encodes texts and renders conversations; its vocabulary bounds the ids.
        prompt: A text, a conversation (a list of {"role", "content"}, a content being a text or a list of
            {"type": "text", "text": ...}), ids (a list or a 1-D integer array, numpy or JAX), or a list of any of
            these; a 2-D integer array is a list of rows of ids.
        thinking: The answer to a conversation must begin with its thinking.
        behind: What the prompts continue, one for each, answers included.
        name: The argument that errors name.

    Returns:
        The prompts, and whether one alone was given.

    Raises:
        ValueError: For anything else: bytes, floats, empty prompts, ids outside of the vocabulary.
    """
    prompt = _array(prompt, name)
    old = lambda i: behind[i] if i < len(behind) else None
    if _is_one(prompt):
        return [_one(lm, prompt, name, thinking, old(0))], True
    if isinstance(prompt, np.ndarray):
        prompt = list(prompt)
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence) or len(prompt) == 0:
        raise refuse(name, prompt, f"{KINDS}, or a non-empty list of these")
    return [_one(lm, p, f"{name}[{i}]", thinking, old(i)) for i, p in enumerate(prompt)], False


KINDS = "a text (str), a list of messages, or ids (whole numbers)"


def _array(prompt: Any, name: str) -> Any:
    """A JAX array as a numpy one; arrays that are not [T] or [B, T] of whole numbers are refused."""
    if isinstance(prompt, Tracer):
        raise refuse(name, prompt, "concrete ids: under jit use the decoder itself")
    if isinstance(prompt, jax.Array):
        prompt = np.asarray(prompt)
    if not isinstance(prompt, np.ndarray):
        return prompt
    if prompt.ndim not in (1, 2) or prompt.size == 0 or not np.issubdtype(prompt.dtype, np.integer):
        found = f"{prompt.dtype}{list(prompt.shape)}"
        raise refuse(name, found, "whole numbers [T] or [B, T], at least one token")
    return prompt


def _is_one(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1
    if isinstance(prompt, bytes | bytearray):
        return False
    return (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and isinstance(prompt[0], Mapping | int | float | np.integer | np.floating)
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
        return Prompt(write(_whole_contents(prompt), thinking=thinking), True)
    return Prompt([*turn, *_ids(lm, prompt, name)], False)


def _whole_contents(messages: Sequence[Any]) -> list[Any]:
    """The messages, contents that are given as parts joined to texts, as the server joins them."""

    def whole(i: int, message: Any) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            return message
        return {**message, "content": chat.joined(content, f"messages[{i}].content")}

    return [whole(i, message) for i, message in enumerate(messages)]


def _ids(lm: LM, prompt: Any, name: str) -> list[int]:
    prompt = _array(prompt, name)
    listed = isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, str | bytes | bytearray)
    if not listed or not all(_whole(i) for i in prompt):
        raise refuse(name, prompt, KINDS)
    ids = [int(i) for i in prompt]
    if not ids:
        raise refuse(name, prompt, "at least one token")
    for i in ids:
        if not 0 <= i < lm.model.config.vocab:
            raise refuse(f"{name} id", i, f"0..{lm.model.config.vocab - 1}")
    return ids


def _whole(i: Any) -> bool:
    return isinstance(i, int | np.integer) and not isinstance(i, bool)


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
