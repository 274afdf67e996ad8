"""Requests that do not finish normally: errors, overload, disconnected and slow clients, cancellation."""

import asyncio
import contextlib
import json
import threading
import time

import pytest

from mercury_jax.decode.grammar import JSONObject, compile
from mercury_jax.serve.app import create_app
from mercury_jax.serve.options import ServerOptions
from tests.serve.api_client import PAYLOAD, TEXT, client_of, content_of, events
from tests.serve.asgi_client import Connection
from tests.serve.scripted_engine import ScriptedEngine, snapshot, text_snapshots


@pytest.mark.parametrize(
    "finish, status, code", [("error", 500, "server_error"), ("cancelled", 503, "overloaded")]
)
def test_a_failed_job_is_one_error_without_internals(nano, finish, status, code):
    secret = "0xdeadbeef in /srv/engine.py"
    script = [*text_snapshots(nano, "347+5", "347+58")[:1], snapshot([], finish=finish, message=secret)]
    answer = client_of(ScriptedEngine(nano, script)).post("/v1/chat/completions", json=PAYLOAD)
    assert (answer.status_code, answer.json()["error"]["code"]) == (
        status,
        code,
    ) and secret not in answer.text
    chunks = events(ScriptedEngine(nano, script, pause=0.01), PAYLOAD)
    assert [("error" in chunk) for chunk in chunks].count(True) == 1 and chunks[-1]["error"]["code"] == code
    assert secret not in str(chunks) and not any(
        c["finish_reason"] for chunk in chunks[:-1] for c in chunk["choices"]
    )
    if finish == "error":
        assert answer.headers["x-request-id"] in answer.json()["error"]["message"]


def test_an_unexpected_exception_is_a_500_with_a_request_id(nano):
    def explode(job):
        raise RuntimeError("the secret of the house")

    engine = ScriptedEngine(nano)
    engine.submit = explode
    answer = client_of(engine).post("/v1/chat/completions", json=PAYLOAD, headers={"x-request-id": "mine-7"})
    assert (
        answer.status_code == 500
        and "secret" not in answer.text
        and "mine-7" in answer.json()["error"]["message"]
    )
    assert answer.headers["x-request-id"] == "mine-7"
    for odd in ("a b", "x" * 65, "é".encode(), "a\nb: c"):
        made = client_of(engine).get("/health", headers={"x-request-id": odd}).headers["x-request-id"]
        assert made.startswith("req_")


def test_warming_up_and_shutting_down_are_503_with_retry_after(nano):
    for ready, closing in ((False, False), (True, True), (False, True)):
        engine = ScriptedEngine(nano)
        engine.ready, engine.closing = ready, closing
        client = client_of(engine)
        answer = client.post("/v1/chat/completions", json=PAYLOAD)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert client.get("/ready").status_code == 503 and client.get("/health").status_code == 200
        assert client.post("/v1/chat/completions", json={**PAYLOAD, "model": "gpt-9"}).status_code == 404


def test_requests_beyond_the_queue_are_refused_before_they_are_rendered(nano):
    engine = ScriptedEngine(nano, text_snapshots(nano, "932"), slots=2, queue=3)
    app = create_app(engine, ServerOptions(playground=False))
    engine.gate.clear()

    async def go():
        running = [Connection(app, PAYLOAD) for _ in range(5)]
        await asyncio.gather(*(line.open() for line in running))
        while len(engine.tickets) < 5:
            await asyncio.sleep(0.01)
        began = time.perf_counter()
        excess = [await Connection(app, PAYLOAD).whole() for _ in range(20)]
        seconds = (time.perf_counter() - began) / len(excess)
        large = await Connection(app, {**PAYLOAD, "n": 6}).whole()
        engine.gate.set()
        return [await line.whole() for line in running], excess, seconds, large

    answers, excess, seconds, large = asyncio.run(go())
    assert [a.status for a in answers] == [200] * 5 and len(engine.tickets) == 5
    assert {(a.status, a.json["error"]["code"]) for a in excess} == {(429, "rate_limit_reached")}
    assert all(int(a.headers["retry-after"]) >= 1 for a in excess) and seconds < 0.1
    assert large.status == 400 and large.json["error"]["param"] == "n"
    assert app.state.models.services[0].limit.admitted == 0


def test_a_prompt_that_is_too_long_is_refused_before_its_grammar_is_compiled(nano, monkeypatch):
    compiled, grammar = [], compile(nano.tokenizer, JSONObject())
    fake = lambda *args: compiled.append(args) or grammar
    monkeypatch.setattr("mercury_jax.decode.grammar.compile", fake)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    client = client_of(ScriptedEngine(nano, text_snapshots(nano, "{}")))
    for bound in ({"response_format": schema}, {"tools": [add], "tool_choice": "required"}):
        messages = [{"role": "user", "content": "347+585=" * 400}]
        answer = client.post("/v1/chat/completions", json={**PAYLOAD, **bound, "messages": messages})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert compiled == []
    assert client.post("/v1/chat/completions", json={**PAYLOAD, "response_format": schema}).status_code == 200
    assert len(compiled) == 1


