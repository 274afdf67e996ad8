"""`mercury train`: run a recipe, with any of its fields changed on the command line."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mercury_jax.cli import show
from mercury_jax.cli.parser import Parser
from mercury_jax.config import refuse

if TYPE_CHECKING:
    from mercury_jax.train.loop import Result
    from mercury_jax.train.recipe import TrainConfig

MORE = """\
examples:
  mercury init my_recipe.py                           write a first recipe of your own, then run it:
  mercury train my_recipe.py
  mercury train nano --steps 200 --out runs/short     a recipe that comes with mercury_jax, by its name
  mercury train my_recipe.py --optim.lr 1e-3 --model.width 256
  mercury train my_recipe.py --resume                 continue from the newest checkpoint
  mercury train my_recipe.py --distributed            one of several processes (SLURM, GKE, ...)
  mercury train my_recipe.py --help                   every field of this recipe, with its value

A recipe is a Python file with `def config() -> TrainConfig`. The run lives in its `out` folder:
metrics.jsonl, checkpoints, and in the end a model/ for `mercury sample --model`. SIGTERM and Ctrl-C save
and stop. Exit codes: 0 done, 2 bad input, 3 the loss is NaN or infinite, 4 the disk is full."""


def parser() -> Parser:
    p = Parser("train", "Train a model as RECIPE says.", MORE)
    p.add_argument(
        "recipe",
        metavar="RECIPE",
        help="a Python file that defines config(), or the name of a packaged recipe",
    )
    # Only for the help: what stands behind the recipe is read by recipe.override.
    p.add_argument("--FIELD", dest="field", metavar="VALUE", help="change a field of the recipe: --steps 200")
    p.add_argument("--json", action="store_true", help="print the result as one JSON object")
    p.add_argument("--debug", action="store_true", help="show tracebacks")
    return p


def run(argv: Sequence[str]) -> int:
    words = [w for w in argv if w != "--json"]
    if not words or words[0] in ("-h", "--help"):
        parser().read(words)  # prints the help, or says what is missing
    if words[0].startswith("-"):
        raise refuse(
            "RECIPE", words[0], "the recipe first, then its fields: mercury train RECIPE --steps 200"
        )
    from mercury_jax.train import recipe

    config = recipe.override(_recipe(words[0]), words[1:])
    from mercury_jax import api

    _report(config, api.train(config), as_json="--json" in argv)
    return 0


def _recipe(path: str) -> TrainConfig:
    """The recipe's config; whatever else the user's file raises is bad input, in words."""
    from mercury_jax.train import recipe

    path = str(recipe.find_recipe(path))
    try:
        return recipe.load_recipe(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except Exception as error:
        line = _line(error, path)
        told = str(error.msg if isinstance(error, SyntaxError) else error) + _nearest(error)
        raise refuse(
            "recipe", path, f"a file that runs; this one fails{line}: {type(error).__name__}: {told}"
        ) from error


def _line(error: BaseException, path: str) -> str:
    """Where in the recipe itself it went wrong."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f" in line {error.lineno}"
    found, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            found = f" in line {trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _nearest(error: BaseException) -> str:
    """The most similar name, where the recipe asks a module for one that it lacks."""
    if isinstance(error, AttributeError):
        name, owner = error.name, error.obj
    elif isinstance(error, ImportError) and (found := re.match(r"cannot import name '(\w+)'", str(error))):
        name, owner = found[1], sys.modules.get(error.name or "")
    else:
        return ""
    close = difflib.get_close_matches(name or "", dir(owner), n=1)
    return f"; {close[0]} is the nearest name there" if close else ""


def _report(config: TrainConfig, result: Result, as_json: bool) -> None:
    import jax

    if jax.process_index():
        return
    model = result.out / "model"
    if as_json:
        show.emit({
            "name": config.name,
            "step": result.step,
            "steps": config.steps,
            "stopped": result.stopped,
            "out": str(result.out),
            "model": str(model),
            "metrics": result.metrics,
        })  # fmt: skip
        return
    if result.stopped:
        print(
            f"stopped by {result.stopped} at step {result.step} of {config.steps}; --resume goes on",
            file=sys.stderr,
        )
    print(f"{model}")
    show.say(f'try: mercury sample --model {model} "..."')
