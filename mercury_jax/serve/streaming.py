"""HTTP responses from submitted jobs: one JSON body, or a stream of server-sent events.

A job is one engine request, that is, one answer. An endpoint describes its response by a `ResponsePlan` and calls
`respond`. If the client disconnects, its jobs are cancelled, for streams and for single JSON bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mercury_jax.decode.constrained import RETRIES, RETRY_TEMPERATURE, Kept, kept_of, retry_seed
from mercury_jax.serve import errors
from mercury_jax.serve.auth import KEY_DIGEST
from mercury_jax.serve.chat.output_parser import OutputDelta, OutputParser
from mercury_jax.serve.completion_writer import CompletionWriter
from mercury_jax.serve.engine.request import EngineRequest, RequestRejected, Snapshot
from mercury_jax.serve.engine_requests import Continuation
from mercury_jax.serve.http import REQUEST_ID, JsonResponse, to_reported_error
from mercury_jax.serve.response_plan import AnswerWriter, FinishedAnswer, ResponsePlan, usage_of
from mercury_jax.serve.responses import Usage
from mercury_jax.serve.service import AnswerHandle, Service, SubmittedJobs, shutting_down

if TYPE_CHECKING:
    from mercury_jax.serve.engine.engine import Engine

log = logging.getLogger("mercury.serve")
T = TypeVar("T")
JsonDict = dict[str, Any]

KEEP_ALIVE_COMMENT = b": keep-alive\n\n"  # SSE clients ignore comments
EVENT_STREAM_HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}


class ClientDisconnected(Exception):
    """The client disconnected before its response was complete."""


async def respond(
    service: Service,
    request: Request,
    prepare: Callable[[], tuple[ResponsePlan, Sequence[EngineRequest | AnswerHandle]]],
    count: int,
    grammar_bytes: int | None = None,
) -> Response:
    """Prepares and runs the jobs of a request, and returns the response."""
    arrival = time.perf_counter()
    try:
        salt = request.scope.get(KEY_DIGEST, "")
        submission = service.submit(prepare, count, grammar_bytes, salt)
        plan, jobs = await run_until_disconnect(request.receive, submission)
    except ClientDisconnected:
        return Response(status_code=499)
    if plan.continuation is not None:
        jobs.handles = [
            ContinuedAnswer(service.engine, handle, plan.continuation, plan.parser) for handle in jobs.handles
        ]
    if plan.valid is not None:
        jobs.handles = [RetriedAnswer(service, handle, plan) for handle in jobs.handles]
    responder = Responder(service, plan, arrival, request.scope[REQUEST_ID])
    if plan.request.stream:
        return EventStreamResponse(responder.events(jobs), jobs.close, service.options.keep_alive)
    try:
        return JsonResponse(await run_until_disconnect(request.receive, responder.completion(jobs)))
    except ClientDisconnected:
        return Response(status_code=499)
    finally:
        jobs.close()


class Responder:
    """Reads the answers to one request, and writes the response."""

    def __init__(self, service: Service, plan: ResponsePlan, arrival: float, request_id: str):
        self.service, self.plan, self.arrival, self.request_id = service, plan, arrival, request_id
        self.writer: AnswerWriter = (plan.writer or CompletionWriter)(plan)
        self.read: dict[int, tuple[OutputParser, Snapshot]] = {}  # by answer, what has been read of it so far

    async def completion(self, jobs: SubmittedJobs) -> JsonDict:
        """Waits for all answers and returns the response. The first error ends all of them."""
        found: dict[int, FinishedAnswer] = {}
        async with contextlib.aclosing(self._answers(jobs, found)) as events:
            async for _ in events:
                pass
        answers = [found[i] for i in sorted(found)]
        return self.writer.body(answers, self._usage())

    async def events(self, jobs: SubmittedJobs) -> AsyncGenerator[bytes, None]:
        """Streams the response as server-sent events.

        An error is sent as an event, because the status 200 has already been sent.
        """
        found: dict[int, FinishedAnswer] = {}
        try:
            async with contextlib.aclosing(self._answers(jobs, found)) as events:
                async for event in events:
                    yield event
            answers = [found[i] for i in sorted(found)]
            for event in self.writer.end(answers, self._usage()):
                yield event
        except Exception as error:
            for event in self.writer.fail(to_reported_error(error, self.request_id)):
                yield event

    async def _answers(
        self, jobs: SubmittedJobs, found: dict[int, FinishedAnswer]
    ) -> AsyncGenerator[bytes, None]:
        """Yields the events of all answers as they arrive, and stores the finished answers in `found`."""
        for event in self.writer.begin(len(jobs.handles)):
            yield event
        streams = [self._answer(i, handle, found) for i, handle in enumerate(jobs.handles)]
        async with contextlib.aclosing(interleave(streams)) as events:
            async for event in events:
                yield event

    async def _answer(
        self, i: int, handle: AnswerHandle, found: dict[int, FinishedAnswer]
    ) -> AsyncGenerator[bytes, None]:
        """Yields the events of answer i."""
        plan, parser, snapshot, first = self.plan, self.plan.parser(), None, None
        async with contextlib.aclosing(parsed_snapshots(handle, parser)) as steps:
            async for snapshot, delta in steps:
                first, self.read[i] = first or time.perf_counter(), (parser, snapshot)
                for event in self.writer.update(i, snapshot, delta, parser):
                    yield event
        answer = self._finish(parser, snapshot, first)
        if plan.echoes:
            echo = plan.echoes[i // plan.answers_per_prompt]
            logprobs = echo.followed_by(answer.logprobs)  # type: ignore[arg-type]
            answer = answer._replace(text=echo.text + answer.text, logprobs=logprobs)
        found[i] = answer
        for event in self.writer.finish(i, answer):
            yield event

    def _finish(self, parser: OutputParser, snapshot: Snapshot | None, first: float | None) -> FinishedAnswer:
        """Checks an answer at its end, and counts it in the metrics."""
        plan, message = self.plan, parser.message()
        if snapshot is None or (snapshot.finish == "cancelled" and not parser.stopped):
            closing = self.service.engine.closing
            raise shutting_down() if closing else errors.unavailable("The request was cancelled.")
        if snapshot.finish == "error":
            log.error("request %s: the engine failed: %s", self.request_id, snapshot.message)
            raise errors.internal_error(self.request_id)
        if plan.check is not None and not plan.check(message):
            self.service.metrics.schema_failures.inc()
            log.error("request %s: an answer does not obey its schema", self.request_id)
            raise errors.internal_error(self.request_id)
        finish = "stop" if parser.stopped or snapshot.finish is None else snapshot.finish
        finish = "tool_calls" if message.tool_calls else finish
        text = message.content
        if plan.finish_content is not None:
            text = plan.finish_content(text, finish)
        now = time.perf_counter()
        self.service.metrics.count_answer(
            self.service.engine.lm.name,
            (first or now) - self.arrival,
            now - self.arrival,
            message.completion_tokens,
            snapshot.forwards,
        )
        wanted = plan.logprobs is not None and snapshot.logprobs is not None
        logprobs = plan.logprobs(snapshot, message) if plan.logprobs is not None and wanted else None
        return FinishedAnswer(text, message, finish, snapshot, logprobs)

    def _usage(self) -> Usage:
        return usage_of(self.plan, self.read)


class ContinuedAnswer:
    """An `AnswerHandle` that reads a job and the jobs that continue it as one answer."""

    def __init__(
        self,
        engine: Engine,
        handle: AnswerHandle,
        continuation: Continuation,
        parser: Callable[[], OutputParser],
    ):
        self.request: EngineRequest = handle.request
        self._engine, self._handle, self._continuation, self._parser = engine, handle, continuation, parser
        self._cancelled = False

    def cancel(self) -> None:
        """Cancels the running job; no further job is submitted."""
        self._cancelled = True
        self._handle.cancel()

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        before: Snapshot | None = None  # what is kept of all earlier jobs; None during the first job
        while True:
            parser, kept = self._parser(), None
            async with contextlib.aclosing(aiter(self._handle)) as snapshots:  # type: ignore[type-var]
                async for snapshot in snapshots:
                    # A new parser per job reads the whole answer again: the earlier jobs' tokens, then this job's.
                    whole = snapshot if before is None else before.followed_by(snapshot)
                    parser.feed(whole)
                    kept = await self._continue(snapshot, len(whole.tokens) - len(snapshot.tokens), parser)
                    if kept is not None:
                        break
                    yield whole
            if kept is None:
                return
            before = kept if before is None else before.followed_by(kept)

    async def _continue(self, last: Snapshot, before: int, parser: OutputParser) -> Snapshot | None:
        """Submits the next job if the answer has ended without content.

        An answer can end before its job: a token that ends the turn does not always end the job. With logprobs, the
        job must run to its own end, since only its last snapshot has them.

        Returns:
            The part of the current job to keep, if a next job was submitted. None if the current job goes on, or is the
            last one.
        """
        ended = last.finish in ("stop", "length") or (last.finish is None and parser.stopped)
        needs_logprobs = last.finish is None and self._handle.request.logprobs is not None
        if not ended or needs_logprobs or self._cancelled or not parser.empty:
            return None
        kept = last.truncated(parser.message().completion_tokens - before)
        found = self._continuation(self._handle.request, kept)
        if found is None:
            return None
        try:
            handle = await run_in_threadpool(self._engine.submit, found[1])
        except (RequestRejected, ValueError):  # the engine is shutting down: the answer stays as it is
            return None
        self._handle.cancel()
        self._handle = handle
        if self._cancelled:  # `cancel` was called while the job was being submitted
            handle.cancel()
        return found[0]


class RetriedAnswer:
    """An `AnswerHandle` that decodes an answer again where a check finds it invalid: once, or RETRIES times if strict.

    A stream shows no call before the call is complete and checked, and nothing of a strict answer. If it has shown text
    already, that cannot be taken back, and the answer stays as it is. It also stays where the engine does not finish
    another decoding. A strict answer that stays invalid is an error.
    """

    def __init__(self, service: Service, handle: AnswerHandle, plan: ResponsePlan):
        self.request: EngineRequest = handle.request
        self._service, self._handle, self._plan, self._cancelled = service, handle, plan, False

    def cancel(self) -> None:
        """Cancels the running job; no further job is submitted."""
        self._cancelled = True
        self._handle.cancel()

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        plan, last = self._plan, None
        assert plan.valid is not None
        for attempt in range(1, (RETRIES if plan.strict else 1) + 2):
            parser, again = plan.parser(), None
            async with contextlib.aclosing(aiter(self._handle)) as snapshots:  # type: ignore[type-var]
                async for snapshot in snapshots:
                    parser.feed(snapshot)
                    message = parser.message()
                    shown = plan.request.stream and bool(message.content) and not plan.strict and last is None
                    stopped = parser.stopped and self.request.logprobs is None
                    # The reader's parser keeps what it has read, so it reads nothing of an answer that may be replaced.
                    if snapshot.finish is None and not stopped and (parser.calling or not shown):
                        continue
                    ended = snapshot.finish in ("stop", "length") or (snapshot.finish is None and stopped)
                    if ended and not shown and not self._cancelled and not plan.valid(message):
                        last, again = snapshot, await self._next_job(attempt, snapshot)
                        if again is None and plan.strict:
                            self._service.metrics.schema_failures.inc()
                            raise errors.not_validated(message.content)
                    if again is not None:
                        break
                    if not ended and last is not None and not self._cancelled:
                        if plan.strict:  # what was decoded before is not valid
                            raise errors.unavailable("The answer could not be decoded again.")
                        snapshot = last
                    yield snapshot
            if again is None:
                return

    async def _next_job(self, attempt: int, last: Snapshot) -> AnswerHandle | None:
        """Submits the request with another seed, and warm enough for another answer.

        The answer begins with what precedes the first value that is at fault. None after the last attempt, and if the
        engine refuses it.
        """
        if attempt > (RETRIES if self._plan.strict else 1):
            return None
        first = self.request
        warm = max(first.temperature or 0.0, RETRY_TEMPERATURE)
        kept, marks, tokens = None, self._service.engine.lm.tokenizer.thinking, last.tokens.tolist()
        if first.grammar is not None:
            thought = first.thinking > 0 and marks is not None and marks.close in tokens
            at = tokens.index(marks.close) + 1 if thought and marks is not None else 0
            before = self._handle.request.kept
            kept = kept_of(first.grammar, tokens[at:], last.forced[at:].tolist(), before, attempt)
        seed = retry_seed(first.seed, attempt)
        request = dataclasses.replace(first, seed=seed, temperature=warm, kept=kept or Kept())
        try:
            handle = await run_in_threadpool(self._service.engine.submit, request)
        except (RequestRejected, ValueError):
            return None
        self._handle.cancel()
        self._handle = handle
        if self._cancelled:  # `cancel` was called while the job was being submitted
            handle.cancel()
        return handle


async def parsed_snapshots(
    handle: AnswerHandle, parser: OutputParser
) -> AsyncGenerator[tuple[Snapshot, OutputDelta], None]:
    """Yields each snapshot with its delta, until the last snapshot or the end of the answer.

    A stop sequence ends the answer before its job, which is then cancelled. With logprobs the job runs to its own end,
    since only its last snapshot has them; the deltas after the stop sequence are empty.
    """
    stopped = False
    async with contextlib.aclosing(aiter(handle)) as snapshots:  # type: ignore[type-var]
        async for snapshot in snapshots:
            yield snapshot, OutputDelta() if stopped else parser.feed(snapshot)
            stopped = parser.stopped
            if stopped and handle.request.logprobs is None:
                handle.cancel()
                return


async def interleave(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Merges several generators into one, in the order in which their items are made."""
    waiting: dict[asyncio.Future[T], AsyncGenerator[T, None]] = {}
    finished: deque[asyncio.Future[T]] = (
        deque()
    )  # in the order in which they ended; the set of `asyncio.wait` has none

    def read_next(stream: AsyncGenerator[T, None]) -> None:
        task = asyncio.ensure_future(anext(stream))
        task.add_done_callback(finished.append)
        waiting[task] = stream

    for stream in streams:
        read_next(stream)
    try:
        while waiting:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            while finished:
                task = finished.popleft()
                stream = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                read_next(stream)
                yield item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


