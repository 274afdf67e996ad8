"""`mercury bench overhead`: what sample() costs beyond its forwards."""

from __future__ import annotations

from collections.abc import Sequence

from mercury_jax.cli import bench, options, show
from mercury_jax.cli.parser import Parser, whole

MORE = """\
examples:
  mercury bench overhead
  mercury bench overhead runs/mine/model --batches 1 8 64 --json

For each rule and batch size, sample() from end to end and as many bare forwards (with the head, in one compiled
loop, the same shapes) take turns; `ratio` is the median of their ratios. The claim is 1.15 at most, with
nothing compiled once warm: `recompilations` counts programs compiled after the first calls, some of the
others having prompts of other lengths, other seeds and other knobs. On a machine that is busy with other
work look at `ratio_of_fastest` too, which compares the least times."""


def parser() -> Parser:
    p = Parser("bench overhead", "Compare sample() with its forwards run back to back.", MORE)
    bench.model(p)
    p.add_argument(
        "--rules", nargs="+", metavar="NAME", help="rules (default: confidence and threshold at 0.9)"
    )
    p.add_argument(
        "--batches", type=whole, nargs="+", default=[1, 8], metavar="N", help="rows together (default 1 8)"
    )
    bench.count(p, "--tokens", 64, "length of the answers")
    bench.count(p, "--pairs", 9, "how often they take turns")
    bench.ending(p, "the tokens")
    return p


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv)
    from mercury_jax.bench import overhead, settings

    chosen = overhead.STANDARD if args.rules is None else settings.settings(args.rules)
    options.writable("--out", args.out)
    lm, rows = show.load(args.model), []
    found = overhead.overhead(
        lm, chosen, batches=args.batches, tokens=args.tokens, pairs=args.pairs, seed=args.seed
    )
    for row in found:
        rows.append(row)
        bench.write(args.out, rows)
        if args.json:
            show.emit(row)
            continue
        low, high = row["ratio_quartiles"]
        print(
            f"{row['rule']}, batch {row['batch']}: {1000 * row['seconds']:.0f} ms for {row['passes']} passes, "
            f"{row['ratio']:.2f} times its forwards alone (quartiles {low:.2f} to {high:.2f}, fastest "
            f"{row['ratio_of_fastest']:.2f}; at most {row['at_most']}), {row['recompilations']} recompilations"
        )
    return 0
