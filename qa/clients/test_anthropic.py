"""anthropic (Python): what its user sees."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any, Literal

import anthropic
import pydantic
import pytest
from anthropic import beta_tool

from qa.clients.questions import ADD, MODEL, PAINT, SOLVED, SUDOKU, SUM, TOTAL, user
from qa.clients.served import serving

TOOLS: list[Any] = [
    {**{k: v for k, v in tool["function"].items() if k != "parameters"}, "input_schema": tool["function"]["parameters"]}
    for tool in (ADD, PAINT)
]  # fmt: skip
COLD: Any = {"temperature": 0}  # a field of the API that this version of the client has no argument for
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 96, "messages": user(SUDOKU), "extra_body": COLD}
KEY = "a-key-for-tests"


class Paint(pydantic.BaseModel):
    colour: Literal["red", "green"]
    dry: bool


@pytest.fixture(scope="module")
def client(url):
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as made:
        yield made


def test_a_message_answers_and_counts(client):
    said = client.messages.create(**ASK)
    assert said.type == "message" and said.role == "assistant" and said.model == MODEL
    assert [block.text for block in said.content] == [SOLVED]
    assert said.stop_reason == "end_turn" and said.stop_sequence is None
    assert said.usage.output_tokens > 16 and said.usage.output_tokens_details.thinking_tokens == 0
    counted = client.messages.count_tokens(model=MODEL, messages=user(SUDOKU))
    assert counted.input_tokens == said.usage.input_tokens
    assert said._request_id.startswith("req_")


def test_max_tokens_and_stop_sequences_end_an_answer(client):
    cut = client.messages.create(**{**ASK, "max_tokens": 3})
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 3
    stopped = client.messages.create(**ASK, stop_sequences=["\n43", "nothing"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "\n43")
    assert stopped.content[0].text == SOLVED.partition("\n43")[0]


def test_the_stream_helper_adds_up_to_the_message(client):
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == SOLVED == final.content[0].text and final.stop_reason == "end_turn"
    assert final.usage.output_tokens == client.messages.create(**ASK).usage.output_tokens
    kinds = [event.type for event in client.messages.create(**ASK, stream=True)]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}])
def test_thinking_is_a_block_with_a_signature(client, thinking):
    ask = {**ASK, "messages": user(SUM), "thinking": thinking}
    said = client.messages.create(**ask)
    thought, answer = said.content
    assert thought.type == "thinking" and thought.thinking and thought.signature and answer.text == TOTAL
    with client.messages.stream(**ask) as stream:
        final = stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [thought.to_dict(), answer.to_dict()]
    history = [*user(SUM), {"role": "assistant", "content": said.content}, *user(SUDOKU)]
    assert client.messages.create(**{**ask, "messages": history}).content[-1].type == "text"
    silent = client.messages.create(**{**ask, "thinking": {**thinking, "display": "omitted"}})
    assert silent.content[0].thinking == "" and silent.content[0].signature == thought.signature


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_tool_is_called_and_its_result_is_read(client, choice):
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 96, "messages": user(SUM), "tools": TOOLS[:1]}
    said = client.messages.create(**ask, tool_choice={**choice, "disable_parallel_tool_use": True})
    (call,) = [block for block in said.content if block.type == "tool_use"]
    assert said.stop_reason == "tool_use" and set(call.input) == {"a", "b"}
    with client.messages.stream(**ask, tool_choice=choice) as stream:
        final = stream.get_final_message()
    assert all(block.input.keys() == {"a", "b"} for block in final.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "5"}]}
    ask["messages"] = [
        *user(SUM),
        {"role": "assistant", "content": said.content},
        {"role": "user", "content": [result]},
    ]
    again = client.messages.create(**{**ask, "max_tokens": 24}, tool_choice={"type": "none"})
    assert again.stop_reason in ("end_turn", "max_tokens")
    counted = client.messages.count_tokens(
        model=MODEL, messages=ask["messages"], tools=ask["tools"], tool_choice={"type": "none"}
    )
    assert counted.input_tokens == again.usage.input_tokens


def test_the_tool_runner_runs_a_tool_and_ends(client):
    paints: list[str] = []

    @beta_tool
    def paint(colour: Literal["red", "green"]) -> str:
        """Paint it."""
        paints.append(colour)
        return "done"

    # The choice is made for all turns, so that the runner's limit ends them.
    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=48, messages=user(SUM), tools=[paint], max_iterations=2, tool_choice={"type": "any"}
    )  # fmt: skip
    said = list(runner)
    assert len(said) == 2 and paints and set(paints) <= {"red", "green"}
    assert said[-1].stop_reason == "tool_use"


def test_parse_gives_the_type_that_was_asked_for(client):
    said = client.messages.parse(model=MODEL, max_tokens=64, messages=user(SUM), output_format=Paint)
    assert isinstance(said.parsed_output, Paint)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\]\.type is 'bash_20250124'"),
    ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, r"tools\[0\]\.input_schema\.type"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
     r"messages\[0\]\.content\[0\]\.tool_use_id"),
]  # fmt: skip


@pytest.mark.parametrize("more, reason", REFUSED)
def test_what_is_not_served_is_refused_by_name(client, more, reason):
    with pytest.raises(anthropic.BadRequestError, match=reason) as refused:
        client.messages.create(**{**ASK, **more})
    assert refused.value.type == "invalid_request_error" and refused.value.request_id


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.messages.create(**{**ASK, "model": "another"})
    assert refused.value.type == "not_found_error"


def test_a_key_is_asked_for_and_a_rate_is_kept():
    with serving("--api-key", KEY, "--rate", "1") as server:
        server.wait("/ready")
        wrong = anthropic.Anthropic(base_url=server.url, api_key="another-key", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError) as refused:
            wrong.messages.create(**ASK)
        assert refused.value.type == "authentication_error"
        right = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)
        assert right.messages.create(**ASK).content[0].text == SOLVED
        with pytest.raises(anthropic.RateLimitError) as late:
            right.messages.create(**ASK)
        assert late.value.type == "rate_limit_error" and int(late.value.response.headers["retry-after"]) >= 1
