"""Conversations as people keep them: the forms of a record, and the examples that a conversation becomes.

    {"messages": [{"role", "content"}, ...], "tools": [...]}    OpenAI's form, with tool calls and tool results
    {"conversations": [{"from", "value"}, ...]}                 ShareGPT's, also with system and tools
    {"prompt": ..., "completion": ...}                          two texts, or two lists of messages
    {"instruction": ..., "input": ..., "output": ...}           Alpaca's, also with system and history

The keys of a record say which form it has; a key whose value is null counts as absent, since a table has all columns in
each row. `documents` reads records from files and datasets. An example is one assistant turn after what precedes it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from mercury_jax.chat import ROLES, join_parts
from mercury_jax.config import refuse
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.training.data.packing import Example

BadLines = Literal["stop", "skip"]
Turns = Literal["last", "all"]  # assistant turns that are trained on
Record = Mapping[str, Any]
NamedTurn = tuple[str, Record]  # a turn and its place in the record, for messages
FORMS = "messages; conversations; prompt and completion; instruction and output"
KEYS = (
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "system", "history", "tools",
)  # fmt: skip
# Names of roles in ShareGPT's form and in older ones of OpenAI's.
ROLE_NAMES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "function_call": "assistant", "observation": "tool", "function": "tool", "developer": "system",
}  # fmt: skip


class Conversation(NamedTuple):
    """A conversation.

    Attributes:
        messages: Its turns as `AnyTokenizer.render` takes them, up to the last assistant turn that is trained on.
        tools: The functions that the model may call.
        answers: Indices of the assistant turns that may be trained on: those that follow another turn and do not have
            weight 0.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    answers: list[int]

    @property
    def text(self) -> str:
        """What decides the side of the conversation: its turns as JSON."""
        return json.dumps(self.messages)


def read_conversation(place: str, record: Record) -> Conversation:
    """Reads a record of any form.

    Args:
        place: Where the record stands, path:line, for messages.
        record: The record.

    Returns:
        The conversation.

    Raises:
        ValueError: The record is no conversation that can be trained on. The message names the place and the field.
    """
    record = {key: value for key, value in record.items() if value is not None}
    if found := record.keys() & {"messages", "conversations"}:
        name = max(found)  # a record with both has its turns in messages
        given = _messages(name, place, record[name])
    elif record.keys() >= {"prompt", "completion"}:
        prompt = _text_or_messages("prompt", place, record["prompt"], "user")
        completion = _text_or_messages("completion", place, record["completion"], "assistant")
        given = [*((name, {**turn, "weight": 0}) for name, turn in prompt), *completion]
    elif record.keys() >= {"instruction", "output"}:
        given = _alpaca(place, record)
    else:
        raise refuse(f"{place}: keys", ", ".join(record), f"those of a conversation: {FORMS}")
    if "system" in record:
        given = [("system", {"role": "system", "content": record["system"]}), *given]
    turns = _with_call_ids([_turn(f"{place}: {name}", turn) for name, turn in given])
    answers = [i for i, (turn, (_, raw)) in enumerate(zip(turns, given)) if i and _trains(turn, raw)]
    if not answers:
        field = next(key for key in KEYS if key in record)
        raise refuse(f"{place}: {field}", record[field], "an assistant turn that follows another turn")
    return Conversation(
        turns[: answers[-1] + 1], _tools(f"{place}: tools", record.get("tools") or []), answers
    )


def encode_conversation(
    tokenizer: AnyTokenizer, place: str, conversation: Conversation, turns: Turns
) -> list[Example]:
    """Encodes a conversation as one example for each assistant turn that is trained on.

    A model that denoises an answer reads the clean turns before it, so several answers cannot share their history. An
    example holds the conversation up to its answer, as in LLaDA's fine-tuning (arXiv 2502.09992, appendix B.1).

    Args:
        tokenizer: Renders the turns.
        place: Where the conversation stands, for messages.
        conversation: The conversation.
        turns: "last" for the last assistant turn, "all" for each of them.

    Returns:
        The examples. Each prompt is the conversation before the answer, with the start of the assistant turn.

    Raises:
        ValueError: The tokenizer cannot render the conversation.
    """
    chosen = conversation.answers if turns == "all" else conversation.answers[-1:]
    return [_example(tokenizer, place, conversation.messages[: i + 1], conversation.tools) for i in chosen]


