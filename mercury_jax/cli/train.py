"""`mercury train`: run a recipe, with any of its fields changed on the command line; `mercury init`: write one."""

from __future__ import annotations

import difflib
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, Positional, option
from mercury_jax.config import nearest, refuse

if TYPE_CHECKING:
    from mercury_jax.training.loop import TrainResult
    from mercury_jax.training.recipe import TrainConfig

FIRST = "first"  # the packaged recipe that a new one starts as


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model by RECIPE.

    examples:
      mercury init my_recipe.py                 write a recipe of your own, then:
      mercury train my_recipe.py
      mercury train nano --steps 200 --out runs/short    a packaged recipe
      mercury train my_recipe.py --optim.lr 1e-3 --model.width 256
      mercury train my_recipe.py --resume       continue from the last checkpoint
      mercury train my_recipe.py --distributed  one of several processes (SLURM)
      mercury train sft_llada --init FOLDER --chats chats.jsonl --lora.rank 8
      mercury train my_recipe.py --help         every field, with its value

    A recipe is a Python file with `def config() -> TrainConfig`. The run writes
    its `out` folder: metrics.jsonl, checkpoints, and at the end a model/ for
    `mercury sample --model`, or with --lora.rank an adapter/, or for a recipe
    with a drafter a drafter/. SIGTERM and Ctrl-C save a checkpoint and stop.
    Exit codes: 0 done, 2 bad input, 3 the loss is NaN or infinite, 4 the disk is
    full, 5 another process of the run died, 143 stopped by SIGTERM, 130 by Ctrl-C.
    """

    recipe: Annotated[Positional[str], option("RECIPE")]
    """A Python file that defines config(), or the name of a packaged recipe."""
    # Only for the help: the fields behind the recipe are read by `recipe.override`, which knows their types.
    field: Annotated[str | None, option("VALUE", name="FIELD")] = None
    """Change a field of the recipe, such as --steps 200."""
    json: Flag = False
    """Print the result as one JSON object."""


def run(argv: Sequence[str]) -> int:
    """Runs `mercury train`; returns its exit code."""
    words = [w for w in argv if w != "--json"]
    if not words or words[0] in ("-h", "--help"):
        arguments.read(Train, words, "mercury train")  # prints the help, or says that RECIPE is missing
    if words[0].startswith("-"):
        allowed = "the recipe first, then its fields: mercury train RECIPE --steps 200"
        raise refuse("RECIPE", words[0], allowed)
    from mercury_jax.training import recipe

    loaded = _load(words[0])
    with arguments.errors_in_one_line(f"mercury train {words[0]}"):
        config = recipe.override(loaded, words[1:])
    from mercury_jax import api

    result = api.train(config)
    _report(config, result, as_json="--json" in argv)
    # As a shell counts a process that a signal ended: Kubernetes and Slurm must not take the run for a complete one.
    return 128 + signal.Signals[result.stopped] if result.stopped else 0


def _load(path: str) -> TrainConfig:
    """The config of a recipe. Whatever the user's file raises becomes a ValueError that names file and line."""
    from mercury_jax.training import find_recipe, recipe

    path = str(find_recipe(path))
    try:
        return recipe.load_recipe(path)
    except ValueError as error:
        raise error if path in str(error) else ValueError(f"{path}: {error}") from error
    except Exception as error:
        text = str(error.msg if isinstance(error, SyntaxError) else error) + _suggestion(error)
        allowed = f"a file that runs; this one fails{_line(error, path)}: {type(error).__name__}: {text}"
        raise refuse("recipe", path, allowed) from error


def _line(error: BaseException, path: str) -> str:
    """Where in the recipe itself the error arose, as " in line 7"; empty where that is unknown."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f" in line {error.lineno}"
    found, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            found = f" in line {trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _suggestion(error: BaseException) -> str:
    """The most similar name, where the recipe asks a module for one that it does not have."""
    if isinstance(error, AttributeError):
        name, owner = error.name, error.obj
    elif isinstance(error, ImportError) and (found := re.match(r"cannot import name '(\w+)'", str(error))):
        name, owner = found[1], sys.modules.get(error.name or "")
    else:
        return ""
    close = difflib.get_close_matches(name or "", dir(owner), n=1)
    return f"; {close[0]} is the nearest name there" if close else ""


def _report(config: TrainConfig, result: TrainResult, as_json: bool) -> None:
    """Prints where the model is, on the first of several processes only."""
    import jax

    if jax.process_index():
        return
    kind, option = "model", None
    if config.lora.rank or config.drafter:
        kind, option = ("adapter", "--adapter") if config.lora.rank else ("drafter", "--draft")
    written = result.out / kind
    if as_json:
        show.emit({
            "name": config.name, "step": result.step, "steps": config.steps, "stopped": result.stopped,
            "out": str(result.out), kind: str(written), "metrics": result.metrics,
        })  # fmt: skip
        return
    print(written)
    if result.stopped:
        show.say(
            f"stopped by {result.stopped} at step {result.step} of {config.steps}: this is the {kind} of that step; "
            "--resume continues"
        )
        return
    where = str(written) if option is None else f"{config.init} {option} {written}"
    show.say(f'try: mercury sample --model {where} {"--chat " if _answers_messages(config) else ""}"..."')


def _answers_messages(config: TrainConfig) -> bool:
    """Whether the recipe trains on conversations, at least in part."""
    from mercury_jax.training import data
    from mercury_jax.training.data.corpus import open_corpus

    def chats(source: object) -> bool:
        if isinstance(source, data.Shards):
            return bool(open_corpus(source.where, "train").manifest["prompts"])
        # A `BatchSource`, such as the rollouts of `mercury_jax.rl`, asks the model questions.
        return isinstance(source, data.Chat | data.Generated | data.BatchSource)

    given = config.data
    sources = [source for source, _ in given.sources] if isinstance(given, data.Mixture) else [given]
    return bool(config.chats) or config.sample_chat or any(map(chats, sources))


# --- mercury init


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
    file: Annotated[Positional[str | None], option("[FILE.py]")] = None
    """Where the copy goes. Default: RECIPE.py."""


def run_init(argv: Sequence[str]) -> int:
    """Runs `mercury init`; returns its exit code."""
    from mercury_jax.training import packaged_recipes

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
