"""inceptionai, the vendor's own client for Python: its base URL is a host, from INCEPTION_BASE_URL."""

# pyright: reportMissingImports=false
from __future__ import annotations

import inceptionai
import pydantic
import pytest

from qa.clients.questions import ADD, MODEL, SOLVED, SUDOKU, SUM, TOTAL, user


class Total(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    total: int = pydantic.Field(ge=0, le=1998)


EDIT = """\
<|recently_viewed_code_snippets|>
<|/recently_viewed_code_snippets|>

<|current_file_content|>
current_file_path: a.py
import os
<|code_to_edit|>
import sy<|cursor|>
<|/code_to_edit|>
<|/current_file_content|>

<|edit_diff_history|>
<|/edit_diff_history|>"""


@pytest.fixture
def client(url, monkeypatch):
    monkeypatch.setenv("INCEPTION_BASE_URL", url)
    monkeypatch.setenv("INCEPTION_API_KEY", "any")
    # Answers that do not fit its types are errors, where the client would let them pass by default.
    with inceptionai.Inception(max_retries=0, _strict_response_validation=True) as made:
        yield made


def test_a_chat_answers(client):
    said = client.chat.completions.create(model=MODEL, messages=user(SUDOKU), temperature=0)
    assert said.choices[0].message.content == SOLVED and said.choices[0].finish_reason == "stop"
    assert said.usage.total_tokens == said.usage.prompt_tokens + said.usage.completion_tokens
    assert said.reasoning_summary is None and said.warning is None


def test_thinking_is_summed_up_when_asked_for(client):
    said = client.chat.completions.create(
        model=MODEL, messages=user(SUM), temperature=0, reasoning_effort="low", reasoning_summary=True,
        reasoning_summary_wait=True,
    )  # fmt: skip
    assert said.choices[0].message.content == TOTAL and said.reasoning_summary.status == "complete"
    assert "7+5=12" in said.reasoning_summary.content
    assert said.usage.completion_tokens_details.reasoning_tokens > 0


def test_instant_does_not_think(client):
    said = client.chat.completions.create(
        model=MODEL, messages=user(SUDOKU), temperature=0, reasoning_effort="instant", reasoning_summary=True
    )
    assert said.choices[0].message.content and said.reasoning_summary.status == "skipped"


def test_diffusing_shows_whole_texts_and_ends_in_the_answer(client):
    stream = client.chat.completions.create(
        model=MODEL, messages=user(SUDOKU), temperature=0, stream=True, diffusing=True,
    )  # fmt: skip
    shown = [
        c.choices[0].delta.content for c in stream if c.choices and c.choices[0].delta.content is not None
    ]
    assert shown[-1] == SOLVED and len(shown) > 1  # each replaces the one before: never a piece of it
    assert all(len(text) >= len(SOLVED) // 2 for text in shown[-2:])


def test_a_stream_is_the_answer_in_pieces(client):
    stream = client.chat.completions.create(model=MODEL, messages=user(SUDOKU), temperature=0, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == SOLVED


def test_parse_gives_the_type_that_was_asked_for(client):
    said = client.chat.completions.parse(
        model=MODEL, messages=user(SUM), response_format=Total, max_tokens=48, temperature=0
    )
    assert isinstance(said.choices[0].message.parsed, Total)


def test_a_required_tool_is_called(client):
    said = client.chat.completions.create(
        model=MODEL, messages=user(SUM), tools=[ADD], tool_choice="required", max_tokens=96
    )
    assert said.choices[0].finish_reason == "tool_calls"
    assert {c.function.name for c in said.choices[0].message.tool_calls} == {"add"}


def test_fim_fills_the_gap(client):
    said = client.fim.completions.create(
        model="mercury-edit-2",
        prompt="def __init__(self, name):\n    self.",
        suffix=" = name\n",
        max_tokens=8,
    )
    assert said.object == "text_completion" and said.choices[0].text
    stream = client.fim.completions.create(
        model="mercury-edit-2", prompt="import os\nimport ", max_tokens=8, stream=True
    )
    assert "".join(c.choices[0].text for c in stream if c.choices)


def test_next_edit_is_fenced_or_none(client):
    said = client.edit.completions.create(
        model="mercury-edit-2", messages=user(EDIT), max_tokens=16, extra_body={"seed": 0}
    )
    text = said.choices[0].message.content
    assert said.object == "edit.completion" and said.id.startswith("cmpl-")
    assert text == "None" or (text.startswith("```\n") and text.endswith("\n```"))


def test_every_list_of_models_fits_the_clients_types(client):
    resource = client.models
    lists = [
        resource.list(),
        *(getattr(resource, name)() for name in dir(resource) if name.startswith("list_")),
    ]
    for listed in lists:
        assert {"nano", MODEL} <= {model.id for model in listed.data}
        assert all(model.context_length > 0 and model.supported_endpoints for model in listed.data)


def test_a_wrong_model_is_not_found(client):
    with pytest.raises(inceptionai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=user(SUM))
