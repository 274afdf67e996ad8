"""Attacks by what an answer is to obey: schemas and expressions that are bad, endless or elsewhere.

The list is in test_attacks.
"""

import re
import time

import pytest

from mercury_jax.serve.api import constraint
from tests.serve.api.door import ASK, schema_of, tool_of

BAD_SCHEMAS = (
    {"type": "nothing"}, {"type": 5}, {"properties": []}, {"pattern": "("}, {"type": "string", "pattern": "(?<=a)b"},
    {"type": "string", "pattern": "[z-a]"}, {"enum": []}, {"required": "a"}, {"minItems": -1}, {"$ref": "#/nowhere"},
    {"type": "string", "format": "no-such-format", "pattern": "*"}, {"not": {}}, {"anyOf": []}, {"items": 7},
    {"type": "array", "minItems": 10**9}, {"type": "string", "minLength": 10**9}, {"multipleOf": 0}, {"allOf": [False]},
    {"type": "object", "patternProperties": {"(": {}}},
)  # fmt: skip


@pytest.mark.parametrize("schema", BAD_SCHEMAS, ids=str)
def test_09_a_bad_schema_is_refused_and_takes_nothing_down(door, schema):
    error = door.refuses({**ASK, "response_format": schema_of(schema)})
    assert "response_format" in error["param"] and error["code"] == "invalid_json_schema"
    door.refuses({**ASK, "tools": [tool_of({"type": "object", "properties": {"a": schema}, "required": ["a"]})],
                  "tool_choice": "required"})  # fmt: skip
    door.serves()


def nested(depth, key):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema} if key == "items" else {"properties": {"a": schema}}
    return schema


def doubling(levels):
    """Each definition holds the next one twice: 2 ** levels places."""
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


@pytest.mark.parametrize("name", BOMBS)
def test_10_a_bomb_ends_in_bounded_time(door, name):
    """Refused or compiled, but soon; what the script says to those that compile obeys no schema and is not sent."""
    began = time.perf_counter()
    tool = tool_of({"type": "object", "properties": {"a": BOMBS[name]}})
    for ask in ({"response_format": schema_of(BOMBS[name])}, {"tools": [tool], "tool_choice": "auto"}):
        answer = door.post({**ASK, **ask})
        assert answer.status_code in (200, 400, 500) and len(answer.text) < 2000
    assert time.perf_counter() - began < 20
    door.serves()


REASONS = {
    "deep lists": "nested", "deep objects": "nested", "many properties": "20000 values", "many choices": "20000 values",
    "many alternatives": "20000 values", "a long expression": "at most 2048", "itself": "satisfies",
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_10_a_bomb_is_refused_by_its_size_and_not_by_its_time(door, name):
    message = door.refuses({**ASK, "response_format": schema_of(BOMBS[name])}, within=20)["message"]
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
def test_20_a_reference_in_a_corner_of_the_schema_is_refused(door, schema, no_network):
    """Also where one of two readers of the schema looks and the other one does not."""
    for whole in (schema, {"type": "object", "properties": {"a": {"type": "object", **schema}}}):
        error = door.refuses({**ASK, "response_format": schema_of({"type": "object", **whole})}, within=20)
        assert error["code"] == "invalid_json_schema"


def test_20_an_answer_is_checked_without_the_network(no_network):
    """Even by a schema that should never have come so far."""
    for kind in ({}, {"$schema": DIALECT.format(3)}, {"$schema": DIALECT.format(7)}):
        valid = constraint._validator({**kind, "properties": {"a": OUTSIDE}})
        assert not constraint._obeys('{"a": 1}', valid) and constraint._obeys("{}", valid)


@pytest.mark.parametrize(
    "target",
    ["http://evil.example/s.json", "file:///etc/passwd", "//evil.example/x", "other.json#/a", "urn:x", 5],
)
def test_20_a_reference_out_of_the_schema_is_refused(door, target, no_network):
    for schema in ({"$ref": target}, {"type": "object", "properties": {"a": {"$ref": target}}}):
        error = door.refuses({**ASK, "response_format": schema_of(schema)})
        assert error["code"] == "invalid_json_schema" and "nothing is fetched" in error["message"]
        door.refuses({**ASK, "tools": [tool_of({"type": "object", "properties": {"b": schema}})]})
    remote = {"$schema": "http://evil.example/meta", "$id": "http://evil.example/id", "type": "object"}
    door.post({**ASK, "response_format": schema_of(remote)})
