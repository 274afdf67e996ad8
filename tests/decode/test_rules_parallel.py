"""Rules that settle what is sure enough, and those of `masked`: cases by hand, laws, the references' outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.decode.rules import combined, masked
from tests.decode.rule_checks import check_follows, check_settles, check_traces, follow, goldens, small, takes
from tests.decode.views import KEY, MASK, taken, view_of
from tests.hub.goldens_of import GOLDENS
from tests.tiny import tiny

M = MASK


@pytest.mark.long
def test_factor_wants_the_last_of_n_the_surer_the_more_there_are():
    # Bars for n = 1.. at f = 1: 1/2, 2/3, 3/4, 4/5. Sorted: 0.9, 0.76, 0.7, 0.6.
    p = [0.7, 0.9, 0.76, 0.6]
    assert takes(masked.factor(), p) == [M, 1, 2, M]
    assert takes(masked.factor(1.3, 0), p) == [0, 1, 2, M]  # bars 0.35, 0.567, 0.675, 0.74
    assert takes(masked.factor(1.3), p) == [0, 1, 2, 3]  # the last one alone fails
    assert takes(masked.factor(2.1), p) == [0, 1, 2, 3]
    assert takes(masked.factor(), [0.2, 0.3, 0.1]) == [M, 1, M]
    assert takes(masked.factor(1.0, 0), [0.99, 0.6, 0.7], [False, True, True]) == [8, M, 2]
    assert takes(masked.factor(), [0.99, 0.6, 0.7], [False, True, True]) == [8, 1, 2]


def test_a_budget_bounds_what_the_threshold_accepts_and_accumulates():
    p = [0.95, 0.99, 0.5, 0.97, 0.2, 0.92]
    rule, at = masked.budgeted_threshold(0.9, 2), lambda step: small(p, step=jnp.asarray(step))
    assert taken(rule, at(0))[:6] == [M, 1, M, 3, M, M]  # two of four
    assert taken(rule, at(1))[:6] == [0, 1, M, 3, M, 5]  # nothing was accepted in the step before
    assert taken(masked.budgeted_threshold(0.999, 3), at(0))[:6] == [M, 1, M, M, M, M]  # at least one


def test_leftmost_first_waits_with_its_rule_until_the_second_step():
    p = [0.5, 0.95, 0.6, 0.99]
    rule, at = combined.leftmost_first(masked.threshold(0.9)), lambda step: small(p, step=jnp.asarray(step))
    assert taken(rule, at(0))[:4] == [0, M, M, M] and taken(rule, at(1))[:4] == [M, 1, M, 3]
    assert rule == combined.leftmost_first(masked.threshold(0.9))  # equal rules share one compilation
    with pytest.raises(ValueError, match="leftmost_first"):
        combined.leftmost_first(masked.threshold)


@pytest.mark.long
def test_the_ends_are_accepted_last_and_have_no_share_in_a_confidence():
    """LLaDA's `confidence_eos_eot_inf`: softmax over the other ids, 0 for the ends 1 and 4."""
    logits = np.random.default_rng(0).normal(0, 3, (8, 10))
    logits[[1, 6], [1, 4]] = 9.0  # predicted ends, which `confidence` takes first
    v = view_of(logits, [MASK] * 8, [True] * 8, steps=jnp.asarray(4))
    drawn = logits[:, :MASK].argmax(-1)
    others = np.exp(np.delete(logits, [1, 4, MASK], axis=1)).sum(-1)
    score = np.where(np.isin(drawn, [1, 4]), 0.0, np.exp(logits.max(-1)) / others)
    best = np.argsort(-score)[:2]
    assert taken(masked.confidence_without([1, 4]), v) == [drawn[i] if i in best else MASK for i in range(8)]
    assert {drawn[i] for i, x in enumerate(taken(masked.confidence(), v)) if x != MASK} == {1, 4}
    left = v._replace(masked=jnp.isin(jnp.arange(8), jnp.asarray([1, 6])), steps=jnp.asarray(2))
    assert taken(masked.confidence_without([1, 4]), left)[1] == 1  # only ends are left: the leftmost


