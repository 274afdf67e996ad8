"""Server-sent events, and the response that sends them: bounded by its reader, ended by its reader's leaving."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mercury_jax.serve.api.errors import dumps

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
ALIVE = b": keep-alive\n\n"  # a comment, which every reader of events skips
HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}


class Gone(Exception):
    """The client left before its answer was complete."""


def event(value: Any) -> bytes:
    """One event of one line: JSON escapes every line end, and whatever else a reader may take for one."""
    return b"data: " + dumps(value).encode("ascii") + b"\n\n"


class EventStream(Response):
    """Sends what a generator yields, and calls `close` in any case: at its end, or as soon as the client leaves.

    keep_alive: seconds of silence after which a comment says that the server lives: proxies close what is silent.
    Nothing is buffered here: the next piece is asked for when the last one was taken, and what a slow reader
    misses meanwhile is left out by the generator's own source.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None], keep_alive: float):
        self.events, self.close, self.background, self.status_code = events, close, None, 200
        self.keep_alive = keep_alive
        self.init_headers(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except (Gone, OSError):
            pass
        finally:  # a generator that never began would not clean up by itself
            self.close()

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self.events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with contextlib.aclosing(kept_alive(self.events, self.keep_alive)) as parts:
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def kept_alive(events: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    """The events, and a comment after every `seconds` in which none came."""
    following = asyncio.ensure_future(anext(events))
    try:
        while True:
            done, _ = await asyncio.wait((following,), timeout=seconds)
            if not done:
                yield ALIVE
                continue
            try:
                part = following.result()
            except StopAsyncIteration:
                return
            yield part
            following = asyncio.ensure_future(anext(events))
    finally:
        await _ended(following)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; Gone, and `work` cancelled, as soon as the client has left."""
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        await _ended(leaving)
        await _ended(task)


async def left(receive: Receive) -> None:
    """Returns when the client has left. The body was read before, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(task: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait until its cleaning up is done."""
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
