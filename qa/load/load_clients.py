"""Many clients: their requests, clients that disconnect, and the resources of a server process."""

import asyncio
import os
import random
import re
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.serving_client import BrokenResponse, Client, LoadRequest, chat, counters
from mercury_jax import tasks

MODEL = "nano"
NAMES = (
    "read", "close", "parse", "total", "sorted_by", "test_", "match", "encode", "find", "walk", "is_open",
)  # fmt: skip


def requests(count, max_tokens=40, frames=False, **more):
    """Different requests with deterministic answers: streamed chats and completions, in turn."""
    texts = [p.input for p in tasks.draw_distinct(tasks.TASKS["add3"], count, 0)]
    asks = [chat(MODEL, text, max_tokens, frames, temperature=0, **more) for text in texts]
    for i in range(1, count, 2):
        body = asks[i].body | {
            "prompt": f"def {NAMES[i % len(NAMES)]}{i}(self, ",
            "max_tokens": max_tokens // 2,
        }
        asks[i] = LoadRequest(
            "/v1/completions", {k: v for k, v in body.items() if k not in ("messages", "diffusing")}
        )
    return asks


def run(url, work, keep=True):
    """Runs `work(client)` in an event loop and returns its result."""

    async def inside():
        client = Client(url, keep=keep)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(inside())


async def wait_for_counters(client, until, seconds=60.0):
    """The metrics once `until` is true of them. TimeoutError after `seconds`."""
    end = time.perf_counter() + seconds
    while not until(found := await counters(client)):
        if time.perf_counter() > end:
            raise TimeoutError(f"the metrics were not as awaited within {seconds:g} s: {found}")
        await asyncio.sleep(0.01)
    return found


class Resources(NamedTuple):
    """Resources of a process: threads, open files and sockets, bytes of memory."""

    threads: int
    files: int
    bytes: int


def resources(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    number = lambda name: int(re.findall(rf"{name}:\s+(\d+)", status)[0])
    return Resources(number("Threads"), len(os.listdir(f"/proc/{pid}/fd")), 1024 * number("VmRSS"))


async def disconnect(client, ask, draw):
    """A client that disconnects at a random moment: while it sends, while it waits, or while it reads."""
    data = client.request("POST", ask.path, ask.body)
    moment = draw.choice(("head", "body", "at once", "soon", "reading", "reading", "halfway"))
    wire = await client.connect()
    try:
        if moment in ("head", "body"):
            wire.writer.write(data[: 40 if moment == "head" else -20])
            await wire.writer.drain()
            await asyncio.sleep(draw.random() * 0.05)
            return
        if moment == "at once":
            wire.writer.write(data)
            await wire.writer.drain()
            return
        if moment == "soon":
            wire.writer.write(data)
            await wire.writer.drain()
            await asyncio.sleep(draw.random())
            return
        reply = await asyncio.wait_for(wire.send(data), draw.random() if moment == "halfway" else 60)
        left = draw.randrange(4)
        async for _ in reply.events():
            if not left:
                return
            left -= 1
    except (TimeoutError, BrokenResponse, OSError):
        pass
    finally:
        if draw.random() < 0.5:
            wire.drop()
        else:
            wire.writer.close()


def disconnecting_clients(count, seed):
    """`count` clients that connect and disconnect within some seconds; half of them do not stream."""
    draw = random.Random(seed)
    asks = requests(16, max_tokens=80, frames=True)
    asks += [LoadRequest(ask.path, ask.body | {"stream": False}) for ask in asks]

    async def one(client, i):
        own = random.Random(draw.random())
        await asyncio.sleep(own.random() * count / 200)
        await disconnect(client, asks[i % len(asks)], own)

    async def every(client):
        await asyncio.gather(*(one(client, i) for i in range(count)))

    return every