def _example(
    tokenizer: AnyTokenizer, place: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> Example:
    *before, answer = messages
    end = end_of_answer(tokenizer)
    try:
        _check_shown(tokenizer, messages, tools)
        prompt = tokenizer.render(before, tools=tools or None)
        if not answer.get("tool_calls"):
            ids = tokenizer.encode(answer["content"])
        else:  # only the chat template knows how calls are written
            whole = tokenizer.render(messages, add_generation_prompt=False, tools=tools or None)
            ids = whole[len(prompt) :]
            if whole[: len(prompt)] != prompt:
                raise ValueError(
                    "the chat template writes an answer with tool calls over the end of its prompt"
                )
            ends = [i for i, token in enumerate(ids) if token in (end, tokenizer.end_turn)]
            ids = ids[: ends[-1]] if ends else ids
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    return Example(np.array([*prompt, *ids, end], np.int32), len(prompt), True)


def _check_shown(
    tokenizer: AnyTokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    """Refuses tools and calls that a chat template leaves out without a word."""
    render = functools.partial(tokenizer.render, add_generation_prompt=False)
    if tools and render(messages, tools=tools) == render(messages, tools=None):
        raise ValueError("tools: the chat template of this model does not write them")
    called = [{k: v for k, v in turn.items() if k != "tool_calls"} for turn in messages]
    if called != messages and render(called, tools=tools or None) == render(messages, tools=tools or None):
        raise ValueError("tool_calls: the chat template of this model does not write them")


def end_of_answer(tokenizer: AnyTokenizer) -> int:
    """Finds the id that ends an answer in a chat."""
    ends = tokenizer.end_turn in (*tokenizer.ends, tokenizer.pad)
    return tokenizer.end_turn if ends and tokenizer.end_turn is not None else tokenizer.eos


def read_string(name: str, value: object) -> str:
    """Checks that a value is a string that UTF-8 can encode."""
    if not isinstance(value, str):
        raise refuse(name, value, "a string")
    # JSON can escape a lone surrogate ("\ud800"), which Python accepts in a string but UTF-8 does not.
    try:
        value.encode()
    except UnicodeEncodeError:
        raise refuse(name, value[:40], "valid Unicode, without lone surrogates") from None
    return value


# --- the forms


def _messages(name: str, place: str, value: object) -> list[NamedTurn]:
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) for turn in value):
        raise refuse(f"{place}: {name}", value, "a list of objects with role and content")
    return [(f"{name}[{i}]", turn) for i, turn in enumerate(value)]


def _text_or_messages(name: str, place: str, value: object, role: str) -> list[NamedTurn]:
    return (
        [(name, {"role": role, "content": value})]
        if isinstance(value, str)
        else _messages(name, place, value)
    )


def _alpaca(place: str, record: Record) -> list[NamedTurn]:
    texts = list[tuple[str, object]]()
    for i, pair in enumerate(record.get("history", [])):
        if not isinstance(pair, list) or len(pair) != 2:
            raise refuse(f"{place}: history[{i}]", pair, "a pair of a question and its answer")
        texts += [(f"history[{i}][0]", pair[0]), (f"history[{i}][1]", pair[1])]
    asked = read_string(f"{place}: instruction", record["instruction"])
    if more := read_string(f"{place}: input", record.get("input", "")):
        asked = f"{asked}\n{more}"
    texts += [("instruction", asked), ("output", record["output"])]
    return [(name, {"role": ("user", "assistant")[i % 2], "content": x}) for i, (name, x) in enumerate(texts)]


