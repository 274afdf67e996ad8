"""What commands print: JSON for programs, no escape codes in a pipe, help with examples, rules of the user's own."""

import io
import json
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest

from mercury_jax.cli import arguments, infill, main, sample, show
from tests.cli.run import objects, refused

FIGURES = {"text", "tokens", "forwards", "tokens_per_forward", "seconds", "tokens_per_second"}


# Tests that decode share one shape where they can: two rows, one rule, one compilation.


def test_sample_prints_one_object_a_prompt_and_a_seed_repeats_it(at_hand, capsys):
    call = ["sample", "def f", "x = 1", "--model", at_hand, "--max-tokens", "12", "--json"]
    first, again = (objects(capsys, *call, "--temperature", "1") for _ in range(2))
    assert len(first) == 2 and set(first[0]) >= FIGURES
    assert [r["text"] for r in first] == [r["text"] for r in again]
    assert [r["text"] for r in first] != [r["text"] for r in objects(capsys, *call)]
    assert all(1 <= r["forwards"] and 0 <= r["tokens"] <= 12 for r in first)


def test_piped_sample_prints_the_texts_alone(at_hand, capsys):
    call = ["sample", "def f", "x = 1", "--model", at_hand, "--max-tokens", "12"]
    rows = objects(capsys, *call, "--json")
    assert main(call) == 0
    out, err = capsys.readouterr()
    assert out == "\n".join(row["text"] + "\n" for row in rows) and "\x1b[" not in out + err
    assert f"{sum(row['tokens'] for row in rows)} tokens" in err


@pytest.mark.long
def test_several_answers_to_a_prompt_end_before_their_stop_text(at_hand, capsys):
    call = [
        "sample", "def f", "x = 1", "--model", at_hand, "--max-tokens", "12", "--json", "--temperature", "1",
    ]  # fmt: skip
    whole = objects(capsys, *call, "--n", "2")
    assert [(r["prompt"], r["seed"], r["batch"]) for r in whole] == [
        (0, 0, 4), (0, 1, 4), (1, 2, 4), (1, 3, 4),
    ]  # fmt: skip
    stop = next(r["text"][3:5] for r in whole if len(r["text"]) > 4)
    cut = objects(capsys, *call, "--n", "2", "--stop", stop, "--stop", "never in it")
    assert [r["text"] for r in cut] == [r["text"].partition(stop)[0] for r in whole]
    assert all(r["finish"] == "stop" for r, w in zip(cut, whole, strict=True) if stop in w["text"])
    for words in (["--n", "0"], ["--stop", ""]):
        assert words[0] in refused(capsys, "sample", "x", *words)


def test_a_terminal_names_the_prompt_of_each_text(at_hand, monkeypatch, capsys):
    call = ["sample", "def f", "x = 1", "--model", at_hand, "--max-tokens", "12", "--no-live"]
    monkeypatch.setattr(show, "terminal", lambda stream=None: True)
    assert main(call) == 0
    out, err = capsys.readouterr()
    assert out.startswith("--- 'def f'\n") and "\n\n--- 'x = 1'\n" in out
    assert "the text was continued; --chat asks the model a question\n" in err
    assert main([*call, "--chat"]) == 0
    assert "--chat asks" not in capsys.readouterr().err


def test_equal_answers_without_a_temperature_are_explained(at_hand, capsys):
    call = ["sample", "def f", "x = 1", "--model", at_hand, "--max-tokens", "12", "--n", "2"]
    for more in ([], ["--json"]):
        assert main([*call, *more]) == 0
        assert capsys.readouterr().err.count("answers to a prompt are equal; --temperature 1 draws") == 1
    assert main([*call, "--temperature", "1"]) == 0
    assert "are equal" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, name",
    [(["sample", r"0000\n0301", "--chat"], "PROMPT"), (["sample", r"a\tb"], "PROMPT"),
     (["sample", "a", "--stop", r"\n\n"], "--stop"),
     (["sample", "a", "--guidance", "2", "--negative", r"b\nc"], "--negative"),
     (["infill", r"a\n[[2]]"], "TEMPLATE"), (["edit", r"a\nb"], "TEXT"),
     (["edit", "ab", "--chat", r"a\nb"], "--chat"), (["edit", "ab", "--span", r"\n"], "--span"),
     (["chat", "--system", r"a\nb"], "--system"),
     (["eval", "exact", "--template", r"{input}\n"], "--template")],
)  # fmt: skip
def test_a_typed_line_break_without_escapes_stops_the_command(words, name, capsys):
    assert "-e (--escapes) reads" in (told := refused(capsys, *words))
    assert told.startswith(f"mercury: {name} has \\")


