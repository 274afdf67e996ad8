"""Command lines read by tyro, and the options that several commands share.

A command is a frozen dataclass: its fields are the options, its docstring is the help. `read` turns words into one,
and every mistake into a ValueError of one line that names the option, the value and what is allowed; `app` prints it
and exits with 2. The groups `Loading`, `Decoding` and `Processing` are nested dataclasses whose fields become options
of the command. Rules and logits processors come from the registries of `decode`; `find_rule` adds a user's own. Imports
tyro, but not JAX: `app` imports this module only when a command runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from mercury_jax.cli import show
from mercury_jax.config import Plan, nearest, refuse

if TYPE_CHECKING:
    from mercury_jax.decode.registration import Factory
    from mercury_jax.decode.sampler import LogitsProcessor, Rule, Sampler
    from mercury_jax.types import LM

T = TypeVar("T")


# --- types of fields


def option(metavar: str, *, name: str | None = None) -> Any:
    """Annotation of a field: what stands for its value in the help, and the option's name where it is not the field's.

    A default that is None or empty is not printed: the field's docstring says what happens then.
    """
    hint = lambda default: "" if default in ("None", "", "()") else f"(default: {default})"
    return tyro.conf.arg(metavar=metavar, name=name, help_behavior_hint=hint)


def _numbers(kind: Callable[[str], float], metavar: str, allowed: str) -> Any:
    """How tyro reads numbers, with the words of our errors. The library checks their ranges."""

    def parse(words: list[str]) -> Any:
        [word] = words
        try:
            return kind(word)
        except ValueError:
            raise ValueError(f"is {word!r}; allowed: {allowed}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=parse,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


Int = Annotated[int, _numbers(int, "N", "a whole number")]
OptionalInt = Annotated[int | None, _numbers(int, "N", "a whole number"), option("N")]
Float = Annotated[float, _numbers(float, "X", "a number")]
OptionalFloat = Annotated[float | None, _numbers(float, "X", "a number"), option("X")]
Flag = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]
Escapes = Annotated[bool, tyro.conf.arg(aliases=("-e",), help_behavior_hint="")]
Positional = tyro.conf.Positional
Repeated = tyro.conf.UseAppendAction
Group = tyro.conf.arg(name="")  # of a nested dataclass: its fields are options of the command itself


# --- reading


def read(command: type[T], argv: Sequence[str], prog: str) -> T:
    """Reads the words of a command."""
    found, rest = _parse(command, argv, prog, command.__doc__)
    _refuse_rest(rest, option_names(command), prog)
    return found


def read_with_rule(command: type[T], argv: Sequence[str], prog: str) -> tuple[T, dict[str, float]]:
    """Reads the words of a command that has the options of `Decoding`, and the parameters of its rule.

    Every parameter of a registered rule is an option: `--rule threshold --p 0.8`. The rules are only imported, and with
    them JAX, when `--rule` or an option that is none of the command's own is among the words.
    """
    rule = _rule_word(argv)
    wide = _with_parameters(command, rule) if rule else command
    found, rest = _parse(wide, argv, prog, command.__doc__)
    names = option_names(wide)
    unknown = next((word.split("=")[0] for word in rest if word.startswith("--") and word != "--"), None)
    if unknown is not None and unknown not in names:
        holders = _rules_with(unknown.removeprefix("--").replace("-", "_"))
        if holders and rule is None:
            raise refuse("--rule", None, f"with {unknown} one of {', '.join(holders)}")
        if holders:
            allowed = ", ".join(find_rule(rule or "").params) or "none"
            raise refuse(f"parameter of the rule {rule}", unknown, allowed)
    _refuse_rest(rest, names, prog)
    if rule is None:
        return found, {}
    given = {name: value for name, value in vars(found.parameters).items() if value is not None}
    return found.command, given


def _parse(command: type, argv: Sequence[str], prog: str, about: str | None) -> tuple[Any, list[str]]:
    """(the dataclass, words that no field takes). tyro's error boxes become a ValueError of one line."""
    words = list(argv)
    if {"-h", "--help"} & set(words[: words.index("--")] if "--" in words else words):
        words = ["--help"]  # behind other words tyro leaves out what these have filled in
    # tyro joins the lines of a paragraph unless they are indented.
    first, _, rest = inspect.cleandoc(about or "").partition("\n")
    with errors_in_one_line(prog):
        return tyro.cli(
            command,
            args=words,
            prog=prog,
            description=f"{first}\n{textwrap.indent(rest, '  ')}",
            return_unknown_args=True,
            config=(tyro.conf.FlagCreatePairsOff,),
        )


