"""The output parser: its deltas add up to the answer, however the snapshots come, and only final text is sent."""

import itertools
import json
import random

import pytest

from mercury_jax.decode.answer_text import StopMatcher
from mercury_jax.serve.chat.output_parser import OutputParser
from mercury_jax.tokenizer import SPECIAL
from tests.serve.chat import answers
from tests.tiny import VOCAB, tokenizer

TOK = tokenizer()
LM = answers.lm_of(TOK)


def parser(**settings) -> OutputParser:
    return OutputParser(LM, chat=True, **settings)


def test_deltas_add_up_to_the_answer_however_snapshots_come():
    rng = random.Random(0)
    for _ in range(150):
        thinking = rng.random() < 0.5
        meant = answers.random_answer(TOK, rng, thinking)
        stop = [s for s in (answers.text(rng, 4) for _ in range(rng.randrange(4))) if s]
        made = parser(tools=True, stop=stop, thinking=thinking)
        seen = answers.deltas(made, answers.snapshots(meant.ids, rng, VOCAB))
        thought, content, calls = answers.joined(seen)
        assert thought == meant.thinking
        assert content == answers.cut(meant.content, stop)
        stopped = content != meant.content
        assert made.stopped == stopped
        asked = [] if stopped else meant.calls
        assert [(name, json.loads(arguments)) for name, arguments in calls.values()] == asked
        whole = made.message()
        assert (whole.reasoning, whole.content) == (thought, content)
        assert [(c.name, c.arguments) for c in whole.tool_calls] == list(calls.values())
        if not stopped:
            assert whole.completion_tokens == len(meant.ids)
            ids = meant.ids
            close = ids.index(SPECIAL.end_think) + 1 if SPECIAL.end_think in ids else 0
            assert whole.reasoning_tokens == close
        check_content_offsets(whole, meant.ids)


def check_content_offsets(message, ids):
    """The tokens of the content are those that wrote it; a stop text or a call may begin within the last of them."""
    written = b"".join(TOK.pieces[ids[i]] for i, _ in message.content_offsets).decode(errors="replace")
    end = len(message.content_offsets) - 1
    for k, (i, offset) in enumerate(message.content_offsets):
        text = TOK.pieces[ids[i]].decode(errors="replace")
        behind = message.content[offset:]
        assert (
            "\ufffd" in text + behind[:1] or behind.startswith(text) or (k == end and text.startswith(behind))
        )
    assert written.startswith(message.content) or "\ufffd" in message.content


def test_any_ids_are_parsed_alike_however_they_are_cut():
    rng = random.Random(1)
    marks = [SPECIAL.think, SPECIAL.end_think, SPECIAL.tool_call, SPECIAL.end_tool_call, SPECIAL.mask]
    call = TOK.encode('{"name": "f", "arguments": {"a": [1, "é🙂"]}}')
    for _ in range(150):
        ids = []
        while len(ids) < 60 and rng.random() < 0.97:
            part = rng.choice(
                [[rng.choice(marks)], call[: rng.randrange(len(call) + 1)], [rng.randrange(4, VOCAB)]]
            )
            ids += part
        stop = ("a", "\n}")
        settings = {"tools": rng.random() < 0.8, "stop": stop, "thinking": rng.random() < 0.3}
        one, many = parser(**settings), parser(**settings)
        at_once = answers.joined([one.feed(answers.snapshot(ids, finish="length"))])
        assert answers.joined(answers.deltas(many, answers.snapshots(ids, rng, VOCAB))) == at_once
        first, second = one.message(), many.message()
        strip = lambda m: m._replace(tool_calls=[c[1:] for c in m.tool_calls])
        assert strip(first) == strip(second)
        assert (first.reasoning, first.content) == at_once[:2]
        assert not any(s in first.content for s in stop)
        check_content_offsets(first, ids)
        for c in first.tool_calls:
            assert isinstance(json.loads(c.arguments), dict)


def test_an_incomplete_character_is_held_back_and_then_replaced():
    ids = TOK.encode("🙂")  # four bytes
    made = parser()
    assert [made.feed(answers.snapshot(ids[:n])).content for n in range(1, 5)] == ["", "", "", "🙂"]
    made = parser()
    assert made.feed(answers.snapshot([*ids[:2], *TOK.encode("x")], finish="stop")).content == "\ufffdx"
    made = parser()
    assert made.feed(answers.snapshot(ids[:3])).content == ""
    assert made.feed(answers.snapshot(ids[:3], finish="length")).content == "\ufffd"
    assert made.message().content == "\ufffd"
    for mark in (SPECIAL.end_think, SPECIAL.tool_call):  # a mark ends the wait for the other half
        made = parser(thinking=mark == SPECIAL.end_think, tools=True)
        made.feed(answers.snapshot([*ids[:2], mark, *ids[2:], *TOK.encode("x")], finish="stop"))
        assert made.message().reasoning + made.message().content == "\ufffd\ufffd\ufffdx"


