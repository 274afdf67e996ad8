"""The outermost layer: every answer has a request id, and nothing unforeseen leaves the server as it was."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mercury_jax.serve.api import errors
from mercury_jax.serve.api.errors import ApiError
from mercury_jax.serve.api.metrics import Metrics

log = logging.getLogger("mercury.serve")
ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
REQUEST_ID = "mercury.request_id"
HEADER_BYTES = 16 << 10  # of a request's path and headers together


class Trace:
    """Names the request, counts its answer, and turns exceptions into envelopes."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope[REQUEST_ID] = name = _id(scope)
        started: list[int] = []

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                started.append(message["status"])
                message = {**message, "headers": _headers(message.get("headers", ()), name)}
            await send(message)

        try:
            check_head(scope)
            await self.app(scope, receive, named)
        except asyncio.CancelledError:  # the server ends: an answer that has not begun is refused, not failed
            if not started:
                await errors.response(errors.unavailable("The server is shutting down."))(
                    scope, receive, named
                )
            raise
        except Exception as error:
            told = told_of(error, name)
            if not started:
                await errors.response(told)(scope, receive, named)
        finally:
            self.metrics.answered(scope, started[0] if started else 499)


def check_head(scope: Scope) -> None:
    """ApiError for a head that no honest client sends; the connection is closed behind it.

    431: HTTP libraries count what is incomplete only, so that one large packet passes them. 400: with two lengths of
    the body a proxy in front may see another end of this request, and take what follows for the next one (request
    smuggling, RFC 9112 section 6.1).
    """
    names = {name.lower() for name, _ in scope["headers"]}
    if {b"content-length", b"transfer-encoding"} <= names:
        told = "Content-Length and Transfer-Encoding in one request; allowed: one of them"
        raise ApiError(400, told, headers={"connection": "close"})
    size = len(scope["path"]) + len(scope["query_string"])
    size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if size > HEADER_BYTES:
        raise ApiError(
            431, f"The headers are larger than {HEADER_BYTES} bytes", headers={"connection": "close"}
        )


def told_of(error: Exception, request_id: str) -> ApiError:
    """What a client may know of an error: all of our own, and nothing of any other."""
    if isinstance(error, ApiError):
        return error
    log.exception("request %s failed", request_id, exc_info=error)
    return errors.failed(request_id)


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return errors.response(error)


def _headers(given: Iterable[tuple[bytes, bytes]], name: str) -> list[tuple[bytes, bytes]]:
    own = {b"x-request-id": name.encode(), b"x-content-type-options": b"nosniff"}
    return [*((key, value) for key, value in given if key.lower() not in own), *own.items()]


def _id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and ID.fullmatch(value):
            return value.decode()
    return "req_" + secrets.token_hex(12)
