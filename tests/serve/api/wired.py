"""An app in front of a script, and its answers as our own document allows them."""

import json

from jsonschema.validators import Draft202012Validator
from starlette.testclient import TestClient

from mercury_jax.serve.api import Options, create_app, openapi

DOCUMENT = openapi.build()
ASK = {"model": "mercury-2", "messages": [{"role": "user", "content": "347+585="}]}


def client_of(engine, **options):
    return TestClient(create_app(engine, Options(playground=False, **options)), base_url="http://localhost")


def valid(name, value):
    """Whether our own document allows an answer."""
    root = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    problems = [
        f"{error.json_path}: {error.message}" for error in Draft202012Validator(root).iter_errors(value)
    ]
    assert problems == []
    return value


def post(engine, ask, path="/v1/chat/completions", name="ChatCompletion", **options):
    answer = client_of(engine, **options).post(path, json=ask)
    assert answer.status_code == 200, answer.text
    return valid(name, answer.json())


def events(engine, ask, path="/v1/chat/completions", name="ChatCompletionChunk", **options):
    """The chunks of a stream, each as the document allows it; the last event is [DONE]."""
    answer = client_of(engine, **options).post(path, json={**ask, "stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: ") for line in lines[:-1])
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    return [valid("Error" if "error" in chunk else name, chunk) for chunk in chunks]


def choices(chunks, index=0):
    return [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]


def said(chunks, index=0):
    return "".join(c["delta"].get("content", "") for c in choices(chunks, index))


TEXT = "347+585 is 932.\nYes"
