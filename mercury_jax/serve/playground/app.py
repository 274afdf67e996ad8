"""The routes of the playground: the page, a stream of frames, the most probable tokens of a cell, and the form's data.

They are part of the server's app (`create_app`) and check no API key themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

from anyio import CapacityLimiter, to_thread
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from mercury_jax.serve.auth import cache_salt
from mercury_jax.serve.engine.request import EngineRequest, Snapshot
from mercury_jax.serve.errors import (
    context_length_exceeded,
    invalid_request,
    invalid_value,
    rate_limited,
    unavailable,
)
from mercury_jax.serve.http import JsonResponse, read_json
from mercury_jax.serve.options import ServerOptions
from mercury_jax.serve.playground import frames, requests
from mercury_jax.serve.playground.requests import CellRequest, PageRequest, PlaygroundRequest
from mercury_jax.serve.protocol import parse_request
from mercury_jax.serve.service import AnswerHandle, ServingEngine, shutting_down, to_api_error
from mercury_jax.serve.streaming import EventStreamResponse, sse_event

STATIC = Path(__file__).parent / "static"
KEEP_ALIVE = 5.0  # seconds of silence after which the stream sends a comment
MAX_WAITING = 8  # questions about cells that may wait
ALIVE = b": alive\n\n"

# Everything comes from this server, nothing may frame the page, and no text can become markup or script.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class PageFiles(StaticFiles):
    """Static files with the headers of the page."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """The response of a file, with HEADERS."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response


