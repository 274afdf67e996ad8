"""Schemas of which a grammar enforces a part: an answer is checked, decoded again, and sent only where it is valid."""

import json

import pytest

from mercury_jax.decode.constrained import RETRIES
from tests.serve.api_client import CHAT, PAYLOAD, client_of, events, function_tool, post, schema_format
from tests.serve.scripted_engine import ScriptedEngine, snapshot

DISTINCT = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
FORMATS = {
    "json_schema": schema_format(DISTINCT),
    "json_object": {"type": "json_object", "schema": {"type": "object", "properties": {"tags": DISTINCT}}},
}


def engine_of(nano, *texts, pause=0.0):
    """An engine that writes these texts, one for each decoding, piece by piece; the last one again and again."""

    def script(job):
        ids = nano.tokenizer.encode(texts[min(len(engine.tickets), len(texts)) - 1])
        return [*(snapshot(ids, final=n) for n in range(0, len(ids), 2)), snapshot(ids, finish="stop")]

    engine = ScriptedEngine(nano, script, pause)
    return engine


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_that_is_not_valid_is_decoded_again_from_the_value_at_fault(nano, form):
    wrap = (lambda text: text) if form == "json_schema" else lambda text: f'{{"tags": {text}}}'
    payload = {**PAYLOAD, "response_format": FORMATS[form], "seed": 3}
    texts = [wrap(text) for text in ("[4, 7, 4]", "[4, 7, 7]", "[4, 7, 5]")]
    engine = engine_of(nano, *texts)
    assert post(engine, payload)["choices"][0]["message"]["content"] == texts[-1]
    jobs = [ticket.request for ticket in engine.tickets]
    assert len({job.seed for job in jobs}) == len(jobs) == 3
    kept = wrap("[4, 7, ").removesuffix("}").rstrip()
    for before, job in zip(texts, jobs[1:], strict=False):
        assert nano.tokenizer.decode(job.kept.tokens).rstrip() == kept and len(job.kept.banned) > 0
        assert before.startswith(kept)
    assert jobs[0].kept.tokens == ()


def test_after_all_attempts_the_answer_is_an_error_and_never_a_200(nano):
    engine = engine_of(nano, "[1, 1]")
    answer = client_of(engine).post(CHAT, json={**PAYLOAD, "response_format": schema_format(DISTINCT)})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "json_validate_failed"
    assert "uniqueItems" in error["message"] and "[1, 1]" in error["message"]
    assert len(engine.tickets) == RETRIES + 1


def test_a_stream_sends_nothing_before_the_answer_is_valid(nano):
    payload = {**PAYLOAD, "response_format": schema_format(DISTINCT)}
    chunks = events(engine_of(nano, "[1, 1]", "[1, 2]"), payload)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "[1, 2]"
    chunks = events(engine_of(nano, "[1, 1]"), payload)
    assert chunks[-1]["error"]["code"] == "json_validate_failed"
    assert not any(d.get("content") for c in chunks for d in (x["delta"] for x in c.get("choices", ())))


def test_a_schema_that_the_grammar_enforces_is_streamed_as_it_is_written(nano):
    """An exact rewrite needs no check: here the options of oneOf."""
    schema = {"oneOf": [{"type": "integer", "minimum": 5}, {"type": "array", "items": {"type": "integer"}}]}
    chunks = events(
        engine_of(nano, "[1, 1, 1, 1]", pause=0.01), {**PAYLOAD, "response_format": schema_format(schema)}
    )
    pieces = [c["choices"][0]["delta"].get("content") for c in chunks if c["choices"]]
    assert len([piece for piece in pieces if piece]) > 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_strict_tool_is_an_error_where_another_is_sent_as_it_is(nano, strict):
    tool = function_tool({"type": "object", "properties": {"tags": DISTINCT}, "required": ["tags"]})
    tool["function"]["strict"] = strict
    marks = nano.tokenizer.special
    call = {"name": tool["function"]["name"], "arguments": {"tags": [1, 1]}}
    ids = [marks.tool_call, *nano.tokenizer.encode(json.dumps(call)), marks.end_tool_call]
    engine = ScriptedEngine(nano, [snapshot(ids, finish="stop")])
    answer = client_of(engine).post(CHAT, json={**PAYLOAD, "tools": [tool]})
    assert answer.status_code == (400 if strict else 200)
    assert len(engine.tickets) == (RETRIES + 1 if strict else 2)
