"""schemathesis against our own document: whatever the document allows or forbids, it says what is answered.

It sits in an environment of its own; MERCURY_SCHEMATHESIS names its command.
"""

import collections
import json
import os
import shutil
import subprocess

from qa.fuzz import document
from qa.fuzz.bodies import FULL
from qa.load.load_clients import resources, run

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection", "unsupported_method", "allow_header_conformance",
)  # fmt: skip
# What a body that the document forbids is answered with: 413 where it is too large beside.
CONFIG = '[checks.negative_data_rejection]\nexpected-statuses = ["400", "404", "405", "413", "415"]\n'


def test_every_answer_is_one_that_the_document_tells(server, cases, tmp_path):
    answer = run(server.url, lambda client: client.ask("GET", "/openapi.json"))
    assert answer.status == 200
    (tmp_path / "openapi.json").write_text(json.dumps(document.steered(answer.json())))
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    found = schemathesis(tmp_path, server.url, cases)
    print(found.stdout)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    told = tally(tmp_path / "told.ndjson")
    print(*sorted(told.items(), key=str), resources(server.process.pid), sep="\n")
    ways = operations(answer.json())
    assert {way for way, *_ in told} == set(ways)
    for way in (way for way in ways if way.startswith("POST")):
        assert sum(told[key] for key in told if key[:2] == (way, "fuzzing")) >= cases
        assert told[way, "fuzzing", "positive", 200] > 0 and told[way, "fuzzing", "negative", 400] > 0
    assert "Traceback" not in server.stderr.read_text(errors="replace")


def schemathesis(folder, url, cases):
    """In short without its phase of coverage, which sends thousands whatever `cases` is.

    One worker: with several, Python 3.11 miscounts the depth of syntax trees, which hypothesis reads.
    """
    command = shutil.which(os.environ.get("MERCURY_SCHEMATHESIS", "schemathesis"))
    assert command, "MERCURY_SCHEMATHESIS must name the command of schemathesis"
    phases = "examples,coverage,fuzzing" if cases >= FULL else "examples,fuzzing"
    return subprocess.run(
        [
            command, "run", "openapi.json", "--url", url, "--max-examples", str(cases), "--checks", ",".join(CHECKS),
            "--phases", phases, "--mode", "all", "--seed", "7", "--continue-on-failure",
            "--request-timeout", "120", "--suppress-health-check", "all", "--workers", "1",
            "--report", "ndjson", "--report-ndjson-path", "told.ndjson",
        ],
        capture_output=True, text=True, cwd=folder, env=os.environ | {"NO_COLOR": "1"},
    )  # fmt: skip


def tally(report):
    """How often there was each (operation, phase, positive or negative, status)."""
    told = collections.Counter()
    with report.open() as lines:
        for done in (
            line["ScenarioFinished"] for line in map(json.loads, lines) if "ScenarioFinished" in line
        ):
            recorder = done["recorder"]
            for id, interaction in recorder.get("interactions", {}).items():
                mode = recorder["cases"][id]["value"]["meta"]["generation"]["mode"]
                status = interaction["response"] and interaction["response"]["status_code"]
                told[recorder["label"], done["phase"], mode, status] += 1
    return told


def operations(document):
    return [f"{method.upper()} {path}" for path, item in document["paths"].items() for method in item]
