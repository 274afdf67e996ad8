"""The NELBO against a source of known entropy, and objectives against each other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mercury_jax import models, noise, sharding
from mercury_jax.config import ModelConfig
from mercury_jax.training.objectives import (
    cart,
    llada,
    masked_and_edited,
    masked_elbo,
    next_token,
    objective as parts,
    score_entropy,
)
from mercury_jax.training.objectives.objective import canvas_times
from mercury_jax.types import Batch
from tests.marks import slow_except

STATES, LENGTH, FIRST, MASK = 3, 6, 4, 3
ALL_MASKED = masked_elbo(least=0.999999)  # at t = 1: the cross-entropy of every token of a canvas of masks
CHAIN = np.full((STATES, STATES), 0.1) + 0.7 * np.roll(np.eye(STATES), 1, axis=1)


def entropy() -> float:
    """Nats per token of a sequence of LENGTH tokens: the chain is doubly stochastic, so starts uniform."""
    step = -(CHAIN[0] * np.log(CHAIN[0])).sum()
    return (np.log(STATES) + (LENGTH - 1) * step) / LENGTH


def sequences(seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = np.zeros((count, LENGTH), np.int32)
    x[:, 0] = rng.integers(STATES, size=count)
    edges = CHAIN.cumsum(1)
    for i in range(1, LENGTH):
        x[:, i] = np.minimum((rng.random((count, 1)) > edges[x[:, i - 1]]).sum(1), STATES - 1)
    return x + FIRST


def batch(model, texts) -> Batch:
    """Texts [N, LENGTH] as rows of the model's layout."""
    laid = model.layout(np.zeros(LENGTH, np.int32) + FIRST, 0)
    wide = lambda x: jnp.broadcast_to(x, (len(texts), *x.shape))
    return Batch(jnp.asarray(texts)[:, laid.positions], *(wide(x) for x in laid[1:]))


def config(pattern: str, block: int) -> ModelConfig:
    return ModelConfig(
        vocab=FIRST + STATES, width=16, layers=2, heads=2, kv_heads=2, head_dim=8, ffn=32,
        pattern=pattern, block=block, mask=MASK,
    )  # fmt: skip


def initial(model):
    return jax.jit(model.init)(jax.random.key(0))


@functools.cache
def trained(pattern: str, block: int, steps: int = 600):
    model = models.build(config(pattern, block))
    corruption = noise.absorbing(MASK, forbidden=(0, 1, 2))
    objective = masked_elbo(clip=4.0)
    tx = optax.adam(optax.cosine_decay_schedule(1e-2, steps))

    def loss(params, key, data):
        found = objective(key, model, params, data, corruption)
        return found.per_example.sum() / found.weight.sum()

    @jax.jit
    def train(params, texts):
        def update(i, both):
            params, state = both
            grads = jax.grad(loss)(params, jax.random.key(i), batch(model, texts[i]))
            moves, state = tx.update(grads, state)
            return optax.apply_updates(params, moves), state

        return jax.lax.fori_loop(0, steps, update, (params, tx.init(params)))[0]

    return model, train(initial(model), sequences(0, steps * 32).reshape(steps, 32, LENGTH))


def found_by(objective, model, params, data, corruption, seed=0):
    """The objective's Loss, compiled whole."""
    return jax.jit(lambda p, d: objective(jax.random.key(seed), model, p, d, corruption))(params, data)


