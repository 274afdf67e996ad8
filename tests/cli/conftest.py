"""A tiny model, its folder and a recipe, for the tests of the command line.

JAX is imported inside of the fixtures: tests/conftest.py chooses its platform first.
"""

import pytest

from tests.cli.recipe import RECIPE


@pytest.fixture(scope="session")
def lm():
    from tests.cli.tiny_model import tiny_lm

    return tiny_lm()


@pytest.fixture(scope="session")
def folder(lm, tmp_path_factory) -> str:
    from mercury_jax import hub
    from mercury_jax.config import NoiseConfig

    return str(hub.save(tmp_path_factory.mktemp("cli") / "model", lm, NoiseConfig()))


@pytest.fixture
def at_hand(lm, folder, monkeypatch) -> str:
    """The same folder, without loading the model again: compiled programs are shared by all calls."""
    from mercury_jax.cli import show

    monkeypatch.setattr(show, "load", lambda source, **how: lm)
    return folder


@pytest.fixture
def recipe(tmp_path) -> str:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE.replace("OUT", str(tmp_path / "run")))
    return str(path)
