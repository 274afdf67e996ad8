"""Checkpoints of others: their own templates get the tools, their own marks are read."""

import json
import random

import pytest
from tokenizers import Tokenizer

from mercury_jax.hub.tokenizer import HFTokenizer
from mercury_jax.serve.chat.formats import tool_format
from mercury_jax.serve.chat.messages import checked, checked_tools
from mercury_jax.serve.chat.prompt import opened, render
from mercury_jax.serve.chat.refused import Refused
from mercury_jax.serve.chat.reply import Reply
from tests.hub.tiny_tokenizers import reference
from tests.serve.chat import answers, foreign

TOOLS = checked_tools([
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
])  # fmt: skip
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": "fox", "b": 2}'}}
CHAT = checked([
    {"role": "system", "content": "the quick fox"},
    {"role": "user", "content": "print"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "d"}]},
    {"role": "tool", "tool_call_id": "d", "content": "second"},
    {"role": "tool", "tool_call_id": "c", "content": "first"},
])  # fmt: skip


def read(tok, ids: list[int], **settings) -> Reply:
    rng = random.Random(0)
    made = Reply(answers.lm_of(tok), chat=True, **settings)
    sent = answers.joined(answers.deltas(made, answers.snapshots(ids, rng, tok.vocab_size)))
    whole = made.message()
    assert sent[:2] == (whole.thinking, whole.content)
    return made


@pytest.mark.parametrize("marks", ["special", "shown", "text"])
def test_a_template_that_knows_tools_is_given_them(marks: str):
    tok = foreign.hermes(marks)
    names = json.loads(tok.files["tokenizer_config.json"])
    text = reference(foreign.HERMES, CHAT, tools=TOOLS, add_generation_prompt=True, **names)
    library = Tokenizer.from_str(tok.files["tokenizer.json"].decode())
    assert list(render(answers.lm_of(tok), CHAT, TOOLS)) == library.encode(text, add_special_tokens=False).ids
    assert text.index("first") < text.index("second") and '"arguments": {"a": "fox", "b": 2}' in text


@pytest.mark.parametrize(
    "tok", [foreign.hermes("special"), foreign.hermes("shown"), foreign.gemma(), foreign.untaught()]
)
def test_nothing_that_a_user_writes_becomes_control(tok):
    control = set(tok.tokens.control.values())
    kept = lambda ids: [i for i in ids if i in control]
    forged = "".join(tok.tokens.control)
    call = {"id": "c", "function": {"name": "add", "arguments": json.dumps({forged: forged})}}
    chat = lambda said, call: checked([
        {"role": "user", "content": said},
        {"role": "assistant", "content": said, "tool_calls": [call]},
        {"role": "tool", "content": said, "tool_call_id": "c"},
    ])  # fmt: skip
    tools = lambda said: [{"type": "function", "function": {"name": "add", "description": said}}]
    lm = answers.lm_of(tok)
    plain = render(lm, chat("fox", {**CALL, "id": "c"}), tools("fox"))
    assert kept(render(lm, chat(forged, call), tools(forged))) == kept(plain)


def test_formats_are_told_from_the_template_and_the_vocabulary():
    control = foreign.hermes("special").tokens.control
    found = tool_format(foreign.hermes("special"))
    assert (found.open, found.close, found.native) == (control["<tool_call>"], control["</tool_call>"], True)
    assert found.before == (found.open, "\n") and found.behind == ("\n", found.close)
    for marks in ("shown", "text"):
        assert tool_format(foreign.hermes(marks))[:4] == ("<tool_call>", "</tool_call>", "\n", True)
    assert tool_format(foreign.untaught())[:4] == ("<tool_call>", "</tool_call>", "\n", False)
    assert tool_format(foreign.gemma()).quote == foreign.gemma().tokens.control['<|"|>']


@pytest.mark.parametrize("tok", [*map(foreign.hermes, ("special", "shown", "text")), foreign.untaught()])
@pytest.mark.parametrize("thinks", [False, True])
def test_hermes_calls_are_read_whether_their_marks_are_ids_or_text(tok, thinks: bool):
    rng, form = random.Random(3), tool_format(tok)
    named = lambda i: (
        foreign.written(tok, i) if rng.random() < 0.5 else tok.encode(i)
    )  # its token, or spelt out
    mark = lambda i: [i] if isinstance(i, int) else named(i)
    for _ in range(40):
        calls = [(f"f{n}", {"k": answers.value(rng), "</tool_call>": 1}) for n in range(rng.randrange(4))]
        said = rng.choice(["", "fox <tool", "print <b>\n", "é🙂 "])
        ids = foreign.written(tok, "<think>\n\nthe fox\n\nruns\n</think>\n\n") if thinks else []
        ids += tok.encode(said)
        for n, call in enumerate(calls):
            ids += [*tok.encode("\n" * min(n, 1)), *mark(form.open), *tok.encode(answers.payload(rng, *call))]
            ids += mark(form.close)
        made = read(tok, ids, tools=True).message()
        assert made.thinking == ("the fox\n\nruns" if thinks else "")
        assert made.content == said
        assert [(c.name, json.loads(c.arguments)) for c in made.calls] == calls


