"""`mercury infill`: a text with holes, filled all at once."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mercury_jax.cli import options, show
from mercury_jax.cli.parser import Parser, whole
from mercury_jax.config import refuse

if TYPE_CHECKING:
    from mercury_jax.decode.infill import InfillOutput
    from mercury_jax.types import LM

MORE = """\
examples:
  mercury infill "def area(r):\\n[[24]]\\n    return a" --escapes
  mercury infill --file draft.py                    with holes such as [[16]] in it
  mercury infill "if x {4}:" --mark "{N}"           where [[ ]] is part of the text
  mercury infill "x = [[?]] + 1"                    as many tokens as fit, up to --most

A hole gets exactly as many tokens as it says, an open one ([[?]]) what the model finds likeliest. All
holes are denoised in the same passes, and each sees the text on both of its sides. In a terminal the
filling stands out; piped, it is plain text."""


OPEN = -1  # the width of a hole that may be of any


def parser() -> Parser:
    p = Parser("infill", "Fill the holes of TEMPLATE; [[24]] is a hole of 24 tokens.", MORE)
    p.add_argument(
        "template", nargs="?", metavar="TEMPLATE", help="a text with holes; - reads standard input"
    )
    p.add_argument("--file", metavar="PATH", help="read the template from a file")
    p.add_argument(
        "--mark", default="[[N]]", metavar="MARK", help="what a hole of N tokens looks like (default [[N]])"
    )
    p.add_argument(
        "--most", type=whole, default=32, metavar="N", help="most tokens of an open hole (default 32)"
    )
    options.loaded(p)
    options.text(p)
    options.decoding(p)
    options.temperature(p)
    p.add_argument("--warm", action="store_true", help="fill once before, so that no compilation is timed")
    options.machine(p)
    return p


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv, late=options.knobs)
    options.check(args)
    pieces = split(_template(args), args.mark)
    how = dict(
        seed=args.seed, sampler=options.sampler(args), plan=options.plan(args), temperature=args.temperature
    )
    out = _fill(show.load(args.model, **options.reading(args)), pieces, args.most, args.warm, how)
    if args.json:
        show.emit(_record(out, args))
        return 0
    _print(pieces, out)
    note = "" if args.warm else ", compilation included"
    show.say(show.figures(sum(out.filled), int(out.forwards.sum()), out.seconds, note))
    return 0


def _template(args: argparse.Namespace) -> str:
    if (args.template is None) == (args.file is None):
        raise refuse("TEMPLATE", args.template, "a text, or --file PATH, and not both")
    return options.read(args.template, args.escapes) if args.file is None else options.file(args.file)


def split(template: str, mark: str = "[[N]]") -> list[str | int]:
    """Texts and widths of holes (`OPEN` for one of any width), in order; empty texts are left out."""
    before, n, after = mark.partition("N")
    if not (before and n and after):
        raise refuse("--mark", mark, "N with something on either side, such as [[N]]")
    found = re.split(re.escape(before) + r"(\d+|\?)" + re.escape(after), template)
    if len(found) == 1:
        raise refuse("TEMPLATE", template, f"at least one hole, such as {before}24{after}")
    return [(OPEN if p == "?" else int(p)) if i % 2 else p for i, p in enumerate(found) if p]


def _fill(lm: LM, pieces: Sequence[str | int], most: int, warm: bool, how: dict[str, Any]) -> InfillOutput:
    from mercury_jax.decode.infill import Hole, infill

    context = lm.model.config.context
    for hole in pieces:
        if isinstance(hole, int) and hole != OPEN and not 1 <= hole <= context:
            raise refuse("hole", hole, f"1..{context} tokens: the model's context is {context}")
    parts = [Hole(None if p == OPEN else p, most=most) if isinstance(p, int) else p for p in pieces]
    for _ in range(1 + warm):
        with show.waiting("denoising"):
            out = infill(lm, parts, **how)
    return out


def _record(out: InfillOutput, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "text": out.text,
        "holes": out.holes,
        "tokens": sum(out.filled),
        "forwards": int(out.forwards.sum()),
        "tokens_per_forward": out.tokens_per_forward,
        "seconds": out.seconds,
        "tokens_per_second": out.tokens_per_second,
        "seed": args.seed,
        "compilation_included": not args.warm,
    }


def _print(pieces: Sequence[str | int], out: InfillOutput) -> None:
    if not show.terminal():
        print(out.text)
        return
    from rich.console import Console
    from rich.text import Text

    holes = iter(out.holes)
    shown = Text()
    for piece in pieces:
        filling = isinstance(piece, int)
        shown.append(show.readable(next(holes) if filling else piece), "bold cyan" if filling else "")
    Console(highlight=False).print(shown)
