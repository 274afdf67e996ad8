"""`mercury bench peer`: DiffusionGemma here against transformers."""

from __future__ import annotations

from collections.abc import Sequence

from mercury_jax.cli import bench, options, show
from mercury_jax.cli.parser import Parser

MORE = """\
examples:
  mercury bench peer
  mercury bench peer --sizes 3M --python torch-env/bin/python --json

A random DiffusionGemma checkpoint is written once and read by both: `mercury_jax.sample` and transformers'
`generate` (dynamic cache, eager, fp32), batch 1, prompt 64, canvas 256, the same number of denoising steps. They
take turns in one run; the other one stands still meanwhile. transformers needs torch, so it runs in a process of
its own: --python names an interpreter that has both, by default this one (the extra `parity` installs them)."""


def parser() -> Parser:
    p = Parser("bench peer", "Compare sample() with transformers' generate on the same DiffusionGemma.", MORE)
    p.add_argument("--sizes", nargs="+", default=["3M", "94M"], metavar="NAME", help="3M, 94M (default both)")
    bench.count(p, "--steps", 16, "denoising steps of a canvas")
    bench.count(p, "--pairs", 7, "how often they take turns")
    p.add_argument(
        "--python", metavar="PATH", help="interpreter with torch and transformers (default: this one)"
    )
    bench.ending(p)
    return p


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv)
    options.writable("--out", args.out)
    from mercury_jax.bench import peer

    rows = []
    for row in peer.compare(args.sizes, steps=args.steps, pairs=args.pairs, python=args.python):
        rows.append(row)
        bench.write(args.out, rows)
        if args.json:
            show.emit(row)
            continue
        low, high = row["speedup_quartiles"]
        print(
            f"{row['size']} ({row['parameters'] / 1e6:.1f}M parameters): {row['ms_per_step']:.1f} ms a step, "
            f"transformers {row['peer_ms_per_step']:.1f}: {row['speedup']:.2f} times as fast (quartiles {low:.2f} to "
            f"{high:.2f}; the goal is {row['at_least']}), {row['recompilations']} recompilations"
        )
    return 0
