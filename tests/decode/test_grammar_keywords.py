"""Keywords that llguidance lacks: every answer validates, and where the grammar is exact, the two languages agree."""

import functools
import itertools
import json
import random
import re
from collections import Counter

import numpy as np
import pytest
from jsonschema import Draft202012Validator

import mercury_jax as mj
from mercury_jax.decode.grammar import JSONSchema, compile
from mercury_jax.decode.grammar.complement import other_texts
from tests.decode.grammar_corpus import KEYWORDS, Case, holding, judged
from tests.decode.grammar_many import fault, nano_tokenizer
from tests.tiny import tiny

TOK = nano_tokenizer()
NAMES = {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}, "c": {}}
OBJECT = {"type": "object", "properties": NAMES}
VALUES = [0, 1, 3, 2.5, -4, "", "x", "y", "xy", True, False, None]
KIND = {"properties": {"b": {"const": "x"}}, "required": ["b"]}
# By the keyword: schemas whose grammar is exact.
EXACT = {
    "not": [
        {"not": {"type": ["string", "null"]}}, {"not": {"const": "x"}}, {"not": {"enum": ["x", 1, None, True]}},
        {**OBJECT, "not": {"required": ["a", "c"]}}, {**OBJECT, "not": {"properties": {"b": {"const": "x"}}}},
        {"not": {"minimum": 1}}, {"not": {"maxLength": 1}}, {"not": {"anyOf": [{"type": "object"}, {"maximum": 2}]}},
        {"not": {"not": {"type": "boolean"}}}, {"not": {"type": "array", "contains": {"type": "string"}}},
    ],
    "if": [
        {**OBJECT, "if": KIND, "then": {"required": ["a"]}, "else": {"required": ["c"]}},
        {**OBJECT, "if": KIND, "else": {"properties": {"a": False}}},
        {"if": {"type": "string"}, "then": {"minLength": 1}, "else": {"type": "number"}},
    ],
    "dependencies": [
        {**OBJECT, "dependentRequired": {"a": ["c"], "c": ["b"]}},
        {**OBJECT, "dependentSchemas": {"a": {"properties": {"b": {"const": "y"}}}}},
    ],
    "oneOf": [
        {**OBJECT, "oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]},
        {"oneOf": [{"type": "string", "maxLength": 1}, {"type": ["string", "null"], "minLength": 1}]},
        {"oneOf": [{"minimum": 1, "type": "number"}, {"maximum": 3, "type": "number"}]},
        {"oneOf": [{"enum": ["x", 1]}, {"enum": [1, None]}]},
    ],
    "contains": [
        {"type": "array", "contains": {"type": "string"}, "maxItems": 3},
        {"type": "array", "items": {"enum": ["x", 1]}, "contains": {"const": 1}},
    ],
    "uniqueItems": [{"type": "array", "items": {"enum": ["x", 1, 2.5]}, "uniqueItems": True, "minItems": 1}],
    "minProperties": [
        {**OBJECT, "minProperties": 2, "additionalProperties": False}, {**OBJECT, "minProperties": 1},
        {**OBJECT, "minProperties": 1, "maxProperties": 1, "additionalProperties": False},
    ],
    "unevaluated": [
        {"type": "object", "allOf": [{"properties": {"a": {}}}], "properties": {"b": {}},
         "unevaluatedProperties": False},
        {"type": "object", "$ref": "#/$defs/n", "$defs": {"n": {"properties": NAMES}},
         "unevaluatedProperties": {"type": "null"}},
        {"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": {"type": "string"}},
    ],
    "look-ahead": [
        {"type": "string", "pattern": "^(?=.*x)[xy]*$"}, {"type": "string", "pattern": "^(?=x)(?=.y).*$"},
    ],
}  # fmt: skip
PAIRS = [(name, schema) for name, schemas in EXACT.items() for schema in schemas]


@functools.cache
def instances() -> list[list[str]]:
    """JSON texts of values: single ones, short lists, and objects, whose properties come in every order."""
    lists = [list(some) for size in range(4) for some in itertools.product([1, "x", 2.5], repeat=size)]
    objects = [
        dict(zip("abcd", some, strict=True))
        for some in itertools.product([None, 1, "x"], [None, "x", "y"], [None, 3], [None, 5])
    ]
    made = [[json.dumps(value)] for value in (*VALUES, *lists)]
    for one in objects:
        there = [(name, value) for name, value in one.items() if value is not None]
        made.append([json.dumps(dict(some)) for some in itertools.permutations(there)])
    return made


def accepted(grammar, texts) -> bool:
    return any(grammar.completes(TOK.encode(text)) for text in texts)


@pytest.mark.parametrize(("name", "schema"), PAIRS, ids=[f"{n} {str(s)[:50]}" for n, s in PAIRS])
def test_an_exact_grammar_accepts_what_validates_and_nothing_else(name, schema):
    made, judge = compile(TOK, JSONSchema(schema)), Draft202012Validator(schema)
    assert made.fault is None
    both = Counter()
    for texts in instances():
        valid = judge.is_valid(json.loads(texts[0]))
        assert accepted(made, texts) == valid, texts
        both[valid] += 1
    assert min(both[True], both[False]) > 0


def drawn(pick: random.Random, depth: int = 2):
    """A small schema, of keywords whose complement is exact."""
    leaf = [
        lambda: {"type": pick.choice(["string", "number", "null", "boolean", "array", "object"])},
        lambda: {"const": pick.choice(VALUES)},
        lambda: {"enum": pick.sample(VALUES, 3)},
        lambda: {pick.choice(["minimum", "maximum", "exclusiveMinimum"]): pick.choice([0, 1, 2.5])},
        lambda: {pick.choice(["minLength", "maxLength", "minItems", "maxItems"]): pick.randint(0, 2)},
        lambda: {"required": pick.sample(["a", "b", "c"], 2)},
    ]
    inner = lambda: drawn(pick, depth - 1)
    whole = [
        lambda: {"properties": {pick.choice("abc"): inner()}},
        lambda: {"anyOf": [inner(), inner()]},
        lambda: {"allOf": [inner(), inner()]},
        lambda: {"not": inner()},
        lambda: {"if": inner(), "then": inner(), "else": inner()},
        lambda: {"oneOf": [inner(), inner()]},
    ]
    return pick.choice(leaf if depth <= 0 or pick.random() < 0.3 else whole)()


def test_a_complement_of_a_random_schema_holds_exactly_the_other_values():
    pick, made = random.Random(5), Counter()
    for _ in range(60):
        schema = {"not": drawn(pick), "$defs": {}}
        judge = Draft202012Validator(schema)
        valid = [judge.is_valid(json.loads(texts[0])) for texts in instances()]
        if not any(valid):
            continue
        grammar = compile(TOK, JSONSchema(schema))
        taken = [accepted(grammar, texts) for texts in instances()]
        made[grammar.fault is None] += 1
        # A larger language is checked at the end.
        wrong = [
            t
            for t, a, v in zip(instances(), taken, valid, strict=True)
            if a != v and not (a and grammar.fault)
        ]
        assert wrong == [], schema
    assert made[True] > 30


@pytest.mark.parametrize("schema", KEYWORDS, ids=lambda schema: str(schema)[-60:])
def test_every_answer_of_a_random_model_validates(schema):
    """Also where the keyword stands somewhere inside; what the grammar leaves open is decoded again."""
    pick, rng, tally = random.Random(0), np.random.default_rng(0), Counter()
    for i in range(3):
        wrong = judged(Case(f"{i}", holding(pick, schema)[0] if i else schema), rng, 6, tally)
        assert wrong == []
    assert tally["answers"] >= 15 and tally["refused"] == 0


def test_what_is_checked_is_found_where_it_is_and_all_that_validates_is_accepted():
    rows = [
        ({"type": "array", "uniqueItems": True, "items": {"type": "string"}}, '["x", "y", "x"]', 11),
        ({"properties": {"k": {"not": {"type": "integer"}}}, "type": "object"}, '{"k": 2}', 6),
        ({"type": "array", "items": {"multipleOf": 0.1, "type": "number"}}, "[0.1, 0.3, 5]", 6),
        ({"type": "string", "pattern": "^(?!ab)[a-c]+$"}, '"abc"', 0),
        ({"type": "string", "pattern": "^((?!ab).)*$"}, '"cab"', 0),
    ]
    for schema, text, at in rows:
        made = compile(TOK, JSONSchema(schema))
        assert made.fault is not None and made.fault(text) == at and made.completes(TOK.encode(text)), schema
        judge = Draft202012Validator(schema)
        for texts in instances():
            valid = judge.is_valid(json.loads(texts[0]))
            assert (made.fault(texts[0]) is None) == valid
            assert not valid or accepted(made, texts), (schema, texts)


def test_a_pattern_of_other_texts_matches_all_but_these():
    pick = random.Random(3)
    texts = ["".join(some) for size in range(4) for some in itertools.product("ab]^-é\\", repeat=size)]
    for _ in range(20):
        left_out = pick.sample(texts, pick.randint(1, 6))
        pattern = re.compile(other_texts(left_out))
        assert [text for text in texts if not pattern.match(text)] == sorted(left_out, key=texts.index)


DISTINCT = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "uniqueItems": True}


