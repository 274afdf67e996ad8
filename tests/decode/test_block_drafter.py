"""Laws of drafting with a block drafter: whatever it drafts, the text is the verifier's."""

# pyright: reportOptionalMemberAccess=false

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.compilation import compilations
from mercury_jax.config import DrafterConfig
from mercury_jax.decode import rules
from mercury_jax.models.drafter import join
from mercury_jax.serve.engine.engine import Engine
from mercury_jax.serve.engine.request import EngineConfig, EngineRequest
from mercury_jax.tokenizer import SPECIAL
from mercury_jax.types import BlockDrafter, Pass
from tests.decode import test_drafting
from tests.tiny import VOCAB, tiny, tokenizer

ROWS, TOKENS, BLOCK = 32, 16, 6
FEW = {
    **dict.fromkeys(range(300, 304), 20.0),
    SPECIAL.eos: 12.0,
}  # answers of few ids, so that drafts often agree


verifier = functools.partial(test_drafting.verifier, layers=3)


@functools.cache
def drafter(method="same_seed", dtype="float64", ids=()):
    """A random drafter of two layers, which reads two blocks of the verifier."""
    sizes = dict(features=(0, 2), block=BLOCK, heads=2, kv_heads=1, head_dim=8, ffn=32)
    config, lm = DrafterConfig(**sizes, ids=ids), verifier(dtype)
    made = jax.jit(join(config, lm.model).init)(jax.random.key(1))["drafter"]
    target = {"vocab": VOCAB, "width": 16, "layers": 3, "tokenizer": tokenizer().fingerprint}
    params = jax.tree.map(lambda x: x.astype(dtype), made)
    return BlockDrafter(config, target, params, functools.partial(join, config), "drafter", method)


def prompts(rows=ROWS):
    """Some are longer than the passes of a step encode, so that they are prefilled."""
    rng = np.random.default_rng(5)
    return [rng.integers(10, 300, rng.choice([1, 3, 12, 40])).tolist() for _ in range(rows)]


