"""The laws of a server under load: one end for each request, refusals at once, and nothing left behind."""

import asyncio
import subprocess
import time

import pytest

from mercury_jax.bench import serve_load
from mercury_jax.bench.serve_load import BrokenResponse, LoadRequest
from tests.load.crowd import MODEL, held, leavers, questions, run

MEBI = 1 << 20
FULL = 500  # clients from which on times are part of the law


async def quiet(client):
    """The counters once nothing runs and nothing waits."""
    return await serve_load.wait_for_counters(
        client, lambda now: now["mercury_running"] == now["mercury_waiting"] == 0
    )


async def never_failed(client):
    """No answer of 5xx was counted."""
    text = (await client.ask("GET", "/metrics")).body.decode()
    assert [line for line in text.splitlines() if 'status="5' in line] == []
    assert "mercury_failed_total 0.0" in text and "mercury_structured_output_failures_total 0.0" in text


def test_everyone_gets_one_end_and_the_text_of_being_alone(wide, clients):
    asks = questions(max(clients // 10, 20))
    alone, _ = run(wide.url, lambda client: serve_load.closed_loop(client, asks, 1))
    assert all(one.good for one in alone) and len({one.text for one in alone}) > len(asks) // 2
    crowd = [asks[i * 7 % len(asks)] for i in range(clients)]
    together, _ = run(wide.url, lambda client: serve_load.closed_loop(client, crowd, clients))
    assert [one for one in together if not one.good] == []
    wanted = [alone[i * 7 % len(asks)] for i in range(clients)]
    assert [one.text for one in together] == [one.text for one in wanted]
    assert [one.finishes for one in together] == [one.finishes for one in wanted]
    run(wide.url, never_failed)


def test_those_who_leave_leave_nothing_behind(wide, clients):
    run(wide.url, leavers(max(clients // 4, 40), seed=1), keep=False)  # threads and caches grow to their size
    run(wide.url, quiet)
    before = held(wide.process.pid)
    run(wide.url, leavers(clients, seed=2), keep=False)
    after = run(wide.url, quiet)
    assert after["mercury_cancelled_total"] > clients / 10
    ended = sum(after[f"mercury_{name}_total"] for name in ("finished", "cancelled", "failed"))
    assert after["mercury_submitted_total"] == ended
    end = time.monotonic() + 10
    while held(wide.process.pid).files > before.files + 2 and time.monotonic() < end:
        time.sleep(0.1)
    now = held(wide.process.pid)
    assert now.files <= before.files + 2 and now.threads <= before.threads + 2
    assert now.bytes < before.bytes + 50 * MEBI
    run(wide.url, never_failed)


def test_a_slot_is_free_one_step_after_its_client_left(wide):
    """A step is under way, and one is sent already, when the word comes; the counts are read before and after."""
    asks = [
        LoadRequest(ask.path, ask.body | {"reasoning_effort": "high", "max_tokens": 160})
        for ask in questions(16)[1::2]
    ]

    async def scene(client):
        wires = [await client.connect() for _ in asks]
        replies = [
            await wire.send(client.request("POST", ask.path, ask.body))
            for wire, ask in zip(wires, asks, strict=True)
        ]
        assert {reply.status for reply in replies} == {200}
        running = await serve_load.wait_for_counters(client, lambda now: now["mercury_running"] == len(asks))
        for wire in wires:
            wire.drop()
        return running, await quiet(client)

    before, after = run(wide.url, scene)
    assert after["mercury_cancelled_total"] - before["mercury_cancelled_total"] == len(asks)
    assert after["mercury_device_passes_total"] - before["mercury_device_passes_total"] <= 6


def test_excess_is_refused_at_once_and_the_accepted_do_not_wait_for_it(narrow, clients):
    asks = questions(64, frames=True)[::2]
    room = 4 + 12
    load = [asks[i % len(asks)] for i in range(max(clients // 5, 3 * room))]
    warm, _ = run(narrow.url, lambda client: serve_load.closed_loop(client, load[:room], room))
    full, seconds = run(narrow.url, lambda client: serve_load.closed_loop(client, load, room))
    assert all(one.good for one in warm + full)
    rate = 10 * len(load) / seconds
    many = [asks[i % len(asks)] for i in range(max(clients, int(rate)))]
    seen, _ = run(narrow.url, lambda client: serve_load.open_loop(client, many, rate))
    accepted, refused = [one for one in seen if one.good], [one for one in seen if one.status == 429]
    assert len(accepted) + len(refused) == len(many) and len(accepted) >= room
    assert len(refused) > 0.5 * len(many)
    assert all(int(one.retry_after) >= 1 and "rate_limit_reached" in one.refused for one in refused)
    if clients < FULL:  # of a few, one hiccup of a shared machine decides
        return
    assert serve_load.percentile([one.whole for one in refused], 99) < 0.1
    late = lambda found: serve_load.percentile([one.first for one in found], 99)
    assert late(accepted) <= 2 * late(full)


def test_a_signal_drains_and_nothing_fails(narrow):
    """The last one: it ends the server. Whoever was let in is answered; whoever comes later is told to go elsewhere."""
    asks = [
        LoadRequest(ask.path, ask.body | {"stream": i % 4 > 0}) for i, ask in enumerate(questions(14, 48))
    ]

    async def answer(client, ask):
        if ask.body["stream"]:
            return (await serve_load.fetch(client, ask)).good
        answer = await client.ask("POST", ask.path, ask.body)
        return answer.status == 200 and len(answer.json()["choices"]) == 1

    async def late(client):
        """What those are told who come while the server drains, until the door is closed."""
        told = set()
        body = {"model": MODEL, "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 8}
        while True:
            try:
                told.add((await client.ask("POST", serve_load.CHAT, body)).status)
            except (BrokenResponse, OSError):
                return told
            await asyncio.sleep(0.02)

    async def scene(client):
        tasks = [asyncio.ensure_future(answer(client, ask)) for ask in asks]
        inside = lambda now: now["mercury_running"] + now["mercury_waiting"] >= 10
        await serve_load.wait_for_counters(client, inside)
        narrow.process.terminate()
        await asyncio.sleep(0.1)
        told = await late(client)
        return told, await asyncio.gather(*tasks)

    told, answered = run(narrow.url, scene, keep=False)
    assert all(answered)
    assert 503 in told and told <= {503}
    try:
        assert narrow.process.wait(30) == 0
    except subprocess.TimeoutExpired:
        pytest.fail("the server did not end")
    assert "Traceback" not in narrow.said.read_text()
