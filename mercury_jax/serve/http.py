"""The HTTP layer: limits on headers and bodies, JSON parsing and writing, request ids, and error responses.

Headers and body are limited in bytes before they are parsed; the body is also limited in time and in nesting depth.
`RequestMiddleware` is the outermost layer of the app; endpoints read their bodies with `read_json`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import secrets
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import unquote

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mercury_jax.serve import errors
from mercury_jax.serve.errors import ApiError, invalid_request
from mercury_jax.serve.metrics import Metrics
from mercury_jax.serve.options import MAX_BODY, ServerOptions

log = logging.getLogger("mercury.serve")
T = TypeVar("T")

MAX_HEADER_BYTES = 16 << 10  # maximum size of path and headers together
INLINE_BYTES = 64 << 10  # up to this size, parsing takes less time than switching to a thread
MESSAGES_PATH = "/v1/messages"
REQUEST_ID = "mercury.request_id"  # key of the ASGI scope
REQUEST_ID_PATTERN = re.compile(rb"[A-Za-z0-9._-]{1,64}")
JSON_TYPE = re.compile(r"application/(?:[a-z0-9.!#$&^_-]+\+)?json", re.IGNORECASE)
CHARSETS = ("utf-8", "utf8", "us-ascii")
ABSOLUTE_FORM = re.compile(rb"https?://([^/?#]*)(/[^?#]*)?", re.IGNORECASE)


def dump_json(value: Any) -> str:
    """Serialises to compact ASCII JSON, so that no Unicode line separator can split an event.

    Args:
        value: A JSON value; lone surrogates are escaped, NaN and infinities are refused.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def sse_event(value: Any, name: str | None = None) -> bytes:
    """Makes a server-sent event whose data is one line.

    Args:
        value: A JSON value. `dump_json` escapes all line ends, so the event cannot be split.
        name: The event's name, in a line of its own.
    """
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {dump_json(value)}\n\n".encode("ascii")


class JsonResponse(Response):
    """A response whose body is JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Returns the body."""
        return dump_json(content).encode("ascii")


def error_response(error: ApiError, scope: Scope) -> Response:
    """Returns the response of an error, in the envelope of the API that the path belongs to."""
    of_messages = f"{scope['path']}/".startswith(f"{MESSAGES_PATH}/")
    body = errors.messages_envelope(error, scope[REQUEST_ID]) if of_messages else error.envelope()
    return JsonResponse(body, error.status, headers=error.headers)


def to_reported_error(error: Exception, request_id: str) -> ApiError:
    """Converts an exception to the error that the client sees: an `ApiError` unchanged, any other as a bare 500."""
    if isinstance(error, ApiError):
        return error
    log.exception("request %s failed", request_id, exc_info=error)
    return errors.internal_error(request_id)


