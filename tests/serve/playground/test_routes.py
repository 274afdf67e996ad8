"""The playground's routes: what they refuse, what they send along, and that who leaves is not served."""

import dataclasses
import http.client
import json
import re
import time
from pathlib import Path

import pytest

import mercury_jax as mj
from mercury_jax.serve.engine.sampling_params import rule_set
from mercury_jax.serve.options import ServerOptions
from mercury_jax.serve.playground import app
from mercury_jax.viz import label
from tests.cli.tiny_model import tiny_lm
from tests.decode.test_block_drafter import drafter, verifier
from tests.serve.playground.asking import ask, events
from tests.serve.playground.scripted import Scripted, shot, unveiled
from tests.serve.playground.served import Served

STATIC = Path(app.STATIC)
CHAT = {"kind": "chat", "messages": [{"role": "user", "content": "347+585="}]}
HOLE = {"kind": "infill", "before": "a = ", "after": "\n"}


def three(job):
    return [
        shot([70, 71, 72], [0, 1, 0], [0.2, 0.9, 0.1], 1),
        shot([70, 71, 73], [1, 1, 1], [1, 1, 1], 2, finish="stop"),
    ]


@pytest.fixture(scope="module")
def served(lm):
    with Served(Scripted(lm, three)) as served:
        yield served


def test_a_stream_has_one_start_its_passes_and_one_end(served):
    found = events(served.url + "playground/stream", CHAT | {"max_tokens": 9, "p": 0.5, "seed": 3})
    assert [e["type"] for e in found] == ["start", "frame", "frame", "end"]
    assert [len(e["cells"]) for e in found[1:3]] == [3, 3] and [e["step"] for e in found[1:3]] == [1, 2]
    assert found[-1]["finish"] == "stop" and found[-1]["tokens"] == 3
    job = served.engine.tickets[-1].request
    assert (job.max_tokens, job.p, job.seed, job.frames, job.rule) == (
        9,
        0.5,
        3,
        True,
        "factor",
    )  # nano's own
    tok = served.engine.lm.tokenizer
    assert job.prompt == tuple(tok.render(CHAT["messages"])) and job.suffix is None


@pytest.mark.long
def test_the_opponent_of_a_race_is_the_same_model_left_to_right(served):
    """One frame a pass, and the text and passes of `mj.sample`; the engine is not asked."""
    before = len(served.engine.tickets)
    found = events(served.url + "playground/stream", CHAT | {"rule": "autoregressive", "max_tokens": 64})
    out = mj.sample(served.engine.lm, CHAT["messages"], max_tokens=64, sampler=mj.rules.autoregressive())
    end, passes = found[-1], [e["forwards"] for e in found[1:-1]]
    assert (end["text"], end["thinking"], end["finish"]) == (out.text, out.thinking[0], "stop")
    assert passes == list(range(1, int(out.forwards[0]) + 1)) and end["forwards"] == passes[-1]
    times = [e["ms"] for e in found[1:-1]]
    assert times == sorted(times) and times[0] > 0 and len(served.engine.tickets) == before


@pytest.mark.long
@pytest.mark.parametrize("draft", ["block", "lookup"])
def test_the_opponent_of_a_drafted_model_is_the_model_alone(draft):
    lm = verifier("float32")
    joined = mj.with_block_drafter(lm, drafter(dtype="float32") if draft == "block" else draft)
    asked = {"kind": "text", "prompt": "ab", "max_tokens": 12}
    with Served(Scripted(joined, three)) as served:
        info = json.loads(ask(served.url + "playground/info")[2])
        found = events(served.url + "playground/stream", asked | {"rule": "autoregressive"})
    out = mj.sample(lm, "ab", max_tokens=12)
    assert info["baselines"][0] == "autoregressive"
    assert (found[-1]["text"], found[-1]["forwards"]) == (out.text, int(out.forwards[0]))
    assert out.lengths[0] > 4


def test_a_hole_is_prompt_and_suffix(served):
    tok, url = served.engine.lm.tokenizer, served.url + "playground/stream"
    events(url, HOLE | {"max_tokens": 5})
    job = served.engine.tickets[-1].request
    assert (job.prompt, job.suffix, job.max_tokens) == (tuple(tok.encode("a = ")), tuple(tok.encode("\n")), 5)
    events(url, CHAT | {"kind": "edit", "before": "9", "selected": "32", "after": "1"})
    job = served.engine.tickets[-1].request
    assert job.prompt == (*tok.render(CHAT["messages"]), *tok.encode("9"))
    assert job.suffix == (*tok.encode("1"), tok.eos) and job.max_tokens == len(tok.encode("32"))