def test_sample_decodes_again_what_is_not_valid_and_leaves_its_neighbours():
    schema, kind = {**DISTINCT, "minItems": 5, "maxItems": 6}, {"type": "string", "not": {"const": ""}}
    prompts = ["def x", "return y if x"]
    run = lambda schemas: mj.sample(tiny(), prompts, max_tokens=48, schema=schemas, seed=5, temperature=1.0)
    out, alone = run([schema, kind]), run([None, kind])
    assert [fault(s, t) for s, t in zip((schema, kind), out.texts, strict=True)] == [None, None]
    np.testing.assert_array_equal(out.tokens[1], alone.tokens[1])
    assert out.forwards[1] == alone.forwards[1] and out.forwards[0] > out.lengths[0] / 4
    assert run([schema, kind]).texts == out.texts
    greedy = mj.sample(tiny(), prompts, max_tokens=48, schema=schema, temperature=0.0)
    assert [fault(schema, text) for text in greedy.texts] == [None, None]


def test_an_answer_that_stays_invalid_is_an_error_that_names_its_row():
    """Here the budget leaves only the shortest list, of texts without characters."""
    schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 4}
    shortest = compile(tiny().tokenizer, JSONSchema(schema)).shortest
    with pytest.raises(ValueError, match=r"schema\[1\]: the answer of row 1 is not valid after 17 attempts"):
        mj.sample(tiny(), ["x", "y"], schema=[{"type": "null"}, schema], max_tokens=shortest)


def test_a_stream_refuses_what_is_checked_at_the_end():
    with pytest.raises(
        ValueError, match="schema is 'schema'; allowed: one that a grammar enforces as a whole"
    ):
        mj.stream(tiny(), "x", schema=DISTINCT, max_tokens=48)
