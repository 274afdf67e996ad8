"""The page and its routes on Starlette: one stream of frames, the top five of a cell, what there is to choose."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from pydantic import Field, create_model
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from mercury_jax.serve.auth import cache_salt
from mercury_jax.serve.engine.types import Job, Snapshot
from mercury_jax.serve.errors import (
    context_length_exceeded,
    invalid_request,
    invalid_value,
    rate_limited,
    unavailable,
)
from mercury_jax.serve.http import JsonResponse, read_json
from mercury_jax.serve.options import ServerOptions
from mercury_jax.serve.playground import about, frames, request as requests, top
from mercury_jax.serve.protocol import RequestModel, parse_request
from mercury_jax.serve.service import shutting_down, to_api_error
from mercury_jax.serve.streaming import EventStreamResponse, sse_event

STATIC = Path(__file__).parent / "static"
BEAT = 5.0  # seconds of silence after which the stream says that it lives
LOOKS = 8  # clicks that may wait for their top five
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


class Files(StaticFiles):
    """Static files with the page's headers."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        made = super().file_response(*args, **kwargs)
        made.headers.update(HEADERS)
        return made


class Playground:
    """The routes of one engine."""

    def __init__(self, engine: Any, options: ServerOptions):
        self.engine, self.lm, self.options = engine, engine.lm, options
        self.block = engine.settings.block or self.lm.model.config.block
        self.fit = requests.Fit(engine.context, self.block)
        self.info = about.info(self.lm, engine.context, self.block, bool(options.keys))
        self.labels = frames.Labels(self.lm)
        most = about.most_tokens(engine.context)
        self.table = requests.request_model(tuple(r["name"] for r in self.info["rules"]), most)
        self.look = _look(self.table, self.lm.model.config.vocab, 2 * most + requests.MOST_TOKENS)
        self.looking, self.one = 0, CapacityLimiter(1)

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/", self.page, methods=["GET"]),
            Mount("/playground/static", Files(directory=STATIC)),
            Route("/playground/info", self.tell, methods=["GET"]),
            Route("/playground/stream", self.stream, methods=["POST"]),
            Route("/playground/top", self.best, methods=["POST"]),
        ]

    async def page(self, request: Request) -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8", headers=HEADERS)

    async def tell(self, request: Request) -> Response:
        return JsonResponse(self.info, headers={"cache-control": "no-store"})

    async def stream(self, request: Request) -> Response:
        read = (await read_json(request, self.options, partial(parse_request, self.table))).model_dump(
            by_alias=True
        )
        self._open()
        asked = requests.asked(self.lm, read, self.fit)
        job = await to_thread.run_sync(requests.with_grammar, self.lm, asked.job, read["schema"])
        began = time.perf_counter()
        try:
            ticket = self.engine.submit(dataclasses.replace(job, salt=cache_salt(request.scope)))
        except Exception as error:
            raise to_api_error(error, self.engine.context) from None
        return EventStreamResponse(self._events(ticket, asked, began), ticket.cancel, self.options.keep_alive)

    def _open(self) -> None:
        """ApiError 503 while the engine takes nothing."""
        if self.engine.closing:
            raise shutting_down()
        if not self.engine.ready:
            raise unavailable("The model is warming up.", 5)

    async def _events(self, ticket: Any, asked: requests.Asked, began: float) -> AsyncGenerator[bytes, None]:
        job, shown, step = asked.job, frames.NOTHING, 0
        since = lambda: time.perf_counter() - began
        yield sse_event({
            "type": "start", "model": self.lm.name, "prompt_tokens": len(job.prompt), "max_tokens": job.max_tokens,
            "thinking": job.thinking, "block": self.block, "rule": job.rule, "p": job.p, "steps": job.steps,
            "seed": job.seed, "before": asked.before, "after": asked.after,
        })  # fmt: skip
        async with contextlib.aclosing(_beating(aiter(ticket))) as snapshots:
            async for snapshot in snapshots:
                if snapshot is None:
                    yield ALIVE
                    continue
                shown, changed = frames.look(shown, snapshot)
                if snapshot.finish is None or len(changed):
                    step += 1
                    more = {"step": step, "ms": round(1000 * since(), 3)}
                    yield sse_event(frames.frame(self.labels, shown, changed, snapshot) | more)
                if snapshot.finish is not None:
                    yield sse_event(frames.ending(self.lm, snapshot, asked.chat, since()))

    async def best(self, request: Request) -> Response:
        read = (await read_json(request, self.options, partial(parse_request, self.look))).model_dump(
            by_alias=True
        )
        self._open()
        job = requests.asked(self.lm, read["request"], self.fit).job
        self._check(job, read)
        if self.looking >= LOOKS:
            raise rate_limited(1.0, "Too many tokens are being looked at. Please try again.")
        self.looking += 1
        try:
            found = await to_thread.run_sync(self._top, job, read, limiter=self.one)
            # What a grammar took back after a pass is in no trace.
            found["exact"] &= read["request"]["schema"] is None
        finally:
            self.looking -= 1
        return JsonResponse(found, headers={"cache-control": "no-store"})

    def _check(self, job: Job, read: Mapping[str, Any]) -> None:
        """ApiError for a cell that no pass of this job could have looked at."""
        most, start, cells = requests.cells(job), read["start"], len(read["tokens"])
        if len(job.prompt) + most + len(job.suffix or ()) > self.engine.context:
            raise context_length_exceeded(self.engine.context)
        if len(read["settled"]) != cells:
            raise invalid_request("settled", f"settled has {len(read['settled'])} entries; allowed: {cells}")
        if start > cells:
            raise invalid_value("start", start, f"at most {cells}, the cells that stood there")
        whole = self.lm.model.config.pattern == "bidirectional" or job.suffix is not None
        end = most if whole else min(most, start + self.block)
        if not start <= read["index"] < end:
            raise invalid_value("index", read["index"], f"a cell from {start} to {end - 1}")

    def _top(self, job: Job, read: Mapping[str, Any]) -> dict[str, Any]:
        settled = [bool(x) for x in read["settled"]]
        seen = top.canvas(self.lm, job, read["tokens"], settled, read["start"], read["index"], self.block)
        best = top.best(self.lm, seen)
        named = [(i, p, *self.labels.of(i)) for i, p in zip(best.ids, best.p, strict=True)]
        return {
            "top": [{"id": i, "text": text, "kind": kind, "p": p} for i, p, text, kind in named],
            "exact": best.exact,
        }


def _look(request: type[RequestModel], vocab: int, most: int) -> type[RequestModel]:
    """The fields of a look at one cell."""
    ids = Annotated[int, Field(ge=0, le=vocab - 1)]
    flags = Annotated[int, Field(ge=0, le=1)]
    cell = Annotated[int, Field(ge=0, le=most)]
    return create_model(
        "CellRequest",
        __base__=RequestModel,
        request=(request, ...),
        tokens=(Annotated[list[ids], Field(max_length=most, fail_fast=True)], ...),
        settled=(Annotated[list[flags], Field(max_length=most, fail_fast=True)], ...),
        start=(cell, ...),
        index=(cell, ...),
    )


async def _beating(snapshots: AsyncIterator[Snapshot]) -> AsyncGenerator[Snapshot | None, None]:
    """The snapshots, and None after every BEAT seconds without one."""
    nothing: Any = object()
    while True:
        following = asyncio.ensure_future(anext(snapshots, nothing))
        try:
            while not (await asyncio.wait({following}, timeout=BEAT))[0]:
                yield None
        finally:
            if not following.done():
                following.cancel()
        if following.result() is nothing:
            return
        yield following.result()
