"""create_app(): every route, the open ones outside of the guard and all others within it."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router

from mercury_jax.serve.api import chat, edits, errors, health, models, openapi, texts
from mercury_jax.serve.api.errors import ApiError
from mercury_jax.serve.api.guard import Guard
from mercury_jax.serve.api.metrics import Metrics
from mercury_jax.serve.api.options import Options
from mercury_jax.serve.api.service import Service
from mercury_jax.serve.api.trace import Trace

Handler = Callable[[Service, Request], Awaitable[Response]]

# What a load balancer asks carries no key and no data. Nothing else is open.
OPEN: dict[str, Handler] = {"/health": health.health, "/ready": health.is_ready}
GET: dict[str, Handler] = {
    "/v1/models": models.every,
    "/v1/chat/completions/models": models.every,
    "/v1/fim/completions/models": models.plain,
    "/v1/edit/completions/models": models.plain,
    "/v1/models/{id:path}": models.one,
    "/metrics": health.metrics,
    "/openapi.json": openapi.document,
}
POST: dict[str, Handler] = {
    "/v1/chat/completions": chat.chat,
    "/v1/completions": texts.completions,
    "/v1/fim/completions": texts.fim,
    "/v1/edit/completions": edits.edit,
    "/v1/apply/completions": edits.apply,
}


def create_app(engine: Any, options: Options = Options()) -> Starlette:
    """The ASGI app for an engine, which may still be warming up.

    engine: a `serve.engine.Engine`; whoever made it starts and stops it. ValueError for an alias of a model that is
    not loaded.
    """
    service = Service(engine, options, Metrics(engine, (*OPEN, *GET, *POST)))
    within = Router(
        [*_routes(GET, "GET", service), *_routes(POST, "POST", service), *_playground(engine, options)],
        redirect_slashes=False,
    )
    app = Starlette(
        middleware=[Middleware(Trace, metrics=service.metrics)], exception_handlers={HTTPException: _no_such}
    )
    # What is not one of the open routes is the guard's, whatever its path looks like.
    app.router = Router(_routes(OPEN, "GET", service), redirect_slashes=False, default=Guard(within, options))
    app.state.service = service
    return app


def _routes(table: dict[str, Handler], method: str, service: Service) -> list[BaseRoute]:
    return [
        Route(path, functools.partial(handler, service), methods=[method]) for path, handler in table.items()
    ]


def _playground(engine: Any, options: Options) -> list[BaseRoute]:
    if not options.playground:
        return []
    from mercury_jax.serve.playground.app import Playground

    return Playground(engine, options).routes()


async def _no_such(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the API's envelope."""
    assert isinstance(error, HTTPException)
    return errors.response(ApiError(error.status_code, f"{error.detail}", headers=error.headers, code=None))
