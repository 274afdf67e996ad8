"""Keys and values in 4 and 3 bits: the rotation, the codebook's error, and the memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.hub.load import open_checkpoint
from mercury_jax.models import cache, kv_quant
from mercury_jax.ops import attend
from mercury_jax.types import Pass
from tests.hub.goldens_of import GOLDENS
from tests.tiny import tiny

# The least squared error of 2^bits levels for a normal variable (Max 1960, table I), which the paper rounds.
LEAST = {3: 0.03454, 4: 0.009497}
WIDTHS = [8, 80, 128]  # 80 is no power of two


def odd_vectors(count, width):
    """Vectors whose coordinates are nothing like normal: outliers, few large numbers, all scales."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, width)) * rng.lognormal(sigma=2.0, size=(count, 1))
    x[::2, 3] *= 50.0
    x[::3] = np.where(np.arange(width) < 2, x[::3], 0.0)
    return x.astype(np.float32)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_rotation_preserves_inner_products_and_is_fixed(width):
    r = kv_quant.rotation(width)
    np.testing.assert_allclose(r @ r.T, np.eye(width), atol=1e-12)
    kv_quant.rotation.cache_clear()
    np.testing.assert_array_equal(kv_quant.rotation(width), r)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bits", [3, 4])
def test_each_level_is_the_mean_of_the_values_nearest_to_it(bits, width):
    levels = kv_quant.codebook(width, bits)
    assert len(levels) == 1 << bits and np.all(np.diff(levels) > 0)
    cuts = [-1.0, *(levels[1:] + levels[:-1]) / 2, 1.0]
    nodes, weights = np.polynomial.legendre.leggauss(60)
    for low, high, level in zip(cuts[:-1], cuts[1:], levels):
        x = (high + low) / 2 + (high - low) / 2 * nodes
        density = weights * (1 - x**2) ** ((width - 3) / 2)
        assert abs((density * x).sum() / density.sum() - level) < 1e-4 / width**0.5


def test_wide_heads_have_the_levels_of_a_normal_variable():
    positive = kv_quant.codebook(4096, 3)[4:] * 64
    np.testing.assert_allclose(positive, [0.2451, 0.7560, 1.3439, 2.1520], atol=2e-3)


@pytest.mark.long
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bits", [3, 4])
def test_the_error_of_a_round_trip_is_that_of_the_paper_for_all_vectors(bits, width):
    least = LEAST[bits]
    even = np.random.default_rng(2).standard_normal((1500, width)).astype(np.float32)
    # A sphere of few dimensions is easier than the normal limit; vectors that point one way share their error.
    assert (0.6 if width == 8 else 0.93) * least < _lost(even, bits) < 1.03 * least
    assert 0.5 * least < _lost(odd_vectors(1500, width), bits) < 1.2 * least


def _lost(x, bits):
    kept = jax.jit(lambda x: kv_quant.quantise_rotated(x, bits))(jnp.asarray(x))
    again = np.asarray(kv_quant.dequantise_rotated(kept, jnp.float32)) @ kv_quant.rotation(x.shape[1]).T
    return (((again - x) ** 2).sum(-1) / (x**2).sum(-1)).mean()


