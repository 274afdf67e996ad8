"""Conversations whose model ends, thinks and says nothing more often than it answers: every effort ends in a text."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.tokenizer import SPECIAL
from tests.tiny import tiny

ENDING = (SPECIAL.eos, SPECIAL.think, SPECIAL.end_think, SPECIAL.end_turn)
CHATS = [[{"role": "user", "content": f"x in range({i})"}] for i in range(8)]


@pytest.fixture(scope="module")
def restless():
    lm = tiny()
    head, loud = lm.model.head, jnp.zeros(lm.model.config.vocab).at[jnp.array(ENDING)].set(7.0)
    model = lm.model._replace(head=lambda params, hidden: head(params, hidden) + loud)
    return dataclasses.replace(lm, model=model)


@pytest.mark.slow
@pytest.mark.parametrize("effort", ["instant", "low"])
def test_no_answer_of_an_effort_is_empty(restless, effort):
    out = mj.sample(
        restless, CHATS, effort=effort, temperature=1.0, max_tokens=6, logprobs=2, keep=True, history=True
    )
    assert all(text.strip() for text in out.texts)
    plain = mj.sample(
        restless, [restless.tokenizer.render(chat) for chat in CHATS], temperature=1.0, max_tokens=6
    )
    assert (
        min(out.forwards) >= 1 and len(plain.texts) == 8
    )  # a prompt of ids is no conversation: it may be empty
    assert out.state is not None
    for i, (tokens, nats) in enumerate(zip(out.tokens, out.logprobs or (), strict=True)):
        assert nats is not None and len(tokens) == len(nats.tokens) == len(nats.top) == out.lengths[i]
        said = out.state.tokens[i].tolist()
        assert said[-len(tokens) :] == tokens.tolist()
    assert {len(frame.used) for frame in out.history} == {8} and out.passes >= len(out.history)
    again = mj.sample(restless, CHATS, effort=effort, temperature=1.0, max_tokens=6)
    assert again.texts == out.texts and again.finish == out.finish
    assert np.all(again.forwards == out.forwards)


@pytest.mark.slow
def test_the_last_moment_of_a_stream_is_what_sample_returns(restless):
    for seed in range(4):
        asked = dict(effort="instant", temperature=1.0, max_tokens=6, seed=seed)
        *early, last = mj.stream(restless, CHATS[0], **asked)
        out = mj.sample(restless, CHATS[0], **asked)
        assert last.done and not any(moment.done for moment in early)
        assert last.text.strip() and last.text == out.text and last.tokens.tolist() == out.tokens[0].tolist()
        assert last.forwards == out.forwards[0] and len(last.accepted) == len(last.confidence) == len(
            last.tokens
        )
