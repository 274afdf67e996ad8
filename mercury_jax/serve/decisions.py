"""POST /v1/decisions, in Mercury's and OpenAI's form, and POST /v1/systemone, for TypeSafe's client.

The questions are checked and encoded in a thread, and read by the engine's `DecisionWorker` together with those of
other requests.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mercury_jax.decode.decide import DecideOutput, ask, check_settings
from mercury_jax.serve import errors
from mercury_jax.serve.decision_protocol import DecisionsRequest, MercuryDecisionsRequest, parse_decisions
from mercury_jax.serve.errors import ApiError
from mercury_jax.serve.http import REQUEST_ID, JsonResponse, read_json, to_reported_error
from mercury_jax.serve.protocol import parse_request
from mercury_jax.serve.service import ServedModels, Service, check_ready, to_api_error
from mercury_jax.serve.streaming import ClientDisconnected, run_until_disconnect

MAX_CHARACTERS = 8 << 20  # of the state and questions of all reads together, which are tokenized
MAX_TOKENS = 1 << 18  # of all rows that a decision reads


async def decisions(models: ServedModels, request: Request) -> Response:
    """Answers typed questions about a state."""
    return await _decide(models, request, parse_decisions)


async def system_one(models: ServedModels, request: Request) -> Response:
    """Answers typed questions with the headers and errors that TypeSafe's client reads."""
    own = {"x-typesafe-request-id": request.scope[REQUEST_ID]}
    try:
        response = await _decide(models, request, functools.partial(parse_request, MercuryDecisionsRequest))
    except Exception as error:
        return _typesafe_error(to_reported_error(error, request.scope[REQUEST_ID]), own)
    response.headers.update(own)
    return response


def _typesafe_error(error: ApiError, headers: Mapping[str, str]) -> Response:
    """Writes an error as TypeSafe does: a field that is not valid has status 422, and a list of places and messages."""
    headers = {**error.headers, **headers}
    if "retry-after" in headers:
        headers["retry-after-ms"] = str(math.ceil(float(headers["retry-after"]) * 1000))
    if error.status == 400 and error.param is not None:
        detail = [{"loc": ["body", *error.param.split(".")], "msg": error.message, "type": "value_error"}]
        return JsonResponse({"detail": detail}, 422, headers=headers)
    return JsonResponse(error.envelope(), error.status, headers=headers)


async def _decide(
    models: ServedModels, request: Request, parse: Callable[[Mapping[str, Any]], DecisionsRequest]
) -> Response:
    """Reads a request, submits its questions and writes the answers."""
    body = await read_json(request, models.options, parse)
    service = models.find(body.model)
    check_ready(service.engine)
    try:
        submission = service.submit(lambda: _submit(service, body), 1)
        _, jobs = await run_until_disconnect(request.receive, submission)
    except ClientDisconnected:
        return Response(status_code=499)
    [found] = jobs.handles
    try:
        out: DecideOutput = await run_until_disconnect(request.receive, asyncio.wrap_future(found))  # type: ignore
    except ClientDisconnected:
        return Response(status_code=499)
    except ValueError as error:  # NaN
        raise ApiError(500, str(error), "server_error", code="server_error") from error
    finally:
        jobs.close()
    return JsonResponse(body.answered(out, body.model))


def _submit(service: Service, body: DecisionsRequest) -> tuple[None, list[Future[DecideOutput]]]:
    """Encodes the questions and queues them. Runs in a thread."""
    lm, (state, questions) = service.engine.lm, body.asked()
    reads = body.reads + body.second_reads
    text = state if isinstance(state, str) else json.dumps(state, ensure_ascii=False)
    service.check_size(len(text), "state")
    if (size := len(text) * len(questions) * reads) > MAX_CHARACTERS:
        allowed = (
            f"up to {MAX_CHARACTERS}: ask fewer questions about a state of this size, or read them less often"
        )
        raise errors.invalid_request(
            "questions", f"state, questions and reads make {size} characters; allowed: {allowed}"
        )
    try:
        settings = check_settings(lm, body.reads, body.second_reads, body.doubt, None, body.seed)
        asked = ask(lm, state, questions, settings)
    except ValueError as error:
        raise errors.invalid_request("questions", str(error)) from None
    lengths = [row.length for one in asked for prompt in one.prompts for row in prompt.rows]
    longest, total = max(lengths), sum(lengths)
    if longest > service.engine.context:
        detail = f"State and question need {longest} tokens; allowed: up to {service.engine.context}."
        raise errors.context_length_exceeded(service.engine.context, detail, "state")
    if total > MAX_TOKENS:
        allowed = f"up to {MAX_TOKENS}: ask fewer questions, with fewer labels or reads"
        raise errors.invalid_request("questions", f"the questions read {total} tokens; allowed: {allowed}")
    try:
        return None, [service.engine.decide(asked, settings)]
    except Exception as error:
        raise to_api_error(error, service.engine.context) from error
