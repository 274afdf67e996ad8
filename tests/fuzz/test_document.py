"""schemathesis against our own document: whatever the document allows or forbids, it says what is answered.

It sits in an environment of its own; MERCURY_SCHEMATHESIS names its command.
"""

import json
import os
import shutil
import subprocess

from tests.load.crowd import run

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection", "unsupported_method", "allow_header_conformance",
)  # fmt: skip


def parted(document):
    """With the events of a stream told apart from their data, as schemathesis reads them: each one's data is a chunk,
    an error, or the end."""
    for item in document["paths"].values():
        content = item.get("post", {"responses": {"200": {}}})["responses"]["200"].get("content", {})
        if "text/event-stream" in content:
            content["text/event-stream"]["schema"] = event(content["text/event-stream"]["schema"])
    return document


def event(chunk):
    data = {"anyOf": [chunk, {"$ref": "#/components/schemas/Error"}]}
    told = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    last = {"properties": {"data": {"const": "[DONE]"}}}
    return {"type": "object", "required": ["data"], "if": last, "else": {"properties": {"data": told}}}


def test_every_answer_is_one_that_the_document_tells(server, cases, tmp_path):
    command = shutil.which(os.environ.get("MERCURY_SCHEMATHESIS", "schemathesis"))
    assert command, "MERCURY_SCHEMATHESIS must name the command of schemathesis"
    answer = run(server.url, lambda client: client.ask("GET", "/openapi.json"))
    assert answer.status == 200
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(parted(answer.json())))
    found = subprocess.run(
        [
            command, "run", str(file), "--url", server.url, "--max-examples", str(cases), "--checks", ",".join(CHECKS),
            "--phases", "examples,coverage,fuzzing", "--mode", "all", "--seed", "7", "--continue-on-failure",
            "--request-timeout", "120", "--suppress-health-check", "all", "--workers", "2",
        ],
        capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"NO_COLOR": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert f"{len(operations(answer.json()))} " in found.stdout
    assert "Traceback" not in server.said.read_text(errors="replace")


def operations(document):
    return [(path, method) for path, item in document["paths"].items() for method in item]
