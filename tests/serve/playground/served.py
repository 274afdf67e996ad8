"""Servers of the app on a real socket, in a thread of the test's process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from mercury_jax.serve.app import create_app
from mercury_jax.serve.options import ServerOptions
from mercury_jax.serve.service import as_tuple
from mercury_jax.types import LM
from tests.serve.playground.scripted import Script, Scripted


class Served:
    """The app of one or several engines; `engine` is the first."""

    def __init__(self, engines, options=None):
        self.engines, self.socket = as_tuple(engines), socket.create_server(("127.0.0.1", 0))
        self.engine = self.engines[0]
        app = create_app(self.engines, options or ServerOptions())
        config = uvicorn.Config(
            app, log_level="warning", lifespan="off", ws="none", timeout_graceful_shutdown=1
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/"

    def __enter__(self) -> Served:
        for engine in self.engines:
            engine.start()
        self.thread.start()
        return self

    def __exit__(self, *error) -> None:
        for engine in self.engines:
            engine.stop()
        self.server.should_exit = True
        self.thread.join(10)
        self.socket.close()


@contextlib.contextmanager
def scripted_servers(lm: LM) -> Iterator[Callable[..., Served]]:
    """A function that starts a server of a scripted engine; all of them stop at the end."""
    with contextlib.ExitStack() as stack:

        def start(script: Script, options: ServerOptions | None = None) -> Served:
            return stack.enter_context(Served(Scripted(lm, script), options))

        yield start
