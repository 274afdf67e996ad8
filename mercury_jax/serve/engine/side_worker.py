"""Requests that do not fit into the slots: a thread decodes them one at a time, beside the batch.

`infilling` fills holes between a prompt and a suffix, `predicting` verifies predicted texts. Both need canvases of
other widths than those of the slots. The thread shares the device with the engine's: its passes and those of the batch
take turns.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeAlias

from mercury_jax.serve.engine.request import EngineRequest, RequestHandle, Snapshot
from mercury_jax.serve.engine.scheduler import RequestQueue
from mercury_jax.serve.engine.snapshots import early_end

log = logging.getLogger(__name__)


class RequestCancelled(Exception):
    """The request was cancelled, or the engine stopped, while it was being decoded."""


# decode(handle, stopping) -> the last snapshot; raises `RequestCancelled` soon after `stopping()` or a cancellation
Decode: TypeAlias = Callable[[RequestHandle, Callable[[], bool]], Snapshot]


class SideWorker:
    """A queue of requests, and the thread that decodes them.

    Attributes:
        queue: The waiting requests, and the one that is being decoded.
    """

    def __init__(
        self,
        name: str,
        decode: Decode,
        limit: int,
        publish: Callable[[RequestHandle, Snapshot], None],
        example: EngineRequest | None,
    ):
        self._decode, self._publish, self._example = decode, publish, example
        self._changed = threading.Event()
        self.queue = RequestQueue(limit, 1, self._changed.set)
        self._stop, self._cold = False, False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def warm_up(self) -> None:
        """Makes the thread compile the programs of its example as soon as no request waits."""
        self._cold = self._example is not None
        self._changed.set()

    def stop(self) -> None:
        """Cancels all requests and ends the thread after the current pass."""
        self._stop = True
        self.queue.close()
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join()
        for handle in self.queue.unfinished:
            self._publish(handle, early_end(handle, "cancelled"))

    def _serve(self) -> None:
        """Runs the thread: decodes in scheduling order, warms up once, and waits."""
        while not self._stop:
            handle = self.queue.take()
            if handle is not None:
                self._publish(handle, self._last_snapshot(handle))
            elif self._cold and self._example is not None:
                self._cold = False
                self._last_snapshot(RequestHandle(self._example, self._changed.set))
            else:
                self._changed.wait()
                self._changed.clear()

    def _last_snapshot(self, handle: RequestHandle) -> Snapshot:
        """Decodes a request; returns its last snapshot, also for an error or a cancellation."""
        try:
            return self._decode(handle, lambda: self._stop)
        except RequestCancelled:
            return early_end(handle, "cancelled")
        except ValueError as error:
            return early_end(handle, "error", str(error))
        except Exception:  # a failing request must not end the thread
            log.exception("a request beside the slots failed")
            return early_end(handle, "error", "the engine failed")
