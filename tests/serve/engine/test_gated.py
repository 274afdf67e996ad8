"""Answers under a grammar in the slots: they obey it, whatever the model says, and disturb nobody."""

import asyncio
import json

import numpy as np
import pytest

from mercury_jax.decode import grammar
from mercury_jax.serve.engine.engine import Engine
from mercury_jax.serve.engine.types import Job, Settings
from tests.tiny import tiny

SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "y": {"enum": ["def", "return"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine():
    settings = Settings(slots=3, queue=9, context=128, programs="one", rules=("confidence",))
    engine = Engine(tiny(), settings)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def obeyed():
    return grammar.compile(tiny().tokenizer, grammar.JSONSchema(SCHEMA))


def job(obeyed, seed=0, more=20, **fields):
    prompt = tuple(int(i) for i in np.random.default_rng(seed).integers(30, 300, 7))
    return Job(prompt=prompt, max_tokens=obeyed.shortest + more, grammar=obeyed, seed=seed, **fields)


def value(snapshot):
    return json.loads(tiny().tokenizer.decode(snapshot.tokens.tolist()))


def test_every_answer_is_valid_within_its_room(engine, obeyed):
    asked = [job(obeyed, i, more, temperature=t) for i, more in enumerate((0, 1, 4, 20)) for t in (0.0, 1.0)]
    for wanted, ticket in [(j, engine.submit(j)) for j in asked]:
        final = ticket.wait(60)
        found = value(final)
        assert set(found) == {"x", "y"} and 0 <= found["x"] <= 99 and found["y"] in ("def", "return")
        assert final.finish == "stop" and len(final.tokens) <= wanted.max_tokens


def test_what_is_forced_costs_no_pass_and_what_is_final_stays(engine, obeyed):
    ticket = engine.submit(job(obeyed, 3, frames=True))

    async def collect():
        return [s async for s in ticket]

    seen = asyncio.run(collect())
    last = seen[-1]
    assert last.forced.sum() > last.forwards > 0 and len(last.forced) == len(last.tokens)
    for s in seen:
        assert s.tokens[: s.final].tolist() == last.tokens[: s.final].tolist()
    assert sorted(s.final for s in seen) == [s.final for s in seen]


def test_a_grammar_beside_a_plain_row_changes_neither(engine, obeyed):
    plain = Job(prompt=tuple(range(40, 60)), max_tokens=40)
    alone = [engine.submit(j).wait(60).tokens.tolist() for j in (plain, job(obeyed, 5))]
    beside = [engine.submit(j) for j in (plain, job(obeyed, 5), plain)]
    said = [ticket.wait(60).tokens.tolist() for ticket in beside]
    assert said == [*alone, alone[0]]


def test_thinking_is_free_and_the_answer_obeys(engine, obeyed):
    lm = tiny()
    prompt = tuple(lm.tokenizer.render([{"role": "user", "content": "x in y"}], thinking=True))
    asked = Job(prompt=prompt, max_tokens=obeyed.shortest + 5, thinking=12, grammar=obeyed, temperature=1.0)
    thought, said = lm.tokenizer.split_answer(engine.submit(asked).wait(60).tokens.tolist())
    assert thought and set(json.loads(said)) == {"x", "y"}


def test_the_close_of_a_thinking_is_never_missing(engine, obeyed):
    """Also where the room for thinking was used up, and the engine closes it between two passes."""
    prompt = tuple(tiny().tokenizer.render([{"role": "user", "content": "x in y"}], thinking=True))
    for room in (9, 12, 16):  # a block, and parts of one
        asked = Job(prompt=prompt, max_tokens=obeyed.shortest + 5, thinking=room, grammar=obeyed, frames=True)
        ticket = engine.submit(asked)

        async def collect(ticket=ticket):
            return [s async for s in ticket]

        seen = asyncio.run(collect())
        for s in seen:
            assert s.tokens[: s.final].tolist() == seen[-1].tokens[: s.final].tolist()
            assert {len(s.tokens)} == {len(s.settled), len(s.confidence), len(s.forced)}


def test_room_that_no_answer_fits_is_refused_before_any_compute(engine, obeyed):
    with pytest.raises(ValueError, match="tokens"):
        engine.submit(job(obeyed, more=-1))
