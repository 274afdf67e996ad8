"""`mercury bench prompt`: encoding long prompts."""

from __future__ import annotations

from collections.abc import Sequence

from mercury_jax.cli import bench, options, show
from mercury_jax.cli.parser import Parser, whole

MORE = """\
examples:
  mercury bench prompt
  mercury bench prompt --lengths 8192 32768 --json

Encodes random prompts with a small model of random weights, then decodes 32 tokens behind each. Attention
grows with the square of the length, so it is timed alone (`attention_seconds`, one layer, from a few of
its passes) and left out of `rest_seconds`. Of the last layer only keys and values are kept and its attention
is never computed: with one layer, the default, there is none to take off. `growth` compares the time a
token takes with that of the shortest prompt: 1 is linear, more is worse. `cache_growth` does so for memory."""


def parser() -> Parser:
    p = Parser("bench prompt", "Measure the time and memory that long prompts take.", MORE)
    p.add_argument(
        "--lengths", type=whole, nargs="+", default=[8192, 32768, 131072], metavar="N",
        help="tokens of the prompts (default 8192 32768 131072)",
    )  # fmt: skip
    bench.count(p, "--layers", 1, "layers of the model")
    bench.count(p, "--repeats", 5, "timed encodings")
    bench.ending(p, "weights and prompts")
    return p


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv)
    from mercury_jax.bench import prompt

    options.writable("--out", args.out)
    lm, rows = show.load(None), []
    found = prompt.prompt(lm, args.lengths, layers=args.layers, repeats=args.repeats, seed=args.seed)
    for row in found:
        rows.append(row)
        bench.write(args.out, rows)
        if args.json:
            show.emit(row)
            continue
        print(
            f"{row['length']:,} tokens: {row['seconds']:.3f} s, {row['microseconds_per_token']:.2f} us a token without "
            f"attention ({row['growth']:.2f} of linear), {row['attention_seconds']:.1f} s for a layer's attention; "
            f"cache {row['cache_bytes'] / 2**20:.1f} MiB ({row['cache_bytes_per_token']:.0f} bytes a token), "
            f"{row['sampled']} tokens behind it in {row['sample_passes']} passes and {row['sample_seconds']:.2f} s"
        )
    return 0
