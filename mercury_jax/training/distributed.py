"""Training in several processes: joining a job, failing together, merging the state of the data, stopping at SIGTERM.

A collective waits for all processes. If one process ends early, the others would wait for it until the job is killed.
A background thread in each process (`Watch`) prevents this, in two cases:

    error         the failing process publishes its error in JAX's key-value store; the others read it and exit
    silent death  (SIGKILL, a lost host) each process keeps increasing a counter in the store; process 0 publishes
                  the process whose counter has not changed for `heartbeat` seconds, and the others exit

JAX's own heartbeat stays enabled with a longer timeout, in case Python itself hangs. Process 0 hosts the key-value
store: if that process dies, the others exit immediately with JAX's message.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from mercury_jax.config import refuse

ALIVE, WHO, ENDED = "mercury/alive/", "mercury/who/", "mercury/ended"  # in JAX's key-value store
LEFT = "left"  # replaces the counter of a process that has finished: its silence is no failure
POLL = 0.5  # seconds between two reads of the store
BACKSTOP = 30  # seconds by which JAX's own timeouts are longer, so that our messages come first
LOST = 5  # exit code: another process died, or did not join

DataState = dict[str, Any]  # JSON, see `loop.Batches`


# --- joining a job, and ending together


@contextmanager
def joined(timeout: int = 300, heartbeat: int = 60) -> Iterator[None]:
    """Joins the other processes of this job; an error in the block ends all of them.

    Enter the block before any device is used. JAX detects SLURM, GKE, Cloud TPU and MPI; elsewhere set the environment
    variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Inside the block, this process exits with a message and a non-zero exit code as soon as another process raises an
    error, or has not updated its counter for `heartbeat` seconds. An error that leaves the block gets the attribute
    `leave_at_once`, which tells the caller to use `os._exit`: at a normal exit JAX would wait for processes that may be
    gone.
    """
    _initialize(timeout, heartbeat)
    if jax.process_count() == 1:
        yield
        return
    from jax._src import distributed  # JAX has no public access to the store; Orbax imports this module too

    watch = Watch(distributed.global_state.client, jax.process_index(), jax.process_count(), heartbeat)
    watch.start()
    try:
        yield
    except BaseException as error:
        watch.fail(error)
        with suppress(AttributeError):  # an exception with __slots__
            error.leave_at_once = True  # type: ignore[attr-defined]
        raise
    watch.leave()


def _initialize(timeout: int, heartbeat: int) -> None:
    """Calls `jax.distributed.initialize`, with a timer that exits with a readable message if a process is missing.

    On its own timeout, JAX aborts the process with a C++ stack trace.
    """
    count, index = os.environ.get("JAX_NUM_PROCESSES"), os.environ.get("JAX_PROCESS_ID")

    def late() -> None:
        what = f"process {index} of {count}" if index and count else "this process"
        address = os.environ.get("JAX_COORDINATOR_ADDRESS", "the coordinator that JAX found")
        _end(
            f"{what} waited {timeout} s for the others at {address}, and not all of them came. Look for one that did "
            f"not start, a wrong address or count, a firewall, or http_proxy variables; --join_timeout waits longer",
            LOST,
        )

    timer = threading.Timer(timeout, late)
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            num_processes=None if count is None else int(count),
            process_id=None if index is None else int(index),
            initialization_timeout=timeout + BACKSTOP,
            heartbeat_timeout_seconds=heartbeat + BACKSTOP,
        )
    except (ValueError, RuntimeError) as error:
        if "once" in str(error) and jax.distributed.is_initialized():
            return
        allowed = "a job of SLURM, GKE, Cloud TPU or MPI, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID"
        raise refuse("distributed", True, f"{allowed}; JAX says: {error}") from error
    finally:
        timer.cancel()


class Watch:
    """A thread that publishes that this process is alive, and ends the process when another one has failed.

    It uses these keys of the store: ALIVE + index for the counter of a process, or LEFT; WHO + index for its host and
    pid; ENDED for the first failure of the job, as JSON {process, message, code}.
    """

    def __init__(self, store: Any, index: int, count: int, heartbeat: float) -> None:
        """Stores the settings; `start` starts the thread.

        Args:
            store: JAX's client, with `key_value_set`, `key_value_dir_get` and `blocking_key_value_get`.
        """
        self._store, self.index, self.count, self.heartbeat = store, index, count, heartbeat
        self._over, self._failing = threading.Event(), False
        self._seen: dict[int, tuple[str, float]] = {}  # last counter of each process, and when it changed
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Publishes host and pid of this process, and starts the thread."""
        self._store.key_value_set(f"{WHO}{self.index}", f"host {socket.gethostname()}, pid {os.getpid()}")
        self._thread.start()

    def leave(self) -> None:
        """Marks this process as finished, so that no other process misses it, and stops the thread."""
        self._over.set()
        if self._thread is not threading.current_thread():
            # The interpreter must not shut down while a thread waits in JAX's C++ code.
            self._thread.join(20 * POLL)
        with suppress(Exception):  # the store may be gone
            self._store.key_value_set(f"{ALIVE}{self.index}", LEFT, allow_overwrite=True)

    def fail(self, error: BaseException) -> None:
        """Publishes that this process ends because of `error`, and waits until the others have read it."""
        # A failed collective is usually the consequence of another process's death. Process 0 finds out which one
        # within `heartbeat` seconds, and the watch thread then ends this process with the message that all others get.
        # An error of its own, such as an exhausted device memory, is published at once.
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            first = str(error).strip().splitlines()[:1]
            _say(
                f"process {self.index}: {''.join(first)[:300]}\nmercury: looking for a process that has died"
            )
            time.sleep(self.heartbeat + 4 * POLL)
        self._failing = True
        text = str(error).strip() or type(error).__name__
        if not isinstance(error, ValueError):
            text = f"{type(error).__name__}: {text}"
        self._publish(self.index, f"ended by an error: {text}", _exit_code(error))
        self.leave()
        self._leave_last()

    def _run(self) -> None:
        """The thread: counts up, and ends the process at the first published failure."""
        number = 0
        while not self._over.is_set():
            number += 1
            try:
                self._store.key_value_set(f"{ALIVE}{self.index}", str(number), allow_overwrite=True)
                if self.index == 0:
                    self._find_silent()
                told = self._store.blocking_key_value_get(ENDED, int(POLL * 1000))
            except Exception:
                # The read timed out, so there is no failure yet; or the store is gone, which JAX itself reports.
                time.sleep(POLL / 10)
                continue
            about = json.loads(told)
            if self._over.is_set() or self._failing:
                return
            self.leave()
            self._leave_last(dead=about["process"] if about["code"] == LOST else None)
            _end(f"{about['message']}; process {self.index} ends with it", about["code"])
            return

    def _find_silent(self) -> None:
        """On process 0: publishes a process whose counter has not changed for `heartbeat` seconds."""
        # Only the clock of process 0 is used: the counters carry no time, so clocks of hosts may differ.
        now = time.monotonic()
        numbers = {int(key.rpartition("/")[2]): n for key, n in self._store.key_value_dir_get(ALIVE)}
        for index in range(1, self.count):
            number = numbers.get(index, "")
            known, since = self._seen.get(index, (None, now))
            if number != known:
                self._seen[index] = (number, now)
            elif number != LEFT and now - since > self.heartbeat:
                silence = f"gave no sign of life for {self.heartbeat:g} s"
                self._publish(index, f"{silence}: it was killed, or its host or network is lost", LOST)
                return

    def _publish(self, index: int, what: str, code: int) -> None:
        """Publishes a failure. Without `allow_overwrite` the first one stands: later failures are its consequences."""
        who = dict(self._store.key_value_dir_get(WHO)).get(f"{WHO}{index}", "never heard of")
        about = {"process": index, "message": f"process {index} of {self.count} ({who}) {what}", "code": code}
        with suppress(Exception):
            self._store.key_value_set(ENDED, json.dumps(about))

    def _leave_last(self, dead: int | None = None) -> None:
        """On process 0: waits until the others have left, because the store that they read ends with this process."""
        if self.index:
            return
        until = time.monotonic() + 20 * POLL
        others = set(range(1, self.count)) - {dead}
        with suppress(Exception):
            while time.monotonic() < until:
                found = dict(self._store.key_value_dir_get(ALIVE))
                if all(found.get(f"{ALIVE}{index}") == LEFT for index in others):
                    break
                time.sleep(POLL / 10)
        time.sleep(4 * POLL)  # from their mark to their end, also on a busy machine


