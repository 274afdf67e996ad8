"""`mercury completion`: a script that completes commands, options and their values, names of recipes and tasks.

The options are those that the help of each command lists, so that no second list can differ from it.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence

from mercury_jax.config import nearest, refuse

HELP = """usage: mercury completion SHELL

Print a script that completes commands, options, rules, recipes and tasks with the Tab key.

examples:
  mercury completion bash > ~/.local/share/bash-completion/completions/mercury
  mercury completion zsh > "${fpath[1]}/_mercury"
  mercury completion fish > ~/.config/fish/completions/mercury.fish

SHELL is bash, zsh or fish. Open a new shell afterwards."""

BASH = """\
# Completion of mercury; made by `mercury completion bash`.
_mercury() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD - 1]}} words="" rule="" i
  if [ "$current" = "=" ]; then  # bash takes --rule=NAME apart at the =
    current=""
  elif [ "$previous" = "=" ]; then
    previous=${{COMP_WORDS[COMP_CWORD - 2]}}
  fi
  case "$previous" in
    {folders})
      local IFS=$'\\n'
      COMPREPLY=($(compgen -d -- "$current"))
      compopt -o filenames 2>/dev/null
      return 0 ;;
{values}
  esac
  if [ -z "$words" ] && [ "${{current#-}}" = "$current" ]; then
    case "$previous" in
{arguments}
    esac
  fi
  if [ -z "$words" ]; then
    case "${{COMP_WORDS[*]:1:COMP_CWORD - 1}} " in
{commands}
      *) [ "$COMP_CWORD" -eq 1 ] && words="{names}" ;;
    esac
    for ((i = 1; i < COMP_CWORD; i++)); do
      if [ "${{COMP_WORDS[i]}}" = "--rule" ]; then
        rule=${{COMP_WORDS[i + 1]}}
        [ "$rule" = "=" ] && rule=${{COMP_WORDS[i + 2]}}
      fi
    done
    case "$rule" in
{parameters}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _mercury mercury
"""
ZSH = "#compdef mercury\nautoload -Uz bashcompinit && bashcompinit\n"


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    shells = {"bash": bash, "zsh": lambda: ZSH + bash(), "fish": fish}
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0 if argv else 2
    if argv[0] not in shells or len(argv) > 1:
        raise refuse("SHELL", " ".join(argv), nearest(argv[0], list(shells)))
    print(shells[argv[0]](), end="")
    return 0


def options_of(*command: str) -> list[str]:
    """The options of a command, read from its help."""
    from mercury_jax.cli.app import main

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
        main([*command, "--help"])
    return list(dict.fromkeys(re.findall(r"^[│ ]*(?:-\w, )?(--[a-z][\w.-]*)", text.getvalue(), re.MULTILINE)))


def _words() -> dict[str, list[str]]:
    """What may follow each command: its options, or the names of its own commands."""
    from mercury_jax.cli.app import BENCHES, COMMANDS, DATA

    nested = {"bench": list(BENCHES), "data": list(DATA)}
    found = {name: nested.get(name) or options_of(name) for name in COMMANDS if name != "completion"}
    found["train"] += options_of("train", "nano")  # the fields of a recipe are options, too
    found |= {f"{name} {what}": options_of(name, what) for name, names in nested.items() for what in names}
    return found | {"completion": ["bash", "zsh", "fish"]}


FOLDERS = ("--model", "--adapter")  # options whose value is most often a folder


def _values() -> dict[str, list[str]]:
    """Names that an option takes."""
    from mercury_jax.decode import rules
    from mercury_jax.decode.defaults import EFFORTS
    from mercury_jax.hub.family import FLOATS
    from mercury_jax.models.cache import KV_KINDS
    from mercury_jax.models.weight_quant import FORMATS

    return {
        "--rule": list(rules.ALL),
        "--rules": ["all", *rules.ALL],
        "--effort": list(EFFORTS),
        "--dtype": list(FLOATS),
        "--quantise": list(FORMATS),
        "--kv": list(KV_KINDS),
    }


def _arguments() -> dict[str, list[str]]:
    """Names that a command takes as its first argument."""
    from mercury_jax.evaluate import TASKS
    from mercury_jax.training import packaged_recipes

    recipes = list(packaged_recipes())
    return {"eval": list(TASKS), "train": recipes, "init": recipes}


def _parameters() -> dict[str, list[str]]:
    """Name of a rule -> the options of its parameters."""
    from mercury_jax.decode import rules

    return {
        name: ["--" + parameter.replace("_", "-") for parameter in make.params]
        for name, make in rules.ALL.items()
        if make.params
    }


def bash() -> str:
    """The script for bash, which zsh reads, too."""
    longest_first = sorted(_words().items(), key=lambda pair: -pair[0].count(" "))
    cases = lambda found: "\n".join(
        f'    {name}) words="{" ".join(words)}" ;;' for name, words in found.items()
    )
    return BASH.format(
        folders="|".join(FOLDERS),
        values=cases(_values()),
        arguments=cases(_arguments()),
        commands="\n".join(
            f'      "{name} "*) words="{" ".join(words)}" ;;' for name, words in longest_first
        ),
        names=" ".join(name for name in _words() if " " not in name),
        parameters="\n".join(
            f'    {name}) words="$words {" ".join(options)}" ;;' for name, options in _parameters().items()
        ),
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
        lines.append(f"complete -c mercury -x -l {name.removeprefix('--')} -a '{' '.join(values)}'")
    for name in FOLDERS:
        option = name.removeprefix("--")
        lines.append(f"complete -c mercury -x -l {option} -a '(__fish_complete_directories)'")
    for name, values in _arguments().items():
        seen = f"'__fish_seen_subcommand_from {name}'"
        lines.append(f"complete -c mercury -n {seen} -a '{' '.join(values)}'")
    for rule, options in _parameters().items():
        chosen = f'string match -qr -- "--rule[ =]{rule} " (commandline -pc)'
        for option in options:
            lines.append(f"complete -c mercury -n '{chosen}' -x -l {option.removeprefix('--')}")
    return "# Completion of mercury; made by `mercury completion fish`.\n" + "\n".join(lines) + "\n"
