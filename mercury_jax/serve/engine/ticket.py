"""A ticket: where the snapshots of one job are collected, from any thread or event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

import numpy as np

from mercury_jax.serve.engine.types import Job, Snapshot

BACKLOG = 1024  # frames that wait for a slow reader; older ones are dropped, never the last

NOTHING = Snapshot(
    np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32), np.zeros(0, bool), 0, 0, 0, 0
)


class Ticket:
    """What `Engine.submit` gives back for a job.

    `latest`, `wait` and `async for` read it, `cancel` ends it. A reader that is slow misses snapshots in between
    (with `job.frames` only beyond a backlog), and never the last one, whose `finish` is set.
    """

    def __init__(self, job: Job, on_cancel: Callable[[], None]):
        self.job = job
        self.born = time.monotonic()
        self.cancelled = False
        self._on_cancel = on_cancel
        self._changed = threading.Condition()
        self._latest: Snapshot | None = None
        self._frames: deque[Snapshot] = deque(maxlen=BACKLOG)
        self._listeners: list[Callable[[], None]] = []

    @property
    def latest(self) -> Snapshot | None:
        """The newest snapshot; None before the first."""
        return self._latest

    @property
    def over(self) -> bool:
        """Whether the last snapshot is there."""
        return self._latest is not None and self._latest.finish is not None

    def cancel(self) -> None:
        """End the job; its slot is free at the next step. Again, or after the end, it does nothing."""
        if not self.over and not self.cancelled:
            self.cancelled = True
            self._on_cancel()

    def wait(self, timeout: float | None = None) -> Snapshot:
        """The last snapshot, once it is there; TimeoutError after so many seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.over, timeout):
                raise TimeoutError(f"no end after {timeout} s")
            assert self._latest is not None
            return self._latest

    def publish(self, snapshot: Snapshot) -> None:
        """The engine's side. After the last snapshot nothing is taken."""
        with self._changed:
            if self.over:
                return
            self._latest = snapshot
            if self.job.frames:
                self._frames.append(snapshot)
            self._changed.notify_all()
            told = list(self._listeners)
        for tell in told:
            tell()

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                loop.call_soon_threadsafe(news.set)

        with self._changed:
            self._listeners.append(tell)
        try:
            seen: Snapshot | None = None
            while True:
                for snapshot in self._unseen(seen):
                    yield snapshot
                    seen = snapshot
                    if snapshot.finish is not None:
                        return
                await news.wait()
                news.clear()
        finally:
            with self._changed:
                self._listeners.remove(tell)

    def _unseen(self, seen: Snapshot | None) -> list[Snapshot]:
        with self._changed:
            if self.job.frames:
                found = list(self._frames)
                self._frames.clear()
                return found
            return [self._latest] if self._latest is not None and self._latest is not seen else []
