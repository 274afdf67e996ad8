"""The uvicorn server of an app and its engines.

The server accepts connections while the engines warm up (/ready fails until then), and drains running requests before
it exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from mercury_jax.config import refuse
from mercury_jax.serve.errors import invalid_request
from mercury_jax.serve.http import MAX_HEADER_BYTES, dump_json
from mercury_jax.serve.service import as_tuple

if TYPE_CHECKING:
    from mercury_jax.serve.engine.engine import Engine

HEADER_SECONDS = 15.0  # in which the headers of a request must arrive
KEEP_ALIVE_SECONDS = 30  # that a connection may idle between two requests
STOP_SECONDS = 2.0  # for cancelling what still runs
COMPILE_SECONDS = 10.0  # for a running compilation to end; nothing interrupts it
FLUSH_SECONDS = 1.0  # at least, for the last responses to reach their readers
# between a failing /ready and the end of the listening socket, for a load balancer to see
NOTICE_SECONDS = 0.5


def listen(host: str, port: int) -> socket.socket:
    """Binds a socket. Call it before any slow step, so that a port in use is reported at once."""
    if not 0 <= port <= 65535:
        raise refuse("port", port, "0 to 65535; 0 finds a free one")
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        # With an explicit protocol, asyncio sets TCP_NODELAY. Without it, each event would wait about 40 ms for the
        # acknowledgement of the previous one.
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port is {port}: it is in use on {host}. --port 0 finds a free one") from None
        if error.errno == errno.EACCES:
            raise ValueError(
                f"port is {port}: this account may not open it. --port 0 finds a free one"
            ) from None
        raise refuse("host", host, "an address or a name of this machine") from None
    return made


class BoundedH11Protocol(H11Protocol):
    """HTTP/1.1 with a deadline of `HEADER_SECONDS` for request headers, and with parse errors as JSON."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Starts the deadline for the first request."""
        super().connection_made(transport)
        self._set_deadline(True)

    def data_received(self, data: bytes) -> None:
        """Parses data, and cancels the deadline once the headers are complete."""
        super().data_received(data)
        # No request is being answered: the data belongs to a request whose headers are incomplete.
        idle = self.cycle is None or self.cycle.response_complete
        self._set_deadline(idle and not self.transport.is_closing())

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the deadline."""
        self._set_deadline(False)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Cancels the deadline: uvicorn's keep-alive timeout limits the time until the next request."""
        super().on_response_complete()
        self._set_deadline(False)

    def _set_deadline(self, waiting: bool) -> None:
        """Starts the deadline if headers are incomplete, else cancels it; a running deadline is not extended."""
        if waiting and self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)
        elif not waiting and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def send_400_response(self, msg: str) -> None:
        """Answers a request that is not HTTP."""
        body = dump_json(invalid_request(None, msg).envelope()).encode("ascii")
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else a response has begun already
            head = h11.Response(status_code=400, headers=headers)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Server(uvicorn.Server):
    """Accepts connections while the engine warms up in a thread, and drains on a signal.

    After SIGTERM or SIGINT:

        1. /ready fails, and new requests get 503.
        2. Running requests have `drain` seconds to finish; then the remaining ones are cancelled. Readers have the same
           time to take what was written; then their connections are closed.
        3. A running compilation has `COMPILE_SECONDS` to finish: a process that exits while XLA compiles or writes its
           cache may abort or leave an incomplete cache entry.

    A second signal ends steps 2 and 3 at once.

    Attributes:
        failure: The error with which an engine failed to start; None otherwise.
    """

    def __init__(
        self,
        app: ASGIApp,
        engines: Engine | Sequence[Engine],
        drain: float = 30.0,
        on_ready: Callable[[], None] = lambda: None,
    ):
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedH11Protocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
        )
        self.engines, self.drain, self.on_ready = as_tuple(engines), drain, on_ready
        self.failure: BaseException | None = None
        self._at_once = threading.Event()
        self._drained_by = 0.0  # `time.monotonic` at which running requests and their readers must have ended
        self._draining: threading.Thread | None = None
        self._warming = threading.Thread(target=self._warm, name="mercury-warm", daemon=True)
        # A thread per engine: one that still compiles must not delay the end of the others' requests.
        self._stopping = [
            threading.Thread(target=engine.stop, name="mercury-stop", daemon=True) for engine in self.engines
        ]

    async def startup(self, sockets: Any = None) -> None:
        """Starts to listen, and warms up the engines in a thread."""
        await super().startup(sockets)
        self._warming.start()

    async def shutdown(self, sockets: Any = None) -> None:
        """Waits until all responses have reached their readers, or the time to drain is over."""
        left = max(FLUSH_SECONDS, self._drained_by - time.monotonic())
        self.config.timeout_graceful_shutdown = left + 2 * FLUSH_SECONDS  # type: ignore[assignment]
        closing = asyncio.ensure_future(self._close_connections(left))
        await super().shutdown(sockets)
        closing.cancel()

    async def _close_connections(self, seconds: float) -> None:
        """Closes connections whose readers have stopped, after some seconds, or soon after a second signal.

        The app sees that its client is gone. A request without a response yet is left to uvicorn, which cancels it, and
        `http.RequestMiddleware` answers it.
        """
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds:
            if self._at_once.is_set() and passed > FLUSH_SECONDS:
                break
            await asyncio.sleep(0.05)
        for connection in list(self.server_state.connections):
            if not isinstance(connection, BoundedH11Protocol):
                continue
            if connection.cycle is None or connection.cycle.response_started:
                connection.transport.abort()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Starts to drain; a second signal ends the wait at once."""
        if self._draining is not None:
            self._at_once.set()
            return
        self._drained_by = time.monotonic() + self.drain
        self._draining = threading.Thread(target=self._shut_down, name="mercury-drain", daemon=True)
        self._draining.start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs the signal handlers as uvicorn does, but does not raise the signal again after the shutdown."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def _warm(self) -> None:
        """Starts the engines; an error ends the server and is kept in `failure`."""
        try:
            for engine in self.engines:
                if engine.closing:  # a signal came while another engine compiled
                    return
                engine.start()
            self.on_ready()
        except BaseException as error:
            self.failure = error
            self.should_exit = True

    def _shut_down(self) -> None:
        """Drains and stops the engines in threads, then lets uvicorn exit."""
        for engine in self.engines:
            engine.closing = True
        self._at_once.wait(NOTICE_SECONDS)
        draining = [
            threading.Thread(target=engine.drain, args=(self.drain,), daemon=True) for engine in self.engines
        ]
        for thread in draining:
            thread.start()
        while any(thread.is_alive() for thread in draining) and not self._at_once.is_set():
            time.sleep(0.05)
        for thread in self._stopping:
            thread.start()
        until = time.monotonic() + STOP_SECONDS
        for thread in self._stopping:
            thread.join(max(0.0, until - time.monotonic()))
        until = time.monotonic() + COMPILE_SECONDS
        while self.compiling and not self._at_once.is_set() and time.monotonic() < until:
            time.sleep(0.05)
        self.should_exit = True

    @property
    def compiling(self) -> bool:
        """Whether a thread of an engine is still compiling; the interpreter must not exit before it ends."""
        return any(thread.is_alive() for thread in (*self._stopping, self._warming))


def freeze_startup_objects() -> None:
    """Excludes all existing objects from garbage collection.

    A full collection over the objects of a warm server would stop every thread for about a quarter of a second.
    """
    gc.collect()
    gc.freeze()
