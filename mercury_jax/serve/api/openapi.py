"""Our OpenAPI document: requests from the tables that validate them, answers as `wire` makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mercury_jax.serve.api import errors, examples, schemas, tables
from mercury_jax.serve.api.kinds import Record
from mercury_jax.serve.api.service import Service

Json = dict[str, Any]

# path -> (what it does, its table, the schemas of its answer and of its chunks)
POSTS: Mapping[str, tuple[str, Record, str, str]] = {
    "/v1/chat/completions": ("Answer a conversation.", tables.CHAT, "ChatCompletion", "ChatCompletionChunk"),
    "/v1/completions": (
        "Go on from a text, or fill a gap.",
        tables.COMPLETIONS,
        "TextCompletion",
        "TextChunk",
    ),
    "/v1/fim/completions": ("Fill the gap between two texts.", tables.FIM, "TextCompletion", "TextChunk"),
    "/v1/edit/completions": ("Write a region of a file anew.", tables.EDIT, "EditCompletion", "EditChunk"),
    "/v1/apply/completions": ("Merge an update into a file.", tables.APPLY, "EditCompletion", "EditChunk"),
}
LISTS = (
    "/v1/models",
    "/v1/chat/completions/models",
    "/v1/fim/completions/models",
    "/v1/edit/completions/models",
)
ERRORS = {
    "400": "The request does not fit: which field, its value, and what is allowed.",
    "401": "No key, or none that is known.",
    "403": "The name in Host is not served here.",
    "404": "No such model, or no such path.",
    "405": "The path does not know the method.",
    "408": "The body took too long to arrive.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "Too many requests; Retry-After says when to come again.",
    "431": "The headers are too large.",
    "500": "An error of the server's own.",
    "503": "The server is warming up or shutting down; Retry-After says when to come again.",
}
READ = ("400", "401", "403", "404", "405", "431", "500", "503")


async def document(service: Service, request: Request) -> Response:
    return errors.Json(build(bool(service.options.keys), tuple(service.names)))


def build(keys: bool = True, models: Sequence[str] = ()) -> Json:
    """The document. keys: whether the server asks for one. models: the names that it knows (none: any text)."""
    named = {name: table.schema() for name, table in _requests().items()}
    for schema in named.values() if models else ():
        schema["properties"]["model"]["enum"] = list(models)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mercury_jax", "version": _version(), "description": __doc__},
        "paths": {**_posts(models[0] if models else "mercury-2"), **_gets()},
        "components": {
            "schemas": {**named, **schemas.ANSWERS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        **({"security": [{"key": []}]} if keys else {}),
    }


def _version() -> str:
    from mercury_jax import __version__

    return __version__


def _requests() -> dict[str, Record]:
    return {_name(path): table for path, (_, table, _, _) in POSTS.items()}


def _name(path: str) -> str:
    """`/v1/chat/completions` -> `ChatCompletionsRequest`."""
    return "".join(part.capitalize() for part in path.split("/")[2:]) + "Request"


def _posts(model: str) -> Json:
    return {
        path: {
            "post": {
                "summary": about,
                "operationId": "create" + _name(path).removesuffix("Request"),
                "requestBody": {"required": True, "content": _asked(path, model)},
                "responses": {"200": _answer(whole, chunk), **_failures(ERRORS)},
            }
        }
        for path, (about, _, whole, chunk) in POSTS.items()
    }


def _gets() -> Json:
    models = {path: _get("The names of the model that is loaded.", "ModelList", READ) for path in LISTS}
    one = _get("One model by its name.", "Model", READ)
    id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return models | {
        "/v1/models/{id}": {"get": one["get"] | {"parameters": [id]}},
        "/health": _get("Whether the process answers.", "Status", ("400", "405", "431", "500"), free=True),
        "/ready": _get(
            "Whether requests are taken.", "Status", ("400", "405", "431", "500"), free=True, closed=True
        ),
        "/openapi.json": _get("This document.", "Document", READ),
        "/metrics": _metrics(),
    }


def _get(about: str, schema: str, failing: tuple[str, ...], free: bool = False, closed: bool = False) -> Json:
    answers = {"200": {"description": about, "content": _json(schema)}}
    if closed:
        answers["503"] = {"description": "They are not.", "content": _json(schema)}
    failures = _failures({code: ERRORS[code] for code in failing})
    return {
        "get": {"summary": about, "responses": {**failures, **answers}, **({"security": []} if free else {})}
    }


def _metrics() -> Json:
    text = {
        "description": "Prometheus' text format.",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
    failures = _failures({code: ERRORS[code] for code in READ})
    return {"get": {"summary": "What the server measures.", "responses": {"200": text, **failures}}}


def _json(name: str) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _asked(path: str, model: str) -> Json:
    """The schema of a request, and one that is right."""
    example = {"model": model, **examples.REQUESTS[path]}
    return {kind: about | {"example": example} for kind, about in _json(_name(path)).items()}


def _answer(whole: str, chunk: str) -> Json:
    events = {"text/event-stream": {"schema": {"$ref": f"#/components/schemas/{chunk}"}}}
    about = "The answer; where `stream` is true, events of chunks, the last one `data: [DONE]`."
    return {"description": about, "content": {**_json(whole), **events}}


def _failures(told: Mapping[str, str]) -> Json:
    retry = {"Retry-After": {"description": "Seconds.", "schema": {"type": "string"}}}
    return {
        code: {"description": about, "content": _json("Error")}
        | ({"headers": retry} if code in ("429", "503") else {})
        for code, about in told.items()
    }
