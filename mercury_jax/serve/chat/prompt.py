"""Messages and tools -> the ids of a prompt, by the model's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mercury_jax.serve.chat.formats import tool_format
from mercury_jax.serve.chat.refused import Refused
from mercury_jax.serve.chat.words import written
from mercury_jax.types import LM


def render(
    lm: LM,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = False,
) -> tuple[int, ...]:
    """Ids of a conversation, open for an answer.

    messages: as `checked` leaves them; tools: as `checked_tools` does. thinking: the answer begins with its thinking,
    for which the tokenizer must have marks (`lm.tokenizer.thinking`); without it a template that can leave thinking out
    is asked to (`enable_thinking`), since there is no room for it. No text of any of them becomes a token of control.
    Refused with what the template says of them.
    """
    if not tool_format(lm.tokenizer).native:
        messages, tools = written(messages, tools), None
    try:
        return tuple(lm.tokenizer.render(messages, thinking, tools=tools or None, at_once=not thinking))
    except ValueError as error:
        raise Refused("messages", str(error)) from error


def opened(lm: LM, ids: Sequence[int]) -> bool:
    """Whether a prompt ends inside of thinking, which some templates open by themselves."""
    marks = lm.tokenizer.thinking
    if marks is None:
        return False
    end = list(ids[-len(marks.opening) :])
    return marks.opening[0] in end and marks.close not in end[end.index(marks.opening[0]) :]