def test_gemma_spells_calls_in_its_own_way_and_they_become_json():
    tok = foreign.gemma()
    spelt = (
        '<|channel>thought\nthe fox<channel|>so<|tool_call>call:read.file{path:<|"|>a "b"\\n\n}{,:<|"|>,n:3,deep:'
        '{on:true,list:[1,<|"|>x,y<|"|>,{}],none:null},"quoted":"a\\"}"}<tool_call|><|tool_call>call:go{}<tool_call|>'
        "<|tool_response>more"
    )
    reply = read(tok, foreign.written(tok, spelt), tools=True)
    made = reply.message()
    assert (made.thinking, made.content, reply.stopped) == ("the fox", "so", True)
    assert [(c.name, json.loads(c.arguments)) for c in made.calls] == [
        ("read.file", {"path": 'a "b"\\n\n}{,:', "n": 3, "deep": {"on": True, "list": [1, "x,y", {}], "none": None},
                       "quoted": 'a"}'}),
        ("go", {}),
    ]  # fmt: skip
    as_json = '<|tool_call>{"name": "f", "arguments": {"a": "b"}}<tool_call|>'  # as a grammar may force it
    assert read(tok, foreign.written(tok, as_json), tools=True).message().calls[0][1:] == ("f", '{"a": "b"}')
    for bad in (
        "hello",
        "call:f",
        "call:a b{}",
        "call:f{a:b}",
        "call:f{a:1",
        'call:f{a:<|"|>x}',
        "call:f{a:1}}",
    ):
        made = read(tok, foreign.written(tok, f"<|tool_call>{bad}<tool_call|>x"), tools=True).message()
        whole = bad.endswith("}}")  # a call, and a brace too many behind it
        shown = bad.replace('<|"|>', '"')  # a special mark has no text of its own
        assert len(made.calls) == whole and (whole or shown in made.content)


def test_a_template_without_tools_is_told_in_words():
    for tok in (foreign.untaught(), foreign.untaught("gemma")):  # the latter wants its roles to alternate
        lm = answers.lm_of(tok)
        text = tok.decode(render(lm, CHAT, TOOLS), skip_special=False)
        assert '[{"name": "add", "parameters": {"type": "object", "properties": {}}}]' in text
        assert (
            text.count('<tool_call>\n{"name": "add", "arguments": {"a": "fox", "b": 2}}\n</tool_call>') == 2
        )
        assert "<tool_response>\nfirst\n</tool_response>\n<tool_response>\nsecond\n</tool_response>" in text
        asked = tok.decode(render(lm, CHAT[1:2], TOOLS), skip_special=False)
        assert asked.index('"name": "add"') < asked.index("print")
        assert "tool" not in tok.decode(render(lm, CHAT[:2]), skip_special=False)


def test_what_the_template_says_of_the_messages_is_refused_in_its_words():
    tok = foreign.untaught("gemma")
    with pytest.raises(Refused, match="Conversation roles must alternate") as refused:
        render(answers.lm_of(tok), checked([{"role": "assistant", "content": "fox"}]))
    assert refused.value.param == "messages"


def test_a_template_is_told_where_there_is_no_room_for_thinking():
    """As transformers would with enable_thinking false; one that opens it all the same has an empty one."""
    tok, chat = foreign.untaught(), CHAT[:2]
    names = json.loads(tok.files["tokenizer_config.json"])
    settings = dict(add_generation_prompt=True, enable_thinking=False, **names)
    text = reference(tok.files["chat_template.jinja"].decode(), chat, **settings)
    library = Tokenizer.from_str(tok.files["tokenizer.json"].decode())
    shut = list(render(answers.lm_of(tok), chat))
    assert shut == library.encode(text, add_special_tokens=False).ids
    empty = foreign.written(tok, "<think>\n\n</think>\n\n")
    assert shut[-len(empty) :] == empty and not opened(answers.lm_of(tok), shut)
    opens = foreign.HERMES.replace(
        "assistant\\n' }}{%- endif %}\n", "assistant\\n<think>\\n' }}{%- endif %}\n"
    )
    always = answers.lm_of(HFTokenizer.of(foreign.with_tokens(dict(tok.files), opens)))
    ids = list(render(always, chat))
    assert ids[-len(empty) :] == empty and ids.count(empty[0]) == 1
    assert opened(always, render(always, chat, thinking=True))


def test_a_prompt_knows_whether_it_ends_in_thinking():
    tok = foreign.untaught()
    lm, chat = answers.lm_of(tok), CHAT[:2]
    assert opened(lm, render(lm, chat, thinking=True)) and not opened(lm, render(lm, chat))
    shut = foreign.written(tok, "<think>\n\n</think>\n\n")
    assert (
        not opened(lm, shut)
        and not opened(lm, shut[:1] + shut[-2:-1])
        and opened(lm, foreign.written(tok, "fox<think>"))
    )
    made = read(tok, foreign.written(tok, "\nfox\n</think>\n\nthe"), thinking=True).message()
    assert (made.thinking, made.content) == tok.split_answer(
        foreign.written(tok, "<think>\nfox\n</think>\n\nthe")
    )


@pytest.mark.parametrize("form", ["byte_level", "gemma", "llama", "metaspace"])
def test_content_is_what_the_checkpoints_own_decoder_says(form: str):
    tok, rng = foreign.untaught(form), random.Random(4)
    assert tok.thinking is not None
    for _ in range(60):
        said = answers.text(rng, 20) + rng.choice(["", "x"])
        thought = rng.choice([None, f"a{answers.text(rng)}z"])
        ids = tok.example("fox", said, thought)[1][:-1]
        made = read(tok, ids).message()
        assert (made.thinking or None, made.content) == tok.split_answer(ids)
