"""What quantisation costs: a model with quantised weights, or a quantised KV cache, beside the same model without.

answers    the same held-out questions for every variant: accuracy, and its difference in points
text       held-out code: the bound on -log p of a canvas behind a prefix in the KV cache, with the same masks for
           every variant, so that the difference has little noise

Run with `python -m benchmarks.quantise`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np

from benchmarks.script import run_script
from mercury_jax import evaluate
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, Int, Positional, option
from mercury_jax.compilation import hardware
from mercury_jax.config import at_least, refuse
from mercury_jax.decode import likelihood, score
from mercury_jax.decode.token_stats import NEVER
from mercury_jax.evaluate import code
from mercury_jax.evaluate.runner import EvalReport, Z, paired
from mercury_jax.models import cache
from mercury_jax.types import LM, LaidOutDocument

TEXT = "held-out code"
# (weights, KV cache); None for the model's dtype. All others are compared with the first.
PAIRS = (
    (None, None), ("int8", None), ("fp8", None), ("int8_dynamic", None), ("fp8_dynamic", None),
    (None, "int8"), (None, "4bit"), (None, "3bit"), ("int8", "4bit"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class QuantiseBenchmark:
    """Measure what quantised weights and a quantised KV cache cost in quality.

    examples:
      python -m benchmarks.quantise
      python -m benchmarks.quantise runs/mine/model --tasks sudoku4 --limit 128

    Weights in full, as int8 and as fp8, also with the rows that they multiply; the KV cache in full, as int8, and in 4
    and 3 bits. `points` and `more` compare question by question, and piece by
    piece of held-out code under the same masks, with the model in full; their
    95% intervals are those of the differences.
    """

    model: Annotated[Positional[str | None], option("MODEL")] = None
    """Folder of a saved model. Default: the embedded one."""
    tasks: Annotated[tuple[str, ...], option("TASK [TASK ...]")] = ("sudoku4", "add3")
    """Tasks."""
    limit: Int = 512
    """Questions of each task."""
    pieces: Int = 256
    """Pieces of held-out code; 0 for none."""
    samples: Int = 8
    """Times that each piece is masked."""
    batch: Int = 64
    """Rows decoded together."""
    seed: Int = 0
    """Draws questions, pieces and masks."""
    out: Annotated[str | None, option("FILE.jsonl")] = None
    """Write the records, too."""
    json: Flag = False
    """Print one JSON object for each record."""


def run(argv: Sequence[str]) -> int:
    """Runs the benchmark; returns its exit code."""
    args = arguments.read(QuantiseBenchmark, argv, "python -m benchmarks.quantise")
    show.check_writable("--out", args.out)
    with show.progress("time", quiet=args.json) as update:
        found = compare(
            functools.partial(show.load, args.model), args.tasks, limit=args.limit, pieces=args.pieces,
            samples=args.samples, batch=args.batch, seed=args.seed, tick=lambda text: update(description=text),
        )  # fmt: skip
    show.report(found, args.out, None if args.json else line)
    return 0


def line(row: Mapping[str, Any]) -> str:
    """A record for people."""
    text = (
        f"{row['task']:14} weights {row['weights']:8} {row['parameter_bytes'] / 1e6:8.2f} MB, "
        f"KV cache {row['kv']:8} {row['cache_bytes_per_token']:7.0f} bytes per token: "
    )
    if "accuracy" in row:
        return text + (
            f"{100 * row['accuracy']:5.1f}% of {row['n']}, {row['points']:+.1f} points "
            f"({row['points_low']:+.1f} to {row['points_high']:+.1f}), agreement {100 * row['agreement']:.1f}%"
        )
    return text + (
        f"{row['nats_per_token']:.4f} nats per token, {row['more']:+.4f} "
        f"({row['more_low']:+.4f} to {row['more_high']:+.4f})"
    )


Load = Callable[..., LM]  # of `quantise=`


class Variant(NamedTuple):
    """A model with quantised weights or KV cache; bytes of the parameters, and of the cache for each token."""

    lm: LM
    weights: str
    kv: str
    bytes: int
    bytes_per_token: float


class MaskedText(NamedTuple):
    """A canvas of held-out text behind its prefix, masked N times.

    Attributes:
        before: Ids of the prefix [P].
        canvas: Ids [L].
        hidden: Which are masked [N, L].
        weight: Weight of each in the bound [N, L].
    """

    before: np.ndarray
    canvas: np.ndarray
    hidden: np.ndarray
    weight: np.ndarray


def variants(load: Load) -> list[Variant]:
    """The model with every pair of PAIRS; weights are loaded once for each kind."""
    found = {kind: load(quantise=kind) for kind in dict.fromkeys(weights for weights, _ in PAIRS)}
    # The score of an autoregressive model is one pass without a cache.
    scored = [pair for pair in PAIRS if pair[1] is None or not found[None].model.config.autoregressive]
    return [_variant(found[weights], weights, kv) for weights, kv in scored]


def _variant(lm: LM, weights: str | None, kv: str | None) -> Variant:
    model, full = cache.with_kv_kind(lm.model, kv), str(lm.model.config.dtype)
    row = jax.eval_shape(lambda: model.empty_cache(1, lm.model.config.context))
    size = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    per_token = size(row) / lm.model.config.context
    return Variant(
        dataclasses.replace(lm, model=model), weights or full, kv or full, size(lm.params), per_token
    )


def compare(
    load: Load,
    tasks: Sequence[str],
    *,
    limit: int = 512,
    pieces: int = 256,
    samples: int = 8,
    batch: int = 64,
    seed: int = 0,
    tick: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Measures every variant.

    Args:
        load: Loads the model with `quantise=`.
        tasks: Tasks whose questions are asked.
        limit: Questions of each task.
        pieces: Pieces of held-out code; 0 for none.
        samples: Times that each piece is masked.
        batch: Rows decoded together.
        seed: Draws questions, pieces and masks.
        tick: Called with what comes next.

    Returns:
        A record for each variant on each task, and one for each on text.

    Raises:
        ValueError: A number out of range, or pieces for a model without a mask.
    """
    at_least(1, limit=limit, samples=samples, batch=batch)
    at_least(0, pieces=pieces)
    found, made = variants(load), []
    first = found[0].lm
    if pieces and first.corruption.mask is None and not first.model.config.autoregressive:
        raise refuse("pieces", pieces, "0: a model with uniform noise has no masks")
    for task in tasks:
        reports = []
        for one in found:
            tick(f"{task}: {one.weights} weights, {one.kv} KV cache")
            reports.append(evaluate.run(one.lm, task, limit=limit, batch=batch, seed=seed))
        made += [_answers(v, r, reports[0]) for v, r in zip(found, reports, strict=True)]
    return made + (_text(found, pieces, samples, seed, tick) if pieces else [])


