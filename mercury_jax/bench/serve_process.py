"""A server of our own in a process of its own: started, waited for, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

WORKER = Path(__file__).with_name("serve_worker.py")
ROOT = str(Path(__file__).parents[2])


class Own(NamedTuple):
    """A server that listens, its process, and the file of what it says on standard error."""

    url: str
    process: subprocess.Popen[str]
    said: Path

    def end(self, seconds: float = 60.0) -> int:
        """SIGTERM, as a load balancer's end; the exit code. subprocess.TimeoutExpired where it does not end."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextlib.contextmanager
def server(
    model: str | None = None,
    settings: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    drain: float = 30.0,
    within: float = 1800.0,
    env: Mapping[str, str] | None = None,
) -> Iterator[Own]:
    """A server on a free port of the loopback, every program compiled. RuntimeError where it does not get there.

    model: a folder (None: the embedded one). settings: of `serve.engine.Settings`. options: of `serve.options`.
    within: seconds for loading and compiling. env: what its environment has beside ours.
    """
    asked = {"model": model, "settings": dict(settings or {}), "options": dict(options or {}), "drain": drain}
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "stderr"
        with said.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, str(WORKER), json.dumps(asked)], stdout=subprocess.PIPE, stderr=file,
                text=True, env=os.environ | {"PYTHONPATH": _path()} | dict(env or {}),
            )  # fmt: skip
        late = threading.Timer(within, process.kill)
        late.start()
        try:
            own = Own(_line(process, said)["url"], process, said)
            _line(process, said)
            late.cancel()
            yield own
        finally:
            late.cancel()
            process.kill()
            process.wait()


def _path() -> str:
    return os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))


def _line(process: subprocess.Popen[str], said: Path) -> dict[str, Any]:
    """What the worker tells next."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        told = " | ".join(said.read_text(errors="replace").strip().splitlines()[-3:])
        raise RuntimeError(f"the server did not start, exit code {process.wait()}: {told}")
    return json.loads(line)