@contextlib.contextmanager
def errors_in_one_line(prog: str) -> Iterator[None]:
    """Turns an error box of tyro into a ValueError of one line."""
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            yield
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(f"{_one_line(stderr.getvalue())} (`{prog} --help` explains)") from None


def _one_line(box: str) -> str:
    """The message in a box of tyro: behind its title, up to the first rule."""
    words = []
    for line in box.splitlines()[1:]:
        text = line.strip("│| ")
        if text.startswith(("──", "----")):
            if words:  # else it underlines the title
                break
        else:
            words.append(text)
    text = " ".join(filter(None, words))
    missing = re.match(r"Missing from mercury [\w .-]+: (.*)", text)
    if missing:  # "OUT A new folder. (required)", for each of them
        lacking = [
            re.match(r"(\S+) (?:[A-Z]{2,} )?(.*)", x.strip()) for x in missing[1].split(" (required)") if x
        ]
        names = [x[1] for x in lacking if x]
        about = f": {lacking[0][2].rstrip('.')}" if len(names) == 1 and lacking[0] else ""
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} missing{about}"
    text = re.sub(r"^Missing value for argument '(\S+)'\..*", r"\1 needs a value behind it", text)
    text = re.sub(r"^Unrecognized options: (.*)", r"\1: no option takes this value", text)
    choice = re.match(r"invalid choice (.+) for argument '(\S+)'\. Expected one of \((.*)\)", text)
    if choice:
        names = [x.strip(" '") for x in choice[3].split(",")]
        return f"{choice[2]} is {choice[1]}; allowed: {', '.join(x for x in names if x not in ('', 'None'))}"
    text = re.sub(r"invalid literal for int\(\) with base 10: (.*)", r"\1 is no whole number", text)
    text = re.sub(r"could not convert string to float: (.*)", r"\1 is no number", text)
    # A check of a whole dataclass names its field itself.
    text = re.sub(r"^Error parsing ([a-z]\w*): (\w+) is ", r"--\1.\2 is ", text)
    text = re.sub(r"^Error parsing [a-z]\w*: (\w+\.\w+ is )", r"--\1", text)
    text = re.sub(
        r"^Error parsing (\S+): ('.*') is no (whole number|number)$", r"\1 is \2; allowed: a \3", text
    )
    text = re.sub(r"^Error parsing [A-Z]\w*[a-z]\w*: ", "", text)
    return re.sub(r"^Error parsing (\S+): (is )?", lambda m: f"{m[1]} {m[2] or 'is wrong: '}", text)


def _refuse_rest(rest: Sequence[str], options: Sequence[str], prog: str) -> None:
    for word in rest:
        if word.startswith("-") and word not in ("-", "--"):
            name = word.split("=")[0]
            allowed = nearest(name, options)
            raise refuse("option", name, allowed if len(allowed) < 200 else f"what `{prog} --help` lists")
    if rest:
        raise ValueError(f"argument {rest[0]!r} is one too many; `{prog} --help` shows the order")


