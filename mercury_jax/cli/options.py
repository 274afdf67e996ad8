"""Options that several commands share, and the values that are made of them."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mercury_jax.cli.parser import Parser, number, whole
from mercury_jax.config import Plan, nearest, refuse

if TYPE_CHECKING:
    from mercury_jax.decode.parts import Part
    from mercury_jax.types import LM

KNOB = "knob_"  # prefix of the knobs' names in a namespace


def model(parser: Parser) -> None:
    parser.add_argument(
        "--model", metavar="MODEL", help="folder or Hugging Face id of a model (default: the embedded one)"
    )


def loaded(parser: Parser) -> None:
    """The model, and how its checkpoint is read."""
    model(parser)
    group = parser.add_argument_group(
        "loading", "How a checkpoint is read; the embedded model needs none of it."
    )
    group.add_argument(
        "--dtype", metavar="NAME", help="of parameters and arithmetic (default: the checkpoint's)"
    )
    group.add_argument("--quantise", metavar="KIND", help="matrices as int8 or fp8, a scale for each output")
    group.add_argument(
        "--kv",
        metavar="KIND",
        help="keys and values as int8, 4bit or 3bit: a quarter, an eighth, a tenth of fp32",
    )
    mask(group)


def reading(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `load` that `loaded` reads; those that were not given stay out."""
    asked = {name: getattr(args, name) for name in ("dtype", "quantise", "kv", "mask")}
    return {name: value for name, value in asked.items() if value is not None}


def mask(parser: Any) -> None:
    parser.add_argument(
        "--mask", type=whole, metavar="ID", help="the mask id, where the checkpoint does not say it"
    )


