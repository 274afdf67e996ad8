"""Laws of the published test sets: what is right passes, what is wrong does not, in each form an answer may have."""

import gzip
import json

import pytest

import mercury_jax as mj
from mercury_jax import evaluate
from mercury_jax.evaluate import test_sets
from mercury_jax.evaluate.runner import EvalSettings
from tests.cli.run import objects

SETS = {test_set.name: test_set for test_set in test_sets.TEST_SETS}
ADD = {
    "task_id": "Own/0",
    "prompt": 'import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef area(r):\n    """ Area of a circle. """\n',
    "entry_point": "area",
    "canonical_solution": "    return math.pi * (2 * half(r)) ** 2\n",
    "test": "def check(candidate):\n    assert abs(candidate(2) - 12.566) < 0.01\n",
}
MBPP = [
    {"task_id": i, "text": f"Write area{i}(r).", "code": f"def area{i}(r):\n    return math.pi * r * r\n",
     "test_setup_code": "import math", "test_list": [f"assert area{i}(0) == 0", f"assert 12 < area{i}(2) < 13"]}
    for i in (2, 11, 510, 511, 601)
]  # fmt: skip


def written(folder, name, records):
    path = folder / name
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize(
    "text, number",
    [
        ("5 eggs at $2 make $10.\n#### 10", 10),
        ("The answer is $1,234.50.", 1234.5),
        (r"so \boxed{-7} apples, of 9", -7),
        ("first the answer is 3, no, the answer is 4 of 5", 4),
        ("3 + 4 = 7.", 7),
        ("That leaves .5", 0.5),
        ("none", None),
    ],
)
def test_the_result_is_the_marked_number_or_the_last(text, number):
    found = test_sets.final_number(text)
    assert found == number or float(found) == number


def passes(name, record, answer, continues=False, split="test"):
    question = SETS[name].read("file:1", record, split)
    assert question is not None
    namespace = {"__name__": "__main__"}
    try:
        exec(question.check(answer, continues), namespace)
    except Exception:
        return False
    return True


def test_code_counts_in_every_form_that_an_answer_may_have():
    body, whole = ADD["canonical_solution"], ADD["prompt"] + ADD["canonical_solution"]
    alone = whole[whole.index("def area") :]
    assert passes("humaneval", ADD, body, continues=True)
    for answer in (
        whole,
        alone,  # the helper and the import of the prompt stand before it
        f"Here it is:\n```python\n{alone}```\nIt uses pi.",
        f"```python\nprint(1)\n```\nand\n```\n{alone}```",  # the block that defines it
        f"```python\n{alone}",  # cut by the maximum number of tokens
        f"```python\n{body}```",
    ):
        assert passes("humaneval", ADD, answer), answer
        assert not passes("humaneval", ADD, answer.replace("math.pi", "3")), answer
    assert not passes("humaneval", ADD, "    return 0\n", continues=True)
    assert passes("mbpp", MBPP[1], f"```python\n{MBPP[1]['code']}```")
    assert not passes("mbpp", MBPP[1], "def area11(r): return 0")


def test_pass_at_k_is_the_share_of_choices_with_a_right_answer():
    import itertools

    for n, correct in ((5, 0), (5, 1), (6, 3), (4, 4)):
        answers = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            choices = list(itertools.combinations(answers, k))
            assert test_sets.pass_at_k(n, correct, k) == pytest.approx(sum(map(any, choices)) / len(choices))
    with pytest.raises(ValueError, match="k is 6"):
        test_sets.pass_at_k(5, 1, 6)


def test_splits_examples_and_templates_make_the_prompts(tmp_path):
    path = written(tmp_path, "mbpp.jsonl", MBPP)
    ids = {
        split: [q.name for q in test_sets.read(SETS["mbpp"], EvalSettings(file=path, split=split))]
        for split in ("test", "validation")
    }
    assert ids == {"test": ["11", "510"], "validation": ["511"]}
    settings = EvalSettings(file=path, examples=path, shots=1, template="{text} {tests} {x y} {}")
    asked = test_sets.read(SETS["mbpp"], settings)
    [chat, _] = test_sets.build_prompts(SETS["mbpp"], settings, asked, "chat")
    assert [turn["role"] for turn in chat] == ["user", "assistant", "user"]
    assert (
        chat[0]["content"].startswith("Write area2(r). assert area2(0) == 0")
        and "def area2" in chat[1]["content"]
    )
    assert chat[2]["content"].startswith("Write area11(r).") and chat[2]["content"].endswith(" {x y} {}")
    [text, _] = test_sets.build_prompts(SETS["mbpp"], settings, asked, "text")
    assert text.index("def area2") < text.index("Write area11(r).")


