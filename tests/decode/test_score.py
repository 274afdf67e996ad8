"""sample, stream, infill, score, logits: what agrees with what, and what is refused."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.types import PackedPass, Pass
from tests.marks import slow_except
from tests.tiny import PATTERNS, tiny

PROMPT = "for value in range"


@functools.cache
def moments_of(pattern):
    return list(
        mj.stream(tiny(pattern), PROMPT, max_tokens=16, sampler=mj.rules.ancestral(), seed=5, every=2)
    )


@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "block_causal"))
def test_the_last_moment_of_a_stream_is_the_sample(pattern):
    first, *_, last = moments_of(pattern)
    out = mj.sample(tiny(pattern), PROMPT, max_tokens=16, sampler=mj.rules.ancestral(), seed=5)
    assert last.done and not first.done and last.accepted.all()
    assert last.text == out.text and last.forwards == out.forwards[0]
    np.testing.assert_array_equal(last.tokens, out.tokens[0])


@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "block_causal"))
def test_settled_tokens_of_masked_decoding_never_change(pattern):
    for a, b in itertools.pairwise(moments_of(pattern)):
        n = min(len(a.tokens), len(b.tokens))
        kept = a.accepted[:n]
        assert (b.accepted[:n] | ~kept).all()
        np.testing.assert_array_equal(a.tokens[:n][kept], b.tokens[:n][kept])


def said(*parts, role="user"):
    return [{"role": role, "content": list(parts)}]


@pytest.mark.long
def test_a_content_may_be_text_parts_and_reads_as_the_lines_they_make():
    lm, text = tiny(), lambda x: {"type": "text", "text": x, "cache_control": {"type": "ephemeral"}}
    parts, plain = said(text("def x"), text("return y")), [{"role": "user", "content": "def x\nreturn y"}]
    want = mj.sample(lm, plain, max_tokens=8, seed=3)
    assert mj.sample(lm, parts, max_tokens=8, seed=3).texts == want.texts
    assert mj.sample(lm, [parts, plain], max_tokens=8, seed=3).texts[0] == want.text
    *_, last = mj.stream(lm, parts, max_tokens=8, seed=3)
    assert last.text == want.text


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            {"type": "image_url", "image_url": {}},
            r"messages\[0\].content\[0\].type is 'image_url'; allowed: text",
        ),
        ({"type": "text", "text": 3}, r"messages\[0\].content\[0\].text is 3; allowed: a string"),
        ({"text": "x"}, r"messages\[0\].content\[0\].type is None; allowed: text"),
        ("x", r"messages\[0\].content\[0\] is 'x'; allowed: an object with type and text"),
    ],
)
def test_other_parts_of_a_content_are_refused_by_name(part, words):
    for call in (mj.sample, mj.stream):
        with pytest.raises(ValueError, match=words):
            call(tiny(), said(part), max_tokens=8)


def test_history_holds_one_frame_a_pass():
    lm = tiny()
    out = mj.sample(lm, PROMPT, max_tokens=12, sampler=mj.rules.confidence(), history=True)
    denoising = [f for f in out.history if f.used[0] > 0]
    assert len(denoising) == out.forwards[0]
    assert (denoising[0].confidence[0, : denoising[0].used[0]] > 0).all()


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


def by_tokens():
    """(a model that decodes token by token, log p of the id after ids), in float64; call under x64."""
    lm = tiny("block_causal", block=1, dtype="float64")
    lm = dataclasses.replace(lm, params=jax.tree.map(lambda x: x.astype(jnp.float64), lm.params))
    return lm, lambda ids: next_of(
        lm.model, lm.corruption.forbidden, lm.params, np.pad(ids, (0, 32 - len(ids))), len(ids)
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def next_of(model, forbidden, params, ids, n):
    """What a mask behind n encoded tokens says: one program for every n."""
    one, n = jnp.ones(1, jnp.int32), jnp.full(1, n)
    _, cache = model.forward(params, Pass(ids[None], model.empty_cache(1, 33), 0 * one, n, n, one > 0))
    mask = jnp.full((1, 1), model.config.mask)
    hidden, _ = model.forward(params, Pass(mask, cache, n, one, n + 1, one < 0))
    return jax.nn.log_softmax(model.head(params, hidden)[0, 0].at[jnp.asarray(forbidden)].set(-jnp.inf))


def test_score_is_the_autoregressive_likelihood_at_block_one():
    with jax.enable_x64(True):
        lm, says = by_tokens()
        prompt, completion = "def x", "(y): return total"
        found = mj.score(lm, prompt, completion, samples=2)
        ids, after = lm.tokenizer.encode(prompt), lm.tokenizer.encode(completion)
        chain = sum(float(says([*ids, *after[:i]])[token]) for i, token in enumerate(after))
    assert abs(found.log_p - chain) < 1e-6 and found.se == 0.0 and found.tokens == len(after)


@pytest.mark.long
def test_autoregressive_decoding_is_the_block_causal_pattern_at_block_one():
    with jax.enable_x64(True):
        lm, says = by_tokens()
        out = mj.sample(lm, PROMPT, max_tokens=5, sampler=mj.rules.confidence())
        ids = lm.tokenizer.encode(PROMPT)
        for token in out.tokens[0]:
            assert int(says(ids).argmax()) == token
            ids.append(int(token))
    assert out.forwards.tolist() == [5]


@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "block_causal"))
def test_more_samples_agree_with_fewer(pattern):
    lm = tiny(pattern)
    few, many = (mj.score(lm, "def x", "(y): return total", samples=n, seed=n) for n in (16, 256))
    assert abs(few.log_p - many.log_p) < 4 * np.hypot(few.se, many.se) and many.se < few.se


@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "block_causal"))
def test_logits_are_the_same_with_a_cache_and_without(pattern):
    lm = tiny(pattern)
    prompt = lm.tokenizer.encode(PROMPT)
    canvas = [lm.tokenizer.mask] * lm.model.config.block
    if pattern == "block_causal":
        prompt = prompt[:8]
    laid = lm.model.layout(np.asarray(prompt + canvas), len(prompt))
    row = lambda x: jnp.asarray(x)[None]
    whole = jax.jit(lambda *laid: lm.model.head(lm.params, lm.model.apply(lm.params, PackedPass(*laid))))
    want = whole(row(laid.tokens), row(laid.positions), row(laid.ranges))[0, laid.editable]
    got = mj.logits(lm, canvas, prompt)[0]
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "block_causal"))
def test_a_list_is_scored_row_by_row(pattern):
    lm = tiny(pattern)
    prompts, answers = ["def x", "", "for value in range"], ["(y): return total", "return x", "(z)"]
    alone = [mj.score(lm, p, a, samples=8, seed=5 + i) for i, (p, a) in enumerate(zip(prompts, answers))]
    found = mj.score(lm, prompts, answers, samples=8, seed=5)
    for name in ("log_p", "se", "tokens", "nats_per_token"):
        np.testing.assert_allclose(getattr(found, name), [getattr(one, name) for one in alone], rtol=1e-4)
        assert getattr(found, name).shape == (3,) and np.ndim(getattr(alone[0], name)) == 0


def test_one_prompt_is_scored_with_each_of_many_answers():
    lm, answers = tiny(), [[300, 301, 302], [303, 304, 305]]
    want = np.asarray(mj.score(lm, ["def x", "def x"], answers, samples=4).log_p)
    assert want[0] != want[1]
    for same in (answers, np.array(answers), jnp.array(answers)):
        np.testing.assert_array_equal(mj.score(lm, "def x", same, samples=4).log_p, want)
    assert np.shape(mj.score(lm, "def x", answers[:1], samples=4).log_p) == (1,)
    assert np.isnan(
        mj.score(lm, "def x", answers, samples=1).se
    ).all()  # one sample says nothing of its error
    assert np.shape(mj.score(lm, np.array([[300, 301]] * 2), answers, samples=4).log_p) == (2,)


@pytest.mark.long
@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "block_causal"))
def test_logits_of_a_row_are_those_of_its_own_prompt(pattern):
    lm = tiny(pattern)
    prompts, canvas = ["def x", PROMPT], np.array([[lm.tokenizer.mask] * 8, [300, *[lm.tokenizer.mask] * 7]])
    for rows in (canvas, jnp.asarray(canvas), canvas.tolist()):
        found = mj.logits(lm, rows, prompts)
        assert found.shape == (2, 8, lm.model.config.vocab)
    for i, prompt in enumerate(prompts):
        np.testing.assert_allclose(found[i], mj.logits(lm, canvas[i], prompt)[0], atol=2e-5)
    np.testing.assert_allclose(mj.logits(lm, canvas, PROMPT)[1], found[1], atol=2e-5)


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("pattern", ["bidirectional", "causal_encoder"])
def test_guidance_scores_with_the_logits_of_both_branches(pattern):
    """Against an enumeration of the masks of two tokens: k = 1 (two ways) and k = 2, with weights m / k."""
    lm, w = tiny(pattern), 1.5
    prompt, answer, mask = [20, 21, 22, 23], [30, 31], lm.corruption.mask

    def nats(canvas, at):
        with_prompt, without = (mj.logits(lm, canvas, p)[0] for p in (prompt, [mask] * len(prompt)))
        guided = np.asarray(with_prompt + w * (with_prompt - without), float)
        guided[:, list(lm.corruption.forbidden)] = -np.inf
        return -sum(guided[i, answer[i]] - np.log(np.exp(guided[i]).sum()) for i in at)

    both = nats([mask, mask], [0, 1])
    one = (nats([mask, answer[1]], [0]) + nats([answer[0], mask], [1])) / 2
    found = mj.score(lm, prompt, answer, samples=512, guidance=w)
    assert found.log_p == pytest.approx(-(2 * one + both) / 2, abs=4 * found.se + 1e-5)
    assert abs(found.log_p - mj.score(lm, prompt, answer, samples=512).log_p) > 20 * found.se
    single = mj.score(lm, prompt, answer[:1], guidance=w)  # exact
    canvas = mj.logits(lm, [mask], prompt)[0, 0], mj.logits(lm, [mask], [mask] * len(prompt))[0, 0]
    guided = np.asarray(canvas[0] + w * (canvas[0] - canvas[1]), float)
    guided[list(lm.corruption.forbidden)] = -np.inf
    assert single.log_p == pytest.approx(guided[answer[0]] - np.log(np.exp(guided).sum()), abs=1e-4)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda lm: mj.score(lm, ["a", "b"], "c"), "completion is 'one answer'; allowed: a list of 2"),
        (lambda lm: mj.score(lm, ["a", "b"], ["c"]), "completion is '1 answers'"),
        (lambda lm: mj.score(lm, ["a"], ["c", "d"]), "completion is '2 answers'"),
        (lambda lm: mj.score(lm, "a", ""), "completion is ''"),
        (lambda lm: mj.score(lm, "a", ["c", 5]), r"completion\[1\] is 5"),
        (lambda lm: mj.score(lm, "a", b"c"), "completion is b'c'"),
        (lambda lm: mj.score(lm, "a", 5), "completion is 5"),
        (lambda lm: mj.score(lm, "a", np.ones((2, 2, 2), int)), "completion is 'int64"),
        (lambda lm: mj.score(lm, "a", [1.5]), r"completion is \[1.5\]"),
        (lambda lm: mj.score(lm, "a", [{"role": "user", "content": "x"}]), "completion is 'a conversation'"),
        (lambda lm: mj.score(lm, "a", ["c", "d " * 400]), "row 1 is .* context"),
        (lambda lm: mj.score(lm, "a", "b", samples=2.5), "samples is 2.5"),
        (lambda lm: mj.score(lm, "a", "b", guidance=float("nan")), "guidance is nan"),
        (lambda lm: mj.score(tiny(kind="uniform"), "a", "b", guidance=1.0), "guidance is 1.0; allowed: 0"),
        (lambda lm: mj.logits(lm, [[5, 6], [7, 8]], ["a", "b", "c"]), "prompt is 'a list of 3'"),
        (lambda lm: mj.logits(lm, [5, 6], ["a", "b"]), "prompt is 'a list of 2'"),
        (lambda lm: mj.logits(lm, [[5, 6], [7]]), "canvas is"),
        (lambda lm: mj.logits(lm, np.ones((1, 2, 3), int)), r"canvas is 'int64\[1, 2, 3\]'"),
        (lambda lm: mj.logits(lm, [0.5]), "canvas is 'float64"),
        (lambda lm: mj.logits(lm, "text"), "canvas is"),
    ],
)
def test_what_score_and_logits_cannot_pair_is_refused_by_name(call, named):
    with pytest.raises(ValueError, match=named):
        call(tiny())


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
    with pytest.raises(ValueError, match="posterior is True; allowed: False: masks"):
        mj.score(lm, "x", "y", posterior=True)
    with pytest.raises(ValueError, match="canvas"):
        mj.logits(lm, [[999]])
    with pytest.raises(ValueError, match="steps"):
        mj.Plan(steps=0)
    with pytest.raises(ValueError, match="block"):
        mj.sample(tiny("block_causal"), "x", plan=mj.Plan(block=5))


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_logits_are_a_function_of_the_model_under_the_transforms_of_jax(pattern):
    lm, prompts = tiny(pattern), np.array([[5, 6, 7], [8, 9, 10]])
    canvas = np.array([[7, lm.corruption.mask, 9, lm.corruption.mask]] * 2)
    close = functools.partial(np.testing.assert_allclose, atol=2e-5)
    want = mj.logits(lm, canvas, prompts)
    close(jax.jit(mj.logits)(lm, jnp.asarray(canvas), jnp.asarray(prompts)), want)
    close(jax.jit(lambda lm, canvas: mj.logits(lm, canvas, prompts))(lm, canvas), want)
    rows = jax.vmap(lambda canvas, prompt: mj.logits(lm, canvas, prompt)[0])
    close(rows(jnp.asarray(canvas), jnp.asarray(prompts)), want)
    models = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), lm)
    close(jax.vmap(lambda lm: mj.logits(lm, canvas, prompts))(models)[0], want)
    slope = jax.grad(lambda lm: mj.logits(lm, canvas, prompts)[0, 1, 5])(lm)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(slope.params))
    assert any(jnp.abs(x).max() > 0 for x in jax.tree.leaves(slope.params))
    with pytest.raises(ValueError, match="prompt"):
        jax.jit(mj.logits)(lm, canvas, jnp.ones((3, 2), int))


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["absorbing", "uniform"])
def test_nan_parameters_are_refused_by_every_score(kind):
    lm = tiny(kind=kind)
    broken = dataclasses.replace(lm, params=jax.tree.map(lambda x: x * jnp.nan, lm.params))
    guided = {"guidance": 1.0} if kind == "absorbing" else {}
    for call in (
        lambda: mj.score(broken, "x", ["y", "z"], samples=2),
        lambda: mj.score(broken, "x", "y", samples=2, **guided),
        lambda: mj.logits(broken, [7, 8]),
        lambda: mj.edit(broken, "x"),
    ):
        with pytest.raises(ValueError, match="logits of row 0 are NaN"):
            call()


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_logprobs_and_scores_are_normalised_over_the_same_ids(pattern):
    """One answer token, whose score is exact: mask and other forbidden ids have no share in either."""
    lm = tiny(pattern)
    out = mj.sample(lm, PROMPT, max_tokens=1, sampler=mj.rules.confidence(), temperature=1.0, logprobs=3)
    assert out.logprobs is not None and len(out.tokens[0]) == 1
    scored = mj.score(lm, lm.tokenizer.encode(PROMPT), out.tokens[0])
    assert scored.se == 0.0
    np.testing.assert_allclose(out.logprobs[0].tokens[0], scored.log_p, atol=1e-4)
    assert not np.isin(out.logprobs[0].top_ids, lm.corruption.forbidden).any()


@pytest.mark.long
def test_answers_of_a_model_that_thinks_are_scored_after_its_thinking():
    lm, answers = mj.load(), ["931", "932", "832", "100"]
    chat = [{"role": "user", "content": "347+585="}]
    thought = mj.sample(lm, chat, effort="medium").thinking[0]
    sampled, given = (mj.score(lm, chat, answers, thinking=one, samples=8).log_p for one in (True, thought))
    assert answers[int(np.argmax(sampled))] == "932"
    np.testing.assert_allclose(sampled, given, rtol=1e-4)
    rows = np.asarray(mj.score(lm, [chat, chat], ["932", "932"], thinking=[True, False], samples=8).log_p)
    assert rows[0] > rows[1] + 10
    for thinking, said in (
        (None, "thinking is None"),
        (1, "thinking is 1"),
        ([True], "thinking is 'a list of 1'"),
    ):
        with pytest.raises(ValueError, match=said):
            mj.score(lm, [chat, chat], ["932", "932"], thinking=thinking)
    with pytest.raises(ValueError, match="no conversation"):
        mj.score(lm, "347+585=", answers, thinking=True)
    mixed = mj.score(lm, [chat, "import "], ["932", "os"], thinking=[thought, False], samples=8).log_p
    assert np.asarray(mixed)[0] == pytest.approx(rows[0], abs=1e-3)
    with pytest.raises(ValueError, match="effort is 'a list of 1'; allowed: one for all, or 2"):
        mj.prompt_ids(lm, [chat, chat], effort=["medium"])
