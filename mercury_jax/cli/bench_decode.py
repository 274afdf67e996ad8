"""`mercury bench decode`: accuracy and speed of decoding rules, and which of them to use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mercury_jax.cli import bench, options, show
from mercury_jax.cli.parser import Parser, whole

if TYPE_CHECKING:
    from mercury_jax.bench.recommend import Advice

TASKS = ("sudoku4", "add3")

MORE = """\
examples:
  mercury bench decode --rules threshold --limit 128      one rule, a first look
  mercury bench decode --rules all --recommend            which rule is best for this model
  mercury bench decode runs/mine/model --tasks sudoku4 --plot rules.png --out rows.jsonl
  mercury bench decode --rules threshold --twin runs/nano_ar/model --json

Each rule answers the questions that one token a step answers, at a few values of its main knob. A row has
  accuracy, low, high        with Wilson's 95% interval
  points, points_low, _high  accuracy minus that of one token a step, paired, 95%
  agreement                  answers whose tokens are those of one token a step
  forwards                   denoiser passes an answer; tokens_per_forward, forwards_per_second
  tokens_per_second          all rows of a batch together, compilation left out
  speedup                    the same over one token a step, median of batches decoded by turns
  time_to_first_frame, time_to_last_token   seconds, one prompt alone, streamed pass by pass
A rule that this model cannot run has a row with `refused` and the reason.

--recommend picks the most tokens a forward among the rules that lose nothing: on each task, not significantly
worse than one token a step (the paired 95% interval reaches 0), and a loss of 2 points ruled out (its lower
end is above -2). It picks on one half of the questions and reports the other half; it
recommends nothing where nothing qualifies, and says why.

All rules on two tasks with 512 questions take most of an hour on two CPU cores; --points 1 half of that."""


def parser() -> Parser:
    p = Parser("bench decode", "Measure decoding rules on tasks whose answers can be checked.", MORE)
    bench.model(p)
    p.add_argument("--rules", nargs="+", default=["all"], metavar="NAME", help="rules, or all (the default)")
    p.add_argument(
        "--tasks", nargs="+", default=list(TASKS), metavar="TASK", help=f"tasks (default {' '.join(TASKS)})"
    )
    bench.count(p, "--limit", 512, "questions of a task")
    p.add_argument(
        "--split",
        choices=("validation", "test"),
        default="validation",
        help="which held-out questions: validation to choose a rule (the default), test to report one",
    )
    bench.count(p, "--batch", 64, "rows decoded together")
    p.add_argument(
        "--max-tokens", type=whole, metavar="N", help="room for an answer (default: the task's own)"
    )
    p.add_argument(
        "--alone",
        type=whole,
        default=3,
        metavar="N",
        help="prompts streamed for the latencies (default 3; 0: none)",
    )
    p.add_argument(
        "--points", type=whole, metavar="N", help="the strictest N points of each rule's curve (default: all)"
    )
    p.add_argument("--twin", metavar="DIR", help="an autoregressive model, measured on the same questions")
    p.add_argument("--recommend", action="store_true", help="say which rule is best, as Python to paste")
    p.add_argument("--plot", metavar="FILE.png", help="accuracy against tokens a second, one curve a rule")
    bench.ending(p, "the questions and the tokens")
    return p


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv)
    from mercury_jax.bench import decode, plot, questions, recommend, rows, settings

    chosen = settings.settings(None if "all" in args.rules else args.rules, args.points)
    if args.plot is not None:
        plot.check(args.plot)
    options.writable("--plot", args.plot)
    options.writable("--out", args.out)
    lm = show.load(args.model)
    found = decode.entries(lm, chosen, None if args.twin is None else show.load(args.twin))
    how = {name: getattr(args, name) for name in ("limit", "batch", "split", "seed", "max_tokens", "alone")}
    asked = [questions.ask(name, **how) for name in dict.fromkeys(args.tasks)]
    made, base, others = [], [], []
    for one in asked:
        with progress(decode.units(found, one), quiet=args.json) as tick:
            trials = decode.run(found, one, tick)
        new, (slow, able) = rows.rows(trials, one), rows.cases(trials, one)
        made, base, others = made + new, [*base, slow], others + able
        bench.write(args.out, made)  # after every task, so that one that fails takes no other along
        _print(new, args)
    if args.plot is not None:
        plot.plot(made, args.plot)
    if args.recommend:
        _advise(recommend.recommend(base, others, args.seed), args)
    return 0


def _print(rows: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> None:
    if args.json:
        for row in rows:
            show.emit(row)
    else:
        print(table(rows), flush=True)


HEAD = (
    "rule",
    "right",
    "95%",
    "points",
    "95%",
    "same",
    "forwards",
    "tok/fwd",
    "tok/s",
    "speedup",
    "first",
    "last",
)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of one task as aligned columns; refused rules below them."""
    able = [r for r in rows if "refused" not in r]
    cells = [HEAD, *map(_cells, able)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
        for row in cells
    ]
    about = (
        f"{rows[0]['task']}: {able[0]['n']} questions, batches of {rows[0]['batch']}, {rows[0]['hardware']}"
    )
    refused = [f"  {r['rule']}: {r['refused']}" for r in rows if "refused" in r]
    return "\n".join([about, *lines, *["refused"] * bool(refused), *refused, ""])


def _cells(r: Mapping[str, Any]) -> tuple[str, ...]:
    percent = lambda x: "" if x is None else f"{100 * x:.1f}%"
    ms = lambda x: "" if x is None else f"{1000 * x:.0f} ms"
    return (
        r["rule"], percent(r["accuracy"]), f"{percent(r['low'])} to {percent(r['high'])}",
        f"{r['points']:+.1f}", f"{r['points_low']:+.1f} to {r['points_high']:+.1f}", percent(r["agreement"]),
        f"{r['forwards']:.1f}", f"{r['tokens_per_forward']:.2f}", f"{r['tokens_per_second']:,.0f}",
        f"{r['speedup']:.2f}x", ms(r["time_to_first_frame"]), ms(r["time_to_last_token"]),
    )  # fmt: skip


def _advise(advice: Advice, args: argparse.Namespace) -> None:
    if args.json:
        show.emit({"recommend": advice.code, **{k: v for k, v in advice._asdict().items() if k != "code"}})
        return
    if advice.code is None:
        print(f"No rule to recommend: {advice.reason}.")
        return
    print(f"{advice.code}\n  {advice.reason}; on the other half of the questions")
    for t in advice.tasks:
        print(
            f"  {t['task']}: {100 * t['accuracy']:.1f}% right, {t['points']:+.1f} points (paired, 95% "
            f"{t['points_low']:+.1f} to {t['points_high']:+.1f}, n = {t['n']}); {t['tokens_per_forward']:.2f} tokens "
            f"a forward, one token a step {t['tokens_per_forward_one_a_step']:.2f}; {t['speedup']:.1f} times its speed"
        )
    if not advice.ruled_out:
        print(
            "  there, a loss of 2 points is not ruled out on every task: more questions would tell (--limit)"
        )
    print(
        f"  {advice.tokens_per_second:,.0f} tokens/s over all tasks in batches of {args.batch} on {show.device()}"
    )


@contextmanager
def progress(units: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A bar on standard error for people; told what comes next, it counts what was before."""
    if quiet or not show.terminal(sys.stderr):
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        item = bar.add_task("", total=units, completed=-1)
        yield lambda text: bar.update(item, description=text, advance=1)
