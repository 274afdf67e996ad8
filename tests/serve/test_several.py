"""One app in front of several models: each request is answered by the model that it names, and by nothing else."""

import dataclasses
import signal
import time

import jax
import pytest

from mercury_jax import sharding
from mercury_jax.serve import server
from mercury_jax.serve.app import create_app
from mercury_jax.serve.engine import engine as engine_module
from mercury_jax.serve.engine.engine import Engine
from mercury_jax.serve.engine.request import EngineConfig, EngineRequest
from mercury_jax.serve.options import VENDOR_MODELS, ServerOptions, model_names
from tests.cli.tiny_model import tiny_lm
from tests.serve.api_client import CHAT, MINIMAL, client_of, valid
from tests.serve.scripted_engine import ScriptedEngine, text_snapshots
from tests.serve.test_server import LiveServer, in_background

QUESTION = {"messages": [{"role": "user", "content": "347+585="}]}
LISTS = ("/v1/models", "/v1/chat/completions/models", "/v1/fim/completions/models",
         "/v1/edit/completions/models")  # fmt: skip


@pytest.fixture(scope="module")
def small():
    """A tiny model with another vocabulary, context, block and default rule than the embedded one, warm."""
    lm = dataclasses.replace(tiny_lm(), decoding={"rule": "threshold", "params": {"p": 0.5}})
    engine = Engine(lm, EngineConfig(slots=2, queue=4, programs="one", rules=("confidence",)))
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def both(engine, small):
    return client_of([engine, small])


def scripted(nano, name, text="932", **more):
    """A scripted engine of a model of this name, which always answers with the same text."""
    lm = dataclasses.replace(nano, name=name)
    return ScriptedEngine(lm, text_snapshots(lm, text), **more)


@pytest.mark.long
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("path", MINIMAL)
def test_each_model_answers_as_it_does_alone(engine, small, both, path):
    body = {**MINIMAL[path], "max_tokens": 12, "temperature": 0, "seed": 3}
    answers = {}
    for one in (engine, small):
        body["model"] = one.lm.name
        alone, here = (client.post(path, json=body) for client in (client_of(one), both))
        assert alone.status_code == here.status_code
        if here.status_code == 200:
            assert here.json()["choices"] == alone.json()["choices"]
            assert here.json()["usage"]["prompt_tokens"] == alone.json()["usage"]["prompt_tokens"]
            assert here.json()["model"] == one.lm.name
        answers[one.lm.name] = here.json().get("choices", here.json())
    if path in (CHAT, "/v1/completions"):
        assert answers["nano"] != answers["tiny"]


def test_the_lists_have_every_model_with_its_own_context(both, engine, small):
    for path in LISTS:
        data = valid("ModelList", both.get(path).json())["data"]
        assert [model["id"] for model in data] == ["nano", "tiny", *VENDOR_MODELS]
        contexts = {model["id"]: model["context_length"] for model in data}
        assert contexts["nano"] == contexts["mercury-2"] == engine.context == 256
        assert contexts["tiny"] == small.context == 128
    assert both.get("/v1/models/tiny").json()["description"].startswith("tiny, a diffusion language model")
    assert both.get("/v1/models/mercury-2").json()["name"] == "mercury-2 (nano)"
    assert both.get("/v1/models/third").status_code == 404
    document = both.get("/openapi.json").json()
    names = document["components"]["schemas"]["ChatCompletionsRequest"]["properties"]["model"]["enum"]
    assert names == ["nano", "tiny", *VENDOR_MODELS]


def test_unknown_names_are_refused_with_those_that_are_served(both):
    for path, body in MINIMAL.items():
        response = both.post(path, json={**body, "model": "third"})
        error = response.json()["error"]
        assert response.status_code == 404 and error["code"] == "model_not_found"
        assert error["message"] == "model `third` not found; this server has nano, tiny"


def test_aliases_mean_the_model_that_they_name(nano):
    engines = [scripted(nano, "first", "1"), scripted(nano, "second", "2")]
    said = lambda client, name: client.post(CHAT, json={"model": name, **QUESTION}).json()["choices"][0][
        "message"
    ]["content"]
    client = client_of(engines)
    assert [said(client, name) for name in ("first", "second", "mercury-2")] == ["1", "2", "1"]
    client = client_of(engines, aliases={"fast": "second", "good": "first"})
    assert [said(client, name) for name in ("fast", "good")] == ["2", "1"]
    refused = client.post(CHAT, json={"model": "mercury-2", **QUESTION})
    assert refused.status_code == 404
    message = "model `mercury-2` not found; this server has first, second (aliases: fast, good)"
    assert refused.json()["error"]["message"] == message
    # A model may have a name of the vendor's; it is then no alias of the first one.
    client = client_of([engines[0], scripted(nano, "mercury-2", "3")])
    assert [said(client, name) for name in ("mercury", "mercury-2")] == ["1", "3"]


