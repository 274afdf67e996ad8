"""A batch is its rows: answers to a prompt, settings of each prompt, stop texts, streams, infilling, edits."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportAttributeAccessIssue=false

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

import mercury_jax as mj
from mercury_jax import models
from mercury_jax.tokenizer import SPECIAL
from tests.marks import slow_except
from tests.tiny import PATTERNS, tiny

PROMPTS = ["def x", "for value in range(count):\n    print(total"]
IDS = np.array([[300, 301, 302], [303, 304, 305]])
CHATS = [[{"role": "user", "content": text}] for text in ("def x", "return total")]


@functools.cache
def wide(pattern="block_causal", **more):
    """The tiny model in float64; call under x64."""
    lm = tiny(pattern, dtype="float64", **more)
    return dataclasses.replace(lm, params=jax.tree.map(lambda x: x.astype(jnp.float64), lm.params))


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def tokens(out):
    return [row.tolist() for row in out.tokens]


# --- several answers to a prompt


@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "block_causal"))
def test_n_answers_are_those_of_the_prompts_repeated(pattern):
    lm = wide(pattern)
    call = functools.partial(mj.sample, lm, max_tokens=9, seed=5, temperature=1.0)
    out, each = call(PROMPTS, n=2), call([p for p in PROMPTS for _ in range(2)])
    assert tokens(out) == tokens(each) and len(set(out.texts)) > 2
    assert out.groups == [out.texts[:2], out.texts[2:]] and out.n == 2 and out.text == out.texts[0]
    assert out.forwards.tolist() == each.forwards.tolist() and out.finish == each.finish
    # Each prompt is encoded once: its other answers find it in the cache.
    prompts = [0, 0]
    if pattern != "bidirectional":
        prompts = np.asarray(lm.model.encodable(jnp.array([len(lm.tokenizer.encode(p)) for p in PROMPTS])))
    once = each.encoded - np.array([0, prompts[0], 0, prompts[1]])
    assert out.encoded.tolist() == once.tolist()


@pytest.mark.slow
def test_one_answer_is_what_it_was_and_a_long_prompt_forks_as_a_short_one():
    lm, long = wide("causal_encoder"), "for value in range(count):\n    print(total)\n" * 3
    call = functools.partial(mj.sample, lm, long, max_tokens=6, temperature=1.0, keep=True)
    three = call(n=3, seed=4)
    assert [tokens(call(seed=4 + j))[0] for j in range(3)] == tokens(three)
    assert three.passes == max(three.forwards)  # no pass of the decoder encodes
    # The state has a row for each answer, which the next turn continues.
    more = mj.sample(lm, ["x", "y", "z"], max_tokens=5, state=three.state)
    alone = mj.sample(lm, "y", max_tokens=5, seed=1, state=call(seed=5).state)
    assert tokens(more)[1] == tokens(alone)[0]


@pytest.mark.slow
def test_a_turn_may_continue_in_several_ways():
    lm = wide()
    first = mj.sample(lm, PROMPTS, max_tokens=9, keep=True)
    out = mj.sample(lm, [" if", " else"], n=2, max_tokens=9, seed=3, temperature=1.0, state=first.state)
    joined = [
        [*ids, *lm.tokenizer.encode(text)]
        for ids, text in zip(map(np.ndarray.tolist, first.state.tokens), [" if", " else"], strict=True)
    ]
    whole = mj.sample(lm, joined, n=2, max_tokens=9, seed=3, temperature=1.0)
    assert tokens(out) == tokens(whole) and out.encoded.sum() < whole.encoded.sum()


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(dict(guidance=[1.0, 2.0], negative="return"), marks=pytest.mark.slow),
        dict(logit_bias=[{300: 1e4}, None]),
    ],
)
def test_the_answers_to_a_prompt_share_its_settings(more):
    lm = wide()
    rule = mj.rules.threshold(np.array([0.2, 0.9]))
    out = mj.sample(
        lm, PROMPTS, n=2, max_tokens=[6, 9], seed=[3, 8], temperature=[1.0, 0.5], sampler=rule, **more
    )
    for i in range(2):
        pick = {k: v[i] if isinstance(v, list) else v for k, v in more.items() if v}
        alone = mj.sample(
            lm, [PROMPTS[i]] * 2, max_tokens=6 + 3 * i, seed=[3 + 5 * i, 4 + 5 * i], temperature=1.0 - 0.5 * i,
            sampler=mj.rules.threshold([0.2, 0.9][i]), **pick,
        )  # fmt: skip
        assert tokens(out)[2 * i : 2 * i + 2] == tokens(alone)


@pytest.mark.slow
def test_rows_over_a_mesh_fork_and_stop_as_on_one_device():
    mesh = jax.make_mesh((4,), ("data",))
    call = functools.partial(mj.sample, wide(), PROMPTS, n=2, max_tokens=[9, 30], seed=3, temperature=1.0)
    stop = call().texts[2][4:6]
    for more in ({}, {"stop": stop}):
        one, four = call(**more), call(mesh=mesh, **more)
        assert (one.texts, one.finish, tokens(one)) == (four.texts, four.finish, tokens(four))
        assert (
            one.forwards.tolist() == four.forwards.tolist() and one.encoded.tolist() == four.encoded.tolist()
        )


@pytest.mark.slow
@pytest.mark.parametrize("draft", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_verified_drafts_fork_and_stop_as_other_tokens_do(draft):
    lm = wide("causal_encoder")
    config = dataclasses.replace(lm.model.config, predicts_next=True)
    lm = dataclasses.replace(lm, model=models.build(config))
    sampler = mj.Sampler(mj.rules.threshold(0.3), speculate=draft, temperature=1.0)
    call = functools.partial(mj.sample, lm, max_tokens=12, sampler=sampler)
    out, each = call(PROMPTS, n=2, seed=3), call([p for p in PROMPTS for _ in range(2)], seed=3)
    assert tokens(out) == tokens(each) and out.encoded.sum() < each.encoded.sum()
    stop = out.texts[1][3:5]
    cuts = call(PROMPTS, n=2, seed=3, stop=stop, keep=True)
    assert cuts.texts == [cut(text, [stop]) for text in out.texts] and cuts.forwards[1] <= out.forwards[1]
    more = call(["x"] * 4, state=cuts.state)
    assert tokens(more) == tokens(
        call([[*ids.tolist(), *lm.tokenizer.encode("x")] for ids in cuts.state.tokens])
    )


@pytest.mark.slow
def test_a_grammar_binds_each_of_several_answers():
    pytest.importorskip("llguidance")
    choice = mj.grammar.Choice(["def", "return"])
    out = mj.sample(tiny(), PROMPTS, n=2, max_tokens=[8, 12], seed=1, temperature=1.0, schema=[choice, None])
    assert set(out.texts[:2]) <= {"def", "return"} and len(out.texts) == 4
    assert out.lengths[2:] == [12, 12]


# --- settings of each prompt


@pytest.mark.long
@pytest.mark.parametrize("pattern", slow_except(["block_causal", "bidirectional"], "bidirectional"))
def test_a_batch_with_settings_of_each_row_is_its_rows_alone(pattern):
    lm, stops = wide(pattern), [None, ["e", "\n"]]
    own = [mj.Effort(0, 0.3, 0.5), mj.Effort(0, 0.95, 1.0)]
    batch = dict(max_tokens=[5, 12], seed=[9, 2], temperature=[0.0, 1.0], effort=own, stop=stops)
    out = mj.sample(lm, PROMPTS, **batch)
    for i, prompt in enumerate(PROMPTS):
        alone = mj.sample(lm, prompt, **{name: values[i] for name, values in batch.items()})
        assert tokens(out)[i] == tokens(alone)[0] and out.texts[i] == alone.text
        assert (out.finish[i], out.forwards[i]) == (alone.finish[0], alone.forwards[0])


def test_efforts_think_each_within_its_own_room():
    lm = wide("causal_encoder")
    efforts = [mj.Effort(10, 0.5, 0.5), "instant"]
    out = mj.sample(lm, CHATS, max_tokens=[4, 8], effort=efforts)
    for i, (chat, effort) in enumerate(zip(CHATS, efforts, strict=True)):
        alone = mj.sample(lm, chat, max_tokens=4 + 4 * i, seed=i, effort=effort)
        assert tokens(out)[i] == tokens(alone)[0] and out.thinking[i] == alone.thinking[0]
    assert out.thinking[0] is not None and out.thinking[1] is None


@pytest.mark.slow
def test_uniform_noise_takes_its_steps_from_each_effort():
    lm, own = wide("causal_encoder", kind="uniform"), [mj.Effort(0, 0.5, 0.25), mj.Effort(0, 0.5, 1.0)]
    both = mj.sample(lm, PROMPTS, max_tokens=8, effort=own)
    alone = [mj.sample(lm, p, max_tokens=8, seed=i, effort=own[i]) for i, p in enumerate(PROMPTS)]
    assert tokens(both) == [tokens(out)[0] for out in alone]


def test_prompts_are_ids_in_any_form():
    lm = wide()
    rows = [[300, 301, 302], [303, 304]]
    want = tokens(mj.sample(lm, rows, max_tokens=6))
    for form in (tuple(map(tuple, rows)), [np.array(r) for r in rows], [jnp.asarray(rows[0]), rows[1]]):
        assert tokens(mj.sample(lm, form, max_tokens=6)) == want
    numbers = np.array([6, 6], np.int64), jnp.array([0, 1])
    assert tokens(mj.sample(lm, rows, max_tokens=numbers[0], seed=numbers[1])) == want
    square = tokens(mj.sample(lm, IDS.tolist(), max_tokens=6))
    assert (
        tokens(mj.sample(lm, IDS, max_tokens=6))
        == tokens(mj.sample(lm, jnp.asarray(IDS), max_tokens=6))
        == square
    )


@pytest.mark.slow
def test_a_key_stands_for_a_seed():
    lm, key = wide(), jax.random.key(7)
    call = functools.partial(mj.sample, lm, max_tokens=8, temperature=1.0)
    folded = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(4))
    out = call(PROMPTS, n=2, seed=key)
    assert tokens(out) == tokens(call([p for p in PROMPTS for _ in range(2)], seed=folded))
    keys = jax.vmap(jax.random.key)(jnp.array([3, 4]))
    assert tokens(call(PROMPTS, seed=keys)) == tokens(call(PROMPTS, seed=3))
    assert tokens(call(PROMPTS[0], n=2, seed=keys[:1])) == tokens(call(PROMPTS[0], n=2, seed=keys[0]))
    # As the decoder itself uses it.
    decoder = mj.decoder(lm, mj.Sampler(mj.rules.threshold(), temperature=1.0), slots=16)
    state = decoder.run(lm.params, decoder.init(lm.params, IDS, max_tokens=8, key=key))
    ids, lengths = decoder.answer(state)
    assert [row[:n].tolist() for row, n in zip(np.asarray(ids), lengths, strict=True)] == tokens(
        call(IDS, seed=key)
    )


# --- stop texts


@functools.cache
def unstopped(pattern="block_causal"):
    return mj.sample(wide(pattern), PROMPTS, max_tokens=40, seed=3, temperature=1.0)


def stopped(stop, pattern="block_causal", **more):
    return mj.sample(wide(pattern), PROMPTS, max_tokens=40, seed=3, temperature=1.0, stop=stop, **more)


def cut(text, stops):
    """The text before the stop text that ends first."""
    found = [(text.find(s) + len(s), -len(s)) for s in stops if s in text]
    return text[: sum(min(found))] if found else text


@pytest.mark.long
@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "block_causal"))
def test_the_text_is_the_unstopped_one_before_its_first_stop(pattern):
    whole = unstopped(pattern)
    places = [(0, 0), (0, 7), (0, 20), (1, 3), (1, 15), (1, 25)]
    for row, at in places:
        for size in (1, 2, 5):
            # The second one, where there is one, lies within the first and ends before it.
            stops = [
                whole.texts[row][at : at + size],
                whole.texts[row][at + 1 : at + size - 2] or "never in it",
            ]
            out = stopped(stops, pattern)
            assert out.texts == [cut(text, stops) for text in whole.texts]
            for i in range(2):
                same = out.texts[i] == whole.texts[i]
                assert out.finish[i] == (
                    whole.finish[i] if same and stops[0] not in whole.texts[i] else "stop"
                )
                assert whole.tokens[i][: out.lengths[i]].tolist() == out.tokens[i].tolist()
                # The tokens write the text, and none is left over.
                assert wide().tokenizer.decode(out.tokens[i]).startswith(out.texts[i])
                assert not wide().tokenizer.decode(out.tokens[i][:-1]).startswith(out.texts[i] or "-")


@pytest.mark.long
def test_a_stop_text_ends_the_decoding_of_its_row():
    whole = unstopped()
    stop = whole.texts[0][3:5]
    out = stopped([[stop], None], logprobs=1)
    assert out.forwards[0] < whole.forwards[0] and out.forwards[1] == whole.forwards[1]
    assert out.texts[1] == whole.texts[1] and out.finish == ["stop", whole.finish[1]]
    assert len(out.logprobs[0].tokens) == out.lengths[0]
    both = stopped(stop, history=True)  # a text alone is a list of one
    assert both.texts == [cut(text, [stop]) for text in whole.texts] and both.forwards[0] == out.forwards[0]
    assert len(both.history) == both.passes


@pytest.mark.long
@pytest.mark.parametrize("every", [1, 4])
def test_a_stream_stops_where_sample_does(every):
    stop = [[unstopped().texts[0][3:5]], None]
    out, last = stopped(stop), {}
    more = dict(max_tokens=40, seed=3, temperature=1.0, every=every)
    for shown in mj.stream(wide(), PROMPTS, stop=stop, **more):
        assert stop[0][0] not in shown.text or shown.row == 1
        last[shown.row] = shown
    assert [last[i].text for i in range(2)] == out.texts and all(x.done for x in last.values())
    assert [last[i].tokens.tolist() for i in range(2)] == tokens(out)
    assert [last[i].forwards for i in range(2)] == out.forwards.tolist()


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        dict(sampler=mj.rules.confidence()),
        dict(plan=mj.Plan(block=4)),
        dict(temperature=0.5),
        dict(logit_bias={3: 1.0}),
        dict(mesh=mj.mesh()),
        dict(n=2),
        dict(max_tokens=9),
        dict(seed=[1, 2]),
    ],
    ids=lambda x: next(iter(x)),
)
def test_answers_that_were_begun_take_no_other_settings(more):
    part = stopped(None, passes=2, n=2)
    assert len(mj.sample(wide(), None, state=part.state).groups) == 2
    with pytest.raises(ValueError, match=f"^{next(iter(more))} is .* without a prompt: state has begun"):
        mj.sample(wide(), None, state=part.state, **more)


def test_what_was_paused_still_stops():
    whole = unstopped()
    stop = whole.texts[0][12:14]
    part = stopped(stop, passes=4)
    while "paused" in part.finish:
        part = mj.sample(wide(), None, state=part.state, passes=5)
    assert part.texts == stopped(stop).texts and part.finish == stopped(stop).finish


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["block_causal", "causal_encoder"])
def test_a_session_goes_on_after_the_tokens_before_a_stop(pattern):
    lm, stop = wide(pattern), unstopped(pattern).texts[0][9:11]
    out = stopped([[stop], ["never in it"]], pattern, keep=True)
    more = mj.sample(lm, [" if", " else"], max_tokens=6, state=out.state)
    joined = [
        [*lm.tokenizer.encode(p), *t.tolist(), *lm.tokenizer.encode(q)]
        for p, t, q in zip(PROMPTS, out.tokens, [" if", " else"], strict=True)
    ]
    assert tokens(more) == tokens(mj.sample(lm, joined, max_tokens=6))


THINKING: dict = dict(
    max_tokens=8, effort=mj.Effort(10, 0.5, 0.5), temperature=1.0, seed=1,
    logit_bias={58: -1e4},  # a separator, with which an answer would be empty
)  # fmt: skip


@pytest.mark.slow
def test_an_answer_that_begins_with_a_stop_text_is_not_continued_in_a_stream_either():
    lm = wide("causal_encoder")
    stop = [[mj.sample(lm, CHATS, **THINKING).texts[0].lstrip()[:1]], None]
    out = mj.sample(lm, CHATS, stop=stop, **THINKING)
    last = {shown.row: shown for shown in mj.stream(lm, CHATS, stop=stop, **THINKING)}
    assert not out.texts[0].strip() and all(shown.done for shown in last.values())
    assert [last[i].forwards for i in range(2)] == out.forwards.tolist()
    assert [last[i].tokens.tolist() for i in range(2)] == tokens(out)


def test_thinking_is_not_searched():
    call = functools.partial(mj.sample, wide("causal_encoder"), CHATS, **THINKING)
    plain = call()
    inside, outside = plain.thinking[0][:3], plain.texts[0][2:5]
    assert inside not in plain.texts[0] and plain.texts[0][:2].strip()
    out = call(stop=[[inside, outside], None])
    assert out.thinking == plain.thinking and out.texts == [plain.texts[0][:2], plain.texts[1]]
    assert SPECIAL.end_think in out.tokens[0] and out.finish == ["stop", plain.finish[1]]
    assert call(stop=inside).texts[0] == plain.texts[0]


# --- guidance


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.slow
def test_a_guided_session_continues_with_both_branches(pattern):
    lm, negative = wide(pattern), "return"
    turns = functools.partial(mj.sample, lm, max_tokens=9)
    first = turns(PROMPTS, guidance=[2.0, 0.5], negative=negative, keep=True)
    again = [" if", " else total"]
    encode = lm.tokenizer.encode
    behind = [[*t.tolist(), *encode(q)] for t, q in zip(first.tokens, again, strict=True)]
    joined = [[*encode(p), *ids] for p, ids in zip(PROMPTS, behind, strict=True)]
    other = [[*encode(negative), *ids] for ids in behind]
    for weights in (None, [3.0, -0.5]):  # those of the session, or others
        more = turns(again, state=first.state, guidance=weights)
        whole = turns(joined, guidance=weights or [2.0, 0.5], negative=other)
        assert tokens(more) == tokens(whole) and tokens(more) != tokens(turns(joined))
    # What was not guided may be from the next turn on.
    plain = turns(PROMPTS, keep=True)
    joined = [
        [*encode(p), *t.tolist(), *encode(q)] for p, t, q in zip(PROMPTS, plain.tokens, again, strict=True)
    ]
    more = turns(again, state=plain.state, guidance=2.0, negative="masked")
    assert tokens(more) == tokens(turns(joined, guidance=2.0, negative="masked"))


@pytest.mark.slow
def test_a_guided_call_may_be_stopped_and_finished():
    lm = wide()
    whole = mj.sample(lm, PROMPTS, max_tokens=9, guidance=2.0)
    part = mj.sample(lm, PROMPTS, max_tokens=9, guidance=2.0, passes=4)
    assert mj.sample(lm, None, state=part.state).texts == whole.texts


@pytest.mark.slow
@pytest.mark.parametrize("pattern", slow_except(["causal_encoder", "bidirectional"], "bidirectional"))
def test_masked_guidance_reads_a_mask_for_each_token_of_the_prompt(pattern):
    lm = wide(pattern)
    masks = [[lm.tokenizer.mask] * len(lm.tokenizer.encode(p)) for p in PROMPTS]
    call = functools.partial(mj.sample, lm, PROMPTS, max_tokens=9, guidance=2.0)
    assert tokens(call(negative="masked")) == tokens(call(negative=masks)) != tokens(call())
    how = dict(max_tokens=9, guidance=2.0, negative="masked")
    last = {out.row: out.tokens.tolist() for out in mj.stream(lm, PROMPTS, **how)}
    assert [last[row] for row in range(len(PROMPTS))] == tokens(call(negative="masked"))


# --- streams


def test_a_stream_of_several_prompts_shows_every_row_until_it_is_done():
    lm = wide()
    how = dict(n=2, max_tokens=[5, 20], seed=4, temperature=[1.0, 0.0])
    want, last, seen = mj.sample(lm, PROMPTS, **how), {}, []
    for out in mj.stream(lm, PROMPTS, **how):
        assert out.row not in last or not last[out.row].done  # nothing comes after the last one
        last[out.row] = out
        seen.append(out.row)
    assert sorted(last) == [0, 1, 2, 3] and all(out.done for out in last.values())
    assert [last[i].text for i in range(4)] == want.texts
    assert [last[i].tokens.tolist() for i in range(4)] == tokens(want)
    assert [seen.count(i) for i in range(4)] == want.forwards.tolist()  # every pass of each row


@pytest.mark.slow
def test_streams_of_chats_think_and_answer_as_sample_does():
    lm = wide("causal_encoder")
    how = dict(max_tokens=8, effort=[mj.Effort(10, 0.5, 0.5), "instant"])
    want = mj.sample(lm, CHATS, **how)
    last = {out.row: out for out in mj.stream(lm, CHATS, every=3, **how)}
    assert [last[i].text for i in range(2)] == want.texts
    assert [last[i].thinking for i in range(2)] == want.thinking


# --- infilling and editing


@pytest.mark.long
@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "block_causal"))
def test_infilling_of_ids_is_that_of_their_text(pattern):
    lm = wide(pattern)
    encode = lm.tokenizer.encode
    texts = ["def x", mj.Hole(5), ":\n    return ", mj.Hole(3)]
    ids = [encode("def x"), mj.Hole(5), np.array(encode(":\n    return ")), mj.Hole(3)]
    mixed = [jnp.asarray(encode("def x")), mj.Hole(5), ":\n    return ", mj.Hole(3)]
    want = mj.infill(lm, texts, seed=1, temperature=1.0)
    for parts in (ids, mixed):
        out = mj.infill(lm, parts, seed=1, temperature=1.0)
        assert tokens(out) == tokens(want) and out.holes == want.holes


@pytest.mark.slow
@pytest.mark.parametrize("pattern", slow_except(PATTERNS, "block_causal"))
@pytest.mark.parametrize("hole", [mj.Hole(3), mj.Hole(most=3)], ids=["fixed", "open"])
def test_a_batch_of_infillings_is_its_rows_alone(pattern, hole):
    lm = wide(pattern)
    rows = [["def x", hole, " total"], ["if ", hole, " else ", hole], [hole, [300, 301]]]
    rule = lambda p: mj.Sampler(mj.rules.threshold(p))
    p, seeds, temperatures = [0.2, 0.5, 0.9], [4, 9, 2], [1.0, 0.0, 0.7]
    out = mj.infill(lm, rows, seed=seeds, temperature=temperatures, sampler=rule(np.array(p)))
    for i, row in enumerate(rows):
        alone = mj.infill(lm, row, seed=seeds[i], temperature=temperatures[i], sampler=rule(p[i]))
        assert tokens(out)[i] == tokens(alone)[0] and out.fillings[i] == alone.holes
        assert out.forwards[i] == alone.forwards[0]


@pytest.mark.long
@pytest.mark.parametrize("most", [1, 2, 40])
def test_a_rule_of_variable_length_fills_an_open_hole_up_to_its_most(most):
    lm, rule = wide("bidirectional"), mj.rules.expand(expand=300)
    eager = mj.Sampler(
        rule, processors=(mj.processors.bias({300: 1e4}),)
    )  # every mask is split while there is room
    out = mj.infill(lm, ["def x", mj.Hole(most=most), " total"], sampler=eager, plan=mj.Plan(steps=64))
    assert out.filled == [most]


@pytest.mark.slow
def test_a_batch_of_edits_is_its_texts_alone():
    lm, text = wide("bidirectional"), "return value if count else total"
    ids = lm.tokenizer.encode(text)
    spans = [["count"], [(1, 3)], [(0, 6), "total"]]
    texts, seeds, temperatures = [text, ids, text], [5, 3, 8], [1.0, 1.0, 0.0]
    out = mj.edit(lm, texts, spans=spans, prompt="def x", seed=seeds, temperature=temperatures)
    for i, one in enumerate(texts):
        alone = mj.edit(lm, one, spans=spans[i], prompt="def x", seed=seeds[i], temperature=temperatures[i])
        assert tokens(out)[i] == tokens(alone)[0]
    # A span of ids is in tokens: the others stay.
    kept = [t for t in range(len(ids)) if t not in (1, 2)]
    assert out.tokens[1][kept].tolist() == [ids[t] for t in kept] and out.tokens[1].tolist() != ids
    square = mj.edit(lm, jnp.asarray(IDS), seed=2)
    assert [t.shape for t in square.tokens] == [(3,), (3,)] and tokens(square) == tokens(
        mj.edit(lm, IDS, seed=2)
    )


# --- wrong calls

KEYS = jax.vmap(jax.random.key)(jnp.arange(3))


def sampled(prompt=PROMPTS, **more):
    return mj.sample(tiny(), prompt, **{"max_tokens": 4, **more})


WRONG = {
    "n 0": (lambda: sampled(n=0), "n is 0; allowed: a whole number of answers"),
    "n 1.5": (lambda: sampled(n=1.5), "n is 1.5"),
    "n a list": (lambda: sampled(n=[1, 2]), r"n is \[1, 2\]"),
    "n of a stream": (lambda: mj.stream(tiny(), "x", n="2"), "n is '2'"),
    "max_tokens of other prompts": (
        lambda: sampled(max_tokens=[4, 5, 6]),
        "max_tokens is 'a list of 3'; allowed: one for all, or 2: one for each prompt",
    ),
    "one max_tokens of two": (lambda: sampled(max_tokens=[4, 0]), r"max_tokens\[1\] is 0"),
    "a max_tokens of a text": (lambda: sampled(max_tokens=["4", 5]), r"max_tokens\[0\] is '4'"),
    "max_tokens of 2 axes": (lambda: sampled(max_tokens=np.ones((2, 1), int)), r"max_tokens\[0\] is "),
    "max_tokens beyond the context": (lambda: sampled(max_tokens=[4, 255]), r"max_tokens\[1\] is 255; .*context"),
    "seeds of other prompts": (lambda: sampled(seed=[1]), "seed is 'a list of 1'"),
    "a negative seed": (lambda: sampled(seed=[1, -1]), r"seed\[1\] is -1"),
    "a seed of floats": (lambda: sampled(seed=np.ones(2)), r"seed\[0\] is"),
    "a text as seed": (lambda: sampled(seed="1"), "seed is '1'"),
    "keys of other prompts": (lambda: sampled(seed=KEYS), r"seed is 'keys \[3\]'; allowed: one key .* or 2"),
    "an old key": (lambda: sampled(seed=jax.random.PRNGKey(0)), "jax.random.key, not of jax.random.PRNGKey"),
    "temperatures of other prompts": (lambda: sampled(n=2, temperature=[0.0] * 4), "shape of temperature.* 2 prompts"),
    "parameters of other prompts": (lambda: sampled(sampler=mj.rules.threshold(np.ones(3))), "shape of p"),
    "efforts of other prompts": (lambda: sampled(effort=["low"]), "effort is 'a list of 1'; .* 2: one for each"),
    "one unknown effort": (lambda: sampled(effort=["low", "huge"]), r"effort\[1\] is 'huge'; allowed: instant"),
    "no effort among others": (lambda: sampled(effort=["low", None]), r"effort\[1\] is None"),
    "an empty stop": (lambda: sampled(stop=""), "stop is ''; allowed: a text of at least one character"),
    "an empty stop among others": (lambda: sampled(stop=["a", ""]), "stop is "),
    "a stop of bytes": (lambda: sampled(stop=[b"a"]), r"stop is '1 lists'; allowed: .* 2"),
    "a number as stop": (lambda: sampled(stop=3), "stop is 3"),
    "stops of other prompts": (lambda: sampled(stop=[["a"]]), "stop is '1 lists'; allowed: .* 2: one for each"),
    "stop with a grammar": (lambda: sampled(stop="a", schema=True), "stop is 'a'; allowed: None with schema="),
    "weights of other prompts": (lambda: sampled(n=2, guidance=[1.0] * 4), "guidance .* each of the 2 prompts"),
    "masked without guidance": (lambda: sampled(negative="masked"), "negative is 'masked'; allowed: None without"),
    "masked without a mask": (
        lambda: mj.sample(tiny(kind="uniform"), "x", guidance=1.0, negative="masked"),
        "negative is 'masked'; allowed: .* no mask token",
    ),
    "n of a call that is finished": (
        lambda: sampled(None, n=2, state=sampled(passes=1).state),
        "n is 2; allowed: 1 without a prompt",
    ),
    "prompts of other rows than the state": (
        lambda: sampled(PROMPTS, state=sampled(n=2, keep=True).state),
        "prompt is '2 prompts'; allowed: 4, one for each row of state",
    ),
    "a negative for a guided state": (
        lambda: sampled(negative="x", state=sampled(guidance=1.0, keep=True).state),
        "negative is 'x'; allowed: None",
    ),
    "an effort for a guided state": (
        lambda: sampled(effort="low", state=sampled(guidance=1.0, keep=True).state),
        "effort is 'low'; allowed: None",
    ),
    "parts of floats": (lambda: mj.infill(tiny(), [[1.5], mj.Hole(2)]), r"parts\[0\]\[0\] is \[1.5\]"),
    "parts outside of the vocabulary": (lambda: mj.infill(tiny(), [[999], mj.Hole(2)]), "id is 999; allowed: 0..319"),
    "masks as holes": (lambda: mj.infill(tiny(), [[300, 4], mj.Hole(2)]), r"is \[300, 4\]; .*no mask .*Hole\(n\)"),
    "ids without a hole": (lambda: mj.infill(tiny(), [[300, 301]]), r"parts\[0\] is .*at least one Hole"),
    "a row without a hole": (lambda: mj.infill(tiny(), [["x", mj.Hole(2)], ["x"]]), "at least one Hole"),
    "seeds of other rows": (
        lambda: mj.infill(tiny(), ["x", mj.Hole(2)], seed=[1, 2]),
        "seed is 'a list of 2'; allowed: one for all, or 1: one for each row",
    ),
    "seeds of other texts": (lambda: mj.edit(tiny(), ["x", "y"], seed=[1]), "seed is 'a list of 1'; .*each text"),
    "a piece of ids": (lambda: mj.edit(tiny(), [300, 301], spans=["x"]), r"spans is 'x'; allowed: .* in tokens"),
    "a span beyond ids": (lambda: mj.edit(tiny(), [300, 301], spans=[(1, 3)]), r"spans is \(1, 3\); .* tokens"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_call_is_refused_by_name(call, said):
    with pytest.raises((ValueError, TypeCheckError)) as error:
        call()
    if isinstance(error.value, TypeCheckError):  # with --jaxtyping alone
        pytest.skip("the type checker refuses it first")
    assert re.search(said, str(error.value)), error.value


@pytest.mark.slow
def test_traced_seeds_and_sizes_are_refused_by_name():
    for name in ("seed", "max_tokens"):
        with pytest.raises(ValueError, match=f"{name} is .*under jit use the decoder itself"):
            jax.jit(lambda x, name=name: sampled(**{name: x}))(jnp.arange(2))