class Playground:
    """The page of one engine.

    Args:
        engine: The engine; it may still be starting.
        options: Options of the server. If they hold API keys, the page asks for one.
    """

    def __init__(self, engine: ServingEngine, options: ServerOptions = ServerOptions()):
        self.engine, self.lm, self.options = engine, engine.lm, options
        block = engine.config.block or self.lm.model.config.block
        self.limits = requests.PageLimits(engine.context, block, engine.rules)
        self.info = requests.page_info(self.lm, self.limits, bool(options.keys))
        self.labels = frames.TokenLabels(self.lm)
        self.waiting, self.one_at_a_time = 0, CapacityLimiter(1)

    def routes(self) -> list[BaseRoute]:
        """The page at `/`, its files under `/playground/static`, and `/playground/{info,stream,top}`."""
        return [
            Route("/", self.page, methods=["GET"]),
            Mount("/playground/static", PageFiles(directory=STATIC)),
            Route("/playground/info", self.page_info, methods=["GET"]),
            Route("/playground/stream", self.stream, methods=["POST"]),
            Route("/playground/top", self.top, methods=["POST"]),
        ]

    async def page(self, request: Request) -> Response:
        """The page."""
        return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8", headers=HEADERS)

    async def page_info(self, request: Request) -> Response:
        """What the form needs to know about the model."""
        return JsonResponse(self.info, headers={"cache-control": "no-store"})

    async def stream(self, request: Request) -> Response:
        """Events of one answer: a start, a frame per denoising pass, an end.

        Raises:
            ApiError: 400 for an invalid request, 429 or 503 where the engine rejects it.
        """
        asked = await read_json(request, self.options, partial(parse_request, PlaygroundRequest))
        self._check_ready()
        page = requests.build_request(self.lm, asked, self.limits)
        bound = await to_thread.run_sync(requests.with_grammar, self.lm, page.request, asked.answer_schema)
        started = time.perf_counter()
        try:
            handle = self.engine.submit(dataclasses.replace(bound, cache_salt=cache_salt(request.scope)))
        except Exception as error:
            raise to_api_error(error, self.engine.context) from None
        return EventStreamResponse(
            self._events(handle, page, started), handle.cancel, self.options.keep_alive
        )

    async def top(self, request: Request) -> Response:
        """The most probable tokens of a cell, as a pass of the stream saw it.

        Raises:
            ApiError: 400 for an invalid request, 429 where too many questions wait, 503 while the engine is not ready.
        """
        asked = await read_json(request, self.options, partial(parse_request, CellRequest))
        self._check_ready()
        page = requests.build_request(self.lm, asked.request, self.limits)
        self._check_cell(page.request, asked)
        if self.waiting >= MAX_WAITING:
            raise rate_limited(1.0, "Too many questions about tokens are waiting. Please try again.")
        self.waiting += 1
        try:
            found = await to_thread.run_sync(
                self._top_tokens, page.request, asked, limiter=self.one_at_a_time
            )
        finally:
            self.waiting -= 1
        return JsonResponse(found, headers={"cache-control": "no-store"})

    def _check_ready(self) -> None:
        """Raises ApiError 503 while the engine accepts no requests."""
        if self.engine.closing:
            raise shutting_down()
        if not self.engine.ready:
            raise unavailable("The model is warming up.", 5)

    async def _events(
        self, handle: AnswerHandle, page: PageRequest, started: float
    ) -> AsyncGenerator[bytes, None]:
        request, shown, step = page.request, frames.NO_CELLS, 0
        seconds = lambda: time.perf_counter() - started
        yield sse_event({
            "type": "start", "model": self.lm.name, "prompt_tokens": len(request.prompt),
            "max_tokens": request.max_tokens, "thinking": request.thinking, "block": self.limits.block,
            "rule": request.rule, "p": request.p, "steps": request.steps, "seed": request.seed,
            "before": page.before, "after": page.after,
        })  # fmt: skip
        async with contextlib.aclosing(_with_keep_alive(aiter(handle))) as snapshots:
            async for snapshot in snapshots:
                if snapshot is None:
                    yield ALIVE
                    continue
                shown, changed = frames.changed_cells(shown, snapshot)
                if snapshot.finish is None or len(changed):
                    step += 1
                    event = frames.frame_event(self.labels, shown, changed, snapshot)
                    yield sse_event(event | {"step": step, "ms": round(1000 * seconds(), 3)})
                if snapshot.finish is not None:
                    yield sse_event(frames.end_event(self.lm, snapshot, page.chat, seconds()))

    def _check_cell(self, request: EngineRequest, asked: CellRequest) -> None:
        """Raises ApiError 400 for a cell that no pass of this request can have seen."""
        config, most, count = self.lm.model.config, request.max_output, len(asked.tokens)
        if request.max_length + len(request.suffix or ()) > self.limits.context:
            raise context_length_exceeded(self.limits.context)
        unknown = next((i for i, token in enumerate(asked.tokens) if token >= config.vocab), None)
        if unknown is not None:
            raise invalid_value(
                f"tokens[{unknown}]", asked.tokens[unknown], f"a token id, 0 to {config.vocab - 1}"
            )
        if len(asked.settled) != count:
            raise invalid_request("settled", f"settled has {len(asked.settled)} entries; allowed: {count}")
        if asked.start > count:
            raise invalid_value("start", asked.start, f"at most {count}, the number of cells that were shown")
        whole = config.pattern == "bidirectional" or request.suffix is not None
        end = most if whole else min(most, asked.start + self.limits.block)
        if not asked.start <= asked.index < end:
            raise invalid_value("index", asked.index, f"a cell from {asked.start} to {end - 1}")

    def _top_tokens(self, request: EngineRequest, asked: CellRequest) -> dict[str, Any]:
        accepted, block = [bool(x) for x in asked.settled], self.limits.block
        read = frames.pass_input(self.lm, request, asked.tokens, accepted, asked.start, asked.index, block)
        top = frames.top_tokens(self.lm, read)
        cells = []
        for token, p in zip(top.ids, top.p, strict=True):
            text, kind = self.labels.label(token)
            cells.append({"id": token, "text": text, "kind": kind, "p": p})
        # Frames do not show what a grammar has taken back after a pass.
        return {"top": cells, "exact": top.exact and asked.request.answer_schema is None}


async def _with_keep_alive(snapshots: AsyncIterator[Snapshot]) -> AsyncGenerator[Snapshot | None, None]:
    """The snapshots, and None after every KEEP_ALIVE seconds without one."""
    ended: Any = object()
    while True:
        following = asyncio.ensure_future(anext(snapshots, ended))
        try:
            while not (await asyncio.wait({following}, timeout=KEEP_ALIVE))[0]:
                yield None
        finally:
            if not following.done():
                following.cancel()
        if following.result() is ended:
            return
        yield following.result()
