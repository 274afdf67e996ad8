"""What few bits cost: a model with rounded weights, or rounded keys and values, beside the same in full.

answers    the same held-out questions by every variant: accuracy, and by how many points it differs
text       held-out code: the bound on -log p of a canvas behind a prefix whose keys lie in the cache,
           with the same masks for every variant, so that the difference has little noise
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mercury_jax import evaluate
from mercury_jax.config import at_least, refuse
from mercury_jax.decode import score
from mercury_jax.decode.token_stats import NEVER
from mercury_jax.evaluate import card, code
from mercury_jax.evaluate.report import Report, Z, paired
from mercury_jax.models import cache
from mercury_jax.types import LM, LaidOutDocument

TEXT = "held-out code"
# (weights, keys and values); None: as the model's arithmetic. The first is what all others are compared with.
PAIRS = (
    (None, None), ("int8", None), ("fp8", None), (None, "int8"), (None, "4bit"), (None, "3bit"), ("int8", "4bit"),
)  # fmt: skip

Load = Callable[..., LM]  # of `quantise=`


class Variant(NamedTuple):
    """A model as it is kept, and what that takes."""

    lm: LM
    weights: str
    kv: str
    bytes: int  # of the parameters
    bytes_per_token: float  # of the cache


class Piece(NamedTuple):
    """A canvas of held-out text behind its prefix, masked `samples` times."""

    before: np.ndarray  # ids [P]
    canvas: np.ndarray  # ids [L]
    hidden: np.ndarray  # bool [N, L]
    weight: np.ndarray  # [N, L]


def variants(load: Load) -> list[Variant]:
    """The model as every pair of PAIRS keeps it; weights are read once for each kind."""
    found = {kind: load(quantise=kind) for kind in dict.fromkeys(weights for weights, _ in PAIRS)}
    return [_variant(found[weights], weights, kv) for weights, kv in PAIRS]


def _variant(lm: LM, weights: str | None, kv: str | None) -> Variant:
    model, full = cache.with_kv_kind(lm.model, kv), str(lm.model.config.dtype)
    row = jax.eval_shape(lambda: model.empty_cache(1, lm.model.config.context))
    size = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    per_token = size(row) / lm.model.config.context
    return Variant(
        dataclasses.replace(lm, model=model), weights or full, kv or full, size(lm.params), per_token
    )


def run(
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
    """A row for each variant on each task, and one on text (pieces of it; 0: none)."""
    at_least(1, limit=limit, samples=samples, batch=batch)
    at_least(0, pieces=pieces)
    found, made = variants(load), []
    if pieces and found[0].lm.corruption.mask is None:
        raise refuse("pieces", pieces, "0: a model of uniform noise has no masks to count")
    for task in tasks:
        reports = []
        for one in found:
            tick(f"{task}: {one.weights} weights, {one.kv} keys")
            reports.append(evaluate.run(one.lm, task, limit=limit, batch=batch, seed=seed))
        made += [_answers(v, r, reports[0]) for v, r in zip(found, reports, strict=True)]
    return made + (_text(found, pieces, samples, seed, tick) if pieces else [])


def _answers(variant: Variant, report: Report, base: Report) -> dict[str, Any]:
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
        **_told(variant), **{name: report.summary[name] for name in kept},
        **dict(zip(("points", "points_low", "points_high"), points)), "agreement": float(np.mean(same)),
    }  # fmt: skip


def _text(
    found: Sequence[Variant], count: int, samples: int, seed: int, tick: Callable[[str], None]
) -> list[dict[str, Any]]:
    asked = cut(found[0].lm, count, samples, seed)
    all_nats = []
    for one in found:
        tick(f"{TEXT}: {one.weights} weights, {one.kv} keys")
        all_nats.append(np.array([nats(one.lm, piece) for piece in asked]))
    return [_row(v, x, all_nats[0], asked, seed) for v, x in zip(found, all_nats, strict=True)]


def cut(lm: LM, count: int, samples: int, seed: int) -> list[Piece]:
    """The third block of chunks of held-out code, behind the two that stand before it."""
    rng, block = np.random.default_rng((seed, 3)), lm.model.config.block
    texts = (_ids(laid)[: 3 * block] for laid in code.chunks(lm, 2 * count, seed))
    whole = [ids for ids in texts if len(ids) == 3 * block][:count]
    if not whole:
        raise refuse("model.block", block, "one of which three fit into a chunk of held-out code")
    laid = LaidOutDocument(
        whole[0][:block],
        np.arange(block),
        np.zeros((block, 2, 2), np.int32),
        np.ones(block, bool),
        np.zeros(block, int),
    )
    return [Piece(ids[:-block], ids[-block:], *score.draw_masks(laid, samples, rng)) for ids in whole]


def _ids(laid: LaidOutDocument) -> np.ndarray:
    """The text that was laid out."""
    ids = np.zeros(int(laid.positions.max()) + 1, np.int32)
    ids[laid.positions] = laid.tokens
    return ids


def nats(lm: LM, piece: Piece) -> float:
    """The bound on -log p of a token of the canvas: the mean over the samples."""
    assert lm.corruption.mask is not None
    noised = np.where(piece.hidden, lm.corruption.mask, piece.canvas)
    logits = np.array(score.logits(lm, noised, prompt=piece.before.tolist()), np.float64)
    logits[..., list(lm.corruption.forbidden)] = NEVER
    most = logits.max(-1)
    total = most + np.log(np.exp(logits - most[..., None]).sum(-1))
    chosen = np.take_along_axis(logits, piece.canvas[None, :, None], axis=-1)[..., 0]
    return float(((total - chosen) * piece.weight * piece.hidden).sum(1).mean() / len(piece.canvas))


def _row(
    variant: Variant, mine: np.ndarray, base: np.ndarray, asked: Sequence[Piece], seed: int
) -> dict[str, Any]:
    """nats_per_token with its interval, and by how much it is more than the first variant's, piece by piece."""
    near = lambda x: (x.mean(), Z * x.std(ddof=1) / len(x) ** 0.5 if len(x) > 1 else math.inf)
    (mean, half), (more, more_half) = near(mine), near(mine - base)
    first = asked[0]
    return {
        **_told(variant), "task": TEXT, "seed": seed, "n": len(asked), "samples": len(first.hidden),
        "prefix": len(first.before), "canvas": len(first.canvas),
        "nats_per_token": float(mean), "low": float(mean - half), "high": float(mean + half),
        "more": float(more), "more_low": float(more - more_half), "more_high": float(more + more_half),
    }  # fmt: skip


def _told(variant: Variant) -> dict[str, Any]:
    full = str(variant.lm.model.config.dtype)
    return {
        "weights": variant.weights, "kv": variant.kv, "parameter_bytes": variant.bytes,
        "cache_bytes_per_token": variant.bytes_per_token, "model": variant.lm.name, "hardware": card.hardware(),
        "compared_with": f"{full} weights, {full} keys and values",
    }  # fmt: skip
