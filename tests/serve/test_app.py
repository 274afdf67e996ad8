"""End to end: HTTP requests to the embedded model, through the engine, to the responses."""

import asyncio
import itertools
import json
import threading
import time

import numpy as np
import pytest
from jsonschema.validators import Draft202012Validator
from starlette.testclient import TestClient

import mercury_jax as mj
from mercury_jax.decode.grammar.search import EndSearch
from mercury_jax.serve.app import create_app
from mercury_jax.serve.options import ServerOptions
from mercury_jax.tokenizer import SPECIAL
from tests.marks import slow_except
from tests.serve.api_client import CHAT, valid
from tests.serve.asgi_client import Connection

SUM = [{"role": "user", "content": "347+585="}]
PAYLOAD = {"model": "mercury-2", "messages": SUM, "max_tokens": 64}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "maximum": 99}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}
VERDICT = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "parameters": POINT}}
EDIT = """<|current_file_content|>
current_file_path: a.py
def f(x):
<|code_to_edit|>
    retrun x<|cursor|>
<|/code_to_edit|>
<|/current_file_content|>

<|edit_diff_history|>
<|/edit_diff_history|>
"""
APPLY = """<|original_code|>
def f(x):
    return x
<|/original_code|>

<|update_snippet|>
def f(x):
    return x + 1
<|/update_snippet|>"""


def named(name):
    return {"type": "function", "function": {"name": name}}


SCHEMAS = {
    CHAT: ("ChatCompletion", "ChatCompletionChunk"),
    "/v1/completions": ("TextCompletion", "TextChunk"),
    "/v1/fim/completions": ("TextCompletion", "TextChunk"),
    "/v1/edit/completions": ("EditCompletion", "EditChunk"),
    "/v1/apply/completions": ("EditCompletion", "EditChunk"),
}


@pytest.fixture(scope="module")
def app(engine):
    return create_app(engine, ServerOptions(playground=False))


@pytest.fixture(scope="module")
def client(app):
    return TestClient(app, base_url="http://localhost")


def post(client, payload, path=CHAT):
    answer = client.post(path, json=payload)
    assert answer.status_code == 200, answer.text
    return valid(SCHEMAS[path][0], answer.json())


def stream(client, payload, path=CHAT):
    answer = client.post(path, json={**payload, "stream": True})
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
    lines = [
        line for line in answer.text.split("\n\n")[:-2] if not line.startswith(":")
    ]  # a slow machine's comments
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "error" not in str(chunks)
    return [valid(SCHEMAS[path][1], chunk) for chunk in chunks]


def text_of(chunks):
    parts = [c.get("delta", c) for chunk in chunks for c in chunk["choices"]]
    return "".join(part.get("content", "") + part.get("text", "") for part in parts)


@pytest.mark.long
def test_a_question_is_answered(client, nano):
    body = post(client, PAYLOAD)
    assert body["choices"][0]["message"]["content"] == "932" == text_of(stream(client, PAYLOAD))
    assert body["usage"]["prompt_tokens"] == len(nano.tokenizer.render(SUM))
    assert body["usage"]["completion_tokens"] > body["usage"]["reasoning_tokens"] > 0


def test_the_last_diffusing_chunk_is_the_answer(client):
    chunks = stream(client, {**PAYLOAD, "diffusing": True, "max_tokens": 40})
    shown = [c["delta"]["content"] for chunk in chunks for c in chunk["choices"] if "content" in c["delta"]]
    assert shown[-1] == post(client, {**PAYLOAD, "max_tokens": 40})["choices"][0]["message"]["content"]


