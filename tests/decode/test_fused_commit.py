"""Laws of fused commits: a pass that also begins the next block changes no token, and saves one pass for each block."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import models
from tests.models.test_dit import teller, witness
from tests.models.test_rings import both as ring_models
from tests.tiny import tiny

PROMPTS = [
    [20, 31, 42],
    list(range(20, 39)),
    list(range(40, 48)),
    list(range(30, 77)),
]  # 47 tokens: prefill, too


@pytest.fixture(autouse=True)
def _fp64():
    """Two programs round differently: in fp64 no near tie is broken differently."""
    with jax.enable_x64(True):
        yield


@functools.cache
def exact(name: str) -> mj.LM:
    if name == "gemma":  # rings, self-conditioning, and layers that tell clean tokens from a canvas
        return ring_models("gemma", "float64")[0]
    lm = tiny(name)
    config = dataclasses.replace(lm.model.config, dtype="float64")
    params = jax.tree.map(lambda x: x.astype(jnp.float64), lm.params)
    return dataclasses.replace(lm, model=models.build(config), params=params)


def decode(name: str, prompts: list[list[int]], fuse: int, block: int | None = None, **more) -> mj.Output:
    lm = exact(name)
    return mj.sample(
        lm, prompts, max_tokens=24, seed=3, temperature=0.7, logit_bias={lm.tokenizer.eos: -1e4},
        plan=mj.Plan(steps=3, block=block, fuse_commit=fuse), **more,
    )  # fmt: skip


def assert_same(fused: mj.Output, plain: mj.Output) -> None:
    for a, b in zip(fused.tokens, plain.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    assert fused.finish == plain.finish and fused.forwards.tolist() == plain.forwards.tolist()


CASES = [  # model, block, tokens of the prompt; blocks that follow text which passes encode, passes that only encode
    ("causal_encoder", None, 3, 3, 0), ("causal_encoder", None, 19, 2, 0), ("gemma", None, 47, 2, 0),
    ("block_causal", 4, 3, 3, 0), ("block_causal", 4, 19, 4, 1),
]  # fmt: skip


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name, block, size, blocks, alone", CASES)
def test_one_row_takes_one_pass_fewer_for_each_block(name, block, size, blocks, alone):
    plain, fused = (decode(name, [next(x for x in PROMPTS if len(x) == size)], n, block) for n in (0, 1))
    assert_same(fused, plain)
    assert fused.passes == plain.passes - blocks == fused.forwards[0] + alone


@pytest.mark.long
@pytest.mark.parametrize("name", ["causal_encoder", "block_causal", "gemma"])
@pytest.mark.parametrize("more", [{}, {"guidance": 1.5}], ids=["plain", "guided"])
def test_rows_of_a_batch_keep_their_tokens_at_whatever_pace_they_move(name, more):
    sampler = mj.rules.threshold(np.asarray([0.004, 0.02, 0.9, 0.01]))
    plain, fused = (decode(name, PROMPTS, n, sampler=sampler, logprobs=1, **more) for n in (0, 4))
    assert_same(fused, plain)
    assert fused.passes < plain.passes
    for a, b in zip(fused.logprobs, plain.logprobs, strict=True):
        for x, y in zip(dataclasses.astuple(a), dataclasses.astuple(b), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-6)


def test_a_timed_model_is_told_that_committed_tokens_are_clean():
    """The rule writes 60 only where the model was told the view's time of its canvas, and 0 of what it encoded."""
    out = mj.sample(
        teller("block_causal"), "def x", max_tokens=20, sampler=witness(), plan=mj.Plan(fuse_commit=1)
    )
    assert set(out.tokens[0].tolist()) == {60} and out.passes == out.forwards[0]


@pytest.mark.long
def test_a_decoder_under_vmap_decodes_what_sample_does():
    lm = exact("causal_encoder")
    decoder = mj.decoder(lm, mj.rules.confidence(), mj.Plan(steps=3, fuse_commit=1), slots=40)
    keys = jax.vmap(jax.random.key)(jnp.arange(3))

    def one(key):
        state = decoder.init(lm.params, jnp.asarray([PROMPTS[0]]), max_tokens=24, key=key[None])
        return decoder.answer(decoder.run(lm.params, state))[0][0]

    found = jax.jit(jax.vmap(one))(keys)
    want = mj.sample(lm, [PROMPTS[0]] * 3, max_tokens=24, seed=[0, 1, 2], sampler=mj.rules.confidence(),
                     plan=mj.Plan(steps=3, fuse_commit=0))  # fmt: skip
    for row, tokens in zip(found, want.tokens, strict=True):
        assert row[: len(tokens)].tolist() == tokens.tolist()


@pytest.mark.parametrize("name, plan, sampler, reason", [
    ("bidirectional", mj.Plan(fuse_commit=1), None, "encodes no blocks"),
    ("causal_encoder", mj.Plan(fuse_commit=1, lookahead=1), None, "lookahead"),
    ("causal_encoder", mj.Plan(fuse_commit=2, refresh=mj.cache_refresh.dkv_decode()), None, "refresh"),
    ("causal_encoder", mj.Plan(fuse_commit=1), mj.rules.wino(0.01, 0.05), "leave-one-out"),
])  # fmt: skip
def test_a_plan_that_cannot_fuse_is_refused_by_name(name, plan, sampler, reason):
    with pytest.raises(ValueError, match=rf"plan\.fuse_commit is {plan.fuse_commit}; .*{reason}"):
        mj.sample(tiny(name), "def x", max_tokens=8, plan=plan, sampler=sampler)


@pytest.mark.parametrize("value", [-1, True, 1.5])
def test_fuse_commit_is_a_number_of_rows(value):
    with pytest.raises(ValueError, match="fuse_commit is"):
        mj.Plan(fuse_commit=value)
