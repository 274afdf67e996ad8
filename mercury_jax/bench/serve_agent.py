"""An agent against a server: the model calls tools, the tools are run, and the time of the whole is what counts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mercury_jax.bench.serve_client import Client
from mercury_jax.bench.serve_load import CHAT

Json = dict[str, Any]


class Trip(NamedTuple):
    """One loop from the question to the answer.

    whole: seconds; turns: of each request among them. calls: tools that were called, valid: of these, with arguments
    that the tool took. refused: what the server said instead, "" where the loop came to its end.
    """

    whole: float
    turns: tuple[float, ...]
    tokens: int
    calls: int
    valid: int
    refused: str = ""


def _tool(name: str, about: str) -> Json:
    number = {"type": "integer", "minimum": 0, "maximum": 9999}
    schema = {
        "type": "object",
        "properties": {"a": number, "b": number},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


TOOLS = (_tool("add", "a plus b"), _tool("multiply", "a times b"))
RUN: Mapping[str, Callable[[int, int], int]] = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b}


async def trip(
    client: Client, model: str, question: str, turns: int, max_tokens: int, tools: bool = True
) -> Trip:
    """Ask, run the tools that are called, `turns` times; then have the answer said.

    With `tools` false the same conversation is held in free text, with as many turns and nothing to obey.
    """
    messages: list[Json] = [{"role": "user", "content": question}]
    seconds, tokens, calls, valid = [], 0, 0, 0
    began = time.perf_counter()
    for turn in range(turns + 1):
        body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        if tools:
            body |= {"tools": TOOLS, "tool_choice": "required" if turn < turns else "none"}
        sent = time.perf_counter()
        answer = await client.ask("POST", CHAT, body)
        seconds.append(time.perf_counter() - sent)
        if answer.status != 200:
            told = answer.body.decode("utf-8", "replace")
            return Trip(time.perf_counter() - began, tuple(seconds), tokens, calls, valid, told)
        told = answer.json()
        tokens += told["usage"]["completion_tokens"]
        found = told["choices"][0]["message"].get("tool_calls") or []
        results = [run(call["function"]) for call in found]
        calls, valid = calls + len(found), valid + sum(x is not None for x in results)
        messages += _next(told["choices"][0]["message"], found, results)
    return Trip(time.perf_counter() - began, tuple(seconds), tokens, calls, valid)


def run(function: Mapping[str, str]) -> int | None:
    """What a tool makes of a call's arguments; None where it does not take them."""
    try:
        given = json.loads(function["arguments"])
        return RUN[function["name"]](int(given["a"]), int(given["b"]))
    except (KeyError, TypeError, ValueError):
        return None


def _next(message: Json, calls: list[Json], results: list[int | None]) -> list[Json]:
    """The messages that follow an answer: itself, and what its tools gave."""
    if not calls:
        return [
            {"role": "assistant", "content": message.get("content") or ""},
            {"role": "user", "content": "go on"},
        ]
    kept = {"role": "assistant", "content": message.get("content"), "tool_calls": calls}
    told = [
        {"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)}
        for call, result in zip(calls, results)
    ]
    return [kept, *told]
