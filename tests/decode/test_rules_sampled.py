"""Rules through `mj.sample` with a model that attends, against their references on the same weights.

The model is `tiny("bidirectional")` with a final norm that makes it surer; goldens/README.md tells how the references
decoded it.
"""

import collections
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import mercury_jax as mj
from mercury_jax import models
from tests.marks import slow_except
from tests.tiny import tiny


@functools.cache
def goldens():
    with np.load(Path(__file__).parent / "goldens" / "sampled.npz") as file:
        return dict(file)


@functools.cache
def surer(scale):
    """The tiny model with its logits multiplied; equal shapes, so that all share their programs."""
    lm = tiny("bidirectional")
    norm = {"scale": jnp.full((lm.model.config.width,), scale - 1.0)}
    return dataclasses.replace(lm, params=lm.params | {"norm": norm})


def prompt(seed, length):
    return np.random.default_rng(seed).integers(5, 320, length).tolist()


def check(name, scale, sampler, length, new, plan, **more):
    """The answer and the forwards of the reference's case `name`, whose seed is its last character."""
    out = mj.sample(
        surer(scale), [prompt(int(name[-1]), length)], max_tokens=new, sampler=sampler, plan=plan, **more
    )
    *answer, forwards = goldens()[name].tolist()
    assert (out.tokens[0].tolist(), out.forwards.tolist()) == (answer, [forwards])
    return out


