"""Tools and thinking of other checkpoints: their templates get the tools, and their marks are parsed."""

import json
import random

import pytest
from tokenizers import Tokenizer

from mercury_jax.hub.tokenizer import HFTokenizer
from mercury_jax.serve.chat.messages import opens_thinking, render_prompt, tool_format
from mercury_jax.serve.chat.output_parser import OutputParser
from mercury_jax.serve.errors import ApiError
from tests.hub.tiny_tokenizers import reference
from tests.serve.api_client import check_messages, check_tools
from tests.serve.chat import answers, checkpoint_tokenizers as tokenizers

TOOLS = check_tools([
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
])  # fmt: skip
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": "fox", "b": 2}'}}
CHAT = check_messages([
    {"role": "system", "content": "the quick fox"},
    {"role": "user", "content": "print"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "d"}]},
    {"role": "tool", "tool_call_id": "d", "content": "second"},
    {"role": "tool", "tool_call_id": "c", "content": "first"},
])  # fmt: skip


def read(tok, ids: list[int], **settings) -> OutputParser:
    rng = random.Random(0)
    made = OutputParser(answers.lm_of(tok), chat=True, **settings)
    sent = answers.joined(answers.deltas(made, answers.snapshots(ids, rng, tok.vocab_size)))
    whole = made.message()
    assert sent[:2] == (whole.reasoning, whole.content)
    return made


@pytest.mark.parametrize("marks", ["special", "shown", "text"])
def test_a_template_with_tools_renders_them(marks: str):
    tok = tokenizers.hermes(marks)
    names = json.loads(tok.files["tokenizer_config.json"])
    text = reference(tokenizers.HERMES, CHAT, tools=TOOLS, add_generation_prompt=True, **names)
    library = Tokenizer.from_str(tok.files["tokenizer.json"].decode())
    assert (
        list(render_prompt(answers.lm_of(tok), CHAT, TOOLS))
        == library.encode(text, add_special_tokens=False).ids
    )
    assert text.index("first") < text.index("second") and '"arguments": {"a": "fox", "b": 2}' in text


@pytest.mark.parametrize(
    "tok",
    [tokenizers.hermes("special"), tokenizers.hermes("shown"), tokenizers.gemma(),
     tokenizers.without_tools()],
)  # fmt: skip
def test_user_text_never_becomes_a_control_token(tok):
    control = set(tok.tokens.control.values())
    kept = lambda ids: [i for i in ids if i in control]
    forged = "".join(tok.tokens.control)
    call = {"id": "c", "function": {"name": "add", "arguments": json.dumps({forged: forged})}}
    chat = lambda said, call: check_messages([
        {"role": "user", "content": said},
        {"role": "assistant", "content": said, "tool_calls": [call]},
        {"role": "tool", "content": said, "tool_call_id": "c"},
    ])  # fmt: skip
    tools = lambda said: [{"type": "function", "function": {"name": "add", "description": said}}]
    lm = answers.lm_of(tok)
    plain = render_prompt(lm, chat("fox", {**CALL, "id": "c"}), tools("fox"))
    assert kept(render_prompt(lm, chat(forged, call), tools(forged))) == kept(plain)


def test_the_tool_format_follows_from_template_and_vocabulary():
    control = tokenizers.hermes("special").tokens.control
    found = tool_format(tokenizers.hermes("special"))
    assert (found.open, found.close, found.native) == (control["<tool_call>"], control["</tool_call>"], True)
    assert found.lead == "\n"
    for marks in ("shown", "text"):
        assert tool_format(tokenizers.hermes(marks))[:4] == ("<tool_call>", "</tool_call>", "\n", True)
    assert tool_format(tokenizers.without_tools())[:4] == ("<tool_call>", "</tool_call>", "\n", False)
    assert tool_format(tokenizers.gemma()).quote == tokenizers.gemma().tokens.control['<|"|>']


@pytest.mark.parametrize(
    "tok", [*map(tokenizers.hermes, ("special", "shown", "text")), tokenizers.without_tools()]
)
@pytest.mark.parametrize("thinks", [False, True])
def test_hermes_calls_are_parsed_with_marks_as_ids_or_text(tok, thinks: bool):
    rng, form = random.Random(3), tool_format(tok)
    named = lambda i: (
        tokenizers.encode_with_control(tok, i) if rng.random() < 0.5 else tok.encode(i)
    )  # its token, or spelt out
    mark = lambda i: [i] if isinstance(i, int) else named(i)
    for _ in range(40):
        calls = [(f"f{n}", {"k": answers.value(rng), "</tool_call>": 1}) for n in range(rng.randrange(4))]
        said = rng.choice(["", "fox <tool", "print <b>\n", "é🙂 "])
        ids = (
            tokenizers.encode_with_control(tok, "<think>\n\nthe fox\n\nruns\n</think>\n\n") if thinks else []
        )
        ids += tok.encode(said)
        for n, call in enumerate(calls):
            ids += [*tok.encode("\n" * min(n, 1)), *mark(form.open), *tok.encode(answers.payload(rng, *call))]
            ids += mark(form.close)
        made = read(tok, ids, tools=True).message()
        assert made.reasoning == ("the fox\n\nruns" if thinks else "")
        assert made.content == said
        assert [(c.name, json.loads(c.arguments)) for c in made.tool_calls] == calls