def test_zeros_stay_zeros():
    kept = kv_quant.quantise_rotated(jnp.zeros((2, 8)), 4)
    np.testing.assert_array_equal(kv_quant.dequantise_rotated(kept, jnp.float32), np.zeros((2, 8)))


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("width", [3, 8, 20])
def test_unpacking_inverts_packing(bits, width):
    base = np.arange(1 << bits)
    codes = np.stack([np.roll(np.resize(base, width), i) for i in range(len(base))])
    codes[0], codes[1] = 0, (1 << bits) - 1
    words = kv_quant.pack_bits(jnp.asarray(codes), bits)
    assert words.dtype == jnp.uint8 and words.shape[-1] == bits * -(-width // 8)
    np.testing.assert_array_equal(kv_quant.unpack_bits(words, bits, width), codes)


@pytest.mark.parametrize("bits", [3, 4])
def test_a_cache_takes_its_bits_per_number_and_two_bytes_per_vector(bits):
    model = tiny().model
    slots, config = 40, model.config
    made = cache.with_kv_kind(model, f"{bits}bit").empty_cache(2, slots)
    vectors = 2 * config.layers * 2 * slots * config.kv_heads
    assert sum(x.nbytes for x in jax.tree.leaves(made)) == vectors * (config.head_dim * bits // 8 + 2)
    assert cache.with_kv_kind(model, f"{bits}bit") is cache.with_kv_kind(model, f"{bits}bit")


def test_an_unknown_cache_format_is_refused():
    with pytest.raises(ValueError, match="kv is '2bit'; allowed: 'int8', 'fp8', '4bit', '3bit'"):
        cache.with_kv_kind(None, "2bit")


@pytest.mark.long
@pytest.mark.parametrize("kind, most", [("int8", 0.02), ("fp8", 0.06), ("4bit", 0.15), ("3bit", 0.28)])
def test_attention_over_a_quantised_cache_is_close_to_the_exact_one(kind, most):
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q, k, v = draw(2, 5, 4, 32), draw(2, 24, 2, 32), draw(2, 24, 2, 32)
    slots = jnp.asarray(np.stack([rng.permutation(24), rng.permutation(24)]))
    ranges = jnp.asarray([[[[0, 20], [21, 24]]] * 4 + [[[0, 0], [0, 0]]]] * 2)
    blank = lambda x: jax.tree.map(
        lambda y: jnp.zeros(y.shape, y.dtype), jax.eval_shape(cache.KV_KINDS[kind], x)
    )
    kv = cache.write(cache.KV(blank(k), blank(v)), k, v, slots)
    exact = cache.write(cache.KV(k * 0, v * 0), k, v, slots)
    near, lse = kv_quant.attend(q, *kv, ranges, residual=True)
    want, told = attend(q, *exact, ranges, residual=True)
    error = np.linalg.norm(near - want) / np.linalg.norm(want)
    assert most / 8 < error < most
    np.testing.assert_allclose(lse[:, :4], told[:, :4], atol=2 * most)
    np.testing.assert_array_equal(near[:, 4], 0.0)


def test_a_dropped_token_is_not_written():
    x = jnp.ones((1, 2, 1, 8))
    blank = kv_quant.quantise_rotated(jnp.zeros((1, 3, 1, 8)), 4)
    kv = cache.write(cache.KV(blank, blank), x, x, jnp.asarray([[1, 3]]))
    assert isinstance(kv.k, kv_quant.RotatedVectors)
    np.testing.assert_array_equal(kv.k.norm[0, :, 0], jnp.asarray([0, 8**0.5, 0], jnp.bfloat16))


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3", "dream", "mdlm", "gemma4_moe", "gemma4_ple"])
def test_every_architecture_takes_a_quantised_cache(name):
    model = open_checkpoint(GOLDENS / name / "config.json", mask=5).model
    small, one = cache.with_kv_kind(model, "4bit"), jax.ShapeDtypeStruct((2,), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0))
    empty = jax.eval_shape(lambda: small.empty_cache(2, 16))
    time = jax.ShapeDtypeStruct((2,), jnp.float32) if model.config.timed else None
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    given = Pass(tokens, empty, one, one, one, jax.ShapeDtypeStruct((2,), bool), time=time)

    def run(params, given):
        signal = model.condition(params, jnp.zeros((2, 8, model.config.vocab)))
        return small.forward(params, given._replace(self_cond=signal))

    _, after = jax.eval_shape(run, params, given)
    assert jax.tree.structure(after) == jax.tree.structure(empty)
    found = [
        x
        for x in jax.tree.leaves(after, is_leaf=lambda x: isinstance(x, kv_quant.RotatedVectors))
        if isinstance(x, kv_quant.RotatedVectors)
    ]
    assert found and [(x.shape, x.dtype) for x in jax.tree.leaves(after)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(empty)
    ]


@pytest.mark.long
def test_sampling_with_a_quantised_cache_is_reproducible():
    lm = tiny()
    small = dataclasses.replace(lm, model=cache.with_kv_kind(lm.model, "3bit"))
    outs = [mj.sample(small, [[5, 6, 7], [8, 9]], max_tokens=16, seed=3) for _ in range(2)]
    assert all(0 < n <= 16 for n in outs[0].lengths) and outs[0].texts == outs[1].texts
