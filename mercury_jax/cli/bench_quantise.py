"""`mercury bench quantise`: what weights, keys and values in few bits cost in quality."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from mercury_jax.cli import bench, options, show
from mercury_jax.cli.parser import Parser

MORE = """\
examples:
  mercury bench quantise
  mercury bench quantise runs/mine/model --tasks sudoku4 --limit 128 --json

Weights in full, as int8 and as fp8; keys and values in full, as int8 and in 4 and 3 bits. `points` and `more`
compare question by question, and piece by piece of held-out code under the same masks, with the model in full;
their 95% intervals are those of the differences."""


def parser() -> Parser:
    p = Parser("bench quantise", "Measure what weights, keys and values in few bits cost in quality.", MORE)
    bench.model(p)
    p.add_argument(
        "--tasks", nargs="*", default=["sudoku4", "add3"], metavar="TASK", help="(default sudoku4 add3)"
    )
    bench.count(p, "--limit", 512, "questions of each task")
    bench.count(p, "--pieces", 256, "pieces of held-out code, 0: none")
    bench.count(p, "--samples", 8, "times that each piece is masked")
    bench.count(p, "--batch", 64, "rows together")
    bench.ending(p, "questions, pieces and masks")
    return p


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv)
    from mercury_jax.bench import quantise

    options.writable("--out", args.out)
    load = functools.partial(show.load, args.model)
    with show.waiting("every kind of weights and keys"):
        rows = quantise.run(
            load, args.tasks, limit=args.limit, pieces=args.pieces, samples=args.samples, batch=args.batch,
            seed=args.seed,
        )  # fmt: skip
    bench.write(args.out, rows)
    for row in rows:
        if args.json:
            show.emit(row)
        else:
            print(_line(row))
    return 0


def _line(row: Mapping[str, Any]) -> str:
    kept = (
        f"{row['task']:14} weights {row['weights']:8} {row['parameter_bytes'] / 1e6:8.2f} MB, "
        f"keys {row['kv']:8} {row['cache_bytes_per_token']:7.0f} bytes a token: "
    )
    if "accuracy" in row:
        return kept + (
            f"{100 * row['accuracy']:5.1f}% of {row['n']}, {row['points']:+.1f} points "
            f"({row['points_low']:+.1f} to {row['points_high']:+.1f}), agreement {100 * row['agreement']:.1f}%"
        )
    return kept + (
        f"{row['nats_per_token']:.4f} nats a token, {row['more']:+.4f} "
        f"({row['more_low']:+.4f} to {row['more_high']:+.4f})"
    )
