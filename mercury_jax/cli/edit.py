"""`mercury edit`: refine a text in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import (
    Decoding,
    Escapes,
    Flag,
    Group,
    Loading,
    OptionalFloat,
    Positional,
    Repeated,
    option,
)
from mercury_jax.config import refuse


@dataclass(frozen=True, kw_only=True)
class Edit:
    r"""Refine TEXT in place: every step sees all of it.

    examples:
      mercury edit "retrun x"                   the model chooses what to replace
      mercury edit "return x + y" --span "x + y"        rewrite this span only
      mercury edit "1243\n4312\n3421\n2134" --escapes \
          --chat "1200\n4302\n3401\n0004"
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
    r"""Read \n, \t and \\ in the texts as Python does."""
    temperature: OptionalFloat = None
    """Sampling temperature; 0 takes the most likely token. Default: the rule's."""
    json: Flag = False
    """Print one JSON object."""
    decoding: Annotated[Decoding, Group] = field(default_factory=Decoding)
    loading: Annotated[Loading, Group] = field(default_factory=Loading)


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ValueError: A bad option, before a model is loaded.
    """
    args, parameters = arguments.read_with_rule(Edit, argv, "mercury edit")
    arguments.check_request(args.decoding.seed, args.temperature)
    text = arguments.read_text_or_file("TEXT", args.text, args.file, args.escapes)
    if args.chat is not None and args.prompt is not None:
        raise refuse("--chat", args.chat, "--chat or --prompt, and not both")
    prompt: Any = args.prompt if args.chat is None else args.chat
    if prompt is not None:
        prompt = arguments.read_text(prompt, args.escapes)
    if args.chat is not None:
        prompt = [{"role": "user", "content": prompt}]
    how: dict[str, Any] = dict(
        prompt=prompt, spans=[arguments.read_text(s, args.escapes) for s in args.span] or None,
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
    print(show.readable(out.text) if show.terminal() else out.text)
    for change in changes:
        show.say(f"  token {change.at}: {change.before!r} -> {change.after!r}")
    show.say(f"{len(changes)} tokens changed in {nfe} forward passes, {out.seconds:.2f} s")
    return 0
