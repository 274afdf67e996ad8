"""instructor: typed output at the first try, by tools and by schema."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Literal

import instructor
import openai
import pydantic
import pytest

from qa.clients.questions import MODEL, SUM, user


class Step(pydantic.BaseModel):
    colour: Literal["red", "green"]
    coats: int = pydantic.Field(ge=0, le=9)


class Plan(pydantic.BaseModel):
    steps: list[Step] = pydantic.Field(min_length=1, max_length=2)
    done: bool


@pytest.mark.parametrize("kind", [Step, Plan])
@pytest.mark.parametrize(
    "mode", [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]
)
def test_typed_at_the_first_try(base, mode, kind):
    client = instructor.from_openai(openai.OpenAI(base_url=base, api_key="any", max_retries=0), mode=mode)
    found, raw = client.chat.completions.create_with_completion(
        model=MODEL, messages=user(SUM), response_model=kind, max_retries=0, max_tokens=160
    )
    assert isinstance(found, kind) and raw.usage.completion_tokens > 0


def test_partial_objects_grow_into_the_whole_one(base):
    client = instructor.from_openai(
        openai.OpenAI(base_url=base, api_key="any", max_retries=0), mode=instructor.Mode.TOOLS
    )
    seen = list(
        client.chat.completions.create_partial(
            model=MODEL, messages=user(SUM), response_model=Step, max_retries=0, max_tokens=96
        )
    )
    assert seen[-1].colour in ("red", "green") and 0 <= seen[-1].coats <= 9
