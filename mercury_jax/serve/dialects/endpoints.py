"""The routes of the Responses API and of the Messages API.

Each translates its body into a chat request, which `chat_completions.answer_chat` answers, and has the answer written
in its own form.
"""

from __future__ import annotations

import asyncio
import functools

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from mercury_jax.serve import errors
from mercury_jax.serve.auth import KEY_DIGEST
from mercury_jax.serve.chat_completions import answer_chat, render_chat
from mercury_jax.serve.dialects import messages_request as messages, responses_request as responses
from mercury_jax.serve.dialects.messages_writer import MessagesWriter
from mercury_jax.serve.dialects.responses_writer import ResponsesWriter
from mercury_jax.serve.dialects.translation import naming
from mercury_jax.serve.http import REQUEST_ID, JsonResponse
from mercury_jax.serve.response_store import StoredResponse
from mercury_jax.serve.responses import JsonDict
from mercury_jax.serve.service import ServedModels


async def create_response(models: ServedModels, request: Request) -> Response:
    """POST /v1/responses."""
    service, body = await models.read(request, responses.ResponsesRequest)
    owner, items, before = request.scope.get(KEY_DIGEST, ""), responses.input_items(body), []
    if body.previous_response_id is not None:
        stored = models.responses.get(owner, body.previous_response_id, "previous_response_id", 400)
        before = stored.items + stored.response["output"]

    def keep(response: JsonDict) -> None:
        if body.store:
            read = [item for item in before + items if item["type"] != "reasoning"]
            models.responses.put(owner, StoredResponse(response, read))

    turns = responses.chat_turns(body, before, items)
    with naming(responses.CHAT_NAMES, turns):
        chat = await run_in_threadpool(responses.responses_chat, body, turns)
        return await answer_chat(service, request, chat, functools.partial(ResponsesWriter, body, keep))


async def stored_response(models: ServedModels, request: Request) -> Response:
    """GET and DELETE /v1/responses/{id}."""
    if request.method == "DELETE":
        id = request.path_params["id"]
        models.responses.delete(request.scope.get(KEY_DIGEST, ""), id)
        return JsonResponse({"id": id, "object": "response", "deleted": True})
    if request.query_params.get("stream", "false") != "false":
        raise errors.invalid_value("stream", request.query_params["stream"], "false for a stored response")
    return JsonResponse(_stored(models, request).response)


async def list_input_items(models: ServedModels, request: Request) -> Response:
    """GET /v1/responses/{id}/input_items: a page of them, the newest first unless `order` is asc."""
    query, items = request.query_params, _stored(models, request).items
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise errors.invalid_value("order", order, "asc, desc")
    limit = query.get("limit", "20")
    if not limit.isdecimal() or not 1 <= int(limit[:4]) <= responses.MAX_PAGE:
        raise errors.invalid_value("limit", limit, f"a whole number from 1 to {responses.MAX_PAGE}")
    items = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in items]
    if (after := query.get("after")) is not None and after not in ids:
        raise errors.invalid_value("after", after, "the id of an item of the list")
    left = items if after is None else items[ids.index(after) + 1 :]
    page = left[: int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    ends = {"first_id": first, "last_id": last, "has_more": len(page) < len(left)}
    return JsonResponse({"object": "list", "data": page, **ends})


async def create_message(models: ServedModels, request: Request) -> Response:
    """POST /v1/messages."""
    service, body = await models.read(request, messages.MessagesRequest)
    turns = messages.message_turns(body)
    writer = functools.partial(MessagesWriter, body, request.scope[REQUEST_ID])
    with naming(messages.CHAT_NAMES, turns):
        chat = await run_in_threadpool(messages.messages_chat, body, turns)
        return await answer_chat(service, request, chat, writer)


async def count_message_tokens(models: ServedModels, request: Request) -> Response:
    """POST /v1/messages/count_tokens: the tokens of the prompt that POST /v1/messages would render."""
    service, body = await models.read(request, messages.CountTokensRequest)
    turns = messages.message_turns(body)
    with naming(messages.CHAT_NAMES, turns):
        render = lambda: render_chat(service, messages.messages_chat(body, turns))
        rendered = await asyncio.wrap_future(service.pools.plain.submit(render))
    return JsonResponse({"input_tokens": len(rendered.prompt)})


def _stored(models: ServedModels, request: Request) -> StoredResponse:
    return models.responses.get(request.scope.get(KEY_DIGEST, ""), request.path_params["id"])
