"""Runs a server in another process: `server` starts one, waits until it is ready, and ends it.

The process runs `python -m benchmarks.serving_process REQUEST`, where REQUEST is JSON such as
{"model": null, "how": {}, "settings": {"slots": 16}, "options": {}, "drain": 30}. It is the server of `mercury serve`,
on a free port and with all settings of the engine. It prints a JSON line {"url"} when it listens and a second one
{"ready"} when all programs are compiled, and runs until it receives a signal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = str(Path(__file__).parents[1])


class ServerProcess(NamedTuple):
    """A running server: its URL, its process, and the file with its standard error."""

    url: str
    process: subprocess.Popen[str]
    stderr: Path

    def end(self, seconds: float = 60.0) -> int:
        """Sends SIGTERM and waits for the process.

        Args:
            seconds: Longest time to wait.

        Returns:
            The exit code.

        Raises:
            subprocess.TimeoutExpired: The process has not ended in time.
        """
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextlib.contextmanager
def server(
    model: str | None = None,
    settings: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    how: Mapping[str, Any] | None = None,
    drain: float = 30.0,
    within: float = 1800.0,
    env: Mapping[str, str] | None = None,
) -> Iterator[ServerProcess]:
    """Starts a server on a free loopback port, yields it once all programs are compiled, and ends it.

    Args:
        model: A folder. Default: the embedded model.
        settings: Fields of `serve.engine.request.EngineConfig`.
        options: Fields of `serve.options.ServerOptions`.
        how: Further arguments of `mercury_jax.load`.
        drain: Seconds for which running requests may continue when the server ends.
        within: Largest number of seconds for loading and compiling.
        env: Variables that are added to the environment of this process.

    Yields:
        The running server.

    Raises:
        RuntimeError: The server ended before it was ready; the message has the last lines of its standard error.
    """
    request = {
        "model": model,
        "how": dict(how or {}),
        "settings": dict(settings or {}),
        "options": dict(options or {}),
        "drain": drain,
    }
    path = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        stderr = Path(folder) / "stderr"
        with stderr.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.serving_process", json.dumps(request)], stdout=subprocess.PIPE,
                stderr=file, text=True, env=os.environ | {"PYTHONPATH": path} | dict(env or {}),
            )  # fmt: skip
        late = threading.Timer(within, process.kill)
        late.start()
        try:
            own = ServerProcess(_next_line(process, stderr)["url"], process, stderr)
            _next_line(process, stderr)
            late.cancel()
            yield own
        finally:
            late.cancel()
            process.kill()
            process.wait()


def _next_line(process: subprocess.Popen[str], stderr: Path) -> dict[str, Any]:
    """Reads the next JSON line that the server prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        last = " | ".join(stderr.read_text(errors="replace").strip().splitlines()[-3:])
        raise RuntimeError(f"the server did not start, exit code {process.wait()}: {last}")
    return json.loads(line)


def main(request: dict[str, Any]) -> int:
    """Runs the server in this process until a signal ends it.

    Args:
        request: REQUEST of the command line.

    Returns:
        The exit code, 0.

    Raises:
        Exception: The error that ended the engine.
    """
    from mercury_jax import load
    from mercury_jax.serve.app import create_app
    from mercury_jax.serve.engine.engine import Engine
    from mercury_jax.serve.engine.request import EngineConfig
    from mercury_jax.serve.options import ServerOptions
    from mercury_jax.serve.server import Server, freeze_startup_objects, listen

    logging.basicConfig(stream=sys.stderr)
    lm = load(request.get("model"), **request.get("how", {}))
    engine = Engine(lm, EngineConfig(**request.get("settings", {})))
    app = create_app(engine, ServerOptions(**request.get("options", {})))
    server = Server(app, engine, request.get("drain", 30.0), freeze_startup_objects)
    socket = listen("127.0.0.1", 0)
    began = time.perf_counter()

    def say_ready() -> None:
        while not (engine.ready and engine.compiled):
            if server.failure is not None:
                return
            time.sleep(0.05)
        print(json.dumps({"ready": time.perf_counter() - began}), flush=True)

    print(json.dumps({"url": "http://{}:{}".format(*socket.getsockname()[:2])}), flush=True)
    threading.Thread(target=say_ready, daemon=True).start()
    server.run(sockets=[socket])
    if server.failure is not None:
        raise server.failure
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
