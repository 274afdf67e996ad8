"""Laws of the Gemma architecture; its agreement with transformers is in tests/hub."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax import models
from mercury_jax.config import Experts, from_dict, to_dict
from mercury_jax.models.gemma import GemmaConfig
from mercury_jax.sharding import mesh, name_of, shardings

BLOCK, WINDOW, SLOTS = 4, 5, 32
# Every feature at once: the last two layers share the keys of the first two.
FULL = GemmaConfig(
    vocab=61, width=16, layers=4, heads=4, kv_heads=2, head_dim=8, ffn=24, block=BLOCK, global_layers=(1, 3),
    window=WINDOW, global_head_dim=12, global_kv_heads=1, keys_as_values=True, self_conditioning=True,
    encoder_scalars=True, experts=Experts(count=5, active=2, width=8), per_layer_width=3, per_layer_vocab=61,
    shared_kv=2, shared_ffn=40, context=64,
)  # fmt: skip
NEAR = dataclasses.replace(
    FULL, layers=1, global_layers=(), keys_as_values=False, self_conditioning=False, encoder_scalars=False,
    experts=None, per_layer_width=0, shared_kv=0, shared_ffn=None,
)  # fmt: skip


class Lm:
    """A model with parameters of some size, its functions compiled once."""

    def __init__(self, config):
        self.config, self.model = config, models.build(config)
        noise = lambda path, x: x * (1 + 0.5 * jax.random.normal(jax.random.key(len(name_of(path))), x.shape))
        self.params = jax.tree_util.tree_map_with_path(noise, jax.jit(self.model.init)(jax.random.key(1)))
        self.apply = functools.partial(jax.jit(self.model.apply), self.params)
        self.step = jax.jit(self.model.forward, static_argnames="blind")

    def forward(self, tokens, cache, start, n, encoding, carry, **more):
        ints = [jnp.asarray(x, jnp.int32) for x in (start, n, np.add(start, n))]
        return self.step(self.params, tokens, cache, *ints, jnp.asarray(encoding, bool), carry, **more)


@pytest.fixture(scope="module")
def full():
    return Lm(FULL)


@pytest.fixture(scope="module")
def text():
    return jnp.asarray(np.random.default_rng(0).integers(0, FULL.vocab, (2, 16)), jnp.int32)


@pytest.fixture(scope="module")
def carry():
    return jnp.asarray(np.random.default_rng(1).normal(size=(2, BLOCK, FULL.width)), jnp.float32)


@pytest.fixture(scope="module")
def encoded(full, text, carry):
    """Caches of both rows after 12 tokens, encoded in three passes."""
    cache = full.model.empty_cache(2, SLOTS)
    for at in (0, 4, 8):
        hidden, cache = full.forward(text[:, at : at + 4], cache, [at] * 2, [4] * 2, [1, 1], carry)
    return hidden, cache


def packed(model, text, prompt, room=3):
    """Laid-out documents, each behind `room` slots of padding: slots are not positions."""
    rows = [model.layout(np.asarray(ids), prompt) for ids in text]
    front = lambda x: np.concatenate([np.zeros((room, *x.shape[1:]), x.dtype), x])
    moved = lambda r: r + room * (r[..., :1] < r[..., 1:])
    return [
        np.stack([front(f(row)) for row in rows])
        for f in (lambda x: x.tokens, lambda x: x.positions, lambda x: moved(x.ranges), lambda x: x.canvas)
    ]


def test_a_pass_without_a_cache_is_passes_with_one(full, text, carry, encoded):
    """Clean tokens as encoded, canvas tokens as denoised against them; self-conditioned too."""
    tokens, positions, ranges, _ = packed(full.model, text, 12)
    wide = jnp.zeros((*tokens.shape, FULL.width)).at[:, -BLOCK:].set(carry)
    hidden = full.apply(tokens, positions, ranges, wide)
    denoised, _ = full.forward(text[:, 12:], encoded[1], [12] * 2, [4] * 2, [0, 0], carry)
    np.testing.assert_allclose(hidden[:, -BLOCK:], denoised, atol=2e-5)
    np.testing.assert_allclose(hidden[:, 3 + 8 : 3 + 12], encoded[0], atol=2e-5)


def test_rows_that_encode_and_rows_that_denoise_share_a_pass(full, text, carry, encoded):
    mixed, _ = full.forward(text[:, 12:], encoded[1], [12] * 2, [4] * 2, [0, 1], carry)
    for row, encoding in enumerate([0, 1]):
        alike, _ = full.forward(text[:, 12:], encoded[1], [12] * 2, [4] * 2, [encoding] * 2, carry)
        np.testing.assert_allclose(mixed[row], alike[row], atol=1e-5)
    assert np.abs(mixed - full.forward(text[:, 12:], encoded[1], [12] * 2, [4] * 2, [1, 0], carry)[0]).max() > 0.1


def test_encoding_ignores_the_carry_and_denoising_does_not(full, text, carry, encoded):
    run = lambda encoding, carry: full.forward(text[:, 12:], encoded[1], [12] * 2, [4] * 2, [encoding] * 2, carry)[0]
    np.testing.assert_array_equal(run(1, carry), run(1, -carry))
    assert np.abs(run(0, carry) - run(0, -carry)).max() > 1e-3
    tokens, positions, ranges, _ = packed(full.model, text, 12)
    nothing = jnp.zeros((*tokens.shape, FULL.width))
    np.testing.assert_allclose(  # no carry is a carry of zeros
        full.apply(tokens, positions, ranges), full.apply(tokens, positions, ranges, nothing), atol=1e-6
    )


def test_a_shadow_mask_does_not_know_the_token_it_stands_for(full, text, carry, encoded):
    run = lambda tokens, carry: full.forward(
        tokens, encoded[1], [12] * 2, [4] * 2, [0, 0], carry, blind=7
    )[0][:, BLOCK:]
    base, spoiled = run(text[:, 12:], carry), text[:, 12:].at[:, 1].add(1) % FULL.vocab
    moved = np.abs(run(spoiled, carry.at[:, 1].add(1.0)) - base).max(axis=(0, 2))
    # The other tokens' hidden states know it in the second layer, so only a layer's worth is asked of the first.
    one = Lm(dataclasses.replace(FULL, layers=1, global_layers=(), shared_kv=0, shared_ffn=None))
    cache = one.forward(text[:, :12], one.model.empty_cache(2, SLOTS), [0] * 2, [12] * 2, [1, 1], ())[1]
    run = lambda tokens, carry: one.forward(tokens, cache, [12] * 2, [4] * 2, [0, 0], carry, blind=7)[0][:, BLOCK:]
    near = np.abs(run(spoiled, carry.at[:, 1].add(1.0)) - run(text[:, 12:], carry)).max(axis=(0, 2))
    assert near[1] < 1e-6 and (near[[0, 2, 3]] > 1e-4).all()
    assert (moved[[0, 2, 3]] > 1e-4).all()


@pytest.mark.parametrize("tail", [None, 0, 6])
def test_a_sliding_layer_sees_its_window_and_a_canvas_its_tail(tail):
    config = dataclasses.replace(NEAR, context_tail=tail)
    lm, ids = Lm(config), np.arange(20, 40)
    tokens, positions, ranges, canvas = (x[0] for x in packed(lm.model, ids[None], 9))
    size = len(tokens)
    changed = np.where(np.eye(size + 1, size, k=-1, dtype=bool), 3, tokens)  # row j + 1: slot j says something else
    every = lambda x: np.broadcast_to(x, (size + 1, *x.shape))
    hidden = np.asarray(lm.apply(changed, every(positions), every(ranges)))
    flows = (np.abs(hidden[1:] - hidden[0]).max(-1) > 1e-7).T[3:, 3:]
    position, canvas = positions[3:], canvas[3:]
    q, k = np.meshgrid(np.arange(size - 3), np.arange(size - 3), indexing="ij")
    begins = 9 + canvas * BLOCK  # of a canvas token's canvas
    clean, back = canvas < 0, position[q] - position[k]
    want = clean[q] & clean[k] & (back >= 0) & (back < WINDOW)
    want |= ~clean[q] & (canvas[q] == canvas[k])
    reach = begins[q] - position[k]
    want |= ~clean[q] & clean[k] & (reach > 0) & (reach <= (WINDOW - 1 if tail is None else tail))
    np.testing.assert_array_equal(flows, want)


def test_an_autoregressive_model_denoises_a_token_with_its_window():
    """At block 1 a canvas of one token sees what the token itself sees when it is encoded."""
    lm = Lm(dataclasses.replace(NEAR, pattern="block_causal", block=1, predicts_next=True))
    text = jnp.arange(20, 32)[None]
    cache = lm.forward(text[:, :11], lm.model.empty_cache(1, SLOTS), [0], [11], [1], ())[1]
    one, two = (lm.forward(text[:, 11:], cache, [11], [1], [flag], ())[0] for flag in (0, 1))
    np.testing.assert_allclose(one, two, atol=1e-6)


def test_self_conditioning_carries_soft_embeddings(full):
    certain = jnp.full((1, 2, FULL.vocab), -1e9).at[0, jnp.arange(2), jnp.asarray([5, 9])].set(0.0)
    soft = full.model.condition(full.params, certain)
    np.testing.assert_allclose(soft[0], full.params["embed"][jnp.asarray([5, 9])] * 4.0, rtol=1e-6)
    like = full.model.condition(None, jnp.zeros((3, 2, 1)))
    assert like.shape == (3, 2, FULL.width) and like.dtype == soft.dtype == jnp.float32
    assert models.build(NEAR).condition({}, certain) == ()


def test_logits_stay_under_the_cap(full):
    hidden = 50 * jax.random.normal(jax.random.key(0), (1, 4, FULL.width))
    logits = np.asarray(full.model.head(full.params, hidden))
    free = np.asarray(models.build(dataclasses.replace(FULL, softcap=None)).head(full.params, hidden))
    assert np.abs(free).max() > 30 >= np.abs(logits).max()
    np.testing.assert_allclose(logits, 30 * np.tanh(free / 30), rtol=1e-5, atol=1e-5)


def test_layers_that_share_keys_have_none_and_the_cache_neither(full):
    has = lambda i: sorted(full.params[f"block_{i}"]["attention"])
    assert has(0) == ["k", "k_norm", "o", "q", "q_norm", "v"] and has(1) == ["k", "k_norm", "o", "q", "q_norm"]
    assert has(2) == has(3) == ["o", "q", "q_norm"]
    assert [FULL.source(i) for i in range(4)] == [0, 1, 0, 1]
    assert [full.params[f"block_{i}"]["mlp"]["gate"]["w"].shape[1] for i in range(4)] == [24, 24, 40, 40]
    assert [kv.k.shape for kv in full.model.empty_cache(2, 9)] == [(2, 9, 2, 8), (2, 9, 1, 12)]


def test_training_reaches_every_parameter(full, text, carry):
    """And four devices, with experts and heads apart, make the gradient that one makes."""
    tokens, positions, ranges, _ = packed(full.model, text, 9)
    wide = jnp.ones((*tokens.shape, FULL.width))

    def loss(params):
        hidden = full.model.apply(params, tokens, positions, ranges, wide)
        return jnp.square(full.model.head(params, hidden) - 1.0).mean()

    slopes = jax.jit(jax.grad(loss))(full.params)
    for path, slope in jax.tree_util.tree_flatten_with_path(slopes)[0]:
        assert np.isfinite(slope).all() and np.abs(slope).max() > 0, name_of(path)
    many = mesh(data=1, tensor=2, expert=2)
    where = shardings(full.params, full.model.shardings, many)
    apart = jax.jit(jax.grad(loss), out_shardings=where)(jax.device_put(full.params, where))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5), apart, slopes)


def test_every_matrix_has_a_sharding(full):
    """Of the arrays that grow with two sizes of the model; a rule of a wrong rank is refused by `shardings`."""
    config = dataclasses.replace(FULL, experts=Experts(count=6, active=2, width=8), per_layer_width=4)
    like = jax.eval_shape(models.build(config).init, jax.random.key(0))
    where = shardings(like, full.model.shardings, mesh(data=1, fsdp=2, expert=2))
    for path, spec in jax.tree_util.tree_flatten_with_path(where)[0]:
        matrix = any(part in name_of(path) for part in ("/w", "embed", "gate_up", "moe/down"))
        assert any(spec.spec) == matrix, name_of(path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(window=0), "window"), (dict(global_layers=(4,)), "global_layers"), (dict(pattern="bidirectional"), "pattern"),
        (dict(shared_kv=3), "shared_kv"), (dict(activation="relu"), "activation"), (dict(softcap=0.0), "softcap"),
        (dict(global_kv_heads=3), "global_kv_heads"), (dict(qk_norm=False), "qk_norm"), (dict(context_tail=-1), "tail"),
        (dict(experts=Experts(count=4, active=2, width=8, shared=3)), "experts"), (dict(per_layer_vocab=3), "per_layer"),
        (dict(pattern="block_causal", block=4), "pattern"), (dict(global_head_dim=7), "global_head_dim"),
    ],
)  # fmt: skip
def test_bad_configs_are_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(FULL, **change)


def test_a_config_survives_json():
    assert from_dict(GemmaConfig, to_dict(FULL)) == FULL
