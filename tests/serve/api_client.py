"""Clients of an app in front of a scripted engine: responses checked against the document, and refusals."""

import json
import time

from jsonschema.validators import Draft202012Validator
from starlette.testclient import TestClient

from mercury_jax.serve.app import create_app
from mercury_jax.serve.chat.messages import plain_messages, plain_tools
from mercury_jax.serve.openapi import build_document
from mercury_jax.serve.options import ServerOptions
from mercury_jax.serve.protocol import ChatCompletionsRequest, parse_request
from tests.serve.scripted_engine import ScriptedEngine, text_snapshots

CHAT = "/v1/chat/completions"
DOCUMENT = build_document()
PAYLOAD = {"model": "nano", "messages": [{"role": "user", "content": "347+585="}]}
# The smallest valid request of each endpoint.
MINIMAL = {
    CHAT: PAYLOAD,
    "/v1/completions": {"model": "nano", "prompt": "a"},
    "/v1/fim/completions": {"model": "nano", "prompt": "a"},
    "/v1/edit/completions": PAYLOAD,
    "/v1/apply/completions": PAYLOAD,
}
TEXT = "347+585 is 932.\nYes"


def plain_conversation(messages, tools=None):
    """Messages and tools of a chat request as chat templates take them, through the request model."""
    body = parse_request(ChatCompletionsRequest, {"model": "m", "messages": messages, "tools": tools})
    tools = plain_tools(body.tools)
    return plain_messages(body.messages), tools


def check_messages(messages, tools=None):
    """The plain messages of `plain_conversation`."""
    return plain_conversation(messages, tools)[0]


def check_tools(tools):
    """The plain tools of `plain_conversation`."""
    return plain_conversation([{"role": "user", "content": "hi"}], tools)[1]


def client_of(engine, **options):
    app = create_app(engine, ServerOptions(**{"playground": False, **options}))
    return TestClient(app, base_url="http://localhost")


def valid(name, value):
    """Checks a response against its schema in the document."""
    root = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    problems = [
        f"{error.json_path}: {error.message}" for error in Draft202012Validator(root).iter_errors(value)
    ]
    assert problems == []
    return value


def post(engine, payload, path=CHAT, name="ChatCompletion", **options):
    response = client_of(engine, **options).post(path, json=payload)
    assert response.status_code == 200, response.text
    return valid(name, response.json())


def events(engine, payload, path=CHAT, name="ChatCompletionChunk", **options):
    """The chunks of a stream, each checked against the document; the last event is [DONE]."""
    response = client_of(engine, **options).post(path, json={**payload, "stream": True})
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: ") for line in lines[:-1])
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    return [valid("Error" if "error" in chunk else name, chunk) for chunk in chunks]


def choices(chunks, index=0):
    return [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]


def content_of(chunks, index=0):
    return "".join(c["delta"].get("content", "") for c in choices(chunks, index))


class ScriptedApp:
    """An app in front of a scripted engine, for tests of what must be refused and must not reach the engine."""

    def __init__(self, nano, slots=4, **options):
        self.engine = ScriptedEngine(nano, text_snapshots(nano, "932"), slots=slots)
        self.client = client_of(self.engine, **options)

    def post(self, payload, path=CHAT, **more):
        return self.client.post(path, json=payload, **more)

    def refuses(self, payload, path=CHAT, status=400, within=5.0):
        """Asserts that a request is refused with a message, in time, before anything reaches the engine."""
        before, began = len(self.engine.tickets), time.perf_counter()
        response = self.post(payload, path)
        assert response.status_code == status, response.text[:300]
        assert isinstance(response.json()["error"]["message"], str) and len(response.text) < 2000
        assert len(self.engine.tickets) == before and time.perf_counter() - began < within
        return response.json()["error"]

    def serves(self):
        """Asserts that it still answers."""
        assert self.post(PAYLOAD).json()["choices"][0]["message"]["content"] == "932"


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def function_tool(parameters, name="f"):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
