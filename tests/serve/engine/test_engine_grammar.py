"""Grammar-constrained requests in the engine: every answer is valid, and neighbours do not change."""

import asyncio
import json
import re

import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.decode import grammar
from mercury_jax.serve.engine.engine import Engine
from mercury_jax.serve.engine.request import EngineConfig, EngineRequest
from tests.decode.test_drafting import verifier
from tests.tiny import tiny

SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "y": {"enum": ["def", "return"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(slots=3, queue=9, context=128, programs="one", rules=("confidence",), passes=3)
    engine = Engine(tiny(), config)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def compiled():
    return grammar.compile(tiny().tokenizer, grammar.JSONSchema(SCHEMA))


def request(constraint, seed=0, more=20, **fields):
    prompt = tuple(int(i) for i in np.random.default_rng(seed).integers(30, 300, 7))
    return EngineRequest(
        prompt=prompt, max_tokens=constraint.shortest + more, grammar=constraint, seed=seed, **fields
    )


def value(snapshot):
    return json.loads(tiny().tokenizer.decode(snapshot.tokens.tolist()))


@pytest.mark.long
def test_every_answer_is_valid_within_max_tokens(engine, compiled):
    asked = [
        request(compiled, i, more, temperature=t) for i, more in enumerate((0, 1, 4, 20)) for t in (0.0, 1.0)
    ]
    for wanted, handle in [(j, engine.submit(j)) for j in asked]:
        final = handle.wait(60)
        found = value(final)
        assert set(found) == {"x", "y"} and 0 <= found["x"] <= 99 and found["y"] in ("def", "return")
        assert final.finish == "stop" and len(final.tokens) <= wanted.max_tokens


def test_forced_tokens_need_no_pass_and_final_tokens_do_not_change(engine, compiled):
    handle = engine.submit(request(compiled, 3, frames=True))

    async def collect():
        return [s async for s in handle]

    seen = asyncio.run(collect())
    last = seen[-1]
    assert last.forced.sum() > last.forwards > 0 and len(last.forced) == len(last.tokens)
    for s in seen:
        assert s.tokens[: s.final].tolist() == last.tokens[: s.final].tolist()
    assert sorted(s.final for s in seen) == [s.final for s in seen]


def test_an_autoregressive_model_may_end_where_its_grammar_lets_it():
    """It draws the end of text as a token of its own, which is no token of the answer."""
    lm, pairs = verifier("float32"), mj.grammar.Regex("(ab)+")
    engine = Engine(lm, EngineConfig(slots=3, queue=9, context=64, programs="one", rules=()))
    engine.start()
    try:
        fits = grammar.compile(lm.tokenizer, pairs)
        same = dict(max_tokens=24, temperature=1.0, grammar=fits)
        asked = [EngineRequest(prompt=(40, 41, i), seed=i, **same) for i in range(9)]
        found = [handle.wait(60) for handle in [engine.submit(one) for one in asked]]
    finally:
        engine.stop()
    assert all(re.fullmatch("(ab)+", lm.tokenizer.decode(one.tokens.tolist())) for one in found)
    assert {one.finish for one in found} <= {"stop", "length"}
    assert sum(one.finish == "stop" and len(one.tokens) < 20 for one in found) >= 2


def test_constrained_and_plain_requests_do_not_affect_each_other(engine, compiled):
    plain = EngineRequest(prompt=tuple(range(40, 60)), max_tokens=40)
    alone = [engine.submit(j).wait(60).tokens.tolist() for j in (plain, request(compiled, 5))]
    beside = [engine.submit(j) for j in (plain, request(compiled, 5), plain)]
    said = [handle.wait(60).tokens.tolist() for handle in beside]
    assert said == [*alone, alone[0]]


def test_thinking_is_unconstrained_and_the_answer_is_valid(engine, compiled):
    lm = tiny()
    prompt = tuple(lm.tokenizer.render([{"role": "user", "content": "x in y"}], thinking=True))
    asked = EngineRequest(
        prompt=prompt, max_tokens=compiled.shortest + 5, thinking=12, grammar=compiled, temperature=1.0
    )
    thought, said = lm.tokenizer.split_answer(engine.submit(asked).wait(60).tokens.tolist())
    assert thought and set(json.loads(said)) == {"x", "y"}


def test_snapshots_contain_the_token_that_closes_thinking(engine, compiled):
    """Also where thinking used up its budget, and the engine closes it between two passes."""
    prompt = tuple(tiny().tokenizer.render([{"role": "user", "content": "x in y"}], thinking=True))
    for budget in (9, 12, 16):  # a block, and parts of one
        asked = EngineRequest(
            prompt=prompt, max_tokens=compiled.shortest + 5, thinking=budget, grammar=compiled, frames=True
        )
        handle = engine.submit(asked)

        async def collect(handle=handle):
            return [s async for s in handle]

        seen = asyncio.run(collect())
        for s in seen:
            assert s.tokens[: s.final].tolist() == seen[-1].tokens[: s.final].tolist()
            assert {len(s.tokens)} == {len(s.accepted), len(s.confidence), len(s.forced)}


CALLS = grammar.ToolCalls([{"name": "now"}], "<", ">")  # every text that opens a call, as a single character
ASCII = {
    i: -100.0 for i, piece in enumerate(tiny().tokenizer.pieces) if piece >= b"\x80"
}  # without other bytes
(OPENS,) = tiny().tokenizer.encode("x<")[1:]


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("bias, calls", [({OPENS: -100.0}, False), ({OPENS: 2.0}, True)])
def test_free_text_before_calls_is_that_of_single_passes(engine, bias, calls):
    """With several tokens accepted in a pass, and with several passes between two reads of the host."""
    spec, bias, most = grammar.FreeOr(CALLS), ASCII | bias, 48
    compiled = grammar.compile(tiny().tokenizer, spec)
    asked = [
        request(compiled, i, most - compiled.shortest, temperature=1.0, p=0.03, logit_bias=bias)
        for i in range(6)
    ]
    before = engine.stats()
    finals = [handle.wait(60) for handle in [engine.submit(j) for j in asked]]
    after = engine.stats()
    sampler = mj.Sampler(mj.rules.threshold(0.03), (mj.processors.bias(bias),), temperature=1.0)
    prompts, seeds = [list(j.prompt) for j in asked], [j.seed for j in asked]
    want = mj.sample(tiny(), prompts, max_tokens=most, seed=seeds, sampler=sampler, schema=spec)
    for final, tokens, finish, forwards in zip(finals, want.tokens, want.finish, want.forwards, strict=True):
        assert (final.tokens.tolist(), final.finish, final.forwards) == (tokens.tolist(), finish, forwards)
    assert any("<" in text for text in want.texts) == calls
    if not calls:  # a read for three passes, and for the last one of each answer
        passes = after.device_passes - before.device_passes
        assert after.dispatches - before.dispatches < passes / 3 + 3 * len(asked)


def test_max_tokens_below_the_shortest_answer_is_refused_before_any_compute(engine, compiled):
    with pytest.raises(ValueError, match="tokens"):
        engine.submit(request(compiled, more=-1))