def _answers(variant: Variant, report: EvalReport, base: EvalReport) -> dict[str, Any]:
    first, now = ([row["correct"] for row in r.rows] for r in (base, report))
    points = (0.0,) * 3 if report is base else tuple(100 * x for x in paired(first, now))
    same = [a["prediction"] == b["prediction"] for a, b in zip(base.rows, report.rows, strict=True)]
    kept = (
        "task",
        "seed",
        "batch",
        "rule",
        "max_tokens",
        "n",
        "correct",
        "accuracy",
        "low",
        "high",
        "forwards",
    )
    return {
        **_about(variant), **{name: report.summary[name] for name in kept},
        **dict(zip(("points", "points_low", "points_high"), points)), "agreement": float(np.mean(same)),
    }  # fmt: skip


def _text(
    found: Sequence[Variant], count: int, samples: int, seed: int, tick: Callable[[str], None]
) -> list[dict[str, Any]]:
    asked = masked_texts(found[0].lm, count, samples, seed)
    all_nats = []
    for one in found:
        tick(f"{TEXT}: {one.weights} weights, {one.kv} KV cache")
        all_nats.append(np.array([nats_per_token(one.lm, piece) for piece in asked]))
    return [_row(v, x, all_nats[0], asked, seed) for v, x in zip(found, all_nats, strict=True)]


