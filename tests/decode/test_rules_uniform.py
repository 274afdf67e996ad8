"""Rules for uniform noise: DiffusionGemma's sampler, and the Psi-sampler against Bayes' rule."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax import noise
from mercury_jax.decode.defaults import complete_sampler
from mercury_jax.decode.rules import uniform
from mercury_jax.decode.token_stats import forbid, token_stats
from tests.decode.rule_loop import act
from tests.decode.views import KEY, MASK, view


def test_entropy_bound_answers_the_argmax_everywhere_under_uniform_noise():
    v = view([1, 1, 1, 1], [True, True, True, False], entropy=[0.05, 2.0, 0.2, 0.0], uniform=True)
    v = v._replace(stats=v.stats._replace(argmax=jnp.array([3, 4, 5, 6]), sample=jnp.array([1, 2, 3, 4])))
    proposal, _ = act(KEY, uniform.entropy_bound(0.1), v)
    assert proposal.canvas.tolist() == [1, 7, 3, 8]  # drawn, fresh noise, drawn, given
    assert proposal.answer.tolist() == [3, 4, 5, 8]


def test_entropy_bound_answers_its_draws_under_masked_noise():
    v = view([1, 1, 1], [True] * 3, entropy=[0.05, 2.0, 0.2])
    v = v._replace(
        stats=v.stats._replace(
            argmax=jnp.array([3, 4, 5]), sample=jnp.array([1, 2, 3]), p_canvas=jnp.zeros(3)
        )
    )
    proposal, _ = act(KEY, uniform.entropy_bound(0.1), v)
    assert proposal.canvas.tolist() == [1, MASK, 3] and proposal.answer.tolist() == [1, 4, 3]


def test_noise_that_happens_to_stand_there_already_is_no_mask():
    v = view([1], [True], uniform=True)
    assert bool(uniform.is_uniform(v._replace(canvas=jnp.array([7]))))
    masked = view([1], [True])
    masked = masked._replace(stats=masked.stats._replace(p_canvas=jnp.zeros(1)))
    assert not bool(uniform.is_uniform(masked))


def test_diffusion_gemma_is_what_its_config_says():
    sampler = complete_sampler(uniform.diffusion_gemma(), noise.uniform(10))
    assert sampler.rule.params == {"gamma": 0.1} and sampler.temperature == 1.0
    assert [(p.name, p.params) for p in sampler.processors] == [("cooling", {"last": 0.4, "first": 0.8})]
    assert sampler.stopping is not None and sampler.stopping.name == "steady"
    assert sampler.stopping.params == {"entropy": 0.005, "patience": 1}
    # Step n of N, counted down: logits / (0.4 + 0.4 n / N), so 0.8 in the first and 0.4 + 0.4 / N in the last.
    v = view([1], [True])
    logits = jnp.ones((1, 10))
    got = [float(sampler.processors[0](logits, v._replace(t=jnp.asarray(n / 4)))[0, 0]) for n in (4, 1)]
    np.testing.assert_allclose(got, [1 / 0.8, 1 / 0.5], rtol=1e-6)


def test_steady_is_diffusion_gemmas_stop():
    """Argmax answers of two successive passes agree, and the mean entropy is below, not at, the bound."""
    stop = uniform.diffusion_gemma().stopping
    assert stop is not None
    memory, done = stop.init(jnp.zeros(2, int), 10), []
    passes = [([1, 2], 0.001), ([1, 3], 0.001), ([1, 3], 0.006), ([1, 3], 0.005), ([1, 3], 0.0049)]
    for answer, entropy in passes:
        v = view([1, 1], [True, True], entropy=[entropy, entropy], uniform=True)
        v = v._replace(stats=v.stats._replace(argmax=jnp.asarray(answer)))
        proposal, _ = act(KEY, uniform.entropy_bound(0.1), v)
        over, memory = stop(v, proposal, memory)
        done.append(bool(over))
    assert done == [False, False, False, False, True]


# -- the Psi-sampler


def bayes(prior, xt, alpha_t, alpha_s, ids):
    """p(x_s | x_t) for p(x_0) = prior, by summing the joint distribution over x_0."""
    n, a = len(ids), alpha_t / alpha_s
    step = lambda new, old, keep: keep * (new == old) + (1 - keep) / n
    joint = {s: sum(prior[x] * step(s, x, alpha_s) for x in ids) * step(xt, s, a) for s in ids}
    return np.array([joint[s] for s in ids]) / sum(joint.values())


@pytest.mark.parametrize("alpha_t, alpha_s", [(0.3, 0.5), (0.0, 0.1), (0.6, 1.0), (0.5, 0.5)])
def test_the_bridge_is_bayes_rule(alpha_t, alpha_s):
    ids = range(4)
    for x0, xt in itertools.product(ids, ids):
        old, new = uniform.bridge(
            jnp.asarray(x0 == xt), jnp.asarray(alpha_t), jnp.asarray(alpha_s), jnp.asarray(4)
        )
        got = np.full(4, (1 - old - new) / 4)
        got[xt] += old
        got[x0] += new
        prior = np.eye(4)[x0]
        np.testing.assert_allclose(got, bayes(prior, xt, alpha_t, alpha_s, ids), atol=1e-6)


IDS, P, XT, N = [0, 1, 2, 3], np.array([0.5, 0.3, 0.15, 0.05]), 1, 20000


def spread(rule, alpha_t, alpha_s):
    """How often each id follows x_t = 1, in N positions whose model says P; ids 4.. are impossible."""
    logits = forbid(jnp.tile(jnp.log(jnp.pad(P, (0, 6), constant_values=1e-9)), (N, 1)), tuple(range(4, 10)))
    draw, fill = jax.random.split(jax.random.key(3))
    canvas = jnp.full(N, XT)
    sample = jax.random.categorical(draw, logits).astype(jnp.int32)
    fresh = jax.random.randint(fill, (N,), 0, 4)
    v = view([0.0], [True], uniform=True)._replace(
        canvas=canvas,
        stats=token_stats(logits, canvas, sample, jnp.asarray(-1)),
        logits=logits,
        noise=fresh,
        editable=jnp.ones(N, bool),
        masked=jnp.ones(N, bool),
        alpha_t=jnp.asarray(alpha_t),
        alpha_s=jnp.asarray(alpha_s),
    )
    proposal, _ = act(KEY, rule, v)
    assert proposal.answer.tolist() == [0] * N  # the argmax, whatever stands there
    return np.bincount(np.asarray(proposal.canvas), minlength=4) / N


@pytest.mark.long
@pytest.mark.parametrize("kappa, own", [(1.0, 0.0), (0.0, 0.0), (0.7, 0.0), (1.0, 1.0), (0.5, 1.0)])
def test_predictor_corrector_is_the_exact_mixture(kappa, own):
    alpha_t, alpha_s = 0.3, 0.5
    likelihood = np.where(np.arange(4) == XT, alpha_t, 0) + (1 - alpha_t) / 4
    posterior = P * likelihood / (P @ likelihood) if own else P  # p(x_0 | x_t)
    ancestral = sum(posterior[x] * bayes(np.eye(4)[x], XT, alpha_t, alpha_s, IDS) for x in IDS)
    if own:  # DUO's form: Bayes' rule with the model's output as the prior
        np.testing.assert_allclose(ancestral, bayes(P, XT, alpha_t, alpha_s, IDS), atol=1e-12)
    corrected = alpha_s * posterior + (1 - alpha_s) / 4
    want = kappa * ancestral + (1 - kappa) * corrected
    got = spread(uniform.predictor_corrector(kappa, own=own), alpha_t, alpha_s)
    assert np.all(np.abs(got - want) < 4 * np.sqrt(want * (1 - want) / N))


def test_the_last_step_keeps_nothing_but_predictions():
    got = spread(uniform.predictor_corrector(0.5), 0.1, 1.0)
    assert np.all(np.abs(got - P) < 4 * np.sqrt(P * (1 - P) / N))


def test_predictor_corrector_leaves_the_given_alone():
    v = view([0.5] * 3, [True, True, True], uniform=True)._replace(editable=jnp.array([True, False, True]))
    proposal, _ = act(KEY, uniform.predictor_corrector(0.0), v)
    assert proposal.canvas[1] == MASK and proposal.answer[1] == MASK  # what stood there, here an odd id


def test_predictor_corrector_is_for_uniform_noise_and_uses_every_step():
    with pytest.raises(ValueError, match="predictor_corrector"):
        complete_sampler(uniform.predictor_corrector(), noise.absorbing(9))
    stop = complete_sampler(uniform.predictor_corrector(), noise.uniform(10)).stopping
    assert stop is not None and stop.name == "never"