@pytest.mark.long
@pytest.mark.parametrize(
    "effort, most",
    [("instant", None), ("instant", 6), ("low", 40), ("medium", None), ("high", 40), (None, 40), (None, 6)],
)
def test_every_effort_gives_a_nonempty_answer(client, effort, most):
    payload = {**PAYLOAD, "reasoning_effort": effort, "reasoning_summary": True, "max_tokens": most}
    chunks = stream(client, {**payload, "stream_options": {"include_usage": True}})
    assert text_of(chunks) and chunks[-2]["choices"][0]["finish_reason"] == "stop"
    if effort in ("low", "medium", "high"):
        assert chunks[-2]["reasoning_summary"]["status"] == "complete"
        assert chunks[-1]["usage"]["reasoning_tokens"] > 5


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_obeys_its_schema(client, streamed):
    held = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
    for more in (
        {},
        {"temperature": 2, "seed": 1},
        {"max_tokens": 24, "temperature": 1.5, "stop": ["}", '"']},
    ):
        payload = {**PAYLOAD, "response_format": held, **more}
        if streamed:
            content = text_of(stream(client, payload))
        else:
            content = post(client, payload)["choices"][0]["message"]["content"]
        Draft202012Validator(POINT).validate(json.loads(content))
    tight = client.post(CHAT, json={**PAYLOAD, "response_format": held, "max_tokens": 3})
    assert tight.status_code == 400 and "token" in tight.json()["error"]["message"]
    some = post(client, {**PAYLOAD, "response_format": {"type": "json_object"}, "max_tokens": 24})
    assert isinstance(json.loads(some["choices"][0]["message"]["content"]), dict)


@pytest.mark.long
@pytest.mark.parametrize("choice", ["required", named("add")])
def test_a_required_tool_call_is_made(client, choice):
    other = {"type": "function", "function": {"name": "other"}}
    tools = [other, ADD] if choice != "required" else [ADD]
    payload = {**PAYLOAD, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    [made] = post(client, payload)["choices"]
    [call] = made["message"]["tool_calls"]
    assert made["finish_reason"] == "tool_calls" and call["function"]["name"] == "add"
    Draft202012Validator(POINT).validate(json.loads(call["function"]["arguments"]))
    deltas = [
        d
        for chunk in stream(client, payload)
        for c in chunk["choices"]
        for d in c["delta"].get("tool_calls", [])
    ]
    assert "id" in deltas[0] and not any("id" in d for d in deltas[1:])
    Draft202012Validator(POINT).validate(json.loads("".join(d["function"]["arguments"] for d in deltas)))


@pytest.mark.long
def test_allowed_tools_restricts_the_calls(client):
    other = {"type": "function", "function": {"name": "other"}}
    some = lambda mode, *names: {"type": "allowed_tools",
                                 "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}  # fmt: skip
    payload = {**PAYLOAD, "tools": [other, ADD], "parallel_tool_calls": False, "temperature": 2}
    for seed in range(3):
        [made] = post(client, {**payload, "tool_choice": some("required", "add"), "seed": seed})["choices"]
        assert [call["function"]["name"] for call in made["message"]["tool_calls"]] == ["add"]
    assert post(client, {**payload, "tool_choice": some("auto", "add", "other")})["choices"]
    for bad in (some("required", "third"), some("always", "add"), some("auto")):
        answer = client.post(CHAT, json={**payload, "tool_choice": bad})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("tool_choice"), bad


@pytest.mark.long
def test_optional_tools_do_not_change_other_answers(client):
    for more in (
        {"tools": []},
        {"tools": [ADD], "tool_choice": "none"},
        {"tools": None, "tool_choice": "auto"},
    ):
        assert post(client, {**PAYLOAD, **more})["choices"][0]["message"]["content"] == "932"
    auto = post(client, {**PAYLOAD, "tools": [ADD]})["choices"][0]
    for call in auto["message"].get("tool_calls", ()):
        Draft202012Validator(POINT).validate(json.loads(call["function"]["arguments"]))
    for bad in ({"tool_choice": "required"}, {"tools": [ADD], "tool_choice": named("x")},
                {"tools": [ADD, ADD]}):  # fmt: skip
        assert client.post(CHAT, json={**PAYLOAD, **bad}).status_code == 400, bad


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_with_tools_and_a_format_an_answer_is_one_or_the_other(client, streamed):
    """Agent frameworks send both in every turn, with `tool_choice` unset. The seeds give both kinds of answer."""
    held = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": VERDICT, "strict": True}}
    called = 0
    for i in range(12):
        payload = {**PAYLOAD, "tools": [ADD], "response_format": held, "temperature": 2, "seed": i, "max_tokens": 48,
               "reasoning_effort": "instant", "stop": ["}"], "logit_bias": {"12": 100 * (i % 2)}}  # fmt: skip
        if streamed:
            chunks = stream(client, payload)
            content, finish = text_of(chunks), chunks[-1]["choices"][0]["finish_reason"]
            deltas = [d for chunk in chunks for d in chunk["choices"][0]["delta"].get("tool_calls", ())]
            calls = ["".join(d["function"]["arguments"] for d in deltas if d["index"] == j)
                     for j in range(len({d["index"] for d in deltas}))]  # fmt: skip
        else:
            [choice] = post(client, payload)["choices"]
            content, finish = choice["message"]["content"] or "", choice["finish_reason"]
            calls = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())]
        assert bool(calls) != bool(content) and finish == ("tool_calls" if calls else "stop")
        for text, schema in [*((call, POINT) for call in calls), *[(content, VERDICT)] * bool(content)]:
            Draft202012Validator(schema).validate(json.loads(text))
        called += bool(calls)
    assert 0 < called < 12


