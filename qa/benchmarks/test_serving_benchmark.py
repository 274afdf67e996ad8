"""Load on a server: what a client counts, how loops send requests, and what limits batching."""

import asyncio
import json
import math

import pytest

from benchmarks import serving, serving_client, serving_runs
from benchmarks.serving_client import BrokenResponse, Client
from mercury_jax.cli.app import execute
from qa.benchmarks import scripted_server
from qa.benchmarks.scripted_server import chunked, chunks, run, whole

ASK = serving_client.chat("m", "hi", 8)


def asking(work):
    """A function of the URL that calls `work(client)` and closes the client."""

    async def inside(url):
        client = Client(url)
        try:
            return await work(client)
        finally:
            await client.close()

    return inside


def fetched(events, size=7, ask=ASK):
    pieces = [events[i : i + size] for i in range(0, len(events), size)]
    return run(lambda *_: chunked(*pieces), asking(lambda client: serving_client.fetch(client, ask)))[0]


# --- the client


def test_connections_are_kept_and_a_dead_one_is_replaced():
    async def several(client):
        return [(await client.ask("GET", path)).status for path in ("/a", "/b", "/a")]

    told, server = run(lambda *_: whole({}), asking(several))
    assert told == [200] * 3 and server.connections == 1
    closing = iter([whole({}), None, whole({}), whole({})])
    told, server = run(lambda *_: next(closing), asking(several))
    assert told == [200] * 3 and server.connections == 2


def test_leaving_early_drops_the_connection_and_a_truncated_response_is_an_error():
    async def peek(client):
        async with client.open("POST", "/a", {}) as reply:
            async for data in reply.events():
                await client.ask("GET", "/b")
                return data
        return ""

    events = chunks("a", "b")
    told, server = run(lambda m, *_: chunked(events) if m == "POST" else whole({}), asking(peek))
    assert json.loads(told)["choices"][0]["delta"] == {"content": "a"} and server.connections == 2

    async def cut(client):
        with pytest.raises(BrokenResponse):
            await client.ask("GET", "/a")
        return True

    assert run(lambda *_: [*chunked(events)[:-1], None], asking(cut))[0]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_is_read_the_same_however_it_is_split(size):
    seen = fetched(chunks("4", "2", tokens=5), size)
    assert seen.good and (seen.text, seen.finishes, seen.tokens) == ("42", ("stop",), 5)
    times = [0.0, seen.first, seen.last, seen.whole]
    assert None not in times and times == sorted(times)
    frames = serving_client.chat("m", "hi", 8, frames=True)
    assert fetched(chunks("4?", "42"), size, frames).text == "42"


@pytest.mark.parametrize(
    "events",
    [chunks("a", done=0), chunks("a", done=2), chunks("a", finish=None),
     chunks("a") + b'data: {"choices": []}\n\n', b'data: {"error": {"message": "no"}}\n\n' + chunks("a"),
     chunks("a", "b")[:-3]],
    ids=["no done", "two dones", "no finish", "an event behind", "an error", "cut"],
)  # fmt: skip
def test_only_an_answer_with_exactly_one_end_counts(events):
    assert fetched(chunks("a")).good and not fetched(events).good


def test_a_refusal_differs_from_a_broken_connection():
    refusal = whole({"error": {"message": "busy"}}, 429, ["retry-after: 3"])
    seen, _ = run(lambda *_: refusal, asking(lambda client: serving_client.fetch(client, ASK)))
    assert (seen.status, seen.retry_after, seen.good) == (429, "3", False) and "busy" in seen.refused
    seen, _ = run(lambda *_: None, asking(lambda client: serving_client.fetch(client, ASK)))
    assert seen.status == 0 and not seen.good


# --- load


def slow(seconds):
    async def answer(method, path, body):
        await asyncio.sleep(seconds)
        return chunked(chunks(body["messages"][0]["content"]))

    return answer


def test_a_closed_loop_keeps_its_concurrency_and_the_order():
    asks = [serving_client.chat("m", str(i), 8) for i in range(12)]
    (seen, seconds), server = run(
        slow(0.02), asking(lambda client: serving_client.closed_loop(client, asks, 3))
    )
    assert [one.text for one in seen] == [str(i) for i in range(12)]
    assert server.most == server.connections == 3 and seconds >= 4 * 0.02


def test_an_open_loop_hides_no_delay():
    """One answer at a time, and arrivals four times as fast: the last request waits for all before it."""
    turn = asyncio.Lock()

    async def answer(method, path, body):
        async with turn:
            await asyncio.sleep(0.02)
        return chunked(chunks("a"))

    asks = [ASK] * 20
    (seen, _), server = run(answer, asking(lambda client: serving_client.open_loop(client, asks, 200.0)))
    assert server.most > 5 and seen[-1].whole > 10 * 0.02
    gaps = [at for at, _ in zip(serving_client.arrivals(50.0, 1), range(4000))]
    assert gaps == sorted(gaps) and gaps[-1] == pytest.approx(80, rel=0.1)


def test_percentiles_are_measured_values():
    assert serving_client.percentiles(range(1, 101)) == {"p50": 50, "p90": 90, "p99": 99}
    assert serving_client.percentiles([3.0, None, 1.0])["p50"] == 1.0
    assert math.isnan(serving_client.percentiles([None])["p50"])


# --- rows


