"""Attacks by JSON Schemas and regular expressions that are invalid, too large, or refer elsewhere.

The list is in test_attacks.
"""

import json
import re
import time

import pytest

from mercury_jax.decode import grammar as grammars
from mercury_jax.decode.grammar import validation
from tests.serve.api_client import CHAT, PAYLOAD, client_of, events, function_tool, post, schema_format
from tests.serve.scripted_engine import ScriptedEngine, snapshot

BAD_SCHEMAS = (
    {"type": "nothing"}, {"type": 5}, {"properties": []}, {"pattern": "("}, {"type": "string", "pattern": "(?<=a)b"},
    {"type": "string", "pattern": "[z-a]"}, {"enum": []}, {"required": "a"}, {"minItems": -1}, {"$ref": "#/nowhere"},
    {"type": "string", "format": "no-such-format", "pattern": "*"}, {"not": {}}, {"anyOf": []}, {"items": 7},
    {"type": "array", "minItems": 10**9}, {"type": "string", "minLength": 10**9}, {"multipleOf": 0}, {"allOf": [False]},
    {"type": "object", "patternProperties": {"(": {}}},
)  # fmt: skip


@pytest.mark.parametrize("schema", BAD_SCHEMAS, ids=str)
def test_09_an_invalid_schema_is_refused_and_the_server_keeps_running(scripted_app, schema):
    error = scripted_app.refuses({**PAYLOAD, "response_format": schema_format(schema)})
    assert "response_format" in error["param"] and error["code"] == "invalid_json_schema"
    tool = function_tool({"type": "object", "properties": {"a": schema}, "required": ["a"]})
    tool["function"]["strict"] = True
    scripted_app.refuses({**PAYLOAD, "tools": [tool], "tool_choice": "required"})
    scripted_app.serves()


def nested(depth, key):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema} if key == "items" else {"properties": {"a": schema}}
    return schema


def doubling(levels):
    """A schema whose definitions each use the next one twice: 2 ** levels places."""
    defs = {
        f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)
    }
    return {"$defs": {**defs, f"d{levels}": {"type": "null"}}, "$ref": "#/$defs/d0"}


BOMBS = {
    "deep lists": nested(90, "items"),
    "deep objects": nested(45, "properties"),
    "many properties": {"properties": {f"p{i}": {"type": "string"} for i in range(12_000)}},
    "many choices": {"enum": [f"choice {i}" for i in range(25_000)]},
    "many alternatives": {"anyOf": [{"const": i} for i in range(12_000)]},
    "a long expression": {"type": "string", "pattern": "a?" * 50_000},
    "repeats of repeats": {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"},
    "backtracking": {"type": "string", "pattern": "^(a+)+$"},
    "doubling": doubling(60),
    "itself": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "itself within itself": {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}},
                             "$ref": "#/$defs/a"},
    "large counts": {"type": "array", "items": {"type": "string", "minLength": 4000}, "minItems": 4000},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", BOMBS)
def test_10_a_schema_bomb_takes_bounded_time(scripted_app, name):
    """Each is refused or compiled in time. The scripted answer does not obey the ones that compile: a 500."""
    began = time.perf_counter()
    tool = function_tool({"type": "object", "properties": {"a": BOMBS[name]}})
    for payload in (
        {"response_format": schema_format(BOMBS[name])},
        {"tools": [tool], "tool_choice": "auto"},
    ):
        answer = scripted_app.post({**PAYLOAD, **payload})
        assert answer.status_code in (200, 400, 500) and len(answer.text) < 2000
    assert time.perf_counter() - began < 20
    scripted_app.serves()


