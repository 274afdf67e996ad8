"""Weights in 8 bits: their error, and that products equal those of the dequantised matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.models import moe, network, ops
from mercury_jax.models.weight_quant import (
    FORMATS,
    FP8,
    dequantise,
    lookup,
    quantise,
    quantise_rows,
)
from mercury_jax.ops.experts.grouped_matmul import offsets_of
from mercury_jax.sharding import quantised_axes

RNG = np.random.default_rng(0)
W = RNG.normal(size=(3, 16, 8)).astype(np.float32) * RNG.lognormal(sigma=3.0, size=(3, 16, 8))


def test_int8_is_within_half_a_step():
    small = quantise(W, FORMATS["int8"], 1, batch=1)
    step = np.abs(W).max(axis=1, keepdims=True) / 127
    assert small.values.dtype == np.int8
    assert np.all(np.abs(np.asarray(dequantise(small, 1)) - W) <= step / 2 * (1 + 1e-5))


def test_fp8_is_within_a_sixteenth_of_each_number_down_to_its_smallest():
    small = quantise(W, FORMATS["fp8"], 1, batch=1)
    assert small.values.dtype == FP8 and small.scale.shape == (3, 8)
    error = np.abs(np.asarray(dequantise(small, 1)) - W)
    assert np.isfinite(error).all()
    smallest = small.scale[:, None] * 2.0**-10  # half of the smallest number that is not 0
    assert np.all(error <= np.maximum(np.abs(W) / 16, smallest) * (1 + 1e-5))
    np.testing.assert_allclose(np.abs(np.asarray(small.values, np.float32)).max(-1), 448.0)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_column_of_zeros_stays_zeros(kind):
    np.testing.assert_array_equal(dequantise(quantise(np.zeros((4, 2)), FORMATS[kind], 1)), 0.0)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_product_equals_that_of_the_dequantised_matrix(kind):
    w = quantise(W.astype(np.float32), FORMATS[kind], 2)
    x = jnp.asarray(RNG.normal(size=(5, 3, 16)), jnp.float32)
    exact = x
    if FORMATS[kind].rows:
        rows = quantise_rows(x, w.values.dtype, 2)
        exact = rows.values.astype(jnp.float32) * rows.scale[:, None, None]
        error = jnp.abs(exact - x)
        assert (error <= (rows.scale[:, None, None] / 2 if "int8" in kind else jnp.abs(x) / 16 + 1e-3)).all()
    want = jnp.einsum("bij,ijk->bk", exact, dequantise(w))
    np.testing.assert_allclose(ops.dot(x, jax.tree.map(jnp.asarray, w), 2), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("run", [moe.tiled, moe.ragged])
def test_fp8_experts_equal_their_dequantised_matrices(run):
    draw = lambda *shape: RNG.normal(size=shape).astype(np.float32)
    x, offsets = jnp.asarray(draw(30, 12)), offsets_of([20, 0, 10])
    small = jax.tree.map(
        jnp.asarray, [quantise(draw(3, *shape), FORMATS["fp8"], 1, 1) for shape in ((12, 16), (8, 12))]
    )
    want = run(jax.nn.silu, x, offsets, *(dequantise(w, 1) for w in small))
    np.testing.assert_allclose(run(jax.nn.silu, x, offsets, *small), want, rtol=1e-4, atol=1e-3)


def tables(kind):
    """An embedding table [V, D] and an output head [D, V] in 8 bits; and as fp32 arrays, what they stand for."""
    rng = np.random.default_rng(1)
    shapes = {"embed": (20, 6), "head": (6, 20)}
    axes = {name: found for name in shapes if (found := quantised_axes(name)) is not None}
    small = {
        name: jax.tree.map(
            jnp.asarray,
            quantise(rng.normal(size=shape) * rng.lognormal(size=shape), FORMATS[kind], *axes[name]),
        )
        for name, shape in shapes.items()
    }
    return small, {name: dequantise(x, axes[name].batch) for name, x in small.items()}


@pytest.mark.parametrize("kind", FORMATS)
def test_tables_have_one_scale_per_id_and_equal_what_they_stand_for(kind):
    """Looked up, as a head of their own or tied, and as the expected embedding: all ids, and a part of them."""
    small, full = tables(kind)
    assert small["embed"].scale.shape == small["head"].scale.shape == (20,)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    ids = jnp.asarray([[3, 19, 0], [7, 7, 1]])
    close(lookup(small["embed"], ids), lookup(full["embed"], ids))
    hidden, weights = (
        jnp.asarray(RNG.normal(size=(2, 3, 6)), jnp.float32),
        jax.nn.softmax(RNG.normal(size=(2, 3, 9))),
    )
    for names in (("embed", "head"), ("embed",)):
        ours, theirs = ({name: tree[name] for name in names} for tree in (small, full))
        close(network.lm_head(ours, hidden, softcap=3.0), network.lm_head(theirs, hidden, softcap=3.0))
        close(network.lm_head(ours, hidden, 4, 9), network.lm_head(theirs, hidden)[..., 4:13])
        mixtures = (network.embed_mixture(x, weights, 4, jnp.float32, 2.0) for x in (ours, theirs))
        close(*mixtures)
