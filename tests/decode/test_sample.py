"""What the calls promise beside an answer: sessions, effort, log-probabilities, bias, plans, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.tokenizer import SPECIAL
from tests.marks import slow_except
from tests.tiny import PATTERNS, tiny

PROMPTS = ["def x", "for value in range(count):\n    print(total"]
CHAT = [{"role": "user", "content": "def x"}]


def wide(pattern="causal_encoder", **more):
    """The tiny model in float64; call under x64."""
    lm = tiny(pattern, dtype="float64", **more)
    return dataclasses.replace(lm, params=jax.tree.map(lambda x: x.astype(jnp.float64), lm.params))


@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "block_causal"))
def test_a_session_goes_on_as_if_all_had_been_one_prompt(pattern):
    with jax.enable_x64(True):
        lm = wide(pattern)
        first = mj.sample(lm, PROMPTS, max_tokens=9, keep=True)
        more = mj.sample(lm, ["return y", "x = z"], max_tokens=9, state=first.state)
        joined = [
            [*lm.tokenizer.encode(p), *t.tolist(), *lm.tokenizer.encode(q)]
            for p, t, q in zip(PROMPTS, first.tokens, ["return y", "x = z"], strict=True)
        ]
        whole = mj.sample(lm, joined, max_tokens=9)
        again = mj.sample(lm, ["return y", "x = z"], max_tokens=9, state=first.state)
    assert again.texts == more.texts  # a session is a value: using it does not use it up
    for a, b in zip(more.tokens, whole.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    if pattern != "bidirectional":  # nothing that had its keys is encoded again
        assert (more.encoded < whole.encoded).all()


@pytest.mark.long
def test_effort_thinks_within_its_room_and_keeps_the_answers():
    lm = tiny()
    own = mj.Effort(thinking=10, p=0.5, steps=0.5)
    out = mj.sample(lm, CHAT, max_tokens=8, effort=own)
    at = out.tokens[0].tolist().index(SPECIAL.end_think)
    assert at <= 10 and out.thinking[0] is not None
    assert len(out.tokens[0]) - at - 1 <= 8
    # A stream's last moment is the same.
    *_, last = mj.stream(lm, CHAT, max_tokens=8, every=2, effort=own)
    assert (last.text, last.thinking, last.done) == (out.text, out.thinking[0], True)
    np.testing.assert_array_equal(last.tokens, out.tokens[0])
    # The answer to "instant" has no thinking, and its plan is the one that can be read.
    quick = mj.sample(lm, CHAT, max_tokens=8, effort="instant")
    assert quick.thinking == [None] and quick.forwards[0] <= mj.EFFORTS["instant"].steps * 8
    with pytest.raises(ValueError, match="instant, low, medium, high"):
        mj.sample(lm, CHAT, effort="huge")


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["absorbing", "uniform"])
def test_log_probabilities_are_those_of_the_pass_that_wrote_the_token(kind):
    lm = tiny(kind=kind)
    # Everything in one pass: the canvas was all noise, so one call of logits() tells the same.
    rule = mj.rules.threshold(0.0) if kind == "absorbing" else mj.rules.entropy_bound(1e9)
    out = mj.sample(lm, "def x", max_tokens=8, sampler=rule, plan=mj.Plan(steps=1), logprobs=3, temperature=0,
                    logit_bias={300: 5.0})  # fmt: skip
    assert out.logprobs is not None
    found = out.logprobs[0]
    assert found.tokens.shape == (len(out.tokens[0]),) and found.top.shape == (len(out.tokens[0]), 3)
    assert (np.diff(found.top, axis=1) <= 0).all() and (found.tokens <= found.top[:, 0] + 1e-6).all()
    if kind == "absorbing":
        # Over the ids that the model may emit.
        logits = mj.logits(lm, [lm.tokenizer.mask] * 8, "def x")[0]
        log_p = jax.nn.log_softmax(logits.at[:, jnp.asarray(lm.corruption.forbidden)].set(-jnp.inf))
        want = np.asarray(log_p)[np.arange(len(out.tokens[0])), out.tokens[0]]
        np.testing.assert_allclose(found.tokens, want, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("kind", slow_except(["absorbing", "uniform"], "uniform"))
def test_bias_and_constraints_reach_canvas_models_as_masked_ones(kind):
    lm = tiny(kind=kind)
    allow = mj.processors.allow({0: [310, 311], 5: [312]})
    sampler = mj.Sampler(_rule(kind), allow=(allow,))
    out = mj.sample(lm, PROMPTS, max_tokens=8, logit_bias=[{300: 1e4}, {301: 1e4}], sampler=sampler)
    for tokens, always in zip(out.tokens, (300, 301), strict=True):
        assert tokens[0] in (310, 311) and tokens[5] == 312
        assert set(np.delete(tokens, [0, 5]).tolist()) == {always}
    tamed = mj.Sampler(_rule(kind), processors=(mj.processors.frequency(1e3),))
    out = mj.sample(lm, PROMPTS, max_tokens=8, sampler=tamed, plan=mj.Plan(block=1))
    assert all(len(set(t.tolist())) == len(t) for t in out.tokens)  # nothing twice, one token at a time


def test_a_bias_may_be_one_for_all_rows():
    out = mj.sample(tiny(), PROMPTS, max_tokens=8, logit_bias={300: 1e4})
    assert all((t == 300).all() for t in out.tokens)


def _rule(kind):
    return mj.rules.threshold() if kind == "absorbing" else mj.rules.entropy_bound()


@pytest.mark.long
def test_guidance_of_weight_zero_is_plain_decoding_and_another_weight_is_not():
    with jax.enable_x64(True):
        lm = wide()
        plain = mj.sample(lm, PROMPTS, max_tokens=12)
        none = mj.sample(lm, PROMPTS, max_tokens=12, guidance=0.0)
        much = mj.sample(lm, PROMPTS, max_tokens=12, guidance=[0.0, 4.0], negative="return")
    assert none.texts == plain.texts
    assert much.texts[0] == plain.texts[0] and much.texts[1] != plain.texts[1]


def test_a_part_of_the_block_settles_before_the_rest():
    lm = tiny("block_causal")
    out = mj.sample(
        lm, "def x", max_tokens=12, plan=mj.Plan(block=4), sampler=mj.rules.confidence(), history=True
    )
    starts = [int(f.start[0]) for f in out.history if f.used[0]]
    assert len(out.tokens[0]) <= 12 and len(set(starts)) > 1
    with pytest.raises(ValueError, match=r"plan.block is 3.*divisor of 8"):
        mj.sample(lm, "x", plan=mj.Plan(block=3))


@pytest.mark.slow
def test_caches_of_a_bidirectional_model_are_exact_when_refreshed_in_every_step():
    with jax.enable_x64(True):
        lm = wide("bidirectional")
        run = lambda refresh: mj.sample(
            lm, PROMPTS, max_tokens=24, sampler=mj.rules.confidence(), plan=mj.Plan(block=8, refresh=refresh)
        )
        plain = run(None)
        for refresh in (
            mj.Refresh.dual(every=1),
            mj.Refresh.prefix(every=1),
            mj.Refresh.vicinity(3, every=1),
        ):
            assert run(refresh).texts == plain.texts
        stale = run(mj.Refresh.dual())
        assert stale.forwards.tolist() == plain.forwards.tolist() and stale.texts != plain.texts


def test_rows_do_not_see_each_other_through_a_stale_cache():
    lm = tiny("bidirectional")
    plan = mj.Plan(block=8, refresh=mj.Refresh.vicinity(2, every=3))
    run = lambda prompts: mj.sample(lm, prompts, max_tokens=24, plan=plan, sampler=mj.rules.threshold(0.2))
    a, b = run(PROMPTS), run([PROMPTS[0], "z"])
    np.testing.assert_array_equal(a.tokens[0], b.tokens[0])


def test_logits_that_are_no_numbers_are_named_by_pass_and_row():
    lm = tiny()
    broken = jax.tree.map(lambda x: x, lm.params)
    broken["embed"] = broken["embed"].at[lm.tokenizer.encode("z")[0]].set(jnp.nan)
    lm = dataclasses.replace(lm, params=broken)
    with pytest.raises(ValueError, match=r"logits of row 0 are NaN in denoising pass 0"):
        mj.sample(lm, "x z", max_tokens=4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(sampler="predictor_corrector"), "absorbing noise"),
        (dict(logit_bias={320: 1.0}), r"logit_bias is 320.*0..319"),
        (dict(logit_bias={"a": 1.0}), "logit_bias"),
        (dict(plan="refresh"), "plan.refresh"),
        (dict(plan="revise"), "plan.revise"),
        (dict(guidance=float("nan")), "guidance"),
        (dict(negative="x"), "negative"),
        (dict(logprobs=-1), "logprobs"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(arguments, said):
    plans = {"refresh": mj.Plan(refresh=mj.Refresh.dual()), "revise": mj.Plan(revise=1)}
    if "plan" in arguments:
        arguments = dict(plan=plans[arguments["plan"]])
    if "sampler" in arguments:
        arguments = dict(sampler=mj.rules.ALL[arguments["sampler"]]())
    with pytest.raises(ValueError, match=said):
        mj.sample(tiny(), "x", **arguments)