def machine(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def decoding(parser: Parser, seed: str = "same seed, same text (default 0)") -> None:
    """How to decode: rule, knobs, plan, temperature, seed."""
    group = parser.add_argument_group(
        "decoding",
        "A rule says which tokens a pass may settle; `mercury info` lists the rules, and what their knobs may be. "
        "Each knob is an option too: --rule threshold --p 0.8 is --rule threshold --knob p=0.8.",
    )
    group.add_argument(
        "--rule", metavar="NAME", help="decoding rule (default: the one the model names, else threshold)"
    )
    group.add_argument(
        "--knob", metavar="NAME=VALUE", action="append", default=[], help="a number of the rule"
    )
    group.add_argument("--block", type=whole, metavar="N", help="tokens of a block (default: the model's)")
    group.add_argument(
        "--steps", type=whole, metavar="N", help="passes a block may take (default: its tokens)"
    )
    group.add_argument("--seed", type=whole, default=0, metavar="N", help=seed)


def temperature(parser: Parser) -> None:
    parser.add_argument(
        "--temperature",
        type=number,
        metavar="T",
        help="of the drawn tokens; 0: the likeliest (default: the rule's)",
    )


def shaping(parser: Parser) -> None:
    """Penalties, truncation, bias, guidance."""
    group = parser.add_argument_group(
        "shaping",
        "What is done to the model's probabilities before a rule reads them; `mercury info` lists what X may be.",
    )
    for name, about in SHAPERS.items():
        group.add_argument("--" + name.replace("_", "-"), type=number, metavar="X", help=about)
    group.add_argument(
        "--bias",
        metavar="ID=X",
        action="append",
        default=[],
        help="add X to the logit of a token id; repeatable",
    )
    group.add_argument(
        "--guidance", type=number, metavar="W", help="classifier-free guidance against no prompt"
    )
    group.add_argument("--negative", metavar="TEXT", help="with --guidance: against this prompt instead")


SHAPERS = {
    "top_k": "draw among the X likeliest tokens",
    "top_p": "draw among the likeliest tokens that make up probability X",
    "min_p": "draw among tokens at least X times as likely as the best",
    "repetition": "divide the logits of tokens that occurred by X (1: nothing)",
    "presence": "subtract X from tokens that the answer holds",
    "frequency": "subtract X for each time that the answer holds a token",
}


def shapers(args: argparse.Namespace) -> tuple[Part, ...]:
    """The shapers that were asked for. ValueError for a value out of range, which needs no model to be told."""
    from mercury_jax.decode import shape

    asked = [(name, getattr(args, name)) for name in SHAPERS if getattr(args, name) is not None]
    return tuple(getattr(shape, name)(value) for name, value in asked)


def shaped(chosen: Any, more: tuple[Part, ...], lm: LM) -> Any:
    """The sampler (None: the model's own) with more shapers; as it was where there are none."""
    from mercury_jax.decode import defaults
    from mercury_jax.decode.parts import checked_sampler

    if not more:
        return chosen
    chosen = checked_sampler(defaults.sampler(lm) if chosen is None else chosen)
    return chosen._replace(shape=(*chosen.shape, *more))


def check(args: argparse.Namespace) -> None:
    """Refuse a seed or a temperature that no model takes, before one is loaded."""
    from mercury_jax.decode.program import checked_temperature
    from mercury_jax.decode.prompts import check_seed

    check_seed(args.seed)
    if args.temperature is not None:
        checked_temperature(args.temperature)


def bias(args: argparse.Namespace) -> dict[int, float]:
    """The pairs of --bias."""
    table = {}
    for pair in args.bias:
        name, equals, value = pair.partition("=")
        try:
            table[int(name)] = float(value)
        except ValueError:
            raise refuse("--bias", pair, "ID=X, such as 17=-2.5") from None
        if not equals:
            raise refuse("--bias", pair, "ID=X, such as 17=-2.5")
    return table


def knobs(parser: Parser) -> None:
    """Every knob of every rule as an option; one whose name is taken stays reachable by --knob."""
    from mercury_jax.decode import rules

    taken = {o for a in parser._actions for o in a.option_strings}
    for name in dict.fromkeys(k for rule in rules.ALL.values() for k in rule.knobs):
        option = "--" + name.replace("_", "-")
        if option not in taken:
            parser.add_argument(option, dest=KNOB + name, help=argparse.SUPPRESS)


def sampler(args: argparse.Namespace) -> Any:
    """The rule with its knobs; None where nothing was chosen. ValueError names the nearest rule or knob."""
    from mercury_jax.decode import rules

    given = [pair.partition("=") for pair in args.knob]
    for pair, (name, equals, _) in zip(args.knob, given, strict=True):
        if not name or not equals:
            raise refuse("--knob", pair, "NAME=VALUE, such as p=0.8")
    values = {name: value for name, _, value in given}
    values |= {k.removeprefix(KNOB): v for k, v in vars(args).items() if k.startswith(KNOB) and v is not None}
    if args.rule is None and not values:
        return None
    if args.rule is None:
        # The model's own rule is not known before it is loaded, and its knobs may mean something else.
        knob = next(iter(values))
        holders = [name for name, rule in rules.ALL.items() if knob in getattr(rule, "knobs", {})]
        raise refuse(
            "--rule", None, f"a rule beside --{knob}: {', '.join(holders) or 'none has such a knob'}"
        )
    chosen = args.rule
    if chosen not in rules.ALL:
        raise refuse("--rule", chosen, nearest(chosen, list(rules.ALL)))
    rule = rules.ALL[chosen]
    for name in values:
        if name not in rule.knobs:
            has = nearest(name, list(rule.knobs)) if rule.knobs else f"none: the rule {chosen} has no knobs"
            raise refuse(f"knob of the rule {chosen}", name, has)
    return rule(**{name: _knob(name, text) for name, text in values.items()})


def _knob(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise refuse(f"knob {name}", text, "a number") from None


def plan(args: argparse.Namespace) -> Plan:
    return Plan(block=args.block, steps=args.steps)


def text(parser: Parser) -> None:
    parser.add_argument(
        "-e", "--escapes", action="store_true", help=r"read \n, \t and \\ in the text as Python would"
    )


def read(word: str, escapes: bool) -> str:
    """A text of the command line; `-` is standard input, whose last line end is left off."""
    if word == "-":
        word = sys.stdin.read().removesuffix("\n")
    if not escapes:
        return word
    return re.sub(r"\\([nt\\])", lambda m: {"n": "\n", "t": "\t", "\\": "\\"}[m[1]], word)


def file(path: str) -> str:
    """The text of a file, as it is."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise refuse("--file", path, f"a file that can be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise refuse("--file", path, "a text file in UTF-8") from None


def writable(option: str, path: str | None) -> None:
    """Refuse a file that could not be written, before hours of work; what it holds stays so far."""
    if path is None:
        return
    new = not os.path.exists(path)
    try:
        open(path, "a", encoding="utf-8").close()
    except OSError as error:
        raise refuse(option, path, f"a file that can be written ({error.strerror})") from None
    if new:
        os.remove(path)
