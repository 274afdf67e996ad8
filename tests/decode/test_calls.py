"""sample, stream, infill, score, logits: what agrees with what, and what is refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from tests.tiny import PATTERNS, tiny

PROMPT = "for value in range"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_last_moment_of_a_stream_is_the_sample(pattern):
    lm = tiny(pattern)
    moments = list(mj.stream(lm, PROMPT, max_tokens=12, sampler=mj.rules.ancestral(), seed=5, every=2))
    out = mj.sample(lm, PROMPT, max_tokens=12, sampler=mj.rules.ancestral(), seed=5)
    assert moments[-1].done and not moments[0].done
    assert moments[-1].text == out.text and moments[-1].forwards == out.forwards[0]
    assert moments[-1].settled.all()


def test_settled_tokens_of_masked_decoding_never_change():
    lm = tiny()
    moments = list(mj.stream(lm, PROMPT, max_tokens=16, sampler=mj.rules.random(), plan=mj.Plan(steps=4)))
    for a, b in itertools.pairwise(moments):
        n = min(len(a.tokens), len(b.tokens))
        kept = a.settled[:n]
        assert (b.settled[:n] | ~kept).all()
        np.testing.assert_array_equal(a.tokens[:n][kept], b.tokens[:n][kept])


def test_history_holds_one_frame_a_pass():
    lm = tiny()
    out = mj.sample(lm, PROMPT, max_tokens=12, sampler=mj.rules.confidence(), history=True)
    denoising = [f for f in out.history if f.n[0] > 0]
    assert len(denoising) == out.forwards[0]
    assert (denoising[0].confidence[0, : denoising[0].n[0]] > 0).all()


@pytest.mark.parametrize("pattern", ["causal_encoder", "bidirectional"])
def test_infill_keeps_known_text_and_fills_every_hole(pattern):
    lm = tiny(pattern)
    parts = ["def x", mj.Hole(5), ":\n    return ", mj.Hole(3), " if value", mj.Hole(2)]
    out = mj.infill(lm, [parts, [mj.Hole(4), " total"]], seed=3)
    for tokens, request in zip(out.tokens, [parts, [mj.Hole(4), " total"]], strict=True):
        at = 0
        for part in request:
            ids = [lm.tokenizer.mask] * part.room if isinstance(part, mj.Hole) else lm.tokenizer.encode(part)
            here = tokens[at : at + len(ids)]
            at += len(ids)
            if isinstance(part, mj.Hole):
                assert not np.isin(here, [lm.tokenizer.mask, lm.tokenizer.pad, lm.tokenizer.eos]).any()
            else:
                assert here.tolist() == ids
        assert at == len(tokens)
    assert len(out.holes) == 3 and out.text.startswith("def x") and 1 <= out.forwards[0] <= 10


def test_score_is_the_autoregressive_likelihood_at_block_one():
    with jax.enable_x64(True):
        lm = tiny("block_causal", block=1, dtype="float64")
        lm = mj.LM(
            lm.model, jax.tree.map(lambda x: x.astype(jnp.float64), lm.params), lm.tokenizer, lm.corruption
        )
        prompt, completion = "def x", "(y): return total"
        found = mj.score(lm, prompt, completion, samples=2)
        ids, after = lm.tokenizer.encode(prompt), lm.tokenizer.encode(completion)
        chain = 0.0
        for token in after:
            logits = mj.logits(lm, [lm.tokenizer.mask], ids)[0, 0]
            logits = logits.at[jnp.asarray(lm.corruption.forbidden)].set(-jnp.inf)
            chain += float(jax.nn.log_softmax(logits)[token])
            ids = [*ids, token]
    assert abs(found.log_p - chain) < 1e-6 and found.se == 0.0 and found.tokens == len(after)


def test_autoregressive_decoding_is_the_block_causal_pattern_at_block_one():
    lm = tiny("block_causal", block=1)
    out = mj.sample(lm, PROMPT, max_tokens=5, sampler=mj.rules.confidence())
    ids = lm.tokenizer.encode(PROMPT)
    for token in out.tokens[0]:
        logits = mj.logits(lm, [lm.tokenizer.mask], ids)[0, 0]
        logits = logits.at[jnp.asarray(lm.corruption.forbidden)].set(-jnp.inf)
        assert int(logits.argmax()) == token
        ids = [*ids, int(token)]
    assert out.forwards.tolist() == [5]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_more_samples_agree_with_fewer(pattern):
    lm = tiny(pattern)
    few, many = (mj.score(lm, "def x", "(y): return total", samples=n, seed=n) for n in (16, 256))
    assert abs(few.log_p - many.log_p) < 4 * np.hypot(few.se, many.se) and many.se < few.se


@pytest.mark.parametrize("pattern", PATTERNS)
def test_logits_are_the_same_with_a_cache_and_without(pattern):
    lm = tiny(pattern)
    prompt = lm.tokenizer.encode(PROMPT)
    canvas = [lm.tokenizer.mask] * lm.model.config.block
    if pattern == "block_causal":
        prompt = prompt[:8]
    laid = lm.model.layout(np.asarray(prompt + canvas), len(prompt))
    row = lambda x: jnp.asarray(x)[None]
    hidden = lm.model.apply(lm.params, row(laid.tokens), row(laid.positions), row(laid.ranges), ())
    want = lm.model.head(lm.params, hidden)[0, laid.editable]
    got = mj.logits(lm, canvas, prompt)[0]
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (dict(prompt=""), "prompt"),
        (dict(prompt=[]), "prompt"),
        (dict(prompt=["x", ""]), r"prompt\[1\]"),
        (dict(prompt=[320]), "prompt id"),
        (dict(prompt=[{"role": "wizard", "content": "x"}]), "role"),
        (dict(prompt="x " * 500), "context"),
        (dict(prompt="x", max_tokens=-1), "max_tokens"),
        (dict(prompt="x", max_tokens=0), "max_tokens"),
        (dict(prompt="x", max_tokens=10**12), "max_tokens"),
        (dict(prompt="x", max_tokens=2000), "context"),
        (dict(prompt="x", max_tokens=2.5), "max_tokens"),
        (dict(prompt="x", seed=-1), "seed"),
        (dict(prompt="x", sampler="threshold"), "sampler"),
        (dict(prompt="x", temperature=-1.0), "temperature"),
    ],
)
def test_bad_input_to_sample_is_refused_in_words(arguments, named):
    with pytest.raises(ValueError, match=named):
        mj.sample(tiny(), **arguments)


def test_bad_input_to_the_other_calls_is_refused_in_words():
    lm = tiny()
    with pytest.raises(ValueError, match="one prompt"):
        mj.stream(lm, ["x", "y"])
    with pytest.raises(ValueError, match="every"):
        mj.stream(lm, "x", every=0)
    with pytest.raises(ValueError, match="Hole"):
        mj.infill(lm, ["no hole"])
    with pytest.raises(ValueError, match="Hole"):
        mj.Hole(0)
    with pytest.raises(ValueError, match="context"):
        mj.infill(lm, ["x", mj.Hole(500)])
    with pytest.raises(ValueError, match="samples"):
        mj.score(lm, "x", "y", samples=0)
    with pytest.raises(ValueError, match="corruption"):
        mj.score(tiny(kind="uniform"), "x", "y")
    with pytest.raises(ValueError, match="canvas"):
        mj.logits(lm, [[999]])
    with pytest.raises(ValueError, match="steps"):
        mj.Plan(steps=0)
    with pytest.raises(ValueError, match="block"):
        mj.sample(tiny("block_causal"), "x", plan=mj.Plan(block=5))
