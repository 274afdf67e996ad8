"""Rings of layers with a sliding window: the same answers as a cache with a slot for every position, in less memory.

Those of the server are in tests/serve/engine/test_prefix_cache.py.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import models, noise
from mercury_jax.bench.gpu.interpreter import interpreted
from mercury_jax.config import Experts, ModelConfig
from mercury_jax.decode import defaults
from mercury_jax.decode.build_config import build_config
from mercury_jax.models import cache, network, ops
from mercury_jax.models.gemma import GemmaConfig
from mercury_jax.models.rope import NORM_ROPE_WRITE
from mercury_jax.sharding import mesh, shardings
from mercury_jax.types import LM, Pass
from tests.marks import slow_except
from tests.tiny import VOCAB, tiny, tokenizer

LONG = 1500  # tokens: the rings of these models have 1,152 slots
GEMMA = GemmaConfig(
    vocab=VOCAB, width=16, layers=3, heads=2, kv_heads=1, head_dim=8, ffn=32, block=8, window=20, global_layers=(1,),
    global_head_dim=8, global_kv_heads=1, self_conditioning=True, encoder_scalars=True, mask=4, context=4096,
)  # fmt: skip
CAUSAL = ModelConfig(
    vocab=VOCAB, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=32, pattern="block_causal", block=1,
    window=20, global_layers=(1,), predicts_next=True, mask=None, context=4096,
)  # fmt: skip
MODELS = {
    "gemma": GEMMA,
    "gemma, one shared layer": dataclasses.replace(GEMMA, layers=4, shared_kv=1),
    "autoregressive": CAUSAL,
    "autoregressive, windows only": dataclasses.replace(CAUSAL, global_layers=()),
}


@pytest.fixture
def fp64():
    """Both caches give the same sums in another order: only tokens of fp64 are equal for any weights."""
    with jax.enable_x64(True):
        yield


def both(name: str, dtype: str = "float32") -> tuple[LM, LM]:
    """A random model, and the same one with a slot for every position."""
    config = dataclasses.replace(MODELS[name], dtype=dtype)
    model = models.build(config)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    draw = lambda x: (x.ndim == 1) + rng.normal(size=x.shape) * (0.1 if x.ndim == 1 else x.shape[-2] ** -0.5)
    params = jax.tree.map(lambda x: jnp.asarray(draw(x), jnp.float32), shapes)
    forbidden = noise.specials(tokenizer())
    corruption = (
        noise.uniform(VOCAB, forbidden=forbidden)
        if config.mask is None
        else noise.absorbing(config.mask, forbidden=forbidden)
    )
    make = lambda model: LM(model, params, tokenizer(), corruption, name)
    return make(model), make(model._replace(rings=None))


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(30, 300, n).tolist() for n in lengths]


def answers(out: mj.Output) -> list[list[int]]:
    return [row.tolist() for row in out.tokens]


def assert_equal(found: mj.Output, want: mj.Output) -> None:
    assert answers(found) == answers(want) and found.forwards.tolist() == want.forwards.tolist()


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "gemma" else pytest.mark.slow) for n in MODELS]
)
@pytest.mark.parametrize("temperature", slow_except([0.0, 1.0], 0.0))
def test_answers_are_those_of_a_cache_with_a_slot_for_every_position(name, temperature):
    found, want = (
        mj.sample(lm, prompts(LONG, 5, 700), max_tokens=40, temperature=temperature, seed=3)
        for lm in both(name)
    )
    assert_equal(found, want)
    assert len({tuple(row) for row in answers(found)}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(kv="int8"), dict(sampler=mj.rules.wino()), dict(sampler=mj.rules.blind_editing()),
        dict(plan=mj.Plan(block=64)), dict(guidance=1.5, negative=["x", "y"]),
    ],
    ids=["int8", "wino", "blind_editing", "block 64", "guidance"],
)  # fmt: skip
def test_rings_suit_quantised_keys_leave_one_out_masks_other_blocks_and_guidance(fp64, options):
    options = dict(options)
    kind = options.pop("kv", None)
    lms = [
        dataclasses.replace(lm, model=cache.with_kv_kind(lm.model, kind)) for lm in both("gemma", "float64")
    ]
    assert_equal(*(mj.sample(lm, prompts(LONG, 9), max_tokens=40, seed=1, **options) for lm in lms))


@pytest.mark.slow
def test_a_continued_call_keeps_its_keys_or_encodes_them_again(fp64):
    """The second call has another block, and so rings of another size."""
    for more in (dict(), dict(plan=mj.Plan(block=640))):
        found = []
        for lm in both("gemma", "float64"):
            first = mj.sample(lm, prompts(LONG), max_tokens=20, seed=2, keep=True)
            found.append(mj.sample(lm, prompts(30), max_tokens=20, seed=5, state=first.state, **more))
        assert answers(found[0]) == answers(found[1])
        reads_all = bool(more)  # rings of another size
        assert found[0].encoded[0] > LONG if reads_all else found[0].encoded[0] < 100


@pytest.mark.slow
def test_a_drafter_may_draft_more_tokens_than_other_passes_have(fp64):
    lm, plain = both("autoregressive", "float64")
    wide = dataclasses.replace(tiny("bidirectional").model.config, context=4096, layers=1, dtype="float64")
    model = models.build(wide)
    drafter = dataclasses.replace(tiny("bidirectional"), model=model, params=model.init(jax.random.key(0)))
    draft = mj.Draft(drafter, tokens=700)
    found = [
        mj.sample(one, prompts(LONG), max_tokens=24, temperature=0.0, draft=draft) for one in (lm, plain)
    ]
    assert_equal(*found)


@pytest.mark.long
def test_a_pass_that_is_too_long_for_the_rings_is_refused():
    lm, _ = both("gemma")
    model = cache.with_rings(lm.model, 8)
    size = cache.ring_size(GEMMA, 8)
    assert size is not None
    state, n = model.empty_cache(1, 4 * size), size - GEMMA.lookback + 1
    given = Pass(
        jnp.zeros((1, n), jnp.int32), state, jnp.zeros(1, jnp.int32), jnp.full(1, n), jnp.full(1, n), jnp.ones(1, bool),
        jnp.zeros((1, n, GEMMA.width)),
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"tokens of a pass is {n}; allowed: at most {n - 1}"):
        model.forward(lm.params, given)


def test_a_row_of_262144_tokens_of_diffusion_gemma_takes_less_than_6_gb():
    config = GemmaConfig(
        vocab=262_144, width=2816, layers=30, heads=16, kv_heads=8, head_dim=256, ffn=2112, block=256, window=1024,
        global_layers=tuple(range(5, 30, 6)), global_head_dim=512, global_kv_heads=2, keys_as_values=True,
        experts=Experts(count=128, active=8, width=704), mask=4, context=262_144, dtype="bfloat16",
    )  # fmt: skip
    lm = dataclasses.replace(tiny(), model=models.build(config))
    plan, sampler = mj.Plan(), defaults.complete_sampler(mj.rules.entropy_bound(), lm.corruption)
    decode = build_config(lm, sampler, plan, model=lm.model, longest=262_144, region=1024)
    size = lambda model: sum(
        math.prod(x.shape) * x.dtype.itemsize
        for x in jax.tree.leaves(jax.eval_shape(lambda: model.empty_cache(1, 262_144)))
    )
    assert size(decode.model) < 6e9 < 50e9 < size(lm.model)


@pytest.mark.slow
def test_on_a_mesh_rings_are_divided_like_any_cache(fp64):
    (lm, plain), on = both("gemma", "float64"), mesh(data=2, tensor=2)
    placed = jax.device_put(lm.params, shardings(lm.params, lm.model.shardings, on))
    many = dataclasses.replace(lm, params=placed)
    found = mj.sample(many, prompts(LONG, 9), max_tokens=24, seed=1, mesh=on, keep=True)
    assert answers(found) == answers(mj.sample(plain, prompts(LONG, 9), max_tokens=24, seed=1))
    assert found.state is not None
    near, whole = (found.state.state.cache[i].k for i in (0, 1))
    assert near.shape[1] < whole.shape[1]
    assert near.sharding.shard_shape(near.shape)[0] == 1  # a row on each half of the devices


@pytest.mark.slow
def test_the_kernel_that_writes_keys_computes_the_plain_pass(monkeypatch):
    """Interpreted, in layers of both kinds, one of which is a ring that the last pass overwrites from its start."""
    wide = dataclasses.replace(
        GEMMA, layers=2, head_dim=256, global_head_dim=512, keys_as_values=True, window=65, dtype="bfloat16"
    )
    monkeypatch.setattr(cache, "LONGEST_PASS", 32)
    text = jnp.asarray(prompts(144), jnp.int32)

    def passes(config):
        monkeypatch.setitem(MODELS, "wide", config)
        lm, _ = both("wide", "bfloat16")
        model, found = cache.with_rings(lm.model, 8), []
        state = model.empty_cache(1, 512)
        for tokens in jnp.split(text, [56, 112, 120, 128], axis=1):
            count = jnp.full(1, tokens.shape[1])
            start = jnp.full(1, sum(y.shape[1] for y, _ in found))
            given = Pass(
                tokens, state, start, count, start + count, jnp.ones(1, bool), jnp.zeros((*tokens.shape, 16))
            )
            hidden, state = jax.jit(model.forward)(lm.params, given)
            found.append((hidden, state))
        return found

    want, calls, choose = passes(wide), [], jax.lax.platform_dependent

    def with_kernel(*args, **others):
        if "cuda" not in others or "cpu" in others:  # attention, and what has no kernel
            return choose(*args, **others)
        calls.append(others["cuda"])
        return others["cuda"](*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", with_kernel)
    write = functools.partial(NORM_ROPE_WRITE.run, device=interpreted())
    monkeypatch.setattr(network, "cache_ops", lambda mesh, device: ops.Ops(norm_rope_write=write))
    found = passes(
        dataclasses.replace(wide, context=wide.context + 1)
    )  # another one, since programs are kept
    assert len(calls) >= 2 and want[-1][1][0].k.shape[1] == 128 < want[-1][1][1].k.shape[1]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) < 1e-2 * np.linalg.norm(b) and (a == b).mean() > 0.5
