"""A uvicorn server for an app and its engine: warmed up behind the open door, drained before it closes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from mercury_jax.config import refuse
from mercury_jax.serve.api import errors
from mercury_jax.serve.api.options import Options, loopback
from mercury_jax.serve.api.trace import HEADER_BYTES

HEADER_SECONDS = 15.0  # that they may take to arrive
KEEP_ALIVE = 30  # seconds that a connection may idle between two requests
STOP = 2.0  # seconds that cancelling may take
COMPILER = 10.0  # seconds that a running compilation may take to end; nothing interrupts it
FLUSH = 5  # seconds that the last answers have to reach their readers
NOTICE = 0.5  # seconds in which /ready fails and the door is still open, for a load balancer to see


def check_address(host: str, options: Options) -> None:
    """ValueError for an address that others can reach while no key is asked for."""
    if not options.keys and not loopback(host):
        raise refuse("host", host, "127.0.0.1, ::1 or localhost; any other needs an API key (--api-key)")


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, before anything slow begins; 0 finds a free port. ValueError where it cannot be had."""
    if not 0 <= port <= 65535:
        raise refuse("port", port, "0 to 65535; 0 finds a free one")
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        # Named as TCP, asyncio sends each event at once; unnamed, it waits for the last one's receipt, some 40 ms.
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        allowed = f"an address that is free here ({error.strerror})"
        raise refuse("host and port", f"{host}:{port}", allowed) from None
    return made


class Protocol(H11Protocol):
    """HTTP/1.1 whose headers must arrive in time, and whose own refusals are JSON like all others."""

    late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """The clock runs while a request has begun and its headers are not complete."""
        idle = self.cycle is None or self.cycle.response_complete
        if not idle or self.transport.is_closing():
            self._unwatch()
        elif self.late is None:
            self.late = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _unwatch(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unwatch()

    def send_400_response(self, msg: str) -> None:
        body = errors.dumps(errors.invalid(None, msg).envelope()).encode("ascii")
        head = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else an answer is under way already
            for event in (
                h11.Response(status_code=400, headers=head),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Server(uvicorn.Server):
    """Warms its engine up while it answers already. A signal drains: first /ready fails and new requests get 503,
    then running ones have `drain` seconds, then what is left is cancelled, and a compilation that runs may end within
    `COMPILER` seconds, since a process that ends while XLA compiles or writes its cache aborts or leaves half an entry
    there. A second signal cancels at once.

    on_ready: called, in a thread, when the engine is warm. failure: why it never was.
    """

    def __init__(
        self, app: ASGIApp, engine: Any, drain: float = 30.0, on_ready: Callable[[], None] = lambda: None
    ):
        super().__init__(_config(app))
        self.engine, self.drain, self.on_ready = engine, drain, on_ready
        self.failure: BaseException | None = None
        self._now = threading.Event()
        self._ending: threading.Thread | None = None
        self._warming = threading.Thread(target=self._warm, name="mercury-warm", daemon=True)
        self._stopping = threading.Thread(target=engine.stop, name="mercury-stop", daemon=True)

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self._warming.start()

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self._ending is not None:
            self._now.set()
            return
        self._ending = threading.Thread(target=self._end, name="mercury-drain", daemon=True)
        self._ending.start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal is not raised again: a drained server has done what it was asked to do."""
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
        try:
            self.engine.start()
            self.on_ready()
        except BaseException as error:
            self.failure = error
            self.should_exit = True

    def _end(self) -> None:
        self.engine.closing = True
        self._now.wait(NOTICE)
        drained = threading.Thread(target=self.engine.drain, args=(self.drain,), daemon=True)
        drained.start()
        while drained.is_alive() and not self._now.is_set():
            drained.join(0.05)
        self._stopping.start()
        self._stopping.join(STOP)
        until = time.monotonic() + COMPILER
        while self.compiling and not self._now.is_set() and time.monotonic() < until:
            time.sleep(0.05)
        self.should_exit = True

    @property
    def compiling(self) -> bool:
        """Whether a thread of the engine still compiles: it must not be there when the interpreter ends."""
        return self._stopping.is_alive() or self._warming.is_alive()


def settle() -> None:
    """Take what a process with a started server holds for good out of the garbage collector's sight, which else
    halts every thread for a quarter of a second each time that it looks at all of it."""
    gc.collect()
    gc.freeze()


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=FLUSH,
    )
