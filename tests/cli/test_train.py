"""mercury train: what it says about a field that cannot be read, and about every field in its help."""

import re

from mercury_jax.cli import main


def test_a_field_that_cannot_be_read_is_refused_in_one_line(capsys):
    assert main(["train", "first", "--optim.lr", "abc"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--optim.lr" in said and "'abc'" in said


def test_the_help_explains_every_field(capsys):
    assert main(["train", "first", "--help"]) == 0
    text = " ".join(line.strip("│ ") for line in capsys.readouterr().out.splitlines())
    fields = re.split(r" (?=--[a-z])", text)[1:]
    assert len(fields) > 60
    assert [f for f in fields if re.match(r"--\S+ +(INT|FLOAT|STR|\S*\}\S*|\[.*\]) +\(default", f)] == []
