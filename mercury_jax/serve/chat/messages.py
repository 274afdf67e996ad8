"""Messages and tools of a request: checked against OpenAI's forms, and made plain for a chat template.

Plain messages have the roles system, user, assistant and tool, a text as content, `tool_calls` with mappings as
arguments, and the `tool_call_id` that a result answers. Unknown fields are dropped. Text is the only kind of content:
no message makes this server fetch or decode anything. Anything else raises `InvalidField` with the field's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from mercury_jax import chat

MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of a message's content
MAX_CALLS = 256  # of a message
MAX_TOOLS = 256
MAX_ID = 256  # characters
MAX_DESCRIPTION = 65_536  # characters
MAX_DEPTH = 40  # nested lists: less than what a chat template takes
MAX_SHOWN = 80  # characters of a value that an error repeats
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# The roles of OpenAI's API, and the roles of chat templates.
ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip


class InvalidField(Exception):
    """A field of a request that cannot be used.

    Attributes:
        param: The field, such as `messages[2].content`.
        message: What it is, and what is allowed.
    """

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param, self.message = param, message


def invalid_field(param: str, value: object, allowed: str) -> InvalidField:
    """An error that repeats a value, cut to MAX_SHOWN characters.

    Args:
        param: The field.
        value: Its value.
        allowed: What is allowed.

    Returns:
        The error, to be raised.
    """
    shown = repr(value)
    shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
    return InvalidField(param, f"{param} is {shown}; allowed: {allowed}")


def check_messages(messages: Any, tools: Any = None) -> list[dict[str, Any]]:
    """Checks the messages of a conversation and makes them plain.

    Roles may follow each other in any order, but a result must answer an earlier call. Consecutive results are put into
    the order of their calls, since a template may not say which result belongs to which call.

    Args:
        messages: JSON data of the request.
        tools: JSON data of the request; only checked.

    Returns:
        Plain messages: a system or developer message has the role system, a result of a tool or function the role tool,
        a content is a text (None for a message that only calls tools), and arguments are mappings.

    Raises:
        InvalidField: For the first field that does not fit.
    """
    check_tools(tools)
    calls = _EarlierCalls()
    order = lambda result: calls.numbers[result["tool_call_id"]]
    plain: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []  # consecutive ones
    for i, message in enumerate(_list(messages, "messages", 1, MAX_MESSAGES)):
        checked = _message(message, f"messages[{i}]", calls)
        if "tool_call_id" in checked:
            results.append(checked)
            continue
        plain += [*sorted(results, key=order), checked]
        results = []
    return plain + sorted(results, key=order)


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """Checks the tools of a request.

    Args:
        tools: JSON data of the request; null means none.

    Returns:
        `[{"type": "function", "function": {"name", "description", "parameters"}}]`, without what was not given.

    Raises:
        InvalidField: For the first field that does not fit.
    """
    checked: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate([] if tools is None else _list(tools, "tools", 0, MAX_TOOLS)):
        name = f"tools[{i}]"
        tool = _mapping(tool, name)
        if tool.get("type") not in (None, "function"):
            raise invalid_field(f"{name}.type", tool["type"], "function")
        name = f"{name}.function"
        given = _mapping(tool.get("function"), name)
        function: dict[str, Any] = {"name": _function_name(given.get("name"), f"{name}.name")}
        if function["name"] in checked:
            raise invalid_field(f"{name}.name", function["name"], "a name that no other tool has")
        if given.get("description") is not None:
            description = _text(given["description"], f"{name}.description", most=MAX_DESCRIPTION)
            function["description"] = description
        if given.get("parameters") is not None:
            schema = _mapping(given["parameters"], f"{name}.parameters")
            if schema.get("type", "object") != "object":
                raise invalid_field(f"{name}.parameters.type", schema["type"], "object")
            function["parameters"] = _plain_json(dict(schema), f"{name}.parameters")
        checked[function["name"]] = {"type": "function", "function": function}
    return list(checked.values())


@dataclass
class _EarlierCalls:
    """The calls so far: the number and the function of each id, and ids of calls in OpenAI's older form by function."""

    numbers: dict[str, int] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    older_ids: dict[str, str] = field(default_factory=dict)
    count: int = 0


def _message(message: Any, name: str, calls: _EarlierCalls) -> dict[str, Any]:
    message = _mapping(message, name)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid_field(f"{name}.role", role, ", ".join(ROLES))
    content = _content(message.get("content"), f"{name}.content")
    plain: dict[str, Any] = {"role": ROLES[role], "content": content}
    if role == "tool":
        id = _text(message.get("tool_call_id"), f"{name}.tool_call_id", least=1, most=MAX_ID)
        if id not in calls.numbers:
            raise invalid_field(f"{name}.tool_call_id", id, "the id of a call in an earlier message")
        return plain | {"tool_call_id": id, "name": calls.functions[id]}
    if role == "function":  # a result without an id: it answers the latest call of its function, or none
        if message.get("name") is None:
            return plain
        function = _function_name(message["name"], f"{name}.name")
        id = calls.older_ids.get(function)
        return plain | {"name": function} | ({} if id is None else {"tool_call_id": id})
    requested = _tool_calls(message, name, calls)
    if requested and role != "assistant":
        raise invalid_field(f"{name}.tool_calls", requested, f"none in a message of role {role}")
    if requested:
        plain["tool_calls"] = requested
        if message.get("content") is None:  # by which some templates recognise a message that only calls
            plain["content"] = None
    return plain


