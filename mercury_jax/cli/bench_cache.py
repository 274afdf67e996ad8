"""`mercury bench cache`: what reusing keys costs and brings in a bidirectional model."""

from __future__ import annotations

from collections.abc import Sequence

from mercury_jax.cli import bench, options, show
from mercury_jax.cli.parser import Parser, whole

MORE = """\
examples:
  mercury train configs/nano_bidirectional.py --out runs/bidirectional
  mercury bench cache runs/bidirectional/model

In a bidirectional model every token sees every other, so no key stays valid; prefix and dual caches
(Fast-dLLM) and vicinity refresh (dInfer) reuse them all the same. `agreement` is the share of answers that
are token for token those of no cache, `speedup` the median ratio of tokens a second on the same batches."""


def parser() -> Parser:
    p = Parser("bench cache", "Compare reuse of keys with computing everything in every pass.", MORE)
    bench.model(p)
    p.add_argument(
        "--tasks", nargs="+", default=["sudoku4", "add3"], metavar="TASK", help="(default sudoku4 add3)"
    )
    bench.count(p, "--limit", 256, "questions of each task")
    bench.count(p, "--batch", 32, "rows together")
    bench.count(p, "--block", 16, "tokens of a block")
    p.add_argument("--steps", type=whole, metavar="N", help="passes a block may take (default: its tokens)")
    bench.ending(p, "the questions")
    return p


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv)
    from mercury_jax.bench import cache, questions

    options.writable("--out", args.out)
    lm = show.load(args.model)
    asked = [questions.ask(t, limit=args.limit, batch=args.batch, seed=args.seed) for t in args.tasks]
    with show.waiting("decoding with every cache"):
        rows = cache.run(lm, asked, block=args.block, steps=args.steps)
    bench.write(args.out, rows)
    for row in rows:
        if args.json:
            show.emit(row)
        else:
            print(
                f"{row['task']:8} {row['cache']:30} {100 * row['accuracy']:5.1f}% right, agreement "
                f"{100 * row['agreement']:5.1f}%, {row['tokens_per_second']:.0f} tokens/s, {row['speedup']:.2f} times"
            )
    return 0
