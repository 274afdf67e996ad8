"""openai (Python), its Responses API: what its user sees, and calls as Codex makes them."""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest

from qa.clients.questions import ADD, MODEL, PAINT, SOLVED, SUDOKU, SUM, TOTAL

FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in (ADD, PAINT)]
ASK: dict[str, Any] = {"model": MODEL, "input": SUDOKU, "temperature": 0}


class Paint(pydantic.BaseModel):
    colour: Literal["red", "green"]
    coats: Literal[1, 2]


@pytest.fixture(scope="module")
def client(base):
    with openai.OpenAI(base_url=base, api_key="any", max_retries=0) as made:
        yield made


def test_a_response_answers_and_counts(client):
    said = client.responses.create(**ASK, instructions="Solve it.", metadata={"a": "b"})
    assert said.object == "response" and said.model == MODEL and said.status == "completed"
    assert said.output_text and said.metadata == {"a": "b"} and said.instructions == "Solve it."
    assert client.responses.create(**ASK).output_text == SOLVED
    usage = said.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens >= 0 and usage.output_tokens_details.reasoning_tokens == 0


def test_the_thinking_is_summarised_on_request(client):
    said = client.responses.create(
        model=MODEL, input=SUM, temperature=0, reasoning={"effort": "medium", "summary": "auto"}
    )
    assert said.output_text == TOTAL and said.output[0].type == "reasoning"
    assert said.output[0].summary[0].text and said.usage.output_tokens_details.reasoning_tokens > 0


def test_a_stream_is_the_answer_in_events(client):
    with client.responses.stream(**ASK) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == SOLVED
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == SOLVED
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    raw = list(client.responses.create(**ASK, stream=True))
    assert raw[-1].response.output_text == SOLVED


def test_parse_gives_the_type_that_was_asked_for(client):
    said = client.responses.parse(model=MODEL, input=SUM, text_format=Paint, max_output_tokens=64)
    assert isinstance(said.output_parsed, Paint)
    with client.responses.stream(model=MODEL, input=SUM, text_format=Paint, max_output_tokens=64) as stream:
        stream.until_done()
        assert isinstance(stream.get_final_response().output_parsed, Paint)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
def test_a_function_is_called_and_its_output_is_read(client, choice):
    asked: list[Any] = [{"role": "user", "content": SUM}]
    said = client.responses.create(
        model=MODEL, input=asked, tools=FLAT[:1], tool_choice=choice, parallel_tool_calls=False
    )
    (call,) = [item for item in said.output if item.type == "function_call"]
    numbers = json.loads(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": str(sum(numbers.values()))}
    again = client.responses.create(
        model=MODEL, input=[*asked, *said.output, result], tools=FLAT[:1], tool_choice="none", max_output_tokens=24
    )  # fmt: skip
    assert again.status in ("completed", "incomplete")
    assert all(item.type != "function_call" for item in again.output)


def test_arguments_are_streamed(client):
    with client.responses.stream(
        model=MODEL, input=SUM, tools=FLAT, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    (call,) = [item for item in final.output if item.type == "function_call"]
    assert "".join(deltas) == call.arguments and json.loads(call.arguments)


def test_a_conversation_goes_on_from_a_stored_response(client):
    first = client.responses.create(**ASK)
    second = client.responses.create(model=MODEL, input=SUM, temperature=0, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    whole: list[Any] = [
        {"role": "user", "content": SUDOKU}, *first.output, {"role": "user", "content": SUM},
    ]  # fmt: skip
    again = client.responses.create(model=MODEL, input=whole, temperature=0, store=False)
    assert again.usage.input_tokens == second.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.type for item in items] == ["message", "message", "message"]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError, match="store false"):
        client.responses.retrieve(again.id)


def test_calls_as_codex_makes_them(client):
    text = lambda role, kind, said: {
        "type": "message", "role": role, "content": [{"type": kind, "text": said}],
    }  # fmt: skip
    shell = {
        "type": "function", "name": "shell", "description": "Runs a command", "strict": False,
        "parameters": {"type": "object", "properties": {
            "command": {"type": "array", "items": {"enum": ["ls", "cat"]}, "minItems": 1, "maxItems": 2}},
            "required": ["command"], "additionalProperties": False},
    }  # fmt: skip
    patch = {
        "type": "function", "name": "apply_patch", "strict": False,
        "parameters": {"type": "object", "properties": {"input": {"type": "string", "maxLength": 8}},
                       "required": ["input"], "additionalProperties": False},
    }  # fmt: skip
    body: dict[str, Any] = {
        "model": MODEL, "instructions": "You edit code.", "tools": [shell, patch],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "shell"}]},
        "parallel_tool_calls": False, "reasoning": {"effort": "low", "summary": "auto"}, "store": False,
        "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "a-conversation",
        "text": {"verbosity": "low"},
    }  # fmt: skip
    turns: list[Any] = [text("developer", "input_text", "Be short."), text("user", "input_text", SUM)]
    done = [
        e.item for e in client.responses.create(**body, input=turns) if e.type == "response.output_item.done"
    ]
    (call,) = [item for item in done if item.type == "function_call"]
    assert call.name == "shell" and set(json.loads(call.arguments)["command"]) <= {"ls", "cat"}
    # Thinking of an earlier turn comes back as OpenAI's models wrote it.
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "a.py"}
    body["tool_choice"] = "none"
    *_, last = client.responses.create(
        **body, input=[*turns, thought, call.to_dict(), output], max_output_tokens=16
    )
    assert last.type in ("response.completed", "response.incomplete")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, r"tools\[0\]\.type is 'web_search'"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"previous_response_id": "resp_none"}, "not stored"),
    ({"max_output_tokens": 0}, "max_output_tokens is 0"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}, "input_image"),
]  # fmt: skip


@pytest.mark.parametrize("more, reason", REFUSED)
def test_what_is_not_served_is_refused_by_name(client, more, reason):
    with pytest.raises(openai.BadRequestError, match=reason):
        client.responses.create(**{**ASK, **more})
