"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mercury_jax.serve import errors, responses
from mercury_jax.serve.auth import cache_salt
from mercury_jax.serve.chat.messages import InvalidField, check_messages, check_tools
from mercury_jax.serve.chat.output_parser import OutputParser
from mercury_jax.serve.chat.tool_prompt import opens_thinking, render_prompt
from mercury_jax.serve.constraint import OutputConstraint, ToolPolicy, output_constraint, tool_policy
from mercury_jax.serve.continuation import continuation_of
from mercury_jax.serve.engine.request import EngineRequest
from mercury_jax.serve.http import dump_json
from mercury_jax.serve.protocol import ChatCompletionsRequest
from mercury_jax.serve.sampling_params import (
    DecodingParams,
    TokenBudget,
    decoding_params,
    make_job,
    repeat_job,
    token_budget,
    vendor_temperature,
)
from mercury_jax.serve.service import Service
from mercury_jax.serve.streaming import ResponsePlan, respond

Messages = Sequence[Mapping[str, Any]]


async def chat_completions(service: Service, request: Request) -> Response:
    """Answers a conversation.

    Args:
        service: The service.
        request: The HTTP request.

    Returns:
        A JSON response or an event stream.
    """
    body = await service.read(request, ChatCompletionsRequest)
    plain = body.model_dump(include={"tools", "response_format"}, exclude_unset=True, by_alias=True)
    size = len(dump_json(plain)) if body.tools or body.response_format else None
    salt = cache_salt(request.scope)
    return await respond(service, request, lambda: prepare_chat(service, body, salt), body.n, size)


def prepare_chat(
    service: Service, body: ChatCompletionsRequest, salt: str
) -> tuple[ResponsePlan, list[EngineRequest]]:
    """Makes the jobs of a request, one per answer. Not for the event loop: it renders and may compile a grammar.

    Args:
        service: The service.
        body: The request.
        salt: Requests of another salt never share cached prefixes.

    Returns:
        The plan of the response, and the jobs.

    Raises:
        ApiError: 400 for what cannot be honoured.
    """
    lm, options = service.engine.lm, service.options
    if body.top_logprobs is not None and not body.logprobs:
        raise errors.invalid_request("top_logprobs", "top_logprobs needs logprobs to be true")
    messages, tools = _check_messages(service, body)
    policy = tool_policy(body, tools) if tools or body.tool_choice else ToolPolicy()
    decoding = decoding_params(service, body.reasoning_effort or ("instant" if body.realtime else None))
    prompt, budget = _render(service, body, messages, policy, decoding)
    # Compiling comes last: it may take seconds, and a prompt that is too long is refused before.
    constrained = bool(policy.tools or body.response_format)
    constraint = output_constraint(lm, body, policy) if constrained else OutputConstraint()
    temperature, warning = body.temperature, None
    if options.strict_temperature:
        temperature, warning = vendor_temperature(body.temperature)
    job = make_job(
        service,
        body,
        decoding,
        prompt=prompt,
        max_tokens=budget.answer,
        thinking=budget.thinking,
        temperature=temperature,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=constraint.grammar,
        cache_salt=salt,
        frames=body.diffusing and body.stream,
    )
    thinks = opens_thinking(lm, prompt)
    stops = () if constraint.json else body.stop_sequences
    plan = ResponsePlan(
        kind=responses.CHAT,
        request=body,
        prompt_tokens=len(prompt),
        parser=lambda: OutputParser(lm, chat=True, tools=bool(policy.tools), stop=stops, thinking=thinks),
        answers_per_prompt=body.n,
        diffusing=body.diffusing and body.stream,
        reasoning_summary=body.reasoning_summary,
        thinks=thinks,
        warning=warning,
        check=constraint.check,
        logprobs=lambda snapshot, message: responses.chat_logprobs(
            lm, snapshot, message, body.top_logprobs or 0
        ),
        continuation=continuation_of(lm, service.engine.context, thinks),
    )
    return plan, repeat_job(job, body.n)


def _check_messages(
    service: Service, body: ChatCompletionsRequest
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns messages and tools in the form that chat templates take."""
    plain = body.model_dump(include={"messages", "tools"}, exclude_unset=True)
    try:
        tools = check_tools(plain.get("tools"))
        messages = check_messages(plain["messages"], tools)
    except InvalidField as refused:
        raise errors.invalid_request(refused.param, refused.message) from None
    service.check_size(sum(map(_text_size, messages)))
    return messages, tools


def _text_size(message: Mapping[str, Any]) -> int:
    """Returns the characters that any template writes of a message: its content and the arguments of its calls."""
    arguments = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    written = (json.dumps(one, ensure_ascii=False, separators=(",", ":")) for one in arguments)
    return len(message["content"] or "") + sum(map(len, written))


def _render(
    service: Service,
    body: ChatCompletionsRequest,
    messages: Messages,
    policy: ToolPolicy,
    decoding: DecodingParams,
) -> tuple[tuple[int, ...], TokenBudget]:
    """Returns the ids of the prompt and the budget; without room for thinking, the prompt does not open it."""
    lm, max_tokens = service.engine.lm, body.max_completion_tokens or body.max_tokens
    for thinking in sorted({decoding.thinking, 0}, reverse=True):
        try:
            ids = render_prompt(lm, messages, policy.tools or None, thinking=thinking > 0)
        except InvalidField as refused:
            raise errors.invalid_request(refused.param, refused.message) from None
        budget = token_budget(service.engine.context, len(ids), max_tokens, thinking)
        if budget.thinking or not thinking:
            return ids, budget
    raise AssertionError("the loop ends with thinking 0, which always returns")
