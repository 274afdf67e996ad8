"""What the OpenAPI document says of messages and single values is what is taken, and its examples are."""

import pytest
from jsonschema.validators import Draft202012Validator

from mercury_jax.serve.api import fields, openapi, tables
from mercury_jax.serve.api.errors import ApiError
from mercury_jax.serve.api.kinds import Only
from mercury_jax.serve.chat.apply_edit import apply_update, parse_apply
from mercury_jax.serve.chat.code_prompts import parse_edit
from mercury_jax.serve.chat.messages import ROLES, check_messages

CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
MORE = [
    {}, {"content": None}, {"content": "hi"}, {"content": 5}, {"content": [{"type": "text", "text": "hi"}]},
    {"content": [{"type": "text"}]}, {"content": [{}]}, {"content": [{"type": "image_url", "text": "hi"}]},
    {"content": ["hi"]}, {"name": "f"}, {"name": ""}, {"name": "a b"}, {"tool_call_id": "1"}, {"tool_call_id": ""},
    {"tool_call_id": 1}, {"tool_calls": [CALL]}, {"tool_calls": [{**CALL, "type": "x"}]}, {"tool_calls": [{"id": "1"}]},
    {"function_call": CALL["function"]}, {"function_call": {"name": "a b"}}, {"function_call": {}},
]  # fmt: skip


def taken(kind, value):
    try:
        kind.read(value, "it")
    except ApiError:
        return False
    return True


@pytest.mark.parametrize("role", [*ROLES, "bot"])
def test_a_message_is_taken_as_its_role_says(role):
    says = Draft202012Validator(fields.MESSAGE.schema())
    for more in MORE:
        message = {"role": role, **more}
        assert taken(fields.MESSAGE, message) == says.is_valid(message), message
    assert taken(fields.MESSAGE, {"role": role, "content": "hi"}) == (role not in ("tool", "bot"))
    assert set(fields.MESSAGE.records) == set(ROLES)


@pytest.mark.parametrize("only", [Only(1), Only(False), Only("function")])
def test_one_value_is_one_however_json_writes_it(only):
    says = Draft202012Validator(only.schema())
    for value in (1, 1.0, 0, 0.0, 1.5, True, False, "function", "1", None, [], {}):
        assert taken(only, value) == says.is_valid(value), value
    assert type(Only(1).read(1.0, "it")) is int


def test_every_example_is_a_right_request():
    document = openapi.build(models=("nano", "x"))
    asked = {
        path: item["post"]["requestBody"]["content"]["application/json"]
        for path, item in document["paths"].items()
        if "post" in item
    }
    assert set(asked) == set(openapi.POSTS)
    for path, body in asked.items():
        schema = {**document, "$ref": body["schema"]["$ref"]}
        assert Draft202012Validator(schema).is_valid(body["example"]), path
        assert openapi.POSTS[path][1].read(body["example"], "")["model"] == "nano"
    edit, apply = (asked[f"/v1/{kind}/completions"]["example"]["messages"] for kind in ("edit", "apply"))
    assert parse_edit(check_messages(edit)[0]["content"]).region == "    return width"
    merged = apply_update(parse_apply(check_messages(apply)[0]["content"]))
    assert merged == "def area(width, height):\n    side = width * height\n    return side"
    chat = tables.CHAT.read(asked["/v1/chat/completions"]["example"], "")
    assert check_messages(chat["messages"], chat["tools"])
