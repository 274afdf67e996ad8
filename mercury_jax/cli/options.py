"""Options that several commands share, and the values that are made of them."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from mercury_jax.cli.parser import Parser, nearest, number, whole
from mercury_jax.config import Plan, refuse

KNOB = "knob_"  # prefix of the knobs' names in a namespace


def model(parser: Parser) -> None:
    parser.add_argument("--model", metavar="DIR", help="folder of a saved model (default: the embedded one)")


def machine(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def decoding(parser: Parser, seed: str = "same seed, same text (default 0)") -> None:
    """How to decode: rule, knobs, plan, temperature, seed."""
    group = parser.add_argument_group(
        "decoding",
        "A rule says which tokens a pass may settle; `mercury info` lists the rules and their knobs. "
        "Each knob is an option too: --p 0.8 is --knob p=0.8.",
    )
    group.add_argument("--rule", metavar="NAME", help="decoding rule (default threshold)")
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
    chosen = args.rule or "threshold"
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
