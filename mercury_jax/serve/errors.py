"""Errors of the HTTP API: OpenAI's envelope with the vendor's types and codes.

Handlers raise `ApiError`; `http.RequestMiddleware` turns it into the response.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_SHOWN = 80  # characters of a refused value that a message repeats
INVALID = "invalid_request_error"


class ApiError(Exception):
    """An error response.

    Args:
        status: HTTP status.
        message: Text for the client. It never contains internals of the server.
        kind: `type` of the envelope.
        param: Field of the request at fault, for example `messages[2].content`.
        code: Machine-readable code, for example `context_length_exceeded`.
        headers: Further headers of the response, for example `retry-after`.
    """

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
        """Returns `{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid_request(param: str | None, message: str) -> ApiError:
    """Returns a 400 for the field `param`."""
    return ApiError(400, message, param=param)


def invalid_value(param: str, value: object, allowed: str) -> ApiError:
    """Returns a 400 that names the field, its value and what is allowed.

    Args:
        param: The field.
        value: The refused value. At most `MAX_SHOWN` characters of it are repeated; of a list or object only its size.
        allowed: What the field takes.
    """
    kind = {dict: "an object", list: "a list"}.get(type(value))
    text = repr(value) if kind is None else f"{kind} of {len(value)}"  # type: ignore[arg-type]
    text = text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return invalid_request(param, f"{param} is {text}; allowed: {allowed}")


def context_length_exceeded(context: int, param: str = "messages") -> ApiError:
    """Returns a 400 in the vendor's words, which editors search for.

    Args:
        context: Tokens of prompt and answer that the server allows.
        param: Field that holds the prompt.
    """
    message = (
        f"You exceeded the maximum context length for this model of {context}. "
        "Please reduce the length of the messages or completion."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def unauthorized(challenge: str) -> ApiError:
    """Returns a 401 with the given `WWW-Authenticate` challenge."""
    headers = {"www-authenticate": challenge}
    message, code = "Incorrect API key provided", "invalid_api_key"
    return ApiError(401, message, "authentication_error", code=code, headers=headers)


def unknown_model(name: str) -> ApiError:
    """Returns a 404 for a model that is not loaded."""
    return ApiError(404, f"model `{name[:MAX_SHOWN]}` not found", param="model", code="model_not_found")


def rate_limited(
    retry_after: float, message: str = "Rate limit exceeded. Please try again later."
) -> ApiError:
    """Returns a 429. `retry_after` is in seconds and rounded up to at least 1."""
    headers = _retry_after(retry_after)
    return ApiError(429, message, "rate_limit_error", code="rate_limit_reached", headers=headers)


def unavailable(message: str, retry_after: float = 1.0) -> ApiError:
    """Returns a 503. `retry_after` is in seconds and rounded up to at least 1."""
    return ApiError(503, message, "server_error", code="overloaded", headers=_retry_after(retry_after))


def internal_error(request_id: str) -> ApiError:
    """Returns a 500 that contains nothing of the exception but the id under which the log has it."""
    message = f"The server had an error while processing your request. (request id: {request_id})"
    return ApiError(500, message, "server_error", code="server_error")


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}