def test_scheduled_takes_all_above_p_or_its_number():
    p = [0.96, 0.5, 0.6, 0.97]  # 4 positions over 2 steps: 2 a step
    assert takes(masked.scheduled(), p) == [0, M, M, 3]
    assert takes(masked.scheduled(0.55), p) == [0, M, 2, 3]
    assert takes(masked.scheduled(0.965), p) == [0, M, M, 3]  # one is above: the schedule's two instead


def test_the_fixed_schedule_does_not_fall_when_a_block_is_ahead():
    block = jnp.arange(8) < 7
    v = small([0.5], editable=block, steps=jnp.asarray(3))
    quotas = [int(masked.fixed_share(v._replace(step=jnp.asarray(i)))) for i in range(3)]
    assert quotas == [3, 2, 2] and int(masked.even_share(v)) == 1


def test_local_leap_relaxes_around_its_anchors():
    p = [0.95, 0.8, 0.5, 0.8, 0.2, 0.2, 0.2, 0.8]
    assert takes(masked.local_leap(radius=3), p) == [0, 1, M, 3, M, M, M, M]
    assert takes(masked.local_leap(radius=2), p) == [0, 1, M, M, M, M, M, M]
    assert takes(masked.local_leap(relaxed=0.15, radius=1), p) == [0, 1, M, M, M, M, M, M]
    # What is settled already is no anchor; without one, the best alone.
    assert takes(masked.local_leap(), [*p[:7], 0.85], [False] + [True] * 7) == [8, M, M, M, M, M, M, 7]
    both = [0.76, 0.9, 0.2, 0.2, 0.9, 0.2, 0.76]
    assert takes(masked.local_leap(radius=2), both) == [0, 1, M, M, 4, M, 6]


def test_hierarchical_takes_the_best_of_each_run():
    p, runs = [0.3, 0.5, 0.45, 0.99, 0.35, 0.2], [True, True, True, False, True, True]
    assert takes(masked.hierarchical(), p, runs) == [M, 1, M, 8, M, M]  # the second run's best is below 0.4
    assert takes(masked.hierarchical(low=0.3), p, runs) == [M, 1, M, 8, 4, M]
    assert takes(masked.hierarchical(0.44), p, runs) == [M, 1, 2, 8, M, M]
    assert takes(masked.hierarchical(low=0.6), p, runs) == [M, 1, M, 8, M, M]  # the best of all, always
    late = takes(masked.hierarchical(), [0.99, 0.5, 0.45, 0.99, 0.6], [False, True, True, False, True])
    assert late == [8, 1, M, 8, 4]


def test_first_hitting_draws_one_anywhere_and_the_rest_at_last():
    v = small([0.9, 0.1, 0.5, 0.2], [True, True, False, True], steps=jnp.asarray(5))
    hit = jax.jit(jax.vmap(lambda key: masked.first_hitting()(key, v, ())[0].canvas))
    canvases = np.asarray(hit(jax.random.split(KEY, 3000)))
    drawn = canvases[:, [0, 1, 3]] != M
    assert (drawn.sum(1) == 1).all() and (canvases[:, 2] == 8).all()
    np.testing.assert_allclose(drawn.mean(0), 1 / 3, atol=4 * np.sqrt(2 / 9 / 3000))
    assert taken(masked.first_hitting(), v._replace(step=jnp.asarray(4)))[:4] == [0, 1, 8, 3]