def asked(rows=ROWS):
    """Rows with temperatures and lengths of their own."""
    row = np.arange(rows)
    varied = rules.autoregressive()._replace(processors=(mj.processors.frequency(4.0),))
    return dict(
        max_tokens=(TOKENS - row // 3 % TOKENS).tolist(), seed=3, temperature=np.array([0.0, 1.0, 4.0])[row % 3],
        sampler=varied, logit_bias=FEW,
    )  # fmt: skip


def check_same(plain, out):
    for row, (a, b) in enumerate(zip(plain.tokens, out.tokens, strict=True)):
        np.testing.assert_array_equal(a, b, str(row))
    assert out.finish == plain.finish and out.texts == plain.texts


@pytest.mark.parametrize("ids", [(), (SPECIAL.eos, 300, 303)], ids=["all_ids", "some_ids"])
def test_text_is_the_verifiers_with_the_same_seed(ids):
    with jax.enable_x64(True):
        plain = mj.sample(verifier(), prompts(), **asked())
        out = mj.sample(verifier(), prompts(), draft=drafter(ids=ids), **asked())
    check_same(plain, out)
    assert set(out.finish) == {"stop", "length"}
    # Each verifying pass gives the accepted tokens and one more, but for the end of text.
    ended = np.array([finish == "stop" for finish in out.finish])
    emitted = np.array(out.lengths) + ended - out.draft.accepted
    assert (emitted <= out.forwards).all() and (emitted >= out.forwards - ended - 1).all()
    assert (out.draft.accepted <= out.draft.proposed).all() and (out.draft.forwards == out.forwards).all()
    assert out.draft.acceptance > 0.05 and out.forwards.sum() < plain.forwards.sum()


@functools.cache
def nano():
    return mj.load()


REPEATED = {
    "block drafter": (verifier, lambda: dict(draft=drafter(dtype="float32"))),
    "lookup": (verifier, lambda: dict(draft="lookup")),
    "draft": (nano, lambda: dict(draft=mj.Draft(nano(), tokens=4))),
    "self speculation": (nano, lambda: dict(sampler=rules.self_speculation(4))),
    "lookahead": (tiny, lambda: dict(sampler=rules.threshold(0.9), plan=mj.Plan(lookahead=1))),
    "refresh": (
        lambda: tiny("bidirectional"),
        lambda: dict(plan=mj.Plan(refresh=mj.Refresh.prefix(), block=4)),
    ),
    "fused": (tiny, lambda: dict(plan=mj.Plan(fuse_commit=2))),
}


@pytest.mark.long
@pytest.mark.parametrize("name", REPEATED)
def test_a_second_call_compiles_nothing(name):
    """A method is the same function in each call: otherwise each one traces and compiles its program again."""
    model, how = REPEATED[name]
    lm = model("float32") if model is verifier else model()
    sample = lambda seed: mj.sample(lm, [5, 6, 7], max_tokens=8, seed=seed, **how())
    sample(1)
    before = compilations()
    sample(2)
    assert compilations() == before


@pytest.mark.long
@pytest.mark.parametrize("draft", ["block", "lookup"])
def test_a_processor_of_ones_own_is_heeded(draft):
    """It is traced before decoding, with models that compute nothing."""
    only_even = lambda logits, view: jnp.where(jnp.arange(logits.shape[-1]) % 2 == 1, -1e30, logits)
    sampler = rules.autoregressive()._replace(processors=(mj.logits_processor(only_even)(),))
    how = dict(max_tokens=12, sampler=sampler, logit_bias=FEW)
    with jax.enable_x64(True):
        plain = mj.sample(verifier(), prompts(4), **how)
        out = mj.sample(verifier(), prompts(4), draft=drafter() if draft == "block" else draft, **how)
    check_same(plain, out)
    assert all(np.all(ids % 2 == 0) for ids in out.tokens) and any(map(len, out.tokens))


@pytest.mark.long
def test_without_an_id_that_is_never_drafted_the_drafts_are_the_same():
    """The logits of some ids come back to their places among all."""
    never, others = 7, tuple(i for i in range(VOCAB) if i != 7)
    how = dict(max_tokens=TOKENS, temperature=0.0, logit_bias=FEW | {never: -100.0})
    with jax.enable_x64(True):
        every, some = (
            mj.sample(verifier(), prompts(), draft=drafter(ids=ids), **how) for ids in ((), others)
        )
    np.testing.assert_array_equal(every.draft.accepted, some.draft.accepted)
    assert every.draft.accepted.sum() > 0


@pytest.mark.long
def test_several_answers_stop_texts_and_logprobs():
    stop = [tokenizer().decode([301])]
    how = dict(max_tokens=12, temperature=2.0, logit_bias=FEW, seed=2, n=2, stop=stop, logprobs=2)
    with jax.enable_x64(True):
        plain = mj.sample(verifier(), prompts(6), **how)
        out = mj.sample(verifier(), prompts(6), draft=drafter(), **how)
    check_same(plain, out)
    for a, b in zip(plain.logprobs, out.logprobs, strict=True):
        np.testing.assert_allclose(a.tokens, b.tokens, rtol=1e-9)


@pytest.mark.long
def test_rejection_keeps_greedy_text_and_draws_others():
    how = dict(max_tokens=TOKENS, logit_bias=FEW, seed=1, temperature=(np.arange(ROWS) % 2 * 2.0))
    with jax.enable_x64(True):
        plain = mj.sample(verifier(), prompts(), **how)
        out = mj.sample(verifier(), prompts(), draft=drafter("rejection", ids=(SPECIAL.eos, 301, 302)), **how)
    for a, b in list(zip(plain.tokens, out.tokens, strict=True))[::2]:
        np.testing.assert_array_equal(a, b)
    assert any(a.tolist() != b.tolist() for a, b in zip(plain.tokens[1::2], out.tokens[1::2], strict=True))
    assert out.draft.accepted.sum() > 0


def encoded(chunks):
    """The cache after a prompt that was encoded in chunks, beside a row that takes no part."""
    lm, own = verifier(), drafter()
    model, params = own.join(lm.model), {"target": lm.params, "drafter": own.params}
    ids, cache, at = (
        np.random.default_rng(0).integers(10, 300, (2, 20)),
        model.empty_cache(2, 32),
        np.zeros(2, int),
    )
    for size in chunks:
        used = np.array([size, 0])
        tokens = np.pad(ids[:, at[0] : at[0] + size], ((0, 0), (0, 20 - size)))
        given = Pass(tokens, cache, at, used, at + used, np.ones(2, bool))
        _, cache = model.forward(params, jax.tree.map(jnp.asarray, given))
        at = at + used
    return cache


@pytest.mark.long
@pytest.mark.parametrize("chunks", [(7, 7, 6), (1,) * 20])
def test_the_drafters_keys_do_not_depend_on_the_chunks_of_the_prompt(chunks):
    with jax.enable_x64(True):
        for a, b in zip(jax.tree.leaves(encoded((20,))), jax.tree.leaves(encoded(chunks)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
            assert np.any(a[0]) and not np.any(a[1])


@pytest.mark.long
def test_a_model_with_its_drafter_streams_and_serves_the_same_text():
    """A request under a grammar shares the batch: it gets one token a pass."""
    lm = verifier("float32")
    joined = mj.with_block_drafter(lm, drafter(dtype="float32"))
    fits = mj.grammar.Regex("(def|return|x) (value|total|count|y)")
    asked = [
        EngineRequest(prompt=tuple(ids), max_tokens=24 - i, seed=i, temperature=temperature)
        for i, (ids, temperature) in enumerate(zip(prompts(4), (0.0, 0.0, 1.0, 1.0), strict=True))
    ]
    asked.append(dataclasses.replace(asked[0], grammar=mj.grammar.compile(tokenizer(), fits)))
    texts = []
    for model in (lm, joined):
        engine = Engine(model, EngineConfig(slots=3, context=128, programs="one", rules=()))
        engine.start()
        try:
            texts.append([handle.wait(60).tokens.tolist() for handle in list(map(engine.submit, asked))])
        finally:
            engine.stop()
    assert texts[0] == texts[1] and len(texts[0][-1]) > 0
    last = [list(mj.stream(model, prompts(1)[0], max_tokens=12))[-1] for model in (lm, joined)]
    assert last[0].tokens.tolist() == last[1].tokens.tolist()
    schema = dict(max_tokens=12, schema=fits, seed=1)
    assert mj.sample(lm, "x", **schema).text == mj.sample(joined, "x", **schema).text


def test_what_does_not_fit_is_refused_by_name():
    lm, own = verifier("float32"), drafter(dtype="float32")
    other = lambda **sizes: dataclasses.replace(own, target={**own.target, **sizes})
    unread = dataclasses.replace(lm, model=lm.model._replace(features=None))
    deep, wide = (dataclasses.replace(own.config, **x) for x in (dict(features=(0, 3)), dict(ids=(5, 320))))
    wrong = [
        (lm, dict(draft=other(vocab=97)), "draft is 'drafter, for a model with vocab 97'.*vocab is 320"),
        (lm, dict(draft=other(width=8)), "width is 16"),
        (lm, dict(draft=other(layers=30)), "layers is 3"),
        (lm, dict(draft=other(tokenizer="x")), "tokenizer is"),
        (lm, dict(draft=dataclasses.replace(own, params={})), "draft.params is '0 arrays'"),
        (unread, dict(draft=own), "lm is 'ModelConfig'.*hidden states are read"),
        (tiny(), dict(draft=own), "lm is 'tiny causal_encoder'.*predicts the next"),
        (lm, dict(draft=dataclasses.replace(own, join=functools.partial(join, deep))), "drafter.features"),
        (lm, dict(draft=dataclasses.replace(own, join=functools.partial(join, wide))), "drafter.ids is 320"),
        (lm, dict(draft=own, plan=mj.Plan(block=4)), "plan"),
        (lm, dict(draft=own, guidance=1.0), "guidance"),
        (lm, dict(draft=own, keep=True), "keep"),
        (lm, dict(draft=own, schema={"type": "null"}), "schema"),
        (lm, dict(draft=own, sampler=rules.threshold()), "sampler is 'threshold'"),
    ]
    for model, how, match in wrong:
        with pytest.raises(ValueError, match=match):
            mj.sample(model, "x", **how)
    for make, match in [
        (lambda: dataclasses.replace(own, method="greedy"), "draft.method"),
        (lambda: DrafterConfig(features=(2, 1)), "drafter.features"),
        (lambda: DrafterConfig(features=(1,), block=1), "drafter.block"),
        (lambda: DrafterConfig(features=(1,), heads=3), "drafter.kv_heads"),
        (lambda: DrafterConfig(features=(1,), ids=(5, 4)), "drafter.ids"),
    ]:
        with pytest.raises(ValueError, match=match):
            make()
