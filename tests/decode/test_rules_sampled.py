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
