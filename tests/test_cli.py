"""The command line: exit codes and words for bad input, JSON for programs, no escape codes in a pipe."""

import io
import json
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from mercury_jax import api, checkpoint, hub, models, noise
from mercury_jax.cli import app, infill, live, main, options, sample
from mercury_jax.config import ModelConfig, NoiseConfig
from mercury_jax.decode.stream import Moment
from mercury_jax.tokenizer import Tokenizer
from mercury_jax.train import loop
from mercury_jax.types import LM

TEXTS = [f"def f{i}(x, y={i % 13}):\n    return x + {i} * y\n\n" for i in range(300)]
RECIPE = """
from mercury_jax.config import ModelConfig
from mercury_jax.train import data
from mercury_jax.train.objectives import masked_elbo
from mercury_jax.train.recipe import TrainConfig

def config():
    return TrainConfig(
        name="tiny", model=ModelConfig(vocab=400, width=16), objective=masked_elbo(),
        data=data.mixture((data.stdlib(), 1.0)), out="OUT",
    )
"""


@pytest.fixture(scope="session")
def lm() -> LM:
    tok = Tokenizer.train(TEXTS, 320)
    config = ModelConfig(
        vocab=320, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, block=8, context=128
    )
    model = models.build(config)
    corruption = noise.build(NoiseConfig(), config.vocab, config.mask, noise.specials(tok))
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(
        model.init, jax.random.key(0)
    )  # drawing them by JAX would take seconds to compile
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), shapes)
    return LM(model, params, tok, corruption, "tiny", {"note": "random"})


@pytest.fixture(scope="session")
def folder(lm, tmp_path_factory) -> str:
    return str(hub.save(tmp_path_factory.mktemp("cli") / "model", lm, NoiseConfig()))


@pytest.fixture
def at_hand(lm, folder, monkeypatch) -> str:
    """The same folder; the model is not read again, so that what was compiled for it serves all calls."""
    monkeypatch.setattr(api, "load", lambda source: lm)
    return folder


@pytest.fixture
def recipe(tmp_path) -> str:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE.replace("OUT", str(tmp_path / "run")))
    return str(path)