def test_names_that_mean_two_things_are_refused(nano):
    with pytest.raises(ValueError, match="name of a model is 'a'; allowed: another name for each model"):
        create_app([scripted(nano, "a"), scripted(nano, "a")])
    names = lambda **aliases: model_names(["a", "b"], ServerOptions(aliases=aliases))
    assert names(c="b", b="b") == {"a": "a", "b": "b", "c": "b"}
    with pytest.raises(ValueError, match="alias is 'b'; allowed: a name that no model has"):
        names(b="a")
    with pytest.raises(ValueError, match="alias x is 'c'; allowed: a model that is loaded: a, b"):
        names(x="c")


def test_limits_and_errors_are_those_of_the_chosen_model(both, nano):
    """A prompt that the one context has room for is too long for the other, by characters and by tokens."""
    for prompt in ("a" * 200, "a" * 20_000):
        answers = {}
        for name in ("nano", "tiny"):
            body = {"model": name, "prompt": prompt, "max_tokens": 1}
            answers[name] = both.post("/v1/completions", json=body)
        assert answers["tiny"].status_code == 400
        assert "128" in answers["tiny"].json()["error"]["message"]
        if answers["nano"].status_code != 200:
            assert "256" in answers["nano"].json()["error"]["message"]
    tokens = {"nano": 1023, "tiny": 319}  # the vocabularies
    for name, last in tokens.items():
        body = {"model": name, "prompt": "a", "max_tokens": 1, "logit_bias": {str(last + 1): 1}}
        refusal = both.post("/v1/completions", json=body).json()["error"]["message"]
        assert f"0 to {last}" in refusal
    engines = [scripted(nano, "full", slots=1, queue=0), scripted(nano, "free", slots=1, queue=0)]
    engines[0].gate.clear()
    client = client_of(engines)
    thread, box = in_background(lambda: client.post(CHAT, json={"model": "full", **QUESTION}))
    while not engines[0].tickets:
        time.sleep(0.01)
    assert client.post(CHAT, json={"model": "full", **QUESTION}).status_code == 429
    assert client.post(CHAT, json={"model": "free", **QUESTION}).status_code == 200
    engines[0].gate.set()
    thread.join(10)
    assert box[0].status_code == 200


def test_a_prefix_is_cached_for_its_own_model(both):
    def cached(name, lines):
        body = {"model": name, "prompt": "x = 1\n" * lines, "max_tokens": 1, "temperature": 0}
        return both.post("/v1/completions", json=body).json()["usage"]["cached_input_tokens"]

    lines = {"nano": 30, "tiny": 12}
    assert [cached(name, n) for name, n in lines.items()] == [0, 0]
    assert min(cached(name, n) for name, n in lines.items()) > 0


def test_ready_when_all_are_and_each_serves_as_soon_as_it_is_warm(nano):
    engines = [scripted(nano, "warm"), scripted(nano, "cold")]
    engines[1].ready = False
    client = client_of(engines)
    ask = lambda name: client.post(CHAT, json={"model": name, **QUESTION}).status_code
    assert client.get("/ready").json() == {"status": "warming up"}
    assert (ask("warm"), ask("cold")) == (200, 503)
    engines[1].ready = True
    assert client.get("/ready").status_code == 200 == ask("cold")
    engines[1].closing = True
    assert client.get("/ready").json() == {"status": "closing"}


def test_metrics_are_of_all_models_and_of_each(nano):
    engines = [scripted(nano, "a", slots=3), scripted(nano, "b", slots=5)]
    client = client_of(engines)
    for name in ("a", "b", "b"):
        client.post(CHAT, json={"model": name, **QUESTION})
    text = client.get("/metrics").text
    for line in (
        "mercury_slots 8.0",
        'mercury_model_slots{model="a"} 3.0',
        'mercury_model_slots{model="b"} 5.0',
        "mercury_capacity 512.0",
        "mercury_waiting 0.0",
        "mercury_submitted_total 3.0",
        'mercury_model_submitted_total{model="a"} 1.0',
        'mercury_model_submitted_total{model="b"} 2.0',
        "mercury_last_token_seconds_count 3.0",
        'mercury_model_last_token_seconds_count{model="b"} 2.0',
        'mercury_model_first_frame_seconds_count{model="a"} 1.0',
        'mercury_model_tokens_per_forward_count{model="a"} 1.0',
        "mercury_ready 1.0",
    ):
        assert line in text.splitlines(), line


