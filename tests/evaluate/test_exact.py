"""Laws of the task `exact`: questions of one's own from a file."""

import gzip
import itertools
import json

import pytest

import mercury_jax as mj
from mercury_jax import evaluate
from mercury_jax.evaluate import exact
from mercury_jax.evaluate.runner import EvalSettings
from tests.cli.run import objects


def written(folder, name, records):
    path = folder / name
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


QUESTIONS = [
    {"input": "389+784=", "output": " 1173\n"},
    {"input": "120+345=", "output": "465"},
    {"input": "120+345=", "output": "46"},  # a part of the answer does not count
]


@pytest.mark.long
def test_questions_of_ones_own_are_asked_as_they_are(tmp_path, capsys):
    path, dump = written(tmp_path, "questions.jsonl", QUESTIONS), tmp_path / "dump.jsonl"
    args = ["--samples", "2", "--rule", "confidence", "--dump", str(dump), "--json"]
    [found] = objects(capsys, "eval", "exact", "--file", str(path), *args)
    assert (found["task"], found["data"], found["prompts"]) == ("exact", "questions.jsonl", "chat")
    assert (found["n"], found["correct"], found["rule"], found["max_tokens"]) == (3, 2, "confidence", 64)
    rows = [json.loads(line) for line in dump.read_text().splitlines()]
    assert [row["correct"] for row in rows] == [True] * 4 + [False] * 2
    assert [row["input"] for row in rows[::2]] == [question["input"] for question in QUESTIONS]
    assert rows[2]["name"].endswith("questions.jsonl:2") and rows[2]["prediction"].strip() == "465"
    report = evaluate.run(mj.load(), "exact", file=path, limit=1)
    assert (report.summary["n"], report.summary["correct"]) == (1, 1)


@pytest.mark.long
def test_a_text_of_ones_own_is_continued_up_to_where_an_answer_ends(tmp_path):
    lm = mj.load()
    text = mj.sample(lm, "def f(x):\n    return", max_tokens=64).text
    line, longer = text.split("\n")[0], "a" * 400 + "\n\n"
    ask = lambda *outputs: evaluate.run(
        lm, "exact", prompts="text",
        file=written(tmp_path, "q.jsonl", [{"input": "def f(x):\n    return", "output": x} for x in outputs]),
    )  # fmt: skip
    found = ask(line)
    assert "\n" in text and found.rows[0]["prediction"] == line and found.summary["correct"] == 1
    # Without a text that ends an answer, and with as many tokens as the longest expected answer has.
    found = ask(text, longer)
    assert found.summary["max_tokens"] == len(lm.tokenizer.encode(longer)) > 64
    assert "\n" in found.rows[0]["prediction"]


def test_pass_at_k_is_the_share_of_choices_with_a_right_answer():
    for n, correct in ((5, 0), (5, 1), (6, 3), (4, 4)):
        answers = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            choices = list(itertools.combinations(answers, k))
            assert exact.pass_at_k(n, correct, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_examples_and_templates_make_the_prompts(tmp_path):
    path = written(tmp_path, "questions.jsonl.gz", QUESTIONS)
    settings = EvalSettings(file=path, examples=path, shots=1, template="Q: {input} {x y} {}", limit=2)
    asked = exact.read(settings)
    [_, chat] = exact.build_prompts(settings, asked, "chat")
    assert [turn["role"] for turn in chat] == ["user", "assistant", "user"]
    assert [turn["content"] for turn in chat] == ["Q: 389+784= {x y} {}", " 1173\n", "Q: 120+345= {x y} {}"]
    [_, text] = exact.build_prompts(settings, asked, "text")
    assert text == "Q: 389+784= {x y} {} 1173\n\n\nQ: 120+345= {x y} {}"


@pytest.mark.parametrize(
    "task, settings, message",
    [("exact", {"file": None}, "file is None; allowed: a JSON Lines file.*input.*output"),
     ("exact", {"file": "other.jsonl"}, r"other.jsonl:1: input is None; allowed: a string"),
     ("exact", {"split": "validation"}, "split is 'validation'; allowed: test"),
     ("exact", {"shots": 2}, "shots is 2"),
     ("exact", {"template": "{inptu}"}, "template is '{inptu}'.*input"),
     ("exact", {"samples": 0}, "samples is 0"), ("exact", {"prompts": "base"}, "prompts is 'base'"),
     ("exact", {"examples": "questions.jsonl", "shots": 9}, "examples is.*9 questions.*it has 1"),
     ("add3", {}, r"questions.jsonl:1: input: 'shout iab'.*the task exact"),
     ("add3", {"file": None, "samples": 2}, "samples is 2: add3 has no use for it"),
     ("code-bpb", {"file": None, "template": "x"}, "template is x: code-bpb has no use for it"),
     ("gsm8k", {}, "task is 'gsm8k'.*python -m mercury_jax.evaluate.harness")],
)  # fmt: skip
def test_bad_settings_are_refused_before_a_model_is_asked_for(tmp_path, monkeypatch, task, settings, message):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "other.jsonl", [{"question": "1+1?", "answer": "#### 2"}])
    written(tmp_path, "questions.jsonl", [{"input": "shout iab", "output": "IAB"}])
    with pytest.raises(ValueError, match=message):
        evaluate.run(None, task, **{"file": "questions.jsonl", **settings})  # type: ignore[arg-type]
