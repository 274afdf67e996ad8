"""The errors of the API: one envelope, with the vendor's types and codes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

SHOWN = 80  # characters of a refused value that a message repeats
INVALID = "invalid_request_error"


class ApiError(Exception):
    """What a client is told instead of an answer: an HTTP status and the envelope's four fields."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.headers = param, code, dict(headers or {})

    def envelope(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`; the message is always a text."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def dumps(value: Any) -> str:
    """Compact JSON in ASCII: no line separator of Unicode can split an event, no lone surrogate can fail."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


class Json(Response):
    """A value as a response's JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content).encode("ascii")


def response(error: ApiError) -> Response:
    return Json(error.envelope(), error.status, headers=error.headers)


def shown(value: Any) -> str:
    """A refused value as a message repeats it: short, whatever its size."""
    text = repr(value if not isinstance(value, (dict, list)) else f"{type(value).__name__} of {len(value)}")
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "\N{HORIZONTAL ELLIPSIS}"


def invalid(param: str | None, message: str) -> ApiError:
    return ApiError(400, message, param=param)


def refused(param: str, value: Any, allowed: str) -> ApiError:
    """The house's form: the field, the value, what is allowed."""
    return invalid(param, f"{param} is {shown(value)}; allowed: {allowed}")


def too_long(context: int, param: str = "messages") -> ApiError:
    """In the vendor's words: an editor reads them."""
    message = (
        f"You exceeded the maximum context length for this model of {context}. "
        "Please reduce the length of the messages or completion."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def unauthorised(challenge: str) -> ApiError:
    return ApiError(
        401,
        "Incorrect API key provided",
        "authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": challenge},
    )


def unknown_model(name: str) -> ApiError:
    return ApiError(404, f"model `{name[:SHOWN]}` not found", param="model", code="model_not_found")


def too_many(retry_after: float, message: str = "Rate limit exceeded. Please try again later.") -> ApiError:
    return ApiError(429, message, "rate_limit_error", code="rate_limit_reached", headers=_retry(retry_after))


def unavailable(message: str, retry_after: float = 1.0) -> ApiError:
    return ApiError(503, message, "server_error", code="overloaded", headers=_retry(retry_after))


def failed(request_id: str) -> ApiError:
    """Of anything unforeseen: nothing of the error itself leaves the server but the id to find it in the log."""
    message = f"The server had an error while processing your request. (request id: {request_id})"
    return ApiError(500, message, "server_error", code="server_error")


def _retry(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}
