"""mercury train: what it says about a field that cannot be read."""

from mercury_jax.cli import main


def test_a_field_that_cannot_be_read_is_refused_in_one_line(capsys):
    assert main(["train", "first", "--optim.lr", "abc"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--optim.lr" in said and "'abc'" in said