def test_an_effort_fills_in_what_is_not_given(served):
    url, block = served.url + "playground/stream", served.engine.lm.model.config.block
    events(url, CHAT | {"effort": "low", "rule": "threshold"})
    low = served.engine.tickets[-1].request
    assert (low.p, low.steps, low.thinking) == (0.8, block // 2, 128)
    events(url, CHAT | {"effort": "low", "rule": "threshold", "p": 0.7, "steps": 3})
    own = served.engine.tickets[-1].request
    assert (own.p, own.steps) == (0.7, 3)
    events(url, CHAT | {"effort": "low", "rule": "confidence"})
    assert served.engine.tickets[-1].request.p is None  # an effort's p is a threshold's


@pytest.mark.parametrize(
    "change, param",
    [
        ({"kind": "poem"}, "kind"), ({"kind": None}, "kind"), ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x" * 65_537}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}] * 2}, "tools[1].function.name"),
        ({"tools": [{"name": "a"}]}, "tools[0].type"), ({"tool_choice": "b"}, "tool_choice"),
        (HOLE | {"messages": None, "tools": [{"type": "function", "function": {"name": "a"}}]}, "tools"),
        ({"kind": "text", "prompt": "x", "tools": [{"type": "function", "function": {"name": "a"}}]}, "tools"),
        ({"rule": "greedy"}, "rule"), (HOLE | {"rule": "autoregressive"}, "rule"),
        ({"rule": "autoregressive", "schema": {}}, "rule"),
        ({"p": -1}, "p"), ({"p": True}, "p"), ({"steps": 1.5}, "steps"),
        ({"steps": 1025}, "steps"), ({"temperature": 2.1}, "temperature"), ({"effort": "most"}, "effort"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 10**9}, "max_tokens"), ({"seed": -1}, "seed"),
        ({"schema": [1]}, "schema"), ({"kind": "text"}, "prompt"), ({"kind": "text", "prompt": ""}, "prompt"),
        ({"kind": "edit", "before": "x"}, "selected"), (HOLE | {"schema": {}}, "schema"),
        ({"kind": "infill", "messages": None}, "before"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(served, change, param):
    before = len(served.engine.tickets)
    status, _, body = ask(served.url + "playground/stream", CHAT | change)
    error = json.loads(body)["error"]
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert len(served.engine.tickets) == before  # nothing was started


@pytest.mark.parametrize(
    "change, param",
    [
        ({"index": 32}, "index"), ({"index": -1}, "index"), ({"tokens": [1024]}, "tokens[0]"),
        ({"settled": [2]}, "settled[0]"),
        ({"start": 2, "index": 3}, "start"), ({"settled": []}, "settled"), ({"start": 1, "index": 0}, "index"),
        ({"request": CHAT | {"rule": "autoregressive"}}, "rule"),
        ({"request": {"kind": "chat"}}, "messages"), ({"request": None}, "request"),
    ],
)  # fmt: skip
def test_a_look_at_no_cell_is_refused(served, change, param):
    good = {"request": CHAT, "tokens": [70], "settled": [1], "start": 0, "index": 1}
    status, _, body = ask(served.url + "playground/top", good | change)
    assert (status, json.loads(body)["error"]["param"]) == (400, param)


def test_nothing_but_json_is_taken(served):
    for path in ("playground/stream", "playground/top"):
        assert ask(served.url + path, CHAT, kind="text/plain")[0] == 415
        assert ask(served.url + path, b"{")[0] == 400
        assert ask(served.url + path)[0] == 405


def test_a_closing_or_cold_engine_says_so(served):
    engine = served.engine
    try:
        engine.ready = False
        assert ask(served.url + "playground/stream", CHAT)[0] == 503
        engine.ready, engine.closing = True, True
        assert ask(served.url + "playground/stream", CHAT)[0] == 503
    finally:
        engine.ready, engine.closing = True, False


def test_who_leaves_is_cancelled_at_once(served):
    """A reader that goes away in the middle ends its job, though nothing was left to send just then."""
    engine, port = served.engine, int(served.url.rstrip("/").rsplit(":", 1)[1])
    engine.hold, engine.script = True, lambda job: unveiled(range(70, 90))
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request(
            "POST", "/playground/stream", json.dumps(CHAT), {"content-type": "application/json"}
        )
        assert connection.getresponse().readline().startswith(b'data: {"type":"start"')
        ticket = engine.tickets[-1]
        assert not ticket.cancelled
        connection.sock.close() if connection.sock else None
        connection.close()
        until = time.monotonic() + 5
        while not ticket.cancelled and time.monotonic() < until:
            time.sleep(0.01)
        assert ticket.cancelled
    finally:
        engine.hold, engine.script = False, three
        engine.gate.release(20)


def test_every_file_has_the_policy_and_needs_no_other_server(served):
    """No inline script, style or handler, nothing from elsewhere: the policy could not forbid less."""
    files = sorted(p for p in STATIC.rglob("*") if p.is_file())
    assert len(files) >= 10
    for path in ["", *(f"playground/static/{p.name}" for p in files)]:
        status, headers, body = ask(served.url + path)
        policy = headers["content-security-policy"]
        assert status == 200 and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and headers["x-content-type-options"] == "nosniff"
        text = body.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(
            r"https?://|//cdn|innerHTML|outerHTML|insertAdjacentHTML|document\.write", text
        ), path
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*\ssrc=)", page)


def test_static_files_are_all_that_is_served(served):
    for path in ("../app.py", "%2e%2e/app.py", "..%2fapp.py", "nothing.js", ""):
        assert ask(served.url + "playground/static/" + path)[0] == 404


def test_a_key_guards_all_of_it(scripted):
    served = scripted(three, ServerOptions(keys=("a-long-key",)))
    for path, data in (("", None), ("playground/static/main.js", None), ("playground/info", None),
                       ("playground/stream", CHAT), ("playground/top", CHAT)):  # fmt: skip
        assert ask(served.url + path, data)[0] == 401


def test_info_offers_what_the_table_takes(served):
    info = json.loads(ask(served.url + "playground/info")[2])
    assert info["model"] == "nano" and info["baselines"] == ["autoregressive", "confidence"] and info["holes"]
    for rule in info["rules"]:
        events(served.url + "playground/stream", CHAT | {"rule": rule["name"], "p": rule["value"]})
    for example in info["examples"]:
        ask_for = {k: v for k, v in example.items() if k not in ("title",)}
        if example["kind"] == "chat":
            ask_for["messages"] = [{"role": "user", "content": ask_for.pop("prompt")}]
        events(served.url + "playground/stream", ask_for)


def test_only_rules_of_the_engine_are_offered(lm):

    engine = Scripted(lm, lambda request: [])
    engine.rules = rule_set(lm, ("confidence",))
    with Served(engine) as served:
        info = json.loads(ask(served.url + "playground/info")[2])
        assert [rule["name"] for rule in info["rules"]] == [*engine.rules.names] and len(info["rules"]) == 2
        assert ask(served.url + "playground/stream", CHAT | {"rule": "local_leap"})[0] == 400


@pytest.mark.long
def test_each_model_has_its_own_info_stream_and_tokens(lm):
    """The first model is meant where none is named; labels, limits and ids are those of the model that is."""
    mine = dataclasses.replace(tiny_lm(), name="mine")
    engines = [Scripted(one, lambda job: [shot([300], [1], [1], 1, finish="stop")]) for one in (lm, mine)]
    with Served(engines) as served:
        url = served.url + "playground/"
        infos = {
            name: json.loads(ask(f"{url}info{query}")[2])
            for name, query in (
                ("", ""), ("nano", "?model=nano"), ("mine", "?model=mine"), ("mercury", "?model=mercury"),
            )
        }  # fmt: skip
        assert infos[""] == infos["nano"] == infos["mercury"] != infos["mine"]
        assert infos["mine"]["models"] == infos["nano"]["models"] == ["nano", "mine"]
        assert (infos["mine"]["context"], infos["mine"]["block"], infos["mine"]["turns"]) == (128, 8, True)
        assert (infos["nano"]["context"], infos["nano"]["block"], infos["nano"]["turns"]) == (512, 32, False)
        for one, body in zip(engines, (CHAT, CHAT | {"model": "mine"}), strict=True):
            start, frame, *_ = events(url + "stream", body)
            assert start["model"] == one.lm.name and start["block"] == one.block
            assert frame["cells"][0][2] == label(one.lm.tokenizer, 300)[0]
            assert one.tickets[-1].request.prompt == tuple(one.lm.tokenizer.render(CHAT["messages"]))
        assert [len(one.tickets) for one in engines] == [1, 1]
        for path, body in (("stream", {}), ("top", {"tokens": [], "settled": [], "start": 0, "index": 0})):
            third = CHAT | {"model": "third"}
            status, _, said = ask(url + path, {"request": third, **body} if body else third)
            assert (status, json.loads(said)["error"]["code"]) == (404, "model_not_found")
        assert ask(url + "info?model=third")[0] == 404
        cell = {"tokens": [400], "settled": [1], "start": 0, "index": 0}
        assert ask(url + "top", cell | {"request": CHAT})[0] == 200
        status, _, said = ask(url + "top", cell | {"request": CHAT | {"model": "mine"}})
        assert status == 400 and "0 to 319" in json.loads(said)["error"]["message"]
