"""Laws of self-speculation: whatever is drafted, the text is the autoregressive one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import models
from mercury_jax.decode.read import draw, forbid
from mercury_jax.decode.state import uniforms_at
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
    m, c = lm.model, lm.corruption
    key = jax.random.key(seed)
    ids = list(ids)
    for _ in range(count):
        n = len(ids)
        one = lambda x: jnp.full((1,), x, jnp.int32)
        padded = jnp.asarray([ids + [0] * (96 - n)], jnp.int32)
        hidden, _ = _encode(m, lm.params, padded, one(n))
        logits = forbid(m.head(lm.params, hidden)[0, n - 1 : n], c.forbidden)
        u = uniforms_at(key, jnp.asarray([n], jnp.int32))
        token = int(draw(logits, u, jnp.asarray(temperature, jnp.float32))[0])
        if token == m.config.eos:
            break
        ids.append(token)
    return ids


@functools.partial(jax.jit, static_argnums=0)
def _encode(m, params, padded, n):
    zero = jnp.zeros((1,), jnp.int32)
    return m.forward(params, padded, m.empty_cache(1, 96), zero, n, n, jnp.ones((1,), bool), ())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
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


def test_more_drafting_passes_and_penalties_change_no_text():
    with jax.enable_x64(True):
        lm = causal("float64")
        shape = (mj.shape.frequency(2.0), mj.shape.top_p(0.9))
        run = lambda sampler, **more: mj.sample(
            lm, PROMPTS[:2], max_tokens=12, seed=1, sampler=sampler._replace(shape=shape), **more
        )
        plain = run(mj.rules.autoregressive(1.0))
        fast = run(mj.rules.self_speculation(6, 1.0), plan=mj.Plan(steps=3))
    for a, b in zip(plain.tokens, fast.tokens, strict=True):
        np.testing.assert_array_equal(a, b)


def test_sampled_speculation_has_the_autoregressive_distribution():
    """Chi-square over the first two tokens of many seeds, against the exact distribution."""
    lm = causal()
    ids = lm.tokenizer.encode("def x")
    few = tuple(range(300, 308))
    allow = (mj.shape.allow({i: list(few) for i in range(3)}),)
    sampler = mj.rules.self_speculation(2, 1.0)._replace(allow=allow)
    rows = 512
    counts = np.zeros((8, 8))
    for seed in range(4):
        out = mj.sample(lm, [ids] * rows, max_tokens=3, seed=seed * rows, sampler=sampler)
        for t in out.tokens:
            counts[few.index(int(t[0])), few.index(int(t[1]))] += 1
    # Exact: p(a) p(b | a) by encoding passes.
    one = lambda n: jnp.full((1,), n, jnp.int32)
    head = lambda x: np.asarray(lm.model.head(lm.params, _encode(lm.model, lm.params, *x)[0])[0])
    pad = lambda x: (jnp.asarray([x + [0] * (96 - len(x))], jnp.int32), one(len(x)))
    soft = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    first = soft(head(pad(ids))[len(ids) - 1, list(few)])
    joint = np.stack([p * soft(head(pad([*ids, a]))[len(ids), list(few)]) for p, a in zip(first, few)])
    want = joint * counts.sum()
    chi2 = ((counts - want) ** 2 / want).sum()
    # 63 degrees of freedom: mean 63, standard deviation 11.2; 5 sigma.
    assert chi2 < 63 + 5 * np.sqrt(2 * 63), chi2


def test_what_cannot_be_verified_is_refused():
    with pytest.raises(ValueError, match=r"verify.*predict"):
        mj.sample(tiny(), "x", sampler=mj.rules.autoregressive())
    with pytest.raises(ValueError, match="draft"):
        mj.rules.self_speculation(0)