class EventStreamResponse(Response):
    """Streams the events of a generator; calls `close` at the end, or as soon as the client disconnects.

    Nothing is buffered: the next event is requested after the previous one has been sent. For a slow reader, the
    generator skips intermediate snapshots (`RequestHandle`), so memory use stays bounded.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None], keep_alive: float):
        self.events, self.close, self.background, self.status_code = events, close, None, 200
        self.keep_alive = keep_alive
        self.init_headers(EVENT_STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._send(send))
        except (ClientDisconnected, OSError):
            pass
        finally:  # a generator that was never started does not run its own cleanup
            self.close()

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self.events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with contextlib.aclosing(with_keep_alive(self.events, self.keep_alive)) as parts:
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def with_keep_alive(events: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    """Adds keep-alive comments to a stream of events."""
    # `asyncio.wait` with a timeout leaves the task running, whereas `wait_for` would cancel the generator.
    following = asyncio.ensure_future(anext(events))
    try:
        while True:
            done, _ = await asyncio.wait((following,), timeout=seconds)
            if not done:
                yield KEEP_ALIVE_COMMENT
                continue
            try:
                event = following.result()
            except StopAsyncIteration:
                return
            yield event
            following = asyncio.ensure_future(anext(events))
    finally:
        await _cancel(following)


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine until the client disconnects."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        await _cancel(leaving)
        await _cancel(task)


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancels a task if it is still running, and waits until its cleanup has run."""
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