# (case, length of the prompt, new tokens, block, scale of the logits, p, p_back)
WINO = [
    ("wino_0", 12, 24, 8, 3.0, 0.6, 0.9), ("wino_1", 5, 32, 16, 4.0, 0.5, 0.7),
    ("wino_2", 30, 16, 16, 4.0, 0.4, 0.8), ("wino_3", 7, 24, 24, 5.0, 0.6, 0.9),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name, length, new, block, scale, p, p_back", WINO, ids=lambda x: x)
def test_wino_verifies_with_a_block_of_masks_that_see_each_other(name, length, new, block, scale, p, p_back):
    out = check(name, scale, mj.rules.wino(p, p_back), length, new, mj.Plan(block=block), keep=True)
    # The masks stand behind the canvas of 64 positions, one for each position of the active block alone.
    assert out.state is not None and out.state.state.tokens.shape == (1, 64 + block)


# (case, rule, length of the prompt, new tokens, block, scale of the logits)
DINFER = [
    ("factor_0", mj.rules.factor(1.0), 12, 32, 8, 5.0), ("factor_1", mj.rules.factor(2.0), 5, 32, 16, 4.0),
    ("credit_2", mj.rules.credit(0.4), 9, 32, 16, 3.0), ("credit_3", mj.rules.credit(0.6), 7, 24, 8, 5.0),
    ("hierarchical_4", mj.rules.hierarchical(0.9, 0.4), 7, 32, 16, 5.0),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name, rule, length, new, block, scale", DINFER, ids=lambda x: str(x)[:14])
def test_dinfers_decoders_accept_the_same_tokens_in_every_pass(name, rule, length, new, block, scale):
    check(name, scale, rule, length, new, mj.Plan(block=block))


def same_distribution(ours, counts):
    """Whether answers [n, L] are draws from the distribution that `counts`, rows (ids..., count), were drawn from."""
    rows, theirs = [tuple(row[:-1]) for row in counts.tolist()[:-1]], counts[:, -1].astype(float)
    found = collections.Counter(tuple(x) for x in ours.tolist())
    ours = np.array([found[row] for row in rows] + [len(ours) - sum(found[row] for row in rows)], float)
    ours, theirs = ours[ours + theirs > 0], theirs[ours + theirs > 0]
    scale = np.sqrt(ours.sum() / theirs.sum())
    statistic = np.sum((ours / scale - theirs * scale) ** 2 / (ours + theirs))
    return statistic < scipy.stats.chi2.ppf(1 - 1e-4, len(theirs) - 1)


REMDM = {
    "remdm_cap_0": mj.rules.remdm_cap(0.3), "remdm_rescale_1": mj.rules.remdm_rescale(0.5),
    "remdm_conf_2": mj.rules.remdm_confidence(), "remdm_loop_3": mj.rules.remdm_loop(0.4, 0.7, 0.2, 0.8),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(REMDM, "remdm_conf_2"))
def test_remdm_draws_from_its_references_distribution(name):
    """5 transitions and the removal of the noise that is left, with the reference's nucleus."""
    processors = (mj.processors.ban([3]), mj.processors.top_p(0.9, crossing=0))
    sampler, plan = mj.Sampler(REMDM[name], processors), mj.Plan(block=3, steps=6)
    out = mj.sample(surer(5.0), [prompt(int(name[-1]), 6)] * 1024, max_tokens=3, sampler=sampler, plan=plan)
    assert set(out.forwards.tolist()) == {6}
    assert same_distribution(np.asarray(out.tokens), goldens()[name])


# (case, length of the prompt, start, max_tokens, block, by, scale, bias of the end, p, p_low, p_end, p_full, tail)
DAEDAL = [
    ("daedal_0", 12, 8, 48, 8, 4, 3.0, 4.0, 0.9, 0.3, 0.5, 0.9, 8),
    ("daedal_1", 6, 8, 24, 4, 4, 3.0, 7.0, 0.7, 0.4, 0.3, 0.9, 4),
    ("daedal_2", 11, 8, 32, 8, 4, 2.0, 12.0, 0.8, 0.5, 0.3, 0.9, 4),
    ("daedal_4", 15, 8, 42, 4, 4, 2.0, 10.0, 0.8, 0.5, 0.0, 0.9, 4),
]


@pytest.mark.long
@pytest.mark.parametrize("case", DAEDAL, ids=lambda case: case[0])
def test_daedal_grows_and_decodes_as_its_reference(case):
    """It decodes the whole length; ours ends with the answer, after as many forwards or fewer."""
    name, length, start, most, block, by, scale, bias, *thresholds, tail = case
    rule = mj.rules.daedal(start, by, *thresholds, tail, block)
    out = mj.sample(
        surer(scale), [prompt(int(name[-1]), length)], max_tokens=most, sampler=rule, plan=mj.Plan(steps=200),
        logit_bias={3: bias},
    )  # fmt: skip
    *theirs, forwards = goldens()[name].tolist()
    end = theirs.index(3) if 3 in theirs else len(theirs)
    assert out.tokens[0].tolist() == theirs[:end]
    assert out.forwards[0] == forwards if end == len(theirs) else out.forwards[0] < forwards


def test_daedals_blocks_are_its_own():
    with pytest.raises(
        ValueError, match=r"plan.block is 8; allowed: None with daedal: daedal\(block=\) sets it"
    ):
        mj.sample(surer(3.0), ["x"], sampler=mj.rules.daedal(), plan=mj.Plan(block=8))


# (case, length of the prompt, new tokens, steps, eta, scale of the logits)
P2 = [
    ("p2_0", 12, 24, 24, 1.0, 2.0), ("p2_1", 6, 24, 10, 2.0, 2.0), ("p2_2", 9, 16, 7, 5.0, 1.5),
    ("p2_3", 9, 16, 16, 0.0, 2.0),
]  # fmt: skip


@pytest.mark.parametrize("name, length, new, steps, eta, scale", P2, ids=lambda x: str(x))
def test_p2_remasks_what_its_reference_does(name, length, new, steps, eta, scale):
    check(name, scale, mj.rules.p2(eta), length, new, mj.Plan(block=new, steps=steps))


@functools.cache
def head():
    """A quality head with random numbers, those that the reference's head had."""
    rng = np.random.default_rng(99)
    draw = lambda *shape: rng.normal(size=shape)
    norm = {"scale": 1 + 0.3 * draw(16), "bias": 0.3 * draw(16)}
    return {"norm": norm} | {f: {"w": draw(16, n), "b": draw(n)} for f, n in (("first", 16), ("second", 1))}


def with_head(lm):
    return dataclasses.replace(lm, params=lm.params | {"quality_head": jax.tree.map(jnp.float32, head())})


# (case, length of the prompt, new tokens, block, steps of a block, remaskings of a block, scale of the logits)
PRISM = [
    ("prism_0", 12, 24, 12, 10, 5, 2.0),
    ("prism_1", 16, 16, 16, 8, 11, 3.0),
    ("prism_2", 8, 24, 8, 8, 4, 2.0),
]


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name, length, new, block, steps, remasks, scale", PRISM, ids=lambda x: str(x))
def test_prism_remasks_by_its_head_as_its_reference(name, length, new, block, steps, remasks, scale):
    plan, text = mj.Plan(block=block, steps=steps), prompt(int(name[-1]), length)
    out = mj.sample(
        with_head(surer(scale)), [text], max_tokens=new, sampler=mj.rules.prism(remasks), plan=plan
    )
    *theirs, forwards = goldens()[name].tolist()
    ours = [x if y != 4 else 4 for x, y in zip(out.tokens[0].tolist(), theirs, strict=True)]
    assert ours == theirs and theirs.count(4) <= 1 and out.forwards.tolist() == [forwards]


def test_prism_needs_its_head():
    with pytest.raises(ValueError, match='lm.params is .*; allowed: params with a "quality_head"'):
        mj.sample(surer(2.0), ["x"], max_tokens=4, sampler=mj.rules.prism())


@pytest.mark.long
@pytest.mark.parametrize("pattern", slow_except(["bidirectional", "block_causal"], "block_causal"))
def test_a_rule_may_read_the_hidden_states_of_its_window(pattern):
    """They are those that the model's head reads; a function of them and the parameters may take their place."""
    lm = tiny(pattern, layers=1)

    def judge(key, view, memory, states):
        logits = states(view.hidden)
        same = jnp.max(jnp.abs(jnp.where(view.logits > -1e29, logits - view.logits, 0.0))) < 1e-4
        return mj.rules.accept(view, view.masked & same), memory

    states = lambda hidden: hidden @ lm.params["embed"].T
    plain = mj.rule(needs_hidden=True)(lambda key, view, memory: judge(key, view, memory, states))()
    headed = mj.rule(needs_hidden=lm.model.head)(
        lambda key, view, memory: judge(key, view, memory, lambda x: x)
    )()
    for rule in (plain, headed):
        out = mj.sample(lm, ["def x", "if y"], max_tokens=8, sampler=rule, plan=mj.Plan(steps=5))
        assert out.forwards.max() <= 2, (
            rule.needs_hidden
        )  # every mask at once: the states give the view's logits
    guided = mj.sample(lm, ["def x"], max_tokens=8, sampler=plain, guidance=0.0, plan=mj.Plan(steps=5))
    assert guided.forwards.max() <= 2
    blind = mj.rule()(
        lambda key, view, memory: (mj.rules.accept(view, view.masked & (view.hidden is None)), memory)
    )()
    assert mj.sample(lm, ["def x"], max_tokens=8, sampler=blind).forwards.max() <= 2


def test_heads_are_refused_by_name():
    with pytest.raises(ValueError, match="needs_hidden of a rule is 3; allowed: True, False or a function"):
        mj.rule(needs_hidden=3)(lambda key, view, memory: None)
    with pytest.raises(ValueError, match="leave_one_out of a rule is 'all'; allowed: True, False or 'joint'"):
        mj.rule(leave_one_out="all")(lambda key, view, memory: None)
    with pytest.raises(ValueError, match="rules whose leave-one-out masks see each other"):
        mj.rules.one_of([mj.rules.wino(), mj.rules.blind_editing()])
    plain = mj.rule(needs_hidden=True)(lambda key, view, memory: None)()
    with pytest.raises(ValueError, match="rules that read the same of the hidden states"):
        mj.rules.one_of([mj.rules.prism(), plain])


# -- soft masking

# (case, length of the prompt, new tokens, steps, scale of the logits, numbers of the soft masking)
SOFT = [
    ("soft_0", 12, 24, 24, 2.0, dict(scale=1.0, steepness=2.0, centre=-2.0)),
    ("soft_1", 6, 24, 12, 2.0, dict(scale=0.7, centre=-2.5)),
    ("soft_2", 9, 16, 8, 1.0, dict(scale=0.9, steepness=1.0, centre=-3.0, top_k=5)),
]


def decode_softly(lm, name, length, new, steps, **settings):
    plan = mj.Plan(block=new, steps=steps)
    text = prompt(int(name[-1]), length)
    lm = mj.soft_masking(lm, **settings) if settings else lm
    out = mj.sample(lm, [text], max_tokens=new, sampler=mj.rules.confidence(), plan=plan)
    return [*out.tokens[0].tolist(), *out.forwards.tolist()]


@pytest.mark.long
@pytest.mark.parametrize(
    "name, length, new, steps, scale, settings", slow_except(SOFT, SOFT[0]), ids=lambda x: str(x)
)
def test_masks_are_fed_as_mixtures_as_the_reference_does(name, length, new, steps, scale, settings):
    lm, theirs = surer(scale), goldens()[name].tolist()
    assert decode_softly(lm, name, length, new, steps, **settings) == theirs
    plain = decode_softly(lm, name, length, new, steps)
    assert plain != theirs
    if name == "soft_2":  # 0 changes nothing, and equal numbers share a program
        assert decode_softly(lm, name, length, new, steps, scale=0.0) == plain
        assert mj.soft_masking(lm, scale=0.3).model is mj.soft_masking(lm, scale=0.3).model


@pytest.mark.parametrize(
    "pattern, alignment",
    slow_except(
        [("block_causal", "same_position"), ("bidirectional", "shifted")], ("bidirectional", "shifted")
    ),
)
@pytest.mark.slow
def test_soft_masks_depend_on_nothing_but_their_row(pattern, alignment):
    """Beside others or alone, whatever the pass holds: also in front of a block, and with guidance and joint masks."""
    config = dataclasses.replace(tiny(pattern).model.config, alignment=alignment)
    lm = dataclasses.replace(tiny(pattern), model=models.build(config))
    soft = mj.soft_masking(lm, scale=1.0, steepness=1.0, centre=-4.0)
    texts, plan = [prompt(1, 5), prompt(2, 12)], mj.Plan(steps=4)
    for more in (dict(), dict(guidance=0.5), dict(sampler=mj.rules.wino()))[
        : 2 if alignment == "shifted" else 3
    ]:
        both = mj.sample(soft, texts, max_tokens=12, plan=plan, **more).tokens
        for text, ids in zip(texts, both, strict=True):
            assert (
                mj.sample(soft, [text], max_tokens=12, plan=plan, **more).tokens[0].tolist() == ids.tolist()
            )
    hard = mj.sample(lm, texts, max_tokens=12, plan=plan).tokens
    assert any(
        a.tolist() != b.tolist()
        for a, b in zip(hard, mj.sample(soft, texts, max_tokens=12, plan=plan).tokens)
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(scale=1.5), r"soft_masking\(scale=\) is 1.5; allowed: a number in \[0, 1\]"),
        (dict(scale=0.5, steepness=0), r"soft_masking\(steepness=\) is 0; allowed: a number, above 0"),
        (dict(scale=0.5, centre=float("nan")), r"soft_masking\(centre=\) is nan"),
        (dict(scale=0.5, top_k=0), r"soft_masking\(top_k=\) is 0; allowed: a whole number in \[1, 320\]"),
        (dict(scale="x"), r"soft_masking\(scale=\) is 'x'"),
    ],
)
def test_soft_masking_refuses_numbers_out_of_range(arguments, words):
    with pytest.raises(ValueError, match=words):
        mj.soft_masking(tiny("bidirectional"), **arguments)


def test_soft_masking_is_for_transformers_with_a_mask():
    for lm in (tiny(kind="uniform"), mj.soft_masking(tiny("bidirectional"), scale=0.5)):
        with pytest.raises(ValueError, match=r"soft_masking\(lm=\) is .*; allowed: a transformer"):
            mj.soft_masking(lm, scale=0.5)
    with pytest.raises(
        ValueError, match="sampler.rule is 'daedal'; allowed: a rule that keeps the number of tokens"
    ):
        mj.sample(mj.soft_masking(tiny("bidirectional"), scale=0.5), "x", sampler=mj.rules.daedal())
