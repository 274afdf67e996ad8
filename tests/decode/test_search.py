"""best_of_n() and smc(): what they cost, what they sample from, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.decode.search import systematic_resample
from tests.marks import slow_except
from tests.tiny import PATTERNS, tiny

PROMPTS = ["for value in", "x y"]
HOW = dict(max_tokens=20, seed=3, sampler=mj.rules.ancestral(), plan=mj.Plan(block=8, steps=4))


def letters(prompts, texts):
    return [text.count("e") for text in texts]


@functools.cache
def sampled(pattern):
    return mj.sample(tiny(pattern), PROMPTS, n=4, temperature=1.0, **HOW)


@functools.cache
def steered(pattern):
    return mj.smc(tiny(pattern), PROMPTS, reward=letters, n=4, scale=3.0, ess=0.8, **HOW)


@pytest.mark.long
def test_best_of_n_is_the_best_of_the_samples():
    calls = []

    def reward(prompts, texts):
        calls.append((list(prompts), list(texts)))
        return letters(prompts, texts)

    out, plain = mj.best_of_n(tiny(), PROMPTS, reward=reward, n=4, **HOW), sampled("causal_encoder")
    rows = [prompt for prompt in PROMPTS for _ in range(4)]
    assert calls == [(rows, plain.texts)] and out.answers == [plain.texts[:4], plain.texts[4:]]
    for i, text in enumerate(out.texts):
        assert out.rewards[i] == text.count("e") == max(t.count("e") for t in out.answers[i])
    assert out.forwards.tolist() == plain.forwards.reshape(2, 4).sum(axis=1).tolist()
    assert out.passes == plain.passes and out.text == out.texts[0] and out.resamplings.tolist() == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "block_causal"))
def test_a_constant_reward_samples_as_sample_does(pattern):
    plain = sampled(pattern)
    for more in (dict(reward=lambda prompts, texts: [2.0] * len(texts)), dict(reward=letters, scale=0.0)):
        out = mj.smc(tiny(pattern), PROMPTS, n=4, ess=1.0, **more, **HOW)
        assert [*out.answers[0], *out.answers[1]] == plain.texts and not out.resampled.any()
        assert out.passes == plain.passes and out.forwards.sum() == plain.forwards.sum()
        np.testing.assert_allclose(out.ess, 4.0)
        np.testing.assert_allclose(out.weights, 0.25)


@pytest.mark.long
@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "block_causal"))
def test_steering_raises_the_reward_at_equal_passes(pattern):
    out, plain = steered(pattern), sampled(pattern)
    assert out.resamplings.min() > 0 and out.passes == plain.passes
    assert out.answer_rewards.mean() > np.mean(letters(None, plain.texts))
    assert out.answer_rewards.tolist() == [letters(None, texts) for texts in out.answers]
    assert out.rewards.tolist() == out.answer_rewards.max(axis=1).tolist()
    np.testing.assert_allclose(out.weights.sum(axis=1), 1.0)
    again = mj.smc(tiny(pattern), PROMPTS, reward=letters, n=4, scale=3.0, ess=0.8, **HOW)
    assert again.answers == out.answers  # the same seed, the same particles


@pytest.mark.slow
def test_prompts_of_a_batch_are_searched_alone():
    one = mj.smc(tiny(), PROMPTS[:1], reward=letters, n=4, scale=3.0, ess=0.8, every=100, **HOW)
    both = mj.smc(tiny(), PROMPTS, reward=letters, n=4, scale=3.0, ess=0.8, every=100, **HOW)
    assert one.answers[0] == both.answers[0] and len(both.ess) == 1 and not both.resampled.any()


@pytest.mark.long
def test_a_reward_sees_unfinished_answers_and_at_last_the_answers():
    seen = []

    def reward(prompts, texts):
        seen.append(list(texts))
        return letters(prompts, texts)

    out = mj.smc(tiny(), PROMPTS, reward=reward, n=4, scale=0.0, **HOW)
    assert len(seen) == len(out.ess) and seen[-1] == [*out.answers[0], *out.answers[1]]
    few = []
    counted = lambda prompts, texts: few.append(0) or letters(prompts, texts)
    mj.smc(tiny(), PROMPTS, reward=counted, n=4, scale=0.0, every=3, **HOW)
    assert len(few) == -(-len(seen) // 3)


@pytest.mark.long
@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "block_causal"))
def test_the_estimate_is_what_the_last_frame_would_emit(pattern):
    lm = tiny(pattern)
    sampler = mj.Sampler(mj.rules.ancestral(), temperature=1.0)
    decoder = mj.decoder(lm, sampler, mj.Plan(block=8, steps=4), slots=28)
    prompts = np.arange(3, 19).reshape(2, 8)

    @jax.jit
    def look(params):
        state = decoder.init(params, prompts, max_tokens=20, key=jax.random.key(3))
        none = decoder.estimate(state)
        state, frames = decoder.run(params, state, passes=2)
        early, ended = decoder.estimate(state), decoder.run(params, state)
        return (
            none,
            frames,
            early,
            decoder.estimate(ended),
            decoder.answer(ended),
            state.committed,
            state.step,
        )

    none, frames, (ids, lengths), late, answer, committed, step = jax.device_get(look(lm.params))
    assert none[1].tolist() == [0, 0] and late[0].tolist() == answer[0].tolist()
    assert late[1].tolist() == answer[1].tolist()
    for i in range(2):
        assert 0 < step[i] < 4 and committed[i] < 28  # inside a block
        start, used = frames.start[-1, i], frames.used[-1, i]
        guess = frames.answer[-1, i, committed[i] - start : used].tolist()
        eos = guess.index(lm.model.config.eos) if lm.model.config.eos in guess else len(guess)
        assert ids[i, committed[i] - 8 : lengths[i]].tolist() == guess[:eos]


IDS = (40, 41, 42)


def exact_answers(lm, prompt, allow):
    """The probability [3, 3] of each answer of two tokens of IDS, accepted in random order."""
    mask, p = lm.corruption.mask, np.zeros((3, 3))

    def conditional(canvas):
        logits = np.asarray(mj.logits(lm, canvas, prompt=prompt))[0][:, list(IDS)]
        e = np.exp(logits - logits.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    first = conditional([mask, mask])
    for i, token in enumerate(IDS):
        p[i, :] += 0.5 * first[0, i] * conditional([token, mask])[1]
        p[:, i] += 0.5 * first[1, i] * conditional([mask, token])[0]
    return p


@pytest.mark.long
@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "block_causal"))
@pytest.mark.parametrize("more", slow_except(["plain", "late", "twist"], "twist"))
def test_the_weighted_particles_are_samples_of_the_target(pattern, more):
    lm, prompt, scale = tiny(pattern), [3, 4, 5, 6, 7, 8, 9, 10], 1.5
    words = [lm.tokenizer.decode([i]) for i in IDS]
    table = np.random.default_rng(0).normal(size=(3, 3))
    place = {words[i] + words[j]: (i, j) for i in range(3) for j in range(3)}
    only = mj.processors.allow({0: IDS, 1: IDS})
    options = {
        "plain": dict(ess=1.0),
        "late": dict(ess=1.0, temper=1.0),
        "twist": dict(ess=1.0, twist=mj.processors.bias({41: 1.0, 42: -0.5})),
    }[more]
    p, found = exact_answers(lm, prompt, only), np.zeros((3, 3))
    for seed in (0, 4096):
        out = mj.smc(
            lm, prompt, reward=lambda prompts, texts: [table[place[t]] for t in texts], n=2048, scale=scale, seed=seed,
            max_tokens=2, sampler=mj.Sampler(mj.rules.first_hitting(), allow=(only,)), plan=mj.Plan(steps=2), **options,
        )  # fmt: skip
        assert out.resamplings[0] == 1
        for text, weight in zip(out.answers[0], out.weights[0], strict=True):
            found[place[text]] += weight / 2
    want = p * np.exp(scale * table)
    want /= want.sum()
    assert np.abs(found - want).max() < 0.03 < 0.3 < np.abs(p - want).max()


@pytest.mark.slow
def test_a_twist_that_changes_nothing_keeps_the_weights():
    how = dict(n=4, reward=lambda prompts, texts: [0.0] * len(texts), **HOW)
    out = mj.smc(tiny(), PROMPTS, twist=mj.processors.bias({40: 0.0}), **how)
    np.testing.assert_allclose(out.weights, 0.25, atol=1e-5)
    many = mj.processors.bias(dict.fromkeys(range(20, 160), 1.0))
    biased = mj.smc(tiny(), PROMPTS, twist=many, ess=0.0, **how)
    assert biased.weights.max() > 0.5


def test_systematic_resampling_gives_each_particle_its_share():
    rng = np.random.default_rng(0)
    for _ in range(50):
        weights = rng.dirichlet(np.ones(8) * 0.3)
        counts = np.bincount(systematic_resample(weights, rng.random()), minlength=8)
        assert counts.sum() == 8 and (np.floor(8 * weights - 1e-9) <= counts).all()
        assert (counts <= np.ceil(8 * weights + 1e-9)).all()
    assert systematic_resample(np.array([0.0, 1.0, 0.0]), 0.999).tolist() == [1, 1, 1]


@pytest.mark.slow
def test_a_search_of_ones_own_under_jit():
    # The same steps on the decoder alone: the reward is jitted, and nothing leaves the device.
    lm = tiny()
    decoder = mj.decoder(
        lm, mj.Sampler(mj.rules.ancestral(), temperature=1.0), mj.Plan(block=8, steps=4), slots=26
    )
    reward = lambda state: jnp.sum(decoder.estimate(state)[0] > 160, axis=1)

    @jax.jit
    def search(params, key):
        state = decoder.init(params, np.tile(np.arange(3, 9), (16, 1)), max_tokens=20, key=key)

        def one(state, key):
            state, _ = decoder.run(params, state, passes=2)
            rows = jax.random.categorical(key, 2.0 * reward(state), shape=(16,))
            return decoder.fork(state, rows, jax.random.fold_in(key, 1)), None

        state, _ = jax.lax.scan(one, state, jax.random.split(key, 5))
        return reward(decoder.run(params, state)).mean()

    @jax.jit
    def plain(params, key):
        state = decoder.init(params, np.tile(np.arange(3, 9), (16, 1)), max_tokens=20, key=key)
        return reward(decoder.run(params, state)).mean()

    keys = jax.random.split(jax.random.key(0), 4)
    steered, mean = (np.mean([f(lm.params, key) for key in keys]) for f in (search, plain))
    assert steered > mean + 2


def smc(lm, **changes):
    """smc() with one argument changed."""
    return mj.smc(lm, "x", **dict(reward=letters, n=2, max_tokens=4) | changes)


TOP = mj.processors.top_k(2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda lm: mj.best_of_n(lm, "x", reward=None), "reward is None"),
        (lambda lm: mj.best_of_n(lm, "x", reward=letters, n=0), "n is 0"),
        (lambda lm: mj.best_of_n("nano", "x", reward=letters), "lm is 'nano'"),
        (lambda lm: mj.best_of_n(lm, "x", max_tokens=4, reward=lambda p, t: 1.0), "what reward returned"),
        (lambda lm: smc(lm, reward="length"), "reward is 'length'"),
        (lambda lm: smc(lm, reward=lambda p, t: t), "what reward returned"),
        (lambda lm: smc(lm, reward=lambda p, t: [1.0]), "what reward returned"),
        (lambda lm: mj.smc(lm, [], reward=letters), "prompt is []"),
        (lambda lm: smc(lm, n=True), "n is True"),
        (lambda lm: smc(lm, scale=-1.0), "scale is -1.0"),
        (lambda lm: smc(lm, temper=-1.0), "temper is -1.0"),
        (lambda lm: smc(lm, every=0), "every is 0"),
        (lambda lm: smc(lm, ess=1.5), "ess is 1.5"),
        (lambda lm: smc(lm, twist=mj.rules.threshold()), "twist is 'threshold'"),
        (lambda lm: smc(lm, twist=TOP, temperature=0.0), "temperature with twist"),
        (lambda lm: smc(lm, twist=TOP, sampler=mj.rules.expand(7)), "sampler.rule"),
        (lambda lm: smc(lm, twist=TOP, plan=mj.Plan(lookahead=1)), "plan.lookahead"),
        (lambda lm: smc(tiny(kind="uniform"), twist=TOP), "twist is 'top_k'"),
        (lambda lm: smc(lm, sampler=mj.rules.self_speculation(4)), "sampler.speculate is 4"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(call, names):
    with pytest.raises(ValueError) as error:
        call(tiny())
    assert names in str(error.value)
