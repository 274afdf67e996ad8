"""pydantic-ai: typed output, and an agent whose tools run."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Annotated, Literal

import pydantic
import pytest
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.capabilities import PrepareOutputTools
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from qa.clients.questions import MODEL, SOLVED, SUDOKU, SUM

Digit = Annotated[int, pydantic.Field(ge=0, le=9)]


class Paint(pydantic.BaseModel):
    colour: Literal["red", "green"]
    coats: Digit


@pytest.fixture(scope="module")
def model(base):
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=base, api_key="any"))


SETTINGS = ModelSettings(max_tokens=96, temperature=0)


def test_text(model):
    found = Agent(model, model_settings=SETTINGS).run_sync(SUDOKU)
    assert found.output == SOLVED and found.usage.output_tokens > 0


@pytest.mark.parametrize("output", [Paint, ToolOutput(Paint), NativeOutput(Paint)])
def test_typed_output(model, output):
    found = Agent(model, output_type=output, retries=0, model_settings=SETTINGS).run_sync(SUM)
    assert isinstance(found.output, Paint) and found.usage.requests == 1


def test_an_agent_calls_its_tool_and_ends(model):
    """In its first step only the tool is on offer, in its second only the output: both are forced by the grammar."""
    sums: list[int] = []

    async def at_first(ctx, definition):
        return definition if not sums else None

    async def then(ctx, definitions):
        return definitions if sums else []

    agent = Agent(
        model, output_type=ToolOutput(Paint), retries=0, model_settings=SETTINGS,
        capabilities=[PrepareOutputTools(then)],
    )  # fmt: skip

    @agent.tool_plain(prepare=at_first)
    def add(a: Digit, b: Digit) -> int:
        """Add two digits."""
        sums.append(a + b)
        return a + b

    found = agent.run_sync(SUM)
    assert isinstance(found.output, Paint) and len(sums) >= 1
    kinds = [part.part_kind for message in found.all_messages() for part in message.parts]
    assert kinds.count("tool-return") >= 2 and found.usage.requests == 2


def test_a_stream_of_text(model):
    import asyncio

    async def read():
        async with Agent(model, model_settings=SETTINGS).run_stream(SUDOKU) as run:
            return [text async for text in run.stream_text()]

    texts = asyncio.run(read())
    assert texts[-1] == SOLVED and all(SOLVED.startswith(t) for t in texts)
