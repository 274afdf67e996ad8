"""Admission: the bounded queue of waiting requests, and which of them gets the next free slot.

The engine takes requests out of `RequestQueue` whenever slots are free; `may_run` keeps slots for short requests.
`infilling` has a queue of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from mercury_jax.serve.engine.request import EngineRequest, RequestHandle, RequestRejected

LONG_REQUEST = 1024  # tokens of prompt and output from which on a request counts as long
TOKENS_PER_SECOND = 1000.0  # a request is scheduled as if it had arrived this much later per token


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
    """Requests that wait for a slot. Every method may be called from any thread.

    The order is by arrival time plus a second for each TOKENS_PER_SECOND tokens of the request: short requests
    overtake long ones, and none starves.

    Args:
        limit: Most requests that wait.
        on_add: Called when a request has been added.
        free_slots: Number of free slots; as many requests more than `limit` are accepted, since they do not wait.
    """

    def __init__(self, limit: int, on_add: Callable[[], None], free_slots: Callable[[], int] = lambda: 0):
        self._limit, self._on_add, self._free_slots = limit, on_add, free_slots
        self._lock = threading.Lock()
        self._entries: list[tuple[float, int, RequestHandle]] = []  # (scheduled time, arrival number, handle)
        self._added = 0
        self.closed = False
        self.mean_seconds = 0.5  # moving average of what a request takes, for Retry-After

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, handle: RequestHandle) -> None:
        """Adds a request.

        Raises:
            RequestRejected: If the queue is full or closed.
        """
        with self._lock:
            if self.closed:
                raise RequestRejected("the server is closing", 5.0, closing=True)
            if len(self._entries) >= self._limit + max(0, self._free_slots()):
                message = f"{len(self._entries)} requests are waiting already"
                raise RequestRejected(message, max(1.0, self.mean_seconds))
            scheduled = handle.arrival_time + handle.request.max_length / TOKENS_PER_SECOND
            self._added += 1
            self._entries.append((scheduled, self._added, handle))
        self._on_add()

    def take(self, fits: Callable[[RequestHandle], bool] = lambda handle: True) -> RequestHandle | None:
        """Removes and returns the first request in scheduling order for which `fits` holds; None without one."""
        with self._lock:
            for entry in sorted(self._entries):
                if fits(entry[2]):
                    self._entries.remove(entry)
                    return entry[2]
        return None

    def remove(self, chosen: Callable[[RequestHandle], bool] = lambda handle: True) -> list[RequestHandle]:
        """Removes and returns all requests for which `chosen` holds."""
        with self._lock:
            removed = [entry for entry in self._entries if chosen(entry[2])]
            self._entries = [entry for entry in self._entries if not chosen(entry[2])]
        return [handle for _, _, handle in removed]

    def record_duration(self, seconds: float) -> None:
        """Updates `mean_seconds` with the time of one request from arrival to end."""
        self.mean_seconds += 0.2 * (seconds - self.mean_seconds)
