"""`mercury serve` with several --model: names, refusals before a model is loaded, shares of the memory."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import pytest
from starlette.testclient import TestClient

from mercury_jax.cli import arguments, main, serve
from mercury_jax.serve.engine import memory
from tests.cli.run import refused


def models(*words):
    return [tuple(one) for one in serve.models_of(arguments.read(serve.Serve, words, "mercury serve"))]


def test_a_model_may_be_given_a_name():
    assert models() == [(None, None)]
    assert models("--model", "org/name") == [(None, "org/name")]
    assert models("--model", "a=org/name@main", "--model", "b=x=1") == [("a", "org/name@main"), ("b", "x=1")]


def test_a_folder_with_an_equals_sign_is_a_folder(tmp_path, monkeypatch):
    (tmp_path / "lr=0.1" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for word in ("runs/lr=0.1/model", "lr=0.1", str(tmp_path / "lr=0.1" / "model"), "./x=1"):
        assert models("--model", word) == [(None, word)]
    assert models("--model", "a=lr=0.1/model") == [("a", "lr=0.1/model")]


@pytest.fixture
def unloaded(monkeypatch):
    """Fails the test if the parameters of a model are loaded."""
    monkeypatch.setattr(serve.show, "load", lambda *a, **k: pytest.fail("a model was loaded"))


@pytest.mark.parametrize(
    "words, says",
    [
        (["--model", "=nano"], "--model is '=nano'; allowed: MODEL or NAME=MODEL"),
        (["--model", "a="], "--model is 'a='; allowed: MODEL or NAME=MODEL"),
        (["--model", "a\tb=nano"], "allowed: MODEL or NAME=MODEL"),
        (["--model", "x" * 257 + "=nano"], "a name of 1 to 256 characters"),
        (["--model", "a=nano", "--model", "b=nano", "--mesh", "data=2"], "--mesh is 'data=2'; allowed: no value"),
        (["--model", "a=nano", "--model", "b=nano", "--mask", "4"], "--mask is 4; allowed: no value"),
        (["--model", "a=nano", "--model", "b=nano", "--adapter", "x"], "--adapter is 'x'; allowed: no value"),
        (["--model", "nano", "--model", "nano"], "name of a model is 'nano'; allowed: another name for each"),
        (["--model", "nano", "--model", "nano=FOLDER"], "name of a model is 'nano'"),
        (["--model", "FOLDER", "--model", "a=nano", "--model", "FOLDER"], "name of a model is 'tiny'"),
        (["--model", "nano", "--model", "FOLDER", "--alias", "tiny"], "alias is 'tiny'; allowed: a name that no"),
        (["--model", "nano", "--alias", "fast=tiny"], "alias fast is 'tiny'; allowed: a model that is loaded: nano"),
        (["--model", "nano", "--model", "a=nano", "--alias", "x=a", "--alias", "x"], "one meaning of x, which is a"),
        (["--model", "nano", "--model", "no-such-folder"], "--model is 'no-such-folder'"),
    ],
)  # fmt: skip
def test_names_and_options_are_refused_before_a_model_is_loaded(unloaded, capsys, folder, words, says):
    words = [word.replace("FOLDER", folder) for word in words]
    assert says in refused(capsys, "serve", "--port", "0", *words)


@pytest.fixture
def served(monkeypatch):
    """`served(*words)`: the server that the command makes, which is not started."""
    made = []
    monkeypatch.setattr("mercury_jax.serve.server.Server.run", lambda self, sockets: made.append(self))

    def start(*words):
        assert main(["serve", "--port", "0", *words]) == 0
        return made.pop()

    return start


def test_the_command_serves_every_model_by_its_name(served, folder, capsys):
    server = served("--model", "nano", "--model", folder, "--model", f"mine={folder}", "--alias", "best=mine")
    assert [engine.lm.name for engine in server.engines] == ["nano", "tiny", "mine"]
    client = TestClient(server.config.app, base_url="http://localhost")
    listed = client.get("/v1/models").json()["data"]
    assert {one["id"]: one["context_length"] for one in listed} == {
        "nano": 512, "tiny": 128, "mine": 128, "best": 128,
    }  # fmt: skip
    said = capsys.readouterr().err
    assert "nano, tiny, mine at http://" in said and "mine: 8 slots of 128 tokens: " in said
    assert client.get("/ready").status_code == 503


def test_options_hold_for_every_model(served, folder):
    words = [
        "--slots", "2", "--queue", "3", "--context", "64", "--kv", "int8", "--rule", "threshold", "--p",
        "0.8",
    ]  # fmt: skip
    for engine in served("--model", "nano", "--model", folder, *words).engines:
        assert (engine.config.slots, engine.config.queue, engine.context) == (2, 3, 64)
        cache = jax.eval_shape(lambda model=engine.lm.model: model.empty_cache(1, 64))
        assert any(leaf.dtype == "int8" for leaf in jax.tree.leaves(cache))
        assert (engine.rules.own.rule.name, engine.rules.own.rule.params) == ("threshold", {"p": 0.8})


@pytest.mark.parametrize("words, available", [((), int(memory.SHARE * 2**30)), (("--memory", "0.5"), 2**29)])
def test_the_memory_is_divided_into_equal_shares(served, folder, monkeypatch, words, available):
    monkeypatch.setattr("mercury_jax.hub.params._host_memory", lambda: 2**30)
    [alone] = served(*words).engines
    assert alone.config.memory == available
    models = ["--model", "nano", "--model", folder, "--model", f"mine={folder}"]
    for engine in served(*models, *words).engines:
        assert engine.config.memory == available // 3
        assert memory.engine_memory(engine.lm, engine.config).total <= available // 3


def test_what_does_not_fit_a_share_is_reduced_or_refused_with_the_model_and_the_numbers(
    served, folder, capsys
):
    words = ["--model", folder, "--model", "nano", "--prefix-cache", "0"]
    alone = ["--prefix-cache", "0", "--slots", "16", "--memory", "0.06"]
    [engine] = served(*alone).engines
    assert engine.config.slots == 16
    capsys.readouterr()
    error = refused(capsys, "serve", "--port", "0", *words, *alone[2:], "--context", "512")
    assert re.search(
        r"nano: memory for 16 slots of 512 tokens is '[0-9.]+ MiB .*allowed: up to 30.72 MiB", error
    )
    tiny, nano = served(*words, "--memory", "0.06").engines
    assert tiny.config.slots == 8 and tiny.context == 128 and nano.config.slots * nano.context < 8 * 512


@pytest.mark.slow
def test_the_real_command_answers_for_two_models(folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "mercury_jax", "serve", "--port", "0", "--slots", "1", "--model", "nano",
         "--model", f"mine={folder}"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        said = ""
        while "ready in" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        found = re.search(r"http://([\d.:]+)", said)
        assert found is not None
        line = http.client.HTTPConnection(found[1], timeout=120)

        def ask(model):
            body = {"model": model, "messages": [{"role": "user", "content": "347+585="}], "temperature": 0}
            line.request(
                "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
            )
            response = line.getresponse()
            return response.status, json.loads(response.read())

        status, answer = ask("nano")
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "932")
        status, other = ask("mine")
        assert status == 200 and other["model"] == "mine" and other["choices"] != answer["choices"]
        assert ask("tiny")[0] == 404
    finally:
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(60) == 0 and time.monotonic() - began < 60
