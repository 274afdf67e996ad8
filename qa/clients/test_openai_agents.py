"""openai-agents with its default model class, which speaks the Responses API."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import agents
import openai
import pydantic
import pytest
from agents import Agent, ModelSettings, Runner, function_tool

from qa.clients.questions import MODEL, SOLVED, SUDOKU, SUM

SETTINGS = ModelSettings(temperature=0, max_tokens=96)
Digit = Annotated[int, pydantic.Field(ge=0, le=9)]


class Paint(pydantic.BaseModel):
    colour: Literal["red", "green"]
    coats: Literal[1, 2]


@pytest.fixture(autouse=True)
def default_client(base):
    """What a user of another address writes, and nothing else; anew for each event loop."""
    agents.set_default_openai_client(openai.AsyncOpenAI(base_url=base, api_key="any"), use_for_tracing=False)
    agents.set_tracing_disabled(True)


def agent(**options: Any) -> Agent:
    return Agent(name="nano", model=MODEL, **{"model_settings": SETTINGS, **options})


def test_a_run_ends_in_the_answer():
    found = Runner.run_sync(agent(), SUDOKU)
    assert found.final_output == SOLVED and found.context_wrapper.usage.output_tokens > 16


def test_a_streamed_run_ends_in_the_answer():
    async def read() -> tuple[str, Any]:
        run, text = Runner.run_streamed(agent(), SUDOKU), ""
        async for event in run.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        return text, run.final_output

    assert asyncio.run(read()) == (SOLVED, SOLVED)


def test_output_has_its_type():
    found = Runner.run_sync(agent(output_type=Paint), SUM)
    assert isinstance(found.final_output, Paint)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_runs_and_its_result_goes_back(streamed):
    sums: list[int] = []

    @function_tool
    def add(a: Digit, b: Digit) -> str:
        """Add two digits."""
        sums.append(a + b)
        return str(a + b)

    # The first call is forced; the agents' loop then lets the model decide, and ends with the output.
    calling = agent(tools=[add], output_type=Paint, model_settings=ModelSettings(
        temperature=0, max_tokens=96, tool_choice="required", parallel_tool_calls=False,
    ))  # fmt: skip

    async def run() -> tuple[Any, Any]:
        if streamed:
            found: Any = Runner.run_streamed(calling, SUM, max_turns=4)
            async for _ in found.stream_events():
                pass
        else:
            found = await Runner.run(calling, SUM, max_turns=4)
        return found, await Runner.run(agent(), [*found.to_input_list(), {"role": "user", "content": SUM}])

    found, again = asyncio.run(run())
    kinds = [item.type for item in found.new_items]
    assert sums and kinds.index("tool_call_item") < kinds.index("tool_call_output_item")
    assert isinstance(found.final_output, Paint) and len(found.raw_responses) >= 2
    assert isinstance(again.final_output, str)


def test_a_handoff_is_a_call_that_another_agent_answers():
    solver = agent(handoff_description="Solves Sudokus")
    solver.name = "solver"
    first = agent(handoffs=[solver], model_settings=ModelSettings(
        temperature=0, max_tokens=96, tool_choice="transfer_to_solver", parallel_tool_calls=False,
    ))  # fmt: skip
    found = Runner.run_sync(first, SUDOKU, max_turns=4)
    assert found.last_agent.name == "solver" and isinstance(found.final_output, str)


def test_a_run_goes_on_from_the_response_before():
    first = Runner.run_sync(agent(), SUDOKU)
    second = Runner.run_sync(agent(), SUM, previous_response_id=first.last_response_id)
    fresh = Runner.run_sync(agent(), SUM)
    tokens = lambda found: found.context_wrapper.usage.input_tokens
    assert isinstance(second.final_output, str) and tokens(second) > tokens(fresh)
