"""`mercury completion`: a script that completes commands, options and names of rules and tasks in a shell.

The options are those that the help of each command lists, so that no second list can differ from it.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence

from mercury_jax.config import nearest, refuse

HELP = """usage: mercury completion SHELL

Print a script that completes commands, options, rules and tasks with the Tab key.

examples:
  mercury completion bash > ~/.local/share/bash-completion/completions/mercury
  mercury completion zsh > "${fpath[1]}/_mercury"
  mercury completion fish > ~/.config/fish/completions/mercury.fish

SHELL is bash, zsh or fish. Open a new shell afterwards."""

BASH = """\
# Completion of mercury; made by `mercury completion bash`.
_mercury() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD - 1]}} words=""
  case "$previous" in
{values}
  esac
  if [ -z "$words" ]; then
    case "${{COMP_WORDS[*]:1:COMP_CWORD - 1}} " in
{commands}
      *) [ "$COMP_CWORD" -eq 1 ] && words="{names}" ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _mercury mercury
"""
ZSH = "#compdef mercury\nautoload -Uz bashcompinit && bashcompinit\n"


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Args:
        argv: The words behind the command's name: a shell.

    Returns:
        0, or 2 without a shell, where the help is printed.

    Raises:
        ValueError: There is no script for this shell.
    """
    shells = {"bash": bash, "zsh": lambda: ZSH + bash(), "fish": fish}
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0 if argv else 2
    if argv[0] not in shells or len(argv) > 1:
        raise refuse("SHELL", " ".join(argv), nearest(argv[0], list(shells)))
    print(shells[argv[0]](), end="")
    return 0


def options(*command: str) -> list[str]:
    """The options of a command, read from its help.

    Args:
        *command: Its words, such as "bench", "decode".

    Returns:
        With their dashes, in the order of the help.
    """
    from mercury_jax.cli.app import main

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
        main([*command, "--help"])
    return list(dict.fromkeys(re.findall(r"^[│ ]*(?:-\w, )?(--[a-z][\w.-]*)", text.getvalue(), re.MULTILINE)))


def _words() -> dict[str, list[str]]:
    """What may follow each command: its options, or the names of its own commands."""
    from mercury_jax.cli.app import BENCHES, COMMANDS, DATA

    nested = {"bench": list(BENCHES), "data": list(DATA)}
    found = {name: nested.get(name) or options(name) for name in COMMANDS if name != "completion"}
    found["train"] = options("train", "nano")  # the fields of a recipe are options, too
    found |= {f"{name} {what}": options(name, what) for name, names in nested.items() for what in names}
    return found | {"completion": ["bash", "zsh", "fish"]}


def _values() -> dict[str, list[str]]:
    """Names that an option or a command takes."""
    from mercury_jax.decode import rules
    from mercury_jax.decode.defaults import EFFORTS
    from mercury_jax.evaluate import TASKS

    return {
        "--rule": list(rules.ALL),
        "--rules": ["all", *rules.ALL],
        "--effort": list(EFFORTS),
        "eval": list(TASKS),
    }


def bash() -> str:
    """The script for bash, which zsh reads, too."""
    longest_first = sorted(_words().items(), key=lambda pair: -pair[0].count(" "))
    return BASH.format(
        values="\n".join(f'    {name}) words="{" ".join(values)}" ;;' for name, values in _values().items()),
        commands="\n".join(
            f'      "{name} "*) words="{" ".join(words)}" ;;' for name, words in longest_first
        ),
        names=" ".join(name for name in _words() if " " not in name),
    )


def fish() -> str:
    """The script for fish."""
    words = _words()
    names = " ".join(name for name in words if " " not in name)
    lines = [f"complete -c mercury -n __fish_use_subcommand -f -a '{names}'"]
    for name, found in words.items():
        seen = " and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        seen = seen.replace(" and ", "; and ")
        for word in found:
            what = f"-l {word.removeprefix('--')}" if word.startswith("--") else f"-f -a {word}"
            lines.append(f"complete -c mercury -n '{seen}' {what}")
    for name, values in _values().items():
        what = (
            f"-x -l {name.removeprefix('--')}"
            if name.startswith("--")
            else "-n '__fish_seen_subcommand_from eval'"
        )
        lines.append(f"complete -c mercury {what} -a '{' '.join(values)}'")
    return "# Completion of mercury; made by `mercury completion fish`.\n" + "\n".join(lines) + "\n"
