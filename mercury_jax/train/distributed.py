"""Several processes that train together: joining, ending together, sharing the state of the data, stopping at SIGTERM.

A collective waits for every process, so one that ends early would leave the others waiting. Two things prevent it:

    an error        the process that raises it publishes it in JAX's key-value store; the others read it and end
    a silent death  (SIGKILL, a lost host): every process counts up a number in the store, and process 0 publishes
                    the name of one whose number stands still for `heartbeat` seconds

JAX's own heartbeat stays on as well, with a longer timeout, for the case that Python itself hangs. Only where process
0 dies, and the store with it, do the others end at once and by JAX's message.
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
LEFT = "left"  # in the place of the number: the process has finished, and counts no further
POLL = 0.5  # seconds between two looks at the store
BACKSTOP = 30  # seconds that JAX's own timeouts are longer than ours, so that ours speak first
LOST = 5  # exit code: another process died, or did not join

DataState = dict[str, Any]  # JSON, see `loop.Batches`


# --- joining a job, and ending together


@contextmanager
def joined(timeout: int = 300, heartbeat: int = 60) -> Iterator[None]:
    """Joins the other processes of this job; an error in the block ends all of them. Enter before a device is used.

    JAX detects SLURM, GKE, Cloud TPU and MPI; elsewhere the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID describe the job.

    In the block this process ends, with a line that says why and a non-zero exit code, as soon as another process has
    raised an error or has given no sign of life for `heartbeat` seconds. An error in the block gets an attribute
    `leave_at_once`: at Python's usual exit JAX would wait for processes that may be gone.

    Args:
        timeout: Seconds in which all processes must have joined. After them this process ends with exit code 5.
        heartbeat: Seconds without a sign of life after which a process counts as dead.

    Yields:
        None.

    Raises:
        ValueError: There is no such job.
    """
    _initialize(timeout, heartbeat)
    if jax.process_count() == 1:
        yield
        return
    from jax._src import distributed  # the only way to the store; Orbax goes it too

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
    """`jax.distributed.initialize`, which would abort the process with a stack trace where a process is missing."""
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
    """A thread that shows the others that this process lives, and ends it when another one has failed."""

    def __init__(self, store: Any, index: int, count: int, heartbeat: float) -> None:
        """Knows the job, and starts nothing.

        Args:
            store: JAX's client, with `key_value_set`, `key_value_dir_get` and `blocking_key_value_get`.
            index: Of this process.
            count: Processes.
            heartbeat: Seconds of silence after which a process counts as dead.
        """
        self._store, self.index, self.count, self.heartbeat = store, index, count, heartbeat
        self._over, self._failing = threading.Event(), False
        self._seen: dict[int, tuple[str, float]] = {}  # last number of each process, and when it was new
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._store.key_value_set(f"{WHO}{self.index}", f"host {socket.gethostname()}, pid {os.getpid()}")
        self._thread.start()

    def leave(self) -> None:
        """This process has finished: it is not missed any more, and does not watch."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(20 * POLL)  # Python must not end while a thread of it waits in C++
        with suppress(Exception):  # the store may be gone
            self._store.key_value_set(f"{ALIVE}{self.index}", LEFT, allow_overwrite=True)

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process ends by `error`, and waits a moment until they have read it.

        A failed collective is most often the trace of another process's death. Which one it was is known after
        `heartbeat` seconds at most; then this process ends here, with the message that all others get.
        """
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
        number = 0
        while not self._over.is_set():
            number += 1
            try:
                self._store.key_value_set(f"{ALIVE}{self.index}", str(number), allow_overwrite=True)
                if self.index == 0:
                    self._find_silent()
                told = self._store.blocking_key_value_get(ENDED, int(POLL * 1000))
            except Exception:  # nothing yet, or the store is gone, which JAX itself notices
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
        """On process 0: publishes a process whose number has not changed for `heartbeat` seconds."""
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
        """The first message stands: later ones are consequences."""
        who = dict(self._store.key_value_dir_get(WHO)).get(f"{WHO}{index}", "never heard of")
        about = {"process": index, "message": f"process {index} of {self.count} ({who}) {what}", "code": code}
        with suppress(Exception):
            self._store.key_value_set(ENDED, json.dumps(about))

    def _leave_last(self, dead: int | None = None) -> None:
        """On process 0, with which the store ends: waits until the others have left, and gives them time to exit."""
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
        time.sleep(2 * POLL)


def _exit_code(error: BaseException) -> int:
    """As the command line has it: an error's own, 4 for a full disk, 2 for bad input, 130 for Ctrl-C, otherwise 1."""
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
    """Ends this process from any thread, whatever its main thread waits for."""
    _say(text)
    os._exit(code)


# --- what the processes share


def gather_data_state(state: DataState) -> DataState:
    """Merges the states of all processes' data, so that any number of processes can continue from the result.

    Args:
        state: This process's; its `rows` are {number of the row: state of the row}.

    Returns:
        The state with the `rows` of every process, on each of them. A single process's state is returned as it is.
    """
    if jax.process_count() == 1:
        return state
    # JSON as bytes, padded to the longest: collectives need arrays of one shape.
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
        name: "SIGTERM" or "SIGINT"; None while there was none.
    """

    name: str | None = None

    def arrived(self, step: int) -> bool:
        """Whether to stop at this step: the same answer on every process, by JAX's preemption service."""
        several = self.name is None and jax.process_count() > 1
        if several and multihost_utils.reached_preemption_sync_point(step):
            self.name = "SIGTERM"
        return self.name is not None


@contextmanager
def watch_signals() -> Iterator[StopSignal]:
    """Records SIGTERM and SIGINT instead of ending the process; a second SIGINT interrupts as usual.

    With several processes JAX itself watches SIGTERM, and informs all of them. In a thread signals are left alone.

    Yields:
        What arrived.

    Raises:
        KeyboardInterrupt: At the second SIGINT.
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
