"""Whatever bytes come, the server says no in its own words, at once, and holds on to nothing."""

import asyncio
import collections
import json
import random
from typing import NamedTuple

from benchmarks.serving_client import BrokenResponse
from qa.fuzz import bodies, heads
from qa.load.load_clients import resources, run

HANG = 30.0  # seconds: an answer that fills the context under a grammar takes 2 of an idle core
GAP = 120.0  # seconds: filling a gap between two texts compiles a program where its shape is new
PATIENCE = 10.0  # seconds until a request counts as one that is not complete: more than the server's own
TOGETHER, WAITING = 6, 24  # clients that send bodies, and that send heads and mostly wait
GROWTH = 50 << 20


class Told(NamedTuple):
    """What a request was, and what came back; status 0: nothing, -1: not in time."""

    sent: bytes
    status: int
    body: bytes

    @property
    def wrong(self):
        """Neither an answer nor a refusal in the API's envelope."""
        if 200 <= self.status < 300:
            return False
        return not 400 <= self.status < 500 or not refusal(self.body)


def refusal(body):
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return {"message", "type", "param", "code"} == set(error) and isinstance(error["message"], str)


async def several(client, cases, one, together=TOGETHER):
    """What `one(client, case)` makes of every case, some at a time."""
    todo, told = iter(cases), []

    async def worker():
        for case in todo:
            told.append(await one(client, case))

    await asyncio.gather(*(worker() for _ in range(together)))
    return told


async def sent(client, case):
    """A body through a kept connection, as a client sends it."""
    path, body = case
    try:
        async with asyncio.timeout(GAP if b"suffix" in body else HANG):
            answer = await client.ask("POST", path, body)
        return Told(body, answer.status, answer.body)
    except BrokenResponse:
        return Told(body, 0, b"")
    except TimeoutError:
        return Told(body, -1, b"")


async def raw(client, data):
    """Bytes on a connection of their own; the first answer counts. Where none comes, because the bytes promise more,
    the sending end is closed, and the server has to let go."""
    wire = await client.connect()
    reading = asyncio.ensure_future(wire.read())
    try:
        wire.writer.write(data)
        await asyncio.wait([reading], timeout=PATIENCE)
        if not reading.done():
            wire.writer.write_eof()
        async with asyncio.timeout(HANG):
            reply = await reading
            answer = await reply.read() if not data.startswith(b"HEAD ") else None
        return Told(data, reply.status, b"" if answer is None else answer.body)
    except TimeoutError:
        return Told(data, -1, b"")
    except (BrokenResponse, OSError):
        return Told(data, 0, b"")
    finally:
        reading.cancel()
        wire.drop()


def report(told, before, now):
    counts = collections.Counter(one.status for one in told)
    print(f"{len(told)} requests, answers by status {sorted(counts.items())}, {before} became {now}")


async def alive(client):
    return (await client.ask("GET", "/ready")).status == 200


def right(cases):
    # The first gaps of each shape compile a program.
    return [ask for ask in bodies.RIGHT if cases >= bodies.FULL or "suffix" not in ask[1]]


def test_what_is_made_odd_was_right(server, cases):
    asked = [bodies.whole(*ask) for ask in right(cases)]
    told = run(server.url, lambda client: several(client, asked, sent))
    assert [(one.status, one.sent, one.body[:200]) for one in told if one.status != 200] == []


def test_no_body_is_too_odd_to_be_refused(server, cases):
    draw = random.Random(5)
    mutants = [bodies.mutated(draw, right(cases)) for _ in range(10 * cases)]
    first, rest = mutants[: len(mutants) // 5], mutants[len(mutants) // 5 :]
    told = run(server.url, lambda client: several(client, first, sent))
    before = resources(server.process.pid)
    told += run(server.url, lambda client: several(client, rest, sent))
    now = resources(server.process.pid)
    report(told, before, now)
    assert [(one.status, one.sent[:400], one.body[:200]) for one in told if one.wrong] == []
    refused = sum(one.status >= 400 for one in told)
    assert refused > len(told) / 3 and refused < len(told)  # chance leaves some of them right
    assert now.bytes < before.bytes + GROWTH and now.threads <= before.threads + 8
    assert run(server.url, alive)


def test_no_head_is_too_odd_to_be_refused(server, cases):
    """Where a request is not complete, closing the connection is an answer, too."""
    draw = random.Random(6)
    odd = [heads.odd(draw) for _ in range(max(cases, 200))]
    before = resources(server.process.pid)
    told = run(server.url, lambda client: several(client, odd, raw, WAITING))
    now = resources(server.process.pid)
    report(told, before, now)
    silent = [one for one in told if one.status == 0]
    bad = [one for one in told if one.status and one.wrong and not one.sent.startswith(b"HEAD ")]
    assert [(one.status, one.sent[:400], one.body[:200]) for one in bad] == []
    assert len(silent) < len(told) / 3
    assert {one.status for one in told} >= {200, 400, 403, 404, 415}
    assert now.bytes < before.bytes + GROWTH and now.files <= before.files + 2
    assert run(server.url, alive)
    assert "Traceback" not in server.stderr.read_text(errors="replace")
