"""Rules against cases computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.decode import shape
from mercury_jax.decode.read import draw, read
from mercury_jax.types import View

MASK, KEY = 9, jax.random.key(0)


def view(p_sample, masked, entropy=None, uniform=False, **more):
    """A row of a canvas whose position i would draw token i."""
    n = len(p_sample)
    p = jnp.asarray(p_sample, jnp.float32)
    ids = jnp.arange(n)
    masked = jnp.asarray(masked)
    reading = read(jnp.zeros((n, 10)), ids, ids)._replace(
        sample=ids, argmax=ids, p_sample=p, entropy=jnp.asarray(entropy if entropy else p, jnp.float32)
    )
    canvas = jnp.where(masked, MASK, 8)
    fields = dict(
        canvas=canvas, reading=reading, logits=jnp.zeros((n, 10)), editable=masked, masked=masked,
        n=jnp.asarray(n), room=jnp.asarray(0), noise=jnp.full(n, 7 if uniform else MASK), t=jnp.asarray(1.0),
        s=jnp.asarray(0.5), keep_t=jnp.asarray(0.0), keep_s=jnp.asarray(0.5), step=jnp.asarray(0), steps=jnp.asarray(2),
    )  # fmt: skip
    return View(**(fields | more))


def taken(rule, v):
    proposal, _ = rule(KEY, v, ())
    return proposal.canvas.tolist()


def test_confidence_takes_its_share_of_the_best():
    v = view([0.1, 0.9, 0.5, 0.99], [True, True, True, False])
    assert taken(mj.rules.confidence(), v) == [MASK, 1, 2, 8]  # 3 masks over 2 steps: 2 now
    assert taken(mj.rules.confidence(), v._replace(step=jnp.asarray(1))) == [0, 1, 2, 8]


def test_threshold_takes_all_that_are_sure_and_at_least_one():
    v = view([0.95, 0.2, 0.91, 0.99], [True, True, True, False])
    assert taken(mj.rules.threshold(0.9), v) == [0, MASK, 2, 8]
    assert taken(mj.rules.threshold(0.999), v) == [0, MASK, MASK, 8]


def test_entropy_bound_accepts_while_the_sum_before_stays_under_gamma():
    # sorted 0.01 0.05 0.2 1.0: sums before each 0, 0.01, 0.06, 0.26
    v = view([1, 1, 1, 1], [True] * 4, entropy=[0.2, 0.01, 1.0, 0.05])
    assert taken(mj.rules.entropy_bound(0.1), v) == [0, 1, MASK, 3]
    assert taken(mj.rules.entropy_bound(0.05), v) == [MASK, 1, MASK, 3]
    assert taken(mj.rules.entropy_bound(0.0), v) == [MASK, 1, MASK, MASK]


def test_entropy_bound_renoises_what_it_rejects_under_uniform_noise():
    v = view([1, 1, 1], [True] * 3, entropy=[2.0, 0.2, 2.0], uniform=True)
    proposal, _ = mj.rules.entropy_bound(0.1)(KEY, v, ())
    assert proposal.canvas.tolist() == [7, 1, 7] and proposal.answer.tolist() == [0, 1, 2]


def test_ancestral_unmasks_with_the_reverse_probability():
    n = 4000
    v = view([0.5] * n, [True] * n, keep_t=jnp.asarray(0.2), keep_s=jnp.asarray(0.4))
    v = v._replace(reading=v.reading._replace(sample=jnp.zeros(n, int)))
    share = np.mean(np.asarray(taken(mj.rules.ancestral(), v)) == 0)
    want = (0.4 - 0.2) / (1 - 0.2)
    assert abs(share - want) < 4 * np.sqrt(want * (1 - want) / n)
    assert taken(mj.rules.ancestral(), v._replace(keep_s=jnp.asarray(1.0))) == [0] * n


def test_random_takes_its_share_anywhere():
    v = view([0.1] * 100, [True] * 100)
    first = np.asarray(taken(mj.rules.random(), v)) != MASK
    second, _ = mj.rules.random()(jax.random.key(1), v, ())
    assert first.sum() == 50 and not np.array_equal(first, np.asarray(second.canvas) != MASK)


def test_a_reading_is_what_the_softmax_says():
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]))
    r = read(logits, jnp.asarray([1, 0]), jnp.asarray([2, 2]), (0,))
    assert r.argmax.tolist() == [0, 2]
    np.testing.assert_allclose(r.p_argmax, [0.5, 0.8], rtol=1e-6)
    np.testing.assert_allclose(r.p_sample, [0.2, 0.8], rtol=1e-6)
    np.testing.assert_allclose(r.p_canvas, [0.3, 0.1], rtol=1e-6)
    np.testing.assert_allclose(r.margin, [0.2, 0.7], rtol=1e-5)
    np.testing.assert_allclose(
        r.entropy[0], -(0.5 * np.log(0.5) + 0.3 * np.log(0.3) + 0.2 * np.log(0.2)), rtol=1e-6
    )
    np.testing.assert_allclose(r.p_ids[:, 0], [0.5, 0.1], rtol=1e-6)


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


def test_shapers_keep_what_they_should():
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]]))
    any_view = view([1], [True])
    kept = lambda part: (part(logits, any_view) > -1e20).tolist()[0]
    assert kept(shape.top_k(2)) == [True, True, False, False]
    assert kept(shape.top_p(0.7)) == [True, True, False, False]
    assert kept(shape.top_p(0.81)) == [True, True, True, False]
    assert kept(shape.top_p(0.0)) == [True, False, False, False]
    assert kept(shape.min_p(0.2)) == [True, True, True, False]
    np.testing.assert_allclose(shape.temperature(2.0)(logits, any_view), logits / 2)
    cold = shape.cooling(0.4, 0.8)(logits, view([1], [True], t=jnp.asarray(0.0)))
    np.testing.assert_allclose(cold, logits / 0.4, rtol=1e-6)


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
