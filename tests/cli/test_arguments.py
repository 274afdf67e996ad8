"""Bad input is refused in one line that names it, before anything is computed."""

import shlex
import shutil
import socket
from pathlib import Path

import pytest

from mercury_jax import api, checkpoint
from mercury_jax.cli import main
from mercury_jax.training import loop
from mercury_jax.training.recipe import load_recipe as recipe_of
from tests.cli.recipe import RECIPE
from tests.cli.run import objects, refused
from tests.marks import slow_except


@pytest.mark.parametrize(
    "argv, words",
    [(["smaple"], ["command", "'smaple'", "sample is the nearest"]),
     (["generate"], ["command", "'generate'", "allowed: mercury sample"]),
     (["xyz"], ["'xyz'", "demo, sample"]),
     (["sample", ""], ["PROMPT", "''"]),
     (["sample", "x", "--max-tokens", "many"], ["--max-tokens", "'many'", "whole number"]),
     (["sample", "x", "--max-tokens", "-3"], ["--max-tokens", "-3", "1.."]),
     (["sample", "x", "--max-tokens", "9999"], ["--max-tokens is 9999", "context"]),
     (["sample", "x", "--steps", "0"], ["steps", "0"]),
     (["sample", "x", "--rule", "treshold"], ["--rule", "'treshold'", "threshold is the nearest"]),
     (["sample", "x", "--rule", "confidence", "--p", "1"], ["rule confidence", "'--p'", "none"]),
     (["sample", "x", "--rule", "entropy_bound", "--gama", "1"], ["'--gama'", "--gamma is the nearest"]),
     (["sample", "x", "--rule", "entropy_bound", "--param", "gama=1"], ["'gama'", "gamma is the nearest"]),
     (["sample", "x", "--param", "p"], ["--param", "'p'", "NAME=X"]),
     (["sample", "x", "--param", "f=1"], ["--rule is missing", "--param f", "factor"]),
     (["sample", "x", "--bias", "1"], ["--bias", "'1'", "ID=X"]),
     (["sample", "x", "--rule", "no.such:rule"], ["--rule", "no.such:rule", "ModuleNotFoundError"]),
     (["sample", "x", "--rule", "json:dumps"], ["--rule", "json:dumps", "@mj.rule"]),
     (["sample", "x", "--f", "0.5"], ["--rule is missing", "with --f one of factor"]),
     (["sample", "x", "--rule", "threshold", "--p", "high"], ["--p is 'high'", "a number"]),
     (["sample", "x", "--rule", "threshold", "--p", "nan"], ["--p is nan", "a number"]),
     (["sample", "x", "--max-token", "3"], ["'--max-token'", "--max-tokens is the nearest"]),
     (["infill", "no hole"], ["TEMPLATE has no hole", "[[24]]"]),
     (["infill", "a [[0]] b"], ["hole", "0", "1 token or more"]),
     (["infill", "a [[999]] b"], ["hole", "999", "1..128"]),
     (["infill", "a [[999999999999]] b"], ["hole", "1..128"]),
     (["infill", "a [[100]] [[100]]"], ["tokens", "128"]),
     (["infill", "a", "--mark", "N"], ["--mark", "'N'"]),
     (["infill", "--file", "/no/such/file"], ["--file", "/no/such/file"]),
     (["eval"], ["TASK", "sudoku4"]),
     (["eval", "sudoku5"], ["task", "'sudoku5'", "nearest"]),
     (["eval", "sudoku"], ["task", "'sudoku'", "sudoku4 is the nearest; all: sudoku4, sudoku9, "]),
     (["bench", "decode", "--tasks", "count"], ["task", "'count'", "countdown3 is the nearest"]),
     (["train", "sft"], ["recipe sft does not exist", "sft_diffusion_gemma is the nearest"]),
     (["init", "twin"], ["RECIPE", "twin_nano is the nearest"]),
     (["sample", "x", "--rule", "entropy"], ["--rule", "entropy_threshold, entropy_bound are the nearest of"]),
     (["train", "nano", "--foo", "1"], ["option is '--foo'", "are the nearest of"]),
     (["eval", "sudoku4", "--file", "/no/such/file"], ["file", "/no/such/file"]),
     (["eval", "sudoku4", "--dump", "/no/such/folder/x.jsonl"], ["--dump", "/no/such/folder/x.jsonl"]),
     (["eval", "sudoku4", "add3", "--file", "x.jsonl"], ["--file", "one task"]),
     (["info", "extra"], ["'extra'"]),
     (["info", "--load", "no_such_module"], ["--load", "no_such_module"]),
     (["eval", "sudoku4", "--split", "train"], ["--split", "'train'", "validation"])],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) and len(value) < 6 else None,
)  # fmt: skip
def test_bad_input_names_the_argument_and_exits_with_2(argv, words, folder, capsys):
    model = ["--model", folder] if argv[0] in ("sample", "infill", "eval", "info") else []
    told = refused(capsys, *argv, *model)
    assert [w for w in words if w not in told] == [] and told.count("\n") == 1


