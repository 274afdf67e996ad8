"""Every recipe loads, and its longest documents fit its rows."""

from pathlib import Path

import numpy as np
import pytest

from mercury_jax import hub, models
from mercury_jax.tokenizer import Tokenizer
from mercury_jax.train import generators
from mercury_jax.train.data import Generated
from mercury_jax.train.packaged import packaged
from mercury_jax.train.recipe import load_recipe

RECIPES = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))


def test_the_packaged_recipes_are_found_by_name():
    assert packaged() == {path.stem: path for path in RECIPES}
    assert load_recipe("nano_ar").name == "nano_ar"


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_loads_and_its_documents_fit_its_rows(path):
    config = load_recipe(path)
    assert config.name == path.stem and f"mercury train configs/{path.name}" in (path.read_text())
    tokenizer, model = Tokenizer.load(hub.NANO / "tokenizer.model"), models.build(config.model)
    rng = np.random.default_rng(0)
    for source, _ in config.mixture.sources:
        if not isinstance(source, Generated) or source.name == "sudoku9":
            continue
        for _ in range(200):
            problem = generators.ALL[source.name].problem(rng)
            thinking = problem.thinking if source.thinking else None
            prompt, answer = tokenizer.example(problem.input, problem.output, thinking)
            laid = model.layout(np.asarray(prompt + answer), len(prompt), tokenizer.eos)
            assert len(laid.tokens) <= config.row, (source.name, problem)
