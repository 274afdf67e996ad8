"""openai (Python) where not all goes well: full, warming up, left in the middle, closing, locked."""

# pyright: reportMissingImports=false
from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from qa.clients.questions import ENDLESS, MODEL, SOLVED, SUDOKU, user
from qa.clients.served import serving

KEY = "a-key-for-tests"


def written(client: openai.OpenAI, tokens: int) -> openai.types.Completion:
    return client.completions.create(model=MODEL, prompt="import os\n", max_tokens=tokens, **ENDLESS)


def test_a_burst_is_refused_with_429_and_retries_get_through(base):
    # Two slots, two in the queue: of twelve at once at least eight come too many.
    with openai.OpenAI(base_url=base, api_key="any", max_retries=0) as hasty, ThreadPoolExecutor(12) as pool:
        jobs = [pool.submit(written, hasty, 256) for _ in range(12)]
        errors = [job.exception() for job in jobs]
    refused = [e for e in errors if e is not None]
    assert refused and all(isinstance(e, openai.RateLimitError) for e in refused)
    assert all(int(e.response.headers["retry-after"]) >= 1 for e in refused)
    assert all(e.code == "rate_limit_reached" for e in refused)
    with (
        openai.OpenAI(base_url=base, api_key="any", max_retries=50) as patient,
        ThreadPoolExecutor(6) as pool,
    ):
        answers = list(pool.map(lambda _: written(patient, 64), range(6)))
    assert all(a.usage.completion_tokens == 64 and a.choices[0].finish_reason == "length" for a in answers)


@pytest.mark.parametrize("chat", [True, False])
def test_leaving_in_the_middle_frees_the_slot(base, metric, chat):
    before = metric("mercury_cancelled_total")
    with openai.OpenAI(base_url=base, api_key="any", max_retries=0) as client:
        ask = dict(model=MODEL, max_tokens=400, stream=True, **ENDLESS)
        stream = (
            client.chat.completions.create(messages=user("import os"), **ask)
            if chat
            else client.completions.create(prompt="import os\n", **ask)
        )
        next(iter(stream))
        stream.close()
        left = lambda: (metric("mercury_cancelled_total") - before, metric("mercury_running"))
        end = time.monotonic() + 20  # how many steps it takes is what `make load` counts
        while left() != (1, 0) and time.monotonic() < end:
            time.sleep(0.02)
        assert left() == (1, 0)
        said = client.chat.completions.create(model=MODEL, messages=user(SUDOKU), temperature=0)
    assert said.choices[0].message.content == SOLVED


def test_a_time_limit_of_the_client_is_its_own_error(base, metric):
    hasty = openai.OpenAI(base_url=base, api_key="any", max_retries=0, timeout=0.05)
    with hasty, pytest.raises(openai.APITimeoutError):
        written(hasty, 400)
    end = time.monotonic() + 5
    while metric("mercury_running") and time.monotonic() < end:
        time.sleep(0.02)
    assert metric("mercury_running") == 0


def test_from_warming_up_to_the_end_of_a_locked_server():
    """One process from its first moment to its last: 503 is waited for, 401 is said, a stream survives SIGTERM."""
    with serving("--slots", "1", "--context", "160", "--api-key", KEY) as server:
        base = f"{server.url}/v1"
        ask = dict(model=MODEL, messages=user(SUDOKU), temperature=0)
        hasty = openai.OpenAI(base_url=base, api_key=KEY, max_retries=0)
        with hasty, pytest.raises(openai.InternalServerError) as early:
            hasty.chat.completions.create(**ask)
        assert early.value.status_code == 503 and int(early.value.response.headers["retry-after"]) >= 1
        with openai.OpenAI(base_url=base, api_key=KEY, max_retries=100) as client:
            assert client.chat.completions.create(**ask).choices[0].message.content == SOLVED
        stranger = openai.OpenAI(base_url=base, api_key="another-key", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with openai.OpenAI(base_url=base, api_key=KEY, max_retries=0) as client:
            _ends_while_it_streams(client, server)


def _ends_while_it_streams(client, server) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="import os\n", max_tokens=96, stream=True, stream_options={"include_usage": True},
        **ENDLESS,
    )  # fmt: skip
    first = next(iter(stream))
    codes: list[int] = []
    ending = threading.Thread(target=lambda: codes.append(server.end()))
    ending.start()
    *rest, last = [first, *stream]
    assert last.usage.completion_tokens == 96 and rest[-1].choices[0].finish_reason == "length"
    ending.join()
    assert codes == [0]
    with pytest.raises(openai.APIConnectionError):
        client.models.list()
