"""From submitted jobs to the HTTP response: one JSON body, or a stream of server-sent events.

An endpoint describes its response by a `ResponsePlan` and calls `respond`. Jobs of a client that disconnects are
cancelled, whether the response is whole or streamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mercury_jax.serve import errors
from mercury_jax.serve.auth import KEY_DIGEST
from mercury_jax.serve.chat.output_parser import OutputDelta, OutputParser, ParsedMessage
from mercury_jax.serve.engine.request import EngineRequest, RequestRejected, Snapshot
from mercury_jax.serve.engine_requests import Continuation
from mercury_jax.serve.http import REQUEST_ID, JsonResponse, dump_json, to_reported_error
from mercury_jax.serve.protocol import ApiRequest
from mercury_jax.serve.responses import ResponseKind, ResponseWriter, Usage
from mercury_jax.serve.service import AnswerHandle, Service, SubmittedJobs, shutting_down

if TYPE_CHECKING:
    from mercury_jax.serve.engine.engine import Engine

log = logging.getLogger("mercury.serve")
T = TypeVar("T")
JsonDict = dict[str, Any]

DONE_EVENT = b"data: [DONE]\n\n"
KEEP_ALIVE_COMMENT = b": keep-alive\n\n"  # readers of events skip comments
EVENT_STREAM_HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}


class ResponsePlan(NamedTuple):
    """How the answers to one request are read and written.

    Attributes:
        kind: Kind of the endpoint.
        request: The request.
        prompt_tokens: Tokens of all prompts.
        parser: Returns a fresh parser for one answer.
        answers_per_prompt: The jobs of one prompt follow each other.
        diffusing: Stream the whole current text in each chunk.
        reasoning_summary: Report the thinking.
        thinks: Whether the prompt opened the thinking.
        warning: A warning for the response.
        finish_content: Content of (text, finish reason) where it is known at the end only.
        check: Whether an answer obeys its schema.
        logprobs: Log-probabilities of an answer, in the form of the endpoint.
        continuation: Returns the job that continues an answer that ended without content.
    """

    kind: ResponseKind
    request: ApiRequest
    prompt_tokens: int
    parser: Callable[[], OutputParser]
    answers_per_prompt: int = 1
    diffusing: bool = False
    reasoning_summary: bool = False
    thinks: bool = False
    warning: str | None = None
    finish_content: Callable[[str, str], str] | None = None
    check: Callable[[ParsedMessage], bool] | None = None
    logprobs: Callable[[Snapshot, ParsedMessage], Any] | None = None
    continuation: Continuation | None = None


class FinishedAnswer(NamedTuple):
    """One answer at its end."""

    text: str
    message: ParsedMessage
    finish_reason: str
    snapshot: Snapshot
    logprobs: JsonDict | None


class ClientDisconnected(Exception):
    """The client disconnected before its response was complete."""


async def respond(
    service: Service,
    request: Request,
    prepare: Callable[[], tuple[ResponsePlan, Sequence[EngineRequest | AnswerHandle]]],
    count: int,
    grammar_bytes: int | None = None,
) -> Response:
    """Prepares and runs the jobs of a request, and returns the response.

    Args:
        service: The service.
        request: The HTTP request, whose body has been read.
        prepare: Returns the plan and the jobs; called in a thread.
        count: Number of jobs.
        grammar_bytes: Size of the grammar in the request; None without one.

    Returns:
        The response; an empty one where the client disconnected.

    Raises:
        ApiError: The request is refused, or the engine failed.
    """
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
    """Writes the response to one request.

    Args:
        service: The service.
        plan: How answers are read and written.
        arrival: `time.perf_counter()` at the request's arrival.
        request_id: Id for the log.
    """

    def __init__(self, service: Service, plan: ResponsePlan, arrival: float, request_id: str):
        self.service, self.plan, self.arrival, self.request_id = service, plan, arrival, request_id
        self.writer = ResponseWriter(plan.kind, plan.request.model)

    async def completion(self, jobs: SubmittedJobs) -> JsonDict:
        """Returns the whole response, once every answer has ended; the first error ends all of them.

        Args:
            jobs: The submitted jobs, in the order of the choices.

        Raises:
            ApiError: The engine did not finish an answer.
        """
        found: dict[int, FinishedAnswer] = {}
        streams = [self._choice_chunks(i, handle, found) for i, handle in enumerate(jobs.handles)]
        async with contextlib.aclosing(interleave(streams)) as chunks:
            async for _ in chunks:
                pass
        answers = [found[i] for i in range(len(streams))]
        choices = [
            self.writer.choice(i, a.text, a.message.tool_calls, a.finish_reason, a.logprobs)
            for i, a in enumerate(answers)
        ]
        return self.writer.completion(choices, self._usage(answers), self._extra(answers[0]))

    async def events(self, jobs: SubmittedJobs) -> AsyncGenerator[bytes, None]:
        """Yields the events of a stream: chunks, of which each choice has one last one, then [DONE].

        An error becomes an event of its own.

        Args:
            jobs: The submitted jobs, in the order of the choices.
        """
        writer, options = self.writer, self.plan.request.stream_options
        answers: dict[int, FinishedAnswer] = {}
        try:
            for i in range(len(jobs.handles) if self.plan.kind.message else 0):
                yield sse_event(writer.chunk([writer.chunk_choice(i, first=True)]))
            streams = [self._choice_chunks(i, handle, answers) for i, handle in enumerate(jobs.handles)]
            async with contextlib.aclosing(interleave(streams)) as chunks:
                async for chunk in chunks:
                    yield sse_event(chunk)
            if options is not None and options.include_usage:
                usage = self._usage([answers[i] for i in sorted(answers)])
                yield sse_event(writer.chunk([], {"usage": usage}))
        except Exception as error:
            yield sse_event(to_reported_error(error, self.request_id).envelope())
        yield DONE_EVENT

    async def _choice_chunks(
        self, i: int, handle: AnswerHandle, answers: dict[int, FinishedAnswer]
    ) -> AsyncGenerator[JsonDict, None]:
        """Yields the chunks of answer i, and stores the finished answer."""
        plan, writer, parser = self.plan, self.writer, self.plan.parser()
        # Deltas are not sent where the whole text is (diffusing), nor where the content is known at the end only.
        send_deltas = not plan.diffusing and plan.finish_content is None
        canvas, progress, snapshot, first = "", 0.0, None, None
        async with contextlib.aclosing(parsed_snapshots(handle, parser)) as steps:
            async for snapshot, delta in steps:
                first = first or time.perf_counter()
                if (
                    plan.diffusing
                    and snapshot.finish is None
                    and (text := parser.preview(snapshot)) != canvas
                ):
                    # Share of accepted tokens; it never falls, and is 1 in the last chunk only.
                    share = float(snapshot.accepted.mean()) if len(snapshot.accepted) else 0.0
                    canvas, progress = text, round(min(0.99, max(progress, share)), 4)
                    meta = {"diffusion_meta": {"diffusion_progress": progress}}
                    yield writer.chunk([writer.chunk_choice(i, canvas)], meta)
                content = (delta.content if send_deltas else None) or None
                if content or delta.tool_calls:
                    yield writer.chunk([writer.chunk_choice(i, content, delta.tool_calls)])
        answers[i] = answer = self._finish(parser, snapshot, first)
        if plan.diffusing:
            meta = {"diffusion_meta": {"diffusion_progress": 1.0}}
            yield writer.chunk([writer.chunk_choice(i, answer.text)], meta)
        elif plan.finish_content is not None and answer.text:
            yield writer.chunk([writer.chunk_choice(i, answer.text)])
        last = writer.chunk_choice(i, finish=answer.finish_reason, logprobs=answer.logprobs)
        yield writer.chunk([last], self._extra(answer))

    def _finish(self, parser: OutputParser, snapshot: Snapshot | None, first: float | None) -> FinishedAnswer:
        """Checks and counts an answer.

        Raises:
            ApiError: 500 or 503 where the engine did not finish it, or where it does not obey its schema.
        """
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
            (first or now) - self.arrival, now - self.arrival, message.completion_tokens, snapshot.forwards
        )
        wanted = plan.logprobs is not None and snapshot.logprobs is not None
        logprobs = plan.logprobs(snapshot, message) if plan.logprobs is not None and wanted else None
        return FinishedAnswer(text, message, finish, snapshot, logprobs)

    def _usage(self, answers: Sequence[FinishedAnswer]) -> Usage:
        """Returns the usage; each prompt is counted once, however many answers it has."""
        completion = sum(a.message.completion_tokens for a in answers)
        reasoning = sum(a.message.reasoning_tokens for a in answers)
        cached = sum(a.snapshot.cached for a in answers[:: self.plan.answers_per_prompt])
        return {
            "prompt_tokens": self.plan.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.plan.prompt_tokens + completion,
            "reasoning_tokens": reasoning,
            "cached_input_tokens": cached,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    def _extra(self, answer: FinishedAnswer) -> JsonDict:
        """Returns what stands beside the choices: a warning and the summary of the thinking."""
        extra: JsonDict = {} if self.plan.warning is None else {"warning": self.plan.warning}
        if self.plan.reasoning_summary:
            thinking = answer.message.reasoning
            status = "complete" if thinking else "unavailable" if self.plan.thinks else "skipped"
            extra["reasoning_summary"] = {"content": thinking or None, "status": status}
        return extra


class ContinuedAnswer:
    """A job and those that continue it, read as one.

    Args:
        engine: Where further jobs are submitted.
        handle: The first job.
        continuation: Decides which job follows.
        parser: Returns a fresh parser, which says whether the answer has content.
    """

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
        """Cancels the job that runs; no other one follows."""
        self._cancelled = True
        self._handle.cancel()

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        before: Snapshot | None = None  # of the jobs so far, once another one has followed
        while True:
            parser, kept = self._parser(), None
            async with contextlib.aclosing(aiter(self._handle)) as snapshots:  # type: ignore[type-var]
                async for snapshot in snapshots:
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
        """Submits the next job where the answer has ended without content.

        An answer may end before its job does: the end of a turn does not end the job. Logprobs come with the last
        snapshot of the job only.

        Args:
            last: The newest snapshot of the job.
            before: Tokens of the jobs before it.
            parser: Has read all of them.

        Returns:
            What is kept of the job where another one has followed; None where it goes on or was the last.
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
        except (RequestRejected, ValueError):  # the engine shuts down
            return None
        self._handle.cancel()
        self._handle = handle
        if self._cancelled:
            handle.cancel()
        return found[0]


