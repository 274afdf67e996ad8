"""langchain-openai's ChatOpenAI with another base URL."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Annotated, Literal

import pydantic
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from qa.clients.questions import MODEL, SOLVED, SUDOKU, SUM

Digit = Annotated[int, pydantic.Field(ge=0, le=9)]


class Paint(pydantic.BaseModel):
    """A colour."""

    colour: Literal["red", "green"]
    coats: Digit


@tool
def add(a: Digit, b: Digit) -> int:
    """Add two digits."""
    return a + b


@pytest.fixture(scope="module")
def llm(base):
    return ChatOpenAI(model=MODEL, base_url=base, api_key="any", max_retries=0, temperature=0, max_tokens=96)


def test_it_answers_and_counts(llm):
    said = llm.invoke(SUDOKU)
    assert said.content == SOLVED and said.response_metadata["finish_reason"] == "stop"
    assert said.usage_metadata["total_tokens"] > said.usage_metadata["input_tokens"] > 0


def test_it_streams(llm):
    chunks = list(llm.stream(SUDOKU, stream_usage=True))
    assert "".join(c.content for c in chunks) == SOLVED
    assert sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata) > 0


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(llm, method):
    found = llm.with_structured_output(Paint, method=method).invoke(SUM)
    assert isinstance(found, Paint)


def test_a_tool_loop(llm):
    messages = [HumanMessage(SUM)]
    said = llm.bind_tools([add], tool_choice="any", parallel_tool_calls=False).invoke(messages)
    (call,) = said.tool_calls
    assert call["name"] == "add" and not said.invalid_tool_calls
    result = add.invoke(call)
    assert isinstance(result, ToolMessage) and int(result.content) == call["args"]["a"] + call["args"]["b"]
    last = llm.bind_tools([add], tool_choice="none").invoke([*messages, said, result])
    assert not last.tool_calls and last.response_metadata["finish_reason"] in ("stop", "length")


def test_tool_calls_of_a_stream(llm):
    whole = None
    for chunk in llm.bind_tools([add, Paint], tool_choice="Paint").stream(SUM):
        whole = chunk if whole is None else whole + chunk
    assert [c["name"] for c in whole.tool_calls] == ["Paint"] and Paint(**whole.tool_calls[0]["args"])


def test_a_batch(llm):
    assert [m.content for m in llm.batch([SUDOKU] * 3, config={"max_concurrency": 2})] == [SOLVED] * 3