def test_a_stop_sequence_over_several_tokens_is_never_sent():
    ids = TOK.encode("value\n\ndef x")
    made = parser(stop=("\n\ndef",))
    sent = [made.feed(answers.snapshot(ids[:n])).content for n in range(len(ids) + 1)]
    assert "".join(sent) == "value" == made.message().content
    assert made.stopped and made.message().completion_tokens < len(ids)
    made = parser(stop=("\n\ndef",))
    assert made.feed(answers.snapshot(TOK.encode("value\n\nde"))).content == "value"
    assert made.feed(answers.snapshot(TOK.encode("value\n\nde"), finish="stop")).content == "\n\nde"
    assert not made.stopped


def test_a_call_streams_its_name_and_then_its_arguments():
    ids = [
        SPECIAL.tool_call,
        *TOK.encode('{"name": "add", "arguments": {"a": 1, "b": "x"}}'),
        SPECIAL.end_tool_call,
    ]
    made = parser(tools=True)
    sent = [call for n in range(len(ids) + 1) for call in made.feed(answers.snapshot(ids[:n])).tool_calls]
    assert (sent[0].index, sent[0].name, sent[0].arguments) == (0, "add", "{")
    assert sent[0].id is not None and len(sent[0].id) == 29 and sent[0].id.startswith("call_")
    assert len(sent) > 5 and all(call[:3] == (0, None, None) for call in sent[1:])
    assert "".join(call.arguments for call in sent) == '{"a": 1, "b": "x"}'
    assert made.message().tool_calls[0].id == sent[0].id and made.message().content == ""


@pytest.mark.parametrize(
    ("written", "arguments"),
    [('{"name": "f"}', "{}"), ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
     ('{"name": "f", "parameters": {}}', "{}"), ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
     ('{"name": "f", "arguments": {"a": "two\nlines"}}', '{"a": "two\\nlines"}'),
     ('{"name": "f", "arguments": {"a": 1}, "name": "g", "arguments": {}}', '{"a": 1}'),
     ('\n {"other": {"name": "g"}, "name": "f", "arguments":{ "a" :[1e5,-0.5]}} ', '{ "a" :[1e5,-0.5]}')],
)  # fmt: skip
def test_calls_are_understood_in_all_their_forms(written: str, arguments: str):
    made = parser(tools=True)
    made.feed(
        answers.snapshot([SPECIAL.tool_call, *TOK.encode(written), SPECIAL.end_tool_call], finish="stop")
    )
    assert [(c.name, c.arguments) for c in made.message().tool_calls] == [("f", arguments)]
    assert made.message().content == ""


