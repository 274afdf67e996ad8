"""Properties of the Gemma architecture; its agreement with transformers is tested in tests/hub."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax import models
from mercury_jax.config import Experts, from_dict, to_dict
from mercury_jax.models.gemma import GemmaConfig
from mercury_jax.models.weight_quant import FORMATS, quantise
from mercury_jax.ops.device import target
from mercury_jax.sharding import mesh, path_name, shardings, with_device
from mercury_jax.types import LeaveOneOut, PackedPass, Pass

BLOCK, WINDOW, SLOTS = 4, 5, 32
# Every feature at once: the last layer shares the keys of the first.
FULL = GemmaConfig(
    vocab=61, width=16, layers=3, heads=4, kv_heads=2, head_dim=8, ffn=24, block=BLOCK, global_layers=(1,),
    window=WINDOW, global_head_dim=12, global_kv_heads=1, keys_as_values=True, self_conditioning=True,
    encoder_scalars=True, experts=Experts(count=5, active=2, width=8), per_layer_width=3, per_layer_vocab=61,
    shared_kv=1, shared_ffn=40, context=64,
)  # fmt: skip
NEAR = dataclasses.replace(
    FULL, layers=1, global_layers=(), keys_as_values=False, self_conditioning=False, encoder_scalars=False,
    experts=None, per_layer_width=0, shared_kv=0, shared_ffn=None,
)  # fmt: skip


class Lm:
    """A model with random parameters, scales and scalars too; its functions compiled once."""

    def __init__(self, config):
        self.config, self.model = config, models.build(config)
        rng = np.random.default_rng(0)

        def draw(like):  # not by `init`, which would have to compile
            x = rng.normal(size=like.shape)
            scale = 0.3 if like.ndim == 1 else like.shape[-2] ** -0.5
            return jnp.asarray((like.ndim == 1) + scale * x, config.dtype)

        self.params = jax.tree.map(draw, jax.eval_shape(self.model.init, jax.random.key(0)))
        run = jax.jit(self.model.apply)
        self.apply = lambda *laid: run(self.params, PackedPass(*laid))
        self.step = jax.jit(self.model.forward)

    def forward(self, tokens, cache, start, used, encoding, self_cond, leave_one_out=None):
        ints = [jnp.asarray(x, jnp.int32) for x in (start, used, np.add(start, used))]
        given = Pass(tokens, cache, *ints, jnp.asarray(encoding, bool), self_cond)
        if leave_one_out is not None:  # a mask id: one mask for each token
            columns = jnp.tile(jnp.arange(tokens.shape[1]), (len(tokens), 1))
            given = given._replace(leave_one_out=LeaveOneOut(leave_one_out, columns))
        return self.step(self.params, given)


@pytest.fixture(scope="module")
def full():
    return Lm(FULL)


@pytest.fixture(scope="module")
def text():
    return jnp.asarray(np.random.default_rng(0).integers(0, FULL.vocab, (2, 16)), jnp.int32)


@pytest.fixture(scope="module")
def carry():
    return jnp.asarray(np.random.default_rng(1).normal(size=(2, BLOCK, FULL.width)), jnp.float32)


def encode(lm, text, carry):
    """Caches of both rows after 12 tokens, encoded in three passes, and the last pass."""
    cache = lm.model.empty_cache(2, SLOTS)
    for at in (0, 4, 8):
        hidden, cache = lm.forward(text[:, at : at + 4], cache, [at] * 2, [4] * 2, [1, 1], carry)
    return hidden, cache


@pytest.fixture(scope="module")
def encoded(full, text, carry):
    return encode(full, text, carry)


def packed(model, text, prompt, room=3):
    """Laid-out documents, each behind `room` slots of padding: slots are not positions."""
    rows = [model.layout(np.asarray(ids), prompt) for ids in text]
    front = lambda x: np.concatenate([np.zeros((room, *x.shape[1:]), x.dtype), x])
    moved = lambda r: r + room * (r[..., :1] < r[..., 1:])
    return [
        jnp.asarray(np.stack([front(f(row)) for row in rows]))
        for f in (lambda x: x.tokens, lambda x: x.positions, lambda x: moved(x.ranges), lambda x: x.canvas)
    ]


def test_a_gemma_pass_without_a_cache_equals_passes_with_one(text, carry):
    """Clean tokens as encoded, canvas tokens as denoised against them; self-conditioned too. In float64: the sums of
    the two are of different lengths, and their rounding in float32 differs from one processor to the next."""
    with jax.enable_x64(True):
        full, carry = Lm(dataclasses.replace(FULL, dtype="float64")), jnp.asarray(carry, jnp.float64)
        tokens, positions, ranges, _ = packed(full.model, text, 12)
        wide = jnp.zeros((*tokens.shape, FULL.width)).at[:, -BLOCK:].set(carry)
        hidden, encoded = full.apply(tokens, positions, ranges, wide), encode(full, text, carry)
        denoised, _ = full.forward(text[:, 12:], encoded[1], [12] * 2, [4] * 2, [0, 0], carry)
    np.testing.assert_allclose(hidden[:, -BLOCK:], denoised, atol=1e-12)
    np.testing.assert_allclose(hidden[:, 3 + 8 : 3 + 12], encoded[0], atol=1e-12)


@pytest.mark.long
def test_rows_that_encode_and_rows_that_denoise_share_a_pass(full, text, carry, encoded):
    mixed, _ = full.forward(text[:, 12:], encoded[1], [12] * 2, [4] * 2, [0, 1], carry)
    for row, encoding in enumerate([0, 1]):
        alike, _ = full.forward(text[:, 12:], encoded[1], [12] * 2, [4] * 2, [encoding] * 2, carry)
        np.testing.assert_allclose(mixed[row], alike[row], atol=1e-5)
    assert (
        np.abs(mixed - full.forward(text[:, 12:], encoded[1], [12] * 2, [4] * 2, [1, 0], carry)[0]).max()
        > 0.1
    )


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["int8_dynamic", "fp8_dynamic"])
def test_rows_that_a_norm_rounds_are_those_that_the_products_would_round(kind):
    """With the operations of a GPU whose kernel of the norms also rounds rows; here all run in plain JAX."""
    sizes = dict(
        width=256, heads=2, kv_heads=1, head_dim=16, ffn=64, experts=Experts(count=4, active=2, width=64)
    )
    lm = Lm(dataclasses.replace(NEAR, layers=2, dtype="bfloat16", **sizes))
    inputs = {"o": 2}  # axes that are contracted

    def rounded(path, w):
        name = path_name(path)
        stack = name.endswith(("gate_up", "moe/down"))
        if not stack and (not name.endswith("/w") or "router" in name):
            return w
        made = quantise(
            np.asarray(w, np.float32), FORMATS[kind], inputs.get(name.split("/")[-2], 1), int(stack)
        )
        return jax.tree.map(jnp.asarray, made)

    lm.params = jax.tree_util.tree_map_with_path(rounded, lm.params)
    text = jnp.asarray(np.random.default_rng(0).integers(0, lm.config.vocab, (2, 4)), jnp.int32)
    run = lambda: lm.forward(text, lm.model.empty_cache(2, SLOTS), [0] * 2, [4] * 2, [1, 1], ())[0]
    want = np.asarray(run(), np.float32)
    gpu = with_device(lm.model, target("sm_90a"))
    lm.step = jax.jit(gpu.forward)
    ours = np.asarray(run(), np.float32)
    np.testing.assert_allclose(ours, want, atol=0.02 * np.abs(want).max())


def test_a_gemma_row_does_not_depend_on_other_rows(full, text, carry, encoded):
    """Bit for bit, though both rows' tokens share the tiles of the experts."""
    run = lambda tokens: full.forward(tokens, encoded[1], [12] * 2, [4] * 2, [0, 0], carry)[0]
    np.testing.assert_array_equal(run(text[:, 12:])[0], run(text[:, 12:].at[1].set(text[1, :4]))[0])


