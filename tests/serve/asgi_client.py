"""Requests as bare ASGI, since HTTP clients normalise the path, the Host and the headers."""

import asyncio
import json
from typing import Any, NamedTuple
from urllib.parse import unquote


class AsgiResponse(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def send_request(app, method="GET", target="/", headers=(), body=b"", host=b"localhost") -> AsgiResponse:
    """Sends one request as uvicorn would pass it to the app."""
    return asyncio.run(_send_request(app, method, target, list(headers), body, host))


async def _send_request(app, method, target, headers, body, host):
    path, _, query = target.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
        "scheme": "http", "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(),
        "root_path": "", "headers": [*([] if host is None else [(b"host", host)]), *headers],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "state": {},
    }  # fmt: skip
    sent, parts = [], [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        while not parts:
            await asyncio.sleep(3600)
        return parts.pop()

    async def send(message):
        sent.append(message)

    await asyncio.wait_for(app(scope, receive, send), 30)
    head = sent[0]
    names = {name.decode("latin-1"): value.decode("latin-1") for name, value in head["headers"]}
    return AsgiResponse(head["status"], names, b"".join(m.get("body", b"") for m in sent[1:]))


class Connection:
    """A POST whose response is read with a pause of `gap` seconds per message, and which can disconnect."""

    def __init__(self, app, payload, path="/v1/chat/completions", gap=0.0, headers=()):
        self.app, self.gap, self.sent = app, gap, []
        self._body = json.dumps(payload).encode()
        self._left = asyncio.Event()
        self._task = None
        head = [(b"host", b"localhost"), (b"content-type", b"application/json"), *headers]
        self._scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
                       "method": "POST", "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "",
                       "query_string": b"", "headers": head, "client": None, "server": None, "state": {}}  # fmt: skip

    async def open(self):
        self._task = asyncio.ensure_future(self.app(self._scope, self._receive, self._send))
        await asyncio.sleep(0)

    def leave(self):
        self._left.set()

    def cancel(self):
        """Cancels the request as a server does that shuts down."""
        assert self._task is not None
        self._task.cancel()

    async def end(self):
        await asyncio.wait_for(self._task, 30)

    async def whole(self) -> AsgiResponse:
        if self._task is None:
            await self.open()
        await self.end()
        head = self.sent[0]
        names = {name.decode(): value.decode() for name, value in head["headers"]}
        return AsgiResponse(head["status"], names, self.text.encode())

    @property
    def text(self):
        return b"".join(message.get("body", b"") for message in self.sent[1:]).decode()

    async def _receive(self):
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        await asyncio.sleep(self.gap)
        if not self._left.is_set():
            self.sent.append(message)
