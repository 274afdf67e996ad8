"""Events of the Responses API and of the Messages API, and scripted answers with thinking, text and calls."""

import contextlib
import json

from mercury_jax.tokenizer import SPECIAL
from tests.serve.api_client import client_of, valid
from tests.serve.scripted_engine import ScriptedEngine, snapshot

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
EVENT_TYPES = {RESPONSES: "ResponseStreamEvent", MESSAGES: "MessageStreamEvent"}
OBJECT_TYPES = {RESPONSES: "ResponseObject", MESSAGES: "MessageObject"}
ASK = {
    RESPONSES: {"model": "nano", "input": "347+585="},
    MESSAGES: {"model": "nano", "max_tokens": 64, "messages": [{"role": "user", "content": "347+585="}]},
}
CALL = '{"name": "add", "arguments": {"a": 347, "b": [585]}}'
# The tool `add` in the form of each API, and what asks for the thinking.
TOOLS = {
    RESPONSES: [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
    MESSAGES: [{"name": "add", "input_schema": {"type": "object"}}],
}
THINKING = {
    RESPONSES: {"reasoning": {"summary": "auto"}},
    MESSAGES: {"thinking": {"type": "adaptive"}},
}


def answer_ids(lm, *, thinking="", text="", calls=()):
    """Token ids of an answer."""
    encode = lm.tokenizer.encode
    ids = [SPECIAL.think, *encode(thinking), SPECIAL.end_think] if thinking else []
    ids = [*ids, *(encode(text) if text else ())]
    for call in calls:
        ids += [SPECIAL.tool_call, *encode(call), SPECIAL.end_tool_call]
    return ids


def growing(ids, step=2, finish="stop"):
    """Snapshots of an answer that grows by a few tokens."""
    return [*(snapshot(ids[:n]) for n in range(1, len(ids), step)), snapshot(ids, finish=finish)]


def engine_of(nano, finish="stop", **parts):
    """A scripted engine that gives one answer."""
    return ScriptedEngine(nano, growing(answer_ids(nano, **parts), finish=finish), pause=0.001)


def post(client, path, **more):
    """The JSON of an answer, checked against the document."""
    answer = client.post(path, json={**ASK[path], **more})
    assert answer.status_code == 200, answer.text
    return valid(OBJECT_TYPES[path], answer.json())


def stream(client, path, **more):
    """The events of an answer, each checked against the document and named as its type."""
    answer = client.post(path, json={**ASK[path], **more, "stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.text, path)


def events_of(text, path):
    """The events in the text of a stream."""
    found = []
    for part in text.split("\n\n")[:-1]:
        if part.startswith(":"):
            continue
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event if event["type"] == "error" else valid(EVENT_TYPES[path], event))
    return found


def scripted(engine, **options):
    """A client of an app in front of an engine."""
    return client_of(engine, **options)


def output_text(response):
    """The text of a response."""
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])


def block_text(message):
    """The text of a message."""
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


TEXT_OF = {RESPONSES: output_text, MESSAGES: block_text}


def final(events, path):
    """What the events of a stream add up to."""
    if path == RESPONSES:
        return events[-1]["response"]
    message = events[0]["message"]
    for event in events:
        kind, blocks = event["type"], message["content"]
        if kind == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "partial": ""})
        elif kind == "content_block_delta":
            (name,) = event["delta"].keys() - {"type"}
            field = {"partial_json": "partial"}.get(name, name)
            blocks[-1][field] += event["delta"][name]
        elif kind == "content_block_stop":
            assert event["index"] == len(blocks) - 1
            partial = blocks[-1].pop("partial")
            if blocks[-1]["type"] == "tool_use" and partial:
                with contextlib.suppress(ValueError):  # of a malformed call
                    blocks[-1]["input"] = json.loads(partial)
        elif kind == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    return message


def without_ids(value):
    """A JSON value without what differs between two equal answers: ids and times."""
    if isinstance(value, dict):
        changing = ("id", "call_id", "created_at", "completed_at")
        return {name: without_ids(inner) for name, inner in value.items() if name not in changing}
    return [without_ids(inner) for inner in value] if isinstance(value, list) else value
