"""Messages of a request: checked against OpenAI's forms, and made plain for a chat template.

Plain means: roles system, user, assistant and tool; content a text; `tool_calls` with their arguments as mappings; each
tool message with the `tool_call_id` that it answers. Fields that are not known are left out. Text is all that is
taken: no part of a message makes this server fetch or decode anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mercury_jax import chat
from mercury_jax.serve.chat import data
from mercury_jax.serve.chat.refused import Refused
from mercury_jax.serve.chat.tools import checked_tools

__all__ = ["Refused", "checked", "checked_tools"]

MOST_MESSAGES = 4096
MOST_PARTS = 1024  # of a message's content
MOST_CALLS = 256  # of a message
MOST_ID = 256  # characters
# What clients call a role, and what a template knows it as.
ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip


def checked(messages: Any, tools: Any = None) -> list[dict[str, Any]]:
    """The messages, plain. Refused naming the field that does not fit; tools are only looked at.

    Roles may follow each other in any order, but a tool message must answer an earlier call. Results that stand
    together come in the order of their calls, since a template may not say which is which.
    """
    checked_tools(tools)
    found = data.listed(messages, "messages", 1, MOST_MESSAGES)
    plain, calls = [], _Calls()
    for i, message in enumerate(found):
        plain.append(_plain(message, f"messages[{i}]", calls))
    return _in_order(plain, calls)


@dataclass
class _Calls:
    """The calls so far, by id: each one's place and name. functions: ids of calls of the older form, by name."""

    count: int = 0
    at: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)

    def add(self, id: str, name: str) -> None:
        self.at[id], self.names[id] = self.count, name
        self.count += 1


def _plain(message: Any, name: str, calls: _Calls) -> dict[str, Any]:
    message = data.mapping(message, name)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise data.refuse(f"{name}.role", role, ", ".join(ROLES))
    content = _content(message.get("content"), f"{name}.content")
    made: dict[str, Any] = {"role": ROLES[role], "content": content}
    if role == "tool":
        return made | _answers(message.get("tool_call_id"), f"{name}.tool_call_id", calls)
    if role == "function":
        return made | _answers_function(message.get("name"), f"{name}.name", calls)
    asked = _asked(message, name, calls)
    if asked and role != "assistant":
        raise data.refuse(f"{name}.tool_calls", asked, f"none in a message of role {role}")
    if not asked:
        return made
    # A template may tell a message that only calls by its null.
    return made | {"content": content if message.get("content") is not None else None, "tool_calls": asked}


def _content(content: Any, name: str) -> str:
    """The text of a content: null is none, parts stand on lines of their own."""
    if content is None:
        return ""
    if isinstance(content, str):
        return data.text(content, name)
    if not isinstance(content, list):
        raise data.refuse(name, type(content).__name__, "a string, null, or a list of text parts")
    return data.text(chat.joined(data.listed(content, name, 0, MOST_PARTS), name, data.refuse), name)


def _asked(message: Mapping[str, Any], name: str, calls: _Calls) -> list[dict[str, Any]]:
    """The calls of a message, `function_call` of the older form among them."""
    given = message.get("tool_calls")
    found = [] if given is None else data.listed(given, f"{name}.tool_calls", 0, MOST_CALLS)
    made = [_call(call, f"{name}.tool_calls[{j}]") for j, call in enumerate(found)]
    ids = [call["id"] for call in made]
    if len(set(ids)) < len(ids):
        twice = next(j for j, id in enumerate(ids) if id in ids[:j])
        raise data.refuse(f"{name}.tool_calls[{twice}].id", ids[twice], "an id that no other call of it has")
    if message.get("function_call") is not None:
        function = _function(message["function_call"], f"{name}.function_call")
        made.append({"id": f"function_{calls.count}", "type": "function", "function": function})
        calls.functions[function["name"]] = made[-1]["id"]
    for call in made:
        calls.add(call["id"], call["function"]["name"])
    return made


def _call(call: Any, name: str) -> dict[str, Any]:
    call = data.mapping(call, name)
    if call.get("type") not in (None, "function"):
        raise data.refuse(f"{name}.type", call["type"], "function")
    id = data.text(call.get("id"), f"{name}.id", least=1, most=MOST_ID)
    return {"id": id, "type": "function", "function": _function(call.get("function"), f"{name}.function")}


def _function(function: Any, name: str) -> dict[str, Any]:
    function = data.mapping(function, name)
    called = data.function_name(function.get("name"), f"{name}.name")
    return {"name": called, "arguments": data.json_object(function.get("arguments"), f"{name}.arguments")}


def _answers(id: Any, name: str, calls: _Calls) -> dict[str, Any]:
    id = data.text(id, name, least=1, most=MOST_ID)
    if id not in calls.at:
        raise data.refuse(name, id, "the id of a call in an earlier message")
    return {"tool_call_id": id, "name": calls.names[id]}


def _answers_function(called: Any, name: str, calls: _Calls) -> dict[str, Any]:
    """A function's result has no id: it answers the latest call of its name, or stands alone."""
    if called is None:
        return {}
    called = data.function_name(called, name)
    id = calls.functions.get(called)
    return {"name": called} if id is None else {"tool_call_id": id, "name": called}


def _in_order(messages: list[dict[str, Any]], calls: _Calls) -> list[dict[str, Any]]:
    """Results that stand together, in the order of their calls."""
    made: list[dict[str, Any]] = []
    run: list[dict[str, Any]] = []
    place = lambda message: calls.at[message["tool_call_id"]]
    for message in messages:
        if "tool_call_id" in message:
            run.append(message)
        else:
            made += [*sorted(run, key=place), message]
            run = []
    return made + sorted(run, key=place)
