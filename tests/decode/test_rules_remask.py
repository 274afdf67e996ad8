"""Rules that put masks back, against their equations and cases computed by hand."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.decode import stopping
from mercury_jax.decode.defaults import complete_sampler
from mercury_jax.decode.rules import remask
from mercury_jax.noise import uniform
from tests.decode.rule_loop import act, check, decode, table
from tests.decode.views import KEY, MASK, view, view_of

N = 6000
EVERY = [remask.remdm_cap(0.3), remask.remdm_rescale(0.5), remask.remdm_confidence(), remask.remdm_loop(0.2)]
name = lambda rule: rule.name


def taken(rule, v, memory=()):
    return act(KEY, rule, v, memory)[0].canvas.tolist()


@functools.cache
def half_masked():
    half = np.arange(N) < N // 2
    return view_of(np.zeros((N, 10)), np.where(half, MASK, 8), half, temperature=1.0)


def many(**more):
    """N positions, the first half masks, the second half decided to 8."""
    return half_masked()._replace(**{k: jnp.asarray(v) for k, v in more.items()})


def shares(rule, v):
    """(share of the masks that were decided, share of the decided that were masked)."""
    canvas = np.asarray(act(KEY, rule, v)[0].canvas)
    half = N // 2
    return np.mean(canvas[:half] != MASK), np.mean(canvas[half:] == MASK)


def near(share, want, n):
    return abs(share - want) <= 4 * np.sqrt(max(want * (1 - want), 1e-9) / n)


@pytest.mark.long
@pytest.mark.parametrize(
    "rule, step, steps, sigma",
    [
        (remask.remdm_cap(0.3, 0.0), 2, 6, 0.3),  # alpha 0.4 -> 0.6: sigma_max is 1
        (remask.remdm_cap(0.3, 0.0), 8, 11, 0.125),  # alpha 0.8 -> 0.9: sigma_max = 0.1 / 0.8 is less
        (remask.remdm_rescale(0.5, 0.0), 8, 11, 0.0625),
        (remask.remdm_rescale(0.5, 0.0), 2, 11, 0.5),
    ],
)
def test_remdm_follows_its_equation(rule, step, steps, sigma):
    alpha_t, alpha_s = step / (steps - 1), (step + 1) / (steps - 1)
    unmasked, masked = shares(rule, many(step=step, steps=steps))
    assert near(unmasked, (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t), N // 2)
    assert near(masked, sigma, N // 2)


def test_remdm_with_no_doubt_is_ancestral():
    unmasked, masked = shares(remask.remdm_cap(0.0, 0.0), many(step=2, steps=6))  # alpha 0.4 -> 0.6
    assert masked == 0 and near(unmasked, 0.2 / 0.6, N // 2)


@pytest.mark.long
def test_confidence_doubts_in_proportion():
    v = view_of(np.zeros((4, 10)), [1, 2, 3, MASK], [False, False, False, True])
    v = v._replace(
        step=jnp.asarray(5), steps=jnp.asarray(11), editable=jnp.array([True, True, False, True])
    )  # alpha 0.5 -> 0.6
    memory = jnp.asarray([0.9, 0.1, 0.0, 1.0])
    rule = remask.remdm_confidence(eps=0.0)
    step = jax.jit(jax.vmap(lambda key, v: rule(key, v, memory)[0].canvas, (0, None)))
    shares = (np.asarray(step(jax.random.split(KEY, 4000), v)) == MASK).mean(0)
    weight = np.exp([-0.9, -0.1]) / np.exp([-0.9, -0.1]).sum()
    assert near(shares[0], 0.8 * weight[0], 4000) and near(shares[1], 0.8 * weight[1], 4000)
    assert shares[2] == 0  # given: neither masked nor counted
    assert near(1 - shares[3], 0.2 + 0.0, 4000)  # sigma is 0 at a mask: (0.6 - 0.5) / 0.5


def test_confidence_remembers_what_each_token_was_settled_with():
    v = view(
        [0.3, 0.6, 0.2], [True, True, False], step=jnp.asarray(1)
    )  # the last of 2 steps decides both masks
    _, memory = act(KEY, remask.remdm_confidence(), v, jnp.asarray([1.0, 1.0, 0.7]))
    np.testing.assert_allclose(memory, [0.3, 0.6, 0.7], rtol=1e-6)


def test_the_loop_keeps_its_own_schedule():
    loop = lambda step, steps, eta=0.02: shares(remask.remdm_loop(eta, eps=0.0), many(step=step, steps=steps))
    unmasked, masked = loop(12, 21)  # t = 0.4
    assert near(masked, 0.02, N // 2) and near(unmasked, 0.02 * 0.9 / 0.1, N // 2)
    unmasked, masked = loop(12, 21, 0.6)  # eta is not capped: sigma_max would be 1 / 9
    assert near(masked, 0.6, N // 2) and unmasked == 1
    unmasked, masked = loop(2, 11)  # t = 0.8, alpha 0.4 -> 0.6
    assert masked == 0 and near(unmasked, 0.2 / 0.6, N // 2)
    unmasked, masked = loop(4, 11)  # t = 0.6, s = 0.5 lies beyond t_on: alpha 0.8 -> 1
    assert masked == 0 and unmasked == 1
    unmasked, masked = loop(48, 51)  # t = 0.04, alpha 0.92 -> 0.96
    assert masked == 0 and near(unmasked, 0.5, N // 2)


def test_remdms_last_step_takes_the_argmax_and_remasks_nothing():
    v = many(step=4, steps=5)
    v = v._replace(stats=v.stats._replace(argmax=jnp.full(N, 5), sample=jnp.full(N, 6)))
    for rule in EVERY:
        memory = jnp.ones(N) if rule.name == "remdm_confidence" else ()
        canvas = np.asarray(act(KEY, rule, v, memory)[0].canvas)
        assert (canvas[: N // 2] == 5).all() and (canvas[N // 2 :] == 8).all(), rule.name


@pytest.mark.parametrize("rule", EVERY, ids=name)
def test_remdm_keeps_the_marginals_of_the_forward_process(rule):
    """At every time the share of masks is 1 - alpha, however much was masked again; the given stay."""
    steps, size = 11, 4000
    editable = np.arange(size) % 10 > 0
    canvas = np.where(editable, MASK, 1)
    seen = decode(rule, canvas, editable, table(0, size), steps)
    check(seen, canvas, editable)
    assert len(seen) == steps
    before = 0.0
    for i, step in enumerate(seen[:-1]):
        alpha = (i + 1) / 10
        if rule.name == "remdm_loop":  # a line up to 1 at t = 0.5, then eta 0.2: every mask is filled
            alpha = (i + 1) / 5 if i < 5 else 0.8 * before + 1 - before
        assert near(np.mean(step.canvas[editable] == MASK), 1 - alpha, editable.sum()), i
        before = alpha
    assert MASK not in seen[-1].canvas
    again = [np.sum((a.canvas != MASK) & (b.canvas == MASK)) for a, b in itertools.pairwise(seen)]
    assert sum(again) > 0


def test_a_token_masked_again_stays_the_answer():
    proposal, _ = act(KEY, remask.remdm_cap(1.0), many(step=1, steps=5))
    assert proposal.canvas[N // 2 :].tolist() == [MASK] * (N // 2)
    assert proposal.answer[N // 2 :].tolist() == [8] * (N // 2)


def test_remasking_is_refused_for_uniform_noise():
    with pytest.raises(ValueError, match="remdm_cap"):
        complete_sampler(remask.remdm_cap(), uniform(10))


# -- WINO


def drafting(p, masked, blind, **more):
    v = view(p, masked, **more)
    everywhere = jnp.ones(len(p), bool)
    return v._replace(
        editable=everywhere, leave_one_out=v.leave_one_out._replace(p_canvas=jnp.asarray(blind, jnp.float32))
    )


@pytest.mark.parametrize("masks, settled", [(40, 20), (20, 14), (10, 7), (6, 5), (4, 4)])
def test_wino_caps_its_draft(masks, settled):
    v = view(np.linspace(0.7, 0.9, 40), np.arange(40) < masks)
    v = v._replace(stats=v.stats._replace(sample=jnp.zeros(40, int)))
    proposal, memory = act(KEY, remask.wino(), v, jnp.asarray(30))
    where = np.flatnonzero(proposal.canvas == 0)
    assert where.tolist() == list(range(masks - settled, masks)) and memory == settled


def test_wino_drafts_at_least_one():
    assert taken(remask.wino(), view([0.1, 0.5, 0.3], [True] * 3), jnp.asarray(30)) == [MASK, 1, MASK]


def test_wino_masks_again_what_the_blind_reader_doubts():
    p, masked = [0.7, 0.8, 0, 0, 0, 0], [True, True, False, False, False, False]
    v = drafting(p, masked, [0, 0, 0.95, 0.5, 0.89, 0.2])
    assert taken(remask.wino(), v, jnp.asarray(30)) == [0, 1, 8, MASK, MASK, MASK]
    # fewer than the step before had drafted, the most doubtful first
    assert taken(remask.wino(), v, jnp.asarray(3)) == [0, 1, 8, MASK, 8, MASK]
    assert taken(remask.wino(), v, jnp.asarray(1)) == [0, 1, 8, 8, 8, 8]
    proposal, memory = act(KEY, remask.wino(), v, jnp.asarray(30))
    assert proposal.answer.tolist() == [0, 1, 8, 8, 8, 8] and memory == 2
    given = v._replace(editable=jnp.array([True, True, True, False, True, True]))
    assert taken(remask.wino(), given, jnp.asarray(30)) == [0, 1, 8, 8, MASK, MASK]


def test_wino_verifies_nothing_where_it_drafted_one_token():
    v = drafting([0.7, 0.5, 0, 0], [True, True, False, False], [0, 0, 0.1, 0.1])
    assert taken(remask.wino(), v, jnp.asarray(30)) == [0, MASK, 8, 8]


@pytest.mark.parametrize("scale", [0.1, 20.0])
def test_wino_ends_within_as_many_steps_as_masks(scale):
    """Even where the blind reader doubts everything."""
    canvas, editable = [1] + [MASK] * 11, [False] + [True] * 11
    nobody = lambda canvas: -50.0 * jax.nn.one_hot(canvas, 10)
    seen = decode(remask.wino(), canvas, editable, table(2, 12, scale), 30, leave_one_out=nobody)
    check(seen, canvas, editable)
    assert len(seen) <= 11 and MASK not in seen[-1].canvas
    assert remask.wino().stopping is None and remask.wino().leave_one_out
    again = [np.any((a.canvas != MASK) & (b.canvas == MASK)) for a, b in itertools.pairwise(seen)]
    assert any(again) == (scale == 20.0)  # one token a step leaves nothing to verify


def test_filled_sees_a_token_that_was_masked_again():
    v = drafting([0.9, 0.9, 0, 0], [True, True, False, False], [0, 0, 0.1, 0.95])
    proposal, _ = act(KEY, remask.wino(), v, jnp.asarray(30))
    assert proposal.canvas.tolist() == [0, 1, MASK, 8]
    assert not stopping.filled()(v, proposal, ())[0]
