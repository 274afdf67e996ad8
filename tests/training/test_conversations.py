"""Conversations: every form of a record gives the same examples, every broken one is named, nothing is lost."""

import gzip
import json
import sys
import types

import numpy as np
import pytest

from mercury_jax import cli, hub
from mercury_jax.decode.image_prompts import split_conversation
from mercury_jax.tokenizer import SPECIAL
from mercury_jax.training import data
from mercury_jax.training.data.conversations import encode_conversation, read_conversation
from mercury_jax.training.data.documents import Files
from mercury_jax.training.data.packing import StreamSettings
from mercury_jax.training.data.shard_writer import pack
from tests.tiny import tiny, tokenizer
from tests.training.tiny_data import row_layout

said = lambda *turns: [{"role": role, "content": content} for role, content in turns]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TALK = said(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c\nd"), ("assistant", "e"))
# One conversation in every form.
FORMS = {
    "messages": {"messages": TALK, "prompt": "ignored", "tools": None},
    "parts": {"messages": [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TALK]},
    "developer": {"messages": [{**TALK[0], "role": "developer"}, *TALK[1:], *said(("user", "z"))]},
    "sharegpt": {
        "conversations": [
            {"from": {"user": "human", "assistant": "gpt"}.get(turn["role"], turn["role"]), "value": turn["content"]}
            for turn in TALK
        ]
    },
    "sharegpt, system apart": {
        "system": "s", "conversations": [{"from": t["role"], "value": t["content"]} for t in TALK[1:]],
    },
    "completion": {"prompt": TALK[:-1], "completion": TALK[-1:], "messages": None},
    "completion as a text": {"prompt": TALK[:-1], "completion": "e"},
    "alpaca": {"system": "s", "history": [["a", "b"]], "instruction": "c", "input": "d", "output": "e"},
    "alpaca without input": {
        "system": "s", "history": [["a", "b"]], "instruction": "c\nd", "output": "e", "input": None,
    },
}  # fmt: skip


def examples(record, turns="last", tok=None):
    return encode_conversation(tok or tokenizer(), "x:1", read_conversation("x:1", record), turns)


def texts(record, turns="last", tok=None):
    """(prompt, what is trained on) of each example, with the special tokens."""
    tok = tok or tokenizer()
    read = lambda ids: tok.decode(ids.tolist(), skip_special=False)
    return [tuple(map(read, np.split(x.ids, [x.prompt]))) for x in examples(record, turns, tok)]


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_conversation_gives_the_same_examples(name):
    start = "<|system|>s<|end_turn|><|user|>a<|end_turn|><|assistant|>"
    last = (f"{start}b<|end_turn|><|user|>c\nd<|end_turn|><|assistant|>", "e<|eos|>")
    assert texts(FORMS[name]) == [last]
    # Of a prompt and a completion only the completion is trained on.
    assert texts(FORMS[name], "all") == ([last] if "completion" in name else [(start, "b<|eos|>"), last])


def test_tool_calls_and_results_are_trained_on_as_the_model_writes_them():
    turns = [
        *said(("user", "q")), {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"}, *said(("assistant", "done")),
    ]  # fmt: skip
    listed = '<|system|><|tool|>[{"name": "f", "parameters": {"type": "object"}}]<|end_turn|>'
    asked = f"{listed}<|user|>q<|end_turn|><|assistant|>"
    call = '<|tool_call|>{"name": "f", "arguments": {"x": 1}}<|end_tool_call|>'
    wanted = [
        (asked, f"{call}<|eos|>"),
        (
            f"{asked}{call}<|end_turn|><|tool|><|tool_result|>r<|end_tool_result|><|end_turn|><|assistant|>",
            "done<|eos|>",
        ),
    ]
    record = {"messages": turns, "tools": TOOLS}
    assert texts(record, "all") == wanted
    # Tools and arguments as datasets keep them: JSON text, no ids, null where another row has a value.
    bare = [{"tool_calls": None, "tool_call_id": None, "name": None, **turn} for turn in turns]
    bare[1]["tool_calls"] = [{"function": {"name": "f", "arguments": {"x": 1}}}]
    bare[2]["tool_call_id"] = None
    assert texts({"messages": bare, "tools": json.dumps([TOOLS[0]["function"]])}, "all") == wanted
    spoken = [
        {"from": "human", "value": "q"}, {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "r"}, {"from": "gpt", "value": "done"},
    ]  # fmt: skip
    assert texts({"conversations": spoken, "tools": json.dumps(TOOLS)}, "all") == wanted


def test_a_turn_of_weight_0_is_not_trained_on():
    turns = said(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    turns[3]["weight"] = 0
    assert [after for _, after in texts({"messages": turns}, "all")] == ["b<|eos|>"]
    turns[1]["weight"] = 0
    with pytest.raises(ValueError, match="allowed: an assistant turn"):
        examples({"messages": turns})


def test_text_parts_are_joined_as_in_a_request():
    turns = [{"role": "user", "content": [{"type": "text", "text": x} for x in ("one", "two")]}]
    joined, _ = split_conversation(tiny(), turns)
    [(prompt, _)] = texts({"messages": [*turns, *said(("assistant", "a"))]})
    assert prompt == f"<|user|>{joined[0]['content']}<|end_turn|><|assistant|>"


def test_a_chat_template_that_leaves_tools_or_calls_out_is_refused(tmp_path):
    folder = hub.tiny_random("LLaDA", tmp_path / "m")
    (folder / "tokenizer.model").unlink()  # the template of a checkpoint of others
    write = lambda template: (folder / "chat_template.jinja").write_text(template)
    plain = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}<|end_turn|>{% endfor %}"
    end = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    calls = "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
    turns = [*said(("user", "q")), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    write(plain + end)
    with pytest.raises(
        ValueError, match="x:1: tool_calls: the chat template of this model does not write them"
    ):
        examples({"messages": turns}, tok=hub.tokenizer_of(folder))
    with pytest.raises(ValueError, match="x:1: tools: the chat template of this model does not write them"):
        examples({"messages": TALK, "tools": TOOLS}, tok=hub.tokenizer_of(folder))
    write(plain.replace("<|end_turn|>", calls + "<|end_turn|>\n") + end)
    tok = hub.tokenizer_of(folder)
    assert texts({"messages": turns}, tok=tok) == [("<|user|>q<|end_turn|>\n<|assistant|>", "[f]<|eos|>")]


# --- files and datasets


def write_files(folder, records):
    """The same records in each kind of file."""
    lines = "\n".join(map(json.dumps, records)).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "c.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(records, indent=1).encode())
    return ["a.jsonl", "b.jsonl.gz", "c.json"]


RECORDS = [{"messages": said(("user", f"q{i}"), ("assistant", f"a{i}"))} for i in range(5)]


def of(source):
    settings = StreamSettings(tokenizer(), row_layout(), 64, (0, 0), "train")
    return sorted(x.ids.tolist() for _, x in source.examples(settings))


def test_every_kind_of_file_holds_the_same_conversations(tmp_path):
    names = write_files(tmp_path, RECORDS)
    wanted = of(data.chat(f"{tmp_path}/{names[0]}"))
    assert len(wanted) == 5 and all(of(data.chat(f"{tmp_path}/{name}")) == wanted for name in names)
    packed = [
        pack(Files((f"{tmp_path}/{name}",), chats=True), tokenizer(), tmp_path / f"{name}.packed")
        for name in names
    ]
    assert len({manifest["train"]["tokens"] for manifest in packed}) == 1


def test_parquet_holds_the_same_conversations(tmp_path):
    table, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    turns = [
        {
            "conversations": [{"from": "human", "value": f"q{i}"}, {"from": "gpt", "value": f"a{i}"}],
            "score": i,
        }
        for i in range(5)
    ]
    parquet.write_table(table.Table.from_pylist(turns), tmp_path / "x.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    assert of(data.chat(f"{tmp_path}/x.parquet")) == of(data.chat(f"{tmp_path}/a.jsonl"))
    mixed = [{"prompt": "q", "completion": "a", "messages": None}, {"prompt": "q", "completion": None}]
    parquet.write_table(table.Table.from_pylist(mixed), tmp_path / "y.parquet")
    with pytest.raises(ValueError, match=r"y\.parquet:1: keys is 'prompt'"):
        of(data.chat(f"{tmp_path}/y.parquet"))


def test_a_dataset_is_streamed_or_read_from_the_disk(tmp_path, monkeypatch, capsys):
    fake, calls = types.ModuleType("datasets"), []
    fake.load_dataset = lambda *words, **more: calls.append((words, more)) or iter(RECORDS)  # type: ignore
    fake.load_from_disk = lambda path: {"train": RECORDS, "few": RECORDS[:2]}  # type: ignore
    monkeypatch.setitem(sys.modules, "datasets", fake)
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    wanted = of(data.chat(f"{tmp_path}/a.jsonl"))
    assert of(data.chat("hf:org/set:small", part="half")) == wanted
    assert calls == [(("org/set", "small"), {"split": "half", "streaming": True})]
    (tmp_path / "dataset_dict.json").write_text("{}")
    assert of(data.chat(f"hf:{tmp_path}")) == wanted
    assert len(of(data.chat(f"hf:{tmp_path}", part="few"))) == 2
    with pytest.raises(ValueError, match="part is 'test'; allowed: train, few"):
        of(data.chat(f"hf:{tmp_path}", part="test"))
    with pytest.raises(ValueError, match="part is 'few'; allowed: train for files"):
        data.chat(f"{tmp_path}/a.jsonl", part="few")
    hub.tiny_random("LLaDA", tmp_path / "m")
    words = ["--tokenizer", f"{tmp_path}/m", "--out", f"{tmp_path}/packed", "--workers", "1", "--json"]
    assert cli.main(["data", "pack", "--chats", "hf:org/set", *words]) == 0
    assert json.loads(capsys.readouterr().out)["train"]["documents"] == 5


def test_each_answer_of_a_conversation_is_an_example_of_an_epoch(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}))
    for turns, count in (("last", 1), ("all", 2)):
        source = data.chat(f"{tmp_path}/a.jsonl", turns=turns)
        opened = source.open(StreamSettings(tokenizer(), row_layout(), 128, (0, 0), "train"))
        assert opened is not None and opened.size == count
        manifest = pack(
            Files((f"{tmp_path}/a.jsonl",), chats=True, turns=turns), tokenizer(), tmp_path / turns
        )
        assert manifest["train"]["documents"] == count


def test_what_is_trained_on_is_shown(tmp_path, capsys):
    hub.tiny_random("LLaDA", tmp_path / "m")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": said(("user", "a b"), ("assistant", "c d"))}))
    command = ["data", "show", f"{tmp_path}/a.jsonl", "--model", f"{tmp_path}/m", "--row", "64"]
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [sample] = found["samples"]
    assert sample["trained_on"].startswith("c d") and "a b" in sample["prompt"]
    assert found["trained_on"] == sample["tokens"] - len(examples_of(tmp_path / "m", "a b"))
    assert found["positions"] <= found["rows"] * 64 and 0 <= found["padding"] < 1
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('\n{"broken": 1}')
    assert cli.main([*command, "--bad-lines", "skip"]) == 0
    printed = capsys.readouterr()
    assert "\u27e6c d" in printed.out and printed.err.count("skipped 1 of 2 lines") == 1


def examples_of(folder, text):
    return hub.tokenizer_of(folder).render(said(("user", text)))


# --- broken files

turn = lambda **more: {
    "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **more}]
}
user = lambda **more: {
    "messages": [{"role": "user", "content": "q", **more}, {"role": "assistant", "content": "a"}]
}
BROKEN = {
    '{"messages": [': r"a\.jsonl:2: not JSON",
    '["a", "b"]': r"a\.jsonl:2: a list; allowed: one object on each line",
    '{"messages": "\xff"}'.encode("latin-1"): r"a\.jsonl:2: not JSON: 'utf-8' codec",
    '{"text": "a"}': r"a\.jsonl:2: keys is 'text'; allowed: those of a conversation: messages; conversations; prompt",
    "{}": r"a\.jsonl:2: keys is ''",
    '{"prompt": "a"}': r"a\.jsonl:2: keys is 'prompt'",
    '{"instruction": "a", "output": null}': r"a\.jsonl:2: keys is 'instruction'",
    '{"messages": []}': r"a\.jsonl:2: messages is \[\]; allowed: an assistant turn that follows another",
    '{"messages": "hello"}': r"a\.jsonl:2: messages is 'hello'; allowed: a list of objects with role and content",
    '{"messages": ["hello"]}': r"a\.jsonl:2: messages is \['hello'\]; allowed: a list of objects",
    '{"messages": [{"role": "user", "content": "q"}]}': r"allowed: an assistant turn that follows another turn",
    '{"messages": [{"role": "assistant", "content": "q"}]}': r"allowed: an assistant turn that follows another turn",
    json.dumps(user(role="robot")): r"a\.jsonl:2: messages\[0\]\.role is 'robot'; allowed: system, user, assistant",
    json.dumps(user(role=None)): r"a\.jsonl:2: messages\[0\]\.role is None",
    json.dumps(turn(content=None)): r"a\.jsonl:2: messages\[1\]\.content is None; allowed: a string",
    json.dumps(turn(content=7)): r"a\.jsonl:2: messages\[1\]\.content is 7; allowed: a string",
    json.dumps(turn(content=[])): r"a\.jsonl:2: messages\[1\]\.content is \[\]; allowed: a string",
    json.dumps(user(content=[{"type": "image_url"}])): r"content\[0\]\.type is 'image_url'; allowed: text: models",
    json.dumps(turn(weight=0.5)): r"a\.jsonl:2: messages\[1\]\.weight is 0\.5; allowed: 0 or 1",
    json.dumps(user(content=[{"type": "audio"}])): r"messages\[0\]\.content\[0\]\.type is 'audio'; allowed: text",
    json.dumps(turn(content="\ud800")): r"messages\[1\]\.content is .*; allowed: valid Unicode",
    json.dumps(user(tool_calls=[CALL])): r"messages\[0\]\.tool_calls is 'in a turn of user'",
    json.dumps(turn(tool_calls=["f"])): r"messages\[1\]\.tool_calls\[0\] is 'f'; allowed: an object whose function",
    json.dumps(turn(tool_calls=[{"function": {"arguments": {}}}])): r"tool_calls\[0\] is .*; allowed: an object whose",
    json.dumps(turn(tool_calls=[{"function": {"name": "f", "arguments": "{x"}}])): (
        r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is '\{x'; allowed: a JSON object"
    ),
    json.dumps(turn(tool_calls=[{"function": {"name": "f", "arguments": [1]}}])): r"arguments is \[1\]; allowed",
    json.dumps(user(tool_call_id=3)): r"messages\[0\]\.tool_call_id is 3; allowed: a string",
    json.dumps(user(name=["n"])): r"messages\[0\]\.name is \['n'\]; allowed: a string",
    json.dumps({**turn(), "tools": "[{"}): r"a\.jsonl:2: tools is '\[\{'; allowed: a list of functions with a name",
    json.dumps({**turn(), "tools": {"name": "f"}}): r"a\.jsonl:2: tools is \{'name': 'f'\}; allowed: a list",
    json.dumps({**turn(), "tools": [{"function": {}}]}): r"a\.jsonl:2: tools\[0\] is .*; allowed: an object",
    '{"conversations": [{"from": "alien", "value": "x"}]}': r"a\.jsonl:2: conversations\[0\]\.from is 'alien'",
    '{"conversations": [{"from": "human", "value": 5}]}': r"a\.jsonl:2: conversations\[0\]\.value is 5",
    '{"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "f(1)"}]}': (
        r"a\.jsonl:2: conversations\[1\]\.value is 'f\(1\)'; allowed: an object with name and arguments"
    ),
    '{"instruction": 1, "output": "x"}': r"a\.jsonl:2: instruction is 1; allowed: a string",
    '{"instruction": "x", "input": ["y"], "output": "x"}': r"a\.jsonl:2: input is \['y'\]; allowed: a string",
    '{"instruction": "x", "output": "x", "history": [["a"]]}': r"a\.jsonl:2: history\[0\] is \['a'\]; allowed: a pair",
    '{"instruction": "x", "output": "x", "history": [["a", 1]]}': r"a\.jsonl:2: history\[0\]\[1\]\.content is 1",
    '{"prompt": {"a": 1}, "completion": "x"}': r"a\.jsonl:2: prompt is \{'a': 1\}; allowed: a list of objects",
    '{"system": 5, "prompt": "x", "completion": "x"}': r"a\.jsonl:2: system\.content is 5; allowed: a string",
    json.dumps(turn(content="long " * 99)): r"row is 64; allowed: \d+ positions.* for .*a\.jsonl:2",
}  # fmt: skip


@pytest.mark.parametrize("line", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_line_is_named_with_its_reason_or_skipped(tmp_path, line, capsys):
    good = json.dumps(RECORDS[0]).encode()
    path = tmp_path / "a.jsonl"
    path.write_bytes(good + b"\n" + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(ValueError, match=BROKEN[line]):
        of(data.chat(str(path)))
    assert len(of(data.chat(str(path), bad_lines="skip"))) == 1
    assert "skipped 1 of 2 lines; the first: " in capsys.readouterr().err
    too_long = line.startswith(b'{"role') if isinstance(line, bytes) else "long long" in line
    if not too_long:  # shards do not know the row
        with pytest.raises(ValueError, match=r"a\.jsonl:2"):
            pack(Files((str(path),), chats=True), tokenizer(), tmp_path / "packed")


@pytest.mark.parametrize(
    "text, message",
    [
        (
            '{"messages": []}',
            r"a\.json'; allowed: a JSON list of conversations; a file with one in each line",
        ),
        ("[1, ", r"a\.json'; allowed: a JSON list of conversations \("),
        ("[1]", r"a\.json\[0\]: a int; allowed"),
    ],
)
def test_a_broken_list_is_named(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        of(data.chat(f"{tmp_path}/a.json"))


def test_special_ids_of_a_call_are_those_that_are_sampled():
    [example] = examples(
        {"messages": [*said(("user", "q")), {"role": "assistant", "content": "ok", "tool_calls": [CALL]}]}
    )
    answer = example.ids[example.prompt :].tolist()
    assert (
        answer[-1] == SPECIAL.eos and answer[-2] == SPECIAL.end_tool_call and SPECIAL.end_turn not in answer
    )
