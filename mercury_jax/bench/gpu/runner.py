"""The parent process of `mercury bench gpu`: runs cases in child processes that can be killed, within a time budget.

A case that hangs is killed with its process group. After a crash or a failed case the next one starts in a new
process. Otherwise consecutive cases with the same environment share a process, since starting JAX on a GPU takes
longer than most of them. A case that fails in a shared process is repeated in a new one, in case an earlier case
caused the failure. This module and `cases` import no JAX.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

Row = dict[str, Any]
WORKER = (sys.executable, "-m", "mercury_jax.bench.gpu.worker")
BEAT = 10.0  # seconds between two progress lines
STARTING = 30.0  # further seconds for the first case of a process, which starts JAX and the device
TAIL = 600  # characters of the standard error of a dead process that its row contains
SWITCH = "MERCURY_KERNELS"  # as in `kernels.device`, which would import JAX
# A killed child may hold its memory for a moment while the next one starts, so none preallocates all of it.
ALWAYS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}


class GpuCase(NamedTuple):
    """One unit of work in a child process.

    Attributes:
        name: Shown, and matched by `--only`.
        work: A name in `worker.WORK`.
        asked: Its arguments, JSON.
        limit: Seconds after which it is killed.
        least: Seconds that must be left to begin it.
        form: The kernel form (`kernels.device`) it belongs to; empty for none.
        env: Environment variables of its process; MERCURY_KERNELS is unset unless it is among them.
        alone: Whether it shares no process with others.
    """

    name: str
    work: str
    asked: dict[str, Any]
    limit: float = 30.0
    least: float = 4.0
    form: str = ""
    env: tuple[tuple[str, str], ...] = ()
    alone: bool = False


class TimeBudget:
    """The time budget of a command, in seconds."""

    def __init__(self, budget: float) -> None:
        self.budget, self._began = budget, time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds that are left of the budget."""
        return self.budget - self.spent


class Runner:
    """Runs cases one after another. A context manager: no process is left when it ends.

    Args:
        clock: The budget of the whole command.
        worker: Command line of a child process.
        say: Called with a progress line every `beat` seconds.
        beat: Seconds.
    """

    def __init__(
        self,
        clock: TimeBudget,
        worker: Sequence[str] = WORKER,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
        beat: float = BEAT,
    ) -> None:
        self.clock, self._worker, self._say, self._beat = clock, worker, say, beat
        self._child: _Child | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def run(self, case: GpuCase) -> list[Row]:
        """Runs a case.

        Returns:
            Its rows. Where it fails the last one has {"failed": why}; where no time is left the only one has
            {"not_run": "time"}.
        """
        if self.clock.left < case.least:
            return [{"not_run": "time", "seconds_left": round(max(self.clock.left, 0.0), 1)}]
        if case.alone or (self._child is not None and self._child.env != case.env):
            self._end()
        shared = self._child is not None
        rows = self._once(case)
        if (
            shared
            and troubled(rows)
            and not any(r.get("killed") for r in rows)
            and self.clock.left >= case.least
        ):
            why = next((str(r.get("failed") or r.get("why")) for r in rows if troubled([r])), "")[:300]
            rows = [row | {"in_a_used_process": why} for row in self._once(case)]
        if case.alone:
            self._end()
        return rows

    def _once(self, case: GpuCase) -> list[Row]:
        began, limit = time.monotonic(), case.limit
        if self._child is None:
            self._child, limit = _Child(self._worker, case.env), limit + STARTING
        limit = min(limit, self.clock.left)
        rows: list[Row] = []
        for told in self._child.ask(
            case, limit, self._beat, lambda stage: self._tell(case, stage, began, limit)
        ):
            rows.append(told)
        if troubled(rows):
            self._end()
        took = round(time.monotonic() - began, 2)
        return [row | {"seconds_of_case": took} for row in rows]

    def _tell(self, case: GpuCase, stage: str, began: float, limit: float) -> None:
        took = time.monotonic() - began
        spent = f"{self.clock.spent:.0f} of {self.clock.budget:.0f} s"
        self._say(f"{spent}, {case.name}: {stage}, {took:.0f} of at most {limit:.0f} s")

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


def troubled(rows: Iterable[Row]) -> bool:
    """Whether a case failed or gave a wrong result, after which its process is not used again."""
    return any("failed" in row or row.get("passed") is False for row in rows)


def append(path: str | None, row: Row) -> None:
    """Appends a row to a JSONL file and waits until it is on the disk; does nothing where no path was given.

    Args:
        path: A JSONL file, or None.
        row: The row.
    """
    if path is not None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


class _Child:
    """A child process that reads cases from its standard input and answers with JSON lines."""

    def __init__(self, worker: Sequence[str], env: tuple[tuple[str, str], ...]) -> None:
        self.env = env
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (`kill` closes it)
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            list(worker), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
            env=_environment(env), process_group=0,
        )  # fmt: skip
        threading.Thread(target=_fill, args=(self._process.stdout, self._lines), daemon=True).start()

    def ask(self, case: GpuCase, limit: float, beat: float, tell: Callable[[str], None]) -> Iterator[Row]:
        """The rows of a case. The last one has {"failed": why} after a failure, and {"killed": True} too after a
        hang."""
        end, stage = time.monotonic() + limit, "starting"
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"work": case.work, "asked": case.asked}) + "\n")
            self._process.stdin.flush()
        except OSError:
            yield self._dead()
            return
        while (left := end - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=min(beat, left))
            except queue.Empty:
                tell(stage)
                continue
            if line is None:
                yield self._dead()
                return
            told = _parsed(line)
            stage = told.get("stage", stage)
            if "row" in told:
                yield told["row"]
            if "failed" in told:
                yield {"failed": told["failed"]}
            if "failed" in told or "done" in told:
                return
        yield {"failed": f"killed after {limit:.0f} s while {stage}", "killed": True}

    def kill(self) -> None:
        """Kills the process group, and waits for at most 10 s: a driver may keep a process longer."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        for stream in filter(None, (self._process.stdin, self._process.stdout, self._said)):
            with contextlib.suppress(OSError):  # unwritten input of a dead process
                stream.close()

    def _dead(self) -> Row:
        code = self._process.wait()
        self._said.seek(0)
        name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return {"failed": f"its process ended with {name}: {self._said.read()[-TAIL:].strip()}"}


def _fill(source: IO[str] | None, lines: queue.Queue[str | None]) -> None:
    with contextlib.suppress(ValueError):  # closed by `kill`
        for line in source or ():
            lines.put(line)
    lines.put(None)


def _parsed(line: str) -> Row:
    """A line of a child as JSON; empty for what libraries print."""
    try:
        told = json.loads(line)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _environment(env: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """The user's environment, with this package importable and MERCURY_KERNELS unset unless it is given."""
    found = {k: v for k, v in os.environ.items() if k != SWITCH} | ALWAYS
    root = str(Path(__file__).parents[3])
    found["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    for name, value in env:  # XLA_FLAGS are appended to the user's own
        found[name] = f"{found.get(name, '')} {value}".strip() if name == "XLA_FLAGS" else value
    return found