def option_names(command: type) -> list[str]:
    """The options of a command and of its groups, with their dashes."""
    names = []
    for name, hint in get_type_hints(command, include_extras=True).items():
        marks, kind = getattr(hint, "__metadata__", ()), getattr(hint, "__origin__", hint)
        if dataclasses.is_dataclass(kind):
            names += option_names(cast(type, kind))
        elif Positional not in marks:
            renamed = next((mark.name for mark in marks if getattr(mark, "name", None)), name)
            names.append(f"--{renamed.replace('_', '-')}")
    return names


def _rule_word(argv: Sequence[str]) -> str | None:
    """The value of `--rule` among the words; empty where the value is missing, None without the option."""
    words = list(argv[: argv.index("--")] if "--" in argv else argv)
    for i, word in enumerate(words):
        if word.startswith("--rule="):
            return word.removeprefix("--rule=")
        if word == "--rule":
            return words[i + 1] if i + 1 < len(words) else ""
    return None


def _with_parameters(command: type, rule: str) -> type:
    """A dataclass of the command and an option for each parameter of its rule.

    A parameter whose name is an option of the command stays reachable by `--param`.
    """
    taken, found, fields = option_names(command), find_rule(rule), []
    for name, default in found.params.items():
        if f"--{name.replace('_', '-')}" not in taken:
            about = f"Of the rule {rule}: {found.ranges.get(name, 'a number')}. Default: {default}."
            kind = Annotated[OptionalFloat, tyro.conf.arg(help=about)]
            fields.append((name, kind, dataclasses.field(default=None)))
    parameters = dataclasses.make_dataclass("RuleParameters", fields)
    return dataclasses.make_dataclass(
        "CommandWithRule",
        [("command", Annotated[command, Group]), ("parameters", Annotated[parameters, Group])],
    )


def _rules_with(parameter: str) -> list[str]:
    """The registered rules that have a parameter of this name."""
    from mercury_jax.decode import rules

    return [name for name, make in rules.ALL.items() if parameter in make.params]


def import_user_module(name: str) -> ModuleType:
    """Imports a module of the user's own, by its name or as the path of a file, and a file only once."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    if not path.is_file():
        raise ImportError(f"there is no file {name}")
    title = path.stem if path.stem not in sys.modules else str(path)
    spec = importlib.util.spec_from_file_location(title, path)
    assert spec is not None and spec.loader is not None  # of a name that ends in .py
    module = sys.modules[title] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[title]
        raise
    return module


def find_rule(name: str) -> Factory[..., Rule]:
    """A rule by its registered name, or MODULE:NAME of the user's own, such as "folder/my_rules.py:leftmost"."""
    from mercury_jax.decode import rules

    module, colon, attribute = name.rpartition(":")
    if not colon:
        if name not in rules.ALL:
            allowed = nearest(name, list(rules.ALL)) + "; or MODULE:NAME for a rule of your own"
            raise refuse("--rule", name, allowed)
        return rules.ALL[name]
    try:
        make = getattr(import_user_module(module), attribute)
    except Exception as error:  # the user's own code may raise anything
        reason = f"MODULE:NAME of a rule that can be imported; {type(error).__name__}: {error}"
        raise refuse("--rule", name, reason) from error
    if not hasattr(make, "params"):
        raise refuse("--rule", name, "a function decorated with @mj.rule")
    return make


