"""Laws of load balancing: the formula of the Switch Transformer, its gradient, and that it spreads tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mercury_jax import models, noise, sharding
from mercury_jax.config import Experts, ModelConfig
from mercury_jax.models.gemma import GemmaConfig
from mercury_jax.training import step
from mercury_jax.training.data.packing import PackedRow, pack
from mercury_jax.training.objectives import balanced, diffusion_gemma, masked_elbo
from mercury_jax.types import Batch
from tests.marks import slow_except

SIZES = dict(vocab=32, width=16, layers=2, heads=2, kv_heads=2, head_dim=8, ffn=24, block=4, context=64)
CONFIGS = {
    "softmax": ModelConfig(**SIZES, experts=Experts(count=4, active=2, width=8, dense=(0,))),
    "sigmoid": ModelConfig(
        **SIZES, experts=Experts(count=4, active=1, width=8, score="sigmoid", correction=True)
    ),
    "gemma": GemmaConfig(**SIZES, experts=Experts(count=4, active=2, width=8), global_layers=(1,), mask=4),
}
ELBO, CORRUPTION = masked_elbo(), noise.absorbing(4)
OBJECTIVE = balanced(ELBO, weight=0.5)


def rows(model, count=4, length=40, seed=0) -> Batch:
    """Documents of different lengths, one a row; the rest is padding."""
    rng = np.random.default_rng(seed)
    packed = []
    for n in range(count):
        ids = rng.integers(5, 32, 10 + 2 * n).astype(np.int32)
        packed.append(PackedRow())
        packed[-1].add((0, n), model.layout(ids, 2, 3))
    return pack(packed, length, 0)


@functools.cache
def made(name, remat="none"):
    model = models.build(CONFIGS[name], remat)
    return model, jax.jit(model.init)(jax.random.key(0))


def by_hand(routings, used):
    """E sum_i f_i P_i, token by token in numpy."""
    losses, busiest = [], []
    for scores, chosen in routings:
        scores, chosen = np.asarray(scores, np.float64), np.asarray(chosen)
        experts, f, p = scores.shape[-1], np.zeros(scores.shape[-1]), np.zeros(scores.shape[-1])
        for at in zip(*np.nonzero(used)):
            p += scores[at] / scores[at].sum()
            for expert in chosen[at]:
                f[expert] += 1
        f, p = f / f.sum(), p / used.sum()
        losses.append(experts * (f * p).sum())
        busiest.append(f.max())
    return np.mean(losses), np.mean(busiest)


@pytest.mark.long
@pytest.mark.parametrize("name", slow_except(CONFIGS, "softmax"))
def test_the_loss_is_that_of_the_paper_over_the_tokens_without_padding(name):
    model, params = made(name)
    batch, key = rows(model), jax.random.key(1)

    @jax.jit
    def scored(params):
        seen = []

        def watched(params, given, **more):
            seen.append((given, *model.apply(params, given, **more)))
            return seen[-1][1:]

        return OBJECTIVE(key, model._replace(apply=watched), params, batch, CORRUPTION), seen

    with_loss, [(_, _, routings)] = scored(params)  # of the objective's one pass
    want, busiest = by_hand(routings, batch.ranges[..., 1].max(-1) > 0)
    assert len(routings) == (1 if name == "softmax" else 2)
    plain = jax.jit(lambda params: ELBO(key, model, params, batch, CORRUPTION))(params)
    mean = lambda loss: float(loss.per_example.sum() / loss.weight.sum())
    assert mean(with_loss) - mean(plain) == pytest.approx(0.5 * want, rel=1e-4)
    ratio = lambda name: float(with_loss.metrics[name][0] / with_loss.metrics[name][1])
    assert ratio("balance") == pytest.approx(want, rel=1e-5)
    assert ratio("busiest_expert") == pytest.approx(busiest, rel=1e-5)
    assert set(plain.metrics) < set(with_loss.metrics)


def only_balance(model, batch):
    """params -> the added loss alone."""

    def loss(params):
        numerator, denominator = OBJECTIVE(jax.random.key(1), model, params, batch, CORRUPTION).metrics[
            "balance"
        ]
        return numerator / denominator

    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.long
@pytest.mark.parametrize("name", slow_except(CONFIGS, "softmax"))
@pytest.mark.parametrize("remat", slow_except(["none", "dots", "full"], "full"))
def test_the_gradient_is_that_of_finite_differences_under_every_policy_of_remat(name, remat):
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), made(name)[1])
    with jax.enable_x64(True):
        # Steps so small that no token changes its experts: f has no gradient.
        model = models.build(dataclasses.replace(CONFIGS[name], dtype="float64"), remat)
        run, rng = only_balance(model, rows(model)), np.random.default_rng(0)
        grads = run(params)[1]
        for _ in range(2):
            way = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
            ahead, behind = (
                float(run(jax.tree.map(lambda x, d, h=h: x + h * d, params, way))[0]) for h in (1e-6, -1e-6)
            )
            slope = sum(float((g * d).sum()) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(way)))
            assert (ahead - behind) / 2e-6 == pytest.approx(slope, rel=1e-4)
            assert abs(slope) > 1e-3


def trained(weight, mesh, steps=60):
    """Values of the first and the last update, from a router that sends every token to its first expert."""
    config = ModelConfig(**SIZES | {"layers": 1}, experts=Experts(count=4, active=1, width=8))
    model = models.build(config)
    objective = balanced(ELBO, weight=weight)
    setup = step.TrainSetup(model, objective, CORRUPTION, optax.adam(1e-2), lambda n: 1e-2)
    params = jax.jit(model.init)(jax.random.key(0))
    # Embeddings share a direction, along which the first expert's column of the router lies.
    params["embed"] = params["embed"] + 0.5
    router = np.array(params["block_0"]["moe"]["router"])
    router[:, 0] += 0.3
    params["block_0"]["moe"]["router"] = jnp.asarray(router)
    on = sharding.mesh(**mesh) if mesh else sharding.mesh(devices=jax.devices()[:1])
    state = step.init_state(jax.random.key(1), setup, on, params)
    update, found = step.sharded_update(setup, on), []
    for n in range(steps):
        state, report = update(state, sharding.shard_batch(rows(model, seed=n), on))
        found.append({name: float(x) for name, x in report.values.items()})
    return found[0], found[-1]


@pytest.mark.slow
def test_training_evens_out_a_router_that_sends_everything_to_one_expert():
    first, last = trained(0.5, None)
    assert first["busiest_expert"] > 0.95 and first["balance"] > 2
    assert last["busiest_expert"] < 0.45 and last["balance"] < 1.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", slow_except([{"fsdp": 4}, {"expert": 4}, {"fsdp": 2, "expert": 2}], {"fsdp": 2, "expert": 2})
)
def test_a_mesh_of_four_devices_measures_the_same(mesh):
    assert len(jax.devices()) >= 4
    one, several = trained(0.5, None, steps=3), trained(0.5, {"data": 1} | mesh, steps=3)
    for a, b in zip(one, several):
        for name in ("loss", "balance", "busiest_expert", "grad_norm"):
            assert b[name] == pytest.approx(a[name], rel=1e-3), name


@pytest.mark.slow
def test_a_first_pass_for_self_conditioning_is_not_counted():
    config = dataclasses.replace(CONFIGS["gemma"], self_conditioning=True, predicts_next=True, mask=None)
    model = models.build(config)
    params = jax.jit(model.init)(jax.random.key(0))
    uniform, batch = noise.uniform(32), rows(model)
    loss = jax.jit(
        lambda p: balanced(diffusion_gemma())(jax.random.key(0), model, p, batch, uniform).metrics["balance"]
    )
    numerator, denominator = loss(params)
    assert 0.9 < float(numerator / denominator) < 4


def test_what_has_no_experts_is_refused_by_name():
    dense = models.build(ModelConfig(**SIZES))
    with pytest.raises(ValueError, match="experts is None; allowed: a mixture of experts"):
        step.check_objective(OBJECTIVE, dense, CORRUPTION, 4, 40)
    every = Experts(count=4, active=2, width=8, dense=(0, 1))
    with pytest.raises(ValueError, match="a model with routed layers"):
        step.check_objective(OBJECTIVE, models.build(ModelConfig(**SIZES, experts=every)), CORRUPTION, 4, 40)
    with pytest.raises(ValueError, match="objective is 'elbo'"):
        balanced("elbo")  # type: ignore[arg-type]
