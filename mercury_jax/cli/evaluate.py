"""`mercury eval`: tasks whose answers can be checked, each with its count, interval and cost."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mercury_jax.cli import options, show
from mercury_jax.cli.parser import Parser, whole
from mercury_jax.config import refuse

if TYPE_CHECKING:
    from mercury_jax.evaluate import Report

MORE = """\
examples:
  mercury eval sudoku4 --limit 64
  mercury eval sudoku4 add3 --rule confidence        one token a pass, to compare with
  mercury eval sudoku4 --file test.jsonl --dump answers.jsonl --json

`mercury info` lists the tasks. --file has one {"input", "output"} a line; --dump writes one
{"task", "input", "prediction", "correct", "forwards", ...} a line, in the same order."""


def parser() -> Parser:
    p = Parser("eval", "Measure a model on each TASK.", MORE)
    p.add_argument("task", nargs="*", metavar="TASK", help="sudoku4, add3, code-bpb, ...")
    options.loaded(p)
    p.add_argument("--file", metavar="X.jsonl", help="questions of your own instead of the held-out ones")
    p.add_argument(
        "--split",
        choices=("test", "validation"),
        default="test",
        help="which held-out questions: test for figures (the default), validation for choosing settings",
    )
    p.add_argument("--dump", metavar="Y.jsonl", help="write every question with its prediction")
    p.add_argument(
        "--limit", type=whole, metavar="N", help="how many questions (default: the task's own number)"
    )
    p.add_argument("--batch", type=whole, default=64, metavar="N", help="rows decoded together (default 64)")
    p.add_argument(
        "--max-tokens", type=whole, metavar="N", help="room for an answer (default: the task's own)"
    )
    options.decoding(p, seed="draws the questions, and the tokens where the rule does (default 0)")
    options.machine(p)
    return p


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv, late=options.knobs)
    from mercury_jax import evaluate
    from mercury_jax.evaluate import tasks

    if not args.task:
        raise refuse("TASK", None, f"one or more of {', '.join(evaluate.TASKS)}")
    for name in args.task:
        tasks.find(name)
    if args.file is not None and len(args.task) > 1:
        raise refuse("--file", args.file, f"with one task, not {len(args.task)}")
    sampler, plan = options.sampler(args), options.plan(args)
    options.writable("--dump", args.dump)
    lm = show.load(args.model, **options.reading(args))
    reports = []
    for name in args.task:
        with progress(name, quiet=args.json) as advance:
            report = evaluate.run(
                lm, name, file=args.file, split=args.split, limit=args.limit, sampler=sampler, plan=plan,
                batch=args.batch, seed=args.seed, max_tokens=args.max_tokens, progress=advance,
            )  # fmt: skip
        reports.append((name, report))
        _print(report, args)
        _dump(args.dump, reports)
    return 0


def _dump(path: str | None, reports: Sequence[tuple[str, Report]]) -> None:
    """After every task, so that one that fails does not take the others along."""
    if path is None:
        return
    rows = [{"task": name, **row} for name, report in reports for row in report.rows]
    Path(path).write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")


def _print(report: Report, args: argparse.Namespace) -> None:
    if args.json:
        show.emit(report.summary)
        return
    print(report)
    if "tokens_per_second" in report.summary:
        rate = f"{report.summary['tokens_per_second']:,.0f} tokens/s in batches of {args.batch}"
        show.say(f"  {rate} on {show.device()}, {report.summary['seconds']:.0f} s in all")


@contextmanager
def progress(task: str, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on standard error for people."""
    if quiet or not show.terminal(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        item = bar.add_task(task, total=None)
        yield lambda done, of: bar.update(item, completed=done, total=of)
