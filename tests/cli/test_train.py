"""mercury train: what it says about a field that cannot be read, and about every field in its help."""

import io
import logging
import re
import sys

import pytest

from mercury_jax import api
from mercury_jax.cli import main
from mercury_jax.train import loop
from mercury_jax.train.report import Reporter


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


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self):
        return True


def test_a_message_of_the_library_stands_above_the_progress_bar(recipe, monkeypatch, capsys):
    """Also where another library has given the root logger a handler, which holds the standard error of its start."""
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")

    def trains(config):
        config.folder.mkdir()
        reporter = Reporter(config.folder, config.name, config.steps, 0)
        logging.getLogger("mercury_jax").warning("compiling the decoder")
        reporter.close()
        return loop.TrainResult({}, {}, {}, config.folder, config.steps)

    monkeypatch.setattr(api, "train", trains)
    (root := logging.getLogger()).addHandler(handler := logging.StreamHandler(screen))
    handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    try:
        assert main(["train", recipe]) == 0
    finally:
        root.removeHandler(handler)
    # The line of the bar is erased, the message takes its place, and the bar is drawn below.
    assert re.search(r"\r\x1b\[2Kcompiling the decoder\n", screen.getvalue())
    assert "WARNING" not in screen.getvalue()
