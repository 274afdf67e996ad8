"""Entry point: finds the command, runs it, and turns errors into one line and an exit code.

Each command is a function of a module, `run(argv) -> exit code`, imported when it runs. The docstrings of `_mercury`,
`_data` and `_bench` are the text of `mercury --help` and the like, which needs neither tyro nor JAX.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import inspect
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from mercury_jax.compilation import GRAPH_FLAGS, GRAPHS_FORM, cache_compiled_programs
from mercury_jax.config import nearest, refuse

Command = Callable[[list[str]], int]  # words -> exit code

# name -> (module, or module:function where that is not `run`; what it does)
COMMANDS = {
    "demo": ("demo", "watch the embedded model turn noise into answers"),
    "sample": ("sample", "continue a text, or answer a message"),
    "chat": ("chat", "talk to a model in the terminal"),
    "infill": ("infill", "fill the holes in a text"),
    "edit": ("infill:run_edit", "rewrite spans of a text, or let the model choose what to change"),
    "decide": ("decide", "answer typed questions about a text by probabilities"),
    "calibrate": ("decide:run_calibrate", "fit the probabilities of decisions to labelled questions"),
    "init": ("train:run_init", "write a recipe to start from"),
    "train": ("train", "train a model by a recipe"),
    "data": ("data", "look at training data; tokenise a corpus once, for training at scale"),
    "report": ("report", "draw the curves of training runs"),
    "eval": ("evaluate", "measure a model on tasks whose answers can be checked"),
    "serve": ("serve", "serve a model over HTTP: Mercury's API, OpenAI's API, a playground"),
    "bench": ("bench", "measure decoding rules, compiled programs and GPUs"),
    "convert": ("convert", "convert a checkpoint from or to the Hugging Face layout"),
    "info": ("info", "describe a model, this machine, rules and tasks"),
    "completion": ("completion", "print a script that completes commands and options in a shell"),
}
DATA = {
    "pack": ("data:run_pack", "tokenise texts, chats or problems into shards"),
    "info": ("data:run_info", "describe shards, and show some of their documents"),
    "show": ("data_show", "which tokens of conversations are trained on, and how well rows are used"),
    "answers": ("data_answers", "a model's own greedy answers to prompts, for a drafter"),
}
BENCHES = {
    "decode": ("bench_decode", "accuracy and speed of every decoding rule, against one token per step"),
    "compile": ("bench_compile", "a program for a chip that is not here: memory, collectives, roofline"),
    "gpu": (
        "bench_gpu",
        "a GPU: whether the kernels are correct there, their settings, where a forward pass goes",
    ),
}

# Names that other programs use -> ours.
SYNONYMS = {
    "complete": "sample", "generate": "sample", "run": "sample", "finetune": "train",
    "new": "init", "evaluate": "eval", "benchmark": "bench", "export": "convert", "server": "serve",
}  # fmt: skip
BAD_INPUT, FAILED, DISK_FULL, INTERRUPTED = 2, 1, 4, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The words behind the program's name. Default: those of this process.

    Returns:
        The exit code: 0 done, 2 bad input, 3 training diverged, 4 the disk is full, 5 another process of the run died,
        130 interrupted, 143 training stopped by SIGTERM, 1 anything else.
    """
    return execute(_mercury, sys.argv[1:] if argv is None else argv)