@pytest.mark.long
def test_encoding_ignores_self_conditioning_and_denoising_does_not(full, text, carry, encoded):
    run = lambda encoding, carry: full.forward(
        text[:, 12:], encoded[1], [12] * 2, [4] * 2, [encoding] * 2, carry
    )[0]
    np.testing.assert_array_equal(run(1, carry), run(1, -carry))
    assert np.abs(run(0, carry) - run(0, -carry)).max() > 1e-3
    tokens, positions, ranges, _ = packed(full.model, text, 12)
    nothing = jnp.zeros((*tokens.shape, FULL.width))
    np.testing.assert_allclose(  # no carry is a carry of zeros
        full.apply(tokens, positions, ranges), full.apply(tokens, positions, ranges, nothing), atol=1e-6
    )


def test_clean_tokens_have_scalars_of_their_own(full, text, carry):
    louder = jax.tree_util.tree_map_with_path(
        lambda path, x: 2 * x if path_name(path).endswith("encoder_scalar") else x, full.params
    )
    lone = [jnp.asarray([x, x], jnp.int32) for x in (0, 4, 4)]
    given = Pass(text[:, :4], full.model.empty_cache(2, SLOTS), *lone, None, carry)
    run = lambda params, flag: full.step(params, given._replace(encoding=jnp.asarray([flag] * 2)))[0]
    np.testing.assert_array_equal(run(louder, False), run(full.params, False))
    assert np.abs(run(louder, True) - run(full.params, True)).max() > 1e-2


