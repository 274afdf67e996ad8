"""The chat template: messages -> ids, and the ids of an answer -> what was thought and what was said.

    <|system|>text<|end_turn|>
    <|user|>text<|end_turn|>
    <|assistant|>[<|think|>text<|end_think|>]text<|eos|>

without the line breaks. This is the template of our own tokenizer; one with a template of its own is asked to
write by that. Turns of the history close with `end_turn`, a sampled answer with `eos`. Roles
are control ids, so no text inside a message can open a turn.

With tools:

    <|system|>text<|tool|>[{"name": "f", "description": "...", "parameters": {...}}, ...]<|end_turn|>
    <|user|>text<|end_turn|>
    <|assistant|>text<|tool_call|>{"name": "f", "arguments": {...}}<|end_tool_call|>...<|end_turn|>
    <|tool|><|tool_result|>text<|end_tool_result|><|end_turn|>

The list of tools ends the first system turn; where a conversation does not begin with one, a system turn that holds
nothing else comes first. Calls stand behind what the assistant says, one behind the other where it calls in
parallel; each result is a turn of its own, in the order of the calls. JSON is as `json.dumps` writes it, without
escapes for what is not ASCII, and as everybody's text it never holds a control id. A tool turn without
`tool_call_id` answers no call: its text stands alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mercury_jax.config import refuse
from mercury_jax.tokenizer import AnyTokenizer, Special

ROLES = ("system", "user", "assistant", "tool")


def render(
    tok: AnyTokenizer,
    messages: Sequence[Mapping[str, Any]],
    thinking: bool = False,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    at_once: bool = False,
) -> list[int]:
    """Ids of a conversation of `{"role", "content"}` messages, open for an answer unless told otherwise.

    An assistant's message may have `tool_calls` of `{"function": {"name", "arguments"}}`, arguments a mapping, and
    then content None; a tool's answers one by its `tool_call_id`. tools: what may be called,
    `{"function": {"name", "description", "parameters"}}` each.
    `thinking` also opens the thinking, so that the answer must begin with it; without it the model decides, but with
    `at_once` a template of another is told that there is none.
    ValueError for no messages, an unknown role, or content that is missing or no text.
    """
    if isinstance(messages, (str, Mapping)) or not messages:
        raise ValueError(f"messages: {messages!r}; must be a list of at least one message")
    special = _special(tok)
    if special is None:
        foreign: Any = tok
        more = ({"tools": tools} if tools else {}) | ({"at_once": True} if at_once else {})
        return foreign.render(messages, thinking, add_generation_prompt, **more)
    ids: list[int] = []
    for i, message in enumerate(messages):
        role, said = _checked(i, message), _said(tok, special, f"messages[{i}]", message)
        if tools and i == 0:
            listed = [special.tool, *tok.encode(tools_text(tools))]
            ids += [] if role == "system" else [special.system, *listed, special.end_turn]
            said += listed if role == "system" else []
        ids += [getattr(special, role), *said, special.end_turn]
    if add_generation_prompt:
        ids.append(special.assistant)
        ids += [special.think] * thinking
    return ids


def joined(parts: Sequence[Any], name: str, refuse: Callable[[str, Any, str], Exception] = refuse) -> str:
    """The text of a content that is given as parts, each on lines of its own.

    Args:
        parts: `{"type": "text", "text": ...}` each, as OpenAI's clients write a content; other keys have no effect.
        name: What errors call the content, such as "messages[0].content".
        refuse: Makes the error of (field, value, what is allowed); the server has its own.

    Raises:
        ValueError: Or what `refuse` makes, for a part that is not a text: an image, a sound, a file.
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
    """What stands between the marks of a call."""
    return _json({"name": name, "arguments": arguments})


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """The list of tools as the model reads it."""
    return _json([tool.get("function", tool) for tool in tools])


def example(
    tok: AnyTokenizer, prompt: str, answer: str, thinking: str | None = None
) -> tuple[list[int], list[int]]:
    """(prompt ids, response ids) to train on: a user turn open for the answer; the answer up to `eos`."""
    special = _special(tok)
    if special is None:
        return tok.example(prompt, answer, thinking)
    response = [*tok.encode(answer), special.eos]
    if thinking is not None:
        response = [special.think, *tok.encode(thinking), special.end_think, *response]
    return render(tok, [{"role": "user", "content": prompt}]), response


def split_answer(tok: AnyTokenizer, ids: Iterable[int]) -> tuple[str | None, str]:
    """(thinking or None, answer) of sampled ids: `split_answer(tok, example(tok, p, a, t)[1]) == (t, a)`.

    Ends at the first `eos`, `end_turn` or `pad`. Works as well when the prompt opened the thinking;
    thinking that never closes leaves an empty answer.
    """
    special = _special(tok)
    if special is None:
        return tok.split_answer(ids)
    said: list[int] = []
    for i in map(int, ids):
        if i in (special.eos, special.end_turn, special.pad):
            break
        said.append(i)
    if special.end_think in said:
        close = said.index(special.end_think)
        return tok.decode(said[:close]), tok.decode(said[close + 1 :])
    if special.think in said:
        return tok.decode(said), ""
    return None, tok.decode(said)


def _special(tok: Any) -> Special | None:
    """Our fixed ids; a checkpoint's tokenizer has none."""
    return getattr(tok, "special", None)


def _checked(i: int, message: Mapping[str, Any]) -> str:
    """The role of a sound message."""
    if not isinstance(message, Mapping):
        raise ValueError(f"messages[{i}]: {message!r}; must be a mapping with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"messages[{i}].role: {role!r}; must be one of {', '.join(ROLES)}")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"messages[{i}].content: {content!r}; must be a str")
    if message.get("tool_calls") and role != "assistant":
        raise ValueError(f"messages[{i}].tool_calls: in a {role} message; only an assistant calls tools")
    return role


def _said(tok: AnyTokenizer, special: Special, name: str, message: Mapping[str, Any]) -> list[int]:
    """Ids of what a turn holds."""
    ids = tok.encode(message.get("content") or "")
    if message["role"] == "tool" and message.get("tool_call_id") is not None:
        return [special.tool_result, *ids, special.end_tool_result]
    for j, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{name}.tool_calls[{j}]: {call!r}; must have a function with name and arguments"
            )
        if not isinstance(function.get("arguments"), Mapping):
            raise ValueError(f"{name}.tool_calls[{j}].function.arguments: must be a mapping")
        text = call_text(function["name"], function["arguments"])
        ids += [special.tool_call, *tok.encode(text), special.end_tool_call]
    return ids


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
