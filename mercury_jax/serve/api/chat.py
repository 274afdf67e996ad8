"""POST /v1/chat/completions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mercury_jax.serve.api import body, errors, logprobs, numbers, tables, wire
from mercury_jax.serve.api.again import continued
from mercury_jax.serve.api.constraint import Calls, Constraint, calls, constraint
from mercury_jax.serve.api.guard import key_of
from mercury_jax.serve.api.numbers import Ask, Pace, Room
from mercury_jax.serve.api.running import respond
from mercury_jax.serve.api.service import Service
from mercury_jax.serve.api.work import Work
from mercury_jax.serve.chat.messages import InvalidField, check_messages, check_tools
from mercury_jax.serve.chat.output_parser import OutputParser
from mercury_jax.serve.chat.tool_prompt import opens_thinking, render_prompt
from mercury_jax.serve.engine.request import EngineRequest
from mercury_jax.types import LM


async def chat(service: Service, request: Request) -> Response:
    """Answer a conversation, as JSON or as events."""
    data = body.merged(await body.read(request, service.options))
    ask = tables.CHAT.read(data, "")
    service.check(ask["model"])
    salt = key_of(request.scope)
    bound = ask["tools"] or ask["response_format"]
    size = len(errors.dumps([ask["tools"], ask["response_format"]])) if bound else None
    return await respond(service, request, lambda: prepare(service, ask, data, salt), ask["n"], size)


def prepare(
    service: Service, ask: Ask, data: Mapping[str, Any], salt: str
) -> tuple[Work, Sequence[EngineRequest]]:
    """The jobs of a request. ApiError for what cannot be honoured. Takes a processor: not for the event loop."""
    messages, tools = _checked(service, data)
    offered = calls(ask, tools)
    pace = numbers.pace(service, _effort(ask))
    prompt, room = _prompt(service, messages, offered, ask, pace)
    bound = constraint(
        service.engine.lm, ask, offered
    )  # may take seconds: what is too long is refused before
    warmth, warning = numbers.temperature(ask, service.options.strict_temperature)
    job = EngineRequest(
        prompt=prompt,
        max_tokens=room.answer,
        thinking=room.thinking,
        rule=pace.rule,
        p=pace.p,
        steps=pace.steps,
        temperature=warmth,
        seed=numbers.seed(ask),
        logprobs=_alternatives(ask),
        grammar=bound.grammar,
        cache_salt=salt,
        frames=ask["diffusing"] and ask["stream"],
        **numbers.sampling(ask, service.engine.lm.model.config.vocab),
    )
    work = _work(service.engine.lm, ask, prompt, bool(offered.tools), bound)
    then = continued(service.engine.lm, service.engine.context, work.thinks)
    return work._replace(warning=warning, then=then), copies(job, ask["n"])


def _work(lm: LM, ask: Ask, prompt: tuple[int, ...], tools: bool, bound: Constraint) -> Work:
    """How the answers to a conversation are read and told."""
    stops = () if bound.json else stop_texts(ask["stop"])
    thinks = opens_thinking(lm, prompt)
    return Work(
        form=wire.CHAT,
        model=ask["model"],
        prompt_tokens=len(prompt),
        reply=lambda: OutputParser(lm, chat=True, tools=tools, stop=stops, thinking=thinks),
        copies=ask["n"],
        stream=ask["stream"],
        include_usage=bool(ask["stream_options"] and ask["stream_options"]["include_usage"]),
        diffusing=ask["diffusing"] and ask["stream"],
        summary=ask["reasoning_summary"],
        thinks=thinks,
        check=bound.check,
        logprobs=lambda snapshot, message: logprobs.chat(lm, snapshot, message, ask["top_logprobs"] or 0),
    )


def copies(job: EngineRequest, n: int) -> list[EngineRequest]:
    """The same job n times, each with a seed of its own."""
    return [dataclasses.replace(job, seed=(job.seed + i) % (1 << 31)) for i in range(n)]


def stop_texts(stop: Any) -> tuple[str, ...]:
    """One text or several; an empty one ends nothing."""
    return tuple(filter(None, [stop] if isinstance(stop, str) else stop or ()))


def _checked(service: Service, data: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    try:
        tools = check_tools(data.get("tools"))
        messages = check_messages(data["messages"], tools)
    except InvalidField as refused:
        raise errors.invalid(refused.param, refused.message) from None
    numbers.check_size(service, sum(map(_size, messages)))
    return messages, tools


def _size(message: Mapping[str, Any]) -> int:
    """Characters of what a template tells of a message at least; one that only calls has no content."""
    given = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    written = (json.dumps(one, ensure_ascii=False, separators=(",", ":")) for one in given)
    return len(message["content"] or "") + sum(map(len, written))


def _effort(ask: Ask) -> str | None:
    return ask["reasoning_effort"] or ("instant" if ask["realtime"] else None)


def _alternatives(ask: Ask) -> int | None:
    if ask["top_logprobs"] is not None and not ask["logprobs"]:
        raise errors.invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    return (ask["top_logprobs"] or 0) if ask["logprobs"] else None


def _prompt(
    service: Service, messages: Sequence[Mapping[str, Any]], offered: Calls, ask: Ask, pace: Pace
) -> tuple[tuple[int, ...], Room]:
    """(ids, room): open for thinking where there is room for it, else for the answer."""
    lm, context = service.engine.lm, service.engine.context
    wanted = ask["max_completion_tokens"] or ask["max_tokens"]
    for thinking in sorted({pace.thinking, 0}, reverse=True):
        try:
            ids = render_prompt(lm, messages, offered.tools or None, thinking=thinking > 0)
        except InvalidField as refused:
            raise errors.invalid(refused.param, refused.message) from None
        room = numbers.room(context, len(ids), wanted, thinking)
        if room.thinking or not thinking:
            return ids, room
    raise AssertionError("thinking 0 always returns")