def test_a_leave_one_out_mask_does_not_see_its_own_token(text, carry):
    """In one layer; in deeper ones it knows what the other tokens know of it."""
    one = Lm(
        dataclasses.replace(FULL, layers=1, global_layers=(), shared_kv=0, shared_ffn=None, experts=None)
    )
    run = lambda tokens, carry: one.forward(
        tokens, one.model.empty_cache(2, SLOTS), [12] * 2, [4] * 2, [0, 0], carry, leave_one_out=7
    )[0][:, BLOCK:]
    spoiled = text[:, 12:].at[:, 1].add(1) % FULL.vocab
    moved = np.abs(run(spoiled, carry.at[:, 1].add(1.0)) - run(text[:, 12:], carry)).max(axis=(0, 2))
    assert moved[1] < 1e-6 and (moved[[0, 2, 3]] > 1e-4).all()


@pytest.mark.parametrize("tail", [None, 0, 6])
def test_sliding_layers_attend_to_the_window_and_a_canvas_to_its_tail(tail):
    config = dataclasses.replace(NEAR, context_tail=tail)
    lm, ids = Lm(config), np.arange(20, 40)
    tokens, positions, ranges, canvas = (np.asarray(x[0]) for x in packed(lm.model, ids[None], 9))
    size = len(tokens)
    changed = np.where(
        np.eye(size + 1, size, k=-1, dtype=bool), 3, tokens
    )  # row j + 1: slot j says something else
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


def test_self_conditioning_is_expected_embeddings(full):
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


def test_layers_with_shared_keys_have_none_of_their_own(full):
    has = lambda i: sorted(full.params[f"block_{i}"]["attention"])
    assert has(0) == ["k", "k_norm", "o", "q", "q_norm", "v"] and has(1) == [
        "k", "k_norm", "o", "q", "q_norm",
    ]  # fmt: skip
    assert has(2) == ["o", "q", "q_norm"] and [FULL.source(i) for i in range(3)] == [0, 1, 0]
    assert [full.params[f"block_{i}"]["mlp"]["gate"]["w"].shape[1] for i in range(3)] == [24, 24, 40]
    assert [kv.k.shape for kv in full.model.empty_cache(2, 9)] == [(2, 9, 2, 8), (2, 9, 1, 12)]


@pytest.mark.long
def test_training_reaches_every_parameter(full, text):
    tokens, positions, ranges, _ = packed(full.model, text, 9)
    wide = jnp.ones((*tokens.shape, FULL.width))

    def loss(params):
        hidden = full.model.apply(params, PackedPass(tokens, positions, ranges, wide))
        return jnp.square(full.model.head(params, hidden) - 1.0).mean()

    for path, slope in jax.tree_util.tree_flatten_with_path(jax.jit(jax.grad(loss))(full.params))[0]:
        assert np.isfinite(slope).all() and np.abs(slope).max() > 0, path_name(path)


def test_four_devices_compute_what_one_computes(text):
    """With experts and heads apart."""
    lm = Lm(dataclasses.replace(NEAR, experts=FULL.experts))
    tokens, positions, ranges, _ = packed(lm.model, text, 9)
    many = mesh(data=1, tensor=2, expert=2)
    apart = jax.device_put(lm.params, shardings(lm.params, lm.model.shardings, many))
    hidden = jax.jit(lm.model.apply)(apart, PackedPass(tokens, positions, ranges))
    np.testing.assert_allclose(hidden, lm.apply(tokens, positions, ranges), atol=1e-5)


def test_every_matrix_has_a_sharding(full):
    """Of the arrays that grow with two sizes of the model; a rule of a wrong rank is refused by `shardings`."""
    config = dataclasses.replace(FULL, experts=Experts(count=6, active=2, width=8), per_layer_width=4)
    like = jax.eval_shape(models.build(config).init, jax.random.key(0))
    where = shardings(like, full.model.shardings, mesh(data=1, fsdp=2, expert=2))
    for path, spec in jax.tree_util.tree_flatten_with_path(where)[0]:
        matrix = any(part in path_name(path) for part in ("/w", "embed", "gate_up", "moe/down"))
        assert any(spec.spec) == matrix, path_name(path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(window=0), "window"), (dict(global_layers=(1, 4)), "global_layers"), (dict(shared_kv=2), "shared_kv"),
        (dict(pattern="bidirectional"), "pattern"), (dict(pattern="block_causal", block=4), "pattern"),
        (dict(global_kv_heads=3), "global_kv_heads"), (dict(global_head_dim=7), "global_head_dim"),
        (dict(activation="relu"), "activation"), (dict(softcap=0.0), "softcap"), (dict(context_tail=-1), "tail"),
        (dict(qk_norm=False), "qk_norm"), (dict(per_layer_vocab=3), "per_layer"),
        (dict(experts=Experts(count=4, active=2, width=8, shared=3)), "experts"),
    ],
)  # fmt: skip
def test_bad_configs_are_refused_by_name(change, named):
    with pytest.raises((ValueError, TypeError), match=named):  # under --jaxtyping the type may refuse first
        dataclasses.replace(FULL, **change)


def test_a_gemma_config_survives_json():
    assert from_dict(GemmaConfig, to_dict(FULL)) == FULL
