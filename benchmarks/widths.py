"""Finds the best learning rate of models of several widths, with one rate for all and with `OptimConfig.base_width`.

The models, which differ in nothing but their width, are trained on the books and windows of `benchmarks.objectives`.
With a rule that transfers, the best rate is the same at every width. Each run writes one line of the output; runs whose
line exists are skipped, so the benchmark may be interrupted and continued. Run with `python -m benchmarks.widths
--books DIR`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import mercury_jax as mj
from benchmarks.objectives import METHODS, ObjectivesBenchmark, held_out_windows, prepare, recipe, scored
from benchmarks.script import Ints, run_script
from mercury_jax.cli import arguments
from mercury_jax.cli.app import INTERRUPTED
from mercury_jax.cli.arguments import Int, option
from mercury_jax.config import ModelConfig, refuse
from mercury_jax.training.optim import OptimConfig, OptimizerName
from mercury_jax.training.recipe import TrainConfig

HEAD = 32  # size of a head: a wider model has more heads
RATES = {"adamw": (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2), "muon": (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)}


@dataclass(frozen=True, kw_only=True)
class WidthsBenchmark:
    """Train models of several widths with several learning rates, and find the best rate of each width.

    examples:
      python -m benchmarks.widths --books books --out widths.jsonl
      python -m benchmarks.widths --books books --base-width 128
      python -m benchmarks.widths --books books --optimizer muon --widths 64 256
    """

    books: Annotated[str, option("DIR")]
    """Folder of .txt files; the last tenth of each is held out."""
    out: Annotated[str, option("FILE")] = "widths.jsonl"
    """Rows are appended here; runs that it holds are skipped."""
    method: Annotated[str, option("NAME")] = "autoregressive"
    """A method of benchmarks.objectives."""
    optimizer: OptimizerName = "adamw"
    """adamw or muon."""
    widths: Ints = (64, 128, 256)
    """Multiples of 32."""
    base_width: Int = 0
    """The field of OptimConfig. 0: the same rate at every width."""
    rates: Annotated[tuple[float, ...], option("LR [LR ...]")] = ()
    """Peak learning rates to try. Default: five, each twice the one before."""
    steps: Int = 300
    """Updates of 8 windows of 256 tokens."""
    windows: Int = 256
    """Held-out windows."""
    samples: Int = 16
    """Noised copies of each window; an autoregressive model is scored exactly."""


def run_config(args: WidthsBenchmark, width: int, lr: float, folder: Path) -> TrainConfig:
    """Makes the training run of one width and learning rate.

    Args:
        args: Options of the benchmark.
        width: Size of the hidden states.
        lr: Peak learning rate.
        folder: Folder of the run.

    Returns:
        The recipe.
    """
    config = recipe(args.method, objectives_args(args), 0, folder)
    assert isinstance(config.model, ModelConfig)
    heads = width // HEAD
    model = dataclasses.replace(
        config.model, width=width, heads=heads, kv_heads=heads, ffn=width * 11 // 4
    )  # fmt: skip
    optim = OptimConfig(
        optimizer=args.optimizer,
        lr=lr,
        base_width=args.base_width,
        warmup=30,
        decay="wsd",
        final=0.02,
        tail=0.4,
    )
    return dataclasses.replace(config, model=model, optim=optim, save_every=args.steps)


def objectives_args(args: WidthsBenchmark) -> ObjectivesBenchmark:
    """Makes the options of `benchmarks.objectives` for the same books, steps and windows."""
    return ObjectivesBenchmark(books=args.books, steps=args.steps, windows=args.windows, samples=args.samples)


def bits_per_byte(source: Path, args: WidthsBenchmark) -> tuple[float, int]:
    """Scores the held-out windows.

    Args:
        source: Folder of the trained model.
        args: Options of the benchmark.

    Returns:
        Bits per byte, and the number of parameters.
    """
    lm = mj.load(source)
    nats, _, size = scored(lm, held_out_windows(objectives_args(args), lm.tokenizer), args.samples)
    return float(nats.sum() / size.sum()), lm.parameters


def best_rate(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Finds the learning rate with the least bits per byte, by a parabola through the three best neighbours.

    Args:
        rows: `lr` and `bits_per_byte` of runs that differ in nothing else.

    Returns:
        The rate; None if the best one is the smallest or largest, so that the minimum may lie beyond.
    """
    ordered = sorted(rows, key=lambda row: row["lr"])
    at = min(range(len(ordered)), key=lambda i: ordered[i]["bits_per_byte"])
    if not 0 < at < len(ordered) - 1:
        return None
    near = ordered[at - 1 : at + 2]
    a, b, _ = np.polyfit([np.log(r["lr"]) for r in near], [r["bits_per_byte"] for r in near], 2)
    return float(np.exp(-b / (2 * a)))


def run(argv: Sequence[str]) -> int:
    """Trains each width and rate whose row is not in the output file yet; prints the rows and the best rates.

    Args:
        argv: Command-line arguments.

    Returns:
        The exit code.

    Raises:
        ValueError: An option is wrong.
    """
    args = arguments.read(WidthsBenchmark, argv, "python -m benchmarks.widths")
    if args.method not in METHODS:
        raise refuse("--method", args.method, ", ".join(METHODS))
    for width in args.widths:
        if width < HEAD or width % HEAD:
            raise refuse("--widths", width, f"multiples of {HEAD}")
    out = Path(args.out)
    root = prepare(args.books, out)
    same = {name: getattr(args, name) for name in ("method", "optimizer", "base_width", "steps")}
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    rows = [row for row in rows if all(row[name] == x for name, x in same.items())]
    for width in args.widths:
        for lr in args.rates or RATES[args.optimizer]:
            if any((row["width"], row["lr"]) == (width, lr) for row in rows):
                continue
            began = time.perf_counter()
            folder = (
                root
                / f"{args.method.replace(' ', '_')}-{args.optimizer}-{args.base_width}-{width}-{lr}-{args.steps}"
            )
            if mj.train(run_config(args, width, lr, folder)).stopped:
                return INTERRUPTED  # by a signal: the row would be of a part of the run
            bits, parameters = bits_per_byte(folder / "model", args)
            row = same | {"width": width, "parameters": parameters, "lr": lr, "bits_per_byte": round(bits, 5)}
            rows.append(row | {"seconds": round(time.perf_counter() - began)})
            print(json.dumps(rows[-1]), flush=True)
            with out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    for width in args.widths:
        found = best_rate([row for row in rows if row["width"] == width])
        print(
            json.dumps(same | {"width": width, "best_lr": None if found is None else float(f"{found:.2g}")})
        )
    return 0


if __name__ == "__main__":
    sys.exit(run_script(run))
