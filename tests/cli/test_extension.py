"""A rule of the user's own, one file of 12 lines, through the real commands: `info`, `sample` and `serve`."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = '''\
"""A decoding rule of my own."""

import mercury_jax as mj


@mj.rule(name="every_second")
def every_second(key, view, memory, *, share: float = 0.5):
    """Accepts the masks whose argmax has at least the probability `share`, and the first mask always."""
    sure = view.stats.p_argmax >= share
    first = view.masked.cumsum() == 1
    return mj.rules.accept(view, view.masked & (sure | first)), memory
'''


@pytest.fixture
def mercury(tmp_path):
    """mercury(words) -> the running command, started in the folder that has my_rules.py."""
    (tmp_path / "my_rules.py").write_text(OWN)
    assert len(OWN.splitlines()) <= 15
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    started = []

    def start(*words):
        command = [sys.executable, "-m", "mercury_jax", *words]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def rows(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.long
def test_info_lists_it_and_sample_decodes_with_it(mercury, folder):
    listed, sampled = (
        mercury("info", "--load", "my_rules", "--model", folder, "--json"),
        mercury(
            *("sample", "def f", "--rule", "my_rules:every_second", "--share", "0.9", "--max-tokens", "8"),
            *("--model", folder, "--json"),
        ),
    )
    [about] = rows(listed)
    assert about["rules"]["every_second"]["parameters"] == {"share": 0.5}
    assert about["rules"]["every_second"]["about"].startswith("Accepts the masks whose argmax")
    [answer] = rows(sampled)
    assert 1 <= answer["forwards"] <= 10 and answer["tokens"] <= 8


@pytest.mark.slow
def test_serve_decodes_with_it(mercury, folder):
    words = (
        "--rule", "my_rules:every_second", "--share", "0.0", "--slots", "1", "--context", "64", "--port", "0",
    )  # fmt: skip
    process = mercury("serve", *words, "--model", folder)
    said = ""
    while "ready in" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    [url] = set(re.findall(r"http://127\.0\.0\.1:\d+", said))
    body = {"model": "tiny", "prompt": "def f", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.loads(response.read())
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")
    # share = 0 accepts all masks of the block at once: one pass encodes the prompt, one denoises, one commits.
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        metrics = response.read().decode()
    [forwards] = re.findall(r"^mercury_forwards_total (\S+)", metrics, re.M)
    assert float(forwards) <= 4
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
