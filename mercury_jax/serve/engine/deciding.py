"""Decisions: typed questions, read together in one forward pass.

A decision takes one pass, not a slot and a series of passes. So a thread of its own takes all decisions that wait,
reads them as rows of one pass (`decode.decide`), and takes those that have arrived since. The device runs such a pass
between two denoising passes of the slots.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from mercury_jax.decode.decide import Asked, DecideOutput, Settings, answer
from mercury_jax.serve.engine.request import RequestRejected
from mercury_jax.types import LM

log = logging.getLogger(__name__)

MAX_TOGETHER = 8  # decisions that share a pass


class _Waiting(NamedTuple):
    """A decision that waits: its questions, all about state 0, and where the answers go."""

    asked: list[Asked]
    settings: Settings
    found: Future[DecideOutput]


class DecisionWorker:
    """A queue of decisions, and the thread that reads them.

    Args:
        lm: The model.
        limit: Largest number of decisions that wait or are read.
        count: Called after each pass with the number of decisions that it has answered.
    """

    def __init__(self, lm: LM, limit: int, count: Callable[[int], None]):
        self._lm, self._limit, self._count = lm, limit, count
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._reading, self._closed, self._stopping = 0, False, False
        self._thread = threading.Thread(target=self._serve, name="mercury-decide", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, asked: list[Asked], settings: Settings) -> Future[DecideOutput]:
        """Queues the questions about one state."""
        found: Future[DecideOutput] = Future()
        with self._changed:
            if self._closed:
                raise RequestRejected("the server is closing", 5.0, closing=True)
            if self.unfinished >= self._limit:
                raise RequestRejected(f"{self.unfinished} decisions are waiting already", 1.0)
            self._waiting.append(_Waiting(asked, settings, found))
            self._changed.notify()
        return found

    @property
    def unfinished(self) -> int:
        """Number of decisions that wait or are read."""
        return len(self._waiting) + self._reading

    def close(self) -> None:
        """Rejects further decisions."""
        with self._changed:
            self._closed = True

    def stop(self) -> None:
        """Cancels the decisions that wait, and ends the thread after the current pass."""
        with self._changed:
            self._closed = self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()
        for one in self._waiting:
            one.found.cancel()

    def _serve(self) -> None:
        """Runs the thread."""
        while True:
            with self._changed:
                self._reading = 0
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if self._stopping:
                    return
                taken = [self._waiting.popleft() for _ in range(min(MAX_TOGETHER, len(self._waiting)))]
                # A decision whose client is gone is left out.
                together = [one for one in taken if one.found.set_running_or_notify_cancel()]
                self._reading = len(together)
            if together:
                self._read(together)

    def _read(self, together: Sequence[_Waiting]) -> None:
        """Answers decisions in one pass; if that fails, each one alone, so that only those at fault fail."""
        asked = [
            one._replace(state=state, prompts=[p._replace(state=state) for p in one.prompts])
            for state, waiting in enumerate(together)
            for one in waiting.asked
        ]
        try:
            outputs = answer(self._lm, asked, [waiting.settings for waiting in together])
        except Exception as error:
            if len(together) > 1:
                for waiting in together:
                    self._read([waiting])
                return
            if not isinstance(error, ValueError):
                log.exception("a decision could not be read")
            together[0].found.set_exception(error)
            return
        self._count(len(together))
        for waiting, output in zip(together, outputs, strict=True):
            waiting.found.set_result(output)
