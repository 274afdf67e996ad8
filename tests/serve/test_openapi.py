"""The OpenAPI document: it is complete, and its examples are valid requests."""

from jsonschema.validators import Draft202012Validator

from mercury_jax.serve import app
from mercury_jax.serve.chat.apply_edit import apply_update, parse_apply
from mercury_jax.serve.chat.code_prompts import parse_edit
from mercury_jax.serve.openapi import ENDPOINTS, build_document
from mercury_jax.serve.protocol import parse_request
from tests.serve.api_client import check_messages


def test_every_reference_resolves_and_every_route_is_described():
    document = build_document()
    schemas = document["components"]["schemas"]
    references = {part.split("'")[0] for part in str(document).split("#/components/schemas/")[1:]}
    assert references <= set(schemas)
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    routes = (*app.PUBLIC_ROUTES, *app.GET_ROUTES, *app.POST_ROUTES, *app.STORE_ROUTES)
    assert {path.replace("{id:path}", "{id}") for path in routes} == set(document["paths"])


def test_the_document_says_whether_a_key_is_needed_and_which_models_there_are():
    assert "security" in build_document() and "security" not in build_document(keys=False)
    request = build_document(models=("nano", "x"))["components"]["schemas"]["ChatCompletionsRequest"]
    assert request["properties"]["model"]["enum"] == ["nano", "x"]


def test_every_example_is_a_valid_request():
    document = build_document(models=("nano", "x"))
    bodies = {
        path: item["post"]["requestBody"]["content"]["application/json"]
        for path, item in document["paths"].items()
        if "post" in item
    }
    assert set(bodies) == set(ENDPOINTS) == set(app.POST_ROUTES)
    for path, body in bodies.items():
        schema = {**document, **body["schema"]}
        assert Draft202012Validator(schema).is_valid(body["example"]), path
        assert parse_request(ENDPOINTS[path].request, body["example"]).model_dump()["model"] == "nano"
    edit, apply = (bodies[f"/v1/{kind}/completions"]["example"]["messages"] for kind in ("edit", "apply"))
    assert parse_edit(check_messages(edit)[0]["content"]).region == "    return width"
    merged = apply_update(parse_apply(check_messages(apply)[0]["content"]))
    assert merged == "def area(width, height):\n    side = width * height\n    return side"
    chat = bodies["/v1/chat/completions"]["example"]
    assert check_messages(chat["messages"], chat["tools"])
