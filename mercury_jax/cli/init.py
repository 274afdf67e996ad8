"""`mercury init`: write a recipe to start from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Positional, option
from mercury_jax.config import nearest, refuse

FIRST = "first"  # the packaged recipe that a new one starts as


@dataclass(frozen=True, kw_only=True)
class Init:
    """Write a recipe to start from.

    examples:
      mercury init my_recipe.py       a first recipe of your own, which trains
                                      in one to two minutes on two CPU cores
      mercury init nano               a copy of the recipe nano, as nano.py
      mercury init nano mine.py       the same under another name

    Packaged recipes: {names}.
    `mercury train NAME` runs a packaged recipe as it is.
    """

    recipe: Annotated[Positional[str], option("RECIPE")]
    """A new file, NAME.py, or the name of a packaged recipe."""
    file: Annotated[Positional[str | None], option("FILE.py")] = None
    """Where the copy goes. Default: RECIPE.py."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ValueError: A bad option, before a model is loaded or written.
    """
    from mercury_jax.train import packaged_recipes

    known = packaged_recipes()
    Init.__doc__ = (Init.__doc__ or "").replace("{names}", ", ".join(known))
    args = arguments.read(Init, argv, "mercury init")
    own = args.recipe.endswith(".py") and args.file is None
    name = FIRST if own else args.recipe
    if name not in known:
        allowed = f"a new file such as my_recipe.py, or {nearest(name, list(known))}"
        raise refuse("RECIPE", args.recipe, allowed)
    path = Path(args.recipe if own else args.file or f"{name}.py")
    if path.suffix != ".py" or not re.fullmatch(r"[\w-]+", path.stem):
        raise refuse("FILE", str(path), "a name of letters, digits, _ and - that ends in .py")
    if not path.parent.is_dir():
        raise refuse("FILE", str(path), f"a file in a folder that exists; {path.parent} does not")
    # The copy names itself in its commands and in its output folder.
    text = known[name].read_text(encoding="utf-8").replace(f"configs/{name}.py", str(path))
    text = text.replace(f'name="{name}"', f'name="{path.stem}"')
    text = text.replace(f"runs/{name}/", f"runs/{path.stem}/")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise refuse("FILE", str(path), "a new file; this one exists and was not changed") from None
    print(path)
    show.say(f"try: mercury train {path}")
    return 0
