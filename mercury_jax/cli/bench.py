"""`mercury bench`: finds the measurement and runs it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mercury_jax.cli import options, show
from mercury_jax.cli.parser import Parser, whole
from mercury_jax.config import nearest, refuse

# name -> (module, what it measures). A measurement is `run(argv) -> exit code`.
BENCHES = {
    "decode": ("bench_decode", "accuracy and speed of every decoding rule, against one token a step"),
    "repair": ("bench_repair", "which rules repair a wrong token, where the truth is determined"),
    "cache": ("bench_cache", "reuse of keys in a bidirectional model, against computing everything"),
    "gpu": (
        "bench_gpu",
        "a GPU: whether the kernels are right there, how fast they are, how fast a model is",
    ),
    "overhead": (
        "bench_overhead",
        "sample() against its bare forwards, and what is compiled when it is warm",
    ),
    "peer": ("bench_peer", "DiffusionGemma against transformers, on the same checkpoint, by turns"),
    "prompt": ("bench_prompt", "encoding long prompts: time, memory, and whether they grow in proportion"),
    "quantise": ("bench_quantise", "weights, keys and values in few bits: what that costs in quality"),
    "compile": (
        "bench_compile",
        "a program for a chip that is not here: bytes, collectives, kernels, roofline",
    ),
    "serve": ("bench_serve", "a server under load: latencies, batching against one at a time, agents"),
}

HELP = """\
usage: mercury bench WHAT [OPTIONS]

Measure. Every figure says what it is compared with, on which hardware, in the same run.

{benches}

examples:
  mercury bench decode --rules threshold entropy_bound --limit 128
  mercury bench decode --rules all --recommend --plot rules.png
  mercury bench repair --limit 512
  mercury bench overhead --json
  mercury bench prompt --lengths 8192 32768
  mercury bench compile diffusiongemma-26b-a4b --for h200 --quantise int8
  mercury bench serve --concurrency 1 16 --agent 2
  mercury bench gpu check --out h200.jsonl

`mercury bench WHAT --help` lists the options."""


def run(argv: Sequence[str]) -> int:
    words = list(argv)
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(map(len, BENCHES))
        print(HELP.format(benches="\n".join(f"  {n:{width}}  {about}" for n, (_, about) in BENCHES.items())))
        return 0 if words else 2
    if words[0] not in BENCHES:
        raise refuse("bench", words[0], nearest(words[0], list(BENCHES)))
    return importlib.import_module(f"mercury_jax.cli.{BENCHES[words[0]][0]}").run(words[1:])


def model(parser: Parser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder of a saved model (default: the embedded one)"
    )


def count(parser: Parser, name: str, default: int, about: str) -> None:
    """An option that takes a whole number."""
    parser.add_argument(name, type=whole, default=default, metavar="N", help=f"{about} (default {default})")


def ending(parser: Parser, seed: str | None = None) -> None:
    """What every measurement ends with: the seed and what it draws, where the rows go, --json."""
    if seed is not None:
        count(parser, "--seed", 0, f"draws {seed}")
    parser.add_argument("--out", metavar="FILE.jsonl", help="write the rows, too")
    options.machine(parser)


def write(path: str | None, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line."""
    if path is not None:
        Path(path).write_text("".join(show.as_json(r) + "\n" for r in rows), encoding="utf-8")