# --- groups of options


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """How a config.json is read."""

    mask: OptionalInt = None
    """Id of the mask token, where the checkpoint does not name it."""
    ignore_config: Annotated[Repeated[tuple[str, ...]], option("KEY")] = ()
    """Key of config.json that changes no logit, by your word; repeatable."""

    def given(self) -> dict[str, Any]:
        """The options that were given, as arguments of `mercury_jax.load`."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(ConfigOptions):
    """How a checkpoint is read."""

    dtype: Annotated[str | None, option("NAME")] = None
    """Type of parameters and arithmetic. Default: the checkpoint's."""
    quantise: Annotated[str | None, option("KIND")] = None
    """Weight matrices as int8 or fp8, with a scale for each output; int8_dynamic or fp8_dynamic also rounds what they
    multiply."""
    kv: Annotated[str | None, option("KIND")] = None
    """KV cache as int8 or fp8 (a quarter of fp32), 4bit or 3bit (an eighth, a tenth)."""
    adapter: Annotated[str | None, option("FOLDER")] = None
    """LoRA adapter of the model, which is merged: runs/NAME/adapter, or one that PEFT wrote."""
    draft: Annotated[str | None, option("DRAFTER")] = None
    """Block drafter of the model, which drafts what the model verifies: runs/NAME/drafter, or smollm2-drafter; lookup
    drafts what followed the same words before."""

    def load(self, source: str | None, **more: Any) -> LM:
        """The model. `source`: as of `mercury_jax.load`, which has the further arguments `more`."""
        given = self.given()
        folder = given.pop("draft", None)
        lm = show.load(source, **given, **more)
        if folder is None:
            return lm
        from mercury_jax.decode.methods.block_drafter import with_block_drafter

        return with_block_drafter(lm, folder)


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Which model, and how its checkpoint is read."""

    model: Annotated[str | None, option("MODEL")] = None
    """Folder, GGUF file or Hugging Face id of a model. Default: the embedded one."""
    context: OptionalInt = None
    """Longest sequence in tokens. RoPE of the types dynamic and longrope can go beyond the default."""
    checkpoint: Annotated[CheckpointOptions, Group] = dataclasses.field(default_factory=CheckpointOptions)

    def load(self) -> LM:
        """The model."""
        return self.checkpoint.load(self.model, context=self.context)


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Which tokens are accepted in a step, and in how many steps.

    The parameters of a rule are options of their own: `--rule threshold --p 0.8`. `mercury info` lists them.
    """

    rule: Annotated[str | None, option("NAME")] = None
    """Decoding rule, or MODULE:NAME of your own, such as my_rules:leftmost for my_rules.py. Its parameters are options:
    --rule threshold --p 0.8; `mercury info` lists them. Default: the one the model names, else threshold."""
    param: Annotated[Repeated[tuple[str, ...]], option("NAME=X")] = ()
    """A parameter of the rule, for names that another option has; repeatable."""
    block: OptionalInt = None
    """Tokens of a block. Default: the model's."""
    steps: OptionalInt = None
    """Denoising steps of a block. Default: its tokens."""
    lookahead: Int = 0
    """Drafts of future steps that each pass verifies: the same tokens in fewer, wider passes."""
    seed: Int = 0
    """The same seed gives the same text; prompt i uses seed + i."""

    def plan(self) -> Plan:
        """Block, steps and lookahead, as `mj.sample` takes them."""
        return Plan(block=self.block, steps=self.steps, lookahead=self.lookahead)

    def sampler(self, parameters: dict[str, float]) -> Rule | None:
        """The chosen rule with its parameters; None where nothing was chosen, for the model's own."""
        values = dict(parameters)
        for pair in self.param:
            name, equals, value = pair.partition("=")
            if not name or not equals:
                raise refuse("--param", pair, "NAME=X, such as p=0.8")
            try:
                values[name] = float(value)
            except ValueError:
                raise refuse(f"--param {name}", value, "a number") from None
        if self.rule is None:
            if not values:
                return None
            first = next(iter(values))
            holders = ", ".join(_rules_with(first)) or "none: no rule has it"
            raise refuse("--rule", None, f"with --param {first} one of {holders}")
        return find_rule(self.rule)(**values)


