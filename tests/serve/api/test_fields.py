"""The tables: what they let through, what they refuse, and that the OpenAPI document says the same."""

import itertools
import math

import pytest
from jsonschema.validators import Draft202012Validator

from mercury_jax.serve.api import body, openapi, tables
from mercury_jax.serve.api.errors import ApiError
from mercury_jax.serve.api.kinds import REQUIRED, Either, Field, Items, Only, Record, Tagged

TABLES = {
    "chat": tables.CHAT,
    "completions": tables.COMPLETIONS,
    "fim": tables.FIM,
    "edit": tables.EDIT,
    "apply": tables.APPLY,
}
LEAST = {
    "chat": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "completions": {"model": "m", "prompt": "hi"},
    "fim": {"model": "m", "prompt": "hi"},
    "edit": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "apply": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
}
# Values at and beyond the edges of every kind.
VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 16, 17, 5.0, 0.5, 1.5, -2.5, 2**31, -(2**63), 2**63, 2**70, 1e300, "", "a",
    "auto", "none", "instant", "medium", "minimal", "x" * 65, "x" * 300, [], ["a"], [""], ["a"] * 33, [1], [None], {},
    {"a": 1}, {"1": 5}, {"01": 5}, {"1": 101}, {"1": None}, {"include_usage": True}, {"include_usage": 1},
    {"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, {"type": "nothing"},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    {"type": "json_schema", "json_schema": {"name": "a b"}}, {"type": "json_schema", "json_schema": {"name": "n" * 65}},
    {"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {}}, {"type": "function"},
    [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    [{"type": "function", "function": {"name": "f", "strict": 1}}],
    [{"role": "user", "content": "hi"}], [{"role": "user"}], [{"role": "bot", "content": "hi"}],
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], [{"role": "tool", "content": 5}],
    [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}],
    [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}],
]  # fmt: skip


def takes(table, data):
    try:
        table.read(data, "")
    except ApiError as error:
        return not (error.status == 400 and isinstance(error.message, str) and len(error.message) < 400)
    return True


@pytest.mark.parametrize("name", TABLES)
def test_the_document_says_exactly_what_is_taken(name):
    """One table drives both: whatever the schema allows is read, and whatever it does not is refused."""
    table, least = TABLES[name], LEAST[name]
    says = Draft202012Validator(table.schema())
    assert takes(table, least) and says.is_valid(least)
    for field, value in itertools.product([*(f.name for f in table.fields), *table.never], VALUES):
        data = {**least, field: value}
        assert takes(table, data) == says.is_valid(data), (field, value)


@pytest.mark.parametrize("name", TABLES)
def test_what_would_constrain_the_answer_is_refused_by_name_and_not_ignored(name):
    never = {"guided_json": {"type": "object"}, "guided_regex": "a+", "guided_choice": ["a"], "guided_grammar": "x",
             "structured_outputs": {"regex": "a"}, "regex": "a+", "ebnf": "x", "grammar": "x", "json_schema": {"a": 1},
             "structural_tag": {"a": 1}, "allowed_token_ids": [5], "bad_words": ["a"], "min_tokens": 5,
             "functions": [{"name": "f"}], "function_call": "auto"}  # fmt: skip
    never |= {} if name == "chat" else {"response_format": {"type": "json_object"}}
    for field, value in never.items():
        for data in ({field: value}, {"extra_body": {field: value}}):
            with pytest.raises(ApiError, match=f"{field} is .*this server has no such field. [A-Z]") as told:
                TABLES[name].read(body.merged({**LEAST[name], **data}), "")
            assert (told.value.status, told.value.param) == (400, field)
        TABLES[name].read({**LEAST[name], field: None, "user": "x"}, "")


@pytest.mark.parametrize("name", TABLES)
def test_null_is_the_default_and_required_fields_have_none(name):
    table, least = TABLES[name], LEAST[name]
    read = table.read({**dict.fromkeys((f.name for f in table.fields), None), **least}, "")
    for field in table.fields:
        assert field.name in least or read[field.name] == field.default
        assert (field.default is REQUIRED) == (field.name in least)
        missing = {k: v for k, v in least.items() if k != field.name}
        assert takes(table, missing) == (field.name not in least)


