"""No reply is empty: 500 of them from models of random weights, which end, think and say nothing at any moment."""

import itertools
import json

import jax.numpy as jnp
import pytest
from starlette.testclient import TestClient

from mercury_jax.serve.api import Options, create_app
from mercury_jax.serve.engine.engine import Engine
from mercury_jax.serve.engine.types import Settings
from mercury_jax.tokenizer import SPECIAL

EFFORTS = ("instant", "low", "medium", "high", None)
LIMITS = (1, 2, 6, 24, None)
MESSAGES = [{"role": "user", "content": "347+585="}]
ENDING = (SPECIAL.eos, SPECIAL.think, SPECIAL.end_think, SPECIAL.end_turn)


@pytest.fixture(scope="module")
def restless():
    """A model that ends, thinks and takes turns more often than it says anything."""
    import dataclasses

    from tests.tiny import tiny

    lm = tiny()
    head = lm.model.head
    loud = jnp.zeros(lm.model.config.vocab).at[jnp.array(ENDING)].set(6.0)
    model = lm.model._replace(head=lambda params, hidden: head(params, hidden) + loud)
    lm = dataclasses.replace(lm, model=model)
    settings = Settings(slots=8, queue=32, context=128, programs="one", rules=("confidence",))
    engine = Engine(lm, settings)
    engine.start()
    yield engine
    engine.stop()


def replies(client, count):
    """(content, finish_reason, ask) over efforts, limits, seeds, streams and whole answers."""
    for i, (effort, limit) in zip(
        range(count), itertools.cycle(itertools.product(EFFORTS, LIMITS)), strict=False
    ):
        ask = {"model": "m", "messages": MESSAGES, "temperature": 1.0, "seed": i, "reasoning_effort": effort,
               "max_tokens": limit, "n": 4, "stream": bool(i % 2)}  # fmt: skip
        answer = client.post("/v1/chat/completions", json=ask)
        assert answer.status_code == 200, answer.text
        if not ask["stream"]:
            for choice in answer.json()["choices"]:
                yield choice["message"]["content"], choice["finish_reason"], ask
            continue
        content, finish = [""] * 4, [None] * 4
        lines = [line for line in answer.text.split("\n\n")[:-2] if not line.startswith(":")]
        for line in lines:  # but comments, which a stream on a slow machine has
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                content[choice["index"]] += choice["delta"].get("content", "")
                finish[choice["index"]] = choice["finish_reason"] or finish[choice["index"]]
        yield from zip(content, finish, [ask] * 4, strict=True)


def test_none_of_500_replies_is_empty(restless):
    app = create_app(restless, Options(playground=False, aliases={"m": restless.lm.name}))
    before = restless.stats().submitted
    said = list(replies(TestClient(app, base_url="http://localhost"), 125))
    assert len(said) == 500
    assert [ask for content, _, ask in said if not content.strip()] == []
    assert {finish for _, finish, _ in said} == {"stop", "length"}
    # Many of them ended in silence first: the law was put to the test.
    assert restless.stats().submitted - before > 600
