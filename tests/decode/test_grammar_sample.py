"""sample(schema=): whatever the model, its noise and its attention, the answer obeys, and nobody else notices."""

import json

import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.decode.grammar import Choice, FreeOr, Lark, Regex, ToolCalls
from mercury_jax.decode.rules import self_speculation
from mercury_jax.tokenizer import SPECIAL
from tests.decode.grammar_many import fault
from tests.decode.grammar_schemas import SCHEMAS, record
from tests.decode.test_decoder import compiled
from tests.marks import slow_except
from tests.tiny import PATTERNS, tiny

PROMPTS = ["def x", "return y if x"]
SMALL = record(kind={"enum": ["a", "b"]}, n={"type": "integer"}, note={"type": "string"})


MOST = 48  # tokens of an answer: the same everywhere, so that the tests share their programs


def run(schema, lm=None, seed=5, **more):
    return mj.sample(
        lm or tiny(), PROMPTS, max_tokens=MOST, schema=schema, seed=seed, temperature=1.0, **more
    )


@pytest.mark.parametrize(
    "pattern, block, kind",
    slow_except(
        [
            ("causal_encoder", 8, "absorbing"),
            ("block_causal", 8, "absorbing"),
            ("bidirectional", 8, "absorbing"),
            ("causal_encoder", 8, "uniform"),
            ("block_causal", 1, "absorbing"),  # autoregressive
        ],
        ("block_causal", 8, "absorbing"),
    ),
)
def test_a_random_model_of_every_kind_obeys(pattern, block, kind):
    lm = tiny(pattern, block, kind)
    for seed in range(0, 6, 2):
        out = run(SMALL, lm, seed)
        assert [fault(SMALL, text) for text in out.texts] == [None, None] and out.finish == ["stop", "stop"]
        assert max(out.lengths) <= MOST and out.forwards.max() <= max(out.lengths)


@pytest.mark.long
def test_a_row_does_not_notice_the_grammar_of_its_neighbour():
    alone = run([None, None])
    before = compiled()
    for schema in (SMALL, SCHEMAS["linked list"], Regex("[ab]{3,9}"), Choice(["yes", "no"])):
        out = run([schema, None])
        np.testing.assert_array_equal(out.tokens[1], alone.tokens[1])
        assert out.forwards[1] == alone.forwards[1] and out.texts[0] != alone.texts[0]
        seen = list(
            mj.stream(tiny(), PROMPTS, max_tokens=MOST, schema=[schema, None], seed=5, temperature=1.0)
        )
        last = [next(one for one in reversed(seen) if one.row == row) for row in (0, 1)]
        assert [one.text for one in last] == out.texts and all(one.done for one in last)
        assert [[one.row for one in seen].count(row) for row in (0, 1)] == out.forwards.tolist()
        held = [one.tokens[one.accepted].tolist() for one in seen if one.row == 0]  # a prefix that grows
        assert held == [out.tokens[0].tolist()[: len(one)] for one in held] and held[-1] == [*out.tokens[0]]
    assert compiled() == before  # another grammar is data
    [forced] = mj.stream(tiny(), PROMPTS[0], max_tokens=MOST, schema=Choice(["yes"]))  # without a pass
    assert (forced.text, forced.done, forced.step) == ("yes", True, 0)


def test_a_context_free_grammar_is_obeyed_in_both_of_its_syntaxes():
    def nested(text):
        inner = text.removeprefix("(").removesuffix(")")
        return text.isdigit() or (text == f"({inner})" and nested(inner))

    lark = Lark('start: NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,3}/ // "<" is no special token here')
    gbnf = Lark('root ::= [0-9] [0-9]? [0-9]? | "(" root ")"')
    for seed in (1, 2, 3):
        out = run([lark, gbnf], seed=seed)
        assert all(map(nested, out.texts)), out.texts


def test_a_seed_repeats_and_another_differs():
    assert run(SMALL).texts == run(SMALL).texts
    assert run(SMALL, seed=9).texts != run(SMALL).texts


def test_history_shows_the_answer_as_the_grammar_left_it():
    out = run([SMALL, None], history=True)
    last = [frame for frame in out.history if frame.used[0]][-1]
    start = len(tiny().tokenizer.encode(PROMPTS[0]))
    at = np.arange(last.used[0]) + last.start[0] - start
    inside = at < out.lengths[0]
    np.testing.assert_array_equal(last.answer[0, : last.used[0]][inside], out.tokens[0][at[inside]])
    assert last.accepted[0, : last.used[0]][inside].all()


def test_what_is_forced_takes_no_pass():
    out = run([Choice(["for value in range(count):"]), {"const": {"total": 1}}])
    assert out.text == "for value in range(count):" and json.loads(out.texts[1]) == {"total": 1}
    # One choice: whether a space stands behind the colon.
    assert out.forwards.tolist() == [0, 1]


