"""`mercury infill`: a text with holes, filled all at once; `mercury edit`: a text that is refined in place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import (
    Decoding,
    Escapes,
    Flag,
    Group,
    Int,
    Loading,
    OptionalFloat,
    Positional,
    Repeated,
    option,
)
from mercury_jax.config import count, refuse
from mercury_jax.viz import readable

if TYPE_CHECKING:
    from mercury_jax.decode.infill import InfillOutput


@dataclass(frozen=True, kw_only=True)
class Infill:
    r"""Fill the holes of TEMPLATE; [[24]] is a hole of 24 tokens.

    examples:
      mercury infill "def area(r):\n[[24]]\n    return a" --escapes
      mercury infill --file draft.py              with holes such as [[16]]
      mercury infill "if x {4}:" --mark "{N}"     where the text contains [[ ]]
      mercury infill "x = [[?]] + 1"              as many tokens as are likely

    A hole gets exactly as many tokens as it says, [[?]] the most likely number
    of tokens up to --most. All holes are denoised in the same steps, and each
    sees the text on both sides. A terminal highlights what was filled in.
    """

    template: Annotated[Positional[str | None], option("TEMPLATE")] = None
    """A text with holes; - reads standard input."""
    file: Annotated[str | None, option("PATH")] = None
    """Read the template from a file."""
    mark: Annotated[str, option("MARK")] = "[[N]]"
    """What a hole of N tokens looks like."""
    most: Int = 32
    """Most tokens of a hole [[?]]."""
    escapes: Escapes = False
    r"""Read \n, \t and \\ as Python does in TEMPLATE (standard input, too); a --file is taken as it is."""
    temperature: OptionalFloat = None
    """Sampling temperature; 0 takes the most likely token. Default: the rule's."""
    warm: Flag = False
    """Fill once before, so that compilation is not timed."""
    json: Flag = False
    """Print one JSON object."""
    decoding: Annotated[Decoding, Group] = field(default_factory=Decoding)
    loading: Annotated[Loading, Group] = field(default_factory=Loading)


OPEN = -1  # the width of a hole whose length the model chooses


def run(argv: Sequence[str]) -> int:
    """Runs `mercury infill`; returns its exit code."""
    args, parameters = arguments.read_with_rule(Infill, argv, "mercury infill")
    arguments.check_request(args.decoding.seed, args.temperature)
    template = arguments.read_text_or_file("TEMPLATE", args.template, args.file, args.escapes)
    pieces = split(template, args.mark)
    out = _fill(args, pieces, args.decoding.sampler(parameters))
    if args.json:
        show.emit({
            "text": out.text, "holes": out.holes, "tokens": sum(out.filled), "forwards": int(out.forwards.sum()),
            "tokens_per_forward": out.tokens_per_forward, "seconds": out.seconds,
            "tokens_per_second": out.tokens_per_second, "seed": args.decoding.seed,
            "compilation_included": not args.warm,
        })  # fmt: skip
        return 0
    _print(pieces, out)
    note = "" if args.warm else ", compilation included"
    show.say(show.figures(sum(out.filled), int(out.forwards.sum()), out.seconds, note))
    return 0


def split(template: str, mark: str = "[[N]]") -> list[str | int]:
    """Splits a template at its holes: texts and lengths in order, `OPEN` for a hole of any length.

    `mark` is what a hole looks like, with N in the place of its length.
    """
    before, n, after = mark.partition("N")
    if not (before and n and after):
        raise refuse("--mark", mark, "N with something on either side, such as [[N]]")
    found = re.split(re.escape(before) + r"(\d+|\?)" + re.escape(after), template)
    if len(found) == 1:
        wrong = re.search(f"{re.escape(before)}.*?{re.escape(after)}", template)
        raise ValueError(
            f"TEMPLATE has no hole{f'; {wrong[0]} is none' if wrong else ''}: write {before}24{after} for 24 tokens, "
            f"{before}?{after} for as many as are likely"
        )
    # re.split alternates text and the group of the pattern.
    if any(p != "?" and int(p) == 0 for p in found[1::2]):
        raise refuse("hole", 0, f"1 token or more; {before}?{after} for as many as are likely")
    return [(OPEN if p == "?" else int(p)) if i % 2 else p for i, p in enumerate(found) if p]


