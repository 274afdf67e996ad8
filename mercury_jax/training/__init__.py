"""Training: recipes, data, objectives, and the loop that runs them.

recipe        `TrainConfig`: everything that a run depends on; loading and overriding recipes
data          data sources, packing and batches
objectives    the losses
optim, step   the optimizer, and one update on a mesh
lora          training a part of the parameters: adapters or unfrozen leaves
loop          train, log, evaluate, show samples, save, resume
distributed   several processes: joining, failing together, signals
report        progress, metrics, samples and MFU of a run; curves draws them

`mercury_jax.api.train` puts them together. This module finds recipe files without importing JAX, so that `mercury init`
and `mercury train --help` start fast.
"""

from __future__ import annotations

from pathlib import Path

from mercury_jax.config import nearest


def packaged_recipes() -> dict[str, Path]:
    """Lists the recipes that come with mercury_jax."""
    # The build copies `configs/` of the repository to `mercury_jax/configs`; in a clone only the former exists.
    package = Path(__file__).parents[1]
    inside, beside = package / "configs", package.parent / "configs"
    return {path.stem: path for path in sorted((inside if inside.is_dir() else beside).glob("*.py"))}


def find_recipe(recipe: str | Path) -> Path:
    """Finds the file of a recipe.

    Args:
        recipe: Path of a recipe file, or the name of a recipe that comes with mercury_jax.

    Returns:
        Path of the file.

    Raises:
        ValueError: There is no such file; the message says how to get one.
    """
    path, known = Path(recipe), packaged_recipes()
    if path.is_file():
        return path
    if str(recipe) in known:
        return known[str(recipe)]
    if path.is_dir():
        raise ValueError(
            f"recipe {recipe} is a folder; it must be a Python file that defines config() -> TrainConfig"
        )
    if path.stem in known:
        how = f"`mercury init {path.stem}` writes a copy of that recipe, `mercury train {path.stem}` runs it as it is"
    else:
        own = path.name if path.suffix == ".py" else f"{path.name}.py"
        how = f"`mercury init {own}` writes a first recipe; packaged ones: {nearest(path.stem, list(known))}"
    raise ValueError(f"recipe {recipe} does not exist. {how}")
