"""A request's body: bounded in bytes, depth and time before anything looks at it."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from mercury_jax.serve.api.errors import ApiError, invalid
from mercury_jax.serve.api.options import Options

INLINE = 64 << 10  # bytes up to which parsing takes less than changing the thread
JSON_TYPE = re.compile(
    r"application/(?:[a-z0-9.!#$&^_-]+\+)?json\s*(?:;\s*charset=\"?utf-8\"?\s*)?", re.IGNORECASE
)


async def read(request: Request, options: Options) -> dict[str, Any]:
    """The JSON object that a request brings; ApiError 400, 408, 413 or 415 where there is none."""
    check_headers(request, options)
    try:
        async with asyncio.timeout(options.read_timeout):
            body = await _received(request, options.max_body)
    except TimeoutError:
        raise ApiError(
            408,
            f"The request took over {options.read_timeout:g} s to arrive",
            headers={"connection": "close"},
        ) from None
    if len(body) <= INLINE:
        return parse(body, options.max_depth)
    return await run_in_threadpool(parse, body, options.max_depth)


def check_headers(request: Request, options: Options) -> None:
    """A form or a plain text, which a foreign web page may send, is not taken for JSON."""
    kind = request.headers.get("content-type", "")
    if not JSON_TYPE.fullmatch(kind.strip()):
        raise ApiError(415, "Content-Type must be application/json")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "Content-Encoding must be identity")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > options.max_body:
        raise _too_large(options.max_body)


async def _received(request: Request, most: int) -> bytes:
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise _too_large(most)
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(400, "The client left before its request was complete") from None
    return b"".join(parts)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"The request is larger than {most} bytes", headers={"connection": "close"})


def parse(body: bytes, depth: int) -> dict[str, Any]:
    """JSON without NaN, infinities, lone surrogates and bottomless nesting; it must be an object."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise _too_deep(depth) from None
    except UnicodeDecodeError:
        raise invalid(None, "The body is not valid UTF-8") from None
    except json.JSONDecodeError as error:
        raise invalid(None, f"The body is not valid JSON: {error.msg} at {error.pos}") from None
    except ValueError as error:  # a number of thousands of digits, NaN, 1e999
        raise invalid(None, f"The body is not valid JSON: {str(error)[:80]}") from None
    if not isinstance(value, dict):
        raise invalid(None, f"The body is a JSON {type(value).__name__}; allowed: an object")
    _walk(value, depth, check_text=rb"\u" in body)
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0:
        raise ValueError(f"{text[:20]} is beyond the range of numbers")
    return value


def _walk(root: dict[str, Any], depth: int, check_text: bool) -> None:
    """Look at every object and list without recursion. Escapes may have made surrogates that no UTF-8 text holds."""
    level: list[Any] = [root]
    for _ in range(depth):
        for text in (text for holder in level for text in _texts(holder)) if check_text else ():
            _valid(text)
        level = [x for holder in level for x in _values(holder) if isinstance(x, (dict, list))]
        if not level:
            return
    raise _too_deep(depth)


def _values(holder: Any) -> Any:
    return holder.values() if isinstance(holder, dict) else holder


def _texts(holder: Any) -> list[str]:
    names = list(holder) if isinstance(holder, dict) else []
    return [*names, *(x for x in _values(holder) if isinstance(x, str))]


def _valid(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise invalid(None, "The body holds a lone surrogate, which no text has") from None


def _too_deep(depth: int) -> ApiError:
    return invalid(None, f"The body is nested more than {depth} levels deep")


def merged(data: dict[str, Any]) -> dict[str, Any]:
    """With the fields of `extra_body`, where the body itself does not have them."""
    extra = data.get("extra_body")
    if not isinstance(extra, dict):
        return data
    return {**{name: value for name, value in extra.items() if name != "extra_body"}, **data}
