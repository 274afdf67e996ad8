"""openai (Python, major versions 2 and 3): what its user sees."""

# pyright: reportMissingImports=false
from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import uuid
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest

from qa.clients.questions import ADD, MODEL, PAINT, SOLVED, SUDOKU, SUM, TOTAL, user


class Digits(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    first: int = pydantic.Field(ge=0, le=9)
    colour: str = pydantic.Field(pattern="^(red|green)$")


@pytest.fixture(scope="module")
def client(base):
    with openai.OpenAI(base_url=base, api_key="any", max_retries=0) as made:
        yield made


def test_a_chat_answers_and_counts(client):
    said = client.chat.completions.create(model=MODEL, messages=user(SUDOKU), temperature=0)
    assert said.object == "chat.completion" and said.model == MODEL and said.id.startswith("chatcmpl-")
    assert said.choices[0].message.content == SOLVED and said.choices[0].message.role == "assistant"
    assert said.choices[0].finish_reason == "stop" and not said.choices[0].message.tool_calls
    usage = said.usage
    assert (
        usage.total_tokens == usage.prompt_tokens + usage.completion_tokens and usage.completion_tokens > 16
    )
    assert usage.completion_tokens_details.reasoning_tokens == 0
    assert usage.prompt_tokens_details.cached_tokens >= 0


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high"])
def test_every_effort_ends_in_an_answer_and_says_what_it_thought(client, effort):
    said = client.chat.completions.create(
        model=MODEL, messages=user(SUM), temperature=0, reasoning_effort=effort, max_completion_tokens=64
    )
    assert said.choices[0].message.content == TOTAL
    thought = said.usage.completion_tokens_details.reasoning_tokens
    assert effort in ("none", "minimal") or 0 < thought < said.usage.completion_tokens


def test_a_stream_is_the_answer_in_pieces(client):
    stream = client.chat.completions.create(model=MODEL, messages=user(SUDOKU), temperature=0, stream=True)
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == SOLVED
    assert [c.choices[0].finish_reason for c in chunks].count("stop") == 1
    assert chunks[-1].choices[0].finish_reason == "stop" and len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in chunks)


def test_usage_comes_last_and_only_when_asked_for(client):
    stream = client.chat.completions.create(
        model=MODEL, messages=user(SUDOKU), temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *others, last = list(stream)
    assert last.choices == [] and last.usage.total_tokens > last.usage.prompt_tokens > 0
    assert all(c.usage is None and c.choices for c in others)


def test_parse_gives_the_type_that_was_asked_for(client):
    said = client.chat.completions.parse(
        model=MODEL, messages=user(SUM), response_format=Digits, max_tokens=64
    )
    found = said.choices[0].message.parsed
    assert isinstance(found, Digits) and found.colour in ("red", "green")


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Tree(pydantic.BaseModel):
    left: Tree | None = None
    size: int = pydantic.Field(ge=0, le=9)


TYPES = {
    "str": str, "bool": bool, "float": float, "Literal": Literal["red", "green"], "Enum": Colour, "bytes": bytes,
    "date": datetime.date, "time": datetime.time, "datetime": datetime.datetime, "UUID": uuid.UUID,
    "UUID4": pydantic.UUID4, "Decimal": decimal.Decimal, "Path": pathlib.Path, "SecretStr": pydantic.SecretStr,
    "IPv4": ipaddress.IPv4Address,
    "IPv4Network": ipaddress.IPv4Network, "IPv6": ipaddress.IPv6Address, "IPvAny": pydantic.IPvAnyAddress,
    "Base64": pydantic.Base64Bytes, "list": list[Literal[1, 2]], "tuple": tuple[bool, Literal["x"]],
    "dict": dict[str, bool], "dict of literals": dict[Literal["a", "b"], bool], "dict of an enum": dict[Colour, bool],
    "Optional": Literal["x"] | None, "itself": Tree, "Color": Annotated[str, pydantic.Field(pattern="^#[0-9a-f]{6}$")],
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_parse_takes_ordinary_types(client, name):
    asked: Any = pydantic.create_model("Answer", value=(TYPES[name], ...))
    said = client.chat.completions.parse(
        model=MODEL, messages=user(SUM), response_format=asked, max_tokens=96, reasoning_effort="none", seed=1
    )
    assert isinstance(said.choices[0].message.parsed, asked)


def test_a_tool_that_cannot_be_enforced_is_named_or_checked_afterwards(client):
    tags = {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3, "uniqueItems": True}
    schema = {
        "type": "object", "properties": {"tags": tags}, "required": ["tags"], "additionalProperties": False,
    }  # fmt: skip
    tool: Any = {"type": "function", "function": {"name": "tag", "parameters": schema}}
    ask = {
        "model": MODEL, "messages": user(SUM), "tools": [PAINT, tool], "max_tokens": 64,
        "reasoning_effort": "none",
    }  # fmt: skip
    one = {"type": "function", "function": {"name": "tag"}}
    (call,) = client.chat.completions.create(**ask, tool_choice=one).choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)["tags"]) <= {"a", "b"}
    twice = {**schema, "properties": {"tags": {"type": "string", "pattern": r"(a)\1"}}}
    strict = {**tool, "function": {**tool["function"], "parameters": twice, "strict": True}}
    with pytest.raises(
        openai.BadRequestError, match=r"tools\[1\]\.function\.parameters\.properties\.tags\.pattern"
    ):
        client.chat.completions.create(**{**ask, "tools": [PAINT, strict]}, tool_choice=one)


def test_a_json_object_is_one(client):
    said = client.chat.completions.create(
        model=MODEL, messages=user(SUM), response_format={"type": "json_object"}, max_tokens=48
    )
    assert isinstance(json.loads(said.choices[0].message.content), dict)


