"""A server with scripted responses, for tests of the client without a model."""

import asyncio
import contextlib
import json
import threading


def chunks(*texts, finish="stop", tokens=None, done=1):
    """The events of a chat's stream as bytes."""
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": None} for text in texts]
    choices += [{"index": 0, "delta": {}, "finish_reason": finish}] if finish else []
    told = [json.dumps({"choices": [choice]}) for choice in choices]
    told += [json.dumps({"choices": [], "usage": {"completion_tokens": tokens or len(texts)}})]
    return b"".join(f"data: {data}\n\n".encode() for data in [*told, *["[DONE]"] * done])


def whole(value, status=200, headers=()):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def chunked(*pieces):
    """A chunked body, each piece sent separately."""
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"
    return [head, *(f"{len(p):x}\r\n".encode() + p + b"\r\n" for p in pieces), b"0\r\n\r\n"]


class Server:
    """answer(method, path, body) returns the bytes to send, or a list of pieces; None closes the connection."""

    def __init__(self, answer):
        self.answer, self.connections, self.now, self.most = answer, 0, 0, 0

    async def _serve(self, reader, writer):
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                size = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                body = await reader.readexactly(size)
                self.now += 1
                self.most = max(self.most, self.now)
                told = self.answer(method, path, json.loads(body) if body else None)
                told = await told if asyncio.iscoroutine(told) else told
                self.now -= 1
                for piece in told if isinstance(told, list) else [told]:
                    if piece is None:
                        return writer.close()
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        writer.close()
        return None

    @contextlib.asynccontextmanager
    async def open(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def run(answer, work):
    """(what `work(url)` returns, the server)."""
    server = Server(answer)

    async def inside():
        async with server.open() as url:
            return await work(url)

    return asyncio.run(inside()), server


@contextlib.contextmanager
def apart(answer):
    """The address of a server in another thread."""
    ready, urls, loop = threading.Event(), [], asyncio.new_event_loop()
    done = asyncio.Event()

    async def hold():
        async with Server(answer).open() as url:
            urls.append(url)
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(hold(),))
    thread.start()
    ready.wait(10)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