def refused(capsys, *argv: str) -> str:
    """What stands on standard error, after exit code 2 and no traceback."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err


def objects(capsys, *argv: str) -> list[dict]:
    """The lines of standard output, each of which must be a JSON object."""
    assert main(argv) == 0
    out = capsys.readouterr().out
    rows = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert rows and all(isinstance(row, dict) for row in rows)
    return rows


# --- bad input is told in words, before anything is computed


@pytest.mark.parametrize(
    "argv, words",
    [
        (["smaple"], ["command", "'smaple'", "sample is the nearest"]),
        (["sample"], ["PROMPT", "required"]),
        (["sample", ""], ["PROMPT", "''"]),
        (["sample", "x", "--max-tokens", "many"], ["--max-tokens", "'many'", "whole number"]),
        (["sample", "x", "--max-tokens", "-3"], ["max_tokens", "-3", "1.."]),
        (["sample", "x", "--max-tokens", "9999"], ["max_tokens", "9999", "context"]),
        (["sample", "x", "--seed", "-1"], ["seed", "-1"]),
        (["sample", "x", "--steps", "0"], ["steps", "0"]),
        (["sample", "x", "--block", "0"], ["block", "0"]),
        (["sample", "x", "--temperature", "-1"], ["temperature", "-1", "0 or more"]),
        (["sample", "x", "--rule", "treshold"], ["--rule", "'treshold'", "threshold is the nearest"]),
        (["sample", "x", "--rule", "confidence", "--p", "1"], ["knob", "'p'", "no knobs"]),
        (["sample", "x", "--rule", "entropy_bound", "--knob", "gama=1"], ["'gama'", "gamma is the nearest"]),
        (["sample", "x", "--knob", "p"], ["--knob", "'p'", "NAME=VALUE"]),
        (["sample", "x", "--p", "high"], ["knob p", "'high'", "a number"]),
        (["sample", "x", "--p", "nan"], ["p=", "nan", "a number"]),
        (["sample", "x", "--max-token", "3"], ["'--max-token'", "--max-tokens is the nearest"]),
        (["infill", "no hole"], ["TEMPLATE", "'no hole'", "[[24]]"]),
        (["infill", "a [[0]] b"], ["hole", "0", "1..128"]),
        (["infill", "a [[999999999999]] b"], ["hole", "1..128"]),
        (["infill", "a [[100]] [[100]]"], ["tokens", "128"]),
        (["infill", "a", "--mark", "N"], ["--mark", "'N'"]),
        (["infill"], ["TEMPLATE"]),
        (["infill", "--file", "/no/such/file"], ["--file", "/no/such/file"]),
        (["eval"], ["TASK", "sudoku4"]),
        (["eval", "sudoku5"], ["task", "'sudoku5'", "nearest"]),
        (["eval", "sudoku4", "--file", "/no/such/file"], ["file", "/no/such/file"]),
        (["eval", "sudoku4", "--dump", "/no/such/folder/x.jsonl"], ["--dump", "/no/such/folder/x.jsonl"]),
        (["eval", "sudoku4", "add3", "--file", "x.jsonl"], ["--file", "one task"]),
        (["eval", "sudoku4", "--limit", "0"], ["limit", "0"]),
        (["info", "extra"], ["'extra'"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) and len(value) < 6 else None,
)
def test_bad_input_names_the_field_and_exits_with_2(argv, words, folder, capsys):
    model = ["--model", folder] if argv[0] in ("sample", "infill", "eval", "info") else []
    told = refused(capsys, *argv, *model)
    assert [w for w in words if w not in told] == []


@pytest.mark.parametrize(
    "command", [["sample", "x"], ["infill", "[[4]]"], ["eval", "sudoku4"], ["info"], ["demo"]]
)
def test_a_missing_model_is_named(command, capsys):
    assert "/no/such/model" in refused(capsys, *command, "--model", "/no/such/model")


def test_a_damaged_model_is_refused(folder, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "params.safetensors").write_bytes((broken / "params.safetensors").read_bytes()[:-100])
    assert "params.safetensors" in refused(capsys, "sample", "x", "--model", str(broken))


@pytest.mark.parametrize(
    "text, words",
    [
        ("def config(:\n", ["SyntaxError", "line 1"]),
        ("x = 1\nimport no_such_module\n", ["line 2", "no_such_module"]),
        ("x = 1\n", ["no config"]),
        ("def config():\n    return 3\n", ["TrainConfig", "int"]),
        (RECIPE.replace("width=", "widht="), ["widht", "width"]),
        (RECIPE.replace("width=16", "width=0"), ["width", "0"]),
    ],
)
def test_a_broken_recipe_is_refused(text, words, tmp_path, capsys):
    path = tmp_path / "broken.py"
    path.write_text(text)
    told = refused(capsys, "train", str(path))
    assert [w for w in [str(path), *words] if w not in told] == []


def test_train_refuses_what_no_recipe_has(recipe, capsys):
    assert "--steps is the nearest" in refused(capsys, "train", recipe, "--stepps", "5")
    assert "--optim.lr" in refused(capsys, "train", recipe, "--optim.lrr", "5")
    assert "/no/recipe.py" in refused(capsys, "train", "/no/recipe.py")
    assert "RECIPE" in refused(capsys, "train", "--steps", "5", recipe)
    assert "RECIPE" in refused(capsys, "train")
    assert main(["train", recipe, "--steps", "many"]) == 2  # tyro's words
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, code",
    [
        (loop.Diverged("loss is nan at step 7"), 3),
        (checkpoint.SaveFailed("step 7: no space left"), 4),
        (OSError(28, "No space left on device", "metrics.jsonl"), 4),
        (PermissionError(13, "Permission denied", "runs"), 2),
        (KeyboardInterrupt(), 130),
        (RuntimeError("the unforeseen"), 1),
    ],
)
def test_an_error_of_training_has_its_exit_code_and_no_traceback(error, code, recipe, capsys, monkeypatch):
    def fails(config):
        raise error

    monkeypatch.setattr(api, "train", fails)
    assert main(["train", recipe]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("mercury: ") and "Traceback" not in err
    if code != 130:
        assert main(["train", recipe, "--debug"]) == code
        assert "Traceback" in capsys.readouterr().err


def test_train_passes_fields_on_and_reports(recipe, tmp_path, capsys, monkeypatch):
    seen = []

    def trains(config):
        seen.append(config)
        return loop.Result({}, {}, {"loss": float("nan")}, config.folder, config.steps)

    monkeypatch.setattr(api, "train", trains)
    [row] = objects(capsys, "train", recipe, "--json", "--steps", "7", "--resume", "--optim.lr", "0.5")
    assert (seen[0].steps, seen[0].resume, seen[0].optim.lr) == (7, True, 0.5)
    assert (
        row["step"] == 7
        and row["metrics"] == {"loss": None}
        and row["model"] == str(tmp_path / "run" / "model")
    )


# --- what is printed

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


def test_prompts_come_from_standard_input_and_escapes_are_read(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert options.read("-", escapes=False) == "two\nlines"
    assert options.read(r"a\n\tb\\n", escapes=True) == "a\n\tb\\n"
    assert options.read(r"a\n", escapes=False) == r"a\n"


def test_knobs_reach_the_rule(folder):
    read = lambda *words: options.sampler(sample.parser().read(["x", *words], late=options.knobs))
    assert read() is None
    assert read("--p", "0.5").knobs == read("--knob", "p=0.5").knobs == {"p": 0.5}
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


# --- the live view


def moment(ids, settled: bool, confidence: float, done: bool) -> Moment:
    """Every second token is settled, or all are."""
    flags = np.arange(len(ids)) % 2 * (not settled) == 0
    return Moment("", np.array(ids), flags, np.full(len(ids), confidence), 0, 1, 1, done)


def test_settled_tentative_and_noise_look_different(lm):
    a, b, c = lm.tokenizer.encode("1 2")[:3]
    text = live.paint(
        lm.tokenizer, [a, b, c, lm.tokenizer.mask], [True, False, False, False], [0.9, 0.9, 0.1, 0.9]
    )
    styles = [str(span.style) for span in text.spans]
    assert text.plain.startswith("1") and text.plain.endswith(live.NOISE * 2)
    assert (
        styles[0] == live.SETTLED
        and styles[1] == live.style(False, 0.9)
        and styles[2:] == [live.NOISE_STYLE] * 2
    )
    assert live.style(False, 0.3) != live.style(False, 0.9)


def test_the_view_joins_bytes_and_lets_no_control_code_through(lm):
    ids = lm.tokenizer.encode("é\x1b[2J\n")
    text = live.paint(lm.tokenizer, ids, [True] * len(ids), [1.0] * len(ids)).plain
    assert text == "é\N{REPLACEMENT CHARACTER}[2J\n"


def test_a_played_answer_ends_as_text_on_the_screen(lm):
    ids = lm.tokenizer.encode("\n".join(map(str, range(40))))
    moments = [moment(ids, False, 0.5, False), moment(ids, True, 1.0, True)]
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60, height=10)
    last = live.follow(console, lm.tokenizer, "> ", 8, moments, pace=0.0)
    assert last.done and live.NOISE * 8 in screen.getvalue()
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", screen.getvalue().rpartition("\x1b[2K")[2])
    assert "\n".join(map(str, range(40))) in shown


# --- the demo says what is true


def test_the_demo_admits_wrong_answers_and_exits_with_1(at_hand, monkeypatch, capsys):
    from mercury_jax.cli import demo, scenes

    asked = []

    def draw(attempt):
        asked.append(attempt)
        question = [{"role": "user", "content": "1+1="}]
        return scenes.Scene("a sum", "1+1=", question, 8, lambda text: False, wrong="2")

    monkeypatch.setattr(demo, "scenes", lambda seed: [scenes.Act(draw)])
    assert main(["demo", "--model", at_hand]) == 1
    out = capsys.readouterr().out
    assert out.count("Wrong: it should be 2.") == scenes.TRIES and "Right" not in out and "\x1b[" not in out
    assert max(asked) == scenes.TRIES - 1 and "tokens/s" in out and "compiled in" in out


def test_the_demos_puzzles_have_checkable_answers():
    from mercury_jax.cli import scenes
    from mercury_jax.train import generators

    for seed in range(3):
        sudoku, total, python = (act.first for act in scenes.scenes(seed))
        assert generators.sudoku4.split(sudoku.prompt[0]["content"]) == "test"
        assert sudoku.check(sudoku.wrong.replace(" / ", "\n")) and not sudoku.check("1234")
        assert total.check(total.wrong) and not total.check("0")
        assert python.check("") is None
        assert "parse as Python" in python.remark("    pass\n")


# --- help

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
