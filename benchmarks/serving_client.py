"""Generates load on a server: a small HTTP client, and closed and open loops of requests.

`closed_loop` and `open_loop` send the requests and return a `RequestResult` for each. The client uses asyncio streams
and supports persistent connections, chunked bodies and server-sent events. It runs on the machine that it measures, so
it needs few resources: one reader and one writer per connection, and no threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from mercury_jax.config import refuse

Json = dict[str, Any]
LINE = 1 << 20  # longest line of a head or an event, in bytes
CHAT = "/v1/chat/completions"


# --- client


class BrokenResponse(ConnectionError):
    """The server closed a connection inside a response, or never responded."""


class HttpResponse(NamedTuple):
    """A complete response; the names of the headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Parses the body as JSON."""
        return json.loads(self.body)


class StreamedResponse:
    """A response after its head was read. The body can be read once, with `read`, `pieces` or `events`."""

    def __init__(self, status: int, headers: Mapping[str, str], connection: Connection):
        self.status, self.headers, self._connection = status, headers, connection
        self.complete = False

    async def pieces(self) -> AsyncIterator[bytes]:
        """Reads the body as it arrives.

        Yields:
            Bytes of the body.

        Raises:
            BrokenResponse: The body ends early.
        """
        reader = self._connection.reader
        try:
            if "chunked" in self.headers.get("transfer-encoding", "").lower():
                while size := int((await reader.readline()).split(b";")[0], 16):
                    yield (await reader.readexactly(size + 2))[:-2]
                await reader.readline()
            elif "content-length" in self.headers:
                yield await reader.readexactly(int(self.headers["content-length"]))
            elif self.status not in (204, 304):
                yield await reader.read()
        except (ValueError, asyncio.IncompleteReadError) as error:
            raise BrokenResponse(f"the body of a response of {self.status} ended early") from error
        self.complete = True

    async def read(self) -> HttpResponse:
        """Reads the whole response."""
        return HttpResponse(self.status, self.headers, b"".join([piece async for piece in self.pieces()]))

    async def events(self) -> AsyncIterator[str]:
        """Reads server-sent events; comments and other fields are skipped.

        Yields:
            The data of each event.

        Raises:
            BrokenResponse: The body ends early.
        """
        rest = b""
        async for piece in self.pieces():
            *blocks, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
            for block in blocks:
                lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line[:5] == b"data:"]
                if lines:
                    yield b"\n".join(lines).decode("utf-8")
        if rest.strip():
            raise BrokenResponse(f"a stream ended inside an event: {rest[:80]!r}")


class Connection(NamedTuple):
    """A TCP connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> StreamedResponse:
        """Sends a request and reads the head of the response.

        Args:
            data: The request.

        Returns:
            The response.

        Raises:
            BrokenResponse: The connection ends before a head was read.
        """
        # A server that refuses a request may respond and close the connection before it has read the whole request.
        with contextlib.suppress(OSError):
            self.writer.write(data)
            await self.writer.drain()
        return await self.read()

    async def read(self) -> StreamedResponse:
        """Reads the head of the next response.

        Raises:
            BrokenResponse: The connection ends before a head was read.
        """
        try:
            status = 100  # "Continue" announces another head
            while status == 100:
                head = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1")
                first, *lines = head.split("\r\n")
                status = int(first.split()[1])
        except (
            OSError,
            ValueError,
            IndexError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
        ) as error:
            raise BrokenResponse(f"no response: {type(error).__name__}") from error
        pairs = (line.partition(":") for line in lines)
        return StreamedResponse(status, {name.strip().lower(): x.strip() for name, _, x in pairs}, self)

    def drop(self) -> None:
        """Closes the connection immediately."""
        self.writer.transport.abort()


