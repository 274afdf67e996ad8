"""The training loop against one written by hand: `python -m benchmarks.training`."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from benchmarks.script import run_script
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, Int, OptionalInt, Positional, option


@dataclass(frozen=True, kw_only=True)
class TrainingBenchmark:
    """Compare the training loop with one written by hand.

    examples:
      python -m benchmarks.training
      python -m benchmarks.training my_recipe.py --steps 20 --batch 8 --json

    The loop of `mercury train`, with the recipe's data pipeline, log and
    checkpoints, alternates with a jitted update in a plain Python loop. Both use
    the same model, objective, optimizer, moving average, noise and batches. The
    plain loop has its batches in memory; it does not check for NaN, report
    metrics, log or save. Neither evaluates or samples.

    ratio            steps per second of the loop of `mercury train` over those of
                     the plain loop, the median of --pairs; the goal is 0.97
    ratio_of_totals  ratio over all steps together, checkpoints included. `saves`
                     counts these: choose --steps times --pairs >= save_every
    cpu_ratio        ratio of CPU time; use it while other programs run
    recompilations   programs compiled after the warm-up; 0 is expected
    difference       largest relative difference of the final parameters
    mfu              FLOPs of the model over those of large fp32 products in the
                     same run. A position costs 6 FLOPs per parameter that
                     multiplies it and 12 per attended position and dimension
    """

    recipe: Annotated[Positional[str], option("RECIPE")] = "nano"
    """A Python file that defines config(), or the name of a packaged recipe."""
    steps: Int = 50
    """Steps of each loop before the other one's turn."""
    pairs: Int = 5
    """How often both are timed."""
    batch: OptionalInt = None
    """Rows of an update. Default: the recipe's."""
    row: OptionalInt = None
    """Positions of a row. Default: the recipe's."""
    out: Annotated[str | None, option("FILE.jsonl")] = None
    """Write the record, too."""
    json: Flag = False
    """Print one JSON object."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args = arguments.read(TrainingBenchmark, argv, "python -m benchmarks.training")
    show.check_writable("--out", args.out)
    show.report(_records(args), args.out, None if args.json else line)
    return 0


def _records(args: TrainingBenchmark) -> Iterator[dict[str, Any]]:
    from benchmarks import training_loops
    from mercury_jax import api
    from mercury_jax.training import recipe

    changes = {name: x for name in ("batch", "row") if (x := getattr(args, name)) is not None}
    config = dataclasses.replace(recipe.load_recipe(args.recipe), **changes)
    training_loops.check_recipe(config)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = api.tokenizer_of(dataclasses.replace(config, out=folder))
    yield from training_loops.compare(config, tokenizer, steps=args.steps, pairs=args.pairs)


def line(row: Mapping[str, Any]) -> str:
    """A record for people."""
    low, high = row["ratio_quartiles"]
    by_cpu = row["mfu_of_cpu_time"]
    return (
        f"{row['recipe']}, {row['parameters']:,} parameters, {row['batch']} x {row['row']} positions: "
        f"{row['steps_per_second']:.2f} steps/s, {row['tokens_per_second']:,.0f} tokens/s, "
        f"{row['positions_per_second']:,.0f} positions/s\n"
        f"  {row['ratio']:.3f} times the loop written by hand (quartiles {low:.3f} to {high:.3f}, by CPU time "
        f"{row['cpu_ratio']:.3f}; the goal is {row['at_least']}), {row['ratio_of_totals']:.3f} over all steps with "
        f"{row['saves']} checkpoints; {row['recompilations']} recompilations, parameters differ by "
        f"{row['difference']:.1e}\n"
        f"  {row['flops_per_step'] / 1e9:.1f} GFLOP a step, {100 * row['mfu']:.0f}% of {row['peak_flops'] / 1e9:.0f} "
        "GFLOP/s of large fp32 products" + ("" if by_cpu is None else f", {100 * by_cpu:.0f}% by CPU time")
    )


if __name__ == "__main__":
    sys.exit(run_script(run))
