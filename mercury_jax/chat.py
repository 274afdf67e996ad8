"""The conversation format of our own tokenizer, and the checks that every conversation must pass.

`tokenizer.Tokenizer.render` encodes a conversation as

    <|system|>text<|end_turn|>
    <|user|>text<|end_turn|>
    <|assistant|>[<|think|>text<|end_think|>]text<|eos|>

without the line breaks. Turns of the history end with `end_turn`, a sampled answer ends with `eos`. Roles are special
tokens, so no text inside a message can start a turn. A checkpoint's tokenizer uses its own chat template instead
(`hub.chat_template`).

With tools:

    <|system|>text<|tool|>[{"name": "f", "description": "...", "parameters": {...}}, ...]<|end_turn|>
    <|user|>text<|end_turn|>
    <|assistant|>text<|tool_call|>{"name": "f", "arguments": {...}}<|end_tool_call|>...<|end_turn|>
    <|tool|><|tool_result|>text<|end_tool_result|><|end_turn|>

The list of tools is appended to the first system turn; if the conversation starts with another role, a system turn that
holds only the list is inserted. Parallel calls follow the text of the assistant, one after the other. Each result is a
separate turn, in the order of the calls. JSON is written by `json.dumps` without escapes for non-ASCII characters; like
all text it is encoded without special tokens. A tool turn without `tool_call_id` answers no call: its text is written
without <|tool_result|> and <|end_tool_result|>.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mercury_jax.config import refuse

ROLES = ("system", "user", "assistant", "tool")


def check_message(message: object, name: str, parts: bool = False) -> str:
    """Checks one message of a conversation; `parts`: its content may be a list, which has images."""
    if not isinstance(message, Mapping):
        raise ValueError(f"{name}: {message!r}; must be a mapping with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"{name}.role: {role!r}; must be one of {', '.join(ROLES)}")
    allowed = str | list if parts else str
    if not isinstance(content, allowed) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"{name}.content: {content!r}; must be a str")
    return role


TEXT_ONLY = "text (this model reads text only)"  # the types of parts of a content


def join_parts(
    parts: Sequence[Any],
    name: str,
    refuse: Callable[[str, Any, str], Exception] = refuse,
    kinds: str = TEXT_ONLY,
) -> str:
    """Joins the text parts of a message content with line breaks. Errors list the allowed types `kinds`."""
    return "\n".join(text_part(part, f"{name}[{i}]", kinds, refuse) for i, part in enumerate(parts))


def text_part(part: Any, name: str, kinds: str, refuse: Callable[[str, Any, str], Exception] = refuse) -> str:
    """Returns the text of a text part; `kinds` are the types of parts that are allowed, for errors."""
    if not isinstance(part, Mapping):
        raise refuse(name, part, "an object with type and text")
    if part.get("type") != "text":
        raise refuse(f"{name}.type", part.get("type"), kinds)
    if not isinstance(part.get("text"), str):
        raise refuse(f"{name}.text", part.get("text"), "a string")
    return part["text"]


def call_text(name: str, arguments: Mapping[str, Any] | str) -> str:
    """Writes a tool call as JSON text."""
    write = lambda value: json.dumps(value, ensure_ascii=False)
    text = arguments if isinstance(arguments, str) else write(arguments)
    return f'{{"name": {write(name)}, "arguments": {text}}}'


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Returns the list of tools as the model reads it: a JSON list of their function objects."""
    return json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
