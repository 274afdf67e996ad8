"""`mercury eval`: tasks whose answers can be checked, each with its count, interval and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from mercury_jax import compilation
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import (
    Decoding,
    Escapes,
    Flag,
    Group,
    Int,
    Loading,
    OptionalInt,
    Positional,
    option,
)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure a model on each TASK.

    examples:
      mercury eval sudoku4 --limit 64
      mercury eval sudoku4 add3 --rule confidence       one token per step
      mercury eval sudoku4 --file test.jsonl --dump answers.jsonl --json
      mercury eval exact --file questions.jsonl         a task of your own

    `mercury info` lists the tasks. exact asks each "input" of --file, one
    {"input", "output"} a line, and counts the answers equal to "output". With
    another task the lines are problems of its kind. GSM8K, HumanEval and other
    published sets: python -m mercury_jax.evaluate.harness (lm-evaluation-harness).
    --dump writes one {"task", "input", "prediction", "correct", "forwards", ...}
    a line, in the same order. --seed draws the questions, and the tokens where
    the rule samples.
    """

    task: Annotated[Positional[tuple[str, ...]], option("TASK")] = ()
    """sudoku4, add3, code-bpb, ..."""
    file: Annotated[str | None, option("X.jsonl")] = None
    """Read the questions from this file instead of drawing held-out ones."""
    split: Literal["test", "validation"] = "test"
    """Which held-out questions: test for figures, validation for choosing settings."""
    dump: Annotated[str | None, option("Y.jsonl")] = None
    """Write every question with its prediction."""
    limit: OptionalInt = None
    """How many questions. Default: the task's own number."""
    batch: Int = 64
    """Rows decoded together."""
    max_tokens: OptionalInt = None
    """Most tokens of an answer. Default: the task's own."""
    samples: Int = 1
    """exact: answers per question, for pass@k."""
    examples: Annotated[str | None, option("Z.jsonl")] = None
    """exact: show the first questions of this file before each question."""
    shots: OptionalInt = None
    """exact: how many of them. Default: 4."""
    prompts: Annotated[Literal["chat", "text"] | None, option("chat|text")] = None
    """exact: ask in a conversation, or let a text be continued. Default: as the model has a chat template."""
    template: Annotated[str | None, option("TEXT")] = None
    """exact: a text with {input} in the place of the question, such as 'Q: {input}'."""
    escapes: Escapes = False
    r"""Read \n, \t and \\ in --template as Python does."""
    json: Flag = False
    """Print one JSON object for each task."""
    decoding: Annotated[Decoding, Group] = field(default_factory=Decoding)
    loading: Annotated[Loading, Group] = field(default_factory=Loading)


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args, parameters = arguments.read_with_rule(Evaluate, argv, "mercury eval")
    from mercury_jax import evaluate

    single = args.file is None or len(args.task) == 1
    arguments.require(
        (args.task, "TASK", None, f"one or more of {', '.join(evaluate.TASKS)}"),
        (single, "--file", args.file, f"with one task, not {len(args.task)}"),
    )
    template = args.template
    if template is not None:
        template = arguments.read_text("--template", template, args.escapes)
    settings = evaluate.EvalSettings(
        None if args.file is None else Path(args.file), args.split, args.limit, args.decoding.sampler(parameters),
        args.decoding.plan(), args.batch, args.decoding.seed, args.max_tokens,
        args.samples, None if args.examples is None else Path(args.examples), args.shots, args.prompts, template,
    )  # fmt: skip
    chosen = {name: evaluate.check(name, settings) for name in args.task}
    show.check_writable("--dump", args.dump)
    lm, rows = args.loading.load(), []
    for name, task in chosen.items():
        with show.progress("count", name, quiet=args.json) as update:
            watched = settings._replace(progress=lambda done, of: update(completed=done, total=of))
            report = task.run(lm, watched)
        if args.json:
            show.emit(report.summary)
        else:
            print(report)
        if not args.json and "tokens_per_second" in report.summary:
            rate = f"{report.summary['tokens_per_second']:,.0f} tokens/s in batches of {args.batch}"
            show.say(f"  {rate} on {compilation.hardware()}, {report.summary['seconds']:.0f} s in all")
        # After every task, so that one that fails does not take the others along.
        rows += [{"task": name, **row} for row in report.rows]
        show.write_records(args.dump, rows)
    return 0
