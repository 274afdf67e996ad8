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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mercury_jax.decode.constrained import RETRIES, RETRY_TEMPERATURE, Kept, kept_of, retry_seed
from mercury_jax.serve import errors
from mercury_jax.serve.auth import KEY_DIGEST
from mercury_jax.serve.chat.output_parser import OutputDelta, OutputParser, ParsedMessage
from mercury_jax.serve.engine.request import EngineRequest, RequestRejected, Snapshot
from mercury_jax.serve.engine_requests import Continuation
from mercury_jax.serve.http import REQUEST_ID, JsonResponse, dump_json, to_reported_error
from mercury_jax.serve.protocol import ApiRequest
from mercury_jax.serve.responses import EchoedPrompt, ResponseKind, ResponseWriter, Usage
from mercury_jax.serve.service import AnswerHandle, Service, SubmittedJobs, shutting_down

if TYPE_CHECKING:
    from mercury_jax.serve.engine.engine import Engine

log = logging.getLogger("mercury.serve")
T = TypeVar("T")
JsonDict = dict[str, Any]

DONE_EVENT = b"data: [DONE]\n\n"
KEEP_ALIVE_COMMENT = b": keep-alive\n\n"  # SSE clients ignore comments
EVENT_STREAM_HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}


class ResponsePlan(NamedTuple):
    """How the answers to one request are parsed and written.

    Attributes:
        kind: Names of the endpoint's objects.
        request: The API request.
        prompt_tokens: Number of tokens of all prompts.
        parser: Makes a new parser for one answer.
        answers_per_prompt: Number of jobs per prompt; the jobs of a prompt are adjacent.
        diffusing: Whether each chunk of the stream has the whole current text instead of a delta.
        reasoning_summary: Whether to report the thinking.
        thinks: Whether the prompt starts a thinking section.
        warning: A warning for the response.
        finish_content: Makes the content from (text, finish reason) at the end; no text is streamed before. None: the
            text is the content.
        check: Says whether an answer satisfies its schema.
        valid: Says whether an answer is valid where no grammar enforces it. One that is not is decoded once more.
        strict: Whether such an answer is decoded up to RETRIES times more, and is an error if `check` fails after them.
            It is not streamed before it is complete.
        logprobs: Makes the log-probabilities of an answer, in the form of the endpoint.
        echoes: The prompts, which come in front of their answers; empty unless that is requested.
        continuation: Makes the job that continues an answer that ended without content.
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
    valid: Callable[[ParsedMessage], bool] | None = None
    strict: bool = False
    logprobs: Callable[[Snapshot, ParsedMessage], Any] | None = None
    echoes: Sequence[EchoedPrompt] = ()
    continuation: Continuation | None = None


class FinishedAnswer(NamedTuple):
    """A complete answer: its content, parsed message, finish reason, last snapshot and logprobs."""

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
    """Writes the response to one request."""

    def __init__(self, service: Service, plan: ResponsePlan, arrival: float, request_id: str):
        self.service, self.plan, self.arrival, self.request_id = service, plan, arrival, request_id
        self.writer = ResponseWriter(plan.kind, plan.request.model)

    async def completion(self, jobs: SubmittedJobs) -> JsonDict:
        """Waits for all answers and returns the response. The first error ends all of them."""
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
        """Streams the response as server-sent events.

        An error is sent as an event, because the status 200 has already been sent.

        Yields:
            First the role of each choice (message endpoints), then the chunks of all choices as they arrive, each
            choice ending with a chunk that has a finish reason; the usage, if requested; and [DONE].
        """
        writer, options = self.writer, self.plan.request.stream_options
        with_usage = options is not None and options.include_usage
        unknown: JsonDict = {"usage": None} if with_usage else {}  # in all chunks but the last
        answers: dict[int, FinishedAnswer] = {}
        try:
            for i in range(len(jobs.handles) if self.plan.kind.message else 0):
                yield sse_event(writer.chunk([writer.chunk_choice(i, first=True)], unknown))
            streams = [self._choice_chunks(i, handle, answers) for i, handle in enumerate(jobs.handles)]
            async with contextlib.aclosing(interleave(streams)) as chunks:
                async for chunk in chunks:
                    yield sse_event(chunk | unknown)
            if with_usage:
                usage = self._usage([answers[i] for i in sorted(answers)])
                yield sse_event(writer.chunk([], {"usage": usage}))
        except Exception as error:
            yield sse_event(to_reported_error(error, self.request_id).envelope())
        yield DONE_EVENT

    async def _choice_chunks(
        self, i: int, handle: AnswerHandle, answers: dict[int, FinishedAnswer]
    ) -> AsyncGenerator[JsonDict, None]:
        """Yields the chunks of answer i, and stores the finished answer in `answers`."""
        plan, writer, parser = self.plan, self.writer, self.plan.parser()
        # No deltas if chunks have the whole text (diffusing), or if the content is made from the complete text.
        send_deltas = not plan.diffusing and plan.finish_content is None
        canvas, progress, snapshot, first = "", 0.0, None, None
        echo = plan.echoes[i // plan.answers_per_prompt] if plan.echoes else None
        if echo is not None:
            yield writer.chunk([writer.chunk_choice(i, echo.text)])
        async with contextlib.aclosing(parsed_snapshots(handle, parser)) as steps:
            async for snapshot, delta in steps:
                first = first or time.perf_counter()
                if (
                    plan.diffusing
                    and snapshot.finish is None
                    and (text := parser.preview(snapshot)) != canvas
                ):
                    # Progress is the fraction of accepted tokens. A new block or a remasked token would decrease it, so
                    # the maximum so far is reported, and 1 in the last chunk only.
                    share = float(snapshot.accepted.mean()) if len(snapshot.accepted) else 0.0
                    canvas, progress = text, round(min(0.99, max(progress, share)), 4)
                    meta = {"diffusion_meta": {"diffusion_progress": progress}}
                    yield writer.chunk([writer.chunk_choice(i, canvas)], meta)
                content = (delta.content if send_deltas else None) or None
                if content or delta.tool_calls:
                    yield writer.chunk([writer.chunk_choice(i, content, delta.tool_calls)])
        answer = self._finish(parser, snapshot, first)
        if echo is not None:
            logprobs = echo.followed_by(answer.logprobs)  # type: ignore[arg-type]
            answer = answer._replace(text=echo.text + answer.text, logprobs=logprobs)
        answers[i] = answer
        if plan.diffusing:
            meta = {"diffusion_meta": {"diffusion_progress": 1.0}}
            yield writer.chunk([writer.chunk_choice(i, answer.text)], meta)
        elif plan.finish_content is not None and answer.text:
            yield writer.chunk([writer.chunk_choice(i, answer.text)])
        last = writer.chunk_choice(i, finish=answer.finish_reason, logprobs=answer.logprobs)
        yield writer.chunk([last], self._extra(answer))

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

    def _usage(self, answers: Sequence[FinishedAnswer]) -> Usage:
        """Sums the usage of all answers. Each prompt is counted once, whatever its number of answers."""
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
        """Returns the fields next to `choices`: a warning, and the summary of the thinking."""
        extra: JsonDict = {} if self.plan.warning is None else {"warning": self.plan.warning}
        if self.plan.reasoning_summary:
            thinking = answer.message.reasoning
            status = "complete" if thinking else "unavailable" if self.plan.thinks else "skipped"
            extra["reasoning_summary"] = {"content": thinking or None, "status": status}
        return extra


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
    """Merges several generators into one, in the order in which items arrive."""
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
    """Makes a server-sent event of one line.

    Args:
        value: A JSON value. `dump_json` escapes all line ends, so the event cannot be split.
    """
    return b"data: " + dump_json(value).encode("ascii") + b"\n\n"


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
