"""mercury train: what it says about a field that cannot be read, and about every field in its help."""

import dataclasses
import io
import json
import logging
import random
import re
import sys

import pytest

from mercury_jax import api
from mercury_jax.cli import main
from mercury_jax.training import loop
from mercury_jax.training.report import Reporter
from tests.cli.run import refused


@pytest.mark.long
@pytest.mark.parametrize(
    "option, value, says",
    [
        ("--optim.lr", "abc", "--optim.lr is 'abc'; allowed: a number"),
        ("--steps", "1.5", "--steps is '1.5'; allowed: a whole number"),
        ("--steps", "0", "steps is 0; allowed: a whole number, 1 or more"),
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
    assert "usage: mercury train RECIPE [-h] [OPTIONS]  One training run" in text  # no subcommands
    [blocks] = [f for f in fields if f.startswith("--blocks ")]
    assert blocks.startswith("--blocks STEP BLOCK [STEP BLOCK ...] ") and "(default: none)" in blocks
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


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with chats.jsonl and a fresh recipe, and a function that edits the recipe and returns its text."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 7))) for _ in range(60)]
    turn = lambda role, content: {"role": role, "content": content}
    chats = [{"messages": [turn("user", f"shout {w}"), turn("assistant", w.upper())]} for w in words]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    monkeypatch.chdir(tmp_path)
    assert main(["init", "shout.py"]) == 0
    written = (tmp_path / "shout.py").read_text()

    def edit(source="", vocab=""):
        text = written.replace('data=data.generated("add2", thinking=True)', f"data={source}")
        text = text.replace("vocab=299,", f"{vocab},")
        (tmp_path / "shout.py").write_text(text)

    return written, edit


@pytest.mark.long
def test_the_comment_of_a_new_recipe_on_data_of_ones_own_works_as_it_stands(own, tmp_path, capsys):
    written, edit = own
    [source] = re.findall(r"# .*(data\.chat\(.*?\))", written)
    [vocab] = re.findall(r"# .*(vocab=\d+)", written)
    edit(source, vocab)
    assert main(["train", "shout.py", "--steps", "2", "--sample-every", "0", "--eval-batches", "1"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "runs/shout/metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["train", "eval"]
    assert (tmp_path / "runs/shout/model/params.safetensors").exists()


def test_a_refused_run_leaves_nothing_and_names_what_the_recipe_says(own, tmp_path, capsys):
    _, edit = own
    capsys.readouterr()
    edit('data.chat("chats.jsonl")', "vocab=400")  # said before the tokenizer is trained
    said = refused(capsys, "train", "shout.py")
    assert "eval_every is 400; allowed: 0 (no evaluation), or data with something held out" in said
    edit('data.chat("chats.jsonl", held_out=0.05)', "vocab=299")
    assert "model.vocab is 299; allowed: at least 3" in refused(capsys, "train", "shout.py")
    edit('data.chat("chats.jsonl", held_out=0.05)', "vocab=400")
    assert "chats.jsonl:" in refused(capsys, "train", "shout.py", "--row", "16")  # said behind the tokenizer
    assert not (tmp_path / "runs/shout").exists()


@pytest.mark.long
def test_a_tokenizer_that_an_earlier_run_left_is_named(own, tmp_path, capsys):
    _, edit = own
    edit('data.chat("chats.jsonl", held_out=0.05)', "vocab=400")
    assert main(["train", "shout.py", "--steps", "1", "--sample-every", "0", "--eval-every", "0"]) == 0
    (tmp_path / "runs/shout/checkpoints").rename(tmp_path / "elsewhere")
    capsys.readouterr()
    edit('data.chat("chats.jsonl", held_out=0.05)', "vocab=380")
    said = refused(capsys, "train", "shout.py")
    assert "model.vocab is 380; allowed: 400 or more, the size of runs/shout/tokenizer.model" in said
    assert "delete this file" in said


def test_the_experts_of_a_recipe_have_options(tmp_path, capsys):
    from mercury_jax.config import Experts
    from mercury_jax.training import recipe

    config = recipe.load_recipe("first")
    model = dataclasses.replace(config.model_config, experts=Experts(count=4, active=2, width=32))
    changed = recipe.override(dataclasses.replace(config, model=model), ["--model.experts.count", "8"])
    assert changed.model_config.experts == dataclasses.replace(model.experts, count=8)
    blocks = ["--model.pattern", "block_causal", "--blocks", "0", "1", "4", "8"]
    assert recipe.override(config, blocks).blocks == ((0, 1), (4, 8))