def test_sequential_takes_the_first_masks_of_the_whole_blocks_share():
    v = small([0.1, 0.9, 0.5, 0.2, 0.3], [False, True, True, False, True], steps=jnp.asarray(2))
    first = lambda rule, v=v: taken(rule, v)[:5]
    assert first(masked.sequential()) == [8, 1, 2, 8, M]  # two of three, the remainder first
    assert first(masked.sequential(length=8)) == [8, 1, 2, 8, 4]  # 8 / 2 steps
    assert first(masked.sequential(), v._replace(step=jnp.asarray(1))) == [8, 1, M, 8, M]
    assert first(masked.scheduled(1.0, length=3)) == [8, 1, 2, 8, M]


@pytest.mark.slow
def test_the_cached_reverse_process_makes_no_idle_pass():
    """Each of 8 masks falls in one of the steps, all alike: a pass for each step in which one does."""
    lm, rows = tiny("bidirectional"), 1024
    sampled = lambda steps: mj.sample(
        lm, [[5, 6, 7]] * rows, max_tokens=8, seed=3, sampler=masked.ancestral_cache(),
        plan=mj.Plan(block=64, steps=steps), logit_bias={lm.model.config.eos: -1e9},
    )  # fmt: skip
    passes = sampled(4).forwards
    # Ways in which 8 masks fall in exactly k of 4 steps, of 4^8.
    chance = np.array([4 * 1, 6 * 254, 4 * 5796, 40824]) / 4**8
    found = np.bincount(passes, minlength=5)[1:] / rows
    np.testing.assert_allclose(found, chance, atol=4 * np.sqrt(0.25 / rows))
    assert (sampled(1000).forwards <= 8).all()
    with pytest.raises(ValueError, match="sampler.rule is 'ancestral_cache'; allowed: ancestral"):
        mj.sample(mj.load(GOLDENS / "gidd"), [5], max_tokens=4, sampler=masked.ancestral_cache())


def test_under_uniform_noise_the_share_is_what_should_stand():
    p = [0.1, 0.9, 0.5, 0.99, 0.3, 0.2, 0.6, 0.4]
    v = small(p, uniform=True, steps=jnp.asarray(4))
    stand = [int(masked.even_share(v._replace(step=jnp.asarray(i)))) for i in range(4)]
    assert stand == [2, 4, 6, 8]
    assert taken(masked.confidence(), v._replace(step=jnp.asarray(1))) == [7, 1, 2, 3, 7, 7, 6, 7]


@pytest.mark.long
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "name, rule, steps",
    [
        ("local_leap", masked.local_leap(0.9, 0.5, 2), 20),
        ("hierarchical", masked.hierarchical(0.9, 0.4), 20),
        ("scheduled", masked.scheduled(0.7), 8),
        ("factor", masked.factor(), 20),
    ],
)
def test_they_decode_as_their_references_do(name, rule, steps):
    check_follows(rule, name, steps)


def test_factor_may_leave_the_last_mask_to_the_next_step():
    """If only the least confident mask fails the test, the reference still accepts it."""
    kept, waits = goldens(), 0
    for logits, theirs in zip(kept["logits"], kept["factor"], strict=True):
        for ours, reference, before in follow(masked.factor(1.0, 0), logits, theirs, 20):
            if ours != reference:
                waiting = [i for i, (a, b) in enumerate(zip(ours, reference)) if a != b]
                assert len(waiting) == 1 and before.count(11) > 1 and 11 not in reference
                waits += 1
    assert waits == 3  # the last step of each decoding


RULES = [
    (masked.confidence(), 3), (masked.random(), 3), (masked.ancestral(), 3), (masked.first_hitting(), 3),
    (masked.first_hitting(), 5), (masked.threshold(0.5), 5), (masked.factor(), 5), (masked.scheduled(0.5), 3),
    (masked.local_leap(0.6, 0.3), 5), (masked.hierarchical(0.7), 5),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("rule, steps", RULES, ids=lambda x: getattr(x, "name", None))
def test_they_settle_every_mask_and_touch_nothing_else(rule, steps):
    check_settles(rule, steps)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("rule", [rule for rule, _ in RULES], ids=lambda x: x.name)
def test_the_machine_can_carry_them(rule):
    check_traces(rule)