def test_a_schema_that_cannot_be_guaranteed_is_refused_with_the_reason(client):
    schema = {"type": "string", "pattern": r"(a)\1"}
    wanted = {"type": "json_schema", "json_schema": {"name": "twice", "strict": True, "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="pattern.*backreferences") as refused:
        client.chat.completions.create(model=MODEL, messages=user(SUM), response_format=wanted)
    assert refused.value.status_code == 400 and refused.value.type == "invalid_request_error"


def test_a_tool_is_called_and_its_result_is_read(client):
    messages = user(SUM)
    said = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[ADD], tool_choice="required", parallel_tool_calls=False,
        max_tokens=96,
    )  # fmt: skip
    (call,) = said.choices[0].message.tool_calls
    assert said.choices[0].finish_reason == "tool_calls" and call.function.name == "add"
    numbers = json.loads(call.function.arguments)
    assert set(numbers) == {"a", "b"} and all(0 <= n <= 9 for n in numbers.values())
    # The message goes back as it came, with the result behind it: an agent's next turn.
    result = {"role": "tool", "tool_call_id": call.id, "content": str(sum(numbers.values()))}
    history = [*messages, said.choices[0].message.to_dict(), result]
    again = client.chat.completions.create(
        model=MODEL, messages=history, tools=[ADD], tool_choice="none", max_tokens=24
    )
    assert again.choices[0].finish_reason in ("stop", "length") and not again.choices[0].message.tool_calls


def test_a_named_tool_is_the_one_that_is_called(client):
    said = client.chat.completions.create(
        model=MODEL, messages=user(SUM), tools=[ADD, PAINT], max_tokens=96,
        tool_choice={"type": "function", "function": {"name": "paint"}},
    )  # fmt: skip
    calls = said.choices[0].message.tool_calls
    assert [c.function.name for c in calls] == ["paint"]
    assert json.loads(calls[0].function.arguments)["colour"] in ("red", "green")


def test_tool_deltas_add_up_to_calls(client):
    stream = client.chat.completions.create(
        model=MODEL, messages=user(SUM), tools=[ADD], tool_choice="required", stream=True, max_tokens=96,
    )  # fmt: skip
    calls: dict[int, dict] = {}
    finish = None
    for chunk in stream:
        finish = chunk.choices[0].finish_reason or finish
        for delta in chunk.choices[0].delta.tool_calls or ():
            call = calls.setdefault(delta.index, {"ids": [], "names": [], "arguments": ""})
            call["ids"] += [delta.id] if delta.id else []
            call["names"] += [delta.function.name] if delta.function.name else []
            call["arguments"] += delta.function.arguments or ""
    assert finish == "tool_calls" and sorted(calls) == list(range(len(calls)))
    for call in calls.values():
        assert len(call["ids"]) == 1 and call["names"] == ["add"]  # id and name in the first delta alone
        assert set(json.loads(call["arguments"])) == {"a", "b"}


def test_the_streaming_helper_parses_as_it_goes(client):
    with client.chat.completions.stream(
        model=MODEL, messages=user(SUM), response_format=Digits, max_tokens=64
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.done" in kinds and isinstance(final.choices[0].message.parsed, Digits)


def test_same_seed_same_text_and_n_answers(client):
    ask = dict(model=MODEL, messages=user("import os"), temperature=1.5, max_tokens=24, n=2)
    one, two = (client.chat.completions.create(**ask, seed=7) for _ in range(2))
    texts = [c.message.content for c in one.choices]
    assert texts == [c.message.content for c in two.choices]
    assert [c.index for c in one.choices] == [0, 1]


def test_log_probabilities_belong_to_the_answer(client):
    said = client.chat.completions.create(
        model=MODEL, messages=user(SUDOKU), temperature=0, logprobs=True, top_logprobs=2
    )
    nats = said.choices[0].logprobs.content
    assert b"".join(bytes(n.bytes) for n in nats).decode() == SOLVED
    assert all(n.logprob <= 0 and len(n.top_logprobs) == 2 for n in nats)


def test_a_stop_text_is_never_sent(client):
    said = client.chat.completions.create(model=MODEL, messages=user(SUDOKU), temperature=0, stop="\n3421")
    assert said.choices[0].message.content == SOLVED.partition("\n3421")[0]
    assert said.choices[0].finish_reason == "stop"


def test_plain_completions_go_on_and_fill_gaps(client):
    said = client.completions.create(model=MODEL, prompt="import os\nimport ", max_tokens=8)
    assert said.object == "text_completion" and said.choices[0].text
    filled = client.completions.create(
        model=MODEL, prompt="def __init__(self, name):\n    self.", suffix=" = name\n", max_tokens=8
    )
    assert filled.choices[0].text and filled.usage.completion_tokens <= 8


def test_the_models_are_listed(client):
    listed = {model.id for model in client.models.list()}
    assert {"nano", MODEL} <= listed and client.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize(
    "error, changed",
    [
        (openai.NotFoundError, {"model": "gpt-9"}),
        (openai.BadRequestError, {"temperature": 3.5}),
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"messages": user("0" * 100_000)}),
        (openai.BadRequestError, {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "x"}}}),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said(client, error, changed):
    with pytest.raises(error) as raised:
        client.chat.completions.create(**{"model": MODEL, "messages": user(SUM), **changed})
    assert raised.value.body["message"] and raised.value.body["type"] == "invalid_request_error"


def test_an_async_client_sees_the_same(base):
    import asyncio

    async def ask():
        async with openai.AsyncOpenAI(base_url=base, api_key="any") as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=user(SUDOKU), temperature=0, stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

    assert asyncio.run(ask()) == SOLVED