class Client:
    """Connections to one server, kept between requests; any number of tasks may use it at the same time.

    Args:
        url: http://HOST:PORT; a path is ignored.
        key: API key.
        keep: Whether to keep connections open between requests.

    Raises:
        ValueError: The URL has another form.
    """

    def __init__(self, url: str, key: str | None = None, keep: bool = True):
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise refuse("url", url, "http://HOST:PORT")
        self.url, self.host, self.port = url, parts.hostname, parts.port or 80
        self._key, self._keep = key, keep
        self._idle: list[Connection] = []

    async def ask(self, method: str, path: str, value: Any = None) -> HttpResponse:
        """Sends a request and reads the whole response.

        Args:
            method: Such as "POST".
            path: Such as "/v1/models".
            value: Body: bytes are sent unchanged, anything else as JSON; None: no body.

        Returns:
            Status, headers and body.
        """
        async with self.open(method, path, value) as response:
            return await response.read()

    @contextlib.asynccontextmanager
    async def open(self, method: str, path: str, value: Any = None) -> AsyncIterator[StreamedResponse]:
        """Sends a request; an async context manager. The connection is kept only if the block reads the whole body.

        Args:
            method: Such as "POST".
            path: Such as "/v1/models".
            value: Body; None for none.

        Yields:
            The response, with its head read.
        """
        response = await self._send(self.request(method, path, value))
        try:
            yield response
        finally:
            close = response.headers.get("connection", "").lower() == "close"
            if self._keep and response.complete and not close:
                self._idle.append(response._connection)
            else:
                response._connection.drop()

    def request(self, method: str, path: str, value: Any = None) -> bytes:
        """Encodes a request.

        Args:
            method: Such as "POST".
            path: Such as "/v1/models".
            value: Body; None for none.

        Returns:
            Head and body, as they are sent.
        """
        body = value if isinstance(value, bytes) else b"" if value is None else json.dumps(value).encode()
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}:{self.port}", f"Content-Length: {len(body)}"]
        lines += [] if value is None else ["Content-Type: application/json"]
        lines += [] if self._key is None else [f"Authorization: Bearer {self._key}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    async def connect(self) -> Connection:
        """Opens a new connection."""
        return Connection(*await asyncio.open_connection(self.host, self.port, limit=LINE))

    async def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().drop()

    async def _send(self, data: bytes) -> StreamedResponse:
        """Sends a request on an idle connection, or on a new one if the server has closed all idle ones."""
        while True:
            idle = self._idle.pop() if self._idle else None
            if idle is not None and idle.reader.at_eof():
                continue
            connection = await self.connect() if idle is None else idle
            try:
                return await connection.send(data)
            except BaseException as error:
                connection.drop()
                # The server may close an idle connection while the request is being sent: try again. On a new
                # connection, the error is real.
                if idle is None or not isinstance(error, BrokenResponse):
                    raise


# --- load


class LoadRequest(NamedTuple):
    """A request to send: its path, and its JSON body, which must request a stream."""

    path: str
    body: Json


class RequestResult(NamedTuple):
    """The result of one request. Times are seconds since the request was due.

    Attributes:
        status: HTTP status; 0 if the connection broke.
        whole: Time of the end of the response.
        first: Time of the first event with text; None if there was none.
        last: Time of the last event with text; None if there was none.
        text: The answer without its thinking.
        finishes: The finish reasons of all choices.
        dones: Number of `[DONE]` events.
        after: Number of other events after the first `[DONE]`.
        tokens: Completion tokens, from `usage`.
        refused: The body of an error response, or the broken connection in words.
        retry_after: The header of a refused request.
    """

    status: int
    whole: float
    first: float | None = None
    last: float | None = None
    text: str = ""
    finishes: tuple[str, ...] = ()
    dones: int = 0
    after: int = 0
    tokens: int = 0
    refused: str = ""
    retry_after: str | None = None

    @property
    def good(self) -> bool:
        """Whether the answer is complete: one finish reason, one `[DONE]`, and no error."""
        ends = (len(self.finishes), self.dones, self.after, self.refused)
        return self.status == 200 and ends == (1, 1, 0, "")


def chat(model: str, text: str, max_tokens: int, frames: bool = False, **more: Any) -> LoadRequest:
    """Makes a request for a streamed chat completion.

    Args:
        model: Name of the model on the server.
        text: The user's message.
        max_tokens: Largest number of tokens of the answer.
        frames: Whether every event holds the whole text after a step, instead of the added text.
        more: Additional fields of the body.

    Returns:
        The request.
    """
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "diffusing": frames, **more}
    return LoadRequest(CHAT, body)


async def fetch(client: Client, request: LoadRequest, due: float | None = None) -> RequestResult:
    """Sends a request when it is due, and reads its stream to the end.

    Args:
        client: Connections to the server.
        request: The request.
        due: Time to send it, on the clock `time.perf_counter`; times of the result are relative to it. Default: now.

    Returns:
        The result. Errors and broken connections are results as well.
    """
    due = time.perf_counter() if due is None else due
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    try:
        async with client.open("POST", request.path, request.body) as response:
            if response.status == 200:
                return await _read_stream(response, due, bool(request.body.get("diffusing")))
            message = (await response.read()).body.decode("utf-8", "replace")
            seconds, retry = time.perf_counter() - due, response.headers.get("retry-after")
            return RequestResult(response.status, seconds, refused=message, retry_after=retry)
    except (BrokenResponse, OSError) as error:
        return RequestResult(0, time.perf_counter() - due, refused=f"{type(error).__name__}: {error}")


