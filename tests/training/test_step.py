"""Laws of one update: however the batch is cut and laid, it is the same update; NaN changes nothing."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mercury_jax import hub, models, sharding
from mercury_jax.hub.export import BUILDS
from mercury_jax.training import optim, step
from mercury_jax.training.optim import OptimConfig
from tests.training import tiny_training as tiny

MODEL = tiny.model()
near = functools.partial(chex.assert_trees_all_close, atol=2e-6, rtol=0)


@functools.cache
def machine(objective, accumulate, rate, sizes):
    """(mesh, function that gives a fresh state, update), made once for all tests that ask for the same."""
    on = sharding.mesh(**dict(sizes)) if sizes else sharding.mesh(devices=jax.devices()[:1])
    tx = optax.sgd(rate)
    lr = lambda number: jnp.float32(rate)
    setup = step.TrainSetup(MODEL, objective, tiny.CORRUPTION, tx, lr, accumulate, ema=0.9)
    state = step.init_state(jax.random.key(0), setup, on)
    fresh = lambda: jax.tree.map(jnp.copy, state)  # updates donate it
    return on, fresh, step.sharded_update(setup, on)


def trained(*batches, objective=tiny.objective, accumulate=1, rate=0.1, **sizes):
    """The state after these batches (or three of data), and the last report."""
    on, fresh, update = machine(objective, accumulate, rate, tuple(sizes.items()))
    state, report = fresh(), step.StepReport(jnp.array(True), {})
    for batch in batches or map(tiny.batch, range(3)):
        state, report = update(state, sharding.shard_batch(batch, on))
    return state, report


def test_accumulated_gradients_are_those_of_one_big_batch():
    whole, a = trained(objective=tiny.quiet)
    parts, b = trained(objective=tiny.quiet, accumulate=4)
    near((whole.params, a.values), (parts.params, b.values))


def test_the_mean_is_over_the_batch_not_over_its_parts():
    # Rows score different numbers of tokens; a mean of means would weigh them wrongly.
    rows = tiny.batch(0)
    editable = np.zeros_like(rows.editable)
    editable[0], editable[1, :1] = True, True
    lopsided = rows._replace(editable=editable)
    run = lambda n: trained(lopsided, objective=tiny.quiet, accumulate=n)[0].params
    near(run(1), run(4))


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"data": 4}, {"data": 1, "fsdp": 4}, {"data": 2, "tensor": 2}])
def test_four_devices_train_as_one(sizes):
    one = trained(accumulate=2)[0]
    four = trained(accumulate=2, **sizes)[0]
    near((one.params, one.ema), (four.params, four.ema), atol=1e-5)
    where = four.params["hidden"]["w"].sharding.spec
    assert where == sharding.partition_spec("hidden/w", (8, 8), MODEL.shardings, sharding.mesh(**sizes))


def test_noise_depends_on_the_step_alone():
    chex.assert_trees_all_equal(trained()[0].params, trained()[0].params)
    # The same rows see other noise at the next step.
    losses = [trained(*[tiny.batch(0)] * n, rate=0.0)[1].values["loss"] for n in (1, 2)]
    assert losses[0] != losses[1]


def poisoned(where):
    """The tiny objective, spoilt for batches that start at position 99."""

    def objective(key, model, params, batch, corruption):
        loss = tiny.objective(key, model, params, batch, corruption)
        ill = (batch.positions[0, 0] == 99).astype(jnp.float32)
        # x / 0 is infinite; sqrt(0) is finite and its derivative is not.
        ill_loss = ill / 0.0 if where == "loss" else jnp.sqrt(ill * jnp.sum(params["embed"] * 0) + 1 - ill)
        extra = jnp.where(ill > 0, ill_loss, 0.0) if where == "loss" else ill_loss - (1 - ill)
        return loss._replace(per_example=loss.per_example + extra)

    return objective


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_batch_that_is_not_finite_changes_nothing(where):
    ill = tiny.batch(5)
    ill = ill._replace(positions=np.full_like(ill.tokens, 99))
    spoilt = poisoned(where)
    before, fine = trained(tiny.batch(0), objective=spoilt)
    after, report = trained(tiny.batch(0), ill, objective=spoilt)
    assert bool(fine.finite) and not bool(report.finite)
    assert bool(jnp.isfinite(report.values["loss"])) == (where == "gradient")
    assert int(after.step) == 1
    chex.assert_trees_all_equal((before.params, before.ema), (after.params, after.ema))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda loss: loss._replace(per_example=loss.per_example.sum()),
        lambda loss: loss._replace(weight=loss.weight[:, None]),
        lambda loss: loss._replace(metrics={"ce": (loss.per_example, loss.weight)}),
    ],
)
def test_an_objective_that_returns_other_shapes_is_refused_by_its_name(wrong):
    def mine(*args):
        return wrong(tiny.objective(*args))

    with pytest.raises(ValueError, match=r"objective is .*mine'; allowed: .* of shape \(8,\) and scalar"):
        step.check_objective(mine, MODEL, tiny.CORRUPTION, tiny.ROWS, tiny.ROW)


def test_a_batch_without_scored_tokens_has_no_gradient():
    empty = tiny.batch(0)._replace(editable=np.zeros((tiny.ROWS, tiny.ROW), bool))
    state, report = trained(empty)
    fresh = machine(tiny.objective, 1, 0.1, ())[1]()
    assert bool(report.finite) and float(report.values["grad_norm"]) == 0
    chex.assert_trees_all_equal(state.params, fresh.params)


def test_the_average_follows_early_and_is_slow_late():
    params, ema = {"w": jnp.ones(1)}, {"w": jnp.zeros(1)}
    early = optim.update_average(ema, params, jnp.int32(0), 0.999)
    late = optim.update_average(ema, params, jnp.int32(10**6), 0.999)
    assert np.isclose(early["w"][0], 0.9) and np.isclose(late["w"][0], 0.001)


def test_an_evaluation_repeats_and_weighs_tokens():
    on = sharding.mesh(devices=jax.devices()[:1])
    evaluate = step.make_evaluator(MODEL, tiny.quiet, tiny.CORRUPTION, jax.random.key(1), on)
    params = MODEL.init(jax.random.key(0))
    parts = evaluate(params, [tiny.batch(1), tiny.batch(2)])
    whole = evaluate(params, [jax.tree.map(lambda *x: np.concatenate(x), tiny.batch(1), tiny.batch(2))])
    assert parts == evaluate(params, [tiny.batch(1), tiny.batch(2)])
    assert np.isclose(parts["loss"], whole["loss"]) and np.isclose(parts["ce"], whole["ce"])


@pytest.mark.parametrize(
    "decay, half, last", [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1, 1), ("wsd", 1, 0.1)]
)
def test_schedules_warm_up_and_end_where_they_should(decay, half, last):
    at: Any = optim.schedule(OptimConfig(lr=2.0, warmup=10, decay=decay, final=0.1, tail=0.2), 110)
    # The first of 110 updates has a tenth of the peak, the tenth has the peak, and the last one reaches `final`.
    assert [float(at(i)) for i in (0, 4, 9)] == pytest.approx([0.2, 1, 2])
    assert float(at(59)) == pytest.approx(2 * half) and float(at(109)) == pytest.approx(2 * last)
    for warmup in (0, 1, 9, 10):  # short runs: the first update moves, and without a decay the peak is kept
        short: Any = optim.schedule(OptimConfig(lr=2.0, warmup=warmup, decay=decay, final=0.1, tail=0.9), 10)
        assert float(short(0)) == pytest.approx(2 / max(1, warmup))
        assert float(short(9)) == pytest.approx(2 if warmup == 10 else 2 * last)


def first_move(params, grads, **fields) -> Any:
    """What the optimizer adds to the parameters at its first step, at learning rate 1, without clipping."""
    config = OptimConfig(lr=1.0, warmup=0, decay="constant", clip=0, **fields)
    tx = optim.optimizer(config, 10, 8)
    return tx.update(grads, tx.init(params), params)[0]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_weight_decay_spares_norms(kind):
    params = MODEL.init(jax.random.key(0))
    moved = first_move(params, jax.tree.map(jnp.zeros_like, params), optimizer=kind, weight_decay=0.5)
    assert not moved["norm"]["scale"].any()
    assert all(bool(jnp.allclose(moved[n], -0.5 * params[n])) for n in ("embed", "head"))
    assert bool(jnp.allclose(moved["hidden"]["w"], -0.5 * params["hidden"]["w"]))


def test_weight_decay_is_for_matrices():
    layers = {"scale": jnp.ones((3, 4)), "w": jnp.ones((3, 4)), "tau": jnp.ones(4), "bias": jnp.ones((3, 4))}
    assert optim.decayed({"layers": layers})["layers"] == {
        "scale": False, "w": True, "tau": False, "bias": False,
    }  # fmt: skip
    named = {"ln1_scale": jnp.ones((3, 4)), "mlp_bias": jnp.ones((3, 4))}
    assert optim.decayed(named) == {"ln1_scale": False, "mlp_bias": False}
    factors = {
        "q": {"w": {"a": jnp.ones((3, 2)), "b": jnp.ones((2, 3))}, "b": jnp.ones((3, 4))}
    }  # LoRA's, and a bias
    assert optim.decayed(factors) == {"q": {"w": {"a": True, "b": True}, "b": False}}


@pytest.mark.long
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("family", BUILDS)
def test_the_parameters_of_every_family_are_declared_and_meet_their_rule(family, tmp_path):
    model = models.build(hub.config_of(hub.tiny_random(family, tmp_path / "m")))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    ones = jax.tree.map(lambda x: jnp.ones(x.shape), shapes)
    moved = first_move(ones, jax.tree.map(jnp.zeros_like, ones), weight_decay=0.5)
    for path, delta in jax.tree_util.tree_flatten_with_path(moved)[0]:
        name = sharding.path_name(path)
        last = name.split("/")[-1]
        assert last in (*sharding.MATRICES, *sharding.TABLES, *sharding.VECTORS), name
        assert bool(delta.any()) == (last not in sharding.VECTORS), name
    # Muon takes what multiplies activations, experts too; AdamW the rest, of which it alone keeps second moments.
    second = optim.optimizer(OptimConfig(optimizer="muon"), 10, 8).init(ones)
    kept = [sharding.path_name(p) for p, _ in jax.tree_util.tree_flatten_with_path(second)[0]]
    nu = {name.split("/nu/")[1] for name in kept if "/nu/" in name}
    every = {sharding.path_name(p) for p, _ in jax.tree_util.tree_flatten_with_path(ones)[0]}
    assert every - nu == {n for n in every if n.split("/")[-1] in sharding.MATRICES and "router" not in n}


def test_muon_turns_hidden_matrices_only():
    params = MODEL.init(jax.random.key(0))
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), params)
    moved = first_move(params, grads, optimizer="muon", weight_decay=0)
    spread = lambda m: (lambda s: float(s[0] / s[-1]))(jnp.linalg.svd(m, compute_uv=False))
    assert spread(moved["hidden"]["w"]) < 2 < spread(moved["head"])
    square = params["hidden"]["w"]
    own = {
        "o": {"w": square},
        "down": square,
        "gate_up": square,
    }  # a user's, without axes of heads or experts
    turned = first_move(
        own, jax.tree.map(lambda _: grads["hidden"]["w"], own), optimizer="muon", weight_decay=0
    )
    for found in jax.tree.leaves(turned):
        np.testing.assert_allclose(found, moved["hidden"]["w"], rtol=1e-4, atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_by_width_a_step_moves_the_outputs_of_every_width_alike(kind):
    """The product of a matrix's first update with the input that made its gradient, relative to the output's size."""

    def move(width: int) -> float:
        key_x, key_g = jax.random.split(jax.random.key(0))
        x, g = jax.random.normal(key_x, (width,)), jax.random.normal(key_g, (width,))
        params = {
            "w": jnp.zeros((width, width)),
            "embed": jnp.ones((4, width)),
            "norm": {"scale": jnp.ones(width)},
        }
        grads = jax.tree.map(lambda p: jnp.ones_like(p), params) | {"w": x[:, None] * g}
        config = OptimConfig(
            optimizer=kind, lr=1.0, base_width=64, warmup=0, decay="constant", weight_decay=0, clip=0
        )
        tx = optim.optimizer(config, 10, width)
        moved: Any = tx.update(grads, tx.init(params), params)[0]
        # Of equal gradients, vectors keep AdamW's update and other matrices scale it.
        scale = float(moved["norm"]["scale"][0])
        assert scale < -0.9
        np.testing.assert_allclose(moved["embed"], scale * 64 / width, rtol=1e-4)
        return float(jnp.sqrt(jnp.mean((x @ moved["w"]) ** 2)))

    assert move(64) == pytest.approx(move(256), rel=0.2)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_group_of_parameters_has_a_rate_of_its_own(kind):
    params = MODEL.init(jax.random.key(0))
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), params)
    plain = first_move(params, grads, optimizer=kind, weight_decay=0.1)
    found = first_move(
        params, grads, optimizer=kind, weight_decay=0.1, rates=(("hidden", 0.25), ("hi|head", 0.0))
    )
    wanted = {**plain, "hidden": {"w": 0.25 * plain["hidden"]["w"]}, "head": 0.0 * plain["head"]}
    chex.assert_trees_all_close(found, wanted)
    with pytest.raises(
        ValueError, match="optim.rates is 'block'; allowed: .* a trained parameter: embed, head, hidden/w"
    ):
        first_move(params, grads, rates=(("block", 2.0),))
    for rates, words in (
        ((("(", 1.0),), "optim.rates is '\\('; allowed: a regular"),
        ((("w", -1.0),), "optim.rates is -1.0"),
    ):
        with pytest.raises(ValueError, match=words):
            OptimConfig(rates=rates)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_at_its_base_width_the_rule_changes_nothing(kind):
    params = MODEL.init(jax.random.key(0))
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), params)
    alike = first_move(params, grads, optimizer=kind), first_move(params, grads, optimizer=kind, base_width=8)
    chex.assert_trees_all_equal(*alike)