def execute(command: Command, argv: Sequence[str]) -> int:
    """Runs a function with the words of a command line; prints errors in one line, with `--debug` as tracebacks."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)  # behind it stands the user's text
    debug = "--debug" in words[:end]
    words = [w for w in words[:end] if w != "--debug"] + words[end:]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        with messages_on_stderr():
            code = command(words)
        sys.stdout.flush()
        return code
    except SystemExit as end:  # of argparse and tyro after --help
        return end.code if isinstance(end.code, int) else 0 if end.code is None else BAD_INPUT
    except BrokenPipeError:  # `mercury ... | head`: the reader has ended, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as error:
        print("mercury: interrupted", file=sys.stderr)
        return _leave(error, INTERRUPTED)
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            print(f"mercury: {as_typed(_message(error), words)}", file=sys.stderr)
        return _leave(error, exit_code(error))


class _StderrHandler(logging.Handler):
    """Prints messages to the standard error of the moment, which a progress bar replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one message, without its level and the name of its logger."""
        print(self.format(record), file=sys.stderr, flush=True)


@contextlib.contextmanager
def messages_on_stderr() -> Iterator[None]:
    """Prints the warnings of this package as plain lines while a command runs.

    A library may have given the root logger a handler. That one writes into the line of a progress bar, and begins
    with "WARNING:mercury_jax:".
    """
    logger, handler = logging.getLogger("mercury_jax"), _StderrHandler(logging.WARNING)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def _leave(error: BaseException, code: int) -> int:
    """Returns the exit code, or ends the process with it: of several, one that fails must not wait for the others."""
    if getattr(error, "leave_at_once", False):  # set by `training.distributed.joined`
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    return code


def _mercury(words: list[str]) -> int:
    r"""usage: mercury COMMAND [OPTIONS]

    Train, sample and serve diffusion language models.

    {commands}

    examples:
      mercury demo
      mercury sample "347+585=" --chat
      mercury infill "def area(r):\n[[24]]\n    return a" --escapes
      mercury eval sudoku4 --limit 64
      mercury init my_recipe.py

    Every command has --help. --json prints one JSON object a line, for programs; --debug shows the traceback of an
    error. Compiled programs are cached in ~/.cache/mercury_jax; MERCURY_CACHE names another folder, or none where it
    is empty.
    Exit codes: 0 done, 2 bad input, 3 training diverged, 4 the disk is full, 5 another process of the run died, 130
    interrupted, 143 training stopped by SIGTERM, 1 anything else.
    """
    if words[:1] == ["bench"]:
        return _bench(words[1:])
    if words[:1] == ["data"]:
        return _data(words[1:])
    if words[:1] == ["--version"]:
        from mercury_jax import __version__

        print(f"mercury_jax {__version__}")
        return 0
    return _dispatch("command", COMMANDS, words, _mercury.__doc__)


def _bench(words: list[str]) -> int:
    """usage: mercury bench WHAT [OPTIONS]

    Measure. Every figure says what it is compared with, on which hardware, in the same run.

    {commands}

    examples:
      mercury bench decode --rules threshold entropy_bound --limit 128
      mercury bench decode --rules all --recommend --plot rules.png
      mercury bench compile diffusiongemma-26b-a4b --for h200 --quantise int8
      mercury bench gpu check --out h200.jsonl

    `mercury bench WHAT --help` lists the options.
    """
    return _dispatch("bench", BENCHES, words, _bench.__doc__)


def _data(words: list[str]) -> int:
    """usage: mercury data WHAT [OPTIONS]

    Training data: see what is trained on; tokenise a corpus once, and map it into memory.

    {commands}

    examples:
      mercury data show chats.jsonl --model runs/mine/model --turns all
      mercury data pack "books/**/*.txt" --tokenizer tokenizer.model --out packed
      mercury data info packed

    A recipe trains on the folder with data=data.shards("packed").
    `mercury data WHAT --help` lists the options.
    """
    return _dispatch("data", DATA, words, _data.__doc__)


def _dispatch(kind: str, commands: Mapping[str, tuple[str, str]], words: list[str], text: str | None) -> int:
    """Runs the function of the command that the first word names, or prints the help, which is a docstring."""
    if not words and commands is not COMMANDS:
        raise refuse("WHAT", None, f"one of {', '.join(commands)}; `mercury {kind} --help` describes them")
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(map(len, commands))
        lines = (f"  {name:{width}}  {about}" for name, (_, about) in commands.items())
        print(inspect.cleandoc(text or "").format(commands="\n".join(lines)))
        return 0 if words else BAD_INPUT
    if words[0] not in commands:
        other = SYNONYMS.get(words[0]) if commands is COMMANDS else None
        names = list(commands)  # all are listed: who types an unknown command looks for the one there is
        raise refuse(kind, words[0], f"mercury {other}" if other else nearest(words[0], names, len(names)))
    cache_compiled_programs()
    if words[0] not in ("gpu", "compile"):  # these choose flags for each of their processes
        loops_as_graphs()
    name, _, function = commands[words[0]][0].partition(":")
    try:
        module = importlib.import_module(f"mercury_jax.cli.{name}")
    except ModuleNotFoundError as error:
        if error.name != "tyro":
            raise
        raise ValueError(
            "mercury needs tyro: pip install tyro. Only `mercury bench gpu` runs without"
        ) from None
    return getattr(module, function or "run")(words[1:])


def loops_as_graphs(driver: str = "/proc/driver/nvidia/gpus") -> bool:
    """Turns loops into CUDA graphs where `mercury bench gpu check` found that they decode the same tokens.

    XLA reads its flags when JAX starts on a device. So the GPU's name comes from NVIDIA's driver, and a library that is
    imported after JAX could come too late: only commands do this.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    about = [file.read_text() for file in Path(driver).glob("*/information")]
    names = {match[1] for text in about if (match := re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE))}
    if len(names) != 1 or GRAPH_FLAGS.partition("=")[0] in flags:
        return False
    import jax

    from mercury_jax.ops import device as kernel_device

    forms = kernel_device.read_checks(kernel_device.entry_key(names.pop(), jax.__version__)) or {}
    if not forms.get(GRAPHS_FORM, {}).get("passed"):
        return False
    os.environ["XLA_FLAGS"] = f"{flags} {GRAPH_FLAGS}".strip()
    return True


