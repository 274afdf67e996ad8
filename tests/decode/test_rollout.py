"""rollout(): what a policy gradient needs to know of sampled answers; token_log_probs(): the published estimators."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import models
from tests.marks import slow_except
from tests.tiny import PATTERNS, tiny

PROMPTS = ["for value in", "x y"]
HOW = dict(max_tokens=20, seed=3, sampler=mj.rules.ancestral(), plan=mj.Plan(block=8, steps=4))
KEY = jax.random.key(5)


@functools.cache
def drawn(pattern):
    return mj.rollout(
        tiny(pattern), PROMPTS, n=2, reward=lambda prompts, texts: [len(t) for t in texts], **HOW
    )


@functools.cache
def sampled(pattern):
    return mj.sample(tiny(pattern), PROMPTS, n=2, temperature=1.0, history=True, **HOW)


@pytest.mark.long
@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "bidirectional"))
def test_a_rollout_is_the_sample_with_the_token_that_ends_it(pattern):
    r, out = drawn(pattern), sampled(pattern)
    assert r.rewards is not None
    assert r.texts == out.texts and r.rewards.tolist() == [len(text) for text in out.texts]
    assert r.forwards.tolist() == out.forwards.tolist()
    assert r.ended.tolist() == [finish == "stop" for finish in out.finish]
    for row, n, ended, answer in zip(r.tokens, r.lengths, r.ended, out.tokens, strict=True):
        assert row[: n - ended].tolist() == answer.tolist()
        assert not ended or row[n - 1] == tiny(pattern).model.config.eos
    assert any(drawn("causal_encoder").ended)


@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "bidirectional"))
def test_the_commit_step_is_the_first_pass_whose_frame_shows_the_token_as_accepted(pattern):
    r, out = drawn(pattern), sampled(pattern)
    lm = tiny(pattern)
    begin = [len(lm.tokenizer.begin) + len(lm.tokenizer.encode(p)) for p in PROMPTS for _ in range(2)]
    for i, n in enumerate(r.lengths - r.ended):
        step, first = 0, np.full(n, -1)
        for frame in out.history:
            if frame.used[i] == 0:  # the row encodes, or is done
                continue
            for at in np.flatnonzero(frame.accepted[i, : frame.used[i]]) + frame.start[i] - begin[i]:
                if 0 <= at < n and first[at] < 0:
                    first[at] = step
            step += 1
        assert r.commit_step[i, :n].tolist() == first.tolist()
        assert (r.log_probs[i, n + r.ended[i] :] == 0).all()


@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "bidirectional"))
def test_log_probs_are_those_of_the_pass_that_accepted_the_token(pattern):
    # Recomputed from the answers by passes without a cache: tokens that were accepted later are masked.
    lm, r = tiny(pattern), drawn(pattern)
    again = mj.rl.token_log_probs(lm, lm.params, r.batch(lm), estimator="trajectory")
    np.testing.assert_allclose(again, r.log_probs, atol=2e-5)


@pytest.mark.slow
def test_merged_passes_lose_a_little_and_one_pass_is_the_fully_masked_answer():
    lm, r = tiny("bidirectional"), drawn("bidirectional")
    one = mj.rl.token_log_probs(lm, lm.params, r.batch(lm), estimator="trajectory", passes=1)
    full = mj.rl.token_log_probs(lm, lm.params, r.batch(lm), KEY, mask_prompt=0.0)
    np.testing.assert_allclose(one, full, atol=1e-5)
    some = mj.rl.token_log_probs(lm, lm.params, r.batch(lm), estimator="trajectory", passes=4)
    assert not np.allclose(some, one, atol=1e-3) and not np.allclose(some, r.log_probs, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_log_probs_count_processors_and_temperature(temperature):
    # One token, so that the distribution is that of the first pass.
    lm, bias = tiny(), {40: 3.0, 41: 2.0}
    sampler = mj.Sampler(mj.rules.ancestral(), processors=(mj.processors.bias(bias), mj.processors.top_k(5)))
    how = dict(max_tokens=1, sampler=sampler, plan=mj.Plan(steps=1), temperature=temperature)
    r = mj.rollout(lm, "x y", n=16, **how)
    logits = np.array(mj.logits(lm, [lm.corruption.mask], prompt="x y")[0, 0], np.float64)
    logits[list(lm.corruption.forbidden)] = -np.inf
    for token, value in bias.items():
        logits[token] += value
    logits[np.argsort(logits)[:-5]] = -np.inf
    scaled = logits / max(temperature, 1e-6)
    want = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
    np.testing.assert_allclose(r.log_probs[:, 0], want[r.tokens[:, 0]], atol=1e-4)
    assert (
        len(set(r.tokens[:, 0].tolist())) == 1 if temperature == 0 else len(set(r.tokens[:, 0].tolist())) > 1
    )


@pytest.mark.long
def test_of_a_remasked_token_the_last_acceptance_counts():
    @mj.rule(noise="absorbing")
    def twice(
        key, view, memory
    ):  # accepts everything, puts the first half back to the mask, accepts it again
        canvas = jnp.where(view.masked, view.stats.sample, view.canvas)
        back = view.editable & (jnp.arange(canvas.shape[0]) < 4) & (view.step == 0)
        return mj.rules.propose(view, jnp.where(back, view.noise, canvas), canvas), memory

    r = mj.rollout(tiny(), "x y", max_tokens=8, sampler=twice(), plan=mj.Plan(block=8, steps=2))
    assert r.commit_step[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0] and r.forwards.tolist() == [2]


@pytest.mark.slow
def test_drafts_and_their_verification_have_the_log_probs_of_autoregressive_decoding():
    lm = tiny("causal_encoder")  # whose encoding pass is taken to predict the next token
    lm = dataclasses.replace(lm, model=models.build(dataclasses.replace(lm.model.config, predicts_next=True)))
    plain, drafted = (
        mj.rollout(lm, "x y", max_tokens=12, sampler=how)
        for how in (mj.rules.autoregressive(), mj.rules.self_speculation(4))
    )
    assert plain.tokens.tolist() == drafted.tokens.tolist()
    np.testing.assert_allclose(plain.log_probs, drafted.log_probs, atol=1e-4)
    assert plain.commit_step[0, : plain.lengths[0]].tolist() == list(range(plain.lengths[0]))


def test_the_decoder_keeps_the_same_under_jit():
    lm, r = tiny(), drawn("causal_encoder")
    sampler = mj.Sampler(HOW["sampler"], temperature=1.0)
    decoder = mj.decoder(lm, sampler, HOW["plan"], slots=64, trajectory=True)
    keys = jax.vmap(jax.random.key)(3 + jnp.arange(4))

    @jax.jit
    def decode(params):
        state = decoder.init(params, r.prompts, r.prompt_lengths, max_tokens=20, key=keys)
        return decoder.run(params, state).trajectory

    kept = decode(lm.params)
    for i, (start, n) in enumerate(zip(r.prompt_lengths, r.lengths, strict=True)):
        np.testing.assert_array_equal(kept.step[i, start : start + n], r.commit_step[i, :n])
        np.testing.assert_allclose(kept.log_prob[i, start : start + n], r.log_probs[i, :n], atol=1e-5)


# --- estimators


def exact(lm, prompt, seen):
    """log p [L, V] of each position of a canvas, of the tokens that may be emitted."""
    logits = np.array(mj.logits(lm, seen, prompt=prompt)[0], np.float64)
    logits[:, list(lm.corruption.forbidden)] = -np.inf
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


PROMPT, ANSWER = [3, 4, 5, 6, 7, 8, 9, 10], [40, 41, 42]


def under(lm, masked):
    """log p of each answer token [3], where these of its tokens are masked."""
    seen = [lm.corruption.mask if m else token for m, token in zip(masked, ANSWER, strict=True)]
    return exact(lm, PROMPT, seen)[np.arange(3), ANSWER]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "bidirectional"))
def test_diffu_grpo_without_masks_in_the_prompt_is_the_fully_masked_pass(pattern):
    lm = tiny(pattern)
    batch = mj.rl.answer_batch(lm, [PROMPT], [ANSWER])
    found = mj.rl.token_log_probs(lm, lm.params, batch, KEY, mask_prompt=0.0)
    np.testing.assert_allclose(found[0], under(lm, [1, 1, 1]), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "bidirectional"))
def test_diffu_grpo_masks_prompt_tokens_of_every_copy(pattern):
    # All prompt tokens masked: whatever they were, the answer's log-probabilities are those of a prompt of masks.
    lm = tiny(pattern)
    batch = mj.rl.answer_batch(lm, [PROMPT, PROMPT[::-1]], [ANSWER, ANSWER])
    found = mj.rl.token_log_probs(lm, lm.params, batch, KEY, mask_prompt=1.0)
    masked = exact(lm, [lm.corruption.mask] * len(PROMPT), [lm.corruption.mask] * 3)[np.arange(3), ANSWER]
    np.testing.assert_allclose(found, np.stack([masked, masked]), atol=1e-5)
    half = mj.rl.token_log_probs(lm, lm.params, batch, KEY, mask_prompt=0.5)
    assert not np.allclose(half[0], found[0], atol=1e-3) and not np.allclose(
        half[0], under(lm, [1, 1, 1]), atol=1e-3
    )


@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "bidirectional"))
def test_coupled_grpo_is_one_of_the_complementary_pairs(pattern):
    lm, ratio = tiny(pattern), 0.4
    batch = mj.rl.answer_batch(lm, [PROMPT], [ANSWER])
    estimate = jax.jit(lambda key: mj.rl.token_log_probs(
        lm, lm.params, batch, key, estimator="coupled_grpo", ratios=(ratio, ratio)
    )[0])  # fmt: skip
    pairs = {}
    for mask in itertools.product([0, 1], repeat=3):
        mask, full = np.array(mask), under(lm, [1, 1, 1])
        first, rest = under(lm, mask), under(lm, 1 - mask)
        pairs[tuple(mask)] = (full + np.where(mask, first / ratio, rest / (1 - ratio))) / 2
    seen = set()
    for i in range(24):
        found = estimate(jax.random.key(i))
        [which] = [mask for mask, want in pairs.items() if np.allclose(found, want, atol=1e-4)]
        seen.add(which)
    assert len(seen) > 4


@pytest.mark.slow
@pytest.mark.parametrize("pattern", slow_except(["causal_encoder", "bidirectional"], "causal_encoder"))
def test_the_expectation_of_elbo_is_the_bound_that_enumeration_gives(pattern):
    lm = tiny(pattern)
    batch = mj.rl.answer_batch(lm, [PROMPT], [ANSWER])
    subsets = [m for m in itertools.product([0, 1], repeat=3) if any(m)]
    count = {1: 3, 2: 3, 3: 1}
    want = sum(3 / sum(m) * np.dot(m, under(lm, m)) / 3 / count[sum(m)] for m in subsets)
    found = jax.jit(jax.vmap(
        lambda key: mj.rl.token_log_probs(lm, lm.params, batch, key, estimator="elbo", samples=6).sum()
    ))(jax.random.split(KEY, 200))  # fmt: skip
    error = float(found.std() / np.sqrt(200))
    assert abs(float(found.mean()) - want) < 4 * error < 0.5
    score = mj.score(lm, PROMPT, ANSWER, samples=600)
    assert abs(score.log_p - want) < 4 * score.se


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.slow
def test_of_one_token_all_estimators_know_the_exact_value(pattern):
    lm = tiny(pattern)
    batch = mj.rl.answer_batch(lm, [PROMPT], [ANSWER[:1]], commit_step=[[0]])
    want = exact(lm, PROMPT, [lm.corruption.mask])[0, ANSWER[0]]
    for estimator, more in (("diffu_grpo", dict(mask_prompt=0.0)), ("elbo", {}), ("trajectory", {})):
        found = mj.rl.token_log_probs(lm, lm.params, batch, KEY, estimator=estimator, **more)
        np.testing.assert_allclose(found, [[want]], atol=1e-5)
    half = mj.rl.token_log_probs(lm, lm.params, batch, KEY, estimator="coupled_grpo", ratios=(0.5, 0.5))
    np.testing.assert_allclose(half, [[1.5 * want]], atol=1e-4)  # as the reference: the pair counts it twice


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("estimator", ["diffu_grpo", "coupled_grpo", "elbo", "trajectory"])
def test_it_is_differentiable_and_one_program_serves_other_answers(estimator):
    lm = tiny("block_causal")
    chex.clear_trace_counter()  # it counts by the code of a function, so over all estimators
    traced = chex.assert_max_traces(
        lambda params, batch, key: mj.rl.token_log_probs(
            lm,
            params,
            batch,
            key,
            estimator=estimator,
            **({"passes": 4} if estimator == "trajectory" else {}),
        ).sum(),
        n=1,
    )
    slope = jax.jit(jax.grad(traced))
    for prompts, answers in (([PROMPT, [5, 6]], [[40, 41], [42] * 6]), ([[9], [7, 8, 9]], [[50] * 6, [51]])):
        steps = [list(range(len(answer))) for answer in answers]
        batch = mj.rl.answer_batch(lm, prompts, answers, size=6, commit_step=steps)
        grad = jax.tree.map(np.asarray, slope(lm.params, batch, KEY))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(grad))
        assert max(np.abs(x).max() for x in jax.tree.leaves(grad)) > 1e-3


def test_padding_and_neighbours_change_nothing():
    lm = tiny("block_causal")
    how = dict(estimator="trajectory", passes=3)
    answers, prompts = [[40, 41], [42, 43, 44, 45, 46]], [PROMPT, [5, 6, 7]]
    both = mj.rl.answer_batch(lm, prompts, answers, commit_step=[[0, 1], [2, 0, 1, 1, 0]])
    alone = mj.rl.answer_batch(lm, prompts[:1], answers[:1], commit_step=[[0, 1]])
    found = mj.rl.token_log_probs(lm, lm.params, both, **how)
    np.testing.assert_allclose(found[0, :2], mj.rl.token_log_probs(lm, lm.params, alone, **how)[0], atol=1e-5)
    assert (found[0, 2:] == 0).all()


@pytest.mark.slow
def test_a_policy_gradient_raises_the_reward():
    # REINFORCE on the first token: ten steps make the rewarded token more likely.
    lm = tiny()
    how = dict(n=32, max_tokens=4, sampler=mj.rules.ancestral(), plan=mj.Plan(steps=2))
    r = mj.rollout(lm, "x y", reward=lambda prompts, texts: [t.count("e") for t in texts], **how)
    assert r.rewards is not None
    batch, advantage = r.batch(lm), r.rewards - r.rewards.mean()
    value = lambda params: (
        advantage[:, None] * mj.rl.token_log_probs(lm, params, batch, KEY, mask_prompt=0.0)
    ).mean()
    before, slope = jax.value_and_grad(value)(lm.params)
    after = value(jax.tree.map(lambda p, g: p + 0.05 * g, lm.params, slope))
    assert advantage.any() and after > before


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda lm, b: mj.rollout(lm, "x", n=0), "n is 0"),
        (lambda lm, b: mj.rollout(lm, "x", n=1.5), "n is 1.5"),
        (lambda lm, b: mj.rollout(lm, "x", max_tokens=[3, 4]), "max_tokens is"),
        (lambda lm, b: mj.rollout(lm, "", n=2), "prompt is ''"),
        (lambda lm, b: mj.rollout("nano", "x"), "lm is 'nano'"),
        (lambda lm, b: mj.rollout(lm, "x", reward=3), "reward is 3"),
        (lambda lm, b: mj.rollout(lm, "x", n=2, max_tokens=1, reward=lambda p, t: [1.0]), "what reward returned"),
        (lambda lm, b: mj.rollout(lm, "x", max_tokens=1, reward=lambda p, t: [float("nan")]), "nan for text 0"),
        (lambda lm, b: mj.rollout(lm, "x", temperature=-1.0), "temperature is -1.0"),
        (lambda lm, b: mj.rl.answer_batch(lm, "x", "y", size=0), "size is 0"),
        (lambda lm, b: mj.rl.answer_batch(lm, ["x", "y"], ["z"]), "prompts is"),
        (lambda lm, b: mj.rl.answer_batch(lm, "x", [[40, 999]]), "answers"),
        (lambda lm, b: mj.rl.answer_batch(lm, "x", [[40] * 300]), "prompt and answer 0"),
        (lambda lm, b: mj.rl.answer_batch(lm, "x", [[40, 41]], commit_step=[[1]]), "commit_step is"),
        (lambda lm, b: mj.rl.answer_batch(lm, "x", [[40, 41]], commit_step=[[0, 0]] * 2), "commit_step is"),
        (lambda lm, b: mj.rl.answer_batch(lm, "x", [[40]], size=3, commit_step=[[0, 0]]), "commit_step is"),
        (lambda lm, b: mj.rl.answer_batch(tiny(kind="uniform"), "x", "y"), "lm is"),
        (lambda lm, b: mj.rl.token_log_probs(lm, lm.params, b, KEY, estimator="grpo"), "estimator is 'grpo'"),
        (lambda lm, b: mj.rl.token_log_probs(lm, lm.params, b), "key is None"),
        (lambda lm, b: mj.rl.token_log_probs(lm, lm.params, b, 7), "key is 7"),
        (lambda lm, b: mj.rl.token_log_probs(lm, lm.params, "x", KEY), "batch is"),
        (lambda lm, b: mj.rl.token_log_probs(lm, lm.params, b, KEY, mask_prompt=2.0), "mask_prompt is 2.0"),
        (lambda lm, b: mj.rl.token_log_probs(lm, lm.params, b, KEY, samples=0), "samples is 0"),
        (lambda lm, b: mj.rl.token_log_probs(lm, lm.params, b, KEY, ratios=(0.2, 0.8)), "ratios is"),
        (
            lambda lm, b: mj.rl.token_log_probs(
                lm, lm.params, b, KEY, estimator="coupled_grpo", ratios=(0, 1)
            ),
            "ratios is",
        ),
        (lambda lm, b: mj.rl.token_log_probs(lm, lm.params, b, estimator="trajectory"), "commit_step"),
        (lambda lm, b: mj.rl.token_log_probs(lm, lm.params, b, estimator="trajectory", passes=0), "passes is 0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(call, names):
    lm = tiny()
    with pytest.raises(ValueError) as error:
        call(lm, mj.rl.answer_batch(lm, [PROMPT], [ANSWER]))
    assert names in str(error.value)


@pytest.mark.long
def test_a_reward_that_fails_is_named_with_its_own_error():
    with pytest.raises(RuntimeError, match=r"reward\(prompts, texts\) failed for 2 texts: KeyError: 'x'"):
        mj.rollout(tiny(), "x", n=2, max_tokens=1, reward=lambda p, t: {}["x"])
