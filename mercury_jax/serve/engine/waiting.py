"""The queue: bounded, and fair between long requests and short ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from mercury_jax.serve.engine.shapes import tokens_of
from mercury_jax.serve.engine.ticket import Ticket
from mercury_jax.serve.engine.types import Busy, Job

LONG = 1024  # tokens from which on a request counts as long
# A request is put back by a second for so many tokens: short ones overtake, and none waits for ever.
PACE = 1000.0


def may_sit(job: Job, running: Sequence[Job], slots: int) -> bool:
    """Whether a job may take a seat: long ones leave a quarter of the seats to the short."""
    if tokens_of(job) < LONG or slots < 2:
        return True
    return sum(tokens_of(other) >= LONG for other in running) < max(1, slots - max(1, slots // 4))


class Waiting:
    """Tickets that have no slot yet; every method may be called from any thread.

    most: that may wait. free: seats that nobody has; who takes one of them at the next step does not wait.
    """

    def __init__(self, most: int, wake: Callable[[], None], free: Callable[[], int] = lambda: 0):
        self._most, self._wake, self._free = most, wake, free
        self._lock = threading.Lock()
        self._tickets: list[tuple[float, int, Ticket]] = []
        self._count = 0
        self.closed = False
        self.seconds = 0.5  # what a request took lately, for Retry-After

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket) -> None:
        """Raises Busy where the queue is full or closed."""
        with self._lock:
            if self.closed:
                raise Busy("the server is closing", 5.0, closing=True)
            if len(self._tickets) >= self._most + max(0, self._free()):
                raise Busy(f"{len(self._tickets)} requests are waiting already", max(1.0, self.seconds))
            due = ticket.born + tokens_of(ticket.job) / PACE
            self._count += 1
            self._tickets.append((due, self._count, ticket))
        self._wake()

    def take(self, fits: Callable[[Ticket], bool]) -> Ticket | None:
        """The ticket whose turn it is, among those that fit."""
        with self._lock:
            for entry in sorted(self._tickets):
                if fits(entry[2]):
                    self._tickets.remove(entry)
                    return entry[2]
        return None

    def remove(self, chosen: Callable[[Ticket], bool]) -> list[Ticket]:
        """Take out every ticket that is chosen."""
        with self._lock:
            out = [entry for entry in self._tickets if chosen(entry[2])]
            self._tickets = [entry for entry in self._tickets if not chosen(entry[2])]
        return [ticket for _, _, ticket in out]

    def took(self, seconds: float) -> None:
        """Remember how long a request took from its arrival to its end."""
        self.seconds += 0.2 * (seconds - self.seconds)