def exit_code(error: BaseException) -> int:
    """The exit code of an error; one may bring its own as `exit_code`, such as `checkpoint.SaveFailed`."""
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        return code
    if isinstance(error, OSError):
        return DISK_FULL if error.errno == errno.ENOSPC else BAD_INPUT
    return BAD_INPUT if isinstance(error, ValueError) else FAILED


# Arguments of the library whose option has another name, and what a command calls those that may not be typed.
OPTION_OF = {
    "source": ("--model", "--init", "--tokenizer"), "logit_bias": ("--bias",), "spans": ("--span",),
    "sampler": ("--rule",), "effort": ("--effort", "--default-effort"),
    "task": ("--generated", "--tasks"),
}  # fmt: skip
UNTYPED = {
    "source": "MODEL", "chats": "--chats", "init": "--init", "max_tokens": "--max-tokens", "file": "--file",
}  # fmt: skip
# "FIELD is VALUE; allowed: ALLOWED" of `config.refuse`; FIELD is `p`, `p[0]`, or `threshold(p=)` of a rule.
_REFUSAL = re.compile(r"(?P<name>[\w.]+)(\[\d+\]|\((?P<parameter>\w+)=\))? is (?P<rest>.*)", re.DOTALL)
_ONLY_PYTHON = re.compile(r", or (None|an Effort)\b.*", re.DOTALL)  # what nobody can type


def as_typed(message: str, words: Sequence[str]) -> str:
    """An error of the library in the words of the command line.

    Where the library refuses the value of an argument whose option is among the words, the option is named instead,
    and only values that can be typed are listed, as in "--quantise is 'int4'; allowed: int8, fp8". An argument that is
    missing is said to be so: nobody types None.
    """
    nothing = r"^((?:--[\w.-]+|[A-Z]+) is None|--[\w.-]+ is ''); allowed: "
    missing = lambda text: re.sub(nothing, lambda m: f"{m[1].split()[0]} is missing: ", text)
    message = missing(message)
    found = _REFUSAL.fullmatch(message)
    if found is None:
        return message
    typed = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    name, parameter, rest = found["name"], found["parameter"], found["rest"]
    options = OPTION_OF.get(name, ("--" + name.replace("_", "-"),))
    option = next((x for x in options if x in typed), options[0])
    if option not in typed and parameter is not None:
        name, option = parameter, "--" + parameter.replace("_", "-")
        rest = f"{rest} (of the rule {found['name']})"
    if option not in typed:
        if name not in UNTYPED:
            return message
        option = UNTYPED[name]
    value, semicolon, allowed = rest.partition("; allowed: ")
    allowed = re.sub(r"'([\w./-]+)'", r"\1", _ONLY_PYTHON.sub("", allowed))
    allowed = re.sub(r"^None\b", "nothing", allowed)
    return missing(f"{option} is {value}{semicolon}{allowed}")


def _message(error: Exception) -> str:
    """Our own errors as they are; of others the type and the first lines."""
    text = str(error).strip()
    if isinstance(error, ValueError) or hasattr(error, "exit_code"):
        return text or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    first = "\n".join(text.splitlines()[:3])
    return f"{type(error).__name__}: {first}\n(an unexpected error; --debug shows where it arose)"
