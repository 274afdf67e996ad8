"""litellm's own providers for Mercury: `inception/` and `text-completion-inception/`, with another api_base."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import json

import litellm
import pytest

from qa.clients.questions import ADD, MODEL, SOLVED, SUDOKU, SUM, TOTAL, user

litellm.num_retries = 0
litellm.telemetry = False


@pytest.fixture
def to_us(base):
    return dict(model=f"inception/{MODEL}", api_base=base, api_key="any")


def test_a_chat_answers(to_us):
    said = litellm.completion(messages=user(SUDOKU), temperature=0, **to_us)
    assert said.choices[0].message.content == SOLVED and said.choices[0].finish_reason == "stop"
    assert said.usage.total_tokens == said.usage.prompt_tokens + said.usage.completion_tokens


def test_the_base_may_come_from_the_environment(base, monkeypatch):
    monkeypatch.setenv("INCEPTION_API_BASE", base)
    monkeypatch.setenv("INCEPTION_API_KEY", "any")
    said = litellm.completion(model=f"inception/{MODEL}", messages=user(SUDOKU), temperature=0)
    assert said.choices[0].message.content == SOLVED


def test_mercurys_own_fields_pass(to_us):
    said = litellm.completion(
        messages=user(SUM), temperature=0, reasoning_effort="low", reasoning_summary=True,
        reasoning_summary_wait=True, realtime=True, max_completion_tokens=64, **to_us,
    )  # fmt: skip
    assert said.choices[0].message.content == TOTAL
    assert 0 < said.usage.completion_tokens_details.reasoning_tokens < said.usage.completion_tokens


def test_a_stream_with_usage(to_us):
    stream = litellm.completion(
        messages=user(SUDOKU), temperature=0, stream=True, stream_options={"include_usage": True}, **to_us
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == SOLVED
    assert any(getattr(c, "usage", None) and c.usage.completion_tokens > 0 for c in chunks)


def test_diffusing_snapshots_arrive_as_they_are(to_us):
    stream = litellm.completion(messages=user(SUDOKU), temperature=0, stream=True, diffusing=True, **to_us)
    shown = [c.choices[0].delta.content for c in stream if c.choices and c.choices[0].delta.content]
    assert shown[-1] == SOLVED


def test_a_schema_is_kept(to_us):
    schema = {"type": "object", "properties": {"total": {"type": "integer", "minimum": 0, "maximum": 1998}},
              "required": ["total"], "additionalProperties": False}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "sum", "strict": True, "schema": schema}}
    said = litellm.completion(messages=user(SUM), response_format=wanted, max_tokens=48, **to_us)
    assert 0 <= json.loads(said.choices[0].message.content)["total"] <= 1998


def test_tools_are_called_in_a_stream_too(to_us):
    ask = dict(messages=user(SUM), tools=[ADD], tool_choice="required", max_tokens=96, **to_us)
    said = litellm.completion(**ask)
    assert said.choices[0].finish_reason == "tool_calls"
    streamed = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **ask)))
    for answer in (said, streamed):
        for call in answer.choices[0].message.tool_calls:
            assert call.function.name == "add" and set(json.loads(call.function.arguments)) == {"a", "b"}


def test_fill_in_the_middle(base):
    ask = dict(model="text-completion-inception/mercury-edit-2", api_base=base, api_key="any", max_tokens=8)
    said = litellm.text_completion(prompt="def __init__(self, name):\n    self.", suffix=" = name\n", **ask)
    assert said.choices[0].text and said.usage.completion_tokens <= 8
    stream = litellm.text_completion(prompt="import os\nimport ", stream=True, **ask)
    assert "".join(c.choices[0].text or "" for c in stream)


def test_errors_are_the_ones_that_a_router_acts_on(to_us):
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**to_us, "model": "inception/gpt-9"}, messages=user(SUM))
    with pytest.raises(litellm.BadRequestError, match="maximum context length"):
        litellm.completion(messages=user("0" * 100_000), **to_us)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=user(SUM), tools=[ADD], max_tokens=-1, **to_us)


def test_async(to_us):
    said = asyncio.run(litellm.acompletion(messages=user(SUDOKU), temperature=0, **to_us))
    assert said.choices[0].message.content == SOLVED
