"""`mercury convert`: a checkpoint of theirs as a folder of ours, and a folder of ours as one of theirs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mercury_jax.cli import options, show
from mercury_jax.cli.parser import Parser
from mercury_jax.config import refuse

MORE = """\
examples:
  mercury convert Qwen/Qwen3-0.6B runs/qwen3                 theirs to ours, to train on or to serve
  mercury convert runs/mine/model out --to hf                ours to theirs: transformers, vLLM, SGLang
  mercury convert runs/mine/model out --to hf --family sdar --dtype bfloat16"""
DTYPES = ("float32", "bfloat16", "float16")


def parser() -> Parser:
    p = Parser(
        "convert", "Write a model in the other layout: Hugging Face's as ours, or ours as theirs.", MORE
    )
    p.add_argument("source", metavar="MODEL", help="folder or Hugging Face id of a model")
    p.add_argument("out", metavar="OUT", help="a new folder")
    p.add_argument("--to", default="ours", metavar="LAYOUT", help="ours, or hf (default ours)")
    p.add_argument(
        "--family", metavar="NAME", help="with --to hf: the family to write (default: the first that fits)"
    )
    p.add_argument(
        "--dtype", metavar="NAME", help=f"of the parameters: {', '.join(DTYPES)} (default: as they are)"
    )
    options.mask(p)
    options.machine(p)
    return p


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv)
    if args.to not in ("ours", "hf"):
        raise refuse("--to", args.to, "ours, hf")
    if args.family is not None and args.to != "hf":
        raise refuse("--family", args.family, "with --to hf only")
    if args.dtype is not None and args.dtype not in DTYPES:
        raise refuse("--dtype", args.dtype, ", ".join(DTYPES))
    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise refuse("OUT", args.out, "a new or empty folder")
    from mercury_jax import hub

    with _progress(args.source) as progress:
        hub.convert(
            args.source,
            out,
            to=args.to,
            family=args.family,
            dtype=args.dtype,
            mask=args.mask,
            progress=progress,
        )
    record = hub.info(out, mask=args.mask)
    if args.json:
        show.emit(record)
    else:
        print(f"{record['name']}: {record['parameters']:,} parameters, {record['family']}, in {out}")
    return 0


@contextmanager
def _progress(source: str) -> Iterator[Callable[[int], None]]:
    """A bar that counts the bytes as they are loaded; nothing where no one looks."""
    if not show.terminal(sys.stderr):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, SpinnerColumn, TextColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"loading {source}", total=None)
        yield lambda done: bar.advance(task, done)
