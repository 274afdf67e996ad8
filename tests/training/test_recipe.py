"""Laws of recipes: they check themselves, the command line overrides them by type, JSON tells all."""

import dataclasses
import json

import pytest

import mercury_jax as mj
from mercury_jax.config import ModelConfig
from mercury_jax.training import data as sources, objectives, recipe
from tests.training import tiny_training as tiny

RECIPE = """
from mercury_jax.config import ModelConfig
from mercury_jax.training.data import stdlib
from mercury_jax.training.objectives import masked_elbo
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import TrainConfig

def config():
    return TrainConfig(
        name="mine", model=ModelConfig(vocab=32), objective=masked_elbo(clip=5.0), data=stdlib(),
        optim=OptimConfig({optim}), steps=7,
    )
"""


@pytest.fixture
def write(tmp_path):
    def make(text):
        (tmp_path / "mine.py").write_text(text)
        return tmp_path / "mine.py"

    return make


def test_a_recipe_file_gives_its_config(write):
    found = recipe.load_recipe(write(RECIPE.format(optim="lr=0.5")))
    assert (found.name, found.steps, found.optim.lr, str(found.folder)) == ("mine", 7, 0.5, "runs/mine")


@pytest.mark.parametrize(
    "text, words",
    [(RECIPE.format(optim="lr=-1.0"), "lr is -1.0; allowed: a number, 0 or more"),
     ("x = 1", r"has no config\(\): a recipe is a Python file that defines config"),
     ("def config(): return 3", "returns a TrainConfig, not int")],
)  # fmt: skip
def test_a_recipe_that_is_wrong_is_refused_in_words(write, text, words):
    with pytest.raises(ValueError, match=words):
        recipe.load_recipe(write(text))
    with pytest.raises(ValueError, match="none.py does not exist"):
        recipe.load_recipe("none.py")


def test_what_python_or_a_type_checker_would_refuse_is_refused_in_words(write, request):
    if request.config.getoption("--jaxtyping"):
        pytest.skip("the type checker refuses it first")
    for call, words in (
        (lambda: recipe.load_recipe(write(RECIPE.format(optim="warmpu=3"))),
         "OptimConfig key is 'warmpu'; allowed: warmup is the nearest; all: "),
        (lambda: tiny.config("x", objective="elbo"), "objective is 'elbo'; allowed: a function"),
        (lambda: mj.train(3), "config is 3; allowed: a TrainConfig"),  # type: ignore[arg-type]
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call()


def test_a_source_alone_is_the_mixture_of_it():
    one = sources.generated("sudoku4")
    assert tiny.config("x", data=one).data == sources.mixture((one, 1.0))


def test_errors_of_the_users_own_code_pass_unchanged(write):
    with pytest.raises(TypeError, match="unsupported operand"):
        recipe.load_recipe(write("def config(): return 1 + 'a'"))


def test_the_command_line_overrides_fields_and_keeps_functions_and_data():
    base = tiny.config("x", objective=objectives.masked_elbo())
    argv = "--optim.lr 3e-4 --model.no-qk-norm --resume --sample_prompts a b --mesh.fsdp=2 --mesh.data 3 --save-every 5"
    found = recipe.override(base, argv.split())
    assert isinstance(found.model, ModelConfig)
    assert (found.optim.lr, found.model.qk_norm, found.resume, found.save_every) == (3e-4, False, True, 5)
    assert found.sample_prompts == ("a", "b") and (found.mesh.fsdp, found.mesh.data) == (2, 3)
    assert found.objective is base.objective and found.data is base.data
    assert recipe.override(base, []) == base


def test_help_lists_plain_fields_with_their_comments_and_offers_no_value_that_only_python_can_write(capsys):
    with pytest.raises(SystemExit) as ended:
        recipe.override(tiny.config("x"), ["--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0
    assert "Rows of an update, over all devices" in told and "--optim.lr" in told
    assert "data:" not in told and "sampler" not in told


@pytest.mark.parametrize(
    "option, nearest",
    [("--optim.lrr", "--optim.lr"), ("--lr", "--optim.lr"), ("--step", "--steps"),
     ("--widht=3", "--model.width")],
)  # fmt: skip
def test_an_unknown_key_is_refused_with_the_nearest(option, nearest):
    with pytest.raises(
        ValueError, match=f"option is '{option.split('=')[0]}'; allowed: {nearest} is the nearest"
    ):
        recipe.override(tiny.config("x"), [option, "3"])


@pytest.mark.parametrize("argv", [["--steps", "many"], ["--steps", "0"], ["--optim.decay", "exp"]])
def test_a_value_that_is_wrong_exits_with_2_and_words(argv, capsys):
    with pytest.raises(SystemExit) as error:
        recipe.override(tiny.config("x"), argv)
    assert error.value.code == 2 and argv[0].strip("-") in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "fields, words",
    [*(({name: value}, f"{name} is {value!r}; allowed") for name, value in
       (("accumulate", 3), ("name", "a/b"))),
     (dict(bad_lines="skip"), "bad_lines is 'skip'; .*data.chat"),
     # Fields of the noise that it does not read.
     (dict(noise=mj.NoiseConfig(uniform=0.9)),
      "noise.uniform is 0.9; allowed: its default: noise.kind = 'absorbing'"),
     (dict(noise=mj.NoiseConfig(power=3.0)),
      "noise.power is 3.0; allowed: its default: .* noise.schedule = 'linear' does not read it"),
     (dict(noise=mj.NoiseConfig(kind="hybrid", schedule="cosine")),
      "noise.schedule is 'cosine'; allowed: its default")],
)  # fmt: skip
def test_fields_that_make_no_sense_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        tiny.config("x", **fields)


def test_a_resolved_recipe_is_json_and_tells_what_the_objective_was_made_with():
    config = tiny.config("x", objective=objectives.masked_elbo(clip=5.0))
    told = json.loads(json.dumps(recipe.resolved(config)))
    assert told["objective"]["function"] == "mercury_jax.training.objectives.masked.masked_elbo.objective"
    assert told["objective"]["clip"] == 5.0 and told["data"]["sources"][0][0]["kind"] == "stdlib"
    assert set(told) == {f.name for f in dataclasses.fields(config)}


def test_how_chats_are_read_reaches_the_source():
    config = dataclasses.replace(
        recipe.load_recipe("sft_nano"), chats="hf:a/b", turns="all", held_out=0.2, bad_lines="skip"
    )
    [(source, _)] = config.mixture.sources
    assert source == sources.chat("hf:a/b", turns="all", held_out=0.2, bad_lines="skip")
    for name, value in (("turns", "all"), ("held_out", 0.2)):
        with pytest.raises(ValueError, match=f"{name} is .* without chats; a source has its own"):
            dataclasses.replace(recipe.load_recipe("first"), **{name: value})
