"""Noise: the ends of every schedule, its derivative, and what corruption may change."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import noise
from mercury_jax.config import NoiseConfig
from mercury_jax.training import data, objectives, recipe

SCHEDULES = [noise.linear(), noise.cosine(), noise.polynomial(2.0), noise.polynomial(0.5)]
VOCAB, MASK = 12, 11
PROCESSES = {
    "absorbing": noise.absorbing(MASK),
    "uniform": noise.uniform(VOCAB, forbidden=(0, MASK)),
    "hybrid": noise.hybrid(VOCAB, MASK, 0.3, forbidden=(0,)),
}


@pytest.mark.parametrize("alpha", [*SCHEDULES, PROCESSES["hybrid"].alpha])
def test_schedules_fall_from_one_to_zero(alpha):
    t = jnp.linspace(0.0, 1.0, 101)
    a = np.asarray(alpha(t))
    assert a[0] == pytest.approx(1.0, abs=1e-5) and a[-1] == pytest.approx(0.0, abs=1e-6)
    assert (np.diff(a) < 0).all()


@pytest.mark.parametrize("alpha", SCHEDULES)
def test_the_derivative_equals_finite_differences(alpha):
    t = jnp.linspace(0.1, 0.9, 9)
    value, slope = noise.rate(alpha, t)
    np.testing.assert_allclose(value, alpha(t))
    np.testing.assert_allclose(slope, (alpha(t + 1e-2) - alpha(t - 1e-2)) / 2e-2, atol=2e-3)


@pytest.mark.parametrize("kind", PROCESSES)
def test_what_is_not_editable_is_never_noised(kind):
    x0 = jax.random.randint(jax.random.key(0), (64, 64), 1, MASK)
    editable = jax.random.bernoulli(jax.random.key(1), 0.5, x0.shape)
    out = noise.corrupt(jax.random.key(2), PROCESSES[kind], x0, jnp.ones(x0.shape), editable)
    np.testing.assert_array_equal(out.xt[~editable], x0[~editable])
    assert bool(out.changed[editable].all()) and not bool(out.changed[~editable].any())


@pytest.mark.parametrize("kind", PROCESSES)
def test_at_time_zero_nothing_and_at_time_t_its_share_is_changed(kind):
    c = PROCESSES[kind]
    x0 = jnp.ones((200, 200), jnp.int32)
    everywhere = jnp.ones(x0.shape, bool)
    assert not noise.corrupt(jax.random.key(0), c, x0, jnp.zeros(x0.shape), everywhere).changed.any()
    t = jnp.full(x0.shape, 0.3)
    share = float(noise.corrupt(jax.random.key(0), c, x0, t, everywhere).changed.mean())
    want = 1.0 - float(c.alpha(jnp.asarray(0.3)))
    assert abs(share - want) < 4 * np.sqrt(want * (1 - want) / x0.size)


def test_priors_at_time_one():
    ones = jnp.ones((20_000,))
    assert (PROCESSES["absorbing"].prior(jax.random.key(0), ones) == MASK).all()
    assert (PROCESSES["hybrid"].prior(jax.random.key(0), ones) == MASK).all()
    drawn = np.asarray(PROCESSES["uniform"].prior(jax.random.key(0), ones))
    counts = np.bincount(drawn, minlength=VOCAB)
    assert counts[0] == counts[MASK] == 0
    expected = len(drawn) / 10
    assert ((counts[1:MASK] - expected) ** 2 / expected).sum() < 27.9  # chi-square, 9 degrees, p = 0.001


def test_hybrid_noise_has_its_uniform_share_at_one_half():
    x0 = jnp.full((300, 300), 5)
    out = noise.corrupt(
        jax.random.key(0), PROCESSES["hybrid"], x0, jnp.full(x0.shape, 0.5), jnp.ones(x0.shape, bool)
    )
    uniform = float((out.changed & (out.xt != MASK)).mean())
    assert abs(uniform - 0.3) < 0.01  # of all tokens: GIDD's p_u
    assert abs(float((out.xt == MASK).mean()) - 0.35) < 0.01


def test_times_are_uniform_and_every_run_of_them_is_spread_evenly():
    t = np.stack([noise.times(jax.random.key(i), 64) for i in range(200)])
    assert abs(t.mean() - 0.5) < 0.01 and t.min() >= 1e-4 and t.max() <= 1.0
    for start, count in ((0, 8), (13, 16), (30, 34)):
        gaps = np.diff(np.sort(t[0, start : start + count]))
        assert gaps.max() < 2.7 / count  # iid times would leave gaps of about ln(n) / n and more


@pytest.mark.parametrize(
    ("make", "named"),
    [(lambda: NoiseConfig(schedule="sine"), "schedule"),
     (lambda: noise.uniform(3, forbidden=(0, 1, 2)), "forbidden")],
)  # fmt: skip
def test_bad_noise_is_refused_by_name(make, named):
    with pytest.raises(ValueError, match=named):
        make()


def test_configs_build_the_noise_that_they_name():
    for kind in ("absorbing", "uniform", "hybrid"):
        for schedule in ("linear", "cosine", "polynomial"):
            c = noise.build(NoiseConfig(kind=kind, schedule=schedule), VOCAB, MASK, (0,))
            assert set(c.forbidden) == {0, MASK} and (c.mask == MASK) == (kind != "uniform")


@pytest.mark.parametrize(
    ("schedule", "words"),
    [(lambda t: t, r"alpha\(0\) is 0 and must be 1"),
     (lambda t: 1.0 - 0.5 * t, r"alpha\(1\) is 0.5 and must be 0"),
     (lambda t: (1.0 - t) * (1.0 + 2.0 * t), "alpha rises from 1 to .* after t = 0;"),
     (lambda t: 1.0 - float(t), "Write it with operators and jax.numpy"),
     (lambda t: jnp.sum(1.0 - t), "schedule is not elementwise"), (lambda: 1.0, "schedule is no function"),
     ((1.0, 0.2, 0.3, 0.0), "alpha rises from 0.2"), (3, "linear, cosine, polynomial, a function"),
     (dataclasses.make_dataclass("Mutable", [], namespace={"__call__": lambda self, t: 1 - t})(), "frozen=True")],
)  # fmt: skip
def test_a_function_that_is_no_schedule_is_refused(schedule, words):
    with pytest.raises(ValueError, match=words):
        noise.build(NoiseConfig(schedule=schedule), VOCAB, MASK, (0,))


def test_a_function_leaves_the_devices_alone_until_a_job_of_several_processes_has_started():
    code = """if True:
    import jax, jax.numpy as jnp
    from mercury_jax.config import NoiseConfig
    NoiseConfig(schedule=lambda t: jnp.cos(0.5 * jnp.pi * t))
    jax.config.update("jax_num_cpu_devices", 3)  # refused once a device is in use
    assert jax.device_count() == 3
    """
    flags = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", code], env=flags, check=True, timeout=120)


@dataclasses.dataclass(frozen=True)
class Power:
    """A schedule with a field."""

    exponent: float

    def __call__(self, t):
        return 1 - t**self.exponent


@pytest.mark.parametrize("alpha", [lambda t: 1 - t**2, lambda t: jnp.cos(0.5 * jnp.pi * t), Power(2.0)])
def test_a_function_is_read_back_from_a_config_as_the_same_schedule(alpha):
    given = NoiseConfig(schedule=alpha)
    saved = mj.config.from_dict(NoiseConfig, json.loads(json.dumps(mj.config.to_dict(given))))
    t = jnp.linspace(0.0, 1.0, 77)
    (value, slope), (had, was) = (noise.rate(noise.schedule(c), t) for c in (given, saved))
    np.testing.assert_array_equal(value, alpha(t))
    np.testing.assert_allclose(had, value, atol=1e-6)
    np.testing.assert_allclose(was, slope, atol=2e-3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A recipe with a function as its schedule, trained for two steps."""
    nano = mj.hub.NANO
    config = recipe.TrainConfig(
        name="curved", objective=objectives.masked_elbo(), data=data.generated("add3"), steps=2, batch=4, row=64,
        model=mj.ModelConfig(vocab=1024, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, mask=4),
        noise=NoiseConfig(schedule=lambda t: 1 - t**2), tokenizer=str(nano / "tokenizer.model"), eval_every=0,
        sample_every=0, save_every=2, log_every=1, ema=0.0, out=str(tmp_path_factory.mktemp("curved")),
    )  # fmt: skip
    return mj.train(config), config


