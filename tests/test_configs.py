"""Every recipe loads, and its longest documents fit its rows."""

from pathlib import Path

import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import hub, models, rl
from mercury_jax.decode import defaults
from mercury_jax.hub.load import open_checkpoint
from mercury_jax.rl.rollouts import problems_of
from mercury_jax.tokenizer import Tokenizer
from mercury_jax.training import packaged_recipes
from mercury_jax.training.data import Generated
from mercury_jax.training.recipe import InitModel, load_recipe

RECIPES = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))


def test_the_packaged_recipes_are_found_by_name():
    assert packaged_recipes() == {path.stem: path for path in RECIPES}
    assert load_recipe("twin_nano").name == "twin_nano"


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_loads_and_its_documents_fit_its_rows(path):
    config = load_recipe(path)
    assert config.name == path.stem and f"mercury train configs/{path.name}" in (path.read_text())
    if isinstance(
        config.model, InitModel
    ):  # model, tokenizer and data come with the command: tests/training/test_finetune
        return
    tokenizer, model = Tokenizer.load(hub.NANO / "tokenizer.model"), models.build(config.model)
    rng = np.random.default_rng(0)
    if isinstance(config.data, rl.Rollouts | rl.Trajectories):
        for _, problem in problems_of(config.data.tasks, config.data.only, (0,), 200, "train"):
            prompt = tokenizer.render([{"role": "user", "content": problem.input}])
            answer = np.zeros(len(prompt) + config.data.max_tokens, np.int32)
            assert len(model.layout(answer, len(prompt), all_clean=False).tokens) <= config.row
        return
    for source, _ in config.mixture.sources:
        if not isinstance(source, Generated) or source.name == "sudoku9":
            continue
        for _ in range(200):
            problem = source.task.generate(rng)
            thinking = problem.thinking if source.thinking else None
            prompt, answer = tokenizer.example(problem.input, problem.output, thinking)
            laid = model.layout(np.asarray(prompt + answer), len(prompt), tokenizer.eos)
            assert len(laid.tokens) <= config.row, (source.name, problem)


def test_the_embedded_model_is_what_its_recipe_makes():
    """Of the recipe's own model, noise, seed and steps, decoded by its sampler: no other stage, no other mixture."""
    lm, recipe = mj.load(), load_recipe(RECIPES[0].with_name("nano.py"))
    assert dict(lm.card) == {"recipe": recipe.name, "seed": recipe.seed, "steps": recipe.steps}
    assert lm.model.config == recipe.model and open_checkpoint(hub.NANO).noise == recipe.noise
    assert defaults.default_sampler(lm).rule == recipe.sampler
    card = (hub.NANO / "README.md").read_text().splitlines()
    shares = [
        (f"{share:.0%}", getattr(source, "name", "python-stdlib")) for source, share in recipe.mixture.sources
    ]
    [data] = [line for line in card if line.startswith("- data: ")]
    told = [part.split()[:2] for part in data.removeprefix("- data: ").split(", ")]
    assert told == [list(share) for share in shares]
    steps = f"- steps: {recipe.steps} of {recipe.batch} rows of {recipe.row} positions, "
    assert [line for line in card if line.startswith("- steps: ")] == [
        line for line in card if line.startswith(steps)
    ]
    assert f"- recipe: `nano`, seed {recipe.seed}: `mercury train nano`" in card
