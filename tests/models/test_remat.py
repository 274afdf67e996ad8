"""Policies of rematerialisation: the same values and gradients, computed from fewer kept ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax import models
from mercury_jax.config import Experts, ModelConfig
from mercury_jax.models.dit import DiTConfig
from mercury_jax.models.gemma import GemmaConfig
from mercury_jax.types import PackedPass
from tests.marks import slow_except

SIZES = dict(vocab=32, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=24, context=8)
CONFIGS = {
    "transformer": ModelConfig(**SIZES, pattern="bidirectional"),
    "gemma": GemmaConfig(**SIZES, block=4, experts=Experts(count=2, active=1, width=8), global_layers=(1,)),
    "dit": DiTConfig(**SIZES | dict(kv_heads=2, ffn=64), pattern="bidirectional", cond=8, mask=4),
}  # fmt: skip


def loss_of(config, policy):
    model = models.build(config, policy)
    tokens = jnp.arange(12).reshape(2, 6) % config.vocab
    positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
    ranges = jnp.zeros((2, 6, 2, 2), jnp.int32).at[:, :, 0, 1].set(6)
    given = PackedPass(tokens, positions, ranges)
    return model, lambda params: jnp.sin(model.head(params, model.apply(params, given))).sum()


@pytest.mark.long
@pytest.mark.parametrize("name", slow_except(CONFIGS, "transformer"))
def test_a_policy_changes_what_is_kept_and_no_value(name):
    config = CONFIGS[name]
    model, plain = loss_of(config, "none")
    params = jax.jit(model.init)(jax.random.key(0))
    want = jax.jit(jax.value_and_grad(plain))(params)
    kept = {"none": sizes(plain, params)}
    for policy in ("dots", "full"):
        other, loss = loss_of(config, policy)
        assert jax.tree.structure(jax.eval_shape(other.init, jax.random.key(0))) == jax.tree.structure(params)
        got = jax.jit(jax.value_and_grad(loss))(params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
        kept[policy] = sizes(loss, params)
    assert kept["full"] < kept["dots"] < kept["none"]


def sizes(loss, params):
    """Bytes that the backward pass reads."""
    kept = jax.eval_shape(lambda p: jax.tree.leaves(jax.vjp(loss, p)[1]), params)
    return sum(x.size * x.dtype.itemsize for x in kept)


def test_an_unknown_policy_is_refused():
    from tests.training import tiny_training

    with pytest.raises(ValueError, match="remat is 'some'; allowed: none, dots, full"):
        dataclasses.replace(tiny_training.config("x"), remat="some")