@pytest.mark.parametrize("name", TABLES)
def test_unknown_fields_are_ignored(name):
    odd = {"user": 5, "store": [True], "mode": "chat", "nextEdit": True, "top_a": math.pi, "": None}
    assert TABLES[name].read({**LEAST[name], **odd}, "") == TABLES[name].read(LEAST[name], "")


@pytest.mark.parametrize("bad", [True, "5", [5], {}, float("nan"), float("inf"), -float("inf"), 10**400])
def test_a_number_is_a_finite_number_and_nothing_else(bad):
    """A bool is no number, a text is none, and no comparison with NaN lets it in."""
    for field in tables.CHAT.fields:
        if field.kind.schema().get("type") in ("integer", "number"):
            with pytest.raises(ApiError) as told:
                tables.CHAT.read({**LEAST["chat"], field.name: bad}, "")
            assert told.value.param == field.name


def test_a_refusal_names_the_place_the_value_and_what_is_allowed():
    with pytest.raises(ApiError) as told:
        tables.CHAT.read({"model": "m", "messages": [{"role": "user", "content": "a"}, {"role": "bot"}]}, "")
    assert told.value.param == "messages[1].role"
    assert "'bot'" in told.value.message and "assistant" in told.value.message
    with pytest.raises(ApiError) as told:
        tables.CHAT.read({**LEAST["chat"], "seed": "x" * 10**6}, "")
    assert len(told.value.message) < 300


def test_the_vendors_defaults_and_ranges_stand():
    fim = tables.FIM.read(LEAST["fim"], "")
    assert (fim["max_tokens"], fim["top_k"], fim["presence_penalty"], fim["stop"]) == (
        512,
        -1,
        1.5,
        ["\n\n", "\n \n"],
    )
    assert not takes(tables.FIM, {**LEAST["fim"], "top_k": 0}) and "temperature" not in fim
    edit = tables.EDIT.read(LEAST["edit"], "")
    assert (edit["max_tokens"], edit["temperature"], edit["presence_penalty"]) == (1024, 0.2, 1.0)
    two = [LEAST["edit"]["messages"][0]] * 2
    assert not takes(tables.EDIT, {"model": "m", "messages": two})
    effort = tables.CHAT.read({**LEAST["chat"], "reasoning_effort": "none"}, "")["reasoning_effort"]
    assert effort == "instant"
    assert tables.CHAT.read({**LEAST["chat"], "reasoning_effort": "xhigh"}, "")["reasoning_effort"] == "high"


def described(kind):
    """Every field of a kind, inner ones too."""
    inner = {
        Record: lambda: kind.fields,
        Tagged: lambda: [f for r in kind.records.values() for f in r.fields],
        Items: lambda: described(kind.kind),
        Either: lambda: [f for k in kind.kinds for f in described(k)],
    }.get(type(kind), list)()
    for field in inner:
        if isinstance(field, Field):
            yield field
            yield from described(field.kind)


@pytest.mark.parametrize("name", TABLES)
def test_every_field_is_described(name):
    fields = list(described(TABLES[name]))
    assert fields and all(f.about.endswith(".") or f.about.endswith(")") for f in fields)
    assert all(f.default is REQUIRED or f.default is None or not isinstance(f.kind, Only) or
               f.default == f.kind.value for f in fields)  # fmt: skip


def test_the_document_is_whole():
    """Every reference leads somewhere, every schema is one, and every route of the app is described."""
    document = openapi.build()
    names = set(document["components"]["schemas"])
    text = str(document)
    used = {part.split("'")[0] for part in text.split("#/components/schemas/")[1:]}
    assert used <= names
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    from mercury_jax.serve.api import app

    paths = {path.replace("{id:path}", "{id}") for path in (*app.OPEN, *app.GET, *app.POST)}
    assert paths == set(document["paths"])
    assert "security" not in openapi.build(keys=False)
    asked = openapi.build(models=("nano", "x"))["components"]["schemas"]["ChatCompletionsRequest"]
    assert asked["properties"]["model"]["enum"] == ["nano", "x"]


def test_the_playground_refuses_a_strictness_that_its_rule_cannot_take(nano):
    from tests.serve.api.door import Door  # imports jax

    door = Door(nano, playground=True)
    for rule, p in (("threshold", 1.5), ("factor", 0)):
        ask = {"kind": "text", "prompt": "a", "rule": rule, "p": p}
        error = door.refuses(ask, "/playground/stream")
        assert error["param"] == "p" and rule in error["message"] and "a number" in error["message"]
