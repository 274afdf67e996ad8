"""Typed decisions by three vendors' clients: inceptionai and openai at /v1/decisions, typesafe-sdk at /v1/systemone."""

# pyright: reportMissingImports=false
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import inceptionai
import openai
import pytest
import typesafe_sdk as typesafe

STATE = "347+585=932"
NAMED = {
    "right": {"type": "noul", "instructions": "Is it right?", "criteria": {"true": "The sum is right"}},
    "kind": {"type": "choice", "criteria": {"sum": None, "code": "A program"}},
    "size": {"type": "score", "criteria": ["small", {"at least": 100}], "instructions": "How large?"},
}
LISTED = [
    {"type": "predicate", "name": "right", "instructions": "Is it right?"},
    {
        "type": "choice", "instructions": [{"type": "input_text", "text": "What is it?"}],
        "choices": [{"value": "sum"}, {"value": "code"}, {"value": True, "description": "A truth"}],
    },
    {"type": "score", "instructions": "How large?", "levels": [{"label": "low"}, {"label": "high"}]},
]  # fmt: skip


@pytest.fixture
def inception(url, monkeypatch):
    monkeypatch.setenv("INCEPTION_BASE_URL", url)
    monkeypatch.setenv("INCEPTION_API_KEY", "any")
    with inceptionai.Inception(max_retries=0, _strict_response_validation=True) as made:
        yield made


@pytest.fixture
def openai_client(base):
    with openai.OpenAI(base_url=base, api_key="any", max_retries=0, _strict_response_validation=True) as made:
        yield made


@pytest.fixture
def typesafe_client(url):
    none = typesafe.RetryPolicy(max_retries=0)
    with typesafe.TypeSafeClient(
        api_key="any", base_url=url, model="mercury-decide", retry=none, timeout=120
    ) as made:
        yield made


@pytest.mark.parametrize("state", [STATE, {"sum": STATE, "parts": [347, 585]}, ["347+585", 932]])
def test_inceptionai_reads_every_type_of_answer(inception, state):
    found = inception.decisions.create(model="mercury-decide", state=state, questions=NAMED)
    right, kind, size = (found.answers[name] for name in NAMED)
    assert (right.type, kind.type, size.type) == ("noul", "choice", "score") and 0 <= right.noul <= 1
    assert kind.choice in kind.probabilities and kind.confidence == max(kind.probabilities.values())
    assert sum(kind.probabilities.values()) == pytest.approx(1)
    assert size.score == pytest.approx(size.probabilities["1"]) and size.legend == {
        "0": "small",
        "1": {"at least": 100},
    }
    assert found.usage.input_tokens > 20 and found.usage.output_tokens >= 3
    again = inception.decisions.create(model="mercury-decide", state=state, questions=NAMED)
    assert again.answers["right"].noul == pytest.approx(right.noul, abs=1e-5)


def test_inceptionai_asks_several_times_and_many_questions_at_once(inception):
    questions = {f"q{i}": NAMED["right"] for i in range(8)}
    found = inception.decisions.create(
        model="nano", state=STATE, questions=questions, extra_body={"reads": 2}
    )
    first = found.answers["q0"].noul
    assert [found.answers[name].noul for name in questions] == pytest.approx([first] * 8, abs=1e-5)
    assert set(found.answers["q3"].standard_errors) == {"yes", "no"}


def test_inceptionai_raises_its_errors(inception):
    with pytest.raises(inceptionai.BadRequestError, match="questions.kind.criteria"):
        inception.decisions.create(
            model="nano", state=STATE, questions={"kind": {"type": "choice", "criteria": {}}}
        )
    with pytest.raises(inceptionai.NotFoundError, match="other"):
        inception.decisions.create(model="other", state=STATE, questions=NAMED)
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    with pytest.raises(inceptionai.BadRequestError, match="images are not read"):
        inception.decisions.create(model="nano", state=image, questions=NAMED)


def test_openai_reads_every_type_of_answer(openai_client):
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "932"}
    messages = [{"role": "user", "content": STATE}, call, output]
    for given in (STATE, messages):
        found = openai_client.decisions.create(model="mercury-decide", input=given, questions=LISTED)
        right, kind, size = found.answers
        assert (right.name, right.type) == ("right", "predicate") and 0 <= right.probability <= 1
        assert kind.name is None and [x.value for x in kind.probabilities] == ["sum", "code", True]
        assert kind.choice in ["sum", "code", True] and kind.confidence == max(
            x.probability for x in kind.probabilities
        )
        assert [(x.label, x.value) for x in size.probabilities] == [("low", 0), ("high", 1)]
        assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
        assert found.usage.input_tokens_details.cached_tokens == 0


def test_openai_raises_its_errors(openai_client):
    question = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}]}
    with pytest.raises(openai.BadRequestError, match=r"questions\[0\].choices"):
        openai_client.decisions.create(model="nano", input=STATE, questions=[question])
    item = {"type": "function_call_output", "call_id": "c", "output": "932"}
    with pytest.raises(openai.BadRequestError, match="call_id is 'c'"):
        openai_client.decisions.create(model="nano", input=[item], questions=LISTED)


def test_typesafe_reads_every_type_of_answer(typesafe_client):
    questions = {
        "right": typesafe.Noul(instructions="Is it right?"),
        "kind": typesafe.Choice(criteria={"sum": None, "code": "A program"}),
        "size": typesafe.Score(instructions="How large?", criteria=["small", "large"]),
    }
    for state in (STATE, {"sum": STATE}, [STATE, 932]):
        found = typesafe_client.system_one(state, questions)
        assert found.model == "mercury-decide" and found.usage.input_tokens > 20
        assert 0 <= found.nouls["right"].noul <= 1 and found.choices["kind"].choice in ("sum", "code")
        size = found.scores["size"]
        assert size.score == pytest.approx(size.probabilities[1]) and size.legend == {0: "small", 1: "large"}
    assert "mercury-decide" in [one.name for one in typesafe_client.models.list().models]


def test_typesafe_raises_its_errors(typesafe_client):
    with pytest.raises(typesafe.TypeSafeUnprocessableEntityError, match="is 'box'") as caught:
        typesafe_client.system_one(STATE, {"where": {"type": "box"}})
    assert caught.value.request_id.startswith("req_")
    with pytest.raises(typesafe.TypeSafeNotFoundError, match="other"):
        typesafe_client.system_one(STATE, {"right": typesafe.Noul(instructions="Is it?")}, model="other")


def test_a_burst_is_answered_or_refused_with_a_time_to_wait(typesafe_client):
    question = {"right": typesafe.Noul(instructions="Is it right?")}

    def one(i):
        try:
            return typesafe_client.system_one(f"{i}+585={i + 585}", question).nouls["right"].noul
        except typesafe.TypeSafeRateLimitError as error:
            return error

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(one, range(48)))
    refused = [x for x in found if isinstance(x, Exception)]
    assert all(x.retry_after_ms >= 1000 for x in refused)
    assert all(0 <= x <= 1 for x in found if not isinstance(x, Exception)) and len(refused) < len(found)