@pytest.mark.parametrize(
    "written",
    ["", "hello", "[1]", '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": {"a": 01}}',
     '{"name": "f", "arguments": {"a": tru}}', '{"name": "f", "arguments": {"a" 1}}',
     '{"name": "f", "arguments": {"a": "\\x"}}', '{"name": "f", "arguments": "[1]"}',
     '{"name": 3, "arguments": {}}', '{"name": "no spaces", "arguments": {}}',
     '{"name": "f", "x": tru, "arguments": {}}',
     '{"name": "f", "arguments": ' + '{"a": ' * 120 + "1" + "}" * 121, '{"arguments": {}}',
     '{"name": "f", "arguments": {"a": 1', '{"name": "f", "arguments": ' + '{"a": ' * 200,
     '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}"],
)  # fmt: skip
def test_a_malformed_call_is_content(written: str):
    made = parser(tools=True)
    ids = [
        *TOK.encode("so: "), SPECIAL.tool_call, *TOK.encode(written), SPECIAL.end_tool_call,
        *TOK.encode(" x"),
    ]  # fmt: skip
    sent = answers.joined(
        [made.feed(answers.snapshot(ids, n)) for n in range(0, len(ids) + 1, 1 + len(ids) // 90)]
    )
    made.feed(answers.snapshot(ids, finish="stop"))
    assert made.message().tool_calls == ()
    assert made.message().content == f"so: {written} x"
    for _, arguments in sent[2].values():  # what was sent cannot be executed
        with pytest.raises(ValueError):
            json.loads(arguments)


def test_marks_have_no_meaning_without_tools_or_outside_of_chat():
    ids = [SPECIAL.think, *TOK.encode("a"), SPECIAL.end_think, SPECIAL.tool_call, *TOK.encode("b")]
    made = parser()
    made.feed(answers.snapshot(ids, finish="stop"))
    assert (made.message().reasoning, made.message().content) == ("a", "b")
    made = OutputParser(LM, chat=False, tools=True, thinking=True)
    made.feed(answers.snapshot([*ids, SPECIAL.end_turn, *TOK.encode("c")], finish="stop"))
    assert made.message() == ("abc", "", (), 0, len(ids) + 2, ((1, 0), (4, 1), (6, 2)), None)


def test_tokens_behind_an_end_are_ignored():
    for end in (SPECIAL.eos, SPECIAL.end_turn, SPECIAL.pad):
        made = parser()
        assert made.feed(answers.snapshot([*TOK.encode("def x"), end, *TOK.encode("y")])).content == "def x"
        assert made.stopped and made.message().completion_tokens == len(TOK.encode("def x"))


def test_the_preview_contains_tokens_that_may_still_change():
    said, more, smile = TOK.encode("value ="), TOK.encode(" total"), TOK.encode("🙂")
    made = parser(stop=("STOP",))
    assert made.preview(answers.snapshot([*said, *more], len(said))) == "value = total"
    assert made.preview(answers.snapshot([*said, *smile[:2], *more], len(said))) == "value = total"
    assert made.preview(answers.snapshot([*said, *smile[:3]], len(said))) == "value ="
    assert made.preview(answers.snapshot([*said, *TOK.encode("STOP"), *more], len(said))) == "value ="
    assert made.preview(answers.snapshot([*said, SPECIAL.think, *more], len(said))) == "value ="
    for accepted, text in ((False, "value = total"), (True, "value =")):
        ends = [True] * len(said) + [accepted] + [False] * len(more)
        assert made.preview(answers.snapshot([*said, SPECIAL.eos, *more], len(said), accepted=ends)) == text
    assert made.feed(answers.snapshot(said)).content == "value ="  # the preview was not sent
    assert made.preview(answers.snapshot([*said, *smile[:2]], finish="length")) == "value =\ufffd"
    assert made.message().content == "value =\ufffd"


def test_the_preview_ends_as_the_message_and_leaves_calls_out():
    rng = random.Random(2)
    for _ in range(100):
        meant = answers.random_answer(TOK, rng, False)
        made, stop = parser(tools=True, stop=("{", "ab")), ["{", "ab"]
        shown = [made.preview(s) for s in answers.snapshots(meant.ids, rng, VOCAB)]
        assert shown[-1] == made.message().content == answers.cut(meant.content, stop)
        assert not any(s in text for s in stop for text in shown)
    ids = [*TOK.encode("so "), SPECIAL.tool_call, *TOK.encode('{"name": "f", "arg'), *TOK.encode("garbage")]
    for final in range(len(ids)):
        assert parser(tools=True).preview(answers.snapshot(ids, final)) == "so "


def pushed(matcher: StopMatcher, text: str, size: int) -> tuple[str, str | None, str]:
    """(text that came out, the match, text held back at the end)."""
    out = ""
    for at in range(0, len(text), size):
        before, found, _ = matcher.push(text[at : at + size])
        out += before
        if found is not None:
            return out, found, ""
    return out, None, matcher.flush()


def test_random_texts_over_two_letters_match_a_naive_search():
    rng = random.Random(0)
    words = ["".join(w) for n in range(1, 6) for w in itertools.product("ab", repeat=n)]
    for _ in range(3000):
        sought = rng.sample(words, rng.randrange(1, 4))
        text = "".join(rng.choice("aab") for _ in range(rng.randrange(14)))
        for size in (1, 3, 20):
            out, found, held = pushed(StopMatcher(sought), text, size)
            assert out + held == answers.cut(text, sought) and (found is None) == (out + held == text)
            if found is None:  # exactly what may be the beginning of a match is held back
                ends = [text[at:] for at in range(len(text)) if any(s.startswith(text[at:]) for s in sought)]
                assert held == max(ends, key=len, default="")
            else:
                assert text.startswith(out + found) and found in sought
