"""Laws of drafting across models: whatever is drafted, the text is the verifier's."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportAttributeAccessIssue=false

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import models, noise
from mercury_jax.tokenizer import SPECIAL
from mercury_jax.types import LM, Pass
from tests.hub.goldens_of import GOLDENS, golden
from tests.tiny import VOCAB, tiny, tokenizer

ROWS, TOKENS, DRAFT = 64, 16, 5
HEAT = 3.0  # broadens the distributions of random models
FEW = tuple(range(300, 308))
BIAS = {300: 20.0, 301: 20.0, 302: 19.0, 303: 19.0, SPECIAL.eos: 12.0}
KINDS = [("causal_encoder", "absorbing"), ("causal_encoder", "uniform"), ("block_causal", "absorbing")]


@functools.cache
def verifier(dtype="float64", layers=2):
    """A random autoregressive model; its weights are not the drafters'."""
    config = dataclasses.replace(
        tiny().model.config,
        pattern="block_causal", block=1, mask=None, predicts_next=True, dtype=dtype, layers=layers,
    )  # fmt: skip
    model = models.build(config)
    params = jax.tree.map(lambda x: 2.0 * x.astype(dtype), jax.jit(model.init)(jax.random.key(7)))
    corruption = noise.uniform(VOCAB, forbidden=noise.specials(tokenizer()))
    return LM(model, params, tokenizer(), corruption, "verifier")


@functools.cache
def drafter(pattern="causal_encoder", kind="absorbing", dtype="float64", layers=2):
    lm = tiny(pattern, kind=kind, layers=layers)
    config = dataclasses.replace(lm.model.config, dtype=dtype)
    params = jax.tree.map(lambda x: x.astype(dtype), lm.params)
    return dataclasses.replace(lm, model=models.build(config), params=params, name=f"{pattern} {kind}")


@functools.cache
def prompts(rows=ROWS):
    """Most are shorter than a block, some are longer than a draft."""
    rng = np.random.default_rng(5)
    return [rng.integers(10, 300, rng.integers(1, 14)).tolist() for _ in range(rows)]


