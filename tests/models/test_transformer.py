"""The transformer: which tokens attend to which, and that the cache does not change the result."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax import models
from mercury_jax.config import ModelConfig, RopeScaling
from mercury_jax.models.norms import inverse_rms, rms_normalise
from mercury_jax.models.rope import rope, rope_frequencies
from mercury_jax.types import PackedPass, Pass
from tests.tiny import PATTERNS, tiny

BLOCK = 8
LONG = RopeScaling(kind="longrope", factor=2.0, original=64, short=(1.0,) * 16, long=(2.0,) * 16)


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, tokens, positions, ranges):
    wide = lambda x: jnp.broadcast_to(x, (len(tokens), *x.shape))
    return model.apply(params, PackedPass(tokens, wide(positions), wide(ranges)))


def influence(lm, laid):
    """[T, T] bool: whether changing the token in slot j changes the hidden state in slot i."""
    changed = np.tile(laid.tokens, (len(laid.tokens) + 1, 1))  # the last row: no token is another
    slots = np.arange(len(laid.tokens))
    changed[slots, slots] = (laid.tokens + 1) % lm.model.config.vocab
    hidden = np.asarray(apply(lm.model, lm.params, changed, laid.positions, laid.ranges))
    return (np.abs(hidden[:-1] - hidden[-1]).max(-1) > 1e-6).T  # rows of one product may round apart


@pytest.mark.parametrize("pattern", PATTERNS)
def test_information_flows_only_as_the_pattern_allows(pattern):
    lm = tiny(pattern)
    ids, prompt = np.arange(30, 51), 5
    laid = lm.model.layout(ids, prompt)
    flows = influence(lm, laid)
    clean, position, canvas = laid.canvas < 0, laid.positions, laid.canvas
    q, k = np.meshgrid(np.arange(len(ids_ := laid.tokens)), np.arange(len(ids_)), indexing="ij")
    if pattern == "bidirectional":
        want = np.ones_like(flows)
    else:
        first = position[canvas >= 0].min()
        begins = first + canvas * BLOCK
        same = (canvas[q] == canvas[k]) & ~clean[q] & ~clean[k]
        before = ~clean[q] & clean[k] & (position[k] < begins[q])
        causal = (
            position[k] <= position[q]
            if pattern == "causal_encoder"
            else position[k] // BLOCK <= position[q] // BLOCK
        )
        want = same | before | (clean[q] & clean[k] & causal)
    np.testing.assert_array_equal(flows, want)


@pytest.mark.long
@pytest.mark.parametrize("global_layers", [(), (1,)])
def test_a_sliding_window_hides_earlier_tokens_in_all_layers_but_the_global_ones(global_layers):
    config = dataclasses.replace(
        tiny("block_causal").model.config, block=1, window=4, global_layers=global_layers, predicts_next=True,
        out_bias=True, mlp_bias=True, layers=1 + len(global_layers),
    )  # fmt: skip
    model = models.build(config)
    lm = dataclasses.replace(tiny("block_causal"), model=model, params=model.init(jax.random.key(0)))
    laid = model.layout(np.arange(30, 51), 5)
    q, k = np.meshgrid(np.arange(len(laid.tokens)), np.arange(len(laid.tokens)), indexing="ij")
    clean, back = laid.canvas < 0, laid.positions[q] - laid.positions[k]
    seen = (q == k) | (clean[k] & ((back > 0) | (clean[q] & (back == 0))))
    np.testing.assert_array_equal(influence(lm, laid), seen if global_layers else seen & (back < 4))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("n,prompt", [(21, 5), (16, 8), (9, 0), (30, 13)])
def test_a_layout_scores_every_token_after_the_prompt_once(pattern, n, prompt):
    laid = tiny(pattern).model.layout(np.arange(100, 100 + n), prompt, None)
    scored = laid.positions[laid.editable]
    assert sorted(scored) == list(range(prompt, n))
    np.testing.assert_array_equal(laid.tokens, 100 + laid.positions)
    assert (laid.ranges[..., 1] >= laid.ranges[..., 0]).all() and laid.ranges.max() <= len(laid.tokens)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_fill_completes_the_last_canvas(pattern):
    laid = tiny(pattern).model.layout(np.arange(100, 120), 5, 3)
    start = {"causal_encoder": 5, "block_causal": 0, "bidirectional": 0}[pattern]
    end = laid.positions.max() + 1
    assert (end - start) % BLOCK == 0 and end - 20 < BLOCK
    assert (laid.tokens[laid.positions >= 20] == 3).all() and laid.editable[laid.positions >= 20].all()


@pytest.mark.parametrize("pattern", ["causal_encoder", "block_causal"])
def test_rows_that_encode_and_rows_that_denoise_share_a_pass(pattern):
    lm = tiny(pattern)
    run, params = jax.jit(lm.model.forward), lm.params
    f = lambda params, *args: run(params, Pass(*args))
    tokens = jnp.asarray(np.random.default_rng(0).integers(30, 300, (2, BLOCK)))
    full = lambda *x: jnp.asarray(x, jnp.int32)
    flags = lambda *x: jnp.asarray(x, bool)
    empty = lambda n: lm.model.empty_cache(n, 32)
    # Row 0 has 8 encoded tokens and denoises its next block; row 1 encodes its first.
    _, warm = f(params, tokens, empty(2), full(0, 0), full(8, 0), full(8, 0), flags(True, True), ())
    mixed, cache = f(params, tokens, warm, full(8, 0), full(8, 8), full(16, 8), flags(False, True), ())
    one = lambda x, i: jax.tree.map(lambda y: np.asarray(y)[i : i + 1], x)
    denoised, _ = f(params, tokens[:1], one(warm, 0), full(8), full(8), full(16), flags(False), ())
    encoded, alone = f(params, tokens[1:], empty(1), full(0), full(8), full(8), flags(True), ())
    np.testing.assert_allclose(mixed[:1], denoised, atol=1e-5)
    np.testing.assert_allclose(mixed[1:], encoded, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one(cache, 1), alone)


def test_unused_positions_write_nothing():
    lm = tiny()
    cache = lm.model.empty_cache(1, 16)
    tokens, (start, n, end) = np.full((1, 8), 50), np.array([[4], [3], [7]])
    _, cache = jax.jit(lm.model.forward)(lm.params, Pass(tokens, cache, start, n, end, np.array([True])))
    written = np.abs(np.asarray(cache[0].k)).sum((0, 2, 3)) > 0
    assert np.flatnonzero(written).tolist() == [4, 5, 6]


@pytest.mark.parametrize("tied,norm", [(True, True), (False, False)])
def test_heads_and_norms_are_as_configured(tied, norm):
    config = ModelConfig(
        vocab=40, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=16, tied=tied, qk_norm=norm
    )
    params = jax.eval_shape(models.build(config).init, jax.random.key(0))
    assert ("head" in params) == (not tied)
    assert ("q_norm" in params["block_0"]["attention"]) == norm


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(kv_heads=3), "kv_heads"), (dict(head_dim=7), "head_dim"), (dict(mask=99), "mask"),
        (dict(pattern="diagonal"), "pattern"), (dict(layers=0), "layers"), (dict(dtype="int8"), "dtype"),
        (dict(window=4), "window"), (dict(global_layers=(0,)), "global_layers"),
        (dict(pattern="block_causal", block=1, window=0), "window"),
        (dict(pattern="block_causal", block=1, window=4, global_layers=(1, 0)), "global_layers"),
        (dict(rope_scaling=RopeScaling(kind="dynamic", factor=2.0, original=64), context=129), "context is 129"),
        (dict(rope_scaling=LONG, context=129), "context is 129"),
        (dict(rope_scaling=LONG, context=64, head_dim=10), "rope_scaling.short"),
    ],
)  # fmt: skip
def test_bad_configs_are_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        ModelConfig(**({"vocab": 40} | change))


def test_rotations_that_are_looked_up_are_those_that_are_computed():
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))
    positions, frequencies = jnp.array([[0, 1, 2, 3, 99], [7, 50, 3, 98, 64]]), rope_frequencies(1e4, 3)
    found = rope(x, positions, frequencies, 1.5, context=100)
    np.testing.assert_allclose(found, rope(x, positions, frequencies, 1.5), rtol=2e-5, atol=2e-5)
    assert bool(jnp.isfinite(rope(x, positions + 50, frequencies, context=100)).all())  # of unused tokens


def test_heads_normalised_together_equal_those_normalised_alone():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 3, n, 8)) * (n + 1), jnp.float32) for n in (4, 2, 2))
    for xs in ([q, k, v], [q, k]):
        for x, inverse in zip(xs, inverse_rms(xs, 1e-6), strict=True):
            want = rms_normalise(x, 1e-6)
            np.testing.assert_allclose(rms_normalise(x, 1e-6, inverse), want, rtol=1e-6)