# --- one message


def _turn(name: str, given: Record) -> dict[str, Any]:
    """Reads a message: role, content, and the calls or the id of a tool."""
    role_key, content_key = ("from", "value") if "from" in given else ("role", "content")
    kind, content, calls = given.get(role_key), given.get(content_key), given.get("tool_calls") or []
    role = ROLE_NAMES.get(str(kind), kind)
    if role not in ROLES:
        raise refuse(f"{name}.{role_key}", kind, ", ".join((*ROLES, *ROLE_NAMES)))
    if given.get("weight") not in (None, 0, 1):
        raise refuse(f"{name}.weight", given["weight"], "0 or 1")
    if kind == "function_call":  # the content is the call
        calls = [
            _json(
                f"{name}.{content_key}", content, Mapping, "an object with name and arguments, as JSON text"
            )
        ]
        content = None
    turn: dict[str, Any] = {"role": role, "content": _content(f"{name}.{content_key}", content, bool(calls))}
    if calls:
        if role != "assistant":
            raise refuse(f"{name}.tool_calls", f"in a turn of {role}", "calls in an assistant turn")
        turn["tool_calls"] = [_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    if given.get("tool_call_id") is not None:
        turn["tool_call_id"] = read_string(f"{name}.tool_call_id", given["tool_call_id"])
    if given.get("name") is not None:
        turn["name"] = read_string(f"{name}.name", given["name"])
    return turn


def _content(name: str, value: object, calls: bool) -> str:
    """Reads a content: a text, or a list of text parts; none beside tool calls."""
    if value is None and calls:
        return ""
    if (
        isinstance(value, list) and value
    ):  # joined as in a request, so that the model sees in both what it learnt
        value = join_parts(value, name, kinds="text: models are trained on text only")
    return read_string(name, value)


def _call(name: str, given: object) -> dict[str, Any]:
    """Reads a tool call; its arguments are an object, or the JSON text of one, as OpenAI sends them."""
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refuse(name, given, "an object whose function has name and arguments")
    arguments = function.get("arguments")
    read = _json(
        f"{name}.function.arguments", {} if arguments is None else arguments, Mapping, "a JSON object"
    )
    call = {"type": "function", "function": {"name": function["name"], "arguments": dict(read)}}
    identity = given.get("id") if isinstance(given, Mapping) else None
    return {"id": identity, **call} if isinstance(identity, str) else call


def _tools(name: str, value: object) -> list[dict[str, Any]]:
    """Reads the functions that the model may call, which many datasets keep as JSON text."""
    tools = _json(name, value, list, "a list of functions with a name, or its JSON text")
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise refuse(f"{name}[{i}]", tool, "an object whose function has a name")
    return [
        dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools
    ]


def _json(name: str, value: object, kind: type, allowed: str) -> Any:
    """Returns a value of a kind, read from JSON text if it is a text."""
    read = value
    if isinstance(value, str):
        try:
            read = json.loads(value)
        except ValueError:
            raise refuse(name, value, allowed) from None
    if not isinstance(read, kind):
        raise refuse(name, value, allowed)
    return read


def _with_call_ids(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Names the call that each result answers, in the order of the calls, where the data do not."""
    waiting = list[str]()
    for i, turn in enumerate(turns):
        if turn["role"] == "assistant":
            calls = turn.get("tool_calls", ())
            for k, call in enumerate(calls):
                call.setdefault("id", f"call_{i}_{k}")
            waiting = [call["id"] for call in calls]
        elif turn["role"] == "tool" and waiting:
            first = waiting.pop(0)
            turn.setdefault("tool_call_id", first)
    return turns


def _trains(turn: Record, given: Record) -> bool:
    """Whether an answer is trained on; a weight of 0 excludes it, as in OpenAI's form."""
    return (
        turn["role"] == "assistant" and given.get("weight") != 0
    )  # `_turn` has refused other weights than 0 and 1
