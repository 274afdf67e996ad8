"""Weights in 8 bits: their error, and that products equal those of the dequantised matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.models import moe, ops
from mercury_jax.models.weight_quant import FP8, WEIGHT_KINDS, dequantise, quantise_fp8, quantise_int8

RNG = np.random.default_rng(0)
W = RNG.normal(size=(3, 16, 8)).astype(np.float32) * RNG.lognormal(sigma=3.0, size=(3, 16, 8))


def test_int8_is_within_half_a_step():
    small = quantise_int8(W, 1, batch=1)
    step = np.abs(W).max(axis=1, keepdims=True) / 127
    assert small.values.dtype == np.int8
    assert np.all(np.abs(np.asarray(dequantise(small, 1)) - W) <= step / 2 * (1 + 1e-5))


def test_fp8_is_within_a_sixteenth_of_each_number_down_to_its_smallest():
    small = quantise_fp8(W, 1, batch=1)
    assert small.values.dtype == FP8 and small.scale.shape == (3, 8)
    error = np.abs(np.asarray(dequantise(small, 1)) - W)
    assert np.isfinite(error).all()
    smallest = small.scale[:, None] * 2.0**-10  # half of the smallest number that is not 0
    assert np.all(error <= np.maximum(np.abs(W) / 16, smallest) * (1 + 1e-5))
    np.testing.assert_allclose(np.abs(np.asarray(small.values, np.float32)).max(1), 448.0)


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_a_column_of_zeros_stays_zeros(kind):
    np.testing.assert_array_equal(dequantise(WEIGHT_KINDS[kind](np.zeros((4, 2)), 1)), 0.0)


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_a_product_equals_that_of_the_dequantised_matrix(kind):
    w = WEIGHT_KINDS[kind](W.astype(np.float32), 2)
    x = jnp.asarray(RNG.normal(size=(5, 3, 16)), jnp.float32)
    want = jnp.einsum("bij,ijk->bk", x, dequantise(w))
    np.testing.assert_allclose(ops.dot(x, jax.tree.map(jnp.asarray, w), 2), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("run", [moe.tiled, moe.ragged])
def test_fp8_experts_equal_their_dequantised_matrices(run):
    draw = lambda *shape: RNG.normal(size=shape).astype(np.float32)
    x, sizes = jnp.asarray(draw(30, 12)), jnp.asarray([20, 0, 10], jnp.int32)
    small = jax.tree.map(
        jnp.asarray, [quantise_fp8(draw(3, 12, 16), 1, 1), quantise_fp8(draw(3, 8, 12), 1, 1)]
    )
    want = run(jax.nn.silu, x, sizes, *(dequantise(w, 1) for w in small))
    np.testing.assert_allclose(run(jax.nn.silu, x, sizes, *small), want, rtol=1e-4, atol=1e-3)