def asked(rows=ROWS, seed=3):
    """Rows with temperatures and lengths of their own, whose answers hold few ids, so that drafts often agree."""
    row = np.arange(rows)
    varied = mj.rules.autoregressive()._replace(processors=(mj.processors.frequency(4.0),))
    return dict(
        max_tokens=(TOKENS - row // 3 % TOKENS).tolist(), seed=seed, temperature=np.array([0.0, 1.0, 4.0])[row % 3],
        sampler=varied, logit_bias=BIAS,
    )  # fmt: skip


@functools.cache
def alone(seed=3):
    with jax.enable_x64(True):
        return mj.sample(verifier(), prompts(), **asked(seed=seed))


def check_same(plain, out):
    assert plain.draft is None and out.draft is not None
    for row, (a, b) in enumerate(zip(plain.tokens, out.tokens, strict=True)):
        np.testing.assert_array_equal(a, b, str(row))
    assert out.finish == plain.finish and out.texts == plain.texts


SLOW = pytest.mark.slow
CASES = [
    pytest.param(*KINDS[0], marks=SLOW),
    pytest.param(*KINDS[1], marks=SLOW),
    KINDS[2],
    pytest.param("bidirectional", "absorbing", marks=SLOW),
]


@pytest.mark.long
@pytest.mark.parametrize(("pattern", "kind"), CASES)
def test_text_is_the_verifiers_with_the_same_seed(pattern, kind):
    """4 drafters and 64 prompts with seeds, temperatures and lengths of their own: 256 cases."""
    with jax.enable_x64(True):
        out = mj.sample(
            verifier(), prompts(), draft=mj.Draft(drafter(pattern, kind), tokens=DRAFT), **asked()
        )
    plain = alone()
    check_same(plain, out)
    assert set(out.finish) == {"stop", "length"}
    # Each verifying pass gives the accepted tokens and one more, but for the end of text.
    ended = np.array([finish == "stop" for finish in out.finish])
    assert (out.draft.accepted <= out.draft.proposed).all()
    emitted = np.array(out.lengths) + ended - out.draft.accepted
    assert (emitted <= out.forwards).all() and (emitted >= out.forwards - ended - 1).all()
    assert out.draft.acceptance > 0.1 and out.forwards.sum() < 0.8 * plain.forwards.sum()
    assert out.passes <= plain.passes and (out.draft.forwards >= out.forwards).all()


@pytest.mark.slow
def test_drafts_are_what_the_drafter_says_after_the_text():
    """Accepted tokens and passes are those of a loop by hand, in which the drafter starts anew after each pass."""
    rows, steps = 16, 2
    how = dict(logit_bias=BIAS | {SPECIAL.eos: -99.0}, seed=3, temperature=0.0)
    with jax.enable_x64(True):
        draft = mj.Draft(drafter(), tokens=DRAFT, steps=steps)
        out = mj.sample(verifier(), prompts(rows), max_tokens=TOKENS, draft=draft, **how)
        check_same(mj.sample(verifier(), prompts(rows), max_tokens=TOKENS, **how), out)
        done, accepted, passes = np.zeros(rows, int), np.zeros(rows, int), np.zeros(rows, int)
        plan = mj.Plan(block=DRAFT, steps=steps)
        while (done < TOKENS).any():
            texts = [[*p, *t[:n]] for p, t, n in zip(prompts(rows), out.tokens, done, strict=True)]
            room = np.clip(TOKENS - done, 1, DRAFT).tolist()
            rule = mj.rules.confidence()
            guess = mj.sample(drafter(), texts, max_tokens=room, sampler=rule, plan=plan, **how)
            for i in np.flatnonzero(done < TOKENS):
                same = [a == b for a, b in zip(guess.tokens[i], out.tokens[i][done[i] :], strict=False)]
                agreed = [*same, False].index(False)
                accepted[i] += agreed
                done[i] += agreed + 1
                passes[i] += 1
    np.testing.assert_array_equal(out.draft.accepted, accepted)
    np.testing.assert_array_equal(out.forwards, passes)
    assert accepted.sum() > rows


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2])
def test_rejection_has_the_verifiers_distribution(steps):
    """Chi-square over the first two tokens of many seeds, against the exact distribution; greedy rows are exact."""
    lm, rows = verifier("float32", 1), 1024
    ids = tokenizer().encode("def x")
    temperature = np.where(np.arange(rows) % 4 == 0, 0.0, HEAT)
    allow = (mj.processors.allow({i: list(FEW) for i in range(3)}),)
    sampler = mj.rules.autoregressive()._replace(allow=allow)
    draft = mj.Draft(drafter(dtype="float32", layers=1), 2, steps, temperature=2.0, method="rejection")
    counts, accepted = np.zeros((8, 8)), []
    for seed in range(3):
        how = dict(max_tokens=3, seed=seed * rows, sampler=sampler, temperature=temperature)
        out = mj.sample(lm, [ids] * rows, draft=draft, **how)
        greedy = {tuple(t) for t, heat in zip(out.tokens, temperature, strict=True) if heat == 0}
        assert len(greedy) == 1
        for t in np.array(out.tokens)[temperature > 0]:
            counts[FEW.index(t[0]), FEW.index(t[1])] += 1
        accepted.append(out.draft.acceptance)
    soft = lambda x: np.exp((x - x.max()) / HEAT) / np.exp((x - x.max()) / HEAT).sum()
    next_of = lambda x: soft(logits_behind(lm, x)[list(FEW)])
    joint = np.stack([p * next_of([*ids, a]) for p, a in zip(next_of(ids), FEW, strict=True)])
    want = joint * counts.sum()
    chi2 = ((counts - want) ** 2 / want).sum()
    # 63 degrees of freedom: mean 63, standard deviation 11.2; 5 sigma.
    assert chi2 < 63 + 5 * np.sqrt(2 * 63), chi2
    assert want.min() > 1 and min(accepted) > 0.1


def logits_behind(lm, ids):
    """What the verifier says after some ids [V]."""
    tokens, all = jnp.asarray(ids, jnp.int32)[None], jnp.full((1,), len(ids))
    given = Pass(tokens, lm.model.empty_cache(1, 96), all * 0, all, all, jnp.ones((1,), bool))
    return np.asarray(lm.model.head(lm.params, lm.model.forward(lm.params, given)[0])[0, -1])


@pytest.mark.slow
def test_rejection_accepts_more_than_equal_draws():
    with jax.enable_x64(True):
        how = asked() | dict(temperature=4.0)
        run = lambda method: mj.sample(
            verifier(), prompts(), draft=mj.Draft(drafter(), tokens=DRAFT, method=method), **how
        )
        assert run("rejection").draft.acceptance > 2 * run("same_seed").draft.acceptance


