"""The parts shared by all endpoints: models by name, their admission limits, and the threads that prepare requests.

An endpoint reads its request with `ServedModels.read`, which also finds the `Service` of the model that the request
names. It passes `streaming.respond` a function that makes the jobs, which `Service.submit` runs in a thread. A job is
one engine request, that is, one answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
from starlette.requests import Request

from mercury_jax.config import refuse
from mercury_jax.serve import errors
from mercury_jax.serve.chat.image_urls import MAX_REQUEST
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
from mercury_jax.serve.response_store import ResponseStore

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


class PreparationPools(NamedTuple):
    """The threads that prepare requests, shared by all models: more threads would only compete for the GIL.

    Requests without a grammar never wait for the compilation of one, nor small grammars for large ones.
    """

    plain: ThreadPoolExecutor
    small_grammars: ThreadPoolExecutor
    large_grammars: ThreadPoolExecutor


class ServedModels:
    """The models of one app, by each name that requests may use for them.

    Attributes:
        services: The models, in the order of `engines`.
        by_name: The model that each name means; the models' own names come first.
        options: The server's options.
        metrics: The metrics of the app.
        created: Start time of the server, in seconds since the epoch.
        responses: The stored responses of the Responses API.
    """

    def __init__(self, engines: Sequence[Engine], options: ServerOptions, paths: Sequence[str] = ()):
        check_devices(engines)
        names = model_names([engine.lm.name for engine in engines], options)
        if options.max_body is None and any(engine.lm.model.vision is not None for engine in engines):
            options = dataclasses.replace(options, max_body=MAX_REQUEST)
        self.options, self.created = options, int(time.time())
        self.responses = ResponseStore(len(options.keys))
        self.metrics = Metrics(
            lambda: {engine.lm.name: engine.stats() for engine in engines}, lambda: self.ready, paths
        )
        pools = PreparationPools(
            ThreadPoolExecutor(WORKERS, "mercury-prepare"),
            ThreadPoolExecutor(WORKERS, "mercury-compile-small"),
            ThreadPoolExecutor(WORKERS, "mercury-compile-large"),
        )
        self.services = tuple(Service(engine, options, self.metrics, pools) for engine in engines)
        own = {service.engine.lm.name: service for service in self.services}
        self.by_name: Mapping[str, Service] = {name: own[model] for name, model in names.items()}

    @property
    def ready(self) -> bool:
        """Whether all engines have warmed up and none is shutting down."""
        return all(service.engine.ready for service in self.services) and not self.closing

    @property
    def closing(self) -> bool:
        """Whether the server is shutting down."""
        return any(service.engine.closing for service in self.services)

    def find(self, name: str) -> Service:
        """Returns the model that a name means."""
        if name not in self.by_name:
            own = [service.engine.lm.name for service in self.services]
            aliases = [alias for alias in self.options.aliases or () if alias not in own]
            raise errors.unknown_model(name, own, aliases)
        return self.by_name[name]

    async def read(self, request: Request, model: type[R]) -> tuple[Service, R]:
        """Reads and validates a request, and finds its model."""
        parsed = await read_json(request, self.options, functools.partial(parse_request, model))
        service = self.find(parsed.model)
        check_ready(service.engine)
        return service, parsed


class Service:
    """One served model: its engine and admission limit, and the options and metrics of the app."""

    def __init__(self, engine: Engine, options: ServerOptions, metrics: Metrics, pools: PreparationPools):
        self.engine, self.options, self.metrics, self.pools = engine, options, metrics, pools
        self.limit = AdmissionLimit(engine.config.slots, engine.config.queue)
        self._longest = max(1, *map(len, engine.lm.tokenizer.pieces))  # bytes of the longest token

    def check_size(self, size: int, param: str = "messages") -> None:
        """Refuses texts that cannot fit into the context, before the cost of tokenizing them.

        Each token covers at most as many characters as the longest token has bytes.
        """
        context = self.engine.context
        if size > context * self._longest:
            least = -(-size // self._longest)
            length = f"{size} characters, which are at least {least} tokens"
            detail = f"The prompt has {length}; allowed: up to {context - 1}."
            raise errors.context_length_exceeded(context, detail, param)

    async def submit(
        self,
        prepare: Callable[[], tuple[T, Sequence[EngineRequest | AnswerHandle | Future[Any]]]],
        count: int,
        grammar_bytes: int | None = None,
        cache_salt: str = "",
    ) -> tuple[T, SubmittedJobs]:
        """Prepares and submits the jobs of a request, in a thread.

        Compiling a grammar may take seconds, so the size of the grammar selects the thread pool.

        Args:
            prepare: Makes the response plan (any value, which is passed through) and the jobs. A job that is already an
                `AnswerHandle` is passed through as well.

        Returns:
            The first result of `prepare`, and the submitted jobs.
        """
        self.limit.enter(count)
        if grammar_bytes is None:
            pool = self.pools.plain
        else:
            small = grammar_bytes <= SMALL_GRAMMAR_BYTES
            pool = self.pools.small_grammars if small else self.pools.large_grammars
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
        prepare: Callable[[], tuple[T, Sequence[EngineRequest | AnswerHandle | Future[Any]]]],
        count: int,
        cache_salt: str,
    ) -> tuple[T, SubmittedJobs]:
        """Prepares and submits the jobs, in a thread; if one is rejected, the others are cancelled."""
        made, jobs = prepare()
        handles: list[Any] = []
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
    """

    def __init__(self, slots: int, queue: int):
        self.slots, self.capacity = slots, slots + queue
        self.admitted = 0
        self._mean_seconds = 1.0  # moving average of a request's duration
        self._lock = threading.Lock()

    def enter(self, count: int) -> None:
        """Admits jobs."""
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
        """Counts jobs as ended."""
        with self._lock:
            self.admitted -= count
            if seconds is not None:
                self._mean_seconds += 0.2 * (seconds - self._mean_seconds)


