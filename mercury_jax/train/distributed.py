"""Several processes, and signals: joining a job, sharing the state of the data, stopping at the same step.

Used by `loop.py` and by `api.train`. A single process needs nothing of it but `watch_signals`.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from mercury_jax.config import refuse

DataState = dict[str, Any]  # JSON, see `loop.Batches`


def join() -> None:
    """Joins the other processes of this job. Call it before anything touches a device.

    JAX detects SLURM, GKE, Cloud TPU and MPI; elsewhere the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID describe the job.

    Raises:
        ValueError: There is no such job.
    """
    count, index = os.environ.get("JAX_NUM_PROCESSES"), os.environ.get("JAX_PROCESS_ID")
    try:
        jax.distributed.initialize(
            num_processes=None if count is None else int(count),
            process_id=None if index is None else int(index),
        )
    except (ValueError, RuntimeError) as error:
        if "already" in str(error):
            return
        allowed = "a job of SLURM, GKE, Cloud TPU or MPI, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID"
        raise refuse("distributed", True, f"{allowed}; JAX says: {error}") from error


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
