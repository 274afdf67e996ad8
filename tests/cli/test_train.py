"""mercury train: what it says about a field that cannot be read, and about every field in its help."""

import re

import pytest

from mercury_jax.cli import main


@pytest.mark.parametrize(
    "option, value, says",
    [
        ("--optim.lr", "abc", "--optim.lr is wrong: 'abc' is no number"),
        ("--steps", "1.5", "--steps is wrong: '1.5' is no whole number"),
        ("--steps", "0", "steps is 0; allowed: 1 or more"),
        ("--chats", "missing.jsonl", "chats is 'missing.jsonl'; allowed: a glob that finds"),
    ],
)
def test_a_wrong_field_is_refused_in_one_line_before_any_training(option, value, says, capsys, tmp_path):
    assert main(["train", "sft_nano", option, value, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and says in said
    assert not (tmp_path / "run").exists()


def test_the_help_explains_every_field(capsys):
    assert main(["train", "first", "--help"]) == 0
    text = " ".join(line.strip("│ ") for line in capsys.readouterr().out.splitlines())
    fields = re.split(r" (?=--[a-z])", text)[1:]
    assert len(fields) > 60
    assert [f for f in fields if re.match(r"--\S+ +(INT|FLOAT|STR|\S*\}\S*|\[.*\]) +\(default", f)] == []