def test_thinking_is_free_and_the_answer_obeys():
    lm = tiny()
    effort = mj.Effort(thinking=11, p=0.5, steps=1.0)
    chat = [{"role": "user", "content": "x"}]
    think = lambda schema: mj.sample(
        lm, [chat, chat], max_tokens=MOST, schema=schema, effort=effort, temperature=1.0, seed=2
    )
    out, free = think([SMALL, None]), think([None, None])
    assert fault(SMALL, out.texts[0]) is None and fault(SMALL, out.texts[1]) is not None
    assert out.thinking == free.thinking


def test_calls_come_between_their_marks():
    special = SPECIAL
    calls = ToolCalls([{"name": "now"}], special.tool_call, special.end_tool_call, at_most=2)
    (one, two) = run([calls, FreeOr(calls)]).tokens
    assert one[0] == special.tool_call and one[-1] == special.end_tool_call
    assert (
        json.loads(tiny().tokenizer.decode(one[: one.tolist().index(special.end_tool_call)]))["name"] == "now"
    )
    assert np.isin(two, [special.tool_call, special.end_tool_call]).sum() % 2 == 0


def test_a_text_that_the_budget_cuts_off_says_so():
    out = run([Regex("([a-z ]|[^x])+"), Regex("[a-z]{3}")])
    assert out.finish == ["length", "stop"] and out.lengths[0] == MOST


REFUSED = [
    (dict(schema={"$dynamicRef": "#a"}), r"schema\.\$dynamicRef is not supported"),
    (dict(schema=[SMALL]), "schema is '1 of them'; allowed: one, or 2"),
    (dict(schema=[None, {"$ref": "http://x.org"}]), r"schema\[1\].*nothing is fetched"),
    (dict(schema=SMALL, max_tokens=5), "schema is refused: schema needs an answer of .* max_tokens leaves 5"),
    (dict(schema="json"), "schema is 'json'; allowed: a JSON Schema"),
    (dict(schema=SMALL, max_tokens="x"), "max_tokens is 'x'"),
    (dict(schema=SMALL, passes=3), "passes is 3; allowed: None with schema="),
    (dict(schema=SMALL, guidance=1.0), "guidance is 1.0; allowed: None with schema="),
    (dict(schema=SMALL, plan=mj.Plan(revise=1)), "plan.revise is 1"),
    (dict(schema=SMALL, sampler=mj.rules.expand()), "sampler.rule is 'expand'"),
    (dict(schema=SMALL, sampler=self_speculation(4)), "sampler.speculate is 4"),
]


@pytest.mark.parametrize("wrong, words", REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_be_guaranteed_is_refused_before_any_compute(wrong, words, monkeypatch):
    monkeypatch.setattr("mercury_jax.decode.sample.start", None)
    with pytest.raises(ValueError, match=words):
        mj.sample(tiny(), PROMPTS, **({"max_tokens": 30} | wrong))


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("pattern", "kind"), [*((p, "absorbing") for p in PATTERNS), ("causal_encoder", "uniform")]
)
def test_no_answer_holds_a_bad_word_in_any_tokenisation(pattern, kind):
    """Every letter pair that plain answers hold is banned, whatever tokens spell it, across the prompt's end too."""
    lm, more = tiny(pattern, kind=kind), dict(max_tokens=12, n=4, seed=3, temperature=1.0)
    plain = mj.sample(lm, "def x", **more)
    words = sorted(
        {t[i : i + 2] for t in plain.texts for i in range(len(t) - 1) if "\ufffd" not in t[i : i + 2]}
    )
    words += ["x" + t[0] for t in plain.texts if t and t[0] != "\ufffd"]
    out = mj.sample(lm, "def x", bad_words=words, **more)
    assert all(word not in "x" + text for text in out.texts for word in words)
    assert all(text.strip() for text in out.texts)
    seen = {one.row: one.text for one in mj.stream(lm, "def x", bad_words=words, every=3, **more)}
    assert [seen[row] for row in range(4)] == out.texts


def test_bad_words_that_do_not_fit_are_refused():
    lm = tiny()
    for more, said in (
        (dict(bad_words=[""]), "bad_words"),
        (dict(bad_words=5), "bad_words is 5"),
        (dict(bad_words=[["a"], ["b"]]), "bad_words is '2 lists'"),
        (dict(bad_words=["a"], schema={"type": "object"}), "bad_words"),
        (dict(bad_words=["a"], stop=["b"]), "stop"),
    ):
        with pytest.raises(ValueError, match=said):
            mj.sample(lm, "x", max_tokens=8, **more)
