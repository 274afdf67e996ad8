"""The prefix cache of models with sliding windows: a prefix is used where the keys of its last window are known."""

import dataclasses

import pytest

from mercury_jax import models
from mercury_jax.config import RopeScaling
from mercury_jax.serve.engine.engine import Engine
from mercury_jax.serve.engine.request import EngineConfig, EngineRequest
from tests.models.test_rings import LONG, both, prompts
from tests.tiny import tiny

CONFIG = EngineConfig(slots=2, queue=4, context=4096, programs="one", rules=("confidence",))


def finals(lm, asked):
    """The last snapshot of each request, one after the other."""
    engine = Engine(lm, CONFIG)
    engine.start()
    found = [engine.submit(EngineRequest(prompt=p, max_tokens=16, seed=1)).wait(120) for p in asked]
    engine.stop()
    return found


@pytest.mark.long
def test_a_row_that_began_with_an_old_prefix_stores_no_keys_that_it_does_not_have():
    """The second prompt begins with chunks that have no keys of sliding layers, and the third one needs these keys."""
    prompt = tuple(prompts(LONG)[0])
    asked = [prompt, (*prompt[:1100], *prompts(40)[0]), (*prompt[:900], *prompts(40)[0])]
    found, want = (finals(lm, asked) for lm in both("gemma"))
    assert [x.tokens.tolist() for x in found] == [x.tokens.tolist() for x in want]
    assert found[1].cached == 1088  # the second prompt used the cache


@pytest.mark.slow
def test_the_prefix_cache_is_used_where_the_window_is_known():
    prompt = tuple(prompts(LONG)[0])
    asked = [
        prompt,
        (*prompt, *prompts(40)[0]),  # continues: the chunks before its new tokens are known
        (*prompt[:1400], *prompts(40)[0]),  # the window before token 1,344 is still in the ring
        (*prompt[:600], *prompts(40)[0]),  # the window before token 600 has been overwritten: encoded anew
        (*prompt[:600], *prompts(50)[0]),  # and is known from then on
    ]
    found, want = (finals(lm, asked) for lm in both("gemma"))
    assert [x.tokens.tolist() for x in found] == [x.tokens.tolist() for x in want]
    assert [x.cached for x in found] == [0, 1472, 1344, 0, 640]
    assert [x.cached for x in want] == [0, 1472, 1344, 576, 640]


@pytest.mark.long
def test_a_row_beyond_the_original_context_shares_no_keys_with_shorter_ones():
    """Its keys are rotated by the other frequencies of longrope."""
    scaling = RopeScaling(
        kind="longrope", factor=2.0, original=128, short=(1.0,) * 4, long=(1.0, 2.0, 4.0, 8.0)
    )
    config = dataclasses.replace(tiny().model.config, rope_scaling=scaling)
    lm, prompt = dataclasses.replace(tiny(), model=models.build(config)), tuple(range(10, 100))
    short, long = (EngineRequest(prompt=prompt, max_tokens=n, seed=1) for n in (16, 64))

    def run(*asked):
        engine = Engine(lm, dataclasses.replace(CONFIG, slots=1, context=256))
        engine.start()
        found = [engine.submit(one).wait(120) for one in asked]
        engine.stop()
        return found

    found, [alone] = run(short, long, short, long), run(long)
    assert [x.cached for x in found] == [0, 0, 64, 64]
    assert found[1].tokens.tolist() == found[3].tokens.tolist() == alone.tokens.tolist()
    assert found[0].tokens.tolist() == found[2].tokens.tolist()