def test_a_typed_line_break_is_read_with_escapes_and_kept_on_standard_input(at_hand, monkeypatch, capsys):
    call = ["--max-tokens", "8", "--model", at_hand, "--json"]
    [typed] = objects(capsys, "sample", r"a\nb", "-e", *call)
    texts = []
    for given in ("a\nb", r"a\nb"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        texts.append(objects(capsys, "sample", "-", *call)[0]["text"])
    assert typed["text"] == texts[0] != texts[1]


def test_prompts_come_from_standard_input_and_escapes_are_read(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert arguments.read_text("PROMPT", "-", escapes=False) == "two\nlines"
    assert arguments.read_text("PROMPT", r"a\n\tb\\n", escapes=True) == "a\n\tb\\n"


def test_parameters_reach_the_rule():
    def read(*words) -> Any:
        args, parameters = arguments.read_with_rule(sample.Sample, ["x", *words], "mercury sample")
        return args.decoding.sampler(parameters)

    assert read() is None
    strict = ["--rule", "threshold"]
    assert read(*strict, "--p", "0.5").params == read(*strict, "--param", "p=0.5").params == {"p": 0.5}
    assert read("--rule=threshold", "--p=0.5").params == {"p": 0.5} and read(*strict).params == {"p": 0.9}
    assert read("--rule", "entropy_bound", "--gamma", "0.3").name == "entropy_bound"


@pytest.mark.slow
def test_every_example_of_edit_changes_something(capsys):
    assert infill.Edit.__doc__
    text = re.sub(r"\\\n *", "", infill.Edit.__doc__)
    # Two spaces or more separate an example from what it does.
    examples = re.findall(r'^ +(mercury edit (?:"[^"]*"|[^" \n]| (?! ))+)', text, re.MULTILINE)
    calls = [shlex.split(line)[1:] for line in examples if "--file" not in line]
    assert len(calls) == 3
    for call in calls:
        [row] = objects(capsys, *call, "--json")
        assert row["changes"], call
    assert main(calls[0]) == 0
    assert "1 token changed in 2 forward passes" in capsys.readouterr().err


def test_infill_keeps_the_known_text(at_hand, capsys):
    call = ["infill", "def f([[3]]):\\n    return [[1]][[3]]x", "--escapes", "--model", at_hand]
    [row] = objects(capsys, *call, "--json")
    a, b, c = row["holes"]
    assert set(row) >= FIGURES and row["tokens"] == 7
    assert row["text"] == f"def f({a}):\n    return {b}{c}x"
    assert main(call) == 0
    assert "\x1b[" not in (shown := capsys.readouterr().out) and shown == row["text"] + "\n"


@pytest.mark.parametrize(
    "template, mark, pieces",
    [("a[[2]]b", "[[N]]", ["a", 2, "b"]), ("[[2]][[3]]", "[[N]]", [2, 3]),
     ("if {4}: [[1]]", "{N}", ["if ", 4, ": [[1]]"]), ("[[x]] [[5]]", "[[N]]", ["[[x]] ", 5])],
)  # fmt: skip
def test_a_template_is_split_at_its_marks(template, mark, pieces):
    assert infill.split(template, mark) == pieces


def test_eval_dumps_every_question(at_hand, tmp_path, capsys):
    questions = [{"input": f"{a}+11{a}=", "output": str(110 + 2 * a)} for a in range(2)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    dump = tmp_path / "answers.jsonl"
    call = ["eval", "add3", "--file", str(tmp_path / "q.jsonl"), "--dump", str(dump), "--model", at_hand]
    [row] = objects(capsys, *call, "--max-tokens", "8", "--batch", "2", "--json")
    rows = [json.loads(line) for line in dump.read_text().splitlines()]
    assert row["task"] == "add3" and row["n"] == 2
    assert [r["input"] for r in rows] == [q["input"] for q in questions]
    assert all(set(r) >= {"input", "prediction", "correct", "forwards"} for r in rows)


def test_checking_the_dump_changes_no_file(tmp_path, capsys):
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    old.write_text("kept\n")
    for path in (old, new):
        refused(capsys, "eval", "sudoku4", "--dump", str(path), "--model", "/no/such/model")
    assert old.read_text() == "kept\n" and not new.exists()


def test_info_describes_model_machine_and_choices(folder, lm, capsys):
    [row] = objects(capsys, "info", "--model", folder, "--json")
    assert row["parameters"] == lm.parameters and row["noise"]["kind"] == "absorbing"
    assert row["tokenizer"] == lm.tokenizer.fingerprint and row["card"] == {"note": "random"}
    assert row["rules"]["threshold"]["parameters"] == {"p": 0.9} and "sudoku4" in row["tasks"]
    assert main(["info", "--model", folder]) == 0
    assert "\x1b[" not in (text := capsys.readouterr().out)
    assert re.search(r"  threshold\(p=0.9\).*\n      absorbing or uniform noise; p: a number", text)
    assert all(rule["noise"] for rule in row["rules"].values())


def test_info_describes_one_rule(capsys):
    assert main(["info", "--rule", "threshold"]) == 0
    text = capsys.readouterr().out
    for said in (
        "rule         threshold\n",
        "about        Accepts every mask whose drawn", "noise        absorbing or uniform\n",
        "source       Fast-dLLM, arXiv", "--p          a number in [0, 1]; default 0.9\n", "Lower values accept more",
        '--rule threshold --p 0.9\n',
    ):  # fmt: skip
        assert said in text
    assert text.count("\n") < 12
    [row] = objects(capsys, "info", "--rule", "entropy_bound", "--json")
    assert (
        row["name"] == "entropy_bound"
        and row["noise"] == ["absorbing", "uniform"]
        and "gamma" in row["parameters"]
    )
    assert main(["info", "--rule", "daedal"]) == 0
    assert "--param block=32" in (text := capsys.readouterr().out) and "noise        absorbing\n" in text
    assert "threshold is the nearest" in refused(capsys, "info", "--rule", "treshold")
    assert "without a model" in refused(capsys, "info", "--rule", "threshold", "x")


HELP = """
import contextlib, io, json, sys
from mercury_jax.cli import app, main
texts = {}
calls = [[], *[[name] for name in app.COMMANDS], *[["bench", name] for name in app.BENCHES]]
for words in calls:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*words, "--help"]) == 0
    texts[" ".join(words)] = out.getvalue()
print(json.dumps([texts, [m for m in ("jax", "numpy", "rich", "grain", "matplotlib") if m in sys.modules]]))
"""


def test_help_has_examples_and_loads_no_jax():
    run = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    texts, loaded = json.loads(run.stdout)
    assert loaded == []
    assert [name for name, text in texts.items() if f"mercury {name}".strip() not in text] == []
    assert [name for name, text in texts.items() if "examples:" not in text] == []
    assert "default: 64" in texts["sample"] and "Seconds that running requests have" in texts["serve"]


# --- rules of the user's own

RULE = """
import mercury_jax as mj

@mj.rule
def least_certain(key, view, memory, *, share: float = 0.5):
    "Accepts every mask at once."
    return mj.rules.accept(view, view.masked), memory
"""


@pytest.fixture
def own_rule(tmp_path, monkeypatch):
    """my_rules.py in the current folder; the registry is restored afterwards."""
    from mercury_jax.decode import rules

    (tmp_path / "my_rules.py").write_text(RULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(rules.ALL, "least_certain", None)
    del rules.ALL["least_certain"]
    yield "my_rules:least_certain"
    sys.modules.pop("my_rules", None)


@pytest.mark.long
def test_a_rule_of_the_users_own_decodes_and_is_listed(own_rule, at_hand, capsys):
    call = ["sample", "def f", "x = 1", "--model", at_hand, "--max-tokens", "12", "--json"]
    rows = objects(capsys, *call, "--rule", own_rule, "--share", "0.3")
    assert all(row["forwards"] <= 3 for row in rows)  # two blocks, each accepted at once, and the prompt
    [about] = objects(capsys, "info", "--json")
    assert about["rules"]["least_certain"] == {
        "about": "Accepts every mask at once.", "parameters": {"share": 0.5}, "ranges": {},
        "noise": ["absorbing", "uniform"], "source": "",
    }  # fmt: skip
    assert "sharr" in refused(capsys, "sample", "x", "--rule", own_rule, "--sharr", "1")


def test_a_rule_is_also_found_by_the_path_of_its_file(own_rule, at_hand, tmp_path, capsys):
    from mercury_jax.decode import rules

    assert own_rule  # my_rules.py in the current folder
    elsewhere = tmp_path / "elsewhere" / "more_rules.py"
    elsewhere.parent.mkdir()
    elsewhere.write_text(RULE.replace("least_certain", "as_uncertain"))
    call = ["sample", "def f", "x = 1", "--model", at_hand, "--max-tokens", "12", "--json"]
    for name in ("my_rules.py:least_certain", f"{elsewhere}:as_uncertain"):
        rows = objects(capsys, *call, "--rule", name, "--share", "0.3")
        assert all(row["forwards"] <= 3 for row in rows)
    del rules.ALL["as_uncertain"]
    [about] = objects(capsys, "info", "--load", "my_rules.py", "--json")
    assert "least_certain" in about["rules"]
    assert "there is no file mine.py" in refused(capsys, "sample", "x", "--rule", "mine.py:both_ends")


def test_help_lists_the_parameters_of_the_chosen_rule(capsys):
    assert main(["sample", "--rule", "threshold", "--help"]) == 0
    assert "--p X" in (text := capsys.readouterr().out) and "a number in [0, 1]. Default: 0.9." in text


def test_serve_takes_a_rule_for_requests_that_name_none(own_rule, lm):
    from mercury_jax.cli import serve
    from mercury_jax.decode import defaults

    changed = serve.with_rule(lm, own_rule, {"share": 0.3})
    chosen: Any = defaults.default_sampler(changed)
    rule = chosen.rule
    assert (
        rule.name == "least_certain" and rule.params == {"share": 0.3} and serve.with_rule(lm, None, {}) is lm
    )


@pytest.mark.long
def test_sample_writes_no_bad_word(at_hand, capsys):
    call = ["sample", "def f", "--max-tokens", "8", "--model", at_hand, "--json"]
    [plain] = objects(capsys, *call)
    words = sorted(set(filter(str.isalnum, plain["text"])))[:8] or ["x"]
    [row] = objects(capsys, *call, *(part for word in words for part in ("--bad-words", word)))
    assert row["text"].strip() and not set(words) & set(row["text"])
    assert main([*call, "--bad-words", "a", "--stop", "b"]) == 2
    assert "--bad-words" in capsys.readouterr().err
