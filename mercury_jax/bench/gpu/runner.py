"""The processes of `mercury bench gpu`: the parent runs cases in child processes that can be killed, within a budget.

A case that hangs is killed with its process group. After a crash or a failed case the next one starts in a new
process. Otherwise consecutive cases with the same environment share a process, since starting JAX on a GPU takes
longer than most of them. A case that fails in a shared process is repeated in a new one, in case an earlier case
caused the failure.

A child is `python -m mercury_jax.bench.gpu.runner`. It reads a case from a line of its standard input,
{"module": name, "work": name, "args": {..}}, and answers with JSON lines: {"stage": text} while it works, {"row": {..}}
for each result, and {"done": true} or {"failed": why} at the end. It ends with its parent, or when its input ends. This
module and `commands` import no JAX.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
Stage = Callable[[str], None]  # called with what a case is doing
Work = Callable[[dict[str, Any], Stage], Iterator[Row]]

WORKER = (sys.executable, "-m", "mercury_jax.bench.gpu.runner")
BEAT = 10.0  # seconds between two progress lines
STARTING = 30.0  # further seconds for the first case of a process, which starts JAX and the device
TAIL = 600  # characters of the standard error of a dead process that its row contains
SWITCH = "MERCURY_KERNELS"  # as in `ops.device`, which would import JAX
# A killed child may hold its memory for a moment while the next one starts, so none preallocates all of it.
ALWAYS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}


class GpuCase(NamedTuple):
    """One unit of work in a child process.

    Attributes:
        name: Shown, and matched by `--only`.
        work: The function of `module` that does it, a `Work`.
        args: Its arguments, JSON-ready.
        limit: Seconds after which it is killed.
        least: Seconds that must be left to begin it.
        form: The kernel form (`ops.device`) it belongs to; empty for none.
        env: Environment variables of its process; MERCURY_KERNELS is unset unless it is among them.
        alone: Whether it shares no process with others.
        module: Imported by the child process alone.
    """

    name: str
    work: str
    args: dict[str, Any]
    limit: float = 30.0
    least: float = 4.0
    form: str = ""
    env: tuple[tuple[str, str], ...] = ()
    alone: bool = False
    module: str = "mercury_jax.bench.gpu.check"


# --- the parent


class Runner:
    """Runs cases one after another. `close` ends the last child: use it in `with contextlib.closing(...)`.

    Args:
        say: Called with a progress line every `beat` seconds.
    """

    def __init__(
        self,
        budget: float,
        worker: Sequence[str] = WORKER,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
        beat: float = BEAT,
    ) -> None:
        self._budget, self._end = budget, time.monotonic() + budget
        self._worker, self._say, self._beat = worker, say, beat
        self._child: _Child | None = None

    def run(self, case: GpuCase) -> list[Row]:
        """Runs a case.

        Returns:
            Its rows. Where it fails the last one has {"failed": why}; where no time is left the only one has
            {"not_run": "time"}.
        """
        shared = not case.alone and self._child is not None and self._child.env == case.env
        rows = list(self.stream(case))
        why = next((str(row.get("failed") or row.get("why")) for row in rows if troubled([row])), None)
        killed = any(row.get("killed") for row in rows)
        if shared and why is not None and not killed and self._end - time.monotonic() >= case.least:
            rows = [row | {"in_a_used_process": why[:300]} for row in self.stream(case)]
        return rows

    def stream(self, case: GpuCase) -> Iterator[Row]:
        """Runs a case once."""
        began, limit = time.monotonic(), case.limit
        if (left := self._end - began) < case.least:
            yield {"not_run": "time", "seconds_left": round(max(left, 0.0), 1)}
            return
        if case.alone or (self._child is not None and self._child.env != case.env):
            self.close()
        if self._child is None:
            self._child, limit = _Child(self._worker, case.env), limit + STARTING
        limit = min(limit, left)

        def tell(stage: str) -> None:
            now = time.monotonic()
            spent = f"{self._budget - (self._end - now):.0f} of {self._budget:.0f} s"
            self._say(f"{spent}, {case.name}: {stage}, {now - began:.0f} of at most {limit:.0f} s")

        trouble = False
        for row in self._child.run(case, limit, self._beat, tell):
            trouble |= troubled([row])
            yield row | {"seconds_of_case": round(time.monotonic() - began, 2)}
        if trouble or case.alone:
            self.close()

    def close(self) -> None:
        """Kills the child process, if there is one."""
        if self._child is not None:
            self._child.kill()
            self._child = None


def troubled(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a case failed or gave a wrong result, after which its process is not used again."""
    return any("failed" in row or row.get("passed") is False for row in rows)


