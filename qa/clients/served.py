"""A `mercury serve` process of nano on this machine, for clients that know its address only."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

READY = 300.0  # seconds that compiling may take on a busy machine
ENDED = 60.0  # seconds from a signal to the end of the process
# The clients run in environments of their own; MERCURY names the command of the one that has mercury_jax.
COMMAND = shlex.split(os.environ.get("MERCURY", str(Path(sys.executable).with_name("mercury"))))


class Server(NamedTuple):
    """url: without a path. process: for signals."""

    url: str
    process: subprocess.Popen[bytes]

    def status(self, path: str) -> int:
        """Of a GET; 0 where nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def wait(self, path: str) -> None:
        """Until a GET answers 200. RuntimeError where the process ends before, or takes too long."""
        end = time.monotonic() + READY
        while self.status(path) != 200:
            if self.process.poll() is not None:
                raise RuntimeError(f"mercury serve ended with exit code {self.process.returncode}")
            if time.monotonic() > end:
                raise RuntimeError(f"{path} did not answer 200 in {READY:.0f} s")
            time.sleep(0.1)

    def end(self) -> int:
        """SIGTERM, and the exit code of the drained server."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(ENDED)


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[Server]:
    """A server that answers already and may still compile; what is left of it is killed at the end."""
    port = _free_port()
    words: Sequence[str] = [*COMMAND, "serve", "--port", str(port), *flags]
    process = subprocess.Popen(words, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    try:
        server = Server(f"http://127.0.0.1:{port}", process)
        server.wait("/health")
        yield server
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