def _exit_code(error: BaseException) -> int:
    """Finds the exit code: the error's own, 4 for a full disk, 2 for bad input, 130 for Ctrl-C, otherwise 1."""
    own = getattr(error, "exit_code", None)
    if isinstance(own, int):
        return own
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return 4
    return (
        130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, ValueError | OSError) else 1
    )


def _say(text: str) -> None:
    with suppress(Exception):  # stderr may be closed, which must not keep a process from ending
        print(f"mercury: {text}", file=sys.stderr, flush=True)


def _end(text: str, code: int) -> None:
    """Prints a message and ends this process, from any thread.

    `os._exit`, because the main thread may wait in a collective that will never return.
    """
    _say(text)
    os._exit(code)


# --- what the processes share


def gather_data_state(state: DataState) -> DataState:
    """Merges the data states of all processes, so that the run can be resumed with any number of processes."""
    if jax.process_count() == 1:
        return state
    # A collective needs arrays of the same shape on all processes: the JSON is sent as bytes, padded to the longest.
    own = np.frombuffer(json.dumps(state).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(own)))
    padded = np.pad(own, (0, int(lengths.max()) - len(own)))
    every = multihost_utils.process_allgather(padded)
    states = [json.loads(bytes(row[:length])) for row, length in zip(every, lengths)]
    return {**state, "rows": {number: row for one in states for number, row in one["rows"].items()}}


# --- signals


@dataclass
class StopSignal:
    """The signal that ends a run early.

    Attributes:
        name: "SIGTERM" or "SIGINT"; None if none has arrived.
    """

    name: str | None = None

    def arrived(self, step: int) -> bool:
        """Says whether to stop at this step."""
        # SIGTERM reaches the processes at different times. JAX's preemption service agrees on a step that none of them
        # has passed, so that all stop, and save, at the same step.
        several = self.name is None and jax.process_count() > 1
        if several and multihost_utils.reached_preemption_sync_point(step):
            self.name = "SIGTERM"
        return self.name is not None


@contextmanager
def watch_signals() -> Iterator[StopSignal]:
    """Records SIGTERM and SIGINT instead of ending the process; a second SIGINT interrupts as usual.

    With several processes, JAX handles SIGTERM and informs all of them. Outside of the main thread no handler is set,
    since Python allows none there.
    """
    stop = StopSignal()

    def record(number: int, frame: object) -> None:
        if number == signal.SIGINT and stop.name is not None:
            raise KeyboardInterrupt
        stop.name = signal.Signals(number).name

    alone = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()
    watched = (signal.SIGTERM, signal.SIGINT) if alone else ()
    before = {number: signal.signal(number, record) for number in watched}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