def masked_texts(lm: LM, count: int, samples: int, seed: int) -> list[MaskedText]:
    """The third block of chunks of held-out code, behind the first two; of an autoregressive model whole chunks.

    Args:
        lm: The model.
        count: Pieces.
        samples: Times that each is masked.
        seed: Draws chunks and masks.

    Returns:
        The pieces.

    Raises:
        ValueError: Three blocks do not fit into a chunk.
    """
    if lm.model.config.autoregressive:
        found = [np.asarray(laid.tokens) for laid in code.chunks(lm, count, seed)]
        ones = lambda ids: np.ones((1, len(ids) - 1))
        return [MaskedText(ids[:1], ids[1:], ones(ids) > 0, ones(ids)) for ids in found]
    rng, block = np.random.default_rng((seed, 3)), lm.model.config.block
    texts = []
    for laid in code.chunks(lm, 2 * count, seed):
        ids = np.zeros(int(laid.positions.max()) + 1, np.int32)
        ids[laid.positions] = laid.tokens  # the text before it was laid out
        texts.append(ids[: 3 * block])
    whole = [ids for ids in texts if len(ids) == 3 * block][:count]
    if not whole:
        raise refuse("model.block", block, "one of which three fit into a chunk of held-out code")
    laid = LaidOutDocument(
        whole[0][:block],
        np.arange(block),
        np.zeros((block, 2, 2), int),
        np.ones(block, bool),
        np.zeros(block, int),
    )
    return [
        MaskedText(ids[:-block], ids[-block:], *likelihood.draw_masks(laid, samples, rng)) for ids in whole
    ]


def nats_per_token(lm: LM, piece: MaskedText) -> float:
    """The bound on -log p for each token of the canvas, in nats: the mean over the samples; exact if autoregressive.

    Args:
        lm: The model.
        piece: A masked text.

    Returns:
        Nats for each token.
    """
    if lm.model.config.autoregressive:
        [total] = likelihood.next_token_nats(lm, [(piece.before.tolist(), piece.canvas.tolist())])
        return float(total) / len(piece.canvas)
    assert lm.corruption.mask is not None
    noised = np.where(piece.hidden, lm.corruption.mask, piece.canvas)
    logits = np.array(score.logits(lm, noised, prompt=piece.before.tolist()), np.float64)
    logits[..., list(lm.corruption.forbidden)] = NEVER
    most = logits.max(-1)
    total = most + np.log(np.exp(logits - most[..., None]).sum(-1))
    chosen = np.take_along_axis(logits, piece.canvas[None, :, None], axis=-1)[..., 0]
    return float(((total - chosen) * piece.weight * piece.hidden).sum(1).mean() / len(piece.canvas))


def _row(
    variant: Variant, mine: np.ndarray, base: np.ndarray, asked: Sequence[MaskedText], seed: int
) -> dict[str, Any]:
    """nats_per_token with its 95% interval, and its paired difference from the first variant's as `more`."""
    near = lambda x: (x.mean(), Z * x.std(ddof=1) / len(x) ** 0.5 if len(x) > 1 else math.inf)
    (mean, half), (more, more_half) = near(mine), near(mine - base)
    first = asked[0]
    return {
        **_about(variant), "task": TEXT, "seed": seed, "n": len(asked), "samples": len(first.hidden),
        "prefix": len(first.before), "canvas": len(first.canvas),
        "nats_per_token": float(mean), "low": float(mean - half), "high": float(mean + half),
        "more": float(more), "more_low": float(more - more_half), "more_high": float(more + more_half),
    }  # fmt: skip


def _about(variant: Variant) -> dict[str, Any]:
    full = str(variant.lm.model.config.dtype)
    return {
        "weights": variant.weights, "kv": variant.kv, "parameter_bytes": variant.bytes,
        "cache_bytes_per_token": variant.bytes_per_token, "model": variant.lm.name, "hardware": hardware(),
        "compared_with": f"{full} weights, {full} KV cache",
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_script(run))
