"""`mercury edit`: refine a text in place."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mercury_jax.cli import options, show
from mercury_jax.cli.parser import Parser
from mercury_jax.config import refuse

if TYPE_CHECKING:
    from mercury_jax.decode.edit import EditOutput
    from mercury_jax.types import LM

MORE = """\
examples:
  mercury edit "retrun x"                            the model replaces what it would not have written
  mercury edit "return x + y" --span "x + y"         write that piece anew, hold the rest
  mercury edit "1243\\n4312\\n3421\\n2134" --chat "1200\\n4302\\n3401\\n0004" --escapes
  mercury edit --file draft.py --rule editing

The number of tokens stays. Without --span the default rule is blind_editing, which asks the model for each
token with that token left out. In a terminal what changed stands out."""


def parser() -> Parser:
    p = Parser("edit", "Refine TEXT in place: every pass looks at all of it.", MORE)
    p.add_argument("text", nargs="?", metavar="TEXT", help="a text; - reads standard input")
    p.add_argument("--file", metavar="PATH", help="read the text from a file")
    p.add_argument(
        "--span", action="append", metavar="PIECE", help="a piece of TEXT to write anew; repeatable"
    )
    p.add_argument("--prompt", metavar="TEXT", help="what stands before TEXT and never changes")
    p.add_argument("--chat", metavar="TEXT", help="the user's message that TEXT answers")
    options.loaded(p)
    options.text(p)
    options.decoding(p)
    options.temperature(p)
    options.machine(p)
    return p


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv, late=options.knobs)
    options.check(args)
    if (args.text is None) == (args.file is None):
        raise refuse("TEXT", args.text, "a text, or --file PATH, and not both")
    text = options.read(args.text, args.escapes) if args.file is None else options.file(args.file)
    spans = None if args.span is None else [options.read(s, args.escapes) for s in args.span]
    how = dict(
        prompt=_before(args), spans=spans, seed=args.seed, sampler=options.sampler(args), plan=options.plan(args),
        temperature=args.temperature,
    )  # fmt: skip
    out = _edit(show.load(args.model, **options.reading(args)), text, how)
    if args.json:
        show.emit(_record(out))
    else:
        _print(out)
        show.say(
            f"{len(out.changes[0])} tokens changed in {int(out.forwards[0])} forwards, {out.seconds:.2f} s"
        )
    return 0


def _before(args: argparse.Namespace) -> Any:
    if args.chat is not None and args.prompt is not None:
        raise refuse("--chat", args.chat, "--chat or --prompt, and not both")
    if args.chat is not None:
        return [{"role": "user", "content": options.read(args.chat, args.escapes)}]
    return None if args.prompt is None else options.read(args.prompt, args.escapes)


def _edit(lm: LM, text: str, how: dict[str, Any]) -> EditOutput:
    from mercury_jax.decode.edit import edit

    with show.waiting("editing"):
        return edit(lm, text, **how)


def _record(out: EditOutput) -> dict[str, Any]:
    return {
        "text": out.text,
        "changes": [{"at": c.at, "before": c.before, "after": c.after} for c in out.changes[0]],
        "tokens": len(out.tokens[0]),
        "forwards": int(out.forwards[0]),
        "seconds": out.seconds,
    }


def _print(out: EditOutput) -> None:
    print(show.readable(out.text) if show.terminal() else out.text)
    for change in out.changes[0]:
        show.say(f"  token {change.at}: {change.before!r} -> {change.after!r}")
