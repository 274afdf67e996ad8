"""How requests end that do not come to their own end: errors, overload, readers that leave or stall."""

import asyncio
import contextlib
import json
import threading
import time

import pytest

from mercury_jax.serve.api import Options, create_app
from tests.serve.api.knock import Line
from tests.serve.api.scripted import Scripted, saying, snapshot
from tests.serve.api.wired import ASK, TEXT, client_of, events, said


@pytest.mark.parametrize(
    "finish, status, code", [("error", 500, "server_error"), ("cancelled", 503, "overloaded")]
)
def test_a_job_that_fails_is_one_error_and_tells_nothing_of_the_inside(nano, finish, status, code):
    secret = "0xdeadbeef in /srv/engine.py"
    script = [*saying(nano, "347+5", "347+58")[:1], snapshot([], finish=finish, message=secret)]
    answer = client_of(Scripted(nano, script)).post("/v1/chat/completions", json=ASK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (
        status,
        code,
    ) and secret not in answer.text
    chunks = events(Scripted(nano, script, pause=0.01), ASK)
    assert [("error" in chunk) for chunk in chunks].count(True) == 1 and chunks[-1]["error"]["code"] == code
    assert secret not in str(chunks) and not any(
        c["finish_reason"] for chunk in chunks[:-1] for c in chunk["choices"]
    )
    if finish == "error":
        assert answer.headers["x-request-id"] in answer.json()["error"]["message"]


def test_what_is_not_foreseen_is_500_with_an_id_and_no_more(nano):
    def explode(job):
        raise RuntimeError("the secret of the house")

    engine = Scripted(nano)
    engine.submit = explode
    answer = client_of(engine).post("/v1/chat/completions", json=ASK, headers={"x-request-id": "mine-7"})
    assert (
        answer.status_code == 500
        and "secret" not in answer.text
        and "mine-7" in answer.json()["error"]["message"]
    )
    assert answer.headers["x-request-id"] == "mine-7"
    for odd in ("a b", "x" * 65, "é".encode(), "a\nb: c"):
        made = client_of(engine).get("/health", headers={"x-request-id": odd}).headers["x-request-id"]
        assert made.startswith("req_")


def test_not_yet_warm_and_about_to_end_are_503_with_a_time_to_come_again(nano):
    for ready, closing in ((False, False), (True, True), (False, True)):
        engine = Scripted(nano)
        engine.ready, engine.closing = ready, closing
        client = client_of(engine)
        answer = client.post("/v1/chat/completions", json=ASK)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert client.get("/ready").status_code == 503 and client.get("/health").status_code == 200
        assert client.post("/v1/chat/completions", json={**ASK, "model": "gpt-9"}).status_code == 404


def test_the_excess_is_refused_at_once_and_nothing_is_rendered_for_it(nano):
    engine = Scripted(nano, saying(nano, "932"), slots=2, queue=3)
    app = create_app(engine, Options(playground=False))
    engine.gate.clear()

    async def go():
        running = [Line(app, ASK) for _ in range(5)]
        await asyncio.gather(*(line.open() for line in running))
        while len(engine.tickets) < 5:
            await asyncio.sleep(0.01)
        began = time.perf_counter()
        excess = [await Line(app, ASK).whole() for _ in range(20)]
        seconds = (time.perf_counter() - began) / len(excess)
        large = await Line(app, {**ASK, "n": 6}).whole()
        engine.gate.set()
        return [await line.whole() for line in running], excess, seconds, large

    answers, excess, seconds, large = asyncio.run(go())
    assert [a.status for a in answers] == [200] * 5 and len(engine.tickets) == 5
    assert {(a.status, a.json["error"]["code"]) for a in excess} == {(429, "rate_limit_reached")}
    assert all(int(a.headers["retry-after"]) >= 1 for a in excess) and seconds < 0.1
    assert large.status == 400 and large.json["error"]["param"] == "n"
    assert app.state.service.gate.inside == 0


def test_what_is_too_long_is_refused_before_its_grammar_is_compiled(nano, monkeypatch):
    compiled = []
    monkeypatch.setattr("mercury_jax.decode.grammar.compile", lambda *args: compiled.append(args))
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    client = client_of(Scripted(nano, saying(nano, "{}")))
    for bound in ({"response_format": schema}, {"tools": [add], "tool_choice": "required"}):
        messages = [{"role": "user", "content": "347+585=" * 400}]
        answer = client.post("/v1/chat/completions", json={**ASK, **bound, "messages": messages})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert compiled == []
    assert client.post("/v1/chat/completions", json={**ASK, "response_format": schema}).status_code == 200
    assert len(compiled) == 1


def test_a_small_grammar_does_not_wait_for_large_ones(nano, monkeypatch):
    """A few large schemas take every thread that compiles such; the next client's trivial one has its own."""
    engine = Scripted(nano, saying(nano, '{"a": 1}'))
    app, done, seen = create_app(engine, Options(playground=False)), threading.Event(), []

    def slow(tokenizer, spec):
        seen.append(spec)
        assert "k0" not in str(spec) or done.wait(20)
        return

    monkeypatch.setattr("mercury_jax.decode.grammar.compile", slow)
    held = lambda schema: {**ASK, "response_format": {"type": "json_schema",
                                                      "json_schema": {"name": "n", "schema": schema}}}  # fmt: skip
    large = {"anyOf": [{"properties": {f"k{i}": {"type": "string"}}} for i in range(900)]}

    async def go():
        lines = [Line(app, held(large)) for _ in range(4)]
        for line in lines:
            await line.open()
        while len(seen) < 2:
            await asyncio.sleep(0.005)
        began = time.perf_counter()
        small = await Line(app, held({"type": "object"})).whole()
        seconds = time.perf_counter() - began
        done.set()
        return small.status, seconds, [(await line.whole()).status for line in lines]

    status, seconds, others = asyncio.run(go())
    assert (status, others) == (200, [200] * 4) and seconds < 5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_client_that_leaves_cancels_its_jobs(nano, stream, after):
    engine = Scripted(nano, saying(nano, *[TEXT[:n] for n in range(4, len(TEXT))]), pause=0.03)
    app = create_app(engine, Options(playground=False))

    async def go():
        line = Line(app, {**ASK, "stream": stream, "n": 2})
        await line.open()
        while not engine.tickets or (stream and len(line.sent) < after):
            await asyncio.sleep(0.005)
        line.leave()
        await line.end()

    asyncio.run(go())
    freed = lambda: app.state.service.gate.inside == 0 and all(ticket.cancelled for ticket in engine.tickets)
    until = time.monotonic() + 5  # the thread that submits may not have noticed yet
    while not freed() and time.monotonic() < until:
        time.sleep(0.01)
    ends = [ticket.latest.finish for ticket in engine.tickets if ticket.latest is not None]
    assert len(engine.tickets) in (1, 2) and freed() and "stop" not in ends


def test_a_reader_that_stalls_is_left_behind_and_still_gets_the_end(nano):
    """What waits for a slow reader is one chunk, not the backlog of all passes."""
    text = "x" * 600
    engine = Scripted(nano, saying(nano, *[text[:n] for n in range(1, 600, 3)], text), pause=0.001)
    app = create_app(engine, Options(playground=False))

    async def go():
        line = Line(app, {**ASK, "stream": True}, gap=0.05)
        await line.open()
        await line.end()
        return line

    line = asyncio.run(go())
    chunks = [json.loads(e.removeprefix("data: ")) for e in line.text.split("\n\n")[:-2]]
    assert said(chunks) == text and len(chunks) < 60


def test_a_silent_stream_says_that_it_lives(nano):
    """Proxies close a connection on which nothing comes; readers of events skip comments."""
    engine = Scripted(nano, saying(nano, "347+5", TEXT), pause=0.35)
    answer = client_of(engine, keep_alive=0.1).post("/v1/chat/completions", json={**ASK, "stream": True})
    lines = answer.text.split("\n\n")
    assert lines.count(": keep-alive") >= 4 and lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line[6:]) for line in lines[:-2] if line.startswith("data: ")]
    assert said(chunks) == TEXT and {line[:6] for line in lines[:-1]} == {": keep", "data: "}
    assert Options().keep_alive == 15
    busy = client_of(Scripted(nano, saying(nano, TEXT))).post(
        "/v1/chat/completions", json={**ASK, "stream": True}
    )
    assert ": keep-alive" not in busy.text