@pytest.mark.slow
def test_a_model_that_was_trained_with_a_function_loads_and_samples(trained, tmp_path):
    result, config = trained
    named = dataclasses.replace(config, noise=NoiseConfig(schedule="polynomial"), out=str(tmp_path))
    assert mj.train(named).metrics == pytest.approx(result.metrics, rel=1e-5)
    lm = mj.load(result.out / "model")
    assert lm.corruption.alpha(jnp.asarray(0.5)) == pytest.approx(0.75, abs=1e-6)
    out = mj.sample(lm, "1+2=", max_tokens=4, sampler=mj.rules.ancestral(), seed=0)
    assert out.lengths[0] <= 4


@pytest.mark.long
def test_a_run_resumes_with_the_same_function_only(trained):
    _, config = trained
    again = dataclasses.replace(config, noise=NoiseConfig(schedule=lambda t: 1 - t * t), resume=True)
    assert mj.train(again).step == 2
    other = dataclasses.replace(again, noise=NoiseConfig(schedule=lambda t: 1 - t**3))
    with pytest.raises(ValueError, match="noise.schedule is .*as in the checkpoint to resume") as refused:
        mj.train(other)
    assert len(str(refused.value)) < 1000


def test_a_function_stays_where_the_command_line_changes_another_field(trained):
    _, config = trained
    assert recipe.override(config, ["--steps", "3"]).noise == config.noise
    assert recipe.override(config, ["--noise.schedule", "cosine"]).noise.schedule == "cosine"
    with pytest.raises(ValueError, match="a function does not read it"):
        dataclasses.replace(config, noise=dataclasses.replace(config.noise, power=3.0))
