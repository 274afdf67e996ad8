"""From an autoregressive model to a diffusion model: SmolLM2 adapted by `configs/adapt_smollm2.py`, and its twin.

The twin has the same adapters, tokens and steps, and goes on predicting the next token. Both are scored on the same
held-out answers and texts during the run, in bits per byte: exactly for the twin, by the bound of masked diffusion for
the other. The result is one line for each evaluation, and a plot. Run with `python -m benchmarks.adapt --answers
answers.jsonl --text "text/*.txt"`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import mercury_jax as mj
from benchmarks.script import Ints, run_script
from mercury_jax import models
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, Int, option
from mercury_jax.config import NoiseConfig, refuse
from mercury_jax.training import data
from mercury_jax.training.objectives import layout_of, masked_elbo, next_token
from mercury_jax.training.recipe import InitModel, TrainConfig, load_recipe
from mercury_jax.types import LM

DIFFUSION, TWIN = "diffusion", "autoregressive twin"


@dataclass(frozen=True, kw_only=True)
class AdaptBenchmark:
    """Adapt SmolLM2 to block diffusion, beside a twin that stays autoregressive.

    examples:
      python -m benchmarks.adapt --answers answers.jsonl --text "text/*.txt" --out adapt
      python -m benchmarks.adapt --answers answers.jsonl --text "text/*.txt" --steps 4000 --batch 64

    answers.jsonl is what `mercury data answers` writes. The block grows in equal
    steps during the first half of the run: with 1 4 8 16, to 4 after a sixth of
    the steps, to 8 after a third, to 16 after half. A run that was stopped goes
    on.
    """

    answers: Annotated[str, option("FILE.jsonl")]
    """The model's own answers."""
    text: Annotated[str, option("GLOB")]
    """Plain text."""
    model: Annotated[str, option("MODEL")] = "smollm2"
    """An autoregressive model."""
    steps: Int = 400
    """Updates."""
    batch: Int = 4
    """Rows of an update."""
    row: Int = 1024
    """Positions of a row of the diffusion run, clean and noised copies together; the twin has half of them."""
    evaluations: Int = 10
    """Evaluations of a run."""
    eval_batches: Int = 4
    """Batches of held-out rows of an evaluation."""
    blocks: Ints = (1, 4, 8, 16)
    """Tokens of a block, growing."""
    out: Annotated[str, option("FOLDER")] = "runs/adapt"
    """Folder of the two runs, of rows.jsonl and of curve.png."""
    json: Flag = False
    """Print one JSON object for each record."""


def run(argv: Sequence[str]) -> int:
    """Runs the benchmark; returns its exit code."""
    args = arguments.read(AdaptBenchmark, argv, "python -m benchmarks.adapt")
    if args.steps < args.evaluations:
        raise refuse("--evaluations", args.evaluations, f"at most {args.steps}, one after each step")
    out, lm, rows = Path(args.out), show.load(args.model), []
    for name in (DIFFUSION, TWIN):
        config = recipe(args, name)
        mj.train(dataclasses.replace(config, resume=(config.folder / "checkpoints").exists()))
        rows += list(curve(lm, name, config))
        show.write_records(str(out / "rows.jsonl"), rows)
    for row in rows:
        show.emit(row) if args.json else print(line(row))
    plot(rows, out / "curve.png")
    return 0


def recipe(args: AdaptBenchmark, name: str) -> TrainConfig:
    """The recipe of one of the two runs."""
    base, twin = load_recipe("adapt_smollm2"), name == TWIN
    sources = (
        (data.chat(args.answers, held_out=0.05, bad_lines="skip"), 0.7),
        (data.text(args.text, held_out=0.05), 0.3),
    )
    starts = [round(args.steps * share) for share in np.linspace(0, 0.5, len(args.blocks))]
    growing = tuple(zip(starts, args.blocks, strict=True)) if len(args.blocks) > 1 else ()
    largest = dataclasses.replace(base.model, block=max(args.blocks))  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(
        base, name=name.replace(" ", "_"), out=str(Path(args.out) / name.replace(" ", "_")), init=args.model,
        model=InitModel() if twin else largest, data=data.mixture(*sources), blocks=() if twin else growing,
        # The twin is not noised; with uniform noise it needs no mask, of which SmolLM2 has none.
        noise=NoiseConfig(kind="uniform") if twin else base.noise,
        # Without a limit of the weights, so that what is logged is a bound.
        objective=next_token() if twin else masked_elbo(complementary=True),
        steps=args.steps, batch=args.batch, row=args.row // (2 if twin else 1),
        eval_every=args.steps // args.evaluations, eval_batches=args.eval_batches,
        save_every=max(1, args.steps // 4), log_every=max(1, args.steps // 20),
    )  # fmt: skip


def tokens_per_byte(lm: LM, config: TrainConfig) -> float:
    """Tokens for each byte of what an evaluation scores."""
    changed = dataclasses.replace(lm.model.config, **_changes(config))
    layout = layout_of(config.objective, models.build(changed))
    batches = data.build(
        config.mixture, lm.tokenizer, layout, rows=config.batch, row=config.row, seed=config.seed, split="test",
        prefetch=0,
    )  # fmt: skip
    scored = [
        tokens[editable]
        for batch in itertools.islice(batches, config.eval_batches)
        for tokens, editable in zip(np.asarray(batch.tokens), np.asarray(batch.editable), strict=True)
    ]
    return sum(map(len, scored)) / sum(len(lm.tokenizer.decode(ids).encode()) for ids in scored)


def _changes(config: TrainConfig) -> dict[str, Any]:
    model = config.model
    assert isinstance(model, InitModel)
    return model.changes


def curve(lm: LM, name: str, config: TrainConfig) -> Iterator[dict[str, Any]]:
    """Yields a record for each evaluation of a run."""
    lines = [json.loads(text) for text in (config.folder / "metrics.jsonl").read_text().splitlines()]
    tokens = {row["step"]: row["tokens"] for row in lines if row["kind"] == "train"}
    factor = tokens_per_byte(lm, config) / math.log(2)
    for row in lines:
        if row["kind"] != "eval":
            continue
        seen = tokens[max(step for step in tokens if step <= row["step"])]
        block = [block for first, block in config.blocks if first <= row["step"]] or [1]
        yield {
            "run": name, "step": row["step"], "tokens": seen, "block": block[-1],
            "bits_per_byte": row["nats_per_token"] * factor,
        }  # fmt: skip


def line(row: Mapping[str, Any]) -> str:
    """A record for people."""
    return (
        f"{row['run']:20} step {row['step']:5}, {row['tokens']:10,} tokens, blocks of {row['block']:2}: "
        f"{row['bits_per_byte']:.3f} bits per byte"
    )


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws bits per byte against tokens."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name in (DIFFUSION, TWIN):
        of = [row for row in rows if row["run"] == name]
        axes.plot([row["tokens"] for row in of], [row["bits_per_byte"] for row in of], marker="o", label=name)
    axes.set(xlabel="tokens", ylabel="bits per byte, held out", title="SmolLM2, adapted to blocks of 16")
    axes.legend()
    axes.grid(alpha=0.2)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(run_script(run))