@pytest.mark.slow
def test_thinking_stop_texts_logprobs_and_several_answers():
    chat = [[{"role": "user", "content": text}] for text in ("def x", "return y if x")]
    bias = BIAS | {SPECIAL.end_think: 12.0}
    stop = tokenizer().decode([FEW[0]])
    how = dict(
        max_tokens=12, temperature=2.0, logit_bias=bias, seed=2, n=4, stop=[stop], logprobs=2,
        effort=mj.Effort(thinking=10, p=0.5, steps=0.5),
    )  # fmt: skip
    with jax.enable_x64(True):
        plain = mj.sample(verifier(), chat, **how)
        fast = mj.sample(verifier(), chat, draft=mj.Draft(drafter(), tokens=DRAFT), **how)
    check_same(plain, fast)
    assert fast.thinking == plain.thinking and fast.draft.accepted.sum() > 0
    assert plain.logprobs is not None and fast.logprobs is not None
    for a, b in zip(plain.logprobs, fast.logprobs, strict=True):
        np.testing.assert_allclose(a.tokens, b.tokens, rtol=1e-9)
        np.testing.assert_array_equal(a.top_ids, b.top_ids)


def test_what_does_not_fit_is_refused_by_name():
    lm, draft = verifier(), mj.Draft(drafter(), tokens=DRAFT)
    wrong = [
        (dict(draft=3), "draft is 3"),
        (dict(draft=draft, plan=mj.Plan(block=4)), "plan"),
        (dict(draft=draft, guidance=1.0), "guidance"),
        (dict(draft=draft, keep=True), "keep"),
        (dict(draft=draft, passes=3), "passes"),
        (dict(draft=draft, bad_words="x"), "bad_words is .x.; allowed: None with draft="),
        (dict(draft=draft, schema={"type": "null"}), "schema"),
        (dict(draft=draft, sampler=mj.rules.threshold()), "sampler is 'threshold'"),
        (dict(draft=mj.Draft(drafter(), sampler=mj.rules.predictor_corrector(), tokens=4)), "sampler.rule"),
        (dict(draft=mj.Draft(drafter(), tokens=4, temperature=np.ones(3))), "3"),
        (dict(draft=mj.Draft(dataclasses.replace(drafter(), params={}), tokens=4)), "draft.lm.params"),
    ]
    for how, match in wrong:
        with pytest.raises(ValueError, match=match):
            mj.sample(lm, "x", **how)
    with pytest.raises(ValueError, match="lm is 'causal_encoder absorbing'.*predicts the next"):
        mj.sample(drafter(), "x", draft=draft)
    for fields, match in [
        (dict(lm=lm), "draft.lm is 'verifier'.*diffusion"),
        (dict(lm=drafter(), tokens=9), "draft.tokens is 9.*1..8"),
        (dict(lm=drafter(), steps=0), "draft.steps"),
        (dict(lm=drafter(), tokens=4, method="greedy"), "draft.method"),
        (dict(lm=drafter(), tokens=4, sampler=mj.rules.daedal()), "draft.sampler"),
    ]:
        with pytest.raises(ValueError, match=match):
            mj.Draft(**fields)


def test_another_tokenizer_is_refused_by_name():
    other = type(tokenizer()).train([f"{a}{b} {a}" for a in "abcdefgh" for b in "stuvwxyz"] * 3, VOCAB)
    changed = dataclasses.replace(drafter(), tokenizer=other)
    with pytest.raises(ValueError, match=r"draft.lm is .causal_encoder absorbing, whose id \d+ is"):
        mj.sample(verifier(), "x", draft=mj.Draft(changed, tokens=4))
    small = dataclasses.replace(drafter().model.config, vocab=VOCAB - 1)
    fewer = dataclasses.replace(drafter(), model=models.build(small))
    with pytest.raises(ValueError, match="draft.lm.*319 ids.*320"):
        mj.sample(verifier(), "x", draft=mj.Draft(fewer, tokens=4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4_dense", "gemma4_moe", "gemma4_ple"])
def test_diffusion_gemma_drafts_for_gemma_4(name):
    """Random checkpoints of the two families, with the published attention pattern, cache and self-conditioning."""
    assert (GOLDENS / name).is_dir()
    first, second = golden(name), golden("diffusion_gemma")
    uniform = noise.uniform(97)
    build = lambda g: LM(g.opened.model, g.params, tokenizer(), uniform, g.name)
    ids = [np.random.default_rng(i).integers(5, 90, 3 + 4 * i).tolist() for i in range(4)]
    how = dict(max_tokens=24, seed=1, temperature=[0.0, 0.0, 1.0, 1.0], sampler=mj.rules.autoregressive())
    plain = mj.sample(build(first), ids, **how)
    out = mj.sample(build(first), ids, draft=mj.Draft(build(second), tokens=8, steps=2), **how)
    for a, b in zip(plain.tokens, out.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
