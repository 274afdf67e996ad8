"""The OpenAPI document of the server, at /openapi.json.

Requests come from the models of `protocol.py` and `dialects`, responses from the types of `responses.py` and
`dialects`; paths, examples and error
codes are written here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode, JsonSchemaValue
from pydantic_core import core_schema
from starlette.requests import Request
from starlette.responses import Response

from mercury_jax import __version__
from mercury_jax.serve import decision_protocol, protocol, responses
from mercury_jax.serve.dialects import object_types
from mercury_jax.serve.dialects.messages_request import CountTokensRequest, MessagesRequest
from mercury_jax.serve.dialects.responses_request import MAX_PAGE, ResponsesRequest
from mercury_jax.serve.http import MESSAGES_PATH, JsonResponse
from mercury_jax.serve.service import ServedModels

Json = dict[str, Any]

REFERENCE = "#/components/schemas/{model}"

EXAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
EXAMPLE_MESSAGES = {"messages": [{"role": "user", "content": "347+585="}]}
EXAMPLE_EDIT = """\
<|current_file_content|>
current_file_path: area.py
def area(width, height):
<|code_to_edit|>
    return width
<|/code_to_edit|>
<|/current_file_content|>"""
EXAMPLE_APPLY = """\
<|original_code|>
def area(width, height):
    side = width
    return side
<|/original_code|>

<|update_snippet|>
def area(width, height):
    side = width * height
    return side