class TimedConnection(Connection):
    """A stream that records, for each message, how many seconds the engine had spent searching before."""

    def __init__(self, app, payload, searched):
        super().__init__(app, payload)
        self.searched, self.before = searched, []

    async def _send(self, message):
        self.before.append(self.searched[0])
        await super()._send(message)


@pytest.mark.long
def test_a_stream_does_not_wait_for_the_grammar_of_another_request(app, monkeypatch):
    """Each state of this schema takes milliseconds, and a search for a valid end visits hundreds of them."""
    searched, child = [0.0], EndSearch._child

    def slow(*args, **named):
        if threading.current_thread().name == "mercury-engine":  # all rows wait for it, not for compiling
            until = time.thread_time() + 0.01
            while time.thread_time() < until:
                pass
            searched[0] += 0.01
        return child(*args, **named)

    monkeypatch.setattr(EndSearch, "_child", slow)
    tree = {"$ref": "#/$defs/tree"}
    pair = {"type": "object", "properties": {"l": tree, "r": tree}, "required": ["l", "r"],
            "additionalProperties": False}  # fmt: skip
    schema = {
        "$defs": {"tree": {"anyOf": [{"type": "string", "pattern": "^[a-z]{4,9}[0-9]$"}, pair]}},
        **tree,
    }
    held = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    payload = {**PAYLOAD, "temperature": 2, "reasoning_effort": "instant"}
    endless = {"logit_bias": {str(i): -100 for i in (SPECIAL.eos, SPECIAL.end_turn)}, "max_tokens": 200}

    async def go():
        plain = TimedConnection(app, {**payload, **endless, "stream": True, "diffusing": True}, searched)
        await plain.open()
        while len(plain.before) < 2:
            await asyncio.sleep(0.001)
        others = [
            Connection(app, {**payload, "response_format": held, "seed": i, "max_tokens": 60})
            for i in range(4)
        ]
        answers = await asyncio.gather(*(line.whole() for line in others))
        return [*answers, await plain.whole()], plain.before

    (*answers, last), before = asyncio.run(go())
    assert last.status == 200 and last.body.endswith(b"[DONE]\n\n")
    for answer in answers:
        Draft202012Validator(schema).validate(json.loads(answer.json["choices"][0]["message"]["content"]))
    gaps = [after - earlier for earlier, after in itertools.pairwise(before)]
    assert 0 < searched[0] < 2.5 and max(gaps) < 0.5