@pytest.mark.long
def test_a_small_grammar_does_not_wait_for_large_ones(nano, monkeypatch):
    """Large schemas occupy all threads of their pool; small ones have their own."""
    engine = ScriptedEngine(nano, text_snapshots(nano, '{"a": 1}'))
    app, done, seen = create_app(engine, ServerOptions(playground=False)), threading.Event(), []
    grammar = compile(nano.tokenizer, JSONObject())

    def slow(tokenizer, spec):
        seen.append(spec)
        assert "k0" not in str(spec) or done.wait(20)
        return grammar

    monkeypatch.setattr("mercury_jax.decode.grammar.compile", slow)
    held = lambda schema: {**PAYLOAD, "response_format": {"type": "json_schema",
                                                      "json_schema": {"name": "n", "schema": schema}}}  # fmt: skip
    large = {"anyOf": [{"properties": {f"k{i}": {"type": "string"}}} for i in range(900)]}

    async def go():
        lines = [Connection(app, held(large)) for _ in range(4)]
        for line in lines:
            await line.open()
        while len(seen) < 2:
            await asyncio.sleep(0.005)
        began = time.perf_counter()
        small = await Connection(app, held({"type": "object"})).whole()
        seconds = time.perf_counter() - began
        done.set()
        return small.status, seconds, [(await line.whole()).status for line in lines]

    status, seconds, others = asyncio.run(go())
    assert (status, others) == (200, [200] * 4) and seconds < 5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_disconnected_client_cancels_its_jobs(nano, stream, after):
    engine = ScriptedEngine(nano, text_snapshots(nano, *[TEXT[:n] for n in range(4, len(TEXT))]), pause=0.03)
    app = create_app(engine, ServerOptions(playground=False))

    async def go():
        line = Connection(app, {**PAYLOAD, "stream": stream, "n": 2})
        await line.open()
        while not engine.tickets or (stream and len(line.sent) < after):
            await asyncio.sleep(0.005)
        line.leave()
        await line.end()

    asyncio.run(go())
    freed = lambda: (
        app.state.models.services[0].limit.admitted == 0
        and all(ticket.cancelled for ticket in engine.tickets)
    )
    until = time.monotonic() + 5  # the thread that submits may not have noticed yet
    while not freed() and time.monotonic() < until:
        time.sleep(0.01)
    ends = [ticket.latest.finish for ticket in engine.tickets if ticket.latest is not None]
    assert len(engine.tickets) in (1, 2) and freed() and "stop" not in ends


def test_a_slow_reader_skips_chunks_and_gets_the_end(nano):
    """Only one chunk waits for a slow reader, not one per pass."""
    text = "x" * 600
    engine = ScriptedEngine(
        nano, text_snapshots(nano, *[text[:n] for n in range(1, 600, 3)], text), pause=0.001
    )
    app = create_app(engine, ServerOptions(playground=False))

    async def go():
        line = Connection(app, {**PAYLOAD, "stream": True}, gap=0.05)
        await line.open()
        await line.end()
        return line

    line = asyncio.run(go())
    chunks = [json.loads(e.removeprefix("data: ")) for e in line.text.split("\n\n")[:-2]]
    assert content_of(chunks) == text and len(chunks) < 60


def test_a_silent_stream_sends_keep_alive_comments(nano):
    """Proxies close silent connections; readers of events skip comments."""
    engine = ScriptedEngine(nano, text_snapshots(nano, "347+5", TEXT), pause=0.35)
    answer = client_of(engine, keep_alive=0.1).post("/v1/chat/completions", json={**PAYLOAD, "stream": True})
    lines = answer.text.split("\n\n")
    assert lines.count(": keep-alive") >= 4 and lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line[6:]) for line in lines[:-2] if line.startswith("data: ")]
    assert content_of(chunks) == TEXT and {line[:6] for line in lines[:-1]} == {": keep", "data: "}
    assert ServerOptions().keep_alive == 15
    busy = client_of(ScriptedEngine(nano, text_snapshots(nano, TEXT))).post(
        "/v1/chat/completions", json={**PAYLOAD, "stream": True}
    )
    assert ": keep-alive" not in busy.text


def test_an_answer_that_violates_its_schema_is_counted_and_never_sent(nano):
    """The scripted answer ignores the grammar, so only the check can catch it."""
    engine = ScriptedEngine(nano, text_snapshots(nano, '{"a": "one"}'))
    client = client_of(engine)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    held = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = client.post("/v1/chat/completions", json={**PAYLOAD, "response_format": held})
    assert answer.status_code == 500 and "one" not in answer.text
    stream = client.post("/v1/chat/completions", json={**PAYLOAD, "response_format": held, "stream": True})
    assert '"server_error"' in stream.text and stream.text.endswith("data: [DONE]\n\n")
    assert "mercury_structured_output_failures_total 2.0" in client.get("/metrics").text
    free = {**PAYLOAD, "response_format": {"type": "json_object"}, "stop": '"'}
    assert (
        client.post("/v1/chat/completions", json=free).json()["choices"][0]["message"]["content"]
        == '{"a": "one"}'
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_cancelled_by_the_server_is_a_503(nano, stream):
    """As when the time for draining is over."""
    engine = ScriptedEngine(nano, text_snapshots(nano, "347"))
    app = create_app(engine, ServerOptions(playground=False))
    engine.gate.clear()

    async def go():
        line = Connection(app, {**PAYLOAD, "stream": stream})
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
