"""From jobs in flight to the answer on the wire: one JSON body, or a stream of chunks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from mercury_jax.serve.api import errors, sse, wire
from mercury_jax.serve.api.again import Again
from mercury_jax.serve.api.metrics import Timing
from mercury_jax.serve.api.ready import Ready
from mercury_jax.serve.api.service import Flight, Service, closing
from mercury_jax.serve.api.trace import REQUEST_ID, told_of
from mercury_jax.serve.api.work import Answer, Json, Work, more, progress, usage
from mercury_jax.serve.chat.output_parser import OutputDelta, OutputParser
from mercury_jax.serve.engine.request import EngineRequest, Snapshot

log = logging.getLogger("mercury.serve")
T = TypeVar("T")
Prepare = Callable[[], tuple[Work, Sequence[EngineRequest | Ready]]]


async def respond(
    service: Service, request: Request, prepare: Prepare, count: int, grammar: int | None = None
) -> Response:
    """Prepare `count` jobs in a thread, run them, and answer. What a client that left had asked for is cancelled.

    grammar: as `Service.flight` has it.
    """
    began = time.perf_counter()
    try:
        work, flight = await sse.unless_gone(request.receive, service.flight(prepare, count, grammar))
    except sse.Gone:
        return Response(status_code=499)
    if work.then is not None:
        parsed: Any = work.reply  # of a chat, never a `Ready`
        flight.tickets = [Again(service.engine, ticket, work.then, parsed) for ticket in flight.tickets]
    run = Run(service, work, began, request.scope[REQUEST_ID])
    if work.stream:
        return sse.EventStream(run.events(flight), flight.close, service.options.keep_alive)
    try:
        answers = await sse.unless_gone(request.receive, run.answers(flight))
    except sse.Gone:
        return Response(status_code=499)
    finally:
        flight.close()
    return errors.Json(run.body(answers))


class Run:
    """One request that is being answered."""

    def __init__(self, service: Service, work: Work, began: float, request_id: str):
        self.service, self.work, self.began, self.request_id = service, work, began, request_id

    async def answers(self, flight: Flight) -> list[Answer]:
        """Every answer at its end; the first error ends them all."""
        tasks = [asyncio.ensure_future(self._answer(ticket)) for ticket in flight.tickets]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def body(self, answers: Sequence[Answer]) -> Json:
        work, form = self.work, self.work.form
        choices = [
            wire.choice(form, i, a.text, a.message.tool_calls, a.finish, a.logprobs)
            for i, a in enumerate(answers)
        ]
        return wire.body(
            form, wire.head(form, work.model), choices, usage(work, answers), more(work, answers[0])
        )

    async def events(self, flight: Flight) -> AsyncGenerator[bytes, None]:
        """The stream: chunks, each choice closed once, then [DONE]; an error is an event of its own."""
        try:
            async with contextlib.aclosing(self._chunks(flight)) as chunks:
                async for chunk in chunks:
                    yield sse.event(chunk)
        except Exception as error:
            yield sse.event(told_of(error, self.request_id).envelope())
        yield sse.DONE

    async def _chunks(self, flight: Flight) -> AsyncGenerator[Json, None]:
        work, form = self.work, self.work.form
        head, answers = wire.head(form, work.model), dict[int, Answer]()
        for i in range(len(flight.tickets)):
            first = wire.opening(form, i)
            if first is not None:
                yield wire.chunk(form, head, [first])
        parts = [self._parts(i, ticket, answers) for i, ticket in enumerate(flight.tickets)]
        async with contextlib.aclosing(merged(parts)) as choices:
            async for choice, beside in choices:
                yield wire.chunk(form, head, [choice], beside)
        if work.include_usage:
            yield wire.usage_chunk(form, head, usage(work, [answers[i] for i in sorted(answers)]))

    async def _parts(
        self, i: int, ticket: Any, answers: dict[int, Answer]
    ) -> AsyncGenerator[tuple[Json, Json], None]:
        """(choice, what stands beside it) of each chunk of answer i."""
        work, form, reply = self.work, self.work.form, self.work.reply()
        shown, share, snapshot, first = "", 0.0, None, None
        async with contextlib.aclosing(followed(ticket, reply)) as steps:
            async for snapshot, delta in steps:
                first = first or time.perf_counter()
                now = reply.preview(snapshot) if work.diffusing and snapshot.finish is None else shown
                if now != shown:
                    shown, share = now, progress(snapshot, share)
                    yield wire.frame(form, i, shown), {"diffusion_meta": {"diffusion_progress": share}}
                told = "" if work.diffusing or work.whole else delta.content
                if told or delta.tool_calls:
                    yield wire.piece(form, i, told, delta.tool_calls), {}
        answers[i] = answer = self._ended(reply, snapshot, first)
        if work.diffusing:
            yield wire.frame(form, i, answer.text), {"diffusion_meta": {"diffusion_progress": 1.0}}
        elif work.whole and answer.text:
            yield wire.piece(form, i, answer.text), {}
        yield wire.closing(form, i, answer.finish, answer.logprobs), more(work, answer)

    async def _answer(self, ticket: Any) -> Answer:
        reply, snapshot, first = self.work.reply(), None, None
        async with contextlib.aclosing(followed(ticket, reply)) as steps:
            async for step in steps:
                snapshot, first = step[0], first or time.perf_counter()
        return self._ended(reply, snapshot, first)

    def _ended(self, reply: OutputParser | Ready, snapshot: Snapshot | None, first: float | None) -> Answer:
        """The answer, checked and counted. ApiError where the engine did not finish it."""
        work, message = self.work, reply.message()
        if snapshot is None or (snapshot.finish == "cancelled" and not reply.stopped):
            raise (
                closing() if self.service.engine.closing else errors.unavailable("The request was cancelled.")
            )
        if snapshot.finish == "error":
            log.error("request %s: the engine failed: %s", self.request_id, snapshot.message)
            raise errors.failed(self.request_id)
        finish = "stop" if reply.stopped or snapshot.finish is None else snapshot.finish
        finish = "tool_calls" if message.tool_calls else finish
        if work.check is not None and not work.check(message):
            self.service.metrics.broken.inc()
            log.error("request %s: an answer does not obey its schema", self.request_id)
            raise errors.failed(self.request_id)
        text = work.whole(message.content, finish) if work.whole else message.content
        self._count(message.completion_tokens, snapshot.forwards, first)
        logprobs = (
            work.logprobs(snapshot, message) if work.logprobs and snapshot.logprobs is not None else None
        )
        return Answer(text, message, finish, snapshot, logprobs)

    def _count(self, tokens: int, forwards: int, first: float | None) -> None:
        now = time.perf_counter()
        timing = Timing((first or now) - self.began, now - self.began, tokens, forwards)
        self.service.metrics.timed(timing)


async def followed(
    ticket: Any, reply: OutputParser | Ready
) -> AsyncGenerator[tuple[Snapshot, OutputDelta], None]:
    """Each snapshot with what is new in it, up to the last one or a stop text, at which the job is cancelled.

    Where log-probabilities are wanted the job goes on: the last snapshot alone has them.
    """
    stopped = False
    async with contextlib.aclosing(aiter(ticket)) as snapshots:
        async for snapshot in snapshots:
            yield snapshot, OutputDelta() if stopped else reply.feed(snapshot)
            stopped = reply.stopped
            if stopped and ticket.request.logprobs is None:
                ticket.cancel()
                return


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """What several streams yield, as it comes; each is closed at the end."""
    waiting = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(stream))] = stream
                yield item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
