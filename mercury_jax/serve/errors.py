"""Errors of the HTTP API: OpenAI's envelope with the vendor's types and codes.

Handlers raise `ApiError`; `http.RequestMiddleware` turns it into the response.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

JsonSchema = dict[str, Any]

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
    """Returns a 400.

    Args:
        param: The field at fault; None for the request as a whole.
        message: Text for the client.

    Returns:
        The error, to be raised.
    """
    return ApiError(400, message, param=param)


def invalid_value(param: str, value: object, allowed: str) -> ApiError:
    """Returns a 400 that names the field, its value and what is allowed.

    Args:
        param: The field.
        value: The refused value. The message shows at most `MAX_SHOWN` characters; for a list or object only its size.
        allowed: Description of the allowed values.

    Returns:
        The error, to be raised.
    """
    kind = {dict: "an object", list: "a list"}.get(type(value))
    text = repr(value) if kind is None else f"{kind} of {len(value)} entries"  # type: ignore[arg-type]
    text = text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return invalid_request(param, f"{param} is {text}; allowed: {allowed}")


def context_length_exceeded(context: int, param: str = "messages") -> ApiError:
    """Returns a 400 with the vendor's message text, which editors search for.

    Args:
        context: Maximum tokens of prompt and output.
        param: Field that holds the prompt.

    Returns:
        The error, to be raised.
    """
    message = (
        f"You exceeded the maximum context length for this model of {context}. "
        "Please reduce the length of the messages or completion."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def unknown_model(name: str, served: Sequence[str]) -> ApiError:
    """Returns a 404 for a model that is not loaded.

    Args:
        name: The name in the request.
        served: Names of the models that are loaded.

    Returns:
        The error, whose message lists those names.
    """
    message = f"model `{name[:MAX_SHOWN]}` not found; this server has {', '.join(served)}"
    return ApiError(404, message, param="model", code="model_not_found")


def rate_limited(
    retry_after: float, message: str = "Rate limit exceeded. Please try again later."
) -> ApiError:
    """Returns a 429.

    Args:
        retry_after: Seconds until the next attempt; rounded up, at least 1.
        message: Text for the client.

    Returns:
        The error, to be raised.
    """
    headers = {"retry-after": str(max(1, math.ceil(retry_after)))}
    return ApiError(429, message, "rate_limit_error", code="rate_limit_reached", headers=headers)


def unavailable(message: str, retry_after: float = 1.0) -> ApiError:
    """Returns a 503.

    Args:
        message: Text for the client.
        retry_after: Seconds until the next attempt; rounded up, at least 1.

    Returns:
        The error, to be raised.
    """
    headers = {"retry-after": str(max(1, math.ceil(retry_after)))}
    return ApiError(503, message, "server_error", code="overloaded", headers=headers)


def internal_error(request_id: str) -> ApiError:
    """Returns a 500 that shows the request id but nothing of the exception, which is in the log under that id."""
    message = f"The server had an error while processing your request. (request id: {request_id})"
    return ApiError(500, message, "server_error", code="server_error")


def validation_error(schema: JsonSchema, data: Mapping[str, Any], error: ValidationError) -> ApiError:
    """Returns a 400 for the first field that fails validation.

    pydantic's `loc` is a path of fields, mixed with labels of union members. The function follows this path through the
    JSON Schema of the model, which distinguishes labels from fields, and ends at the schema of the allowed values.

    Args:
        schema: JSON Schema of the model.
        data: The validated object.
        error: The error of pydantic.

    Returns:
        The error, to be raised.
    """
    problems = error.errors(include_url=False)
    # Each member of a union reports its own errors. The longest path is from the member that has the value's JSON type.
    field = problems[0]["loc"][0]
    loc = max((p["loc"] for p in problems if p["loc"][0] == field), key=len)
    wrong_key = loc[-1] == "[key]"  # the error is in a key of a mapping; the key precedes it in `loc`
    node, path, required = schema, "", False
    value: Any = data
    for part in loc[:-2] if wrong_key else loc:
        if "discriminator" in node:  # `part` is the label of the member with the value's tag
            tag = node["discriminator"]
            node = _resolve(schema, {"$ref": tag["mapping"][value[tag["propertyName"]]]})
        elif members := _members(node):  # `part` is the label of the member of the value's JSON type
            kind = {str: "string", list: "array", dict: "object"}.get(type(value), "another")
            for member in (_resolve(schema, member) for member in members):
                if member.get("type", "object" if "oneOf" in member else None) == kind:
                    node = member
                    break
        elif isinstance(part, int):
            node, value, path = _resolve(schema, node["items"]), value[part], f"{path}[{part}]"
        else:
            required = part in node.get("required", ())
            inner = node.get("properties", {}).get(part) or node["additionalProperties"]
            node, value = _resolve(schema, inner), value.get(part)
            path = f"{path}.{part}" if path else part
    if wrong_key:
        return invalid_value(f"key of {path}", loc[-2], f"the form {node['propertyNames']['pattern']}")
    tag = node.get("discriminator", {"propertyName": None, "mapping": ()})
    if tag["mapping"] and isinstance(value, dict):
        name = tag["propertyName"]
        return invalid_value(f"{path}.{name}", value.get(name), ", ".join(tag["mapping"]))
    allowed = _describe(schema, node) + (" (it has no default)" if value is None and required else "")
    return invalid_value(path, value, allowed)


def _members(node: JsonSchema) -> list[JsonSchema]:
    """Returns the members of a union without null."""
    return [member for member in node.get("anyOf") or node.get("oneOf") or () if member != {"type": "null"}]


def _resolve(schema: JsonSchema, node: JsonSchema) -> JsonSchema:
    """Follows references, and replaces a value that may be null by the value."""
    while True:
        members = _members(node)
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        elif len(members) == 1:
            node = members[0]
        else:
            return node


def _describe(schema: JsonSchema, node: JsonSchema) -> str:
    """Says in words what a schema allows."""
    node = _resolve(schema, node)
    if "discriminator" in node:
        tag = node["discriminator"]
        return f"an object whose {tag['propertyName']} is one of {', '.join(tag['mapping'])}"
    if members := _members(node):
        return ", or ".join(_describe(schema, member) for member in members)
    if "const" in node or "enum" in node:
        return ", ".join(map(str, node.get("enum", [node.get("const")])))
    pattern = node.get("pattern") or node.get("propertyNames", {}).get("pattern")
    form = f" of the form {pattern}" if pattern else ""
    match node.get("type"):
        case "boolean":
            return "false" if "not" in node else "true or false"
        case "integer":
            without = " without 0" if "not" in node else ""
            return "a whole number" + _range(node.get("minimum"), node.get("maximum")) + without
        case "number" if "exclusiveMinimum" in node:
            return f"a number above {node['exclusiveMinimum']}" + _range(None, node.get("maximum"))
        case "number":
            return "a number" + _range(node.get("minimum"), node.get("maximum"))
        case "string":
            least = node.get("minLength", 0 if "maxLength" in node else None)
            size = _range(least, node.get("maxLength"), " characters")
            return f"a string{size}{form}"
        case "array":
            return "a list" + _range(node.get("minItems", 0), node.get("maxItems"), " entries")
        case _:
            size = _range(None, node.get("maxProperties"), " entries")
            names = f" with {', '.join(node['properties'])}" if node.get("properties") else ""
            return f"an object{names}{size}" + (f", its keys{form}" if form else "")


def _range(low: float | None, high: float | None, unit: str = "") -> str:
    """Says in words which range two bounds make; "" for no bounds."""
    word = "of" if unit else "from"
    if high is None:
        return "" if low is None else f" {word} at least {low}{unit}"
    return f" up to {high}{unit}" if low is None else f" {word} {low} to {high}{unit}"