class SubmittedJobs:
    """The submitted jobs of one API request. `close` cancels the unfinished ones."""

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


def as_tuple(engines: Engine | Sequence[Engine]) -> tuple[Engine, ...]:
    """The engines of a server whose caller gave one engine or several."""
    return tuple(engines) if isinstance(engines, Sequence) else (engines,)


def check_devices(engines: Sequence[Engine]) -> None:
    """Refuses engines that share the devices of a mesh.

    Each engine launches its programs from threads of its own. Where two programs with collectives run on the same
    devices, one device may start with one program and another device with the other; both then wait for ever.
    """
    owner: dict[object, str] = {}
    for engine in engines:
        placed = (getattr(x, "sharding", None) for x in jax.tree.leaves(engine.lm.params))
        devices = {device for sharding in placed if sharding is not None for device in sharding.device_set}
        if len(devices) < 2:
            continue
        if (shared := next((owner[device] for device in devices if device in owner), None)) is not None:
            allowed = (
                f"devices that {shared} is not on: programs of two models on one mesh can block each other"
            )
            raise refuse(f"mesh of {engine.lm.name}", f"{len(devices)} devices", allowed)
        owner |= dict.fromkeys(devices, engine.lm.name)


def check_ready(engine: Engine) -> None:
    """Checks that an engine accepts requests."""
    if engine.closing:
        raise shutting_down()
    if not engine.ready:
        raise errors.unavailable("The model is warming up.", 5)


def shutting_down() -> ApiError:
    """Makes the 503 of a server that is shutting down."""
    return errors.unavailable("The server is shutting down.", 5)


def to_api_error(error: Exception, context: int) -> Exception:
    """Converts an exception of `Engine.submit` to an `ApiError`."""
    if isinstance(error, RequestRejected):
        return shutting_down() if error.closing else errors.rate_limited(error.retry_after, f"{error}.")
    if isinstance(error, ContextLengthExceeded):
        detail = f"Prompt and answer need {error.tokens} tokens; allowed: up to {context}."
        return errors.context_length_exceeded(context, detail)
    return errors.invalid_request(None, str(error)) if isinstance(error, ValueError) else error
