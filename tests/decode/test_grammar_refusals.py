"""What is refused, before anything is compiled or decoded, and the words for it."""

import contextlib
import importlib
import json
import math
import re
import sys
import time

import pytest

from mercury_jax.decode.grammar import (
    Choice,
    FreeOr,
    GrammarError,
    JSONSchema,
    Lark,
    Regex,
    ToolCalls,
    compile,
    enforceable,
)
from tests.decode.grammar_many import nano_tokenizer
from tests.decode.grammar_schemas import record

TOK = nano_tokenizer()
compiling = importlib.import_module("mercury_jax.decode.grammar.grammar")


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


SCHEMAS = {
    "no schema": ("text", "an object, true or false"),
    "false": (False, "schema: nothing satisfies it"),
    "not anything": ({"not": {}}, "schema: nothing satisfies it"),
    "dynamic reference": ({"$dynamicRef": "#node"}, r"schema\.\$dynamicRef is not supported"),
    "recursive reference": (
        record(a={"$recursiveRef": "#"}),
        r"properties\.a\.\$recursiveRef is not supported",
    ),
    "never both": ({"oneOf": [{"type": "string"}, {"type": "string"}]}, "nothing satisfies it"),
    "dependencies of the wrong kind": ({"dependentRequired": 5}, "keywords with values of the right kind"),
    "two kinds of names": (
        {
            "uniqueItems": True,
            "patternProperties": {"a": {}},
            "unevaluatedProperties": False,
            "anyOf": [{}, {}],
        },
        "unevaluatedProperties beside patternProperties",
    ),
    "remote reference": (
        {"$ref": "https://example.org/schema.json"},
        r"schema\.\$ref is 'https://example.org.*nothing is fetched",
    ),
    "file reference": (record(a={"$ref": "other.json#/a"}), "properties.a..ref is 'other.json#/a'"),
    "missing reference": ({"$ref": "#/$defs/none"}, "none' does not exist"),
    "foreign dialect": ({"$schema": "https://example.org/dialect"}, "example.org/dialect"),
    "too deep": (nested(70), "deeper than 64"),
    "too many values": ({"enum": list(range(30_000))}, "more than 20000 values"),
    "too many bytes": ({"const": "x" * 300_000}, "bytes of JSON"),
    "endless list": ({"type": "array", "minItems": 10**9}, "minItems is 1000000000; allowed: at most 4096"),
    "endless text": ({"type": "string", "minLength": 10**6}, "minLength is 1000000"),
    "half a count": ({"type": "array", "maxItems": 1.5}, "maxItems is 1.5; allowed: a whole number"),
    "empty enum": ({"enum": []}, "schema: nothing satisfies it"),
    "no such type": ({"type": "text"}, "schema.type is .text.; allowed: one of array"),
    "empty range": (
        {"type": "integer", "minimum": 3, "maximum": 2},
        r"minimum \(3\) is greater than maximum \(2\)",
    ),
    "draft 4 bound": (
        {"type": "integer", "minimum": 0, "exclusiveMinimum": True},
        "exclusiveMinimum is True; allowed: a number",
    ),
    "no step": ({"type": "number", "multipleOf": 0}, "multipleOf is 0; allowed: a number above 0"),
    "no number": ({"const": math.nan}, "const is nan; allowed: a finite number"),
    "control characters": (
        {"const": "a\0b"},
        r"const is 'a\\x00b'; allowed: texts without control characters",
    ),
    "escape sequence": ({"enum": [1, {"a": ["\x1b[0m"]}]}, r"enum is '\\x1b\[0m'; allowed"),
    "no JSON": ({"const": {1: "x"}}, "key is 1; allowed: a text"),
    "required is no list": ({"required": "a"}, "required is 'a'; allowed: a list of names"),
    "not a schema": (record(a=3), "properties.a is 3; allowed: a schema"),
    "look-ahead": ({"type": "string", "pattern": "b(?=a)"}, "look-ahead"),
    "back-reference": ({"type": "string", "pattern": r"(a)\1"}, "backreferences are not supported"),
    "broken pattern": ({"type": "string", "pattern": "["}, "unclosed character class"),
    "long pattern": ({"type": "string", "pattern": "a" * 3000}, "3000 characters.; allowed: at most 2048"),
    "impossible property": (
        {"type": "object", "required": ["x"], "additionalProperties": False},
        "nothing satisfies it",
    ),
    "never ends": (
        {"$defs": {"n": record(n={"$ref": "#/$defs/n"})}, "$ref": "#/$defs/n"},
        "nothing satisfies it",
    ),
    "itself": ({"$ref": "#"}, "nothing satisfies it"),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_that_cannot_be_guaranteed_is_refused(name):
    schema, words = SCHEMAS[name]
    with pytest.raises(GrammarError, match=words):
        compile(TOK, JSONSchema(schema))


PLACES = {
    "schema.properties.a.anyOf[1].$dynamicRef": record(a={"anyOf": [{}, {"$dynamicRef": "#x"}]}),
    "schema.properties.a.if.pattern": record(a={"if": {"pattern": "["}, "then": {"maxLength": 3}}),
    "schema.properties.a.dependencies.b.$ref": record(a={"dependencies": {"b": {"$ref": "other.json"}}}),
    "schema.properties.a.pattern": record(b={"type": "string"}, a={"type": "string", "pattern": "b(?=a)"}),
    'schema.properties["first name"]': record(**{"first name": {"not": {}}}),
    "schema.$defs.x.properties.y": {"$defs": {"x": record(y=5)}, "$ref": "#/$defs/x"},
    "schema.properties.p.properties.q": record(
        p=record(q={"type": "string", "pattern": "^a$", "minLength": 5}), r={"type": "string", "pattern": "["}
    ),
    "schema.properties.s.allOf[0]": record(s={"allOf": [{"enum": []}]}),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_refusal_names_the_place(place):
    with pytest.raises(GrammarError) as error:
        compile(TOK, JSONSchema(PLACES[place]))
    assert str(error.value).startswith((f"{place}:", f"{place} "))


def test_a_refusal_claims_no_more_than_is_known(monkeypatch):
    monkeypatch.setattr(compiling, "COMPILE_SECONDS", 0.5)
    long = {"type": "array", "items": {"type": "string", "minLength": 4000}, "minItems": 4000}
    with pytest.raises(GrammarError) as error:
        compile(TOK, JSONSchema(long))
    assert "nothing satisfies" not in str(error.value) and not re.search(
        "fuel|NoExt|lexer|line", str(error.value)
    )


def test_a_reference_to_an_anchor_is_not_taken_for_an_endless_one():
    with contextlib.suppress(GrammarError):
        made = compile(
            TOK, JSONSchema({"$ref": "#foo", "$defs": {"A": {"$anchor": "foo", "type": "integer"}}})
        )
        assert made.completes(TOK.encode("7")) and not made.completes(TOK.encode('""'))


def test_a_request_cannot_switch_the_refusals_off():
    with pytest.raises(GrammarError, match=r"schema\.\$dynamicRef is not supported"):
        compile(TOK, JSONSchema({"$dynamicRef": "#a", "x-guidance": {"lenient": True}}))
    made = compile(TOK, JSONSchema({"not": {"type": "string"}, "x-guidance": {"lenient": True}}))
    assert not made.completes(TOK.encode('"a"'))


CALL = {"open": TOK.special.tool_call, "close": TOK.special.end_tool_call}
SPECS = {
    "pattern": (Regex("["), "unclosed character class"),
    "empty pattern": (Regex(""), "1..2048 characters"),
    "counts of counts": (Regex("((a{1000}){1000}){1000}"), "a text of at most 4096 characters"),
    "long pattern": (Regex("a" * 4000), "1..2048 characters"),
    "look-behind": (Regex("(?<=a)b"), "look-behind"),
    "no grammar": (Lark(""), "1..32768 characters"),
    "a grammar of an unknown rule": (Lark("start: foo"), 'unknown name: "foo"'),
    "a grammar of a special token": (Lark('start: "a" <|5|>'), "a special token"),
    "a grammar of ids": (Lark("start: <[5-9]> // <"), "a special token"),
    "a grammar with options": (
        Lark('%llguidance {"allow_invalid_utf8": true}\nstart: /a/'),
        "options of llguid",
    ),
    "broken GBNF": (Lark("root ::= ("), r"no GBNF: Expected '\)'"),
    "deep GBNF": (Lark("root ::= " + "(" * 5000), "nested too deeply"),
    "no options": (Choice([]), "1..10000 texts"),
    "a text for options": (Choice("yes"), "1..10000 texts"),
    "empty option": (Choice(["a", ""]), r"options\[1\] is ''"),
    "no tools": (ToolCalls([], **CALL), "1..256 tools"),
    "nameless tool": (ToolCalls([{"parameters": {}}], **CALL), r"tools\[0\]"),
    "arguments of no object": (
        ToolCalls([{"name": "f", "parameters": {"type": "array"}}], **CALL),
        r"tools\[0\].parameters",
    ),
    "refused arguments": (
        ToolCalls([{"name": "f", "parameters": {"$ref": "x.json"}}], **CALL),
        r"tools\[0\]\.parameters\.\$ref",
    ),
    "no mark": (ToolCalls([{"name": "f"}], open="", close=13), "open is ''"),
    "plain token as a mark": (ToolCalls([{"name": "f"}], open=500, close=13), "<.500.>"),
    "too many calls": (ToolCalls([{"name": "f"}], **CALL, at_most=10**6), "at_most is 1000000"),
    "fewest above most": (
        ToolCalls([{"name": "f"}], **CALL, at_least=3, at_most=2),
        "at_least is 3; allowed: 0..2",
    ),
    "no calls": (FreeOr(Regex("a")), "ToolCalls"),
    "no spec": ({"type": "string"}, "a spec of mercury_jax.grammar"),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_out_of_bounds_is_refused(name):
    spec, words = SPECS[name]
    with pytest.raises(GrammarError, match=words):
        compile(TOK, spec)


@pytest.mark.parametrize(
    "hostile",
    [
        JSONSchema({"type": "array", "minItems": 4096, "items": nested(40)}),
        Regex("((a{0,1000}b){0,1000}c){1000}"),
        Regex("(a|b)*a(a|b){30}(a|b)*b(a|b){30}"),
        JSONSchema({"type": "string", "pattern": "^((x{0,300}y?){0,300}z){300}$"}),
    ],
    ids=["lists in lists", "counts of counts", "a large automaton", "counts in a text"],
)
def test_a_bomb_takes_no_longer_than_its_time(hostile, monkeypatch):
    monkeypatch.setattr(compiling, "COMPILE_SECONDS", 0.3)
    began = time.monotonic()
    with contextlib.suppress(GrammarError):
        compile(TOK, hostile)
    assert time.monotonic() - began < 3  # also where other work has the processor
    deadline = time.monotonic() + 20
    while compiling._workers._value < 4:
        assert time.monotonic() < deadline, "a worker never came back"
        time.sleep(0.05)


def test_no_more_compile_at_once_than_there_are_workers(monkeypatch):
    monkeypatch.setattr(compiling, "_workers", type(compiling._workers)(1))
    compiling._workers.acquire()
    with pytest.raises(GrammarError, match="still being compiled"):
        compile(TOK, Choice(["never seen before"]))


def test_the_same_content_is_compiled_once_and_the_oldest_is_forgotten(monkeypatch):
    monkeypatch.setattr(compiling, "MOST_CACHED", 2)
    one = lambda text: compile(TOK, JSONSchema(json.loads(json.dumps({"const": text}))))
    first = one("a")
    assert one("a") is first
    assert one("b") is not one("c")
    assert len(compiling._cache) == 2 and one("a") is not first


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"schema.*llguidance.*pip install .*\[serve\]"):
        compile(TOK, Choice(["yes"]))
    with pytest.raises(ValueError, match=r"schema.*llguidance.*pip install .*\[serve\]"):
        compile(TOK, Regex("a+"))


def test_a_pattern_that_backtracks_delays_no_refusal():
    """Python's regular expressions take hours for such a name; a request must not make the server try."""
    name, pattern = "a" * 40 + "!", "^(a+)+$"
    began = time.monotonic()
    for schema in (
        {"type": "object", "patternProperties": {pattern: {}}, "required": [name]},
        {"type": "object", "propertyNames": {"pattern": pattern}, "properties": {name: {}}},
    ):
        with contextlib.suppress(GrammarError):
            compile(TOK, JSONSchema(schema))
    assert time.monotonic() - began < 12


NO_SCHEMAS = [
    {"format": []},
    {"enum": 5},
    {"enum": None},
    {"allOf": [{"enum": [1]}, {"enum": 5}]},
    {"propertyNames": {"format": []}},
    {"propertyNames": {"enum": 5}},
    {"title": "x", "properties": {"a": {"$ref": "#/title"}}, "required": ["a"]},
    *(
        {"x": {"a": {key: value}}, "$ref": "#/x/a"}
        for key, value in {"minimum": "z", "type": 5, "allOf": 5, "enum": 5, "properties": 5}.items()
    ),
]


@pytest.mark.parametrize("schema", NO_SCHEMAS, ids=json.dumps)
def test_a_keyword_of_the_wrong_kind_is_refused_and_never_another_error(schema):
    with pytest.raises(GrammarError):
        compile(TOK, JSONSchema(schema))


@pytest.mark.parametrize(
    "other", [{"$ref": "#/$defs/n{}"}, {"anyOf": [{"$ref": "#/$defs/n{}"}, {"pattern": "b"}]}]
)
def test_names_that_refer_to_the_same_names_many_times_take_no_longer(other):
    option = lambda i: json.loads(json.dumps(other).replace("{}", str(i + 1)))
    names = {f"n{i}": {"anyOf": [{"$ref": f"#/$defs/n{i + 1}"}, option(i)]} for i in range(30)}
    began = time.monotonic()
    with contextlib.suppress(GrammarError):
        compile(
            TOK,
            JSONSchema(
                {"propertyNames": {"$ref": "#/$defs/n0"}, "$defs": {**names, "n30": {"pattern": "a"}}}
            ),
        )
    assert time.monotonic() - began < 3


def test_names_that_refer_to_themselves_are_refused():
    names = {"anyOf": [{"$ref": "#/$defs/n"}, {"pattern": "a"}]}
    with pytest.raises(GrammarError, match="propertyNames"):
        compile(TOK, JSONSchema({"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": names}}))


def test_schemas_that_share_a_deadline_are_left_open_after_it():
    schema = {"type": "object", "properties": {"late": {"type": "string"}}}
    assert enforceable(schema, "tool", time.monotonic() - 1) == ({"type": "object"}, True)
    assert enforceable(schema, "tool") == (schema, False)


def test_what_a_grammar_cannot_enforce_is_left_out_of_the_definition_that_says_it():
    """Also where definitions refer to each other; the properties that use them keep their references."""
    ahead, names = {"type": "string", "pattern": "b(?=a)"}, {"a": {"$ref": "#/$defs/x"}}
    recursive = {"anyOf": [ahead, {"type": "object", "properties": names}]}
    schema = {
        "type": "object",
        "properties": names,
        "$defs": {"x": {"allOf": [{"$ref": "#/$defs/y"}]}, "y": recursive},
    }
    left, partly = enforceable(schema, "tool")
    assert partly and left["properties"] == names and left["$defs"]["x"] == schema["$defs"]["x"]
    assert left["$defs"]["y"]["anyOf"] == [{"type": "string"}, recursive["anyOf"][1]]


def test_a_list_of_names_that_many_schemas_share_is_bounded():
    closed = [{"propertyNames": {"$ref": "#/$defs/e"}} for _ in range(100)]
    with pytest.raises(GrammarError, match="names in all"):
        compile(TOK, JSONSchema({"$defs": {"e": {"enum": [f"n{i}" for i in range(300)]}}, "allOf": closed}))
