"""What commands print: JSON for programs, no escape codes in a pipe, help that teaches."""

import io
import json
import subprocess
import sys

import pytest

from mercury_jax.cli import app, infill, main, options, sample
from tests.cli.talk import objects, refused

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
    assert out == "".join(row["text"] + "\n" for row in rows) and "\x1b[" not in out + err
    assert f"{sum(row['tokens'] for row in rows)} tokens" in err


def test_a_backslash_that_may_be_meant_as_a_line_break_is_pointed_out(at_hand, capsys):
    assert main(["sample", r"a\nb", "--max-tokens", "8", "--model", at_hand]) == 0
    assert "--escapes reads" in capsys.readouterr().err
    assert main(["sample", r"a\nb", "--escapes", "--max-tokens", "8", "--model", at_hand]) == 0
    assert "--escapes reads" not in capsys.readouterr().err


def test_prompts_come_from_standard_input_and_escapes_are_read(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert options.read("-", escapes=False) == "two\nlines"
    assert options.read(r"a\n\tb\\n", escapes=True) == "a\n\tb\\n"
    assert options.read(r"a\n", escapes=False) == r"a\n"


def test_knobs_reach_the_rule(folder):
    read = lambda *words: options.sampler(sample.parser().read(["x", *words], late=options.knobs))
    assert read() is None
    strict = ["--rule", "threshold"]
    assert read(*strict, "--p", "0.5").params == read(*strict, "--knob", "p=0.5").params == {"p": 0.5}
    assert read("--rule", "entropy_bound", "--gamma", "0.3").name == "entropy_bound"


def test_infill_keeps_the_known_text(at_hand, capsys):
    call = ["infill", "def f([[3]]):\\n    return [[4]]x", "--escapes", "--model", at_hand]
    [row] = objects(capsys, *call, "--json")
    a, b = row["holes"]
    assert set(row) >= FIGURES and row["tokens"] == 7
    assert row["text"] == f"def f({a}):\n    return {b}x"
    assert main(call) == 0
    assert "\x1b[" not in (shown := capsys.readouterr().out) and shown == row["text"] + "\n"


@pytest.mark.parametrize(
    "template, mark, pieces",
    [
        ("a[[2]]b", "[[N]]", ["a", 2, "b"]),
        ("[[2]][[3]]", "[[N]]", [2, 3]),
        ("if {4}: [[1]]", "{N}", ["if ", 4, ": [[1]]"]),
        ("[[x]] [[5]]", "[[N]]", ["[[x]] ", 5]),
    ],
)
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


def test_a_probe_of_the_dump_leaves_the_disk_as_it_was(tmp_path, capsys):
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    old.write_text("kept\n")
    for path in (old, new):
        refused(capsys, "eval", "sudoku4", "--dump", str(path), "--model", "/no/such/model")
    assert old.read_text() == "kept\n" and not new.exists()


def test_info_describes_model_machine_and_choices(folder, lm, capsys):
    [row] = objects(capsys, "info", "--model", folder, "--json")
    assert row["parameters"] == lm.parameters and row["noise"]["kind"] == "absorbing"
    assert row["tokenizer"] == lm.tokenizer.fingerprint and row["card"] == {"note": "random"}
    assert row["rules"]["threshold"]["knobs"] == {"p": 0.9} and "sudoku4" in row["tasks"]
    assert main(["info", "--model", folder]) == 0
    assert "\x1b[" not in (text := capsys.readouterr().out) and "threshold(p=0.9)" in text


HELP = """
import contextlib, io, json, sys
from mercury_jax.cli import app, main
texts = {}
for words in [[], *[[name] for name in app.COMMANDS]]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*words, "--help"]) == 0
    texts[" ".join(words)] = out.getvalue()
print(json.dumps([texts, [m for m in ("jax", "numpy", "rich", "tyro") if m in sys.modules]]))
"""


def test_help_teaches_without_loading_jax():
    run = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    texts, loaded = json.loads(run.stdout)
    assert loaded == []
    assert all("mercury " + name in text for name, text in texts.items())
    assert [n for n in app.COMMANDS if n != "demo" and "examples:" not in texts[n]] == []
