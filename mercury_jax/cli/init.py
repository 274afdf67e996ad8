"""`mercury init`: write a recipe to start from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mercury_jax.cli import show
from mercury_jax.cli.parser import Parser
from mercury_jax.config import nearest, refuse

FIRST = "first"  # the packaged recipe that a new one starts as
MORE = """\
examples:
  mercury init my_recipe.py       a first recipe of your own, which trains in one to two minutes on two CPU cores
  mercury init nano               a copy of the packaged recipe nano, as nano.py
  mercury init nano mine.py       the same under another name

Packaged recipes: {names}.
`mercury train NAME` runs a packaged recipe as it is."""


def parser() -> Parser:
    from mercury_jax.train.packaged import packaged

    p = Parser("init", "Write a recipe to start from.", MORE.format(names=", ".join(packaged())))
    p.add_argument("recipe", metavar="RECIPE", help="a new file, NAME.py, or the name of a packaged recipe")
    p.add_argument("file", nargs="?", metavar="FILE.py", help="where the copy goes (default: RECIPE.py)")
    p.add_argument("--debug", action="store_true", help="show tracebacks")
    return p


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv)
    from mercury_jax.train.packaged import packaged

    known = packaged()
    own = args.recipe.endswith(".py") and args.file is None
    name = FIRST if own else args.recipe
    if name not in known:
        raise refuse(
            "RECIPE", args.recipe, f"a new file such as my_recipe.py, or {nearest(name, list(known))}"
        )
    path = Path(args.recipe if own else args.file or f"{name}.py")
    if path.suffix != ".py" or not re.fullmatch(r"[\w-]+", path.stem):
        raise refuse("FILE", str(path), "a name of letters, digits, _ and - that ends in .py")
    if not path.parent.is_dir():
        raise refuse("FILE", str(path), f"a file in a folder that exists; {path.parent} does not")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(_renamed(known[name].read_text(encoding="utf-8"), name, path))
    except FileExistsError:
        raise refuse("FILE", str(path), "a new file; this one exists and is left as it is") from None
    print(path)
    show.say(f"try: mercury train {path}")
    return 0


def _renamed(text: str, name: str, path: Path) -> str:
    """The recipe with its own name and path in its commands."""
    text = text.replace(f"configs/{name}.py", str(path)).replace(f'name="{name}"', f'name="{path.stem}"')
    return text.replace(f"runs/{name}/", f"runs/{path.stem}/")
