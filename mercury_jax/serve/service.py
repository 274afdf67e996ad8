"""The parts shared by all endpoints: the engine, the admission limit, and the threads that prepare requests.

An endpoint reads its request with `Service.read`. It passes `streaming.respond` a function that makes the jobs, which
`Service.submit` runs in a thread. A job is one engine request, that is, one answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from starlette.requests import Request

from mercury_jax.serve import errors
from mercury_jax.serve.engine.request import (
    ContextLengthExceeded,
    EngineRequest,
    RequestRejected,
    Snapshot,
)
from mercury_jax.serve.errors import ApiError
from mercury_jax.serve.http import read_json
from mercury_jax.serve.metrics import Metrics
from mercury_jax.serve.options import ServerOptions, model_names
from mercury_jax.serve.protocol import ApiRequest, parse_request

if TYPE_CHECKING:
    from mercury_jax.serve.engine.engine import Engine

WORKERS = 2  # threads of each pool; more threads would only compete for the GIL
SMALL_GRAMMAR_BYTES = 8 << 10  # larger grammars are compiled in a separate pool
T = TypeVar("T")
R = TypeVar("R", bound=ApiRequest)


@runtime_checkable
class AnswerHandle(Protocol):
    """A submitted job. Asynchronous iteration yields its snapshots; the last one has a finish reason."""

    @property
    def request(self) -> EngineRequest:
        """The engine request of the job."""
        ...

    def cancel(self) -> None:
        """Cancels the job."""
        ...

    def __aiter__(self) -> AsyncIterator[Snapshot]: ...


class Service:
    """The engine of one app, its options and its metrics.

    Args:
        engine: The engine, which may still be warming up.
        options: The server's options.
        paths: Paths of the app's routes, for the metrics.

    Raises:
        ValueError: If an alias names a model that is not loaded.

    Attributes:
        names: Names that requests may use for the model.
        created: Start time of the server, in seconds since the epoch.
    """

    def __init__(self, engine: Engine, options: ServerOptions, paths: Sequence[str] = ()):
        self.engine, self.options = engine, options
        self.metrics = Metrics(lambda: engine.stats(), lambda: self.ready, paths)
        self.names: Mapping[str, str] = model_names(engine.lm.name, options)
        self.limit = AdmissionLimit(engine.config.slots, engine.config.queue)
        self.created = int(time.time())
        self._longest = max(1, *map(len, engine.lm.tokenizer.pieces))  # bytes of the longest token
        # Separate pools: requests without a grammar never wait for a compilation, nor small grammars for large ones.
        self._pool = ThreadPoolExecutor(WORKERS, "mercury-prepare")
        self._small_grammars = ThreadPoolExecutor(WORKERS, "mercury-compile-small")
        self._large_grammars = ThreadPoolExecutor(WORKERS, "mercury-compile-large")

    @property
    def ready(self) -> bool:
        """Whether the engine has warmed up and is not shutting down."""
        return bool(self.engine.ready) and not self.engine.closing

    async def read(self, request: Request, model: type[R]) -> R:
        """Reads and validates a request.

        Args:
            request: The HTTP request.
            model: Request model of the endpoint.

        Returns:
            The request, with all defaults.

        Raises:
            ApiError: 400, 408, 413, 415 for the body; 404 for an unknown model; 503 while the engine is not ready.
        """
        parsed = await read_json(request, self.options, functools.partial(parse_request, model))
        if parsed.model not in self.names:
            raise errors.unknown_model(parsed.model)
        check_ready(self.engine)
        return parsed

    def check_size(self, size: int, param: str = "messages") -> None:
        """Refuses texts that cannot fit into the context, before the cost of tokenizing them.

        Each token covers at most as many characters as the longest token has bytes.

        Args:
            size: Number of characters of the texts.
            param: Field of the request that holds the texts.

        Raises:
            ApiError: 400 if the texts need more tokens than the context has.
        """
        if size > self.engine.context * self._longest:
            raise errors.context_length_exceeded(self.engine.context, param)

    async def submit(
        self,
        prepare: Callable[[], tuple[T, Sequence[EngineRequest | AnswerHandle]]],
        count: int,
        grammar_bytes: int | None = None,
        cache_salt: str = "",
    ) -> tuple[T, SubmittedJobs]:
        """Prepares and submits the jobs of a request, in a thread.

        Compiling a grammar may take seconds, so the size of the grammar selects the thread pool.

        Args:
            prepare: Makes the response plan (any value, which is passed through) and the jobs. A job that is already an
                `AnswerHandle` is passed through as well.
            count: Number of jobs.
            grammar_bytes: Size of the grammar in the request; None without a grammar.
            cache_salt: `EngineRequest.cache_salt` of all jobs.

        Returns:
            The first result of `prepare`, and the submitted jobs.

        Raises:
            ApiError: 400 (invalid), 429 (no room) or 503 (shutting down).
        """
        self.limit.enter(count)
        if grammar_bytes is None:
            pool = self._pool
        else:
            pool = self._small_grammars if grammar_bytes <= SMALL_GRAMMAR_BYTES else self._large_grammars
        future = pool.submit(self._prepare_and_submit, prepare, count, cache_salt)
        try:
            return await asyncio.wrap_future(future)
        except BaseException:
            # The client disconnected, or `prepare` failed. The thread cannot be interrupted: jobs that it still submits
            # are cancelled when it is done.
            future.add_done_callback(lambda done: self._abandon(done, count))
            raise

    def _prepare_and_submit(
        self,
        prepare: Callable[[], tuple[T, Sequence[EngineRequest | AnswerHandle]]],
        count: int,
        cache_salt: str,
    ) -> tuple[T, SubmittedJobs]:
        """Prepares and submits the jobs, in a thread; if one is rejected, the others are cancelled."""
        made, jobs = prepare()
        handles: list[AnswerHandle] = []
        try:
            for job in jobs:
                if isinstance(job, EngineRequest):
                    job = self.engine.submit(dataclasses.replace(job, cache_salt=cache_salt))
                handles.append(job)
        except Exception as error:
            for handle in handles:
                handle.cancel()
            raise to_api_error(error, self.engine.context) from error
        return made, SubmittedJobs(self.limit, handles, count)

    def _abandon(self, done: Future[tuple[T, SubmittedJobs]], count: int) -> None:
        """Cancels submitted jobs whose client is gone; without jobs, only corrects the count."""
        if done.cancelled() or done.exception() is not None:
            self.limit.leave(count)
        else:
            done.result()[1].close()


class AdmissionLimit:
    """Counts the jobs between arrival and end, and limits them to the slots and the queue of the engine.

    A request is refused before its prompt is rendered or its grammar compiled, so a 429 is cheap.

    Args:
        slots: Maximum number of running jobs.
        queue: Maximum number of waiting jobs.
    """

    def __init__(self, slots: int, queue: int):
        self.slots, self.capacity = slots, slots + queue
        self.admitted = 0
        self._mean_seconds = 1.0  # moving average of a request's duration
        self._lock = threading.Lock()

    def enter(self, count: int) -> None:
        """Admits jobs.

        Args:
            count: Number of jobs.

        Raises:
            ApiError: 429 if there is no room now, 400 if there are more jobs than slots and queue together.
        """
        if count > self.capacity:
            allowed = f"at most {self.capacity}, the slots and the queue"
            raise errors.invalid_request("n", f"{count} answers; allowed: {allowed}")
        with self._lock:
            if self.admitted + count > self.capacity:
                message = f"{self.admitted} requests are running or waiting already. Please try again later."
                # Mean time until the next of the running jobs ends.
                raise errors.rate_limited(self._mean_seconds / self.slots, message)
            self.admitted += count

    def leave(self, count: int, seconds: float | None = None) -> None:
        """Counts jobs as ended.

        Args:
            count: Number of jobs.
            seconds: Time since the jobs were submitted; None if they were never submitted.
        """
        with self._lock:
            self.admitted -= count
            if seconds is not None:
                self._mean_seconds += 0.2 * (seconds - self._mean_seconds)


class SubmittedJobs:
    """The submitted jobs of one API request. `close` cancels the unfinished ones.

    Args:
        limit: The limit that counts the jobs.
        handles: The jobs, in the order of the choices.
        count: Number of jobs as counted by `limit`.
    """

    def __init__(self, limit: AdmissionLimit, handles: Sequence[AnswerHandle], count: int):
        self.handles, self._limit, self._count = handles, limit, count
        self._submitted = time.monotonic()
        self._open = True

    def close(self) -> None:
        """Cancels unfinished jobs and counts all jobs as ended; further calls have no effect."""
        if self._open:
            self._open = False
            for handle in self.handles:
                handle.cancel()
            self._limit.leave(self._count, time.monotonic() - self._submitted)


def check_ready(engine: Engine) -> None:
    """Checks that an engine accepts requests.

    Args:
        engine: The engine.

    Raises:
        ApiError: 503 while the engine is warming up or shutting down.
    """
    if engine.closing:
        raise shutting_down()
    if not engine.ready:
        raise errors.unavailable("The model is warming up.", 5)


def shutting_down() -> ApiError:
    """Makes the 503 of a server that is shutting down."""
    return errors.unavailable("The server is shutting down.", 5)


def to_api_error(error: Exception, context: int) -> Exception:
    """Converts an exception of `Engine.submit` to an `ApiError`.

    Args:
        error: The exception.
        context: Context of the engine in tokens, for the message.

    Returns:
        The exception to raise: an `ApiError`, or `error` itself if it is not a documented exception of `submit`.
    """
    if isinstance(error, RequestRejected):
        return shutting_down() if error.closing else errors.rate_limited(error.retry_after, f"{error}.")
    if isinstance(error, ContextLengthExceeded):
        return errors.context_length_exceeded(context)
    return errors.invalid_request(None, str(error)) if isinstance(error, ValueError) else error