async def parsed_snapshots(
    handle: AnswerHandle, parser: OutputParser
) -> AsyncGenerator[tuple[Snapshot, OutputDelta], None]:
    """Yields each snapshot with what is new in it, until the last one or the end of the answer.

    An answer may end before its job does, by a stop sequence; its job is then cancelled. With logprobs the job goes on
    to its own end, since only the last snapshot has them.

    Args:
        handle: The job.
        parser: Reads the snapshots.

    Yields:
        The snapshot, and the delta of the answer.
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
    """Yields what several generators yield, as it arrives, and closes them all at the end.

    Args:
        streams: The generators.
    """
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


def sse_event(value: Any) -> bytes:
    """Returns a server-sent event of one line: JSON escapes line ends, and ASCII has no other ones."""
    return b"data: " + dump_json(value).encode("ascii") + b"\n\n"


class EventStreamResponse(Response):
    """Sends the events of a generator, and calls `close` at its end or as soon as the client disconnects.

    Nothing is buffered: the next event is requested when the last one has been sent. What a slow reader misses
    meanwhile is left out by the source of the events.

    Args:
        events: The events.
        close: Called once or more.
        keep_alive: Seconds of silence after which a comment is sent, since proxies close silent connections.
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
        finally:  # a generator that never started does not clean up by itself
            self.close()

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self.events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with contextlib.aclosing(with_keep_alive(self.events, self.keep_alive)) as parts:
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def with_keep_alive(events: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    """Adds comments to a stream of events.

    Args:
        events: The events.
        seconds: Longest silence.

    Yields:
        The events, and a comment after every `seconds` without one.
    """
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
    """Runs a coroutine until the client disconnects.

    Args:
        receive: ASGI channel of a request whose body has been read, so that only a disconnect can arrive.
        work: The coroutine. It is cancelled, and has cleaned up, before this function ends.

    Returns:
        What the coroutine returns.

    Raises:
        ClientDisconnected: The client disconnected.
    """

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
    """Cancels what still runs and waits until it has cleaned up."""
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
