"""Constraints by the fields of vLLM and SGLang, at a real engine; and what a stream sends beside its text."""

import json
import re

import pytest

from mercury_jax.serve.protocol import GUIDED_FIELDS
from tests.serve.api_client import CHAT, PAYLOAD, client_of, content_of, events
from tests.serve.scripted_engine import ScriptedEngine, text_snapshots

TEXT = "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
LARK, GBNF = 'start: "<" /[0-9]/ ">"', 'root ::= "<" [0-9] ">"'
# Each form of a constraint, with a pattern of the texts that obey it.
FORMS = {
    "guided_json": (SCHEMA, r'\{"a": ?[12]\}'),
    "guided_regex": ("[a-c]{2}-[0-9]", "[a-c]{2}-[0-9]"),
    "guided_choice": (["yes", "no"], "yes|no"),
    "guided_grammar": (LARK, "<[0-9]>"),
    "regex": ("x[0-9]", "x[0-9]"),
    "ebnf": (GBNF, "<[0-9]>"),
}
FUNCTION = {"type": "function", "function": {"name": "f"}}


def body_of(path, **fields):
    start = PAYLOAD if path == CHAT else {"model": "nano", "prompt": "def f("}
    return {**start, "max_tokens": 40, **fields}


def text_of(response):
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.fixture(scope="module")
def client(engine):
    return client_of(engine)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_form_of_a_constraint_is_obeyed_at_any_temperature(client, path):
    forms = {**FORMS, "json as a text": (json.dumps(SCHEMA), FORMS["guided_json"][1])}
    for name, (value, pattern) in forms.items():
        field = name if name in GUIDED_FIELDS else "guided_json"
        inner = field.removeprefix("guided_").replace("ebnf", "grammar")
        for fields in (
            {field: value},
            {"structured_outputs": {inner: value}},
            {"extra_body": {field: value}},
        ):
            for temperature in (0.0, 2.0):
                more = {"temperature": temperature, "seed": 3, "stop": ["a", "e", "x", "<"]}
                text = text_of(client.post(path, json=body_of(path, **fields, **more)))
                assert re.fullmatch(pattern, text), (fields, text)
    anything = text_of(client.post(path, json=body_of(path, structured_outputs={"json_object": True})))
    assert isinstance(json.loads(anything), dict)


def test_a_stream_and_several_answers_obey_too(client, engine):
    body = body_of(CHAT, guided_regex="[a-c]{3}", n=3, temperature=2.0)
    found = client.post(CHAT, json=body).json()["choices"]
    assert all(re.fullmatch("[a-c]{3}", choice["message"]["content"]) for choice in found)
    chunks = events(engine, {**body, "n": 1})
    assert re.fullmatch("[a-c]{3}", content_of(chunks))


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around, .* is not supported"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "unclosed character class"),
        ({"guided_choice": ["a", ""]}, "guided_choice", r"options\[1\] is ''"),
        ({"guided_grammar": "start: foo"}, "guided_grammar", 'unknown name: "foo"'),
        ({"ebnf": "root ::= ("}, "ebnf", r"no GBNF: Expected '\)'"),
        ({"guided_grammar": "start: <|5|>"}, "guided_grammar", "a special token"),
        ({"guided_json": "{"}, "guided_json", "is no JSON"),
        ({"guided_json": {"type": "string", "pattern": r"(a)\1"}}, "guided_json", "guided_json.pattern: back"),
        ({"guided_json": "7"}, "guided_json", "a JSON Schema"),
        ({"guided_choice": []}, "guided_choice", "is empty"),
        ({"guided_regex": ""}, "guided_regex", "is empty"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar", "is empty"),
        ({"structured_outputs": {}}, "structured_outputs", "is empty; allowed: one of json"),
        ({"guided_choice": ["a"], "regex": "b"}, "guided_choice", "cannot be combined with regex"),
        ({"guided_regex": "a", "bad_words": ["b"]}, "guided_regex", "cannot be combined with bad_words"),
        ({"structured_outputs": {"choice": ["a"], "json": SCHEMA}}, "structured_outputs.json", "combined with"),
        ({"structured_outputs": {"structural_tag": {"a": 1}}}, "structured_outputs.structural_tag", "no such field"),
    ],
)  # fmt: skip
def test_what_cannot_be_guaranteed_is_refused_by_its_field(scripted_app, fields, param, words):
    for path in (CHAT, TEXT):
        error = scripted_app.refuses(body_of(path, **fields), path)
        assert error["param"] == param and re.search(words, error["message"]), error
    scripted_app.serves()


def test_constraints_of_one_endpoint_are_not_combined(scripted_app):
    for other in ({"tools": [FUNCTION]}, {"response_format": {"type": "json_object"}}):
        error = scripted_app.refuses(body_of(CHAT, guided_regex="a", **other))
        assert error["message"] == f"guided_regex cannot be combined with {next(iter(other))}"
    assert "with suffix" in scripted_app.refuses(body_of(TEXT, guided_regex="a", suffix="b"), TEXT)["message"]


def test_what_the_server_does_not_make_is_refused_by_name(scripted_app):
    image = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}],
    }
    for fields, words in (
        ({"modalities": ["text", "audio"]}, "modalities[1] is 'audio'; allowed: text"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio is an object"),
        ({"web_search_options": {}}, "web_search_options is an object"),  # {} asks for a search
        ({"messages": [image]}, "this model has no vision tower"),
    ):
        assert words in scripted_app.refuses({**PAYLOAD, **fields})["message"]
    response = scripted_app.post(
        {**PAYLOAD, "modalities": ["text"], "audio": None, "reasoning_effort": "max"}
    )
    assert response.status_code == 200


def test_obfuscation_makes_the_sizes_of_chunks_multiples_of_one_size(nano):
    script = text_snapshots(
        nano, "9", "93", "932", "932 is the sum of both, which is more than each of them."
    )
    options = {"stream_options": {"include_obfuscation": True}}
    lines = []
    for fields in (options, {}):
        client = client_of(ScriptedEngine(nano, script, pause=0.02))
        lines.append(client.post(CHAT, json={**PAYLOAD, "stream": True, **fields}).text.split("\n\n")[:-2])
    sizes = [[len(line.removeprefix("data: ")) for line in some] for some in lines]
    assert len(lines[0]) > 3 and {size % 128 for size in sizes[0]} == {0} and len(set(sizes[1])) > 2
    chunks = [[json.loads(line.removeprefix("data: ")) for line in some] for some in lines]
    padding = [chunk.pop("obfuscation") for chunk in chunks[0]]
    assert len({text[:8] for text in padding if text}) == sum(map(bool, padding))  # no two alike
    assert content_of(chunks[0]) == content_of(chunks[1])


def test_continuous_usage_counts_up_to_the_usage_of_the_answer(nano):
    script = text_snapshots(nano, "9", "93", "932", "932 is the sum.")
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(ScriptedEngine(nano, script, pause=0.02), {**PAYLOAD, "stream_options": options, "n": 2})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0 and counts == sorted(counts) and len(set(counts)) > 2
    prompt = {chunk["usage"]["prompt_tokens"] for chunk in chunks}
    assert len(prompt) == 1 and all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"]
                                    for u in (chunk["usage"] for chunk in chunks))  # fmt: skip
    whole = client_of(ScriptedEngine(nano, script)).post(CHAT, json={**PAYLOAD, "n": 2}).json()["usage"]
    assert chunks[-1]["usage"] == whole and chunks[-1]["choices"] == []
