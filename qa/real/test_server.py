"""`mercury serve --model smollm2`, as an application uses it through openai's client."""

import json

import openai
import pytest

from qa.clients.served import serving

PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "country": {"enum": ["France", "Spain"]}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather in a city.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 30}}, "required": ["city"],
    "additionalProperties": False,
}}}  # fmt: skip


@pytest.fixture(scope="module")
def client():
    with serving("--model", "smollm2", "--slots", "2", "--context", "512") as server:
        server.wait("/ready")
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=300) as made:
            yield made
        assert server.end() == 0


def chat(client, text, **more):
    return client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": text}],
        temperature=0,
        **{"max_tokens": 40, **more},
    )


def test_a_question_is_answered(client):
    said = chat(client, "What is the capital of France?")
    assert said.choices[0].message.content == "The capital of France is Paris."
    assert said.choices[0].finish_reason == "stop" and said.usage.completion_tokens == 7


def test_a_stream_is_the_same_text_and_stop_texts_cut_it(client):
    asked = "List three primary colours, one per line."
    whole = chat(client, asked).choices[0].message.content
    pieces = [
        part.choices[0].delta.content or "" for part in chat(client, asked, stream=True) if part.choices
    ]
    assert "".join(pieces) == whole and len(pieces) > 3
    stop = whole[len(whole) // 2 :][:4]
    cut = chat(client, asked, stop=[stop])
    assert (
        cut.choices[0].message.content == whole[: whole.index(stop)]
        and cut.choices[0].finish_reason == "stop"
    )


def test_json_follows_its_schema_and_tools_are_called(client):
    form = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": PLACE}}
    said = chat(client, "Paris is the capital of which country?", response_format=form)
    place = json.loads(said.choices[0].message.content)
    assert place["country"] == "France" and set(place) == {"city", "country"}
    said = chat(client, "What is the weather in Paris?", tools=[WEATHER], tool_choice="required")
    call = said.choices[0].message.tool_calls[0].function
    assert call.name == "weather" and isinstance(json.loads(call.arguments)["city"], str)


def test_filling_in_the_middle_is_refused_by_name(client):
    with pytest.raises(openai.BadRequestError, match="fill-in-the-middle|suffix"):
        client.completions.create(model="smollm2", prompt="def f(", suffix="return x", max_tokens=8)