def append(path: str | None, row: Mapping[str, Any]) -> None:
    """Appends a row to a JSONL file and waits until it is on the disk; does nothing where no path was given."""
    if path is not None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


class _Child:
    """A child process, with a thread that reads its answers into a queue; None marks their end."""

    def __init__(self, worker: Sequence[str], env: tuple[tuple[str, str], ...]) -> None:
        self.env = env
        variables = {k: v for k, v in os.environ.items() if k != SWITCH} | ALWAYS
        root = str(Path(__file__).parents[3])
        variables["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        for name, value in env:  # XLA_FLAGS are appended to the user's own
            variables[name] = f"{variables.get(name, '')} {value}".strip() if name == "XLA_FLAGS" else value
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (`kill` closes it)
        self._process = subprocess.Popen(
            list(worker), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True,
            env=variables, process_group=0,
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()

        def fill() -> None:
            with contextlib.suppress(ValueError):  # closed by `kill`
                for line in self._process.stdout or ():
                    self._lines.put(line)
            self._lines.put(None)

        threading.Thread(target=fill, daemon=True).start()

    def run(self, case: GpuCase, limit: float, beat: float, tell: Callable[[str], None]) -> Iterator[Row]:
        """The rows of a case. The last one has {"failed": why} after a failure, and {"killed": True} too after a
        hang."""
        end, stage = time.monotonic() + limit, "starting"
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # of a dead process, whose end is read below
            asked = {"module": case.module, "work": case.work, "args": case.args}
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        while (left := end - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=min(beat, left))
            except queue.Empty:
                tell(stage)
                continue
            if line is None:
                code = self._process.wait()
                name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                self._stderr.seek(0)
                yield {"failed": f"its process ended with {name}: {self._stderr.read()[-TAIL:].strip()}"}
                return
            try:
                answer = json.loads(line)
            except ValueError:
                continue  # what libraries print
            if not isinstance(answer, dict):
                continue
            stage = answer.get("stage", stage)
            if "row" in answer:
                yield answer["row"]
            if "failed" in answer:
                yield {"failed": answer["failed"]}
            if "failed" in answer or "done" in answer:
                return
        yield {"failed": f"killed after {limit:.0f} s while {stage}", "killed": True}

    def kill(self) -> None:
        """Kills the process group, and waits for at most 10 s: a driver may keep a process longer."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        for stream in filter(None, (self._process.stdin, self._process.stdout, self._stderr)):
            with contextlib.suppress(OSError):  # unwritten input of a dead process
                stream.close()


# --- the child


def main() -> int:
    """Answers the cases on standard input, one after the other."""
    if sys.platform == "linux":  # so that a killed command leaves nothing on the device
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print to standard output must not mix with the answers

    def say(**answer: Any) -> None:
        print(json.dumps(_finite(answer)), file=out, flush=True)

    for line in sys.stdin:
        case = json.loads(line)
        try:
            work: Work = getattr(importlib.import_module(case["module"]), case["work"])
            for row in work(case["args"], lambda stage: say(stage=stage)):
                say(row=row)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f" ({Path(place.filename).name}:{place.lineno})"
            say(failed=f"{type(error).__name__}: {error}"[:600] + where)
        else:
            say(done=True)
    return 0


def _finite(value: Any) -> Any:
    """The value with NaN and infinity, which JSON lacks, as text."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
