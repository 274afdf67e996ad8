"""The routes of the playground: the page, a stream of frames, the most probable tokens of a cell, and the form's data.

They are part of the server's app (`create_app`) and check no API key themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from anyio import CapacityLimiter, to_thread
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from mercury_jax.serve.api import body, sse
from mercury_jax.serve.api.errors import Json, invalid, refused, too_long, too_many, unavailable
from mercury_jax.serve.api.guard import key_of
from mercury_jax.serve.api.options import Options
from mercury_jax.serve.api.service import closing, told
from mercury_jax.serve.engine.engine import Engine
from mercury_jax.serve.engine.request import EngineRequest, RequestHandle, Snapshot
from mercury_jax.serve.playground import frames, requests
from mercury_jax.serve.playground.requests import PageRequest

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

    def __init__(self, engine: Engine, options: Options = Options()):
        self.engine, self.lm, self.options = engine, engine.lm, options
        block = engine.config.block or self.lm.model.config.block
        self.limits = requests.SizeLimits(engine.context, block)
        self.info = requests.page_info(self.lm, self.limits, bool(options.keys))
        self.labels = frames.TokenLabels(self.lm)
        rules = tuple(rule["name"] for rule in self.info["rules"])
        self.fields = requests.request_fields(rules, self.limits)
        self.cell_fields = requests.cell_fields(self.fields, self.lm.model.config.vocab, self.limits)
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
        return Json(self.info, headers={"cache-control": "no-store"})

    async def stream(self, request: Request) -> Response:
        """Events of one answer: a start, a frame per denoising pass, an end.

        Raises:
            ApiError: 400 for an invalid request, 429 or 503 where the engine rejects it.
        """
        fields = self.fields.read(await body.read(request, self.options), "")
        self._check_ready()
        page = requests.build_request(self.lm, fields, self.limits)
        bound = await to_thread.run_sync(requests.with_grammar, self.lm, page.request, fields["schema"])
        started = time.perf_counter()
        try:
            handle = self.engine.submit(dataclasses.replace(bound, cache_salt=key_of(request.scope)))
        except Exception as error:
            raise told(error, self.engine.context) from None
        return sse.EventStream(self._events(handle, page, started), handle.cancel, self.options.keep_alive)

    async def top(self, request: Request) -> Response:
        """The most probable tokens of a cell, as a pass of the stream saw it.

        Raises:
            ApiError: 400 for an invalid request, 429 where too many questions wait, 503 while the engine is not ready.
        """
        fields = self.cell_fields.read(await body.read(request, self.options), "")
        self._check_ready()
        page = requests.build_request(self.lm, fields["request"], self.limits)
        self._check_cell(page.request, fields)
        if self.waiting >= MAX_WAITING:
            raise too_many(1.0, "Too many questions about tokens are waiting. Please try again.")
        self.waiting += 1
        try:
            found = await to_thread.run_sync(self._top_tokens, page, fields, limiter=self.one_at_a_time)
        finally:
            self.waiting -= 1
        return Json(found, headers={"cache-control": "no-store"})

    def _check_ready(self) -> None:
        """Raises ApiError 503 while the engine accepts no requests."""
        if self.engine.closing:
            raise closing()
        if not self.engine.ready:
            raise unavailable("The model is warming up.", 5)

    async def _events(
        self, handle: RequestHandle, page: PageRequest, started: float
    ) -> AsyncGenerator[bytes, None]:
        request, shown, step = page.request, frames.NO_CELLS, 0
        seconds = lambda: time.perf_counter() - started
        yield sse.event({
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
                    yield sse.event(event | {"step": step, "ms": round(1000 * seconds(), 3)})
                if snapshot.finish is not None:
                    yield sse.event(frames.end_event(self.lm, snapshot, page.chat, seconds()))

    def _check_cell(self, request: EngineRequest, fields: Mapping[str, Any]) -> None:
        """Raises ApiError 400 for a cell that no pass of this request can have seen."""
        most, start, count = request.max_output, fields["start"], len(fields["tokens"])
        if request.max_length + len(request.suffix or ()) > self.limits.context:
            raise too_long(self.limits.context)
        if len(fields["settled"]) != count:
            raise invalid("settled", f"settled has {len(fields['settled'])} entries; allowed: {count}")
        if start > count:
            raise refused("start", start, f"at most {count}, the number of cells that were shown")
        whole = self.lm.model.config.pattern == "bidirectional" or request.suffix is not None
        end = most if whole else min(most, start + self.limits.block)
        if not start <= fields["index"] < end:
            raise refused("index", fields["index"], f"a cell from {start} to {end - 1}")

    def _top_tokens(self, page: PageRequest, fields: Mapping[str, Any]) -> dict[str, Any]:
        accepted = [bool(x) for x in fields["settled"]]
        read = frames.pass_input(
            self.lm, page.request, fields["tokens"], accepted, fields["start"], fields["index"], self.limits.block
        )  # fmt: skip
        top = frames.top_tokens(self.lm, read)
        cells = []
        for token, p in zip(top.ids, top.p, strict=True):
            text, kind = self.labels.label(token)
            cells.append({"id": token, "text": text, "kind": kind, "p": p})
        # Frames do not show what a grammar has taken back after a pass.
        return {"top": cells, "exact": top.exact and fields["request"]["schema"] is None}


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
