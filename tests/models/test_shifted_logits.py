"""Shifted logits: a position is predicted by the hidden state before it, wherever the pass begins."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax import models
from mercury_jax.config import ModelConfig
from mercury_jax.types import PackedPass, Pass

SIZES = dict(
    vocab=31, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=24, block=4, context=64, mask=30,
    alignment="shifted",
)  # fmt: skip


@functools.cache
def pair(pattern):
    """(the shifted model, the plain one of the same parameters, the parameters)."""
    shifted = models.build(ModelConfig(**SIZES, pattern=pattern))
    plain = models.build(ModelConfig(**SIZES | {"alignment": "same_position"}, pattern=pattern))
    return shifted, plain, _params()


@functools.cache
def _params():
    """The same for every pattern: shapes and draws know nothing of it."""
    return jax.jit(models.build(ModelConfig(**SIZES)).init)(jax.random.key(0))


@functools.partial(jax.jit, static_argnums=0)
def run(model, params, tokens, cache, start, end, encoding):
    rows, length = tokens.shape
    full = lambda x: jnp.full((rows,), x, jnp.int32)
    given = Pass(tokens, cache, full(start), full(length), full(end), jnp.full((rows,), encoding))
    hidden, cache = model.forward(params, given)
    return model.head(params, hidden), cache


TOKENS = np.random.default_rng(0).integers(0, 30, (2, 12)).astype(np.int32)


@pytest.mark.long
def test_the_logits_of_a_whole_canvas_are_shifted_by_one():
    shifted, plain, params = pair("bidirectional")
    ours, _ = run(shifted, params, TOKENS, shifted.empty_cache(2, 12), 0, 12, False)
    theirs, _ = run(plain, params, TOKENS, plain.empty_cache(2, 12), 0, 12, False)
    np.testing.assert_allclose(ours[:, 1:], theirs[:, :-1], atol=1e-5)
    np.testing.assert_allclose(ours[:, 0], theirs[:, 0], atol=1e-5)


@pytest.mark.parametrize("start", [0, 1, 5])
def test_a_part_of_a_canvas_has_the_logits_of_the_whole(start):
    """With unchanged tokens the cache holds exact keys, and the token before the part leads it."""
    model, _, params = pair("bidirectional")
    whole, cache = run(model, params, TOKENS, model.empty_cache(2, 12), 0, 12, False)
    part, _ = run(model, params, TOKENS[:, start : start + 6], cache, start, 12, False)
    np.testing.assert_allclose(part, whole[:, start : start + 6], atol=1e-5)


@pytest.mark.long
def test_the_first_token_of_a_block_is_predicted_by_the_token_before_it():
    shifted, plain, params = pair("block_causal")
    _, cache = run(shifted, params, TOKENS[:, :8], shifted.empty_cache(2, 16), 0, 8, True)
    ours, _ = run(shifted, params, TOKENS[:, 8:], cache, 8, 12, False)
    said, cache = run(plain, params, TOKENS[:, :8], plain.empty_cache(2, 16), 0, 8, True)
    block, _ = run(plain, params, TOKENS[:, 8:], cache, 8, 12, False)
    np.testing.assert_allclose(ours[:, 0], said[:, 7], atol=1e-5)
    np.testing.assert_allclose(ours[:, 1:], block[:, :-1], atol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("pattern", ["bidirectional", "block_causal"])
def test_training_and_decoding_have_the_same_logits(pattern):
    """A packed row of two documents: each token of a noised canvas gets the logits that a decoding pass gives it."""
    model, _, params = pair(pattern)
    laid = [model.layout(TOKENS[i, : 10 + i], 3) for i in range(2)]
    at = len(laid[0].tokens)
    tokens = np.concatenate([np.where(masked(x), model.config.mask, x.tokens) for x in laid])[None]
    positions = np.concatenate([x.positions for x in laid])[None]
    empty = laid[1].ranges[..., 1] <= laid[1].ranges[..., 0]
    moved = np.where(empty[..., None], 0, laid[1].ranges + at)
    ranges = np.concatenate([laid[0].ranges, moved])[None]
    packed = jax.jit(lambda *laid: model.head(params, model.apply(params, PackedPass(*laid))))
    got = np.asarray(packed(tokens, positions, ranges))
    for i, (one, first) in enumerate(zip(laid, (0, at))):
        slots = np.flatnonzero(one.editable)
        starts = [0] if pattern == "bidirectional" else range(0, 10 + i, 4)
        want = np.concatenate([canvas(pattern, i, 10 + i, start) for start in starts])
        np.testing.assert_allclose(got[0, first + slots], want[one.positions[slots]], atol=1e-5)


def masked(laid):
    """Two of three positions of the canvases, among them the last of each block and the first of some."""
    return laid.editable & (laid.positions % 3 != 1)


def canvas(pattern, row, n, start):
    """Logits of a canvas of document `row` of n tokens, decoded behind what is encoded: the whole, or a block."""
    model, _, params = pair(pattern)
    at = np.arange(n)
    hidden = (at >= 3) & (at % 3 != 1)  # as `masked`: the documents have a prompt of 3
    noised = np.where(hidden, model.config.mask, TOKENS[row, :n])[None].astype(np.int32)
    if pattern == "bidirectional":
        return run(model, params, noised, model.empty_cache(1, n), 0, n, False)[0][0]
    cache, end = model.empty_cache(1, 16), min(start + 4, n)
    if start:
        _, cache = run(model, params, TOKENS[row : row + 1, :start], cache, 0, start, True)
    return run(model, params, noised[:, start:end], cache, start, end, False)[0][0]
