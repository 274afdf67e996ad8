"""Predicted outputs at a real engine: the text, the counts, and the requests beside them."""

import threading

import pytest

import mercury_jax as mj
from mercury_jax import rules
from mercury_jax.serve.engine.engine import Engine
from mercury_jax.serve.engine.request import EngineConfig, EngineRequest
from tests.serve.api_client import CHAT, PAYLOAD, client_of, content_of, events, valid
from tests.tiny import tiny

# Long enough that the answer of the embedded model has both digits of its own and predicted ones.
QUESTION = {**PAYLOAD, "max_tokens": 40}


def predicted(content, **fields):
    return {**QUESTION, "prediction": {"type": "content", "content": content}, **fields}


def details(body):
    return body["usage"]["completion_tokens_details"]


@pytest.fixture(scope="module")
def client(engine):
    return client_of(engine)


@pytest.fixture(scope="module")
def left_to_right(nano):
    """The text of the embedded model that decodes left to right, and its tokens."""
    text = "def area(width, height):\n    "
    out = mj.sample(nano, text, max_tokens=120, sampler=rules.autoregressive(), seed=3)
    return nano.tokenizer.encode(text), out.tokens[0].tolist()


def test_an_engine_verifies_a_prediction_in_wide_passes(engine, left_to_right):
    prompt, tokens = left_to_right
    changed = [*tokens[:60], 5, *tokens[61:]]
    forwards = []
    for prediction in (tokens, changed, [7] * 80, tokens[20:]):
        request = EngineRequest(prompt=tuple(prompt), max_tokens=120, prediction=tuple(prediction), seed=3)
        last = engine.submit(request).wait(240)
        assert last.finish == "length" and last.tokens.tolist() == tokens
        assert 0 <= last.predicted <= len(prediction)
        forwards.append(last.forwards)
    assert forwards[0] == 1 and forwards[1] <= 4 and forwards[2] > 100 and forwards[3] < 40


def test_a_chat_counts_the_predicted_tokens_that_its_answer_has(client, nano):
    body = valid("ChatCompletion", client.post(CHAT, json=predicted("932")).json())
    assert body["choices"][0]["message"]["content"] == "932" and body["choices"][0]["finish_reason"] == "stop"
    found, size = details(body), len(nano.tokenizer.encode("932"))
    assert found["accepted_prediction_tokens"] + found["rejected_prediction_tokens"] == size
    parts = [{"type": "text", "text": "9"}, {"type": "text", "text": "32"}]
    assert details(client.post(CHAT, json=predicted(parts)).json()) == found
    wrong = details(client.post(CHAT, json=predicted("zzzz")).json())
    assert wrong["accepted_prediction_tokens"] == 0 and wrong["rejected_prediction_tokens"] > 0
    for without in (QUESTION, predicted("")):
        assert set(details(client.post(CHAT, json=without).json())) == {"reasoning_tokens"}


def test_a_stream_has_the_text_and_the_counts_of_one_body(client, engine):
    whole = client.post(CHAT, json=predicted("The sum is 932.", seed=5)).json()
    chunks = events(engine, predicted("The sum is 932.", seed=5, stream_options={"include_usage": True}))
    assert content_of(chunks) == whole["choices"][0]["message"]["content"]
    assert details(chunks[-1]) == details(whole)


def test_a_constraint_has_its_guarantee_and_rejects_the_prediction(client):
    body = client.post(CHAT, json=predicted("932", guided_choice=["no", "yes"])).json()
    assert body["choices"][0]["message"]["content"] in ("no", "yes")
    assert details(body)["accepted_prediction_tokens"] == 0


def test_requests_in_slots_do_not_notice_one_with_a_prediction(engine, left_to_right):
    prompt, tokens = left_to_right
    plain = EngineRequest(prompt=tuple(prompt), max_tokens=60, seed=1)
    alone = engine.submit(plain).wait(240).tokens.tolist()
    beside = EngineRequest(prompt=tuple(prompt), max_tokens=120, prediction=(7,) * 80, seed=3)
    handles = [engine.submit(beside), *(engine.submit(plain) for _ in range(3))]
    assert [handle.wait(240).tokens.tolist() for handle in handles] == [tokens, alone, alone, alone]
    before = engine.stats()
    handle = engine.submit(beside)
    stopper = threading.Timer(0.3, handle.cancel)
    stopper.start()
    assert handle.wait(240).finish in ("cancelled", "length")
    after = engine.stats()
    assert after.finished + after.cancelled == before.finished + before.cancelled + 1


@pytest.mark.long
@pytest.mark.parametrize("pattern, kind", [("bidirectional", "absorbing"), ("causal_encoder", "uniform")])
def test_a_model_that_cannot_verify_starts_from_the_prediction(pattern, kind):
    """The row is that of `mj.sample(draft_text=)`, whose text it has."""
    lm = tiny(pattern, 8, kind)
    text = "print(value) for total in range"
    out = mj.sample(lm, "def x", max_tokens=24, draft_text=text, seed=2)
    engine = Engine(lm, EngineConfig(slots=1, queue=4, context=64, programs="one", prefix_bytes=0))
    prompt, prediction = (tuple(ids) for ids in ([*lm.tokenizer.begin, *lm.tokenizer.encode("def x")],
                                                 lm.tokenizer.encode(text)))  # fmt: skip
    try:
        engine.start()
        request = EngineRequest(prompt=prompt, max_tokens=24, prediction=prediction, seed=2)
        last = engine.submit(request).wait(240)
    finally:
        engine.stop()
    assert last.message == "" and last.tokens.tolist() == out.tokens[0].tolist() and out.draft is not None
    assert (last.forwards, last.predicted) == (out.forwards[0], min(out.draft.accepted[0], len(prediction)))


@pytest.mark.parametrize(
    "prediction, words",
    [
        ({"type": "content"}, "prediction.content is missing"),
        ({"type": "text", "content": "a"}, "prediction.type is 'text'; allowed: content"),
        ({"type": "content", "content": 5}, "prediction.content is 5"),
        ("932", "prediction is '932'"),
        ({"type": "content", "content": "a" * 10**6}, "maximum context length"),
    ],
)
def test_what_is_no_prediction_is_refused(scripted_app, prediction, words):
    assert words in scripted_app.refuses({**PAYLOAD, "prediction": prediction})["message"]


def test_a_rule_beside_a_prediction_is_refused(scripted_app):
    asked = {**PAYLOAD, "prediction": {"type": "content", "content": "932"}, "rule": "confidence"}
    assert "rule cannot be combined with prediction" in scripted_app.refuses(asked)["message"]