def _content(content: Any, name: str) -> str:
    """The text of a content: null is empty, parts are joined by line ends."""
    if content is None or isinstance(content, str):
        return _text(content or "", name)
    if not isinstance(content, list):
        raise invalid_field(name, type(content).__name__, "a string, null, or a list of text parts")
    return _text(chat.join_parts(_list(content, name, 0, MAX_PARTS), name, invalid_field), name)


def _tool_calls(message: Mapping[str, Any], name: str, calls: _EarlierCalls) -> list[dict[str, Any]]:
    """The calls of a message, with `function_call` of OpenAI's older form among them."""
    given = message.get("tool_calls")
    plain: dict[str, dict[str, Any]] = {}
    for j, call in enumerate([] if given is None else _list(given, f"{name}.tool_calls", 0, MAX_CALLS)):
        at = f"{name}.tool_calls[{j}]"
        call = _mapping(call, at)
        if call.get("type") not in (None, "function"):
            raise invalid_field(f"{at}.type", call["type"], "function")
        id = _text(call.get("id"), f"{at}.id", least=1, most=MAX_ID)
        if id in plain:
            raise invalid_field(f"{at}.id", id, "an id that no other call of it has")
        plain[id] = _called_function(call.get("function"), f"{at}.function")
    pairs = list(plain.items())
    if message.get("function_call") is not None:
        function = _called_function(message["function_call"], f"{name}.function_call")
        calls.older_ids[function["name"]] = f"function_{calls.count}"
        pairs.append((f"function_{calls.count}", function))
    for id, function in pairs:
        calls.numbers[id], calls.functions[id] = calls.count, function["name"]
        calls.count += 1
    return [{"id": id, "type": "function", "function": function} for id, function in pairs]


def _called_function(function: Any, name: str) -> dict[str, Any]:
    """Name and arguments of a call; the arguments are an object, or its JSON text, or empty."""
    function = _mapping(function, name)
    called = _function_name(function.get("name"), f"{name}.name")
    name, arguments = f"{name}.arguments", function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=refuse_constant)
        except (ValueError, RecursionError):
            raise invalid_field(name, arguments, "the JSON text of an object") from None
    if not isinstance(arguments, dict):
        raise invalid_field(name, arguments, "the JSON text of an object")
    return {"name": called, "arguments": _plain_json(arguments, name)}


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise invalid_field(name, value, "an object")
    return value


def _list(value: Any, name: str, least: int, most: int) -> list[Any]:
    if not isinstance(value, list):
        raise invalid_field(name, value, "a list")
    if not least <= len(value) <= most:
        raise InvalidField(name, f"{name} has {len(value)} entries; allowed: {least}..{most}")
    return value


def _text(value: Any, name: str, least: int = 0, most: int | None = None) -> str:
    """A string without lone surrogates, which JSON can write and UTF-8 cannot."""
    if not isinstance(value, str):
        raise invalid_field(name, value, "a string")
    if len(value) < least or (most is not None and len(value) > most):
        allowed = f"{least}..{most or 'any number'}"
        raise InvalidField(name, f"{name} has {len(value)} characters; allowed: {allowed}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(value[error.start]):04X} at {error.start}"
        raise InvalidField(name, f"{name} has a lone surrogate, {found}; allowed: Unicode text") from None
    return value


def _function_name(value: Any, name: str) -> str:
    if not isinstance(value, str) or not FUNCTION_NAME.fullmatch(value):
        raise invalid_field(name, value, "1 to 64 of a-z, A-Z, 0-9, underscore, dot and dash")
    return value


def _plain_json(value: Any, name: str) -> Any:
    """JSON data whose texts are Unicode and whose lists are not nested too deeply."""
    stack = [(value, 0)]
    while stack:
        found, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise InvalidField(name, f"{name} has lists within lists; allowed: at most {MAX_DEPTH} levels")
        if isinstance(found, str):
            _text(found, name)
        elif isinstance(found, dict):
            stack += [(inside, depth + 1) for pair in found.items() for inside in pair]
        elif isinstance(found, list):
            stack += [(inside, depth + 1) for inside in found]
    return value


def refuse_constant(constant: str) -> NoReturn:
    """For `json.loads(parse_constant=)`: NaN and Infinity are not JSON, though Python reads them.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"{constant} is not JSON")
