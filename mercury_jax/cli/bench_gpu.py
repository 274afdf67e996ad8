"""`mercury bench gpu`: one command that says what an accelerator gives, and what we make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mercury_jax.cli import bench, options, show
from mercury_jax.cli.parser import Parser

MORE = """\
examples:
  mercury bench gpu --out h200.jsonl --plot h200.png
  mercury bench gpu --small                 # a minute on any machine, to see what it does

It needs nothing but JAX for the device. First come the device's own ceilings, measured: bytes that it copies a
second, bf16 products that it makes. All else is a share of the time that these allow: whole models with random
weights (a pass of the loop under sample(), from DiffusionGemma's 26B to our 100M), each attention backend over a
table of shapes beside JAX's own, and updates of training. Our kernels are on, and off again for the largest model.
What does not fit, hangs or breaks has a row with the reason: it runs in a process of its own."""


def parser() -> Parser:
    p = Parser(
        "bench gpu", "Measure an accelerator, and how near to it kernels, decoding and training come.", MORE
    )
    p.add_argument(
        "--small", action="store_true", help="small models and shapes, for a machine without a GPU"
    )
    p.add_argument(
        "--minutes", type=float, default=8.0, metavar="N", help="begin nothing new behind these (default 8)"
    )
    p.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="PART",
        help="only steps whose names hold one of these: attention",
    )
    p.add_argument("--plot", metavar="FILE.png", help="draw the page, too (.png, .pdf, .svg)")
    bench.ending(p)
    return p


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv)
    from mercury_jax.bench import gpu, gpu_page, plot
    from mercury_jax.config.checks import at_least

    at_least(0, minutes=args.minutes)
    gpu.steps(args.small, args.only)
    options.writable("--out", args.out)
    if args.plot is not None:
        plot.check(args.plot)
    rows: list[Mapping[str, Any]] = []
    for row in gpu.measure(args.small, args.minutes, args.only):
        rows.append(row)
        bench.write(args.out, rows)
        show.emit(row) if args.json else print(words(row), flush=True)
    if args.plot is not None:
        gpu_page.page(rows, args.plot)
    return 0


def words(row: Mapping[str, Any]) -> str:
    """A row for people."""
    from mercury_jax.bench import gpu_page

    what = row["experiment"]
    if "failed" in row or "left_out" in row:
        return f"{what}: {row.get('failed') or row['left_out']}"
    if what == "ceilings":
        return (
            f"{row['hardware']}: {row['bytes_per_second'] / 1e9:.0f} GB/s copied, "
            f"{row['flops_per_second'] / 1e12:.2f} TFLOP/s in bf16 products"
        )
    if what == "attention":
        return f"{row['shape']}, {row['way']}: {_attention(row)}"
    if what == "training":
        return (
            f"{row['model']} in training: {1e3 * row['seconds']:.1f} ms an update of {row['rows']} x {row['row']}, "
            f"MFU {row['mfu']:.1%}"
        )
    if what == "peer":
        times = f", ours is {row['times_as_fast']:.2f} times as fast" if "times_as_fast" in row else ""
        return f"{row['compared_with']}: {1e3 * row['seconds_per_forward']:.2f} ms a pass{times}"
    speed = f"{1e3 * row['seconds_per_forward']:.2f} ms a pass, {row['share_of_bound']:.0%} of the bound"
    made = f"{row['tokens_per_second']:.0f} tokens/s at 16 passes and a commit"
    return f"{gpu_page.label(row)}: {speed}; {made}"


def _attention(row: Mapping[str, Any]) -> str:
    if "refused" in row:
        return f"not taken ({row['refused'][:100]})"
    speed = f"{1e3 * row['seconds']:.3f} ms, {row['share_of_bound']:.0%} of the bound"
    beside = (
        f", {row['times_as_fast_as_jax']:.2f} times the best of JAX's"
        if "times_as_fast_as_jax" in row
        else ""
    )
    return f"{speed}, error {row['relative_error']:.1e}{beside}"