def test_logprobs_belong_to_the_tokens_of_the_answer(client, nano):
    payload = {**PAYLOAD, "logprobs": True, "top_logprobs": 3, "reasoning_effort": "low"}
    made = post(client, payload)["choices"][0]
    entries = made["logprobs"]["content"]
    assert b"".join(bytes(e["bytes"]) for e in entries).decode().strip() == made["message"]["content"]
    assert all(e["logprob"] <= 0 and len(e["top_logprobs"]) == 3 for e in entries)
    assert all(e["top_logprobs"][0]["logprob"] >= e["top_logprobs"][2]["logprob"] for e in entries)
    assert stream(client, payload)[-1]["choices"][0]["logprobs"] == made["logprobs"]
    plain = {"model": "nano", "prompt": "def f(x):", "max_tokens": 8, "logprobs": 2}
    choice = post(client, plain, "/v1/completions")["choices"][0]
    assert (
        "".join(choice["logprobs"]["tokens"]) == choice["text"]
        and len(choice["logprobs"]["text_offset"]) == 8
    )


@pytest.mark.long
def test_a_rule_and_its_parameters_change_how_a_request_is_decoded(client, engine):
    """The rules of mj.rules, beside requests with another one in the same batch."""
    payload = {
        "model": "nano", "prompt": "x = 1\ny = ", "max_tokens": 16, "temperature": 0,
        "logit_bias": {"1": -100},
    }  # fmt: skip

    def passes(**fields):
        before = engine.stats().forwards
        assert len(post(client, {**payload, **fields}, "/v1/completions")["choices"]) == 1
        return engine.stats().forwards - before

    strict = passes(rule="factor", rule_params={"f": 1e-9, "accept_last": 0})
    assert passes(rule="factor", rule_params={"f": 1e9}) < strict
    assert passes(rule="confidence") == strict == passes(rule="factor", rule_params={"f": 1e-9})


def test_a_json_object_obeys_the_schema_beside_it(client):
    """The form of llama.cpp and Together."""
    held = {"type": "json_object", "schema": VERDICT}
    for made in (post(client, {**PAYLOAD, "response_format": held})["choices"][0]["message"]["content"],
                 text_of(stream(client, {**PAYLOAD, "response_format": held}))):  # fmt: skip
        Draft202012Validator(VERDICT).validate(json.loads(made))
    held = {"type": "json_object", "schema": {"required": ["a"], "properties": {"a": {"type": "strin"}}}}
    refused = client.post(CHAT, json={**PAYLOAD, "response_format": held}).json()["error"]
    assert refused["param"] == "response_format.schema"


@pytest.mark.long
def test_bad_words_are_in_no_answer(client):
    chat = {"model": "nano", "messages": [{"role": "user", "content": "347+585="}], "max_tokens": 8}
    said = lambda **more: post(client, chat | more)["choices"][0]["message"]["content"]
    plain = said()
    changed = said(bad_words=[plain[:2]])
    assert changed.strip() and plain[:2] not in changed
    text = {"model": "nano", "prompt": "def f(x):", "max_tokens": 8}
    write = lambda **more: post(client, text | more, "/v1/completions")["choices"][0]["text"]
    words = [c for c in dict.fromkeys(write()) if c.isalpha()]
    assert words and not set(words) & set(write(bad_words=words))
    for more, path in ((chat | {"response_format": {"type": "json_object"}}, "/v1/chat/completions"),
                       (text | {"suffix": "x"}, "/v1/completions")):  # fmt: skip
        refused = client.post(path, json=more | {"bad_words": ["a"]})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "bad_words"


@pytest.mark.long
def test_sampling_parameters_change_the_answer(client):
    payload = {"model": "nano", "prompt": "def f(x):", "max_tokens": 8, "temperature": 1.2, "seed": 1}
    texts = lambda **more: [
        c["text"] for c in post(client, {**payload, **more}, "/v1/completions")["choices"]
    ]
    [one] = texts()
    assert texts(n=3)[0] == one and texts(n=2, seed=2)[0] == texts(n=3)[1] != one
    assert texts(top_k=1) == texts(min_p=1) == texts(top_p=0, seed=2) != [one]  # one token is left to draw
    assert texts(presence_penalty=2, frequency_penalty=-2, repetition_penalty=1e-9, logit_bias={"17": 5}) != [
        one
    ]


