"""`mercury data answers`: a model's own greedy answers to prompts, for the training of a drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, Group, Int, Loading, OptionalInt, Positional, option


@dataclass(frozen=True, kw_only=True)
class DataAnswers:
    """Write a model's own greedy answers to the prompts of a file.

    examples:
      mercury data answers gsm8k.jsonl answers.jsonl --field question
             --model HuggingFaceTB/SmolLM2-135M-Instruct
      mercury data answers chats.jsonl answers.jsonl --model MODEL --limit 1000

    PROMPTS has a JSON object a line: with "messages", of which the last answer
    is left out, or with a text under --field. The lines that are written are
    chats, on which a recipe trains with --chats. Run again, the command goes on
    behind the last answer.
    """

    prompts: Annotated[Positional[str], option("PROMPTS")]
    """A JSONL file."""
    out: Annotated[Positional[str], option("OUT")]
    """A new file, or one that this command has begun."""
    field: Annotated[str, option("NAME")] = "messages"
    """Key of the prompt in each line."""
    limit: OptionalInt = None
    """Number of lines to answer. Default: all."""
    max_tokens: Int = 256
    """Most tokens of an answer."""
    batch: Int = 16
    """Prompts that are answered together."""
    loading: Annotated[Loading, Group] = dataclasses.field(default_factory=Loading)
    json: Flag = False
    """Print one JSON object."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args = arguments.read(DataAnswers, argv, "mercury data answers")
    from mercury_jax.rl.answers import conversations, write_answers

    prompts = conversations(args.prompts, args.field)[: args.limit]
    lm = args.loading.load()
    with show.progress("count", f"answering into {args.out}", total=len(prompts)) as update:
        kept = write_answers(
            lm, prompts, args.out, max_tokens=args.max_tokens, batch=args.batch,
            progress=lambda done: update(advance=done),
        )  # fmt: skip
    if args.json:
        show.emit({"answers": kept, "prompts": len(prompts), "out": args.out})
    else:
        show.say(f"{args.out}: {kept} answers to {len(prompts)} prompts")
    return 0
