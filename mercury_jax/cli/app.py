"""main(): finds the command, runs it, and says in words what went wrong."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from mercury_jax.cli import compiled
from mercury_jax.config import nearest, refuse

# name -> (module, what it does). A command is `run(argv) -> exit code`.
COMMANDS = {
    "demo": ("demo", "watch the embedded model turn noise into answers"),
    "sample": ("sample", "continue a text, or answer a message"),
    "infill": ("infill", "fill the holes in a text"),
    "edit": ("edit", "write spans of a text anew, or let the model choose what to change"),
    "init": ("init", "write a recipe to start from"),
    "train": ("train", "train a model as a recipe says"),
    "eval": ("evaluate", "measure a model on tasks whose answers can be checked"),
    "serve": ("serve", "serve a model over HTTP, behind Mercury's API and OpenAI's, with a playground"),
    "bench": ("bench", "measure the speed of decoding, and what it costs in accuracy"),
    "convert": ("convert", "write a Hugging Face checkpoint as a folder of ours, or ours as theirs"),
    "info": ("info", "what a model is, and which rules and tasks there are"),
}

# What other programs call it -> ours.
KNOWN_ELSEWHERE = {
    "chat": "sample --chat",
    "complete": "sample",
    "generate": "sample",
    "run": "sample",
    "finetune": "train",
    "new": "init",
    "evaluate": "eval",
    "benchmark": "bench",
    "export": "convert",
    "server": "serve",
}
BAD_INPUT, FAILED, DISK_FULL, INTERRUPTED = 2, 1, 4, 130

HELP = """\
usage: mercury COMMAND [OPTIONS]

Train, sample and serve diffusion language models.

{commands}

Try:
  mercury demo
  mercury sample "347+585=" --chat
  mercury infill "def area(r):\\n[[24]]\\n    return a" --escapes
  mercury eval sudoku4 --limit 64
  mercury init my_recipe.py

Every command has --help. --json prints one object a line, for programs; --debug shows where an error
arose. Compiled programs are kept in ~/.cache/mercury_jax; MERCURY_CACHE names another folder, or none (empty).
Exit codes: 0 done, 2 bad input, 3 training diverged, 4 the disk is full, 1 anything else."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` is without the program's name."""
    words, debug = _without_debug(list(sys.argv[1:] if argv is None else argv))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except SystemExit as end:  # argparse after --help, tyro after a bad value
        return end.code if isinstance(end.code, int) else 0 if end.code is None else BAD_INPUT
    except BrokenPipeError:  # `mercury ... | head`: nobody reads on, and that is fine
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("mercury: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            print(f"mercury: {_words(error)}", file=sys.stderr)
        return exit_code(error)


def _without_debug(words: list[str]) -> tuple[list[str], bool]:
    """What stands behind `--` is the user's text, whatever it spells."""
    end = words.index("--") if "--" in words else len(words)
    debug = "--debug" in words[:end]
    return [w for w in words[:end] if w != "--debug"] + words[end:], debug


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        table = "\n".join(f"  {name:{width}}  {about}" for name, (_, about) in COMMANDS.items())
        print(HELP.format(commands=table))
        return 0 if words else BAD_INPUT
    if words[0] == "--version":
        from mercury_jax import __version__

        print(f"mercury_jax {__version__}")
        return 0
    if words[0] not in COMMANDS:
        other = KNOWN_ELSEWHERE.get(words[0])
        raise refuse("command", words[0], f"mercury {other}" if other else nearest(words[0], list(COMMANDS)))
    compiled.keep()
    module = importlib.import_module(f"mercury_jax.cli.{COMMANDS[words[0]][0]}")
    return module.run(words[1:])


def exit_code(error: BaseException) -> int:
    """An error may bring its own (`loop.Diverged`, `checkpoint.SaveFailed`)."""
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        return code
    if isinstance(error, OSError):
        return DISK_FULL if error.errno == errno.ENOSPC else BAD_INPUT
    return BAD_INPUT if isinstance(error, ValueError) else FAILED


def _words(error: Exception) -> str:
    """Our own errors speak for themselves; of others, their kind and their first lines."""
    told = str(error).strip()
    if isinstance(error, ValueError) or hasattr(error, "exit_code"):
        return told or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    short = "\n".join(told.splitlines()[:3])
    return f"{type(error).__name__}: {short}\n(not foreseen; --debug shows where it arose)"