@pytest.mark.long
def test_token_ids_are_a_prompt(client, nano):
    ids = nano.tokenizer.encode("import os\n")
    body = {"model": "nano", "max_tokens": 4, "temperature": 0, "seed": 1}
    texts = lambda prompt: [
        c["text"] for c in post(client, {**body, "prompt": prompt}, "/v1/completions")["choices"]
    ]
    assert texts(ids) * 2 == texts("import os\n") * 2 == texts([ids, ids]) == texts(["import os\n"] * 2)
    nothing = post(client, {**body, "prompt": [ids, ids], "max_tokens": 0}, "/v1/completions")
    assert [(c["text"], c["finish_reason"], c["logprobs"]) for c in nothing["choices"]] == [
        ("", "length", None)
    ] * 2
    assert nothing["usage"]["prompt_tokens"] == 2 * len(ids) and nothing["usage"]["completion_tokens"] == 0


@pytest.mark.long
@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echoed_prompt_has_the_likelihoods_of_its_tokens(client, nano, as_ids):
    """As lm-eval's `local-completions` asks for them: those of `mj.score`, each token given all before it."""
    text, path = "for é in names:\n", "/v1/completions"
    ids = nano.tokenizer.encode(text)
    asked = {"model": "nano", "prompt": [ids] if as_ids else text, "max_tokens": 1, "temperature": 0, "seed": 1234,
             "logprobs": 2, "echo": True}  # fmt: skip
    choice = post(client, asked, path)["choices"][0]
    found, n = choice["logprobs"], len(ids)
    assert choice["text"].startswith(text) and len(found["tokens"]) == n + 1
    assert (
        found["text_offset"][n] == len(text)
        and found["token_logprobs"][0] is found["top_logprobs"][0] is None
    )
    rows = range(1, n)
    exact = mj.score(nano, [ids[:i] for i in rows], [[ids[i]] for i in rows], samples=1)
    np.testing.assert_allclose(found["token_logprobs"][1:n], exact.log_p, atol=1e-4)
    for value, top in zip(found["token_logprobs"][1:n], found["top_logprobs"][1:n], strict=True):
        assert 1 <= len(top) <= 2 and max(top.values()) >= value
    prompt_only = post(client, {**asked, "max_tokens": 0}, path)["choices"][0]
    assert prompt_only["text"] == text
    assert prompt_only["logprobs"] == {name: values[:n] for name, values in found.items()}
    chunks = stream(client, {**asked, "logprobs": None}, path)
    assert text_of(chunks) == choice["text"]


@pytest.mark.long
@pytest.mark.parametrize("n", slow_except([1, 2], 2))
def test_equal_prompts_draw_from_seeds_of_their_own(client, n):
    """As in `mj.sample`: answer j to prompt i is the text of seed + i n + j."""
    body = {"model": "nano", "prompt": "x = ", "max_tokens": 8, "temperature": 1.0}
    path = "/v1/completions"
    texts = lambda more: [c["text"] for c in post(client, {**body, **more}, path)["choices"]]
    alone = [texts({"seed": 40 + k})[0] for k in range(3 * n)]
    several = {"prompt": ["x = "] * 3, "n": n, "seed": 40}
    assert texts(several) == alone and len(set(alone)) > 1
    chunks = stream(client, {**body, **several}, path)
    parts = [(c["index"], c["text"]) for chunk in chunks for c in chunk["choices"]]
    assert ["".join(text for i, text in parts if i == k) for k in range(3 * n)] == alone