class RequestMiddleware:
    """Gives each request an id, counts its response, and turns exceptions into error envelopes."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # Use the client's X-Request-Id if it has only harmless characters, else a new id.
        given = (v for k, v in scope["headers"] if k == b"x-request-id" and REQUEST_ID_PATTERN.fullmatch(v))
        scope[REQUEST_ID] = request_id = next(given, b"req_" + secrets.token_hex(12).encode()).decode()
        own = {b"x-request-id": request_id.encode(), b"x-content-type-options": b"nosniff"}
        own[b"request-id"] = own[b"x-request-id"]  # the name that Anthropic's client reads
        status: int | None = None

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                kept = ((k, v) for k, v in message.get("headers", ()) if k.lower() not in own)
                message = {**message, "headers": [*kept, *own.items()]}
            await send(message)

        try:
            use_origin_form(scope)
            check_headers(scope)
            await self.app(scope, receive, send_named)
        except asyncio.CancelledError:
            # The server is shutting down: a request without a response yet gets a 503.
            if status is not None:
                raise
            refusal = errors.unavailable("The server is shutting down.")
            await error_response(refusal, scope)(scope, receive, send_named)
        except Exception as error:
            reported = to_reported_error(error, request_id)
            if status is None:
                await error_response(reported, scope)(scope, receive, send_named)
        finally:
            self.metrics.count_response(scope, 499 if status is None else status)


def use_origin_form(scope: Scope) -> None:
    """Makes `GET http://host/path` the same request as `GET /path` with that Host (RFC 9112, section 3.2.2)."""
    found = ABSOLUTE_FORM.fullmatch(scope.get("raw_path") or b"")
    if found is None:
        return
    scope["raw_path"] = found[2] or b"/"
    scope["path"] = unquote(scope["raw_path"].decode("latin-1"))
    others = [(name, value) for name, value in scope["headers"] if name.lower() != b"host"]
    scope["headers"] = [(b"host", found[1]), *others]


def check_headers(scope: Scope) -> None:
    """Refuses headers that no well-behaved client sends, and closes the connection.

    If a request has both Content-Length and Transfer-Encoding, a proxy may disagree with this server about its end, and
    take the rest of the body for the next request (request smuggling, RFC 9112 section 6.1). The size is checked here
    because HTTP libraries limit incomplete headers only: headers that arrive in one large packet would pass.
    """
    close = {"connection": "close"}
    names = {name.lower() for name, _ in scope["headers"]}
    if {b"content-length", b"transfer-encoding"} <= names:
        message = "Content-Length and Transfer-Encoding in one request; allowed: one of them"
        raise ApiError(400, message, headers=close)
    size = len(scope["path"]) + len(scope["query_string"])
    size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if size > MAX_HEADER_BYTES:
        raise ApiError(431, f"The headers are larger than {MAX_HEADER_BYTES} bytes", headers=close)


async def read_json(request: Request, options: ServerOptions, convert: Callable[[dict[str, Any]], T]) -> T:
    """Reads the JSON object in the body of a request. Large bodies are parsed and converted in a thread.

    Args:
        options: Limits: `max_body` (counted while the body arrives; `Content-Length` is not trusted), `max_depth`
            and `read_timeout`.
    """
    kind, *parameters = request.headers.get("content-type", "").split(";")
    pairs = [(name.strip().lower(), value.strip(' "').lower()) for name, _, value in
             (parameter.partition("=") for parameter in parameters)]  # fmt: skip
    unread = [value for name, value in pairs if name == "charset" and value not in CHARSETS]
    if unread or not JSON_TYPE.fullmatch(kind.strip()):
        raise ApiError(415, "Content-Type must be application/json, in UTF-8")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "Content-Encoding must be identity")
    limit = MAX_BODY if options.max_body is None else options.max_body
    message = f"The request is larger than {limit} bytes"
    too_large = ApiError(413, message, headers={"connection": "close"})
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > limit:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(options.read_timeout):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large
                parts.append(part)
    except ClientDisconnect:
        raise ApiError(400, "The client disconnected before its request was complete") from None
    except TimeoutError:
        message = f"The request took over {options.read_timeout:g} s to arrive"
        raise ApiError(408, message, headers={"connection": "close"}) from None
    body = b"".join(parts)
    parse = lambda: convert(parse_json(body, options.max_depth))
    return parse() if len(body) <= INLINE_BYTES else await run_in_threadpool(parse)


def parse_json(body: bytes, max_depth: int) -> dict[str, Any]:
    """Parses the JSON object of a body."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=refuse_constant, parse_float=refuse_constant)
    except RecursionError:
        raise invalid_request(None, f"The body is nested more than {max_depth} levels deep") from None
    except UnicodeDecodeError:
        raise invalid_request(None, "The body is not valid UTF-8") from None
    except json.JSONDecodeError as error:
        # Some of its messages end with "at", or with advice on Python in parentheses.
        told = error.msg.removesuffix(" at").partition(" (")[0]
        where = f"character {error.colno} of line {error.lineno}"
        raise invalid_request(None, f"The body is not valid JSON: {told} at {where}") from None
    except NotFinite as error:
        raise invalid_request(None, f"The body is not valid JSON: {error}") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise invalid_request(None, "The body is not valid JSON: a number has too many digits") from None
    if not isinstance(value, dict):
        constant = value is None or isinstance(value, bool)
        kind = {list: "a list", str: "a text"}.get(type(value), json.dumps(value) if constant else "a number")
        raise invalid_request(None, f"The body is {kind}; allowed: an object")
    # UTF-8 has no lone surrogates, so only escapes can have made them.
    check_json(value, "The body", max_depth, check_text=rb"\u" in body)
    return value


def check_json(
    value: Any, what: str, max_depth: int, param: str | None = None, check_text: bool = True
) -> None:
    """Refuses JSON that is nested too deeply, and lone surrogates, which JSON escapes can spell and UTF-8 cannot.

    Walks over all lists and objects level by level, without recursion.
    """
    level: list[Any] = [value]
    for _ in range(max_depth):
        inner: list[Any] = []
        for holder in level:
            values = list(holder.values()) if isinstance(holder, dict) else holder
            inner += [one for one in values if isinstance(one, dict | list)]
            texts = [*values, *holder] if isinstance(holder, dict) else values
            for text in texts if check_text else ():
                try:
                    _ = isinstance(text, str) and text.encode("utf-8")
                except UnicodeEncodeError:
                    message = f"{what} holds a lone surrogate, which is no Unicode text"
                    raise invalid_request(param, message) from None
        if not inner:
            return
        level = inner
    raise invalid_request(param, f"{what} is nested more than {max_depth} levels deep")


class NotFinite(ValueError):
    """A number that is not JSON, or too large for a float."""


def refuse_constant(number: str) -> float:
    """Refuses NaN and Infinity, which are not JSON though Python reads them, and floats beyond the range of 64 bits."""
    value = float(number)
    if not math.isfinite(value):
        fault = "not JSON" if number in ("NaN", "Infinity", "-Infinity") else "out of range"
        raise NotFinite(f"{number[:20]} is {fault}")
    return value