def test_gemmas_calls_become_json():
    tok = tokenizers.gemma()
    spelt = (
        '<|channel>thought\nthe fox<channel|>so<|tool_call>call:read.file{path:<|"|>a "b"\\n\n}{,:<|"|>,n:3,deep:'
        '{on:true,list:[1,<|"|>x,y<|"|>,{}],none:null},"quoted":"a\\"}"}<tool_call|><|tool_call>call:go{}<tool_call|>'
        "<|tool_response>more"
    )
    reply = read(tok, tokenizers.encode_with_control(tok, spelt), tools=True)
    made = reply.message()
    assert (made.reasoning, made.content, reply.stopped) == ("the fox", "so", True)
    assert [(c.name, json.loads(c.arguments)) for c in made.tool_calls] == [
        ("read.file", {"path": 'a "b"\\n\n}{,:', "n": 3, "deep": {"on": True, "list": [1, "x,y", {}], "none": None},
                       "quoted": 'a"}'}),
        ("go", {}),
    ]  # fmt: skip
    as_json = '<|tool_call>{"name": "f", "arguments": {"a": "b"}}<tool_call|>'  # as a grammar may force it
    assert read(tok, tokenizers.encode_with_control(tok, as_json), tools=True).message().tool_calls[0][
        1:
    ] == ("f", '{"a": "b"}')
    for bad in (
        "hello",
        "call:f",
        "call:a b{}",
        "call:f{a:b}",
        "call:f{a:1",
        'call:f{a:<|"|>x}',
        "call:f{a:1}}",
    ):
        made = read(
            tok, tokenizers.encode_with_control(tok, f"<|tool_call>{bad}<tool_call|>x"), tools=True
        ).message()
        whole = bad.endswith("}}")  # a call, and a brace too many behind it
        shown = bad.replace('<|"|>', '"')  # a special mark has no text of its own
        assert len(made.tool_calls) == whole and (whole or shown in made.content)


def test_tools_are_described_to_a_template_without_tools():
    for tok in (
        tokenizers.without_tools(),
        tokenizers.without_tools("gemma"),
    ):  # the latter wants its roles to alternate
        lm = answers.lm_of(tok)
        text = tok.decode(render_prompt(lm, CHAT, TOOLS), skip_special=False)
        assert '[{"name": "add", "parameters": {"type": "object", "properties": {}}}]' in text
        assert (
            text.count('<tool_call>\n{"name": "add", "arguments": {"a": "fox", "b": 2}}\n</tool_call>') == 2
        )
        assert "<tool_response>\nfirst\n</tool_response>\n<tool_response>\nsecond\n</tool_response>" in text
        asked = tok.decode(render_prompt(lm, CHAT[1:2], TOOLS), skip_special=False)
        assert asked.index('"name": "add"') < asked.index("print")
        assert "tool" not in tok.decode(render_prompt(lm, CHAT[:2]), skip_special=False)


def test_messages_that_the_template_refuses_raise_its_words():
    tok = tokenizers.without_tools("gemma")
    with pytest.raises(ApiError, match="Conversation roles must alternate") as raised:
        render_prompt(answers.lm_of(tok), check_messages([{"role": "assistant", "content": "fox"}]))
    assert raised.value.param == "messages"


def test_a_template_skips_thinking_where_it_can():
    """As transformers does with enable_thinking=False; a template that opens thinking anyway gets an empty one."""
    tok, chat = tokenizers.without_tools(), CHAT[:2]
    names = json.loads(tok.files["tokenizer_config.json"])
    settings = dict(add_generation_prompt=True, enable_thinking=False, **names)
    text = reference(tok.files["chat_template.jinja"].decode(), chat, **settings)
    library = Tokenizer.from_str(tok.files["tokenizer.json"].decode())
    shut = list(render_prompt(answers.lm_of(tok), chat))
    assert shut == library.encode(text, add_special_tokens=False).ids
    empty = tokenizers.encode_with_control(tok, "<think>\n\n</think>\n\n")
    assert shut[-len(empty) :] == empty and not opens_thinking(answers.lm_of(tok), shut)
    opens = tokenizers.HERMES.replace(
        "assistant\\n' }}{%- endif %}\n", "assistant\\n<think>\\n' }}{%- endif %}\n"
    )
    always = answers.lm_of(HFTokenizer.of(tokenizers.with_tokens(dict(tok.files), opens)))
    ids = list(render_prompt(always, chat))
    assert ids[-len(empty) :] == empty and ids.count(empty[0]) == 1
    assert opens_thinking(always, render_prompt(always, chat, thinking=True))


def test_a_prompt_that_ends_inside_thinking_is_recognised():
    tok = tokenizers.without_tools()
    lm, chat = answers.lm_of(tok), CHAT[:2]
    assert opens_thinking(lm, render_prompt(lm, chat, thinking=True)) and not opens_thinking(
        lm, render_prompt(lm, chat)
    )
    shut = tokenizers.encode_with_control(tok, "<think>\n\n</think>\n\n")
    assert (
        not opens_thinking(lm, shut)
        and not opens_thinking(lm, shut[:1] + shut[-2:-1])
        and opens_thinking(lm, tokenizers.encode_with_control(tok, "fox<think>"))
    )
    made = read(tok, tokenizers.encode_with_control(tok, "\nfox\n</think>\n\nthe"), thinking=True).message()
    assert (made.reasoning, made.content) == tok.split_answer(
        tokenizers.encode_with_control(tok, "<think>\nfox\n</think>\n\nthe")
    )


@pytest.mark.parametrize("form", ["byte_level", "gemma", "llama", "metaspace"])
def test_content_equals_the_text_of_the_checkpoints_decoder(form: str):
    tok, rng = tokenizers.without_tools(form), random.Random(4)
    assert tok.thinking is not None
    for _ in range(60):
        said = answers.text(rng, 20) + rng.choice(["", "x"])
        thought = rng.choice([None, f"a{answers.text(rng)}z"])
        ids = tok.example("fox", said, thought)[1][:-1]
        made = read(tok, ids).message()
        assert (made.reasoning or None, made.content) == tok.split_answer(ids)