@pytest.mark.slow
def test_fim_fills_the_gap(client):
    """An answer that used all of its tokens has the finish reason length."""
    path = "/v1/fim/completions"
    payload = {
        "model": "mercury-edit", "prompt": "def area(r):\n", "suffix": "\n    return a", "stop": [],
        "seed": 0,
    }  # fmt: skip
    for most in (12, 1):
        body, chunks = (made(client, {**payload, "max_tokens": most}, path) for made in (post, stream))
        [choice], used = body["choices"], body["usage"]["completion_tokens"]
        assert choice["text"] == text_of(chunks) and choice["text"] and used <= most
        assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"]
        assert choice["finish_reason"] == ("length" if used == most else "stop")
    assert choice["finish_reason"] == "length"
    assert post(client, {**payload, "max_tokens": 1}, "/v1/completions")["choices"] == [choice]


@pytest.mark.long
def test_an_edit_is_a_bare_code_fence_or_none(client):
    payload = {"model": "mercury-coder", "messages": [{"role": "user", "content": EDIT}], "seed": 0}
    content = post(client, payload, "/v1/edit/completions")["choices"][0]["message"]["content"]
    assert content == "None" or (content.startswith("```\n") and content.endswith("\n```"))
    assert text_of(stream(client, payload, "/v1/edit/completions")) == content
    missing = client.post(
        "/v1/edit/completions", json={**payload, "messages": [{"role": "user", "content": "fix it"}]}
    )
    assert missing.status_code == 400 and "code_to_edit" in missing.json()["error"]["message"]


def test_an_update_is_merged(client):
    payload = {"model": "mercury-edit", "messages": [{"role": "user", "content": APPLY}]}
    body = post(client, payload, "/v1/apply/completions")
    assert body["choices"][0]["message"]["content"].strip() == "def f(x):\n    return x + 1"
    assert (
        text_of(stream(client, payload, "/v1/apply/completions")) == body["choices"][0]["message"]["content"]
    )
    assert body["usage"]["completion_tokens"] > 0


def test_under_load_each_request_gets_one_response(app, client):
    """Beyond the capacity, accepted requests get the same answer as alone, and the others a 429 at once."""
    alone = post(client, {**PAYLOAD, "temperature": 0})["choices"][0]["message"]["content"]

    async def go():
        lines = [Connection(app, {**PAYLOAD, "temperature": 0, "stream": bool(i % 2)}) for i in range(60)]
        return await asyncio.gather(*(line.whole() for line in lines))

    answers = asyncio.run(go())
    accepted = [a for a in answers if a.status == 200]
    assert {a.status for a in answers} == {200, 429} and len(accepted) >= 12
    for answer in accepted:
        if answer.body.startswith(b"data"):
            assert answer.body.count(b'"finish_reason":"stop"') == 1 and answer.body.count(b"[DONE]") == 1
            events = [json.loads(part[6:]) for part in answer.body.decode().split("\n\n")[:-2]]
            assert text_of(events) == alone
        else:
            assert answer.json["choices"][0]["message"]["content"] == alone
    assert app.state.models.services[0].limit.admitted == 0


def test_disconnected_clients_free_their_slots(app, engine):
    before = engine.stats()

    async def go():
        sums = [[{"role": "user", "content": f"{i}+1="}] for i in range(12)]
        lines = [
            Connection(app, {**PAYLOAD, "stream": bool(i % 2), "messages": messages})
            for i, messages in enumerate(sums)
        ]
        for line in lines:
            await line.open()
        for i, line in enumerate(lines):
            await asyncio.sleep(0.01 * (i % 5))
            line.leave()
        await asyncio.gather(*(line.end() for line in lines))

    asyncio.run(go())
    until = time.monotonic() + 10
    while engine.stats().running + engine.stats().waiting and time.monotonic() < until:
        time.sleep(0.02)
    after = engine.stats()
    assert after.running == after.waiting == 0 and app.state.models.services[0].limit.admitted == 0
    assert after.submitted - before.submitted == (after.finished - before.finished) + (
        after.cancelled - before.cancelled
    )
