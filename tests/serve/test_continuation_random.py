"""500 answers of a model with random weights, which ends and thinks at any moment: none is empty."""

import itertools
import json

import jax.numpy as jnp
import pytest
from starlette.testclient import TestClient

from mercury_jax.serve.app import create_app
from mercury_jax.serve.engine.engine import Engine
from mercury_jax.serve.engine.request import EngineConfig
from mercury_jax.serve.options import ServerOptions
from mercury_jax.tokenizer import SPECIAL

EFFORTS = ("instant", "low", "medium", "high", None)
LIMITS = (1, 2, 6, 24, None)
MESSAGES = [{"role": "user", "content": "347+585="}]
ENDING = (SPECIAL.eos, SPECIAL.think, SPECIAL.end_think, SPECIAL.end_turn)


@pytest.fixture(scope="module")
def restless_engine():
    """An engine whose model prefers ends of text and marks of thinking to any other token."""
    import dataclasses

    from tests.tiny import tiny

    lm = tiny()
    head = lm.model.head
    loud = jnp.zeros(lm.model.config.vocab).at[jnp.array(ENDING)].set(6.0)
    model = lm.model._replace(head=lambda params, hidden: head(params, hidden) + loud)
    lm = dataclasses.replace(lm, model=model)
    settings = EngineConfig(slots=8, queue=32, context=128, programs="one", rules=("confidence",))
    engine = Engine(lm, settings)
    engine.start()
    yield engine
    engine.stop()


def replies(client, count):
    """Yields (content, finish_reason, payload) for many efforts, limits and seeds, streamed and whole."""
    for i, (effort, limit) in zip(
        range(count), itertools.cycle(itertools.product(EFFORTS, LIMITS)), strict=False
    ):
        payload = {"model": "m", "messages": MESSAGES, "temperature": 1.0, "seed": i, "reasoning_effort": effort,
               "max_tokens": limit, "n": 4, "stream": bool(i % 2)}  # fmt: skip
        answer = client.post("/v1/chat/completions", json=payload)
        assert answer.status_code == 200, answer.text
        if not payload["stream"]:
            for choice in answer.json()["choices"]:
                yield choice["message"]["content"], choice["finish_reason"], payload
            continue
        content, finish = [""] * 4, [None] * 4
        lines = [line for line in answer.text.split("\n\n")[:-2] if not line.startswith(":")]
        for line in lines:  # but comments, which a stream on a slow machine has
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                content[choice["index"]] += choice["delta"].get("content", "")
                finish[choice["index"]] = choice["finish_reason"] or finish[choice["index"]]
        yield from zip(content, finish, [payload] * 4, strict=True)


@pytest.mark.slow
def test_none_of_500_answers_is_empty(restless_engine):
    app = create_app(restless_engine, ServerOptions(playground=False, aliases={"m": restless_engine.lm.name}))
    before = restless_engine.stats().submitted
    said = list(replies(TestClient(app, base_url="http://localhost"), 125))
    assert len(said) == 500
    assert [payload for content, _, payload in said if not content.strip()] == []
    assert {finish for _, finish, _ in said} == {"stop", "length"}
    # Many of them ended without content at first, so that continuation was tested.
    assert restless_engine.stats().submitted - before > 600
