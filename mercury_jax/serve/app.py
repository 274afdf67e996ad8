"""The ASGI app and its routes.

`create_app` puts every route behind the access control (`auth.AuthMiddleware`), except the public health checks. A
handler takes all models of the app; a request names the one that answers it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router

from mercury_jax.serve import errors
from mercury_jax.serve.auth import AuthMiddleware
from mercury_jax.serve.chat_completions import chat_completions
from mercury_jax.serve.completions import (
    apply_completions,
    completions,
    edit_completions,
    fim_completions,
)
from mercury_jax.serve.decisions import decisions, system_one
from mercury_jax.serve.dialects import endpoints as dialects
from mercury_jax.serve.engine_requests import DEFAULT_MAX_TOKENS
from mercury_jax.serve.errors import ApiError
from mercury_jax.serve.http import JsonResponse, RequestMiddleware, error_response
from mercury_jax.serve.openapi import openapi_json
from mercury_jax.serve.options import ServerOptions
from mercury_jax.serve.playground.app import Playground
from mercury_jax.serve.responses import ModelList, ModelObject
from mercury_jax.serve.service import ServedModels, as_tuple

if TYPE_CHECKING:
    from mercury_jax.serve.engine.engine import Engine

Handler = Callable[[ServedModels, Request], Awaitable[Response]]

# `supported_features` in the lists of chat models; the lists of FIM and edit models have none.
MODEL_FEATURES = ("tools", "json_mode", "structured_outputs")
# Fields of a model object that the vendor's client reads.
SUPPORTED_ENDPOINTS = (
    "chat.completions", "completions", "fim.completions", "edit.completions", "apply.completions", "decisions",
    "responses", "messages",
)  # fmt: skip
SUPPORTED_SAMPLING = (
    "temperature", "stop", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "logprobs", "max_tokens",
)  # fmt: skip


async def _health(models: ServedModels, request: Request) -> Response:
    """GET /health: 200 as soon as the process answers, whether or not the models are ready."""
    return JsonResponse({"status": "ok"})


async def _ready(models: ServedModels, request: Request) -> Response:
    """GET /ready: 200 while all models take requests; 503 until they are warm, and once the server shuts down."""
    if models.ready:
        return JsonResponse({"status": "ready"})
    status = "closing" if models.closing else "warming up"
    return JsonResponse({"status": status}, 503, headers={"retry-after": "1"})


async def _metrics(models: ServedModels, request: Request) -> Response:
    """GET /metrics: metrics in the text format of Prometheus."""
    text = await run_in_threadpool(generate_latest, models.metrics.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def _list_models(
    models: ServedModels, request: Request, features: tuple[str, ...] = MODEL_FEATURES
) -> Response:
    """GET /v1/models: one entry for each name of each model."""
    data = [_model_object(models, name, features) for name in models.by_name]
    listed = ModelList(object="list", data=data)
    if "x-typesafe-sdk" in request.headers:  # whose list has other keys
        day = time.strftime("%Y-%m-%d", time.gmtime(models.created))
        about = lambda one: {"name": one["id"], "description": one["description"], "release_date": day}
        return JsonResponse({**listed, "models": [about(one) for one in data]})
    return JsonResponse(listed)


# FIM and edit requests support neither tools nor schemas.
_list_code_models = functools.partial(_list_models, features=())


async def _get_model(models: ServedModels, request: Request) -> Response:
    """GET /v1/models/{id}: one model by its name; 404 for other names."""
    return JsonResponse(_model_object(models, request.path_params["id"], MODEL_FEATURES))


# Load balancers call these without an API key; the responses contain no data of users or of the model.
PUBLIC_ROUTES: Mapping[str, Handler] = {"/health": _health, "/ready": _ready}
GET_ROUTES: Mapping[str, Handler] = {
    "/v1/models": _list_models,
    "/v1/chat/completions/models": _list_models,
    "/v1/fim/completions/models": _list_code_models,
    "/v1/edit/completions/models": _list_code_models,
    "/v1/models/{id:path}": _get_model,
    "/v1/responses/{id}/input_items": dialects.list_input_items,
    "/metrics": _metrics,
    "/openapi.json": openapi_json,
}
POST_ROUTES: Mapping[str, Handler] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/fim/completions": fim_completions,
    "/v1/edit/completions": edit_completions,
    "/v1/apply/completions": apply_completions,
    "/v1/decisions": decisions,
    "/v1/systemone": system_one,
    "/v1/responses": dialects.create_response,
    "/v1/messages": dialects.create_message,
    "/v1/messages/count_tokens": dialects.count_message_tokens,
}
# For GET and DELETE.
STORE_ROUTES: Mapping[str, Handler] = {"/v1/responses/{id}": dialects.stored_response}
# The paths that the 404 of an unknown path lists.
MAIN_PATHS = (*POST_ROUTES, "/v1/models", *PUBLIC_ROUTES, "/metrics", "/openapi.json")


def create_app(engines: Engine | Sequence[Engine], options: ServerOptions = ServerOptions()) -> Starlette:
    """Makes the ASGI app of one or several engines, each of another model.

    Args:
        engines: An engine, or several, the one of the default model first. They may still be warming up. The caller
            starts and stops them.
        options: Options of the server.

    Returns:
        The app. Its `state.models` are the `ServedModels`.

    Raises:
        ValueError: If two models have one name, an alias means a model that is not loaded or is the name of another
            model, or two models share the devices of a mesh.

    Example:
        >>> app = create_app([Engine(mj.load()), Engine(mj.load("runs/mine/model"))])
    """
    models = ServedModels(as_tuple(engines), options, (*PUBLIC_ROUTES, *GET_ROUTES, *POST_ROUTES))

    def routes(handlers: Mapping[str, Handler], *methods: str) -> list[BaseRoute]:
        return [
            Route(path, functools.partial(handler, models), methods=methods)
            for path, handler in handlers.items()
        ]

    protected = [*routes(GET_ROUTES, "GET"), *routes(POST_ROUTES, "POST")]
    protected += routes(STORE_ROUTES, "GET", "DELETE")
    if options.playground:
        protected += Playground(models).routes()
    middleware = [Middleware(RequestMiddleware, metrics=models.metrics)]
    if options.origins:
        # The outermost layer: a browser asks by OPTIONS, without the key, whether it may send a request.
        cross_origin = Middleware(
            CORSMiddleware,
            allow_origins=options.origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
        middleware.insert(0, cross_origin)
    app = Starlette(
        middleware=middleware,
        exception_handlers={HTTPException: _routing_error},
    )
    # Every path except the public routes goes through the access control, even a path without a route: a client
    # without a key gets 401 for it and cannot find out which routes exist.
    within = AuthMiddleware(Router(protected, redirect_slashes=False), options)
    app.router = Router(routes(PUBLIC_ROUTES, "GET"), redirect_slashes=False, default=within)
    app.state.models = models
    return app


async def _routing_error(request: Request, error: Exception) -> Response:
    """Converts 404 and 405 of the router into the API's error envelope."""
    assert isinstance(error, HTTPException)
    refusal = ApiError(error.status_code, f"{error.detail}", headers=error.headers)
    if error.status_code == 404:
        refusal = errors.unknown_path(request.scope["path"], MAIN_PATHS)
    elif error.status_code == 405 and (allowed := (error.headers or {}).get("Allow")):
        refusal = errors.method_not_allowed(request.method, request.scope["path"], allowed)
    return error_response(refusal, request.scope)


def _model_object(models: ServedModels, name: str, features: tuple[str, ...]) -> ModelObject:
    """Describes a model under one of its names; ApiError 404 for other names."""
    engine = models.find(name).engine
    about = f"{engine.lm.name}, a diffusion language model of {engine.lm.parameters:,} parameters"
    return {
        "id": name,
        "object": "model",
        "owned_by": "mercury_jax",
        "name": name if name == engine.lm.name else f"{name} ({engine.lm.name})",
        "created": models.created,
        "description": about,
        "input_modalities": ["text"],
        "output_modalities": ["text"],
        "context_length": engine.context,
        "max_output_length": min(engine.context, DEFAULT_MAX_TOKENS),
        "pricing": {"prompt": "0", "completion": "0", "input_cache_reads": "0", "input_cache_writes": "0"},
        "supported_sampling_parameters": list(SUPPORTED_SAMPLING),
        "supported_features": list(features),
        "supported_endpoints": list(SUPPORTED_ENDPOINTS),
    }