REASONS = {
    "deep lists": "nested", "deep objects": "nested", "many properties": "20000 values", "many choices": "20000 values",
    "many alternatives": "20000 values", "a long expression": "at most 2048", "itself": "satisfies",
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_10_a_schema_bomb_is_refused_by_its_size(scripted_app, name):
    message = scripted_app.refuses({**PAYLOAD, "response_format": schema_format(BOMBS[name])}, within=20)[
        "message"
    ]
    assert re.search(REASONS[name], message)


OUTSIDE = {"$ref": "http://evil.example/s.json"}
DIALECT = "http://json-schema.org/draft-0{}/schema#"
HIDDEN = (
    {"$dynamicRef": OUTSIDE["$ref"]}, {"$recursiveRef": OUTSIDE["$ref"]}, {"unevaluatedProperties": OUTSIDE},
    {"dependencies": {"a": OUTSIDE}, "$schema": DIALECT.format(7)}, {"dependentSchemas": {"a": OUTSIDE}},
    {"contentSchema": OUTSIDE}, {"extends": OUTSIDE, "$schema": DIALECT.format(3)}, {"$schema": OUTSIDE["$ref"]},
    {"disallow": [OUTSIDE], "$schema": DIALECT.format(3)}, {"$defs": {"a": OUTSIDE}},
)  # fmt: skip


@pytest.mark.parametrize("schema", HIDDEN, ids=str)
def test_20_a_hidden_reference_is_refused(scripted_app, schema, no_network):
    """Also where only one of the two implementations of JSON Schema looks."""
    for whole in (schema, {"type": "object", "properties": {"a": {"type": "object", **schema}}}):
        error = scripted_app.refuses(
            {**PAYLOAD, "response_format": schema_format({"type": "object", **whole})}, within=20
        )
        assert error["code"] == "invalid_json_schema"


def test_20_checking_an_answer_does_not_use_the_network(no_network):
    """Not even for a schema that compilation would refuse."""
    for kind in ({}, {"$schema": DIALECT.format(3)}, {"$schema": DIALECT.format(7)}):
        valid = validation.validator({**kind, "properties": {"a": OUTSIDE}}, "s")
        assert not validation.is_valid('{"a": 1}', valid) and validation.is_valid("{}", valid)


@pytest.mark.parametrize(
    "target",
    ["http://evil.example/s.json", "file:///etc/passwd", "//evil.example/x", "other.json#/a", "urn:x", 5],
)
def test_20_an_external_reference_is_refused(scripted_app, target, no_network):
    for schema in ({"$ref": target}, {"type": "object", "properties": {"a": {"$ref": target}}}):
        error = scripted_app.refuses({**PAYLOAD, "response_format": schema_format(schema)})
        assert error["code"] == "invalid_json_schema"
        assert target == 5 or "nothing is fetched" in error["message"]
        scripted_app.refuses(
            {**PAYLOAD, "tools": [function_tool({"type": "object", "properties": {"b": schema}})]}
        )
    remote = {"$schema": "http://evil.example/meta", "$id": "http://evil.example/id", "type": "object"}
    scripted_app.post({**PAYLOAD, "response_format": schema_format(remote)})


def test_an_error_names_the_tool_and_the_place(scripted_app):
    """By its place in the request, also where only some of the tools may be called."""
    labels = {"type": "object", "properties": {"labels": {"type": "string", "pattern": "b(?=a)"}}}
    tools = [function_tool({"type": "object"}, "first"), function_tool(labels, "second")]
    tools[1]["function"]["strict"] = True
    one = {"type": "function", "function": {"name": "second"}}
    for choice in ("auto", "required", one):
        error = scripted_app.refuses({**PAYLOAD, "tools": tools, "tool_choice": choice})
        assert error["message"].startswith("tools[1].function.parameters.properties.labels.pattern: ")
        assert error["param"] == "tools[1].function.parameters"
    error = scripted_app.refuses({**PAYLOAD, "response_format": schema_format(labels)})
    assert error["message"].startswith("response_format.json_schema.schema.properties.labels.pattern: ")
    # No JSON Schema at all: refused without strict too.
    wrong_type, remote = ({"properties": {"a": {key: "x.json"}}} for key in ("type", "$ref"))
    for wrong, place in (
        (wrong_type, "properties.a.type"),
        (remote, "properties.a.$ref"),
        ({"required": "a"}, "required"),
    ):
        error = scripted_app.refuses({**PAYLOAD, "tools": [function_tool(wrong)]})
        assert error["message"].startswith(f"tools[0].function.parameters.{place}")


def test_all_tools_of_a_request_share_a_deadline(nano, monkeypatch):
    """Many slow tools take no longer than one: those whose turn comes after the deadline take any object."""
    marks, deadlines, enforceable = nano.tokenizer.special, [], grammars.enforceable

    def slow(schema, place, deadline=None):
        deadlines.append(deadline)
        return enforceable(schema, place, deadline if len(deadlines) == 1 else time.monotonic() - 1)

    monkeypatch.setattr(grammars, "enforceable", slow)
    late = {"type": "object", "properties": {"late": {"type": "integer"}}, "required": ["late"]}
    engine = ScriptedEngine(nano, [snapshot(nano.tokenizer.encode("no"), finish="stop")])
    post(engine, {**PAYLOAD, "tools": [function_tool(late, name) for name in ("f", "g", "h")]})
    assert len(deadlines) == 3 and len({*deadlines}) == 1 and deadlines[0] > time.monotonic() - 600
    grammar = engine.tickets[0].request.grammar
    for name, free in (("f", False), ("g", True), ("h", True)):
        call = nano.tokenizer.encode(f'{{"name": "{name}", "arguments": {{}}}}')
        assert grammar.completes([marks.tool_call, *call, marks.end_tool_call]) == free


def test_a_tool_without_strict_is_checked_afterwards_and_decoded_once_more(nano):
    marks = nano.tokenizer.special
    tags = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    tool = function_tool({"type": "object", "properties": {"tags": tags}, "required": ["tags"]})
    invalid, valid = '{"tags": [1, 1]}', '{"tags": [1, 2]}'

    def answers(*texts):
        def script(job):
            text = texts[len(engine.tickets) - 1]
            call = f'{{"name": "f", "arguments": {text}}}'
            ids = [marks.tool_call, *nano.tokenizer.encode(call), marks.end_tool_call]
            return [snapshot(ids, final=9), snapshot(ids, finish="stop")]

        engine = ScriptedEngine(nano, script)
        return engine

    payload = {**PAYLOAD, "tools": [tool], "seed": 3}
    for texts, shown in (((valid,), valid), ((invalid, valid), valid), ((invalid, invalid), invalid)):
        engine = answers(*texts)
        (call,) = post(engine, payload)["choices"][0]["message"]["tool_calls"]
        assert call["function"]["arguments"] == shown and len(engine.tickets) == len(texts)
        assert len({ticket.request.seed for ticket in engine.tickets}) == len(texts)
        # The rest of the schema is enforced: the key, and the type of the items.
        grammar = engine.tickets[0].request.grammar
        for text in (invalid, '{"tags": ["a"]}', "{}"):
            call = nano.tokenizer.encode(f'{{"name": "f", "arguments": {text}}}')
            assert grammar.completes([marks.tool_call, *call, marks.end_tool_call]) == (text == invalid)
        deltas = [
            d
            for chunk in events(answers(*texts), payload)
            for d in chunk["choices"][0]["delta"].get("tool_calls", ())
        ]
        assert "".join(d["function"].get("arguments", "") for d in deltas) == shown


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("finish", ["stop", "error", "cancelled"])
def test_an_answer_that_is_decoded_once_more_replaces_the_first_as_a_whole(nano, finish, stream):
    """Also where thinking or text precedes the call; a second decoding that fails leaves the first answer."""
    marks, encode = nano.tokenizer.special, nano.tokenizer.encode
    tags = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    tool = function_tool({"type": "object", "properties": {"tags": tags}, "required": ["tags"]})
    payload = {**PAYLOAD, "tools": [tool], "reasoning_summary": True}

    def answer(before, thought, arguments):
        call = encode(f'{{"name": "f", "arguments": {arguments}}}')
        thinking = [marks.think, *encode(thought), marks.end_think]
        return [*thinking, *encode(before), marks.tool_call, *call, marks.end_tool_call]

    def read(before):
        def script(job):
            again = len(engine.tickets) > 1
            ids = answer("", "b", '{"tags": [1, 2]}') if again else answer(before, "aaa", '{"tags": [1, 1]}')
            end = finish if again else "stop"
            return [*(snapshot(ids, final=n) for n in range(0, len(ids), 3)), snapshot(ids, finish=end)]

        engine = ScriptedEngine(nano, script, pause=0.002)
        if not stream:
            body = post(engine, payload)
            message, thought = body["choices"][0]["message"], body["reasoning_summary"]["content"]
            calls, content = message.get("tool_calls") or (), message["content"] or ""
        else:
            chunks = events(engine, payload)
            deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
            calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
            content = "".join(delta.get("content") or "" for delta in deltas)
            thought = chunks[-1]["reasoning_summary"]["content"]
        arguments = "".join(call["function"].get("arguments") or "" for call in calls)
        return content, arguments, thought, len(engine.tickets)

    second = ("", '{"tags": [1, 2]}', "b", 2)
    failed = ("", '{"tags": [1, 1]}', "aaa", 2)
    assert read("") == (second if finish == "stop" else failed)
    text = "Let me look that up for you. "
    if stream:  # the text has been sent, so the answer stays
        assert read(text) == (text, '{"tags": [1, 1]}', "aaa", 1)
    else:
        assert read(text) == (second if finish == "stop" else (text, *failed[1:]))


NO_SCHEMAS = ({"$schema": [1]}, {"$schema": 5}, {"$schema": "http://[x"}, {"type": "object", "title": 5},
              *({"properties": {"a": {"pattern": p}}} for p in ("a{99999999999}", "(" * 2_000, "(")))  # fmt: skip


@pytest.mark.parametrize("schema", NO_SCHEMAS, ids=lambda schema: str(schema)[:50])
def test_what_is_no_schema_is_refused_by_its_place(scripted_app, schema):
    scripted_app.engine.context = 1 << 20  # prompts show the tools
    for strict in (False, True):
        tool = function_tool(schema)
        tool["function"]["strict"] = strict
        error = scripted_app.refuses({**PAYLOAD, "tools": [tool]})
        assert (error["param"], error["code"]) == ("tools[0].function.parameters", "invalid_json_schema")
    for form, place in (
        (schema_format(schema), "response_format.json_schema.schema"),
        ({"type": "json_object", "schema": schema}, "response_format.schema"),
    ):
        error = scripted_app.refuses({**PAYLOAD, "response_format": form})
        assert (error["param"], error["code"]) == (place, "invalid_json_schema")
        assert error["message"].startswith(place)


def test_patterns_of_a_schema_are_matched_in_linear_time(nano):
    """By the definition of grammars, also where Python's `re` backtracks, or does not read the pattern."""
    slow, word, year = "^((a+)+b|a*)$", "^\\p{L}+$", "^(?<y>\\d{4})$"
    text = "a" * 40

    def answered(schema, value):
        engine = ScriptedEngine(nano, [snapshot(nano.tokenizer.encode(json.dumps(value)), finish="stop")])
        return client_of(engine).post(CHAT, json={**PAYLOAD, "response_format": schema_format(schema)})

    began = time.perf_counter()
    named = {
        "type": "object",
        "patternProperties": {slow: {"type": "integer"}},
        "additionalProperties": False,
    }
    for schema, value, ok in (
        ({"type": "string", "enum": [text], "pattern": slow}, text, True),
        ({"type": "string", "pattern": slow}, text + "c", False),
        ({"type": "string", "pattern": word}, "abc", True),
        ({"type": "string", "pattern": word}, "1", False),
        ({"type": "string", "pattern": year}, "2024", True),
        ({"type": "string", "pattern": 'b\n"'}, 'ab\n"c', True),
        (named, {text: 1}, True),
        (named, {text: "x"}, False),
        (named, {text + "c": 1}, False),
    ):
        assert answered(schema, value).status_code == (200 if ok else 500), (schema, value)
    # What a grammar enforces in part is checked in linear time too.
    loose = {"tags": {"type": "array", "uniqueItems": True, "items": {"type": "string", "pattern": slow}}}
    tool = function_tool(
        {"type": "object", "properties": loose, "unevaluatedProperties": False, **named_only(slow)}
    )
    marks = nano.tokenizer.special
    call = json.dumps({"name": "f", "arguments": {"tags": [text], text + "c": 1}})
    ids = [marks.tool_call, *nano.tokenizer.encode(call), marks.end_tool_call]
    post(ScriptedEngine(nano, [snapshot(ids, finish="stop")]), {**PAYLOAD, "tools": [tool]})
    assert time.perf_counter() - began < 10


def named_only(pattern):
    return {"patternProperties": {pattern: {"type": "integer"}}}