def test_an_answer_that_broke_its_promise_is_counted_and_never_sent(nano):
    """The script obeys no grammar; what leaves the server validates, or does not leave."""
    engine = Scripted(nano, saying(nano, '{"a": "one"}'))
    client = client_of(engine)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    held = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = client.post("/v1/chat/completions", json={**ASK, "response_format": held})
    assert answer.status_code == 500 and "one" not in answer.text
    stream = client.post("/v1/chat/completions", json={**ASK, "response_format": held, "stream": True})
    assert '"server_error"' in stream.text and stream.text.endswith("data: [DONE]\n\n")
    assert "mercury_structured_output_failures_total 2.0" in client.get("/metrics").text
    free = {**ASK, "response_format": {"type": "json_object"}, "stop": '"'}
    assert (
        client.post("/v1/chat/completions", json=free).json()["choices"][0]["message"]["content"]
        == '{"a": "one"}'
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_is_torn_down_says_503_and_never_500(nano, stream):
    """What is still running when the time for draining is over is cancelled from outside."""
    engine = Scripted(nano, saying(nano, "347"))
    app = create_app(engine, Options(playground=False))
    engine.gate.clear()

    async def go():
        line = Line(app, {**ASK, "stream": stream})
        await line.open()
        while not engine.tickets:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        line.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await line.end()
        return line.sent[0]["status"]

    assert asyncio.run(go()) == (200 if stream else 503)
    assert engine.tickets[0].cancelled
    engine.gate.set()