<|/update_snippet|>"""

EXAMPLE_DECISION = {
    "state": "I was charged twice. Please help.",
    "questions": {
        "billing": {"type": "noul", "instructions": "Is this about billing?"},
        "tone": {"type": "choice", "criteria": {"calm": None, "angry": "An upset message"}},
        "urgency": {"type": "score", "criteria": ["Can wait", "This week", "Today"]},
    },
}


class Endpoint(NamedTuple):
    """A POST endpoint of the document.

    Attributes:
        chunk: The type of an event; None without streams.
        example: A valid request without its model.
        others: A further form of the request and of its answer.
    """

    summary: str
    request: type[protocol.RequestModel]
    completion: type
    chunk: Any
    example: Mapping[str, Any]
    others: tuple[type[protocol.RequestModel], type] | tuple[()] = ()

    @property
    def requests(self) -> list[type[protocol.RequestModel]]:
        """The forms of the request."""
        return [self.request, *self.others[:1]]

    @property
    def completions(self) -> list[type]:
        """The forms of the answer."""
        return [self.completion, *self.others[1:]]


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": Endpoint(
        "Answer a conversation.",
        protocol.ChatCompletionsRequest,
        responses.ChatCompletion,
        responses.ChatCompletionChunk,
        {
            "messages": [{"role": "user", "content": "347+585="}],
            "tools": [EXAMPLE_TOOL],
            "tool_choice": "auto",
            "response_format": {"type": "text"},
        },
    ),
    "/v1/completions": Endpoint(
        "Continue a text, or fill a gap.",
        protocol.CompletionsRequest,
        responses.TextCompletion,
        responses.TextChunk,
        {"prompt": "def area(width, height):", "max_tokens": 32},
    ),
    "/v1/fim/completions": Endpoint(
        "Fill the gap between two texts.",
        protocol.FimCompletionsRequest,
        responses.TextCompletion,
        responses.TextChunk,
        {"prompt": "def area(width, height):\n", "suffix": "\n\narea(2, 3)"},
    ),
    "/v1/edit/completions": Endpoint(
        "Rewrite a region of a file.",
        protocol.EditCompletionsRequest,
        responses.EditCompletion,
        responses.EditChunk,
        {"messages": [{"role": "user", "content": EXAMPLE_EDIT}]},
    ),
    "/v1/apply/completions": Endpoint(
        "Merge an update into a file.",
        protocol.ApplyCompletionsRequest,
        responses.EditCompletion,
        responses.EditChunk,
        {"messages": [{"role": "user", "content": EXAMPLE_APPLY}]},
    ),
    "/v1/decisions": Endpoint(
        "Answer typed questions with probabilities, in Mercury's form (state) or OpenAI's (input).",
        decision_protocol.MercuryDecisionsRequest,
        decision_protocol.MercuryDecision,
        None,
        EXAMPLE_DECISION,
        (decision_protocol.OpenAIDecisionsRequest, decision_protocol.OpenAIDecision),
    ),
    "/v1/systemone": Endpoint(
        "Answer typed questions with probabilities, for TypeSafe's client.",
        decision_protocol.MercuryDecisionsRequest,
        decision_protocol.MercuryDecision,
        None,
        EXAMPLE_DECISION,
    ),
    "/v1/responses": Endpoint(
        "Answer a conversation in the form of OpenAI's Responses API.",
        ResponsesRequest,
        object_types.ResponseObject,
        object_types.ResponseStreamEvent,
        {"input": "347+585=", "tools": [{"type": "function", **EXAMPLE_TOOL["function"]}]},
    ),
    "/v1/messages": Endpoint(
        "Answer a conversation in the form of Anthropic's Messages API.",
        MessagesRequest,
        object_types.MessageObject,
        object_types.MessageStreamEvent,
        {"max_tokens": 64, **EXAMPLE_MESSAGES},
    ),
    "/v1/messages/count_tokens": Endpoint(
        "Count the tokens of a prompt.", CountTokensRequest, object_types.TokenCount, None, EXAMPLE_MESSAGES
    ),
}
MODEL_LISTS = (
    "/v1/models",
    "/v1/chat/completions/models",
    "/v1/fim/completions/models",
    "/v1/edit/completions/models",
)
ERRORS = {
    "400": "The request is not valid: which field, its value, and what is allowed.",
    "401": "No API key, or an unknown one.",
    "403": "The name in Host is not served here.",
    "404": "No such model, or no such path.",
    "405": "The path does not support the method.",
    "408": "The body took too long to arrive.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "Too many requests; Retry-After says when to try again.",
    "431": "The headers are too large.",
    "500": "An internal error of the server.",
    "503": "The server is warming up or shutting down; Retry-After says when to try again.",
}
GET_ERRORS = ("400", "401", "403", "404", "405", "431", "500", "503")
PUBLIC_GET_ERRORS = ("400", "405", "431", "500")


async def openapi_json(models: ServedModels, request: Request) -> Response:
    """Sends the document."""
    return JsonResponse(build_document(bool(models.options.keys), tuple(models.by_name)))


def build_document(keys: bool = True, models: Sequence[str] = ()) -> Json:
    """Returns the document."""
    answers = {
        answer for e in ENDPOINTS.values() for answer in (*e.completions, e.chunk) if answer is not None
    }
    others = (responses.ModelList, responses.Status, responses.Error, object_types.MessagesError,
              object_types.ResponseItemList, object_types.DeletedResponse)  # fmt: skip
    named = {request for e in ENDPOINTS.values() for request in e.requests} | answers | set(others)
    inputs: Iterable[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = [
        (cls.__name__, "validation", TypeAdapter(cls)) for cls in sorted(named, key=lambda cls: cls.__name__)
    ]
    _, written = TypeAdapter.json_schemas(inputs, ref_template=REFERENCE, schema_generator=DocumentJsonSchema)
    schemas = written["$defs"] | {"Document": {"type": "object", "required": ["openapi", "paths"]}}
    for request in {request: None for endpoint in ENDPOINTS.values() for request in endpoint.requests}:
        properties = schemas[request.__name__]["properties"]
        properties |= protocol.refused_properties(request)
        if models:
            properties["model"]["enum"] = list(models)
    about = "Mercury's API, and OpenAI's where the two agree, for a diffusion language model."
    return {
        "openapi": "3.1.0",
        "info": {"title": "mercury_jax", "version": __version__, "description": about},
        "paths": _paths(models[0] if models else "mercury-2"),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        **({"security": [{"key": []}]} if keys else {}),
    }


class DocumentJsonSchema(protocol.RequestJsonSchema):
    """JSON Schemas of the document. Responses have no other properties than those of their type."""

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        """Forbids further properties."""
        return super().typed_dict_schema(schema) | {"additionalProperties": False}


def _paths(model: str) -> Json:
    paths: Json = {}
    for path, endpoint in ENDPOINTS.items():
        request = _content(*(one.__name__ for one in endpoint.requests))
        request["application/json"]["example"] = {"model": model, **endpoint.example}
        streamed = {}
        if endpoint.chunk is not None:
            streamed = _content(endpoint.chunk.__name__, media_type="text/event-stream")
        answer = {
            "description": "The answer; where `stream` is true, events. `data: [DONE]` ends those of completions.",
            "content": {**_content(*(one.__name__ for one in endpoint.completions)), **streamed},
        }
        failed = "MessagesError" if path.startswith(MESSAGES_PATH) else "Error"
        paths[path] = {
            "post": {
                "summary": endpoint.summary,
                "operationId": "create" + "".join(part.capitalize() for part in path.split("/")[2:]),
                "requestBody": {"required": True, "content": request},
                "responses": {"200": answer, **_error_responses(ERRORS, failed)},
            }
        }
    by_id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    stored = {
        "get": _get("A stored response.", _content("ResponseObject")) | {"parameters": [by_id]},
        "delete": _get("Drop a stored response.", _content("DeletedResponse")) | {"parameters": [by_id]},
    }
    limit = {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}
    query = {"order": {"enum": ["asc", "desc"]}, "limit": limit, "after": {"type": "string"}}
    paging = [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
    items = _get("What the model had read for a stored response.", _content("ResponseItemList"))
    models = _get("The models, under each of their names.", _content("ModelList"))
    metrics = {"text/plain": {"schema": {"type": "string"}}}
    closed = {"503": {"description": "They are not.", "content": _content("Status")}}
    return (
        paths
        | {path: {"get": models} for path in MODEL_LISTS}
        | {
            "/v1/models/{id}": {
                "get": _get("One model by its name.", _content("ModelObject")) | {"parameters": [by_id]}
            },
            "/v1/responses/{id}": stored,
            "/v1/responses/{id}/input_items": {"get": items | {"parameters": [by_id, *paging]}},
            "/health": {"get": _get("Whether the process answers.", _content("Status"), public=True)},
            "/ready": {
                "get": _get("Whether requests are taken.", _content("Status"), public=True, more=closed)
            },
            "/openapi.json": {"get": _get("This document.", _content("Document"))},
            "/metrics": {"get": _get("Metrics in Prometheus' text format.", metrics)},
        }
    )


def _get(summary: str, content: Json, public: bool = False, more: Mapping[str, Any] | None = None) -> Json:
    codes = PUBLIC_GET_ERRORS if public else GET_ERRORS
    failures = _error_responses({code: ERRORS[code] for code in codes})
    answers = {**failures, "200": {"description": summary, "content": content}, **(more or {})}
    return {"summary": summary, "responses": answers, **({"security": []} if public else {})}


def _content(*names: str, media_type: str = "application/json") -> Json:
    """A body that has one of the named forms."""
    forms = [{"$ref": REFERENCE.format(model=name)} for name in names]
    return {media_type: {"schema": forms[0] if len(forms) == 1 else {"anyOf": forms}}}


def _error_responses(errors: Mapping[str, str], name: str = "Error") -> Json:
    retry = {"Retry-After": {"description": "Seconds.", "schema": {"type": "string"}}}
    return {
        code: {"description": about, "content": _content(name)}
        | ({"headers": retry} if code in ("429", "503") else {})
        for code, about in errors.items()
    }
