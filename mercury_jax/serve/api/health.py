"""What machines ask: is it alive, does it take requests, what does it measure."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from mercury_jax.serve.api import errors
from mercury_jax.serve.api.metrics import ready
from mercury_jax.serve.api.service import Service


async def health(service: Service, request: Request) -> Response:
    """The process answers. It says nothing of the model."""
    return errors.Json({"status": "ok"})


async def is_ready(service: Service, request: Request) -> Response:
    """200 while jobs are taken; 503 until the model is warm, and as soon as the server is to end."""
    engine: Any = service.engine
    if ready(engine):
        return errors.Json({"status": "ready"})
    status = "closing" if engine.closing else "warming up"
    return errors.Json({"status": status}, 503, headers={"retry-after": "1"})


async def metrics(service: Service, request: Request) -> Response:
    text = await run_in_threadpool(service.metrics.text)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