def test_a_signal_drains_all_models(nano):
    engines = [scripted(nano, "a"), scripted(nano, "b")]
    for engine in engines:
        engine.gate.clear()
    one = LiveServer(engines)
    running = [
        in_background(one.request, "POST", CHAT, {"model": engine.lm.name, **QUESTION}) for engine in engines
    ]
    while not all(engine.tickets for engine in engines):
        time.sleep(0.01)
    assert one.get("/ready").status == 200
    one.server.handle_exit(signal.SIGTERM, None)
    assert one.get("/ready").status == 503
    assert [one.request("POST", CHAT, {"model": m, **QUESTION}).status for m in "ab"] == [503, 503]
    # The second model still has its time when the first has nothing left to do.
    for engine, (thread, box) in zip(engines, running, strict=True):
        engine.gate.set()
        thread.join(10)
        assert box[0].status == 200 and "932" in box[0].body
        time.sleep(server.NOTICE_SECONDS + 0.2)
    one.thread.join(15)
    assert not one.thread.is_alive()


def test_all_models_have_the_same_time_to_drain(nano):
    """Neither waits for the other: `--drain` seconds in all, and then both are cancelled."""
    engines = [scripted(nano, "a"), scripted(nano, "b")]
    for engine in engines:
        engine.gate.clear()
    one = LiveServer(engines, drain=1.0)
    running = [
        in_background(one.request, "POST", CHAT, {"model": engine.lm.name, **QUESTION}) for engine in engines
    ]
    while not all(engine.tickets for engine in engines):
        time.sleep(0.01)
    began = time.monotonic()
    one.server.handle_exit(signal.SIGTERM, None)
    for thread, box in running:
        thread.join(10)
        assert box[0].status == 503 and "shutting down" in box[0].body
    assert time.monotonic() - began < server.NOTICE_SECONDS + 1.9
    one.thread.join(15)
    assert not one.thread.is_alive()


def test_models_start_one_after_the_other_and_a_failure_ends_the_server(nano):
    started = []
    engines = [scripted(nano, name) for name in "abc"]
    for engine in engines:
        engine.start = lambda engine=engine: started.append(engine.lm.name)
    engines[1].start = lambda: (_ for _ in ()).throw(RuntimeError("no memory"))
    one = LiveServer(engines)
    one.thread.join(10)
    assert not one.thread.is_alive() and str(one.server.failure) == "no memory" and started == ["a"]


def test_two_models_on_the_devices_of_one_mesh_are_refused(nano):
    devices = jax.devices()
    placed = lambda name, *on: dataclasses.replace(
        nano, name=name, params=jax.device_put(nano.params, sharding_on(on))
    )
    sharding_on = lambda on: jax.sharding.NamedSharding(
        sharding.mesh(data=len(on), devices=list(on)), jax.sharding.PartitionSpec()
    )
    first = ScriptedEngine(placed("a", *devices[:2]))
    with pytest.raises(ValueError, match="mesh of b is '2 devices'; allowed: devices that a is not on"):
        create_app([first, ScriptedEngine(placed("b", *devices[1:3]))])
    create_app([first, ScriptedEngine(placed("b", *devices[2:4])), ScriptedEngine(placed("c", devices[0]))])


def test_a_long_prompt_is_sent_to_the_device_one_chunk_at_a_time(engine, monkeypatch):
    """What the host sends ahead, another model on the device must wait for."""
    ready, encode = [], engine_module.programs.encode_prompt

    def recorded(program, params, row, *rest, **more):
        ready.append(row.cache_length.is_ready())
        return encode(program, params, row, *rest, **more)

    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 70)
    monkeypatch.setattr(engine_module.programs, "encode_prompt", recorded)
    engine.submit(EngineRequest(prompt=(7, 8, 9, 10) * 60, max_tokens=2, cache_salt="chunks")).wait()
    assert ready == [True] * 4


def test_a_busy_model_does_not_starve_another(engine, small):
    """Requests to one model end while the other, on the same device, still has more work than it has slots."""
    work = EngineRequest(prompt=(5, 6, 7), max_tokens=240, rule="confidence")
    busy = [engine.submit(dataclasses.replace(work, seed=seed)) for seed in range(9)]
    try:
        while engine.stats().running < engine.config.slots:
            time.sleep(0.001)
        for seed in range(3):
            small.submit(dataclasses.replace(work, max_tokens=16, seed=seed)).wait(60)
        assert engine.stats().running == engine.config.slots and not all(one.finished for one in busy)
    finally:
        for one in busy:
            one.cancel()
    assert all(one.wait(60).finish for one in busy)
