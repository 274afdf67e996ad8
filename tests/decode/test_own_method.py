"""A decoding method from outside the package: Jacobi decoding, the file of docs/your-method.md."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.decode.denoise import PLAIN, plain_step
from tests.decode.test_self_speculation import PROMPTS, causal

PAGE = Path(__file__).parents[2] / "docs" / "your-method.md"


def of_the_page():
    """Executes the file that the page shows, and returns the method that it defines."""
    [source] = re.findall(r"<!-- file: jacobi\.py -->\n```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    namespace: dict = {"__name__": "jacobi"}
    exec(compile(source, "jacobi.py", "exec"), namespace)
    return namespace["JACOBI"]


JACOBI = of_the_page()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_jacobi_decoding_is_autoregressive_decoding_in_at_most_as_many_passes(temperature):
    with jax.enable_x64(True):
        lm = causal("float64")
        how = dict(max_tokens=[14, 9], seed=3)
        plain = mj.sample(lm, PROMPTS[:2], sampler=mj.rules.autoregressive(temperature), **how)
        sampler = mj.Sampler(mj.rules.confidence(), temperature=temperature)
        fast = mj.sample(lm, PROMPTS[:2], sampler=sampler, plan=mj.Plan(block=6, method=JACOBI), **how)
    for a, b in zip(plain.tokens, fast.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (fast.forwards <= plain.forwards).all()


def test_repeated_text_takes_fewer_passes():
    lm = mj.load()
    plain = mj.sample(lm, "def fib", max_tokens=48, sampler=mj.rules.autoregressive())
    fast = mj.sample(lm, "def fib", max_tokens=48, plan=mj.Plan(block=16, method=JACOBI))
    assert fast.text == plain.text and fast.forwards[0] < plain.forwards[0]


def own(step=plain_step, init=None, **fields):
    """A sample by a method of one's own."""
    method = mj.Method("mine", step, **fields) if init is None else mj.Method("mine", step, init, **fields)
    return lambda lm: mj.sample(lm, "def x", max_tokens=4, plan=mj.Plan(method=method))


WRONG = {
    "no method": (lambda lm: mj.Plan(method=3), "method is 3"),
    "a rule": (lambda lm: mj.sample(lm, "a", plan=mj.Plan(method=PLAIN, lookahead=2)), "plan.lookahead is 2"),
    "two methods": (
        lambda lm: mj.sample(lm, "a", plan=mj.Plan(method=PLAIN), sampler=mj.rules.self_speculation(4)),
        "sampler.speculate is 4",
    ),
    "settings that change": (own(settings=[1]), r"plan.method.settings is \[1\]"),
    "a step without a frame": (
        own(lambda config, params, state: state),
        "what step of the method mine returned",
    ),
    "a step that changes a shape": (
        own(lambda c, p, s: (s._replace(canvas=s.canvas[:, :1]), plain_step(c, p, s)[1])),
        "what step of the method mine returned is 'another canvas'",
    ),
    "a step that reads a value": (
        own(lambda c, p, s: plain_step(c, p, s) if s.done[0] else (s, None)),
        "step of the method mine decides by a traced value",
    ),
    "a slot that is not of the rows": (
        own(init=lambda config, sampling, rows: jnp.zeros((3,))),
        r"what init of the method mine returned for 2 rows is \[\(3,\)\]",
    ),
}


@pytest.mark.parametrize("call, words", WRONG.values(), ids=WRONG)
def test_a_wrong_method_is_refused_before_any_pass(call, words):
    with pytest.raises(ValueError, match=words):
        call(causal())


def test_the_decoder_takes_a_method_and_keeps_its_slot_by_row():
    def count(config, params, state):
        state, frame = plain_step(config, params, state)
        return state._replace(method=state.method + (frame.used > 0)), frame

    method = mj.Method(
        "counting", count, lambda config, sampling, rows: jnp.zeros(len(rows.tokens), jnp.int32)
    )
    lm = causal()
    ids = jnp.asarray([lm.tokenizer.encode("def x")] * 2)
    decoder = mj.decoder(lm, plan=mj.Plan(block=4, method=method), slots=32)
    state = decoder.init(lm.params, ids, max_tokens=jnp.array([3, 9]), key=jax.random.key(0))
    state = jax.jit(decoder.run)(lm.params, state)
    np.testing.assert_array_equal(state.method, state.nfe)
    assert state.nfe[0] < state.nfe[1]
