"""Laws of self-speculation: whatever is drafted, the text is the autoregressive one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import models
from mercury_jax.decode.state import position_uniforms
from mercury_jax.decode.token_stats import draw, forbid
from mercury_jax.tokenizer import SPECIAL
from mercury_jax.types import Pass
from tests.marks import slow_except
from tests.tiny import tiny

PROMPTS = ["def x", "for value in range(count):\n    print(total", "return y if x"]


@functools.cache
def causal(dtype="float32", layers=2):
    """A tiny causal encoder whose encoding pass is taken to predict the next token."""
    lm = tiny(dtype=dtype, layers=layers)
    model = models.build(dataclasses.replace(lm.model.config, predicts_next=True))
    params = lm.params
    if dtype == "float64":
        params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    return dataclasses.replace(lm, model=model, params=params)


def by_hand(lm, ids, count, temperature, seed):
    """Autoregressive decoding in a plain loop: encode all, draw the next token, again."""
    key, temperature = jax.random.key(seed), np.float32(temperature)
    ids = list(ids)
    for _ in range(count):
        logits = logits_behind(lm, ids)
        token = int(_drawn(logits, key, np.int32(len(ids)), temperature))
        if token == lm.model.config.eos:
            break
        ids.append(token)
    return ids


def logits_behind(lm, ids):
    """What the encoding pass says the next token is, without what is never emitted [V]."""
    padded = np.pad(ids, (0, 96 - len(ids))).astype(np.int32)
    return _encode(lm.model, lm.corruption.forbidden, lm.params, padded[None], np.int32(len(ids)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _encode(m, forbidden, params, padded, n):
    zero, all = jnp.zeros((1,), jnp.int32), jnp.full((1,), n)
    hidden, _ = m.forward(params, Pass(padded, m.empty_cache(1, 96), zero, all, all, jnp.ones((1,), bool)))
    return forbid(m.head(params, hidden)[0], forbidden)[n - 1]


@jax.jit
def _drawn(logits, key, n, temperature):
    return draw(logits[None], position_uniforms(key, n[None]), temperature)[0]


@pytest.mark.parametrize("temperature", slow_except([0.0, 1.0], 1.0))
def test_autoregressive_and_speculation_are_the_loop_by_hand(temperature):
    with jax.enable_x64(True):
        lm = causal("float64")
        ids = [lm.tokenizer.encode(p) for p in PROMPTS[:2]]
        want = [by_hand(lm, x, 14, temperature, seed=3 + i)[len(x) :] for i, x in enumerate(ids)]
        plain = mj.sample(lm, ids, max_tokens=14, seed=3, sampler=mj.rules.autoregressive(temperature))
        fast = mj.sample(lm, ids, max_tokens=14, seed=3, sampler=mj.rules.self_speculation(5, temperature))
    assert [t.tolist() for t in plain.tokens] == want
    assert [t.tolist() for t in fast.tokens] == want
    assert plain.forwards.tolist() == [len(w) + (len(w) < 14) for w in want]


@pytest.mark.slow
def test_more_drafting_passes_and_penalties_change_no_text():
    with jax.enable_x64(True):
        lm = causal("float64")
        processors = (mj.processors.frequency(2.0), mj.processors.top_p(0.9))
        run = lambda sampler, **more: mj.sample(
            lm, PROMPTS[:2], max_tokens=12, seed=1, sampler=sampler._replace(processors=processors), **more
        )
        plain = run(mj.rules.autoregressive(1.0))
        fast = run(mj.rules.self_speculation(6, 1.0), plan=mj.Plan(steps=3))
    for a, b in zip(plain.tokens, fast.tokens, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_sampled_speculation_has_the_autoregressive_distribution():
    """Chi-square over the first two tokens of many seeds, against the exact distribution."""
    lm = causal(layers=1)
    ids = lm.tokenizer.encode("def x")
    few = tuple(range(300, 308))
    allow = (mj.processors.allow({i: list(few) for i in range(3)}),)
    sampler = mj.rules.self_speculation(2, 1.0)._replace(allow=allow)
    rows = 512
    counts = np.zeros((8, 8))
    for seed in range(4):
        out = mj.sample(lm, [ids] * rows, max_tokens=3, seed=seed * rows, sampler=sampler)
        for t in out.tokens:
            counts[few.index(int(t[0])), few.index(int(t[1]))] += 1
    # Exact: p(a) p(b | a) by encoding passes.
    soft = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    next_of = lambda x: soft(np.asarray(logits_behind(lm, x))[list(few)])
    joint = np.stack([p * next_of([*ids, a]) for p, a in zip(next_of(ids), few)])
    want = joint * counts.sum()
    chi2 = ((counts - want) ** 2 / want).sum()
    # 63 degrees of freedom: mean 63, standard deviation 11.2; 5 sigma.
    assert chi2 < 63 + 5 * np.sqrt(2 * 63), chi2


def test_what_cannot_be_verified_is_refused():
    with pytest.raises(ValueError, match=r"speculate.*predict"):
        mj.sample(tiny(), "x", sampler=mj.rules.autoregressive())
    with pytest.raises(ValueError, match="draft"):
        mj.rules.self_speculation(0)


@pytest.mark.parametrize("sampler", [mj.rules.threshold(), mj.rules.self_speculation(3, 1.0)])
@pytest.mark.slow
def test_no_effort_ends_in_an_empty_answer(sampler):
    """A model that has said everything in its thinking would end its answer at once."""
    lm = causal()
    asked_for = [{"role": "user", "content": "def x"}]
    asked = dict(max_tokens=8, sampler=sampler, logit_bias={SPECIAL.eos: 1e4})
    out = mj.sample(lm, asked_for, effort=mj.Effort(thinking=10, p=0.5, steps=0.5), **asked)
    *closed, said = out.tokens[0].tolist()
    assert set(closed) == {SPECIAL.end_think} and said not in (SPECIAL.end_think, SPECIAL.eos)
    assert len(mj.sample(lm, asked_for, **asked).tokens[0]) == 0  # an answer without a thinking may be empty
