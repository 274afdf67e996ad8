"""What every endpoint works with: the engine behind a bounded gate, and threads for what takes a processor."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from mercury_jax.serve.api import errors
from mercury_jax.serve.api.errors import ApiError
from mercury_jax.serve.api.metrics import Metrics, ready
from mercury_jax.serve.api.options import Options, names
from mercury_jax.serve.api.ready import Ready
from mercury_jax.serve.engine.types import Busy, Job, TooLong

THREADS = 2  # that render prompts, and that compile grammars; more would only take turns
SMALL = 8 << 10  # bytes of a request whose grammar counts as small
T = TypeVar("T")


class Service:
    """One app's engine, options and metrics."""

    def __init__(self, engine: Any, options: Options, metrics: Metrics):
        self.engine, self.options, self.metrics = engine, options, metrics
        self.names: Mapping[str, str] = names(engine.lm.name, options)
        self.gate = Gate(engine.settings.slots, engine.settings.queue)
        self.created = int(time.time())
        self._pool = ThreadPoolExecutor(THREADS, "mercury-prepare")
        self._small = ThreadPoolExecutor(THREADS, "mercury-compile-small")
        self._large = ThreadPoolExecutor(THREADS, "mercury-compile-large")

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token: what is longer than the context times this cannot fit."""
        return max(1, *map(len, self.engine.lm.tokenizer.pieces))

    def check(self, model: str) -> None:
        """ApiError 404 for a model that is not here, 503 while the engine takes nothing."""
        if model not in self.names:
            raise errors.unknown_model(model)
        if not ready(self.engine):
            raise closing() if self.engine.closing else errors.unavailable("The model is warming up.", 5)

    async def flight(
        self, jobs: Callable[[], tuple[T, Sequence[Job | Ready]]], count: int, grammar: int | None = None
    ) -> tuple[T, Flight]:
        """Prepare and submit `count` jobs in a thread: (what was prepared, the jobs in flight).

        grammar: bytes of a request whose grammar is compiled (None: it has none). That may take seconds: requests
        without one do not wait behind it, nor do small ones behind large ones.
        """
        self.gate.enter(count)
        if grammar is None:
            pool = self._pool
        else:
            pool = self._small if grammar <= SMALL else self._large
        future = pool.submit(self._start, jobs, count)
        try:
            return await asyncio.wrap_future(future)
        except BaseException:
            # Whoever waited is gone: what the thread submits all the same is cancelled when it has done so.
            future.add_done_callback(lambda done: self._drop(done, count))
            raise

    def _start(self, jobs: Callable[[], tuple[T, Sequence[Job | Ready]]], count: int) -> tuple[T, Flight]:
        made, wanted = jobs()
        tickets: list[Any] = []
        try:
            for job in wanted:
                tickets.append(self.engine.submit(job) if isinstance(job, Job) else job)
        except Exception as error:
            for ticket in tickets:
                ticket.cancel()
            raise told(error, self.engine.context) from error
        return made, Flight(self.gate, tickets, count)

    def _drop(self, done: Future[Any], count: int) -> None:
        if done.cancelled() or done.exception() is not None:
            self.gate.leave(count)
        else:
            done.result()[1].close()


class Gate:
    """Counts the jobs between their arrival and their end, and lets in no more than can run or wait.

    It refuses before a prompt is rendered or a grammar compiled: an answer of 429 costs next to nothing.
    """

    def __init__(self, slots: int, queue: int):
        self.slots, self.most = slots, slots + queue
        self.inside = 0
        self.seconds = 1.0  # that a request took lately
        self._lock = threading.Lock()

    def enter(self, count: int) -> None:
        """ApiError 429 where there is no room; 400 where there never is."""
        if count > self.most:
            raise errors.invalid(
                "n", f"{count} answers; allowed: at most {self.most}, the slots and the queue"
            )
        with self._lock:
            if self.inside + count > self.most:
                message = f"{self.inside} requests are running or waiting already. Please try again later."
                raise errors.too_many(self.seconds / self.slots, message)  # then a place is free, on average
            self.inside += count

    def leave(self, count: int, seconds: float | None = None) -> None:
        with self._lock:
            self.inside -= count
            if seconds is not None:
                self.seconds += 0.2 * (seconds - self.seconds)


class Flight:
    """The jobs of one request; `close` ends whatever still runs, once."""

    def __init__(self, gate: Gate, tickets: Sequence[Any], count: int):
        self.tickets, self._gate, self._count = tickets, gate, count
        self._born = time.monotonic()
        self._open = True

    def close(self) -> None:
        if self._open:
            self._open = False
            for ticket in self.tickets:
                ticket.cancel()
            self._gate.leave(self._count, time.monotonic() - self._born)


def closing() -> ApiError:
    return errors.unavailable("The server is shutting down.", 5)


def told(error: Exception, context: int) -> Exception:
    """What the engine said to a job, as the API says it; anything else stays what it is."""
    if isinstance(error, Busy):
        return closing() if error.closing else errors.too_many(error.retry_after, f"{error}.")
    if isinstance(error, TooLong):
        return errors.too_long(context)
    return errors.invalid(None, str(error)) if isinstance(error, ValueError) else error
