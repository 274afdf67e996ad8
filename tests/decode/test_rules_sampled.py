"""Rules through `mj.sample` with a model that attends, against their references on the same weights.

The model is `tiny("bidirectional")` with a final norm that makes it surer; goldens/README.md tells how the references
decoded it.
"""

import collections
import dataclasses
import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import mercury_jax as mj
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


@pytest.mark.parametrize("name", REMDM)
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
