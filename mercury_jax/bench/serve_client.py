"""A small HTTP client over asyncio streams: kept connections, chunked bodies, server-sent events.

It adds little to what it measures: one reader and one writer a connection, and no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from mercury_jax.config import refuse

Json = Any
LINE = 1 << 20  # bytes of the longest line of a head or of an event


class Broken(ConnectionError):
    """The server closed a connection in the middle of an answer, or never answered at all."""


class Answer(NamedTuple):
    """A whole answer; headers by their names in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Json:
        return json.loads(self.body)


class Reply:
    """An answer whose head is there and whose body is still to be read, once: whole, or as events."""

    def __init__(self, status: int, headers: Mapping[str, str], wire: Wire):
        self.status, self.headers, self._wire = status, headers, wire
        self.complete = False

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Broken where it ends early."""
        reader = self._wire.reader
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
            raise Broken(f"the body of an answer of {self.status} ended early") from error
        self.complete = True

    async def read(self) -> Answer:
        return Answer(self.status, self.headers, b"".join([piece async for piece in self.pieces()]))

    async def events(self) -> AsyncIterator[str]:
        """The data of each event, one after the other; remarks and other fields are passed over."""
        rest = b""
        async for piece in self.pieces():
            *blocks, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
            for block in blocks:
                lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line[:5] == b"data:"]
                if lines:
                    yield b"\n".join(lines).decode("utf-8")
        if rest.strip():
            raise Broken(f"a stream ended inside of an event: {rest[:80]!r}")


class Wire(NamedTuple):
    """A connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> Reply:
        """Send a request; the reply with its head read. Broken where none comes."""
        with contextlib.suppress(OSError):  # it may have been refused half-way, and the answer is there
            self.writer.write(data)
            await self.writer.drain()
        return await self.read()

    async def read(self) -> Reply:
        """The next reply, its head read. Broken where none comes."""
        try:
            while (head := await self.head())[0] == 100:
                pass
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise Broken(f"no answer: {type(error).__name__}") from error
        return Reply(*head, self)

    async def head(self) -> tuple[int, dict[str, str]]:
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return int(first.split()[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}

    def drop(self) -> None:
        """Close at once, whatever is under way."""
        self.writer.transport.abort()


class Client:
    """Connections to one server, kept between requests; any number of tasks may use it at once.

    url: `http://host:port`, with or without a path behind it, which is left out. key: an API key.
    """

    def __init__(self, url: str, key: str | None = None, keep: bool = True):
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise refuse("url", url, "http://HOST:PORT")
        self.url, self.host, self.port = url, parts.hostname, parts.port or 80
        self._key, self._keep = key, keep
        self._idle: list[Wire] = []

    async def ask(self, method: str, path: str, value: Json = None) -> Answer:
        """The whole answer to a request; value: sent as JSON, bytes as they are."""
        async with self.open(method, path, value) as reply:
            return await reply.read()

    @contextlib.asynccontextmanager
    async def open(self, method: str, path: str, value: Json = None) -> AsyncIterator[Reply]:
        """A reply to read. Left before it is complete, it drops the connection: the client has gone."""
        reply = await self._sent(self.request(method, path, value))
        try:
            yield reply
        finally:
            kept = self._keep and reply.complete and reply.headers.get("connection", "").lower() != "close"
            if kept:
                self._idle.append(reply._wire)
            else:
                reply._wire.drop()

    def request(self, method: str, path: str, value: Json = None) -> bytes:
        """A request's bytes."""
        body = (
            b"" if value is None else value if isinstance(value, bytes) else json.dumps(value).encode("utf-8")
        )
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}:{self.port}", f"Content-Length: {len(body)}"]
        lines += [] if value is None else ["Content-Type: application/json"]
        lines += [] if self._key is None else [f"Authorization: Bearer {self._key}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    async def wire(self) -> Wire:
        """A fresh connection."""
        return Wire(*await asyncio.open_connection(self.host, self.port, limit=LINE))

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().drop()

    async def _sent(self, data: bytes) -> Reply:
        while (
            self._idle
        ):  # the server may have closed an idle connection at any moment; a fresh one is tried then
            wire = self._idle.pop()
            if not wire.reader.at_eof():
                with contextlib.suppress(Broken):
                    return await self._on(wire, data)
        return await self._on(await self.wire(), data)

    async def _on(self, wire: Wire, data: bytes) -> Reply:
        try:
            return await wire.send(data)
        except BaseException:
            wire.drop()
            raise
