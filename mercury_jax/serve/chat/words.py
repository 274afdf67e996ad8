"""Tools for a checkpoint whose chat template does not know them: told in words, called in Hermes' form.

The list goes into the system message, or before the first user message where there is none (some templates refuse
a system role). Calls become text of the assistant; results become text of the user, which all templates have, and
one message where they stand together, since some want the roles to alternate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mercury_jax.chat import call_text, tools_text
from mercury_jax.serve.chat.formats import HERMES

HOW = """\
You may call these functions:
{tools}
To call one, answer with its name and its arguments, as JSON between two tags:
{open}
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
{close}
Several calls stand one behind the other. Their results come back between <tool_response> and </tool_response>."""


def written(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """The same conversation in roles system, user and assistant, with nothing but texts."""
    made: list[dict[str, Any]] = []
    for message in messages:
        plain = _plain(message)
        if message["role"] == "tool" and made and made[-1].get("results"):
            made[-1]["content"] += f"\n{plain['content']}"
        else:
            made.append(plain)
    told = [{"role": m["role"], "content": m["content"]} for m in made]
    return (
        _told(told, HOW.format(tools=tools_text(tools), open=HERMES[0], close=HERMES[1])) if tools else told
    )


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        text = f"<tool_response>\n{content}\n</tool_response>"
        return {"role": "user", "content": text, "results": True}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    texts = [f"{HERMES[0]}\n{call_text(call['name'], call['arguments'])}\n{HERMES[1]}" for call in calls]
    return {"role": message["role"], "content": "\n".join([*([content] if content else []), *texts])}


def _told(messages: list[dict[str, Any]], words: str) -> list[dict[str, Any]]:
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{words}".lstrip()}, *messages[1:]]
    at = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": words}, *messages]
    asked = {**messages[at], "content": f"{words}\n\n{messages[at]['content']}"}
    return [*messages[:at], asked, *messages[at + 1 :]]