def talker(method, path, body):
    """A scripted server with the routes that the benchmark uses."""
    if path == "/v1/models":
        return whole({"data": [{"id": "m"}]})
    if path == "/metrics":
        talker.count += 1
        return whole(
            f"# x\nmercury_tokens_total {40 * talker.count}\nmercury_forwards_total {10 * talker.count}\n".encode()
        )
    if body.get("stream"):
        return chunked(chunks("a", "b", tokens=4))
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    message = (
        {"content": None, "tool_calls": [call]} if body.get("tool_choice") == "required" else {"content": "5"}
    )
    return whole({"choices": [{"message": message}], "usage": {"completion_tokens": 6}})


@pytest.mark.slow
def test_records_have_every_figure_and_the_fewest_clients_are_the_baseline():
    talker.count = 0
    load = serving_runs.Load(concurrency=(2, 1), requests=4, turns=2, rate=500.0, tasks=("add3",), agent=2)
    with scripted_server.apart(talker) as url:
        found = list(serving_runs.against(url, load))
    one, two, opened, agent = found
    assert [row["load"] for row in found] == ["closed", "closed", "open", "agent"]
    assert (one["concurrency"], one["throughput_ratio"], two["concurrency"]) == (1, 1.0, 2)
    assert all(row["good"] == row["requests"] > 0 == row["failed"] for row in (one, two, opened))
    assert one["tokens_per_forward"] == 4.0 and one["tokens"] == 4 and opened["rate"] == 500.0
    assert all(set(row["first_frame"]) == {"p50", "p90", "p99"} for row in (one, two, opened))
    assert agent["calls"] == agent["valid_calls"] == 2 * agent["loops"] > 0 and agent["turns"] == 3
    assert all(row["hardware"] and row["compared_with"] for row in found)
    json.dumps(found)


def test_an_agent_counts_calls_with_invalid_arguments():
    assert serving_runs.run_tool({"name": "multiply", "arguments": '{"a": 2, "b": 3}'}) == 6
    bad = [
        ("add", "{"), ("add", '{"a": 1}'), ("add", '{"a": "x", "b": 1}'), ("none", '{"a": 1, "b": 1}'),
        ("add", "3"),
    ]  # fmt: skip
    assert [serving_runs.run_tool({"name": name, "arguments": text}) for name, text in bad] == [None] * len(
        bad
    )


# --- what bounds it


def bound(longer, rates):
    return serving_runs.BatchingBound({1: 1.0, 16: longer}, 16 / longer, dict(zip((1, 16), rates)), 100.0)


def test_the_figures_explain_what_limits_batching():
    words = lambda speedup, found: serving_runs.explain(speedup, found, 4.0)
    assert words(5.0, bound(2.0, (10, 80))).startswith("nothing")
    assert words(1.9, bound(8.0, (45, 90))).startswith(
        "the arithmetic of the forward pass: a pass of 16 rows takes 8.0"
    )
    assert "45% of the rate" in words(1.9, bound(8.0, (45, 90)))
    assert words(2.0, bound(2.0, (10, 80))).startswith("the server around the device, which reaches 25%")


@pytest.mark.long
def test_the_device_program_is_timed_in_the_middle_of_answers(monkeypatch):
    """Every row accepts tokens in every pass that is timed."""
    from tests.tiny import tiny

    seen = []
    step = serving_runs.programs.run_passes
    monkeypatch.setattr(serving_runs, "PASSES", 3)
    monkeypatch.setattr(
        serving_runs.programs, "run_passes", lambda *args: seen.append(step(*args)) or seen[-1]
    )
    part = serving_runs.device_program(tiny(), 2, 64, ("confidence",))
    assert serving_runs.seconds_per_pass(part) > 0
    assert [result.frames.used[0].tolist() for result in seen[1:]] == [[8, 8]] * 4
    assert seen[-1].report.done.tolist() == [False, False] and int(seen[-1].passes) == 1


# --- the command line


@pytest.mark.parametrize(
    "argv, words",
    [(["--url", "ftp://x"], ["url", "'ftp://x'", "http://HOST:PORT"]),
     (["--requests", "0"], ["requests", "0"]), (["--concurrency", "0"], ["concurrency", "0"]),
     (["--rate", "-1"], ["rate", "-1"]), (["--tasks", "ad3"], ["'ad3'", "add3"]),
     (["--tasks", "code-bpb"], ["'code-bpb'"])],
    ids=lambda value: " ".join(value),
)  # fmt: skip
def test_the_command_refuses_bad_input(argv, words, capsys):
    assert execute(serving.run, argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and [w for w in words if w not in err] == []


@pytest.mark.slow
def test_the_command_prints_what_a_running_server_reaches(tmp_path, capsys):
    talker.count = 0
    argv = [
        "--concurrency", "1", "2", "--requests", "2", "--turns", "1", "--rate", "50", "--tasks", "add3",
        "--out",
    ]  # fmt: skip
    with scripted_server.apart(talker) as url:
        assert execute(serving.run, ["--url", url, *argv, str(tmp_path / "rows.jsonl")]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [text.split(":")[0] for text in told] == [
        "closed, 1 at a time",
        "closed, 2 at a time",
        "open, 50/s",
    ]
    assert all("tokens/s" in text and "p50 / p90 / p99 of first frame" in text for text in told)
    assert "4.0 tokens per forward pass" in told[0] and not any("refused" in text for text in told)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(told)