@pytest.mark.long
def test_nano_answers_a_file_in_the_format_of_gsm8k(tmp_path, capsys):
    sums = [(389, 784), (120, 345), (7, 8)]
    records = [
        {"question": f"{a}+{b}=", "answer": f"<<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"} for a, b in sums
    ]
    records.append({"question": "389+784=", "answer": "#### 1"})
    path = written(tmp_path, "sums.jsonl.gz", records)
    dump = tmp_path / "dump.jsonl"
    args = ["--template", "{question}", "--max-tokens", "32", "--samples", "2", "--dump", str(dump), "--json"]
    [found] = objects(capsys, "eval", "gsm8k", "--file", str(path), *args)
    assert (found["n"], found["correct"], found["accuracy"]) == (4, 3, 0.75)
    assert (found["prompts"], found["shots"], found["pass@1"], found["pass@2"]) == ("chat", 0, 0.75, 0.75)
    rows = [json.loads(line) for line in dump.read_text().splitlines()]
    assert [row["correct"] for row in rows] == [True] * 6 + [False] * 2
    assert rows[0]["name"].endswith("sums.jsonl.gz:1") and rows[0]["prediction"] == "1173"


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


@pytest.mark.long
def test_programs_of_a_model_run_and_their_errors_are_reported(tmp_path):
    # nano does not write this function. The first prompt is whole without its answer, which the tests call.
    easy = {**ADD, "prompt": "def area(r):\n    return 12.566\n\n\nr'''", "test": "'''\n" + ADD["test"]}
    path = written(tmp_path, "own.jsonl", [easy, ADD])
    found = evaluate.run(
        mj.load(), "humaneval", file=path, run_code="unsandboxed", prompts="text", max_tokens=32
    )
    assert [row["correct"] for row in found.rows] == [True, False]
    assert found.rows[0]["error"] is None and found.rows[1]["error"]
    assert found.summary["prompts"] == "text"


@pytest.mark.parametrize(
    "task, settings, message",
    [
        ("gsm8k", {"file": None}, "file is None.*test.jsonl"),
        ("gsm8k", {"split": "validation"}, "split is 'validation'; allowed: test"),
        ("gsm8k", {"run_code": "sandbox"}, "run_code is 'sandbox'.*not programs"),
        ("gsm8k", {"shots": 2}, "shots is 2"),
        ("gsm8k", {"template": "{queston}"}, "template is '{queston}'.*question"),
        ("gsm8k", {"samples": 0}, "samples is 0"),
        ("gsm8k", {"timeout": 0.0}, "timeout is 0"),
        ("gsm8k", {"prompts": "base"}, "prompts is 'base'"),
        ("gsm8k", {"examples": "gsm8k.jsonl", "shots": 9}, "examples is.*9 questions.*it has 1"),
        ("exact", {"file": None}, "file is None; allowed: a JSON Lines file.*input.*output"),
        ("exact", {}, r"gsm8k.jsonl:1: input is None; allowed: a string"),
        ("exact", {"split": "validation"}, "split is 'validation'; allowed: test"),
        ("exact", {"run_code": "sandbox"}, "run_code is 'sandbox'.*not programs"),
        ("add3", {"file": "questions.jsonl"}, r"questions.jsonl:1: input: 'shout iab'.*the task exact"),
        ("humaneval", {"file": "gsm8k.jsonl", "run_code": "unsandboxed"}, "gsm8k.jsonl:1: task_id is None"),
        ("humaneval", {"file": "own.jsonl"}, "run_code is None.*programs that the model writes"),
        ("add3", {"file": None, "samples": 2}, "samples is 2: add3 has no use for it"),
        (
            "code-bpb",
            {"file": None, "run_code": "sandbox"},
            "run_code is sandbox: code-bpb has no use for it",
        ),
    ],
)
def test_bad_settings_are_refused_before_a_model_is_asked_for(tmp_path, monkeypatch, task, settings, message):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "gsm8k.jsonl", [{"question": "1+1?", "answer": "#### 2"}])
    written(tmp_path, "own.jsonl", [ADD])
    written(tmp_path, "questions.jsonl", [{"input": "shout iab", "output": "IAB"}])
    with pytest.raises(ValueError, match=message):
        evaluate.run(None, task, **{"file": "gsm8k.jsonl", **settings})  # type: ignore[arg-type]
