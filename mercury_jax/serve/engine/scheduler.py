"""Scheduling: the requests that wait, those that decode in the slots, and the dispatches in flight.

The engine's thread takes requests out of `RequestQueue` while slots are free; `may_run` keeps slots for short requests.
`Slots` is one batched `State` on the device with the request of each row. A dispatch is asynchronous: `dispatch` hands
the state to the device and `read` waits for the oldest result, so that the device works while the host publishes
snapshots. `infilling` has a queue of its own.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from mercury_jax.decode.constrained import no_tokens
from mercury_jax.decode.state import Frame, SamplingParams, State
from mercury_jax.serve.engine import programs, sampling_params as sampling
from mercury_jax.serve.engine.buckets import NO_REQUEST, Bucket, Buckets, CompiledPrograms
from mercury_jax.serve.engine.programs import DispatchReport, DispatchResult
from mercury_jax.serve.engine.request import EngineRequest, RequestHandle, RequestRejected
from mercury_jax.serve.engine.snapshots import RunningRequest
from mercury_jax.types import Params

LONG_REQUEST = 1024  # tokens of prompt and output from which on a request counts as long
TOKENS_PER_SECOND = 1000.0  # a request is scheduled as if it had arrived this much later per token
PATIENCE = 16  # dispatches that must fit into a smaller bucket before the rows move to it


def may_run(request: EngineRequest, running: Sequence[EngineRequest], slots: int) -> bool:
    """Whether a request may take a free slot: long requests leave a quarter of the slots to short ones.

    Args:
        request: The candidate.
        running: Requests in slots.
        slots: Number of slots of the engine.

    Returns:
        Always True for a short request.
    """
    if request.max_length < LONG_REQUEST or slots < 2:
        return True
    reserved = max(1, slots // 4)
    return sum(other.max_length >= LONG_REQUEST for other in running) < max(1, slots - reserved)


class RequestQueue:
    """Requests that wait, and those that were taken and have not finished. Any thread may call every method.

    The order is by arrival time plus a second for each TOKENS_PER_SECOND tokens of the request: short requests
    overtake long ones, and none starves.

    Args:
        limit: Most requests that wait while `slots` are running.
        slots: Most requests that run at once.
        on_add: Called when a request has been added.
    """

    def __init__(self, limit: int, slots: int, on_add: Callable[[], None]):
        self._limit, self._on_add = limit + slots, on_add
        self._lock = threading.RLock()  # `running` is read while it is held
        self._entries: list[tuple[float, int, RequestHandle]] = []  # (scheduled time, arrival number, handle)
        self._taken: list[RequestHandle] = []
        self._added, self._closed = 0, False
        self._mean_seconds = 0.5  # moving average of what a request takes, for Retry-After

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def running(self) -> list[RequestHandle]:
        """Requests that were taken out and whose last snapshot is not published yet."""
        with self._lock:
            return [handle for handle in self._taken if not handle.finished]

    @property
    def unfinished(self) -> list[RequestHandle]:
        """Requests that wait or run. A request is among them from `add` until its last snapshot is published."""
        with self._lock:
            return [*self.running, *(handle for _, _, handle in self._entries)]

    def add(self, handle: RequestHandle) -> None:
        """Adds a request.

        Args:
            handle: The request.

        Raises:
            RequestRejected: If the queue is full or closed.
        """
        with self._lock:
            if self._closed:
                raise RequestRejected("the server is closing", 5.0, closing=True)
            if len(self._entries) + len(self.running) >= self._limit:
                message = f"{len(self._entries)} requests are waiting already"
                raise RequestRejected(message, max(1.0, self._mean_seconds))
            scheduled = handle.arrival_time + handle.request.max_length / TOKENS_PER_SECOND
            self._added += 1
            self._entries.append((scheduled, self._added, handle))
        self._on_add()

    def close(self) -> None:
        """Rejects further requests. An `add` that is under way in another thread has ended when this returns."""
        with self._lock:
            self._closed = True

    def take(self, fits: Callable[[RequestHandle], bool] = lambda handle: True) -> RequestHandle | None:
        """Takes out the first request in scheduling order for which `fits` holds.

        Args:
            fits: Whether a request may run now.

        Returns:
            The request; None where none fits.
        """
        with self._lock:
            entry = next((entry for entry in sorted(self._entries) if fits(entry[2])), None)
            if entry is None:
                return None
            self._entries.remove(entry)
            self._taken = [*self.running, entry[2]]
        return entry[2]

    def take_cancelled(self) -> list[RequestHandle]:
        """Takes out all requests that were cancelled while they waited."""
        with self._lock:
            cancelled = [handle for _, _, handle in self._entries if handle.cancelled]
            self._entries = [entry for entry in self._entries if entry[2] not in cancelled]
            self._taken = [*self.running, *cancelled]
        return cancelled

    def record_duration(self, seconds: float) -> None:
        """Updates the average behind Retry-After with the time of one request from arrival to end."""
        self._mean_seconds += 0.2 * (seconds - self._mean_seconds)


class ReadDispatch(NamedTuple):
    """A dispatch whose result is on the host.

    Attributes:
        requests: The request of each row when it was sent.
        frames: Of all passes, [passes, B, ...].
        passes: How many of them were made.
        report: The rows afterwards.
    """

    requests: tuple[RunningRequest | None, ...]
    frames: Frame
    passes: int
    report: DispatchReport


@dataclass
class Slots:
    """Rows of the batch and the requests in them.

    Attributes:
        buckets: Sizes.
        compiled: Programs by bucket.
        state: An idle state of the largest bucket at first.
        bucket: Bucket of the state.
        requests: The request of each row; None for a free slot.
        pending: Results that have not been read, with the requests of their rows, the oldest first.
    """

    buckets: Buckets
    compiled: CompiledPrograms
    state: State
    bucket: Bucket = field(init=False)
    requests: list[RunningRequest | None] = field(init=False)
    pending: deque[tuple[DispatchResult, tuple[RunningRequest | None, ...]]] = field(default_factory=deque)
    _host_params: SamplingParams = field(init=False)  # sampling parameters of all rows, at the bucket's level
    _device_params: SamplingParams | None = field(
        init=False
    )  # the same; None: changed since the last dispatch
    _smaller_fits: int = field(init=False)  # dispatches in a row for which a smaller bucket would have done

    def __post_init__(self) -> None:
        self._assign(self.compiled.largest, ())

    @property
    def running(self) -> int:
        """Number of requests in slots."""
        return sum(run is not None for run in self.requests)

    @property
    def constrained(self) -> bool:
        """Whether a grammar must see each pass before the next one."""
        return any(run is not None and run.gate is not None for run in self.requests)

    def fit(self, extra: EngineRequest | None = None) -> None:
        """Moves to the bucket that fits what runs: to a larger one at once, to a smaller one after PATIENCE dispatches.

        Args:
            extra: A request that is about to be admitted.
        """
        requests = [run.handle.request for run in self.requests if run is not None]
        requests += [] if extra is None else [extra]
        need = Bucket(
            max(len(requests), 1),
            max((self.buckets.capacity(request.max_length) for request in requests), default=0),
            max((sampling.sampler_level(request) for request in requests), default=0),
        )
        fits = all(have >= want for have, want in zip(self.bucket, need))
        # The cheapest compiled bucket that is at least as large in every respect.
        known = [b for b in list(self.compiled.steps) if all(have >= want for have, want in zip(b, need))]
        best = min(known, key=lambda b: (b.level, b.rows * b.capacity, b.rows))
        self._smaller_fits = 0 if best == self.bucket or not fits else self._smaller_fits + 1
        if fits and self._smaller_fits <= PATIENCE and (self.running > 0 or best == self.bucket):
            return
        running = [(slot, run) for slot, run in enumerate(self.requests) if run is not None]
        if (best.rows, best.capacity) != (self.bucket.rows, self.bucket.capacity):
            old, buckets = [slot for slot, _ in running], self.buckets
            moved = buckets.moved(self.state, old, best) if old else buckets.sharded(buckets.idle(best))
            self.state, running = moved, list(enumerate(run for _, run in running))
        self._assign(best, running)

    def admit(self, run: RunningRequest, row: State) -> None:
        """Puts a request into a free slot.

        Args:
            run: The request.
            row: Its state of one row.
        """
        slot = self.requests.index(None)
        self.requests[slot] = run
        buckets, capacity = self.buckets, self.bucket.capacity
        if row.tokens.shape[1] != capacity:
            row = programs.move_rows(row, np.zeros(1, np.int32), capacity, buckets.width(capacity))
        self.state = buckets.sharded(programs.place_row(self.state, np.int32(slot), row))
        sampling.set_row(self._host_params, slot, self._params(run.handle.request))
        self._device_params = None

    def apply_grammars(self) -> None:
        """Writes what grammars have committed into the state, and what they allow next into the parameters."""
        gates = [
            (slot, run, run.gate)
            for slot, run in enumerate(self.requests)
            if run is not None and run.gate is not None and run.gate.begun
        ]
        if not gates:
            return
        program = self.buckets.program(self.bucket.capacity, sampling.TRUNCATION)
        while any(
            gate.pending for _, _, gate in gates
        ):  # more tokens than a canvas holds take several writes
            change = no_tokens(self.bucket.rows, program.width)
            for slot, _, gate in gates:
                if gate.pending:
                    gate.write(change, slot)
            eos = np.asarray(self._host_params.eos)
            self.state = self.buckets.sharded(programs.write_tokens(program, self.state, change, eos))
        (part,) = self._host_params.sampler.allow
        allowed = part.params
        for slot, run, gate in gates:
            if not gate.ended:
                allowed["bits"][slot], allowed["start"][slot] = gate.bits(), gate.frontier - run.prompt_length
        if self._device_params is not None:
            masks = dataclasses.replace(
                part, params=jax.device_put(dict(allowed))
            )  # nothing else is transferred
            sampler = self._device_params.sampler._replace(allow=(masks,))
            self._device_params = self._device_params._replace(sampler=sampler)

    def dispatch(self, params: Params) -> None:
        """Sends the next passes to the device without waiting for them. Rows without a request do not change."""
        idle = np.array([run is None for run in self.requests])
        if self._device_params is None:
            self._device_params = jax.device_put(self._host_params)
        limit = 1 if self.constrained else self.buckets.config.passes or 1
        step = self.compiled.steps[self.bucket]
        result = step(params, self.state, self._device_params, idle, np.int32(limit))
        self.state = result.state
        self.pending.append((result, tuple(self.requests)))

    def read(self) -> ReadDispatch:
        """Waits for the oldest dispatch."""
        result, requests = self.pending.popleft()
        frames, passes, report = jax.device_get((result.frames, result.passes, result.report))
        return ReadDispatch(requests, frames, int(passes), report)

    def _assign(self, bucket: Bucket, running: Iterable[tuple[int, RunningRequest]]) -> None:
        """Sets the bucket, the requests in its rows, and their sampling parameters."""
        self.bucket, self.requests, self._smaller_fits = bucket, [None] * bucket.rows, 0
        self._host_params = sampling.stack_rows(bucket.rows, self._params(NO_REQUEST))
        self._device_params = None
        for slot, run in running:
            self.requests[slot] = run
            sampling.set_row(self._host_params, slot, self._params(run.handle.request))

    def _params(self, request: EngineRequest) -> SamplingParams:
        buckets = self.buckets
        return sampling.row_params(buckets.rules, request, self.bucket.level, buckets.lm, buckets.block)