@pytest.mark.parametrize(
    "line, said",
    [("eval sudoku4 --limit 0", "limit is 0"), ("eval sudoku4 --batch 0", "batch is 0"),
     ("eval sudoku4 --seed -3", "seed is -3"), ("eval sudoku4 --max-tokens 0", "--max-tokens is 0"),
     ("eval sudoku4 --file no.jsonl", "no.jsonl"), ("infill 'a [[0]]'", "hole is 0"),
     ("sample a --block 0", "block is 0"), ("chat --temperature -1", "temperature is -1.0"),
     ("chat --max-tokens 0", "--max-tokens is 0"), ("chat --effort huge", "effort is 'huge'"),
     ("chat --rule treshold", "threshold is the nearest"),
     ("serve --slots 0", "slots is 0"), ("serve --port 99999", "port is 99999"),
     ("sample x --top-p 3", "--top-p is 3.0"), ("sample x --top-k -3", "--top-k is -3.0"),
     ("sample x --repetition 0", "--repetition is 0.0"), ("sample x --max-tokens 0", "--max-tokens is 0"),
     ("sample x --effort huge", "effort is 'huge'"), ("sample x --guidance nan", "--guidance is nan"),
     ("sample x --negative x", "--negative is 'x'"),
     # Options alone are given to each of three commands.
     ("--rule threshold --p 3", "--p is 3.0; allowed: a number in [0, 1] (of the rule threshold)"),
     ("--rule klass --param patience=1.5", "klass(patience=) is 1.5; allowed: a whole number"),
     ("--rule klass --patience 1.5", "--patience is 1.5; allowed: a whole number"),
     ("--temperature -1", "temperature is -1.0"), ("--seed -1", "seed is -1")],
)  # fmt: skip
def test_a_value_is_refused_before_the_model_is_looked_for(line, said, capsys):
    for command in ("sample x", "edit x", "infill [[4]]") if line.startswith("--") else ("",):
        told = refused(capsys, *shlex.split(f"{command} {line}"), "--model", "/no/such/model")
        assert said in told


@pytest.mark.parametrize(
    "command", [["sample", "x"], ["infill", "[[4]]"], ["eval", "sudoku4"], ["info"], ["demo"]]
)
def test_a_missing_model_is_named(command, capsys):
    assert "/no/such/model" in refused(capsys, *command, "--model", "/no/such/model")


def test_a_port_in_use_is_named_with_what_finds_a_free_one(capsys):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        told = refused(capsys, "serve", "--port", str(port))
    assert told == f"mercury: --port is {port}: it is in use on 127.0.0.1. --port 0 finds a free one\n"


