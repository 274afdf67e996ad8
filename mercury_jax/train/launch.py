"""What happens around a loop: several processes, and signals that ask it to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax
from jax.experimental import multihost_utils

from mercury_jax.config import refuse


def distributed() -> None:
    """Join the other processes of this job; call it before anything touches a device.

    SLURM, GKE, Cloud TPU and MPI are detected by JAX; elsewhere the variables JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID tell it.
    """
    import os

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


@dataclass
class Stop:
    """Whether somebody asked the run to stop, and how."""

    name: str | None = None

    def asked(self, step: int) -> bool:
        """The same answer on every process: they agree on the step through JAX's preemption service."""
        if (
            self.name is None
            and jax.process_count() > 1
            and multihost_utils.reached_preemption_sync_point(step)
        ):
            self.name = "SIGTERM"
        return self.name is not None


@contextmanager
def signals() -> Iterator[Stop]:
    """SIGTERM and SIGINT set a flag instead of killing; a second SIGINT interrupts as usual.

    With several processes JAX itself watches SIGTERM, and tells all of them.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(number: int, frame: object) -> None:
        if number == signal.SIGINT and stop.name is not None:
            raise KeyboardInterrupt
        stop.name = signal.Signals(number).name

    watched = (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else ()
    before = {number: signal.signal(number, note) for number in watched}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