def _fill(args: Infill, pieces: Sequence[str | int], sampler: Any) -> InfillOutput:
    from mercury_jax.decode.infill import Hole, infill

    lm = args.loading.load()
    context = lm.model.config.context
    for hole in pieces:
        if isinstance(hole, int) and hole != OPEN and not 1 <= hole <= context:
            raise refuse("hole", hole, f"1..{context} tokens: the model's context is {context}")
    parts = [Hole(None if p == OPEN else p, most=args.most) if isinstance(p, int) else p for p in pieces]
    plan, seed = args.decoding.plan(), args.decoding.seed
    for _ in range(1 + args.warm):
        with show.progress(text="denoising"):
            out = infill(lm, parts, seed=seed, sampler=sampler, plan=plan, temperature=args.temperature)
    return out


def _print(pieces: Sequence[str | int], out: InfillOutput) -> None:
    """The text; in a terminal with the filled holes highlighted."""
    if not show.terminal():
        print(out.text)
        return
    from rich.console import Console
    from rich.text import Text

    holes, shown = iter(out.holes), Text()
    for piece in pieces:
        hole = isinstance(piece, int)
        shown.append(readable(next(holes) if hole else piece), "bold cyan" if hole else "")
    Console(highlight=False).print(shown)


# --- mercury edit


@dataclass(frozen=True, kw_only=True)
class Edit:
    r"""Refine TEXT in place: every step sees all of it.

    examples:
      mercury edit "1243\n4312\n3421\n2124" --escapes \
          --chat "0200\n4302\n3401\n0004"     correct the answer to a message
      mercury edit "if not isinstance(x, int)\n    return x" --escapes
                                        the model chooses what to replace
      mercury edit "def __init__(self, name):\n    self.x = name" --escapes \
          --span x                      rewrite this span only
      mercury edit --file draft.py --rule editing

    The number of tokens stays. Without --span the default rule is
    blind_editing, which predicts each token with that token masked. Changes are
    listed on standard error.
    """

    text: Annotated[Positional[str | None], option("TEXT")] = None
    """A text; - reads standard input."""
    file: Annotated[str | None, option("PATH")] = None
    """Read the text from a file."""
    span: Annotated[Repeated[tuple[str, ...]], option("TEXT")] = ()
    """A span of TEXT to rewrite; repeatable."""
    prompt: Annotated[str | None, option("TEXT")] = None
    """What precedes TEXT and never changes."""
    chat: Annotated[str | None, option("TEXT")] = None
    """The user's message that TEXT answers."""
    escapes: Escapes = False
    r"""Read \n, \t and \\ as Python does in TEXT (standard input, too), --prompt, --chat and --span; a --file is taken
    as it is."""
    temperature: OptionalFloat = None
    """Sampling temperature; 0 takes the most likely token. Default: the rule's."""
    json: Flag = False
    """Print one JSON object."""
    decoding: Annotated[Decoding, Group] = field(default_factory=Decoding)
    loading: Annotated[Loading, Group] = field(default_factory=Loading)


def run_edit(argv: Sequence[str]) -> int:
    """Runs `mercury edit`; returns its exit code."""
    args, parameters = arguments.read_with_rule(Edit, argv, "mercury edit")
    arguments.check_request(args.decoding.seed, args.temperature)
    text = arguments.read_text_or_file("TEXT", args.text, args.file, args.escapes)
    if args.chat is not None and args.prompt is not None:
        raise refuse("--chat", args.chat, "--chat or --prompt, and not both")
    prompt: Any = args.prompt if args.chat is None else args.chat
    if prompt is not None:
        prompt = arguments.read_text("--prompt" if args.chat is None else "--chat", prompt, args.escapes)
    if args.chat is not None:
        prompt = [{"role": "user", "content": prompt}]
    how: dict[str, Any] = dict(
        prompt=prompt, spans=[arguments.read_text("--span", s, args.escapes) for s in args.span] or None,
        seed=args.decoding.seed, sampler=args.decoding.sampler(parameters), plan=args.decoding.plan(),
        temperature=args.temperature,
    )  # fmt: skip
    lm = args.loading.load()
    from mercury_jax.decode.edit import edit

    with show.progress(text="editing"):
        out = edit(lm, text, **how)
    changes, nfe = out.changes[0], int(out.forwards[0])
    if args.json:
        found = [{"at": c.at, "before": c.before, "after": c.after} for c in changes]
        tokens = len(out.tokens[0])
        show.emit(dict(text=out.text, changes=found, tokens=tokens, forwards=nfe, seconds=out.seconds))
        return 0
    print(readable(out.text) if show.terminal() else out.text)
    for change in changes:
        show.say(f"  token {change.at}: {change.before!r} -> {change.after!r}")
    changed, passes = count(len(changes), "token"), count(nfe, "forward pass")
    show.say(f"{changed} changed in {passes}, {out.seconds:.2f} s")
    return 0
