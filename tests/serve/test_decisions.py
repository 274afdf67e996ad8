"""POST /v1/decisions and /v1/systemone: the forms of Mercury, OpenAI and TypeSafe, against `mj.decide`."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import mercury_jax as mj
from mercury_jax.decode.decide import Settings, ask
from mercury_jax.serve.engine.deciding import DecisionWorker
from mercury_jax.serve.engine.request import RequestRejected
from tests.serve.api_client import client_of, post, valid
from tests.serve.scripted_engine import ScriptedEngine

PATH, SYSTEM_ONE = "/v1/decisions", "/v1/systemone"
STATE = "347+585=932"
QUESTIONS = {
    "right": {"type": "noul", "instructions": "Is it right?", "criteria": {"true": "The sum is right"}},
    "kind": {"type": "choice", "criteria": {"sum": None, "code": "A program"}, "instructions": "What is it?"},
    "size": {"type": "score", "criteria": ["small", {"at least": 100}]},
}
MERCURY = {"model": "mercury-decide", "state": STATE, "questions": QUESTIONS}
OPENAI = {
    "model": "nano",
    "input": STATE,
    "questions": [
        {"type": "predicate", "name": "right", "instructions": "Is it right?"},
        {
            "type": "choice",
            "instructions": [{"type": "input_text", "text": "What is it?"}],
            "choices": [{"value": "sum"}, {"value": True, "description": "A truth"}],
        },
        {"type": "score", "instructions": "How large?", "levels": [{"label": "low"}, {"label": "high"}]},
    ],
}


class DecidingEngine(ScriptedEngine):
    """An engine that reads decisions, and has no slots that would take time to compile."""

    def __init__(self, lm, limit, **more):
        super().__init__(lm, **more)
        self.worker = DecisionWorker(lm, limit, lambda count: None)

    def decide(self, asked, settings):
        return self.worker.submit(asked, settings)


@pytest.fixture(scope="module")
def engine(nano):
    engine = DecidingEngine(nano, 12)
    engine.worker.start()
    yield engine
    engine.worker.stop()


def test_mercurys_form_has_the_answers_of_decide(engine, nano):
    found = post(engine, MERCURY, PATH, "MercuryDecision")
    named = {
        "right": mj.questions.YesNo("Is it right?", "The sum is right"),
        "kind": mj.questions.MultipleChoice({"sum": None, "code": "A program"}, "What is it?"),
        "size": mj.questions.Scale(["small", {"at least": 100}]),
    }
    out = mj.decide(nano, STATE, named)
    answers = found["answers"]
    assert answers["right"] == {"type": "noul", "noul": pytest.approx(out["right"].yes, abs=1e-5)}
    kind, size = out["kind"], out["size"]
    wanted = dict(zip(kind.labels, kind.probabilities, strict=True))
    assert answers["kind"] == {
        "type": "choice", "choice": kind.label, "confidence": pytest.approx(kind.confidence, abs=1e-5),
        "probabilities": pytest.approx(wanted, abs=1e-5),
    }  # fmt: skip
    assert answers["size"]["score"] == pytest.approx(size.score, abs=1e-5)
    assert answers["size"]["legend"] == {"0": "small", "1": {"at least": 100}}
    assert set(answers["size"]["probabilities"]) == {"0", "1"}
    assert found["model"] == "mercury-decide"
    assert found["usage"] == {"input_tokens": out.prompt_tokens, "output_tokens": out.label_tokens}


def test_openais_form_has_the_answers_in_order(engine, nano):
    found = post(engine, OPENAI, PATH, "OpenAIDecision")
    right, kind, size = found["answers"]
    out = mj.decide(nano, STATE, {"q": mj.questions.YesNo("Is it right?")})
    assert right == {
        "name": "right",
        "type": "predicate",
        "probability": pytest.approx(out["q"].yes, abs=1e-5),
    }
    assert kind["name"] is None and [x["value"] for x in kind["probabilities"]] == ["sum", True]
    assert kind["choice"] in ("sum", True) and kind["confidence"] >= 0.5
    assert [(x["label"], x["value"]) for x in size["probabilities"]] == [("low", 0), ("high", 1)]
    assert size["score"] == pytest.approx(size["probabilities"][1]["probability"])
    usage = found["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_messages_and_calls_are_read_as_one_text(engine):
    items = [
        {"role": "developer", "content": "Check sums."},
        {"role": "user", "content": [{"type": "input_json", "data": {"sum": "347+585"}}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 347}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "932"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "It is 932."}]},
    ]
    text = (
        'developer: Check sums.\n\nuser: {"sum": "347+585"}\n\ncall of add: {"a": 347}\n\n'
        "output of add: 932\n\nassistant: It is 932."
    )
    written, plain = (post(engine, OPENAI | {"input": x}, PATH, "OpenAIDecision") for x in (items, text))
    alone = post(engine, OPENAI | {"input": [{"role": "user", "content": STATE}]}, PATH, "OpenAIDecision")
    assert written == plain and alone == post(engine, OPENAI, PATH, "OpenAIDecision")


def test_several_reads_have_standard_errors(engine):
    found = post(engine, MERCURY | {"reads": 2, "second_reads": 2, "doubt": 0.0}, PATH, "MercuryDecision")
    assert set(found["answers"]["kind"]["standard_errors"]) == {"sum", "code"}
    assert set(found["answers"]["right"]["standard_errors"]) == {"yes", "no"}


def test_decisions_that_wait_share_a_pass_and_have_the_answers_of_each_alone(nano):
    counts, states = [], [f"{n}+585={n + 585}" for n in range(347, 352)]
    worker = DecisionWorker(nano, 8, counts.append)
    asked = [ask(nano, state, {"q": mj.questions.YesNo("Is it right?")}, Settings()) for state in states]
    found = [worker.submit(one, Settings()) for one in asked]
    found[2].cancel()
    worker.start()
    for i, (state, one) in enumerate(zip(states, found, strict=True)):
        if i != 2:
            alone = mj.decide(nano, state, {"q": mj.questions.YesNo("Is it right?")})
            assert one.result(120)["q"].yes == pytest.approx(alone["q"].yes, abs=1e-5)
    assert counts == [4]
    worker.stop()
    with pytest.raises(RequestRejected):
        worker.submit(asked[0], Settings())


def test_a_decision_that_fails_takes_no_other_along(nano, monkeypatch):
    from mercury_jax.serve.engine import deciding

    answer = deciding.answer

    def failing(lm, asked, settings):
        if any("bad" in one.name for one in asked):
            raise RuntimeError("a fault")
        return answer(lm, asked, settings)

    monkeypatch.setattr(deciding, "answer", failing)
    worker = DecisionWorker(nano, 8, lambda count: None)
    good, bad = (
        worker.submit(ask(nano, STATE, {name: mj.questions.YesNo("Is it?")}, Settings()), Settings())
        for name in ("good", "bad")
    )
    worker.start()
    assert 0 <= good.result(120)["good"].yes <= 1
    with pytest.raises(RuntimeError, match="a fault"):
        bad.result(120)
    worker.stop()


def test_more_decisions_than_may_wait_are_refused_with_429(nano):
    engine = DecidingEngine(nano, 2, slots=1, queue=1)  # its worker is not started, so decisions wait
    client, worker = client_of(engine), engine.worker
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(client.post, PATH, json=MERCURY) for _ in range(2)]
        while worker.unfinished < 2:
            threading.Event().wait(0.01)
        for path in (PATH, SYSTEM_ONE):
            refused = client.post(path, json=MERCURY)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) >= 1000
        worker.start()
        assert [one.result().status_code for one in waiting] == [200, 200]
    worker.stop()


def test_the_engine_reads_decisions_beside_its_slots_and_drains_them(nano):
    from mercury_jax.serve.engine.engine import Engine
    from mercury_jax.serve.engine.request import EngineConfig, EngineRequest

    engine = Engine(nano, EngineConfig(slots=1, queue=2, context=256, programs="one", rules=("confidence",)))
    engine.start()
    running = engine.submit(EngineRequest(prompt=(5, 6, 7), max_tokens=64))
    client = client_of(engine)
    valid("MercuryDecision", client.post(PATH, json=MERCURY).json())
    before = engine.stats()
    assert before.submitted == 2 and before.finished >= 1
    running.wait(120)
    asked = ask(nano, STATE, {"q": mj.questions.YesNo("Is it?")}, Settings())
    late = engine.decide(asked, Settings())
    assert engine.drain(120) and late.done() and engine.stats().finished == 3
    assert client.post(PATH, json=MERCURY).status_code == 503
    engine.stop()


def changed(place, value, body=MERCURY):
    """The body with one value replaced, or left out where it is ..."""
    import copy

    made = copy.deepcopy(body)
    at = made
    for part in place[:-1]:
        at = at[part]
    if value is ...:
        del at[place[-1]]
    else:
        at[place[-1]] = value
    return made


Q = "questions"
MALFORMED = [
    (changed(["model"], ...), "model is missing"),
    (changed(["model"], "other"), "`other` not found"),
    (changed(["state"], ...), "state is missing"),
    (changed(["state"], 3), "state is 3"),
    (changed(["state"], "x " * 4000), "maximum context length"),
    (changed([Q], ...), "questions is missing"),
    (changed([Q], {}), "questions is an object of 0 entries"),
    (changed([Q], []), "questions is a list of 0 entries"),
    (changed([Q], {f"q{i}": QUESTIONS["right"] for i in range(401)}), "an object of 401 entries"),
    (changed([Q, "right"], "Is it?"), "questions.right is 'Is it?'"),
    (changed([Q, "right", "type"], "box"), "type is 'box'; allowed: choice, noul, score"),
    (changed([Q, "right", "type"], ...), "questions.right.type is missing"),
    (changed([Q, "right"], {"type": "noul"}), "questions.right.instructions is null"),
    (changed([Q, "right", "criteria"], "x"), "questions.right.criteria is 'x'"),
    (changed([Q, "kind", "criteria"], {}), "questions.kind.criteria is an object of 0 entries"),
    (changed([Q, "kind", "criteria"], ...), "questions.kind.criteria is missing"),
    (changed([Q, "kind", "criteria"], ["a"]), "questions.kind.criteria is a list"),
    (changed([Q, "kind", "criteria"], {str(i): None for i in range(256)}), "an object of 256 entries"),
    (changed([Q, "kind", "criteria"], {"a": 3}), "questions.kind.criteria.a is 3"),
    (changed([Q, "kind", "criteria"], {" ": None}), "is ' '; allowed: a text of at least one visible"),
    (changed([Q, "size", "criteria"], []), "questions.size.criteria is a list of 0 entries"),
    (changed([Q, "size", "criteria"], {"a": 1}), "questions.size.criteria is an object"),
    (changed(["reads"], 0), "reads is 0; allowed: a whole number from 1 to 64"),
    (changed(["reads"], "2"), "reads is '2'"),
    (changed(["doubt"], 1.5), "doubt is 1.5"),
    (changed(["seed"], -1), "seed is -1"),
    (changed(["second_read"], 2), "second_read"),
    (changed(["assets"], {"x": {"type": "image"}}), "assets has 1 entries, but images are not read"),
    (changed(["state"], [{"type": "image_url", "image_url": {"url": "data:"}}]), "part of type image_url"),
    (
        changed([Q, "size", "instructions"], {"a": [{"type": "image_url"}]}),
        "questions.size.instructions holds",
    ),
    ({**MERCURY, "input": STATE}, "input and state in one request"),
    (changed(["input"], [], OPENAI), "input is a list of 0 entries"),
    (changed(["input"], 3, OPENAI), "input is 3"),
    (changed(["input"], [{"role": "tool", "content": "x"}], OPENAI), "input[0]"),
    (
        changed(["input"], [{"type": "function_call_output", "call_id": "c", "output": "x"}], OPENAI),
        "input[0].call_id is 'c'; allowed: none, since no call comes before it",
    ),
    (
        changed(["input"], [{"role": "user", "content": [{"type": "input_image"}]}], OPENAI),
        "input[0].content[0] is an input_image, but images are not read",
    ),
    (changed([Q], [], OPENAI), "questions is a list of 0 entries"),
    (changed([Q, 0, "instructions"], " ", OPENAI), "questions[0].instructions is ' '"),
    (changed([Q, 0, "instructions"], ..., OPENAI), "questions[0].instructions is missing"),
    (changed([Q, 1, "choices"], [{"value": "a"}], OPENAI), "questions[1].choices is a list of 1 entries"),
    (
        changed([Q, 1, "choices"], [{"value": "true"}, {"value": True}], OPENAI),
        "choices is 'true'; allowed: values that differ",
    ),
    (changed([Q, 1, "choices"], [{"value": 1}, {"value": 2}], OPENAI), "questions[1].choices[0].value is 1"),
    (changed([Q, 2, "levels"], [], OPENAI), "questions[2].levels is a list of 0 entries"),
    (changed([Q, 2, "levels"], [{"label": ""}], OPENAI), "questions[2].levels[0].label is ''"),
]


@pytest.mark.parametrize(("body", "said"), MALFORMED, ids=[said[:40] for _, said in MALFORMED])
def test_a_malformed_body_is_a_4xx_that_names_its_field(engine, body, said):
    response = client_of(engine).post(PATH, json=body)
    assert 400 <= response.status_code < 500
    assert said in valid("Error", response.json())["error"]["message"]
    if "input" in body:
        return
    typesafe = client_of(engine).post(SYSTEM_ONE, json=body)
    assert typesafe.headers["x-typesafe-request-id"] == typesafe.headers["x-request-id"]
    if response.status_code == 400:
        [detail] = typesafe.json()["detail"]
        assert typesafe.status_code == 422 and said in detail["msg"] and detail["loc"][0] == "body"
    else:
        assert typesafe.status_code == response.status_code


def test_questions_that_would_take_too_long_are_refused(engine):
    many = {
        f"q{i}": {"type": "choice", "criteria": {f"label {i} {j}": None for j in range(255)}}
        for i in range(40)
    }
    response = client_of(engine).post(PATH, json=MERCURY | {"questions": many, "state": "x"})
    assert response.status_code == 400 and "allowed: up to" in response.json()["error"]["message"]
    response = client_of(engine).post(PATH, json=MERCURY | {"reads": 64, "second_reads": 64, "questions": {
        f"q{i}": QUESTIONS["right"] for i in range(400)}, "state": "x" * 200})  # fmt: skip
    assert response.status_code == 400 and "allowed: up to" in response.json()["error"]["message"]


def test_the_lists_of_models_name_the_endpoint_and_have_typesafes_keys(engine):
    client = client_of(engine)
    plain = client.get("/v1/models").json()
    assert "decisions" in plain["data"][0]["supported_endpoints"] and "models" not in plain
    assert "mercury-decide" in [one["id"] for one in plain["data"]]
    theirs = client.get("/v1/models", headers={"X-TypeSafe-SDK": "typesafe-sdk/0.7.5"}).json()["models"]
    assert [set(one) for one in theirs] == [{"name", "description", "release_date"}] * len(plain["data"])
