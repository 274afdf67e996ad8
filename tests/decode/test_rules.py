"""Rules against cases computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.decode.token_stats import draw, most_probable, token_stats
from tests.decode.views import KEY, MASK, taken, view
from tests.tiny import tiny


@pytest.mark.long
def test_confidence_takes_its_share_of_the_best():
    v = view([0.1, 0.9, 0.5, 0.99], [True, True, True, False])
    assert taken(mj.rules.confidence(), v) == [MASK, 1, 2, 8]  # 3 masks over 2 steps: 2 now
    assert taken(mj.rules.confidence(), v._replace(step=jnp.asarray(1))) == [0, 1, 2, 8]


def test_the_most_probable_id_is_the_first_of_the_largest():
    logits = np.round(np.random.default_rng(0).normal(size=(3, 40, 7)), 1)  # with ties
    np.testing.assert_array_equal(most_probable(jnp.asarray(logits)), logits.argmax(-1))
    np.testing.assert_array_equal(most_probable(jnp.full((2, 7), -jnp.inf)), 0)
    assert 0 <= int(most_probable(jnp.array([1.0, jnp.nan, 2.0]))) < 3


def test_threshold_takes_all_that_are_sure_and_at_least_one():
    v = view([0.95, 0.2, 0.91, 0.99], [True, True, True, False])
    assert taken(mj.rules.threshold(0.9), v) == [0, MASK, 2, 8]
    assert taken(mj.rules.threshold(0.999), v) == [0, MASK, MASK, 8]
    assert taken(mj.rules.threshold(float(np.float32(0.91))), v) == [0, MASK, 2, 8]


@pytest.mark.long
def test_threshold_takes_a_probability_that_equals_it():
    """Fast-dLLM and dInfer keep a mask only below the threshold; near temperature 0 every argmax has probability 1."""
    sampler = mj.Sampler(mj.rules.threshold(1.0), (mj.processors.temperature(1e-6),))
    out = mj.sample(tiny(layers=1), "def x", max_tokens=8, sampler=sampler)
    assert out.forwards.tolist() == [1]


def test_entropy_bound_accepts_while_the_sum_before_stays_under_gamma():
    # sorted 0.01 0.05 0.2 1.0: sums before each 0, 0.01, 0.06, 0.26
    v = view([1, 1, 1, 1], [True] * 4, entropy=[0.2, 0.01, 1.0, 0.05])
    assert taken(mj.rules.entropy_bound(0.1), v) == [0, 1, MASK, 3]
    assert taken(mj.rules.entropy_bound(0.05), v) == [MASK, 1, MASK, 3]
    assert taken(mj.rules.entropy_bound(0.0), v) == [MASK, 1, MASK, MASK]


@pytest.mark.long
def test_entropy_bound_renoises_what_it_rejects_under_uniform_noise():
    v = view([1, 1, 1], [True] * 3, entropy=[2.0, 0.2, 2.0], uniform=True)
    proposal, _ = mj.rules.entropy_bound(0.1)(KEY, v, ())
    assert proposal.canvas.tolist() == [7, 1, 7] and proposal.answer.tolist() == [0, 1, 2]


@pytest.mark.long
def test_ancestral_unmasks_with_the_reverse_probability():
    n = 4000
    v = view([0.5] * n, [True] * n, alpha_t=jnp.asarray(0.2), alpha_s=jnp.asarray(0.4))
    v = v._replace(stats=v.stats._replace(sample=jnp.zeros(n, int)))
    share = np.mean(np.asarray(taken(mj.rules.ancestral(), v)) == 0)
    want = (0.4 - 0.2) / (1 - 0.2)
    assert abs(share - want) < 4 * np.sqrt(want * (1 - want) / n)
    assert taken(mj.rules.ancestral(), v._replace(alpha_s=jnp.asarray(1.0))) == [0] * n


@pytest.mark.long
def test_random_takes_its_share_anywhere():
    v = view([0.1] * 100, [True] * 100)
    first = np.asarray(taken(mj.rules.random(), v)) != MASK
    second, _ = mj.rules.random()(jax.random.key(1), v, ())
    assert first.sum() == 50 and not np.array_equal(first, np.asarray(second.canvas) != MASK)


def test_a_reading_is_what_the_softmax_says():
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]))
    r = token_stats(logits, jnp.asarray([1, 0]), jnp.asarray([2, 2]), jnp.asarray(0))
    assert r.argmax.tolist() == [0, 2]
    np.testing.assert_allclose(r.p_argmax, [0.5, 0.8], rtol=1e-6)
    np.testing.assert_allclose(r.p_sample, [0.2, 0.8], rtol=1e-6)
    np.testing.assert_allclose(r.p_canvas, [0.3, 0.1], rtol=1e-6)
    np.testing.assert_allclose(r.margin, [0.2, 0.7], rtol=1e-5)
    np.testing.assert_allclose(
        r.entropy[0], -(0.5 * np.log(0.5) + 0.3 * np.log(0.3) + 0.2 * np.log(0.2)), rtol=1e-6
    )
    np.testing.assert_allclose(r.p_eos, [0.5, 0.1], rtol=1e-6)


def test_draw_is_the_inverse_cdf_and_greedy_at_zero():
    logits = jnp.tile(jnp.log(jnp.asarray([0.5, 0.3, 0.2])), (5, 1))
    u = jnp.asarray([0.0, 0.49, 0.51, 0.79, 0.99])
    assert draw(logits, u, jnp.asarray(1.0)).tolist() == [0, 0, 1, 1, 2]
    assert draw(logits, u, jnp.asarray(0.0)).tolist() == [0] * 5
    # At temperature 1/2 the probabilities are 25, 9, 4 over 38.
    assert draw(logits, jnp.asarray([0.65, 0.67, 0.89, 0.9, 1.0]), jnp.asarray(0.5)).tolist() == [
        0,
        1,
        1,
        2,
        2,
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [
        lambda: mj.rules.threshold(q=1),
        lambda: mj.rules.threshold(0.9, 0.8),
        lambda: mj.rules.threshold(float("nan")),
    ],
)
def test_wrong_knobs_are_refused_by_name(make):
    with pytest.raises(ValueError, match="threshold"):
        make()