def test_a_hub_that_cannot_be_reached_is_told_without_the_client_s_words(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    told = refused(capsys, "sample", "x", "--model", "runs/nothing")
    assert told.startswith(
        "mercury: --model is 'runs/nothing': there is no such folder, and from the Hugging Face hub"
    )
    assert "Errno" not in told and "Error" not in told


@pytest.mark.parametrize(
    "command, words, said",
    [("sample x", "--model nosuch/a/b", "--model is 'nosuch/a/b': a folder of this name does not exist"),
     ("info", "nosuch/a/b", "MODEL is 'nosuch/a/b': a folder of this name does not exist"),
     ("sample x", "--quantise int4", "--quantise is 'int4'; allowed: int8, fp8, int8_dynamic, fp8_dynamic\n"),
     ("sample x", "--kv=5bit", "--kv is '5bit'; allowed: int8, fp8, 4bit, 3bit\n"),
     ("sample x", "--dtype f", "--dtype is 'f'; allowed: float32"),
     ("sample x", "--effort hgh", "--effort is 'hgh'; allowed: instant, low, medium, high\n"),
     ("sample x", "--logprobs 300 --json", "--logprobs is 300; allowed: 0..100 alternatives\n"),
     ("sample x", "--seed -1", "--seed is -1; allowed: a whole number"),
     ("edit", "", "TEXT is missing: a text"), ("eval exact", "", "--file is missing: a JSON Lines file"),
     ("chat", "--temperature -1", "--temperature is -1.0; allowed: a number, 0 or more"),
     ("train first", "--steps 0", "--steps is 0; allowed: a whole number, 1 or more"),
     ("train first", "--steps 1e3", "--steps is '1e3'; allowed: a whole number"),
     ("train first", "--optim.lr -1", "--optim.lr is -1.0; allowed: a number, 0 or more"),
     ("train first", "--mesh.data 0", "--mesh.data is 0; allowed: 1 or more"),
     ("train first", "--eval_every -1", "--eval-every is -1; allowed: a whole number, 0 or more"),
     ("train first", "--noise.schedule foo", "--noise.schedule is 'foo'; allowed: linear, cosine, polynomial"),
     ("train first", "extra", "extra: no option takes this value"),
     ("train first", "--init runs/none", "--init is 'runs/none': there is no such folder"),
     ("train", "", "RECIPE is missing: A Python file"),
     ("train sft_nano", "", "--chats is missing: files with conversations"),
     ("train sft_llada", "--chats x", "--init is missing: a checkpoint"),
     ("data pack x", "--out y --tokenizer runs/none", "--tokenizer is 'runs/none': there is no such folder"),
     ("data pack x", "", "--tokenizer and --out are missing"),
     ("convert nano", "", "OUT is missing: A new folder"), ("convert", "", "MODEL and OUT are missing"),
     ("report", "", "RUN is missing: the folder of a run"),
     ("report runs/none", "", "there is no run in runs/none: `mercury train`"),
     ("bench decode", "no/such/model --rules nosuch", "--rules is 'nosuch'"),
     ("bench decode", "no/such/model --limit 0", "--limit is 0"),
     ("bench", "", "WHAT is missing: one of decode, compile"),
     ("data", "", "WHAT is missing: one of pack, info"), ("bench gpu", "", "WHAT is missing"),
     ("sample", "", "PROMPT is missing: a text"), ("sample x", "--rule", "--rule needs a value"),
     ("sample x", "--chat yes", "argument 'yes' is one too many"),
     ("sample x", "--adapter runs/none", "--adapter is 'runs/none': this folder does not exist"),
     ("sample x", "--bias 9999=1", "--bias is 9999; allowed: ids in 0..1023"),
     ("eval add3", "--prompts foo", "--prompts is 'foo'; allowed: "),
     ("eval add3", "--shots 3", "--shots is 3: add3 has no use for it"),
     ("infill", "[[abc]]", "TEMPLATE has no hole; [[abc]] is none: write [[24]] for 24 tokens, [[?]]"),
     ("infill", "[[-3]]", "TEMPLATE has no hole; [[-3]] is none"),
     ("edit abc", "--span z", "--span is 'z': the text holds it 0 times"),
     ("serve", "--default-effort foo", "--default-effort is 'foo'; allowed: instant"),
     ("serve", "--mesh tensor=8", "--mesh tensor=8 needs 8 devices; this machine has 4 devices"),
     ("serve", "--mesh tensor=0", "--mesh is 'tensor=0'; allowed: sizes of 1 or more")],
)  # fmt: skip
def test_an_error_names_the_option_and_what_can_be_typed(command, words, said, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    told = refused(capsys, *command.split(), *words.split())
    assert told.startswith(f"mercury: {said}")


def test_the_help_marks_what_may_be_left_out(capsys):
    for words, shown in (
        (["init"], "RECIPE [FILE.py]"),
        (["info"], "[MODEL]"),
        (["eval"], "--prompts chat|text"),
    ):
        assert main([*words, "--help"]) == 0
        assert shown in capsys.readouterr().out


def test_a_damaged_model_is_refused(folder, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "params.safetensors").write_bytes((broken / "params.safetensors").read_bytes()[:-100])
    assert "params.safetensors" in refused(capsys, "sample", "x", "--model", str(broken))


@pytest.mark.parametrize(
    "text, words",
    [("def config(:\n", ["SyntaxError", "line 1"]),
     ("x = 1\nimport no_such_module\n", ["line 2", "no_such_module"]), ("x = 1\n", ["no config"]),
     ("def config():\n    return 3\n", ["TrainConfig", "int"]),
     (RECIPE.replace("width=", "widht="), ["widht", "width"]),
     (RECIPE.replace("width=16", "width=0"), ["width", "0"])],
)  # fmt: skip
def test_a_broken_recipe_is_refused(text, words, tmp_path, capsys):
    path = tmp_path / "broken.py"
    path.write_text(text)
    told = refused(capsys, "train", str(path))
    assert [w for w in [str(path), *words] if w not in told] == []


SOURCE = "data.mixture((data.stdlib(), 1.0))"
MISTAKES = {
    "a function of another name": (
        ("data.stdlib()", "data.stdlb()"),
        ["line 10", "stdlb", "stdlib is the nearest"],
    ),
    "an import of another name": (
        ("import masked_elbo", "import masked_elbow"),
        ["line 4", "masked_elbo is the nearest"],
    ),
    "a misspelt argument": (
        (SOURCE, 'data.generated("add2", thinkng=True)'),
        ["thinkng", "thinking is the nearest"],
    ),
    "an objective that is not called": (
        ("masked_elbo(),", "masked_elbo,"),
        ["objective", "Call it: masked_elbo()"],
    ),
    "a list of sources": ((SOURCE, "[data.stdlib()]"), ["data is [Text(", "data.mixture("]),
    "the name of a folder": ((SOURCE, '"notes"'), ["data is 'notes'", "data.text("]),
    "a number as text": (("width=16", 'width="16"'), ["model.width", "'16'", "a whole number"]),
    "a fraction": (('out="OUT"', "steps=1e3"), ["steps", "1000.0", "a whole number"]),
    "one prompt alone": (('out="OUT"', 'sample_prompts="1+1="'), ["sample_prompts", "'1+1='", "a tuple"]),
    "a class": (("ModelConfig(vocab=400, width=16)", "ModelConfig"), ["model is <class", "a ModelConfig"]),
    "no return": (("return TrainConfig", "TrainConfig"), ["returns a TrainConfig, not NoneType"]),
    "files that are not there": ((SOURCE, 'data.text("/no/such/*.txt")'), ["/no/such/*.txt"]),
    "an unknown generator": ((SOURCE, 'data.generated("sudoku")'), ["'sudoku'", "sudoku4"]),
    "a vocabulary too large": ((SOURCE, 'data.generated("add2")'), ["model.vocab", "400", "at most 2"]),
}


@pytest.mark.parametrize("mistake", slow_except(MISTAKES, *MISTAKES.keys() - {"a vocabulary too large"}))
def test_a_mistake_in_a_first_recipe_is_explained(mistake, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(api, "TOKENIZER_BYTES", 30_000)  # drawing 3 MB of sums takes half a minute
    (before, after), words = MISTAKES[mistake]
    path = tmp_path / "mine.py"
    assert before in RECIPE
    path.write_text(RECIPE.replace(before, after).replace("OUT", str(tmp_path / "run")))
    told = refused(capsys, "train", str(path))
    assert [w for w in words if w not in told] == []


def test_a_missing_recipe_says_how_to_get_one(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = refused(capsys, "train", "configs/nano.py")
    assert "configs/nano.py does not exist" in told and "`mercury init nano`" in told
    assert "`mercury init other.py`" in refused(capsys, "train", "other.py")


def test_init_writes_a_recipe_once(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine.py"]) == 0 and main(["init", "twin_nano", "twin.py"]) == 0
    assert capsys.readouterr().out == "mine.py\ntwin.py\n"
    assert recipe_of("mine.py").name == "mine" and recipe_of("twin.py").name == "twin"
    assert "mercury train mine.py" in (tmp_path / "mine.py").read_text()
    for argv in (["mine.py"], ["nano", "no/such/folder/x.py"], ["nan"], ["a b.py"]):
        assert argv[-1] in refused(capsys, "init", *argv)


def test_train_refuses_unknown_fields_and_recipes(recipe, capsys):
    assert "--steps is the nearest" in refused(capsys, "train", recipe, "--stepps", "5")
    assert "--optim.lr" in refused(capsys, "train", recipe, "--optim.lrr", "5")
    assert "/no/recipe.py" in refused(capsys, "train", "/no/recipe.py")
    assert "RECIPE" in refused(capsys, "train", "--steps", "5", recipe)
    assert "RECIPE" in refused(capsys, "train")
    assert main(["train", recipe, "--steps", "many"]) == 2  # in tyro's own words
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, code",
    [(loop.Diverged("loss is nan at step 7"), 3), (checkpoint.SaveFailed("step 7: no space left"), 4),
     (OSError(28, "No space left on device", "metrics.jsonl"), 4),
     (PermissionError(13, "Permission denied", "runs"), 2), (KeyboardInterrupt(), 130),
     (RuntimeError("an unexpected error"), 1)],
)  # fmt: skip
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
        return loop.TrainResult({}, {}, {"loss": float("nan")}, config.folder, config.steps)

    monkeypatch.setattr(api, "train", trains)
    [row] = objects(capsys, "train", recipe, "--json", "--steps", "7", "--resume", "--optim.lr", "0.5")
    assert (seen[0].steps, seen[0].resume, seen[0].optim.lr) == (7, True, 0.5)
    assert (
        row["step"] == 7
        and row["metrics"] == {"loss": None}
        and row["model"] == str(tmp_path / "run" / "model")
    )


def test_train_ends_with_a_command_that_samples_only_if_the_run_is_complete(
    recipe, tmp_path, capsys, monkeypatch
):
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": []}\n')
    stopped, model = None, tmp_path / "run" / "model"
    monkeypatch.setattr(api, "train", lambda c: loop.TrainResult({}, {}, {}, c.folder, 3, stopped))
    assert main(["train", recipe]) == 0
    assert f'try: mercury sample --model {model} "..."' in capsys.readouterr().err
    assert main(["train", recipe, "--chats", str(chats)]) == 0
    assert f'try: mercury sample --model {model} --chat "..."' in capsys.readouterr().err
    source = "data.mixture((data.stdlib(), 1.0))"
    recipe_text = Path(recipe).read_text()
    for changed in (
        recipe_text.replace(source, f'data.chat("{chats}")'),
        recipe_text.replace(source, 'data.generated("add2")'),
        recipe_text.replace(source, 'data.mixture((data.stdlib(), 0.5), (data.generated("add2"), 0.5))'),
        recipe_text.replace("out=", "sample_chat=True, out="),
    ):
        Path(recipe).write_text(changed)
        assert main(["train", recipe]) == 0
        assert f'try: mercury sample --model {model} --chat "..."' in capsys.readouterr().err
    stopped = "SIGTERM"
    assert main(["train", recipe]) == 143  # not 0: a scheduler would take the run for complete
    said = capsys.readouterr().err
    assert "stopped by SIGTERM at step 3" in said and "try:" not in said
