"""The conversation format of our own tokenizer, and what every conversation must satisfy.

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

The list of tools ends the first system turn; a conversation that starts with another turn gets a system turn with only
the list. Parallel calls follow the text of the assistant, one after the other. Each result is a turn of its own,
in the order of the calls. JSON is written by `json.dumps` without escapes for non-ASCII characters; like all text it
contains no special token. A tool turn without `tool_call_id` answers no call: its text is written without the marks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mercury_jax.config import refuse

ROLES = ("system", "user", "assistant", "tool")


def check_message(message: object, name: str) -> str:
    """Checks one message of a conversation.

    Args:
        message: A mapping with a role of `ROLES` and a text as content; content may be None beside `tool_calls`.
        name: What the message of an error calls it, such as "messages[0]".

    Returns:
        Its role.

    Raises:
        ValueError: Names the field at fault.
    """
    if not isinstance(message, Mapping):
        raise ValueError(f"{name}: {message!r}; must be a mapping with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"{name}.role: {role!r}; must be one of {', '.join(ROLES)}")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"{name}.content: {content!r}; must be a str")
    return role


def join_parts(parts: Sequence[Any], name: str, refuse: Callable[[str, Any, str], Exception] = refuse) -> str:
    """Joins a content that is given as parts, with a line break between two.

    Args:
        parts: {"type": "text", "text": ...} each, as OpenAI's clients write a content; other keys have no effect.
        name: What errors call the content, such as "messages[0].content".
        refuse: Makes the error of (field, value, what is allowed); the server has its own.

    Returns:
        The text.

    Raises:
        ValueError: Or what `refuse` makes, for a part that is not a text: an image, audio, a file.
    """
    texts = []
    for i, part in enumerate(parts):
        if not isinstance(part, Mapping):
            raise refuse(f"{name}[{i}]", part, "an object with type and text")
        if part.get("type") != "text":
            raise refuse(f"{name}[{i}].type", part.get("type"), "text (this model reads text only)")
        if not isinstance(part.get("text"), str):
            raise refuse(f"{name}[{i}].text", part.get("text"), "a string")
        texts.append(part["text"])
    return "\n".join(texts)


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Writes a tool call.

    Args:
        name: Of the function.
        arguments: JSON-ready.

    Returns:
        The text between the marks of the call, such as '{"name": "f", "arguments": {}}'.
    """
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Returns the list of tools as the model reads it: a JSON list of their function objects."""
    return json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