@dataclass(frozen=True, kw_only=True)
class Processing:
    """Logits processors and guidance. `mercury info` says what X may be."""

    top_k: OptionalFloat = None
    """Sample among the X most likely tokens."""
    top_p: OptionalFloat = None
    """Sample among the most likely tokens that make up probability X."""
    min_p: OptionalFloat = None
    """Sample among tokens at least X times as likely as the best one."""
    repetition: OptionalFloat = None
    """Divide the logits of tokens that occurred by X; 1 changes nothing."""
    presence: OptionalFloat = None
    """Subtract X from the logits of tokens that the answer contains."""
    frequency: OptionalFloat = None
    """Subtract X for each time that the answer contains a token."""
    bias: Annotated[Repeated[tuple[str, ...]], option("ID=X")] = ()
    """Add X to the logit of a token id; repeatable."""
    guidance: OptionalFloat = None
    """Weight of classifier-free guidance against an empty prompt."""
    negative: Annotated[str | None, option("TEXT")] = None
    """With --guidance: guide against this prompt instead; masked: the prompt with a mask for each token (LLaDA)."""

    def processors(self) -> tuple[LogitsProcessor, ...]:
        """The logits processors of the options that were given. ValueError for a value out of range."""
        from mercury_jax.decode import processors

        names = ("top_k", "top_p", "min_p", "repetition", "presence", "frequency")
        return tuple(processors.ALL[name](x) for name in names if (x := getattr(self, name)) is not None)

    def logit_bias(self) -> dict[int, float]:
        """Token id -> what is added to its logit."""
        table = {}
        for pair in self.bias:
            name, equals, value = pair.partition("=")
            try:
                table[int(name)] = float(value if equals else "none")
            except ValueError:
                raise refuse("--bias", pair, "ID=X, such as 17=-2.5") from None
        return table


def add_processors(sampler: Any, processors: tuple[LogitsProcessor, ...], lm: LM) -> Rule | Sampler | None:
    """A sampler with further logits processors behind its own; a sampler of None stands for the model's own."""
    if not processors:
        return sampler
    from mercury_jax.decode import defaults
    from mercury_jax.decode.sampler import check_sampler

    found = check_sampler(defaults.default_sampler(lm) if sampler is None else sampler)
    return found._replace(processors=(*found.processors, *processors))


def check_request(
    seed: int, temperature: float | None, effort: str | None = None, logprobs: int | None = None
) -> None:
    """Refuses what no model takes, before one is loaded. ValueError names the value and what is allowed."""
    from mercury_jax.decode.defaults import find_effort
    from mercury_jax.decode.inputs import check_logprobs, check_seed, check_temperature

    check_seed(seed)
    if temperature is not None:
        check_temperature(temperature)
    find_effort(effort)
    check_logprobs(logprobs)


def require(*checks: tuple[object, str, object, str]) -> None:
    """Refuses the first value that does not fit: (whether it fits, its option, the value, what is allowed)."""
    for fits, name, value, allowed in checks:
        if not fits:
            raise refuse(name, value, allowed)


# --- texts and files


def read_text(name: str, word: str, escapes: bool) -> str:
    r"""A text of the command line; "-" reads standard input, without its last line break.

    Without `escapes`, a word with `\n` or `\t` in it is refused: a line break was meant more often than not.
    """
    if word == "-":
        word = sys.stdin.read().removesuffix("\n")
    elif not escapes and (found := re.search(r"\\[nt]", word)):
        raise ValueError(
            f"{name} has {found[0]} in it: -e (--escapes) reads {found[0]} as a "
            f"{'line break' if found[0] == chr(92) + 'n' else 'tab'}; for a backslash itself, give -e and write "
            "it twice"
        )
    return unescape(word) if escapes else word


def unescape(text: str) -> str:
    r"""The text with `\n`, `\t` and `\\` read as Python reads them."""
    return re.sub(r"\\([nt\\])", lambda m: {"n": "\n", "t": "\t", "\\": "\\"}[m[1]], text)


def read_text_or_file(name: str, text: str | None, file: str | None, escapes: bool) -> str:
    """The text of an argument or of `--file`."""
    if (text is None) == (file is None):
        raise refuse(name, text, "a text, or --file PATH, and not both")
    if file is None:
        return read_text(name, text or "", escapes)
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise refuse("--file", file, f"a file that can be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise refuse("--file", file, "a text file in UTF-8") from None
