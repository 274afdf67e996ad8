"""The slots: one batched `State` on the device, the request in each row, and the dispatches in flight.

All methods belong to the engine's thread. A dispatch is asynchronous: `dispatch` hands the state to the device and
`read` waits for the oldest result, so that the device works while the host publishes snapshots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from mercury_jax.decode.constrained import no_tokens
from mercury_jax.decode.state import Frame, SamplingParams, State
from mercury_jax.serve.engine import programs, sampling_params as sampling
from mercury_jax.serve.engine.buckets import NO_REQUEST, Bucket, Buckets, CompiledPrograms
from mercury_jax.serve.engine.programs import DispatchReport, DispatchResult
from mercury_jax.serve.engine.request import EngineRequest
from mercury_jax.serve.engine.snapshots import RunningRequest
from mercury_jax.types import Params

PATIENCE = 16  # dispatches that must fit into a smaller bucket before the rows move to it


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
        best = self.compiled.fitting(need)
        self._smaller_fits = 0 if best == self.bucket or not fits else self._smaller_fits + 1
        if not fits or self._smaller_fits > PATIENCE or (self.running == 0 and best != self.bucket):
            self._move(best)

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
        for slot, run, gate in gates:
            if not gate.ended:
                sampling.set_allowed(self._host_params, slot, gate.bits(), gate.frontier - run.prompt_length)
        if self._device_params is not None:
            self._device_params = sampling.with_allowed(self._device_params, self._host_params)

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

    def _move(self, bucket: Bucket) -> None:
        running = [(slot, run) for slot, run in enumerate(self.requests) if run is not None]
        if (bucket.rows, bucket.capacity) != (self.bucket.rows, self.bucket.capacity):
            old, buckets = [slot for slot, _ in running], self.buckets
            moved = buckets.moved(self.state, old, bucket) if old else buckets.sharded(buckets.idle(bucket))
            self.state, running = moved, list(enumerate(run for _, run in running))
        self._assign(bucket, running)

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
