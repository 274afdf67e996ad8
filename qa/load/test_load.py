"""A server under load: every request ends once, excess is refused at once, and no resources leak."""

import asyncio
import subprocess
import time

import pytest

from benchmarks import serving_client
from benchmarks.serving_client import BrokenResponse, LoadRequest
from qa.load.load_clients import MODEL, disconnecting_clients, requests, resources, run, wait_for_counters

MEBI = 1 << 20
FULL = 500  # number of clients from which on times are checked, too


async def quiet(client):
    """The counters when no request runs or waits."""
    return await wait_for_counters(client, lambda now: now["mercury_running"] == now["mercury_waiting"] == 0)


async def never_failed(client):
    """Checks that no response with a status of 5xx was counted."""
    text = (await client.ask("GET", "/metrics")).body.decode()
    assert [line for line in text.splitlines() if 'status="5' in line] == []
    assert "mercury_failed_total 0.0" in text and "mercury_structured_output_failures_total 0.0" in text


def test_every_request_ends_once_with_the_text_it_has_without_load(large_server, clients):
    asks = requests(max(clients // 10, 20))
    alone, _ = run(large_server.url, lambda client: serving_client.closed_loop(client, asks, 1))
    assert all(one.good for one in alone) and len({one.text for one in alone}) > len(asks) // 2
    crowd = [asks[i * 7 % len(asks)] for i in range(clients)]
    together, _ = run(large_server.url, lambda client: serving_client.closed_loop(client, crowd, clients))
    assert [one for one in together if not one.good] == []
    wanted = [alone[i * 7 % len(asks)] for i in range(clients)]
    assert [one.text for one in together] == [one.text for one in wanted]
    assert [one.finishes for one in together] == [one.finishes for one in wanted]
    run(large_server.url, never_failed)


def test_disconnecting_clients_leak_no_resources(large_server, clients):
    run(
        large_server.url, disconnecting_clients(max(clients // 4, 40), seed=1), keep=False
    )  # threads and caches reach their final size
    run(large_server.url, quiet)
    before = resources(large_server.process.pid)
    run(large_server.url, disconnecting_clients(clients, seed=2), keep=False)
    after = run(large_server.url, quiet)
    assert after["mercury_cancelled_total"] > clients / 10
    ended = sum(after[f"mercury_{name}_total"] for name in ("finished", "cancelled", "failed"))
    assert after["mercury_submitted_total"] == ended
    end = time.monotonic() + 10
    while resources(large_server.process.pid).files > before.files + 2 and time.monotonic() < end:
        time.sleep(0.1)
    now = resources(large_server.process.pid)
    assert now.files <= before.files + 2 and now.threads <= before.threads + 2
    assert now.bytes < before.bytes + 50 * MEBI
    run(large_server.url, never_failed)


def test_a_slot_is_free_one_step_after_its_client_disconnected(large_server):
    """One step runs and one is dispatched when a client disconnects; counts are read before and after."""
    asks = [
        LoadRequest(ask.path, ask.body | {"reasoning_effort": "high", "max_tokens": 160})
        for ask in requests(16)[1::2]
    ]

    async def scene(client):
        wires = [await client.connect() for _ in asks]
        replies = [
            await wire.send(client.request("POST", ask.path, ask.body))
            for wire, ask in zip(wires, asks, strict=True)
        ]
        assert {reply.status for reply in replies} == {200}
        running = await wait_for_counters(client, lambda now: now["mercury_running"] == len(asks))
        for wire in wires:
            wire.drop()
        return running, await quiet(client)

    before, after = run(large_server.url, scene)
    assert after["mercury_cancelled_total"] - before["mercury_cancelled_total"] == len(asks)
    assert after["mercury_device_passes_total"] - before["mercury_device_passes_total"] <= 6


def test_excess_is_refused_at_once_and_does_not_delay_accepted_requests(small_server, clients):
    asks = requests(64, frames=True)[::2]
    room = 4 + 12
    load = [asks[i % len(asks)] for i in range(max(clients // 5, 3 * room))]
    warm, _ = run(small_server.url, lambda client: serving_client.closed_loop(client, load[:room], room))
    full, seconds = run(small_server.url, lambda client: serving_client.closed_loop(client, load, room))
    assert all(one.good for one in warm + full)
    rate = 10 * len(load) / seconds
    many = [asks[i % len(asks)] for i in range(max(clients, int(rate)))]
    seen, _ = run(small_server.url, lambda client: serving_client.open_loop(client, many, rate))
    accepted, refused = [one for one in seen if one.good], [one for one in seen if one.status == 429]
    assert len(accepted) + len(refused) == len(many) and len(accepted) >= room
    assert len(refused) > 0.5 * len(many)
    assert all(int(one.retry_after) >= 1 and "rate_limit_reached" in one.refused for one in refused)
    if clients < FULL:  # with few clients, one delay of a shared machine decides
        return
    assert serving_client.percentiles([one.whole for one in refused])["p99"] < 0.1
    late = lambda found: serving_client.percentiles([one.first for one in found])["p99"]
    assert late(accepted) <= 2 * late(full)


def test_a_signal_drains_the_server_and_no_request_fails(small_server):
    """Runs last, since it ends the server: accepted requests are answered, later ones get 503."""
    asks = [LoadRequest(ask.path, ask.body | {"stream": i % 4 > 0}) for i, ask in enumerate(requests(14, 48))]

    async def answer(client, ask):
        if ask.body["stream"]:
            return (await serving_client.fetch(client, ask)).good
        answer = await client.ask("POST", ask.path, ask.body)
        return answer.status == 200 and len(answer.json()["choices"]) == 1

    async def late(client):
        """Statuses of requests sent while the server drains, until it accepts no connections."""
        told = set()
        body = {"model": MODEL, "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 8}
        while True:
            try:
                told.add((await client.ask("POST", serving_client.CHAT, body)).status)
            except (BrokenResponse, OSError):
                return told
            await asyncio.sleep(0.02)

    async def scene(client):
        tasks = [asyncio.ensure_future(answer(client, ask)) for ask in asks]
        inside = lambda now: now["mercury_running"] + now["mercury_waiting"] >= 10
        await wait_for_counters(client, inside)
        small_server.process.terminate()
        await asyncio.sleep(0.1)
        told = await late(client)
        return told, await asyncio.gather(*tasks)

    told, answered = run(small_server.url, scene, keep=False)
    assert all(answered)
    assert 503 in told and told <= {503}
    try:
        assert small_server.process.wait(30) == 0
    except subprocess.TimeoutExpired:
        pytest.fail("the server did not end")
    assert "Traceback" not in small_server.stderr.read_text()
