"""Scheduling: the queue of waiting requests, the slots in which requests decode, and the dispatches in flight.

The engine's thread takes requests out of `RequestQueue` while slots are free; `may_run` reserves slots for short
requests. `Slots` holds one batched `State` on the device and the request of each row. Dispatches are asynchronous:
`dispatch` sends the state to the device and `read` waits for the oldest result, so that the device computes while the
host publishes snapshots. `infilling` has its own queue.
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

from mercury_jax.decode.constrained import FreeText, no_free_text, no_tokens
from mercury_jax.decode.state import Frame, SamplingParams, State
from mercury_jax.serve.engine import programs, sampling_params as sampling
from mercury_jax.serve.engine.buckets import NO_REQUEST, Bucket, Buckets, CompiledPrograms
from mercury_jax.serve.engine.programs import DispatchReport, DispatchResult
from mercury_jax.serve.engine.request import EngineRequest, RequestHandle, RequestRejected
from mercury_jax.serve.engine.snapshots import RunningRequest
from mercury_jax.types import Params

LONG_REQUEST = 1024  # a request with at least this many tokens of prompt and output counts as long
TOKENS_PER_SECOND = 1000.0  # this many tokens delay the scheduled time of a request by one second
PATIENCE = 16  # consecutive dispatches that must fit into a smaller bucket before the rows move to it


def may_run(request: EngineRequest, running: Sequence[EngineRequest], slots: int) -> bool:
    """Says whether a request may take a free slot: a quarter of the slots is reserved for short requests.

    Without the reservation, a few long requests could occupy all slots and delay every short one.
    """
    if request.max_length < LONG_REQUEST or slots < 2:
        return True
    reserved = max(1, slots // 4)
    return sum(other.max_length >= LONG_REQUEST for other in running) < max(1, slots - reserved)


class RequestQueue:
    """The waiting requests, and the running ones that were taken out of the queue. All methods are thread-safe.

    Requests are ordered by arrival time plus one second per TOKENS_PER_SECOND tokens of prompt and output. Short
    requests overtake long ones, but no request starves: its scheduled time is fixed when it is added.
    """

    def __init__(self, limit: int, slots: int, on_add: Callable[[], None]):
        self._limit, self._on_add = limit + slots, on_add
        self._lock = threading.RLock()  # reentrant: methods that hold it read `running`
        self._entries: list[tuple[float, int, RequestHandle]] = []  # (scheduled time, arrival number, handle)
        self._taken: list[RequestHandle] = []
        self._added, self._closed = 0, False
        self._mean_seconds = 0.5  # moving average of a request's duration, for Retry-After

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def running(self) -> list[RequestHandle]:
        """Requests that were taken out of the queue and whose last snapshot is not published yet."""
        with self._lock:
            return [handle for handle in self._taken if not handle.finished]

    @property
    def unfinished(self) -> list[RequestHandle]:
        """Waiting and running requests: each request from `add` until its last snapshot is published."""
        with self._lock:
            return [*self.running, *(handle for _, _, handle in self._entries)]

    def add(self, handle: RequestHandle) -> None:
        """Adds a request."""
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
        """Rejects further requests. A concurrent `add` in another thread has completed when this returns."""
        with self._lock:
            self._closed = True

    def take(self, fits: Callable[[RequestHandle], bool] = lambda handle: True) -> RequestHandle | None:
        """Takes out the first request in scheduling order for which `fits` holds."""
        with self._lock:
            entry = next((entry for entry in sorted(self._entries) if fits(entry[2])), None)
            if entry is None:
                return None
            self._entries.remove(entry)
            self._taken = [*self.running, entry[2]]
        return entry[2]

    def take_cancelled(self) -> list[RequestHandle]:
        """Takes out all requests that were cancelled while waiting."""
        with self._lock:
            cancelled = [handle for _, _, handle in self._entries if handle.cancelled]
            self._entries = [entry for entry in self._entries if entry[2] not in cancelled]
            self._taken = [*self.running, *cancelled]
        return cancelled

    def record_duration(self, seconds: float) -> None:
        """Updates the mean duration, which is sent to rejected clients as Retry-After."""
        self._mean_seconds += 0.2 * (seconds - self._mean_seconds)


class ReadDispatch(NamedTuple):
    """A dispatch whose result is on the host.

    Attributes:
        requests: The request of each row at the time of the dispatch; None for an idle row.
        frames: One frame per pass, [P, B, ...], where P is the configured maximum of passes per dispatch.
        passes: Number of passes that ran; later frames are unused.
        report: The rows after the last pass.
    """

    requests: tuple[RunningRequest | None, ...]
    frames: Frame
    passes: int
    report: DispatchReport


@dataclass
class Slots:
    """The batch on the device: one row per slot, and the request in each row.

    Attributes:
        buckets: Sizes of the batch.
        compiled: Compiled program of each bucket.
        state: The rows on the device; initially an idle state of the largest bucket.
        bucket: Bucket of the state.
        requests: The request of each row; None for a free slot.
        pending: Dispatches that have not been read, with the requests of their rows, oldest first.
    """

    buckets: Buckets
    compiled: CompiledPrograms
    state: State
    bucket: Bucket = field(init=False)
    requests: list[RunningRequest | None] = field(init=False)
    pending: deque[tuple[DispatchResult, tuple[RunningRequest | None, ...]]] = field(default_factory=deque)
    _host_params: SamplingParams = field(init=False)  # sampling parameters of all rows, at the bucket's level
    # their copy on the device; None: out of date, transferred with the next dispatch
    _device_params: SamplingParams | None = field(init=False)
    _smaller_fits: int = field(init=False)  # consecutive dispatches that would have fit a smaller bucket

    def __post_init__(self) -> None:
        self._assign(self.compiled.largest, ())

    @property
    def running(self) -> int:
        """Number of requests in slots."""
        return sum(run is not None for run in self.requests)

    @property
    def constrained(self) -> bool:
        """Whether the host must judge the next pass of a row: its answer is under a grammar and not in free text."""
        gates = (run.gate for run in self.requests if run is not None)
        return any(gate is not None and gate.begun and gate.walker.free() is None for gate in gates)

    def fit(self, extra: EngineRequest | None = None) -> None:
        """Moves the rows to the cheapest compiled bucket that fits the running requests.

        A larger bucket is taken at once; a smaller one after PATIENCE consecutive dispatches that would have fit, since
        each move copies the KV cache. An empty batch moves immediately.
        """
        requests = [run.handle.request for run in self.requests if run is not None]
        requests += [] if extra is None else [extra]
        need = Bucket(
            max(len(requests), 1),
            max((self.buckets.capacity(request.max_length) for request in requests), default=0),
            max((sampling.sampler_level(request) for request in requests), default=0),
        )
        fits = all(have >= want for have, want in zip(self.bucket, need))
        # The cheapest compiled bucket that is large enough in rows, capacity and sampler level. The level comes first:
        # TRUNCATION searches the vocabulary in each pass. The largest bucket is always compiled, so there is one.
        known = [b for b in list(self.compiled.steps) if all(have >= want for have, want in zip(b, need))]
        best = min(known, key=lambda b: (b.level, b.rows * b.capacity, b.rows))
        self._smaller_fits = 0 if best == self.bucket or not fits else self._smaller_fits + 1
        if fits and self._smaller_fits <= PATIENCE and (self.running > 0 or best == self.bucket):
            return
        running = [(slot, run) for slot, run in enumerate(self.requests) if run is not None]
        # A bucket that differs in the sampler level only has the same state: just the sampling parameters change.
        if (best.rows, best.capacity) != (self.bucket.rows, self.bucket.capacity):
            old, buckets = [slot for slot, _ in running], self.buckets
            moved = buckets.moved(self.state, old, best) if old else buckets.sharded(buckets.idle(best))
            self.state, running = moved, list(enumerate(run for _, run in running))
        self._assign(best, running)

    def admit(self, run: RunningRequest, row: State) -> None:
        """Puts a request into a free slot."""
        slot = self.requests.index(None)
        self.requests[slot] = run
        buckets, capacity = self.buckets, self.bucket.capacity
        if row.tokens.shape[1] != capacity:
            row = programs.move_rows(row, np.zeros(1, np.int32), buckets.sizes(capacity))
        self.state = buckets.sharded(programs.place_row(self.state, np.int32(slot), row))
        sampling.set_row(self._host_params, slot, self._params(run.handle.request))
        self._device_params = None

    def apply_grammars(self) -> None:
        """Writes the tokens that grammars have committed into the state, and their next masks into the parameters."""
        gates = [
            (slot, run, run.gate)
            for slot, run in enumerate(self.requests)
            if run is not None and run.gate is not None and run.gate.begun
        ]
        if not gates:
            return
        program = self.buckets.program(self.bucket.capacity, sampling.TRUNCATION)
        # more tokens than a canvas holds take several writes
        while any(gate.pending for _, _, gate in gates):
            change = no_tokens(self.bucket.rows, program.width)
            for slot, _, gate in gates:
                if gate.pending:
                    gate.write(change, slot)
            eos = np.asarray(self._host_params.eos)
            self.state = self.buckets.sharded(programs.write_tokens(program, self.state, change, eos))
        (part,) = self._host_params.sampler.allow
        allowed, changed = part.params, False
        for slot, _, gate in gates:
            # The mask applies to one position, the frontier: the first one that is open. The model may have more ids
            # than the tokenizer; those are forbidden too.
            bits, words = np.zeros_like(allowed["bits"][slot]), gate.bits()
            bits[0, : len(words)] = words
            if allowed["start"][slot] >= 0 or not np.array_equal(allowed["bits"][slot], bits):
                allowed["bits"][slot], allowed["start"][slot], changed = bits, -1, True
        if changed and self._device_params is not None:
            # only the grammar masks are transferred, not the other parameters
            masks = dataclasses.replace(part, params=jax.device_put(dict(allowed)))
            sampler = self._device_params.sampler._replace(allow=(masks,))
            self._device_params = self._device_params._replace(sampler=sampler)

    def dispatch(self, params: Params) -> None:
        """Sends the next passes to the device without waiting for them. Idle rows do not change."""
        idle = np.array([run is None for run in self.requests])
        if self._device_params is None:
            self._device_params = jax.device_put(self._host_params)
        limit = np.int32(1 if self.constrained else self.buckets.config.passes or 1)
        step = self.compiled.steps[self.bucket]
        # The state is donated: from here on only `result.state` is valid.
        result = step(params, self.state, self._device_params, idle, limit, self._free_text())
        self.state = result.state
        self.pending.append((result, tuple(self.requests)))

    def _free_text(self) -> FreeText | None:
        """Returns what the device may commit to each row without the host: all but the last token of its budget."""
        if self.bucket.level == sampling.PLAIN:
            return None
        free = no_free_text(self.bucket.rows, self.buckets.rules.vocab)
        for slot, run in enumerate(self.requests):
            gate = None if run is None else run.gate
            if gate is not None and gate.first is not None and (ids := gate.walker.free()) is not None:
                free.ids[slot, : len(ids)] = ids  # type: ignore[index]
                free.until[slot] = gate.first + gate.walker.budget - 1  # type: ignore[index]
        return free

    def read(self) -> ReadDispatch:
        """Waits for the oldest dispatch and copies its frames and report to the host."""
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
        """Returns the sampling parameters of one row at the level of the current bucket."""
        buckets = self.buckets
        return sampling.row_params(buckets.rules, request, self.bucket.level, buckets.lm, buckets.block)
