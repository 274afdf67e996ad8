"""`mercury bench decode`: accuracy and speed of decoding rules, and which of them to use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mercury_jax import compilation
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, Int, OptionalInt, Positional, option

if TYPE_CHECKING:
    from mercury_jax.bench.decode import Advice


@dataclass(frozen=True, kw_only=True)
class BenchDecode:
    """Measure decoding rules on tasks whose answers can be checked.

    examples:
      mercury bench decode --rules threshold --limit 128      one rule
      mercury bench decode --rules all --recommend            which rule is best
      mercury bench decode --rules default autoregressive --batch 1 --limit 48
      mercury bench decode runs/mine/model --tasks sudoku4 --plot rules.png
      mercury bench decode --rules threshold --twin runs/twin_nano/model --json

    Each rule answers the same questions as one token per step, at a few values
    of its main parameter. A record has
      accuracy, low, high        with Wilson's 95% interval
      points, points_low, _high  accuracy minus that of one token per step,
                                 paired, with its 95% interval
      agreement                  answers equal to those of one token per step
      forwards                   forward passes of an answer
      tokens_per_forward, forwards_per_second
      tokens_per_second          all rows of a batch, without compilation
      call_seconds               of mj.sample on a batch, the median of all batches
      speedup                    the same over one token per step, the median of
                                 batches decoded in alternation
      time_to_first_frame, time_to_last_token
                                 seconds, one prompt alone, a frame per pass
    A rule that this model cannot run has a record with `refused` and the reason.

    --recommend picks the most tokens per forward pass among the rules that lose
    nothing: on each task not significantly worse than one token per step (the
    paired 95% interval reaches 0), and a loss of 2 points ruled out (its lower
    end is above -2). It picks on one half of the questions and reports the
    other half. It recommends nothing where nothing qualifies, and says why.

    All rules on two tasks with 512 questions take most of an hour on two CPU
    cores; --points 1 takes half of that.
    """

    model: Annotated[Positional[str | None], option("MODEL")] = None
    """Folder, GGUF file or Hugging Face id of a model. Default: the embedded one."""
    rules: Annotated[tuple[str, ...], option("NAME [NAME ...]")] = ("all",)
    """Rules, MODULE:NAME of your own, default (the model's own settings), or all."""
    tasks: Annotated[tuple[str, ...], option("TASK [TASK ...]")] = ("sudoku4", "add3")
    """Tasks."""
    limit: Int = 512
    """Questions of a task."""
    split: Literal["validation", "test"] = "validation"
    """Which held-out questions: validation to choose a rule, test to report one."""
    batch: Int = 64
    """Rows decoded together."""
    max_tokens: OptionalInt = None
    """Most tokens of an answer. Default: the task's own."""
    alone: Int = 3
    """Prompts streamed one at a time for the latencies; 0 for none."""
    points: OptionalInt = None
    """The N most careful settings of each rule. Default: all."""
    twin: Annotated[str | None, option("DIR")] = None
    """An autoregressive model, measured on the same questions. --dtype, --quantise and --kv hold for it, too."""
    recommend: Flag = False
    """Say which rule is best, as Python to paste."""
    plot: Annotated[str | None, option("FILE.png")] = None
    """Accuracy against tokens per second, one curve for each rule."""
    seed: Int = 0
    """Draws the questions and the tokens."""
    out: Annotated[str | None, option("FILE.jsonl")] = None
    """Write the records, too."""
    json: Flag = False
    """Print one JSON object for each record."""
    checkpoint: Annotated[arguments.CheckpointOptions, arguments.Group] = arguments.CheckpointOptions()


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args = arguments.read(BenchDecode, argv, "mercury bench decode")
    from mercury_jax.bench import decode

    names = [arguments.find_rule(n).__name__ if ":" in n else n for n in args.rules if n != "default"]
    chosen = decode.sweep(None if "all" in names else names, args.points)
    if args.plot is not None:
        decode.check_plot(args.plot)
    show.check_writable("--plot", args.plot)
    show.check_writable("--out", args.out)
    how: dict[str, Any] = dict(
        limit=args.limit, batch=args.batch, split=args.split, seed=args.seed, max_tokens=args.max_tokens,
        alone=args.alone,
    )  # fmt: skip
    asked = [decode.questions(name, **how) for name in dict.fromkeys(args.tasks)]
    lm = args.checkpoint.load(args.model)
    like = dataclasses.replace(args.checkpoint, mask=None, adapter=None, ignore_config=())
    twin = None if args.twin is None else like.load(args.twin)
    found = decode.entries(lm, chosen, twin, default="default" in args.rules)
    rows, base, others = [], [], []
    for one in asked:
        count = decode.units(found, one)
        with show.progress("count", total=count, quiet=args.json) as update:
            update(completed=-1)  # a tick announces what comes next, and so ends what was before
            trials = decode.run(found, one, lambda text: update(description=text, advance=1))
        new, (slow, able) = decode.records(trials, one), decode.results(trials, one)
        rows, base, others = rows + new, [*base, slow], others + able
        # After every task, so that one that fails does not take the others along.
        show.write_records(args.out, rows)
        for row in new if args.json else ():
            show.emit(row)
        if not args.json:
            print(table(new), flush=True)
    if args.plot is not None:
        decode.plot(rows, args.plot)
    if args.recommend:
        _print_advice(decode.recommend(base, others, args.seed), args)
    return 0


HEAD = (
    "rule", "right", "95%", "points", "95%", "same", "forwards", "tok/fwd", "tok/s", "speedup", "call", "first", "last",
)  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Records of one task as aligned columns, with the rules that were refused below them."""
    able = [r for r in rows if "refused" not in r]
    refused = [f"  {r['rule']}: {r['refused']}" for r in rows if "refused" in r]
    first = rows[0]
    about = f"{first['task']}: {able[0]['n']} questions, batches of {first['batch']}, {first['hardware']}"
    return "\n".join(
        [about, *show.table(HEAD, map(_cells, able)), *["refused"] * bool(refused), *refused, ""]
    )


def _cells(r: Mapping[str, Any]) -> tuple[str, ...]:
    percent = lambda x: "" if x is None else f"{100 * x:.1f}%"
    ms = lambda x: "" if x is None else f"{1000 * x:.0f} ms"
    return (
        r["rule"], percent(r["accuracy"]), f"{percent(r['low'])} to {percent(r['high'])}",
        f"{r['points']:+.1f}", f"{r['points_low']:+.1f} to {r['points_high']:+.1f}", percent(r["agreement"]),
        f"{r['forwards']:.1f}", f"{r['tokens_per_forward']:.2f}", f"{r['tokens_per_second']:,.0f}",
        f"{r['speedup']:.2f}x", f"{1000 * r['call_seconds']:.1f} ms", ms(r["time_to_first_frame"]),
        ms(r["time_to_last_token"]),
    )  # fmt: skip


def _print_advice(advice: Advice, args: BenchDecode) -> None:
    """The recommended rule with its figures on the other half of the questions, or why no rule is recommended."""
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
            f"per forward pass, one token per step {t['tokens_per_forward_one_a_step']:.2f}; {t['speedup']:.1f} times "
            "its speed"
        )
    if not advice.ruled_out:
        print("  there, a loss of 2 points is not ruled out on every task: ask more questions (--limit)")
    rate = f"{advice.tokens_per_second:,.0f} tokens/s over all tasks in batches of {args.batch}"
    print(f"  {rate} on {compilation.hardware()}")