def estimate(model, params, corruption, objective, chunks=8) -> tuple[float, float]:
    """(mean nats per token, its standard error) over chunks of 4,096 fresh sequences."""

    @jax.jit
    def each(key, data):
        found = objective(key, model, params, data, corruption)
        return found.per_example / found.weight

    seeds = range(10**6, 10**6 + chunks)
    nats = np.concatenate([each(jax.random.key(i), batch(model, sequences(i, 4096))) for i in seeds])
    return float(nats.mean()), float(nats.std(ddof=1) / np.sqrt(len(nats)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("pattern", "block"),
    slow_except([("bidirectional", 4), ("causal_encoder", 3), ("block_causal", 1)], ("causal_encoder", 3)),
)
def test_the_nelbo_is_never_under_the_entropy_and_a_trained_model_is_near_it(pattern, block):
    model, params = trained(pattern, block)
    mean, se = estimate(model, params, noise.absorbing(MASK), masked_elbo())
    assert mean > entropy() - se
    assert mean < 1.05 * entropy()
    untrained, error = estimate(model, initial(model), noise.absorbing(MASK), masked_elbo(), 1)
    assert untrained > 1.2 * entropy() - error


def exact_next(model):
    """At block 1: the row of the transition matrix of the clean token before a canvas, or in a clean slot."""
    laid = model.layout(np.zeros(LENGTH, np.int32) + FIRST, 0)
    slot = {int(p): i for i, p in enumerate(laid.positions) if laid.canvas[i] < 0}  # of the clean token at p
    before = np.array([slot.get(int(p) - (laid.canvas[i] >= 0), 0) for i, p in enumerate(laid.positions)])

    def apply(params, given):
        step = jnp.asarray(CHAIN)[jnp.maximum(given.tokens[:, before] - FIRST, 0)]
        first = (laid.positions == 0) & (laid.canvas >= 0)
        return _logits(jnp.where(first[:, None], 1 / STATES, step))

    return model._replace(apply=apply, head=lambda params, hidden: hidden)


def _logits(p):
    log_p = jnp.log(jnp.maximum(p, 1e-30))
    return jnp.concatenate([jnp.full((*p.shape[:2], FIRST), -1e30), log_p], axis=-1)


def measured(objective, model, corruption, name, chunks=24):
    """(mean of a metric, its standard error) over chunks of 256 fresh sequences; NaN where it is not logged."""
    run = jax.jit(lambda key, data: objective(key, model, {}, data, corruption).metrics)
    found = [run(jax.random.key(i), batch(model, sequences(2000 + i, 256))) for i in range(chunks)]
    if name not in found[0]:
        return np.nan, 0.0
    each = np.array([float(f[name][0] / f[name][1]) for f in found])
    return each.mean(), each.std(ddof=1) / np.sqrt(chunks)


def test_with_an_exact_next_token_model_nats_per_token_is_the_entropy():
    model = exact_next(models.build(config("block_causal", 1)))
    mean, se = measured(masked_elbo(), model, noise.absorbing(MASK), "nats_per_token")
    assert abs(mean - entropy()) < 4 * se < 0.08


def test_with_an_exact_next_token_model_the_causal_loss_is_the_entropy_of_a_step():
    causal = dataclasses.replace(config("block_causal", 1), predicts_next=True, mask=None)
    model = exact_next(models.build(causal))
    mean, se = measured(next_token(), model, noise.uniform(FIRST + STATES), "nats_per_token")
    assert abs(mean + (CHAIN[0] * np.log(CHAIN[0])).sum()) < 4 * se < 0.08


def test_lladas_normalisation_weighs_answers_not_tokens():
    model = models.build(config("causal_encoder", 8))
    long, short = model.layout(np.full(12, FIRST), 4), model.layout(np.full(6, FIRST), 4)
    more = len(long.tokens) - len(short.tokens)
    rows = []
    for a, b, fill in zip(long, short, (0, 0, 0, False, -1), strict=True):
        b = np.pad(b, [(0, more)] + [(0, 0)] * (b.ndim - 1), constant_values=fill)
        rows.append(jnp.stack([jnp.asarray(a), jnp.asarray(b)]))
    found = found_by(llada(), model, initial(model), Batch(*rows), noise.absorbing(MASK))
    np.testing.assert_allclose(found.weight, [1.0, 1.0], rtol=1e-6)


@pytest.mark.slow
def test_at_block_one_the_nelbo_is_the_autoregressive_loss():
    model, params = trained("block_causal", 1)
    data, corruption = batch(model, sequences(7, 4096)), noise.absorbing(MASK)
    exact = found_by(ALL_MASKED, model, params, data, corruption)
    exact = float(exact.per_example.sum() / exact.weight.sum())
    mean, se = estimate(model, params, corruption, masked_elbo())
    assert abs(mean - exact) < 4 * se + 0.01
    # Conditioned on nothing but the past, the model knows the transition matrix.
    assert exact < 1.02 * entropy()


def test_times_are_one_a_canvas_and_spread_over_the_batch():
    model = models.build(config("causal_encoder", 2))
    data = batch(model, sequences(0, 32))
    t = np.asarray(jax.jit(canvas_times)(jax.random.key(0), data, 1e-4))
    canvas = np.asarray(data.canvas)
    assert (t[canvas < 0] == 1.0).all()
    each = np.array([np.unique(t[b][canvas[b] == c]) for b in range(32) for c in range(3)])
    assert each.shape == (96, 1)
    assert np.diff(np.sort(each[:, 0])).max() < 2.7 / 96


def test_prompts_are_not_scored_and_gradients_reach_the_clean_pass():
    model = models.build(config("causal_encoder", 4))
    laid = model.layout(FIRST + np.arange(5) % STATES, 2)
    data = Batch(*(jnp.asarray(x)[None] for x in laid))
    other = data._replace(tokens=data.tokens.at[0, 0].set(FIRST + 2))
    both = jax.tree.map(lambda *x: jnp.concatenate(x), data, other)
    found = found_by(ALL_MASKED, model, initial(model), both, noise.absorbing(MASK))
    assert found.weight.tolist() == [3.0, 3.0]
    assert float(found.per_example[0]) != float(found.per_example[1])


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("devices", [1, 4])
def test_logits_made_in_parts_change_no_loss_and_no_gradient(monkeypatch, devices):
    model = models.build(config("causal_encoder", 4))
    data, params = batch(model, sequences(3, 8)), initial(model)

    def loss(params, data):
        found = masked_elbo()(jax.random.key(0), model, params, data, noise.absorbing(MASK))
        return found.per_example.sum() / found.weight.sum()

    want, slope = jax.jit(jax.value_and_grad(loss))(params, data)
    monkeypatch.setattr(
        parts, "MAX_LOGITS", 4 * model.config.vocab
    )  # of 4 positions; a row has no multiple of it
    on = sharding.mesh(data=devices // min(devices, 2), fsdp=min(devices, 2), devices=jax.devices()[:devices])
    lies = sharding.shardings(params, model.shardings, on)
    model = sharding.with_training_mesh(model, on)
    step = jax.jit(lambda *args: jax.value_and_grad(loss)(*args))
    found, grads = step(jax.device_put(params, lies), jax.device_put(data, sharding.row_sharding(on)))
    assert data.tokens.shape[1] % 4 and float(found) == pytest.approx(float(want), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, slope)


def test_objectives_refuse_what_they_cannot_bound():
    model = models.build(config("causal_encoder", 4))
    params, data = initial(model), batch(model, sequences(0, 2))
    for objective in (masked_elbo(), llada(), score_entropy(), cart(), masked_and_edited(causal=0)):
        for corruption in (noise.uniform(9), noise.hybrid(9, MASK)):
            with pytest.raises(ValueError, match=f"noise.kind is '{corruption.kind}'; allowed: absorbing"):
                objective(jax.random.key(0), model, params, data, corruption)
