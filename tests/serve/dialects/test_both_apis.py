"""Laws of the Responses API and of the Messages API: both are forms of one chat."""

import asyncio
import time

import pytest

from mercury_jax.serve.app import create_app
from mercury_jax.serve.options import ServerOptions
from tests.serve.api_client import CHAT, PAYLOAD, TEXT, client_of, valid
from tests.serve.asgi_client import Connection
from tests.serve.dialects.reading import (
    ASK,
    CALL,
    MESSAGES,
    RESPONSES,
    TEXT_OF,
    THINKING,
    TOOLS,
    engine_of,
    events_of,
    final,
    post,
    stream,
    without_ids,
)
from tests.serve.scripted_engine import ScriptedEngine, snapshot, text_snapshots

BOTH = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
ANSWERS = {
    "text": {"text": TEXT},
    "thinking": {"thinking": "carry one", "text": TEXT},
    "calls": {"calls": (CALL, CALL)},
    "all": {"thinking": "carry one", "text": "One moment.", "calls": (CALL,)},
    "nothing": {},
}


@pytest.fixture(scope="module")
def real(engine):
    return client_of(engine)


@BOTH
def test_the_text_is_that_of_a_chat_with_the_same_seed(real, path):
    chat = real.post(CHAT, json={**PAYLOAD, "seed": 5, "temperature": 1.0, "max_tokens": 24}).json()
    length = {RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}[path]
    more = {"seed": 5, "temperature": 1.0, length: 24}
    [choice], whole = chat["choices"], post(real, path, **more)
    assert TEXT_OF[path](whole) == choice["message"]["content"] != ""
    assert TEXT_OF[path](final(stream(real, path, **more), path)) == choice["message"]["content"]
    assert whole["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert whole["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]


@BOTH
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("parts", ANSWERS)
def test_a_stream_adds_up_to_the_answer(nano, path, asked, parts):
    client = client_of(engine_of(nano, **ANSWERS[parts]))
    more = {"tools": TOOLS[path], **(THINKING[path] if asked else {})}
    whole, events = post(client, path, **more), stream(client, path, **more)
    assert without_ids(final(events, path)) == without_ids(whole)
    shown = ANSWERS[parts]
    assert TEXT_OF[path](whole) == shown.get("text", "")
    kinds = [item["type"] for item in whole.get("output") or whole["content"]]
    assert sum(kind in ("function_call", "tool_use") for kind in kinds) == len(shown.get("calls", ()))
    assert (shown.get("thinking", "-") in str(whole)) == (asked and "thinking" in shown)


@BOTH
def test_an_answer_that_max_tokens_cut_says_so(nano, path):
    half = CALL[:36]  # some of its arguments have been sent
    for parts in ({"text": TEXT}, {"text": TEXT, "calls": (half,)}):
        client = client_of(engine_of(nano, "length", **parts))
        whole = post(client, path, tools=TOOLS[path])
        last = final(stream(client, path, tools=TOOLS[path]), path)
        for answer in (whole, last):
            if path == RESPONSES:
                assert answer["status"] == "incomplete"
                assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
            else:
                assert answer["stop_reason"] == "max_tokens"
        # The malformed call is content, as in chat.
        assert TEXT_OF[path](whole).startswith(TEXT)
        assert "function_call" not in str(whole.get("output")) and "tool_use" not in str(whole.get("content"))


@BOTH
def test_a_stream_that_fails_ends_with_the_error(nano, path):
    engine = ScriptedEngine(nano, [snapshot([5]), snapshot([5, 6], finish="error", message="secret")])
    client = client_of(engine)
    last = stream(client, path)[-1]
    if path == RESPONSES:
        assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"
    else:
        assert last["type"] == "error" and valid("MessagesError", last)["error"]["type"] == "api_error"
    assert "secret" not in str(last) and client.post(path, json=ASK[path]).status_code == 500


@BOTH
@pytest.mark.parametrize("streamed", [False, True])
def test_a_disconnected_client_cancels_its_job(nano, path, streamed):
    engine = ScriptedEngine(nano, text_snapshots(nano, *[TEXT[:n] for n in range(4, len(TEXT))]), pause=0.03)
    app = create_app(engine, ServerOptions(playground=False))

    async def go():
        line = Connection(app, {**ASK[path], "stream": streamed}, path)
        await line.open()
        while not engine.tickets or (streamed and len(line.sent) < 4):
            await asyncio.sleep(0.005)
        line.leave()
        await line.end()

    asyncio.run(go())
    until = time.monotonic() + 5
    while (
        not (done := [ticket.cancelled for ticket in engine.tickets] == [True]) and time.monotonic() < until
    ):
        time.sleep(0.01)
    latest = engine.tickets[0].latest
    assert done and (latest is None or latest.finish != "stop")
    assert app.state.models.services[0].limit.admitted == 0


@BOTH
def test_the_warning_of_a_chat_is_kept(nano, path):
    client = client_of(engine_of(nano, text=TEXT), strict_temperature=True)
    assert "was reset" in post(client, path, temperature=0)["warning"]
    first = stream(client, path, temperature=0)[0]
    assert "was reset" in (first.get("response") or first["message"])["warning"]
    assert "warning" not in post(client, path, temperature=0.7)


@BOTH
def test_sampling_fields_of_a_chat_are_passed_on(nano, path):
    engine = engine_of(nano, text=TEXT)
    fields = {"seed": 7, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "logit_bias": {"3": -5}, "temperature": 0.3}
    post(client_of(engine), path, **fields, extra_body={"repetition_penalty": 1.5})
    job = engine.tickets[-1].request
    assert (job.seed, job.top_p, job.top_k, job.min_p, job.temperature) == (7, 0.5, 4, 0.1, 0.3)
    assert job.logit_bias == {3: -5} and job.repetition_penalty == 1.5


@BOTH
def test_a_schema_is_enforced_and_a_refused_one_is_named_by_its_field(real, path):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    wrap = {
        RESPONSES: lambda s: {"text": {"format": {"type": "json_schema", "name": "n", "schema": s}}},
        MESSAGES: lambda s: {"output_config": {"format": {"type": "json_schema", "schema": s}}},
    }[path]
    assert TEXT_OF[path](post(real, path, **wrap(schema))) in ('{"ok": true}', '{"ok": false}')
    refused = real.post(path, json={**ASK[path], **wrap({"type": "string", "pattern": r"(a)\1"})})
    field = {RESPONSES: "text.format.schema", MESSAGES: "output_config.format.schema"}[path]
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(f"{field}.pattern")


def test_events_are_those_of_the_path(nano):
    engine = engine_of(nano, text=TEXT)
    text = client_of(engine).post(CHAT, json={**PAYLOAD, "stream": True}).text
    with pytest.raises(ValueError):
        events_of(text, RESPONSES)