async def _read_stream(response: StreamedResponse, due: float, frames: bool) -> RequestResult:
    """Reads the events of a stream. With `frames`, each text replaces the one before instead of extending it."""
    parts, finishes, seen = [], [], RequestResult(200, 0.0)
    async for data in response.events():
        now = time.perf_counter() - due
        if seen.dones:
            seen = seen._replace(after=seen.after + (data != "[DONE]"), dones=seen.dones + (data == "[DONE]"))
            continue
        if data == "[DONE]":
            seen = seen._replace(dones=1)
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            seen = seen._replace(refused=data)
        if chunk.get("usage"):
            seen = seen._replace(tokens=chunk["usage"]["completion_tokens"])
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            calls = delta.get("tool_calls") or ()
            text = choice.get("text") or delta.get("content")
            text = text or "".join(call["function"]["arguments"] for call in calls)
            if text:
                parts = [text] if frames else [*parts, text]
                seen = seen._replace(first=now if seen.first is None else seen.first, last=now)
            finishes += [choice["finish_reason"]] if choice.get("finish_reason") else []
    return seen._replace(whole=time.perf_counter() - due, text="".join(parts), finishes=tuple(finishes))


async def closed_loop(
    client: Client, requests: Sequence[LoadRequest], concurrency: int
) -> tuple[list[RequestResult], float]:
    """Sends requests with a number of clients, each of which waits for its response before its next request.

    Args:
        client: Connections to the server.
        requests: The requests.
        concurrency: Number of clients.

    Returns:
        (results in the order of the requests, total seconds).
    """
    results: dict[int, RequestResult] = {}
    todo = iter(enumerate(requests))

    async def one_client() -> None:
        for i, request in todo:
            results[i] = await fetch(client, request)

    with no_garbage_collection():
        began = time.perf_counter()
        await asyncio.gather(*(one_client() for _ in range(concurrency)))
        return [results[i] for i in range(len(requests))], time.perf_counter() - began


async def open_loop(
    client: Client, requests: Sequence[LoadRequest], rate: float, seed: int = 0
) -> tuple[list[RequestResult], float]:
    """Sends requests as a Poisson process, whether or not the server keeps up.

    The times of a request are relative to when it was due, so that delays in this client are not hidden.

    Args:
        client: Connections to the server.
        requests: The requests, in order.
        rate: Mean requests/s.
        seed: Seed of the arrivals.

    Returns:
        (results in the order of the requests, total seconds).
    """
    with no_garbage_collection():
        began = time.perf_counter()
        dues = (began + at for at in arrivals(rate, seed))
        results = await asyncio.gather(*(fetch(client, *pair) for pair in zip(requests, dues)))
        return list(results), time.perf_counter() - began


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disables Python's garbage collector, which pauses a process with JAX for a quarter of a second at a time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Draws the arrival times of a Poisson process, without end.

    Args:
        rate: Mean arrivals/s.
        seed: Seed of the arrivals.

    Yields:
        Seconds since the start, increasing.
    """
    draw, at = random.Random(seed), 0.0
    while True:
        at += draw.expovariate(rate)
        yield at


# --- figures


def percentiles(values: Iterable[float | None]) -> dict[str, float]:
    """Computes the 50th, 90th and 99th percentile of times, without interpolation.

    Args:
        values: Times; None is skipped.

    Returns:
        `p50`, `p90` and `p99`; NaN if there are no values.
    """
    found = [x for x in values if x is not None] or [math.nan]
    return {f"p{p}": float(np.percentile(found, p, method="inverted_cdf")) for p in (50, 90, 99)}


async def counters(client: Client) -> dict[str, float]:
    """Reads the metrics without labels from `/metrics`, by name; empty for a server without metrics."""
    response = await client.ask("GET", "/metrics")
    if response.status != 200:
        return {}
    lines = (line.split() for line in response.body.decode("utf-8").splitlines() if not line.startswith("#"))
    return {words[0]: float(words[1]) for words in lines if len(words) >= 2 and "{" not in words[0]}
