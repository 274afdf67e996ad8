"""Errors of the HTTP API: OpenAI's envelope with the vendor's types and codes; below /v1/messages, Anthropic's.

Handlers raise `ApiError`; `http.RequestMiddleware` turns it into the response.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from mercury_jax.config import nearest

JsonSchema = dict[str, Any]

MAX_SHOWN = 80  # characters of a refused value that a message repeats
INVALID = "invalid_request_error"
# starts the description of a field with one allowed value; a reason follows
NOT_SUPPORTED = "Not supported: "
# Types of the Messages API by status; other statuses are invalid requests or the server's faults.
MESSAGES_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class ApiError(Exception):
    """An error response."""

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


def messages_envelope(error: ApiError, request_id: str) -> dict[str, Any]:
    """Returns an error as the Messages API writes it: `{"type": "error", "error": {"type", "message"}}`.

    Anthropic's client reads the code in `error.details`.
    """
    kind = MESSAGES_TYPES.get(error.status, INVALID if error.status < 500 else "api_error")
    details = {} if error.code is None else {"details": {"error_code": error.code}}
    body = {"type": kind, "message": error.message, **details}
    return {"type": "error", "error": body, "request_id": request_id}


def invalid_request(param: str | None, message: str) -> ApiError:
    """Returns a 400."""
    return ApiError(400, message, param=param)


def invalid_value(param: str, value: object, allowed: str, field: str | None = None) -> ApiError:
    """Returns a 400 that names the field, its value and what is allowed."""
    kind = {dict: "an object", list: "a list"}.get(type(value))
    constant = value is None or isinstance(value, bool)
    text = repr(value) if kind is None else f"{kind} of {len(value)} entries"  # type: ignore[arg-type]
    text = json.dumps(value) if constant else text
    text = text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return invalid_request(param, f"{field or param} is {text}; allowed: {allowed}")


def context_length_exceeded(context: int, detail: str, param: str = "messages") -> ApiError:
    """Returns a 400 that begins with the vendor's message text, which editors search for."""
    message = (
        f"You exceeded the maximum context length for this model of {context}. "
        f"Please reduce the length of the messages or completion. {detail}"
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def unknown_model(name: str, served: Sequence[str], aliases: Sequence[str] = ()) -> ApiError:
    """Returns a 404 for a model that is not loaded."""
    message = f"model `{name[:MAX_SHOWN]}` not found; this server has {', '.join(served)}"
    message += f" (aliases: {', '.join(aliases)})" if aliases else ""
    return ApiError(404, message, param="model", code="model_not_found")


def unknown_path(path: str, served: Sequence[str]) -> ApiError:
    """Returns a 404 for a path without a route.

    Returns:
        The error. Its message names the path of `served` that is most similar, then all of them. A `/v1` that is
        missing or repeated, the usual mistake in a client's base URL, does not count as a difference.
    """
    parts = [part for part in path[:MAX_SHOWN].split("/") if part not in ("", "v1")]
    allowed = nearest("/".join(["/v1", *parts]), served)
    return ApiError(404, f"path is {path[:MAX_SHOWN]!r}; allowed: {allowed} (/openapi.json describes them)")


def method_not_allowed(method: str, path: str, allowed: str) -> ApiError:
    """Returns a 405 for a path that other methods than the request's have."""
    methods = ", ".join(sorted(re.split(r",\s*", allowed)))
    message = f"method is {method[:MAX_SHOWN]!r}; allowed for {path[:MAX_SHOWN]}: {methods}"
    return ApiError(405, message, headers={"allow": methods})


def rate_limited(
    retry_after: float, message: str = "Rate limit exceeded. Please try again later."
) -> ApiError:
    """Returns a 429."""
    headers = {"retry-after": str(max(1, math.ceil(retry_after)))}
    return ApiError(429, message, "rate_limit_error", code="rate_limit_reached", headers=headers)


def unavailable(message: str, retry_after: float = 1.0) -> ApiError:
    """Returns a 503."""
    headers = {"retry-after": str(max(1, math.ceil(retry_after)))}
    return ApiError(503, message, "server_error", code="overloaded", headers=headers)


def internal_error(request_id: str) -> ApiError:
    """Returns a 500 that shows the request id but nothing of the exception, which is in the log under that id."""
    message = f"The server had an error while processing your request. (request id: {request_id})"
    return ApiError(500, message, "server_error", code="server_error")


def not_validated(content: str) -> ApiError:
    """Returns the 400 of an answer that is invalid after all retries, with the code that Groq's API has for it."""
    message = (
        "No valid answer was generated: the schema has parts that are checked only when an answer is complete, such as "
        f"uniqueItems. Try again, or simplify the schema. The last answer began {content[:MAX_SHOWN]!r}"
    )
    return ApiError(400, message, param="response_format", code="json_validate_failed")


def validation_error(schema: JsonSchema, data: Mapping[str, Any], error: ValidationError) -> ApiError:
    """Returns a 400 for the first field that fails validation.

    pydantic's `loc` is a path of fields, mixed with labels of union members. The function follows this path through the
    JSON Schema of the model, which distinguishes labels from fields, and ends at the schema of the allowed values.
    """
    problems = error.errors(include_url=False)
    # Each member of a union reports its own errors. The longest path is from the member that has the value's JSON type.
    field = problems[0]["loc"][0]
    loc = max((p["loc"] for p in problems if p["loc"][0] == field), key=len)
    wrong_key = loc[-1] == "[key]"  # the error is in a key of a mapping; the key precedes it in `loc`
    node, path, missing, required = schema, "", False, False
    value: Any = data
    for part in loc[:-2] if wrong_key else loc:
        if "discriminator" in node:  # `part` is the label of the member with the value's tag
            tag = node["discriminator"]
            node = _resolve(schema, {"$ref": tag["mapping"][value[tag["propertyName"]]]})
        elif members := _members(node):  # `part` is the label of the member of the value's JSON type
            member = max(members, key=functools.partial(_fit, schema, value))
            node = _resolve(schema, member) if _fit(schema, value, member) else node
        elif isinstance(part, int):
            node, value, path = _resolve(schema, node["items"]), value[part], f"{path}[{part}]"
            missing = False
        else:
            missing, required = part not in value, part in node.get("required", ())
            inner = node.get("properties", {}).get(part) or node["additionalProperties"]
            node, value = _resolve(schema, inner), value.get(part)
            path = f"{path}.{part}" if path else part
    if wrong_key:
        allowed = f"the form {node['propertyNames']['pattern']}"
        return invalid_value(path, loc[-2], allowed, field=f"key of {path}")
    tag = node.get("discriminator", {"propertyName": None, "mapping": ()})
    if tag["mapping"] and isinstance(value, dict):
        name, allowed = tag["propertyName"], ", ".join(tag["mapping"])
        path, missing, value = f"{path}.{name}", name not in value, value.get(name)
    else:
        allowed = _describe(schema, node)
    if missing:
        return invalid_request(path, f"{path} is missing; allowed: {allowed}")
    return invalid_value(
        path, value, allowed + (" (it has no default)" if value is None and required else "")
    )


def _fit(schema: JsonSchema, value: object, member: JsonSchema) -> int:
    """Says how well a value fits a member of a union: 1 by its JSON type, 2 also by the type of its first entry."""
    types = {str: "string", list: "array", dict: "object", int: "integer"}
    member = _resolve(schema, member)
    if member.get("type", "object" if "oneOf" in member else None) != types.get(type(value), "another"):
        return 0
    return 1 + (isinstance(value, list) and bool(value) and _fit(schema, value[0], member["items"]) > 0)


def _members(node: JsonSchema) -> list[JsonSchema]:
    """Returns the members of a union without null."""
    return [member for member in node.get("anyOf") or node.get("oneOf") or () if member != {"type": "null"}]


def _resolve(schema: JsonSchema, node: JsonSchema) -> JsonSchema:
    """Follows references, and replaces a value that may be null by the value; `not` and description are kept."""
    kept: JsonSchema = {}
    while True:
        kept |= {key: node[key] for key in ("not", "description") if key in node and key not in kept}
        members = _members(node)
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        elif len(members) == 1:
            node = members[0]
        else:
            return node | kept


def _describe(schema: JsonSchema, node: JsonSchema) -> str:
    """Says in words what a schema allows."""
    node = _resolve(schema, node)
    if "discriminator" in node:
        tag = node["discriminator"]
        return f"an object whose {tag['propertyName']} is one of {', '.join(tag['mapping'])}"
    if members := _members(node):
        return ", or ".join(dict.fromkeys(_describe(schema, member) for member in members))
    if "const" in node or "enum" in node:
        return ", ".join(map(str, node.get("enum", [node.get("const")])))
    pattern = node.get("pattern") or node.get("propertyNames", {}).get("pattern")
    form = f" of the form {pattern}" if pattern else ""
    reason = node.get("description", "").removesuffix(".")
    reason = f" ({reason.removeprefix(NOT_SUPPORTED)})" if reason.startswith(NOT_SUPPORTED) else ""
    match node.get("type"):
        case "boolean":
            return f"false{reason}" if "not" in node else "true or false"
        case "integer" if node.get("minimum", ...) == node.get("maximum"):
            return f"{node['minimum']}{reason}"
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
        case "array" if node.get("minItems") == node.get("maxItems") == 1:
            return "a list of one entry"
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
