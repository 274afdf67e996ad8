"""Training on an accelerator: an update of a model by name, as a share of what its matrix unit can do."""

from __future__ import annotations

import math
import statistics
from typing import Any

import jax
import numpy as np

from mercury_jax import models, noise, sharding
from mercury_jax.bench import weightless
from mercury_jax.bench.ceilings import Ceilings
from mercury_jax.bench.gpu_models import peak
from mercury_jax.bench.timing import timed
from mercury_jax.config import ModelConfig, NoiseConfig
from mercury_jax.models import masks
from mercury_jax.train import objectives, optim, step as steps
from mercury_jax.types import Batch


def training(most: Ceilings, name: str, rows: int, row: int = 2048, turns: int = 5) -> dict[str, Any]:
    """A JSON-ready row: an update of AdamW on `rows` rows of `row` positions, as a share of the matmul ceiling (MFU).

    A row is a document's clean tokens and its canvases (block diffusion), so positions are about twice the tokens
    that are learnt from. The median of `turns`.
    """
    found = weightless.source(name)
    c, on = found.config, sharding.mesh(devices=jax.devices()[:1])
    model, corruption = models.build(c), noise.build(found.noise or NoiseConfig(), c.vocab, c.mask)
    tx, lr = optim.optimizer(optim.OptimConfig(), 1000), optim.schedule(optim.OptimConfig(), 1000)
    state = steps.init(jax.random.key(0), model, tx, ema=False, on=on)
    update = steps.updater(model, objectives.masked_elbo(), corruption, tx, lr, on=on)
    data, seconds, values = batch(c, rows, row), [], {}
    for _ in range(turns + 1):  # the first one compiles
        (state, report), took = timed(lambda state=state: jax.block_until_ready(update(state, data)))
        seconds.append(took)
        values = report.values
    work, each = flops(state.params, c, data), statistics.median(seconds[1:])
    return {
        "experiment": "training", "model": name, "rows": rows, "row": row, "seconds": each,
        "positions_per_second": rows * row / each, "tokens_per_second": float(data.editable.sum()) / each,
        "flops": work, "mfu": work / each / most.matmul, "loss": float(values["loss"]), "peak_bytes": peak(),
    }  # fmt: skip


def batch(c: ModelConfig, rows: int, row: int) -> Batch:
    """Rows of one random document each, as long as fits behind its clean tokens; the rest is padding."""
    size = row if c.pattern == "bidirectional" else max(c.block, (row + c.block) // (2 * c.block) * c.block)
    ids = np.random.default_rng(0).integers(c.vocab // 4, c.vocab // 2, size)  # no special one
    laid = masks.layout(c, ids, 0)
    pad: Any = lambda x, fill=0: np.repeat(_fit(np.asarray(x), row, fill)[None], rows, axis=0)
    return Batch(
        tokens=pad(laid.tokens), positions=pad(laid.positions), ranges=pad(laid.ranges), editable=pad(laid.editable),
        canvas=pad(laid.canvas, -1),
    )  # fmt: skip


def _fit(x: np.ndarray, row: int, fill: int) -> np.ndarray:
    return np.pad(x[:row], [(0, max(0, row - len(x))), *[(0, 0)] * (x.ndim - 1)], constant_values=fill)


def flops(params: Any, c: ModelConfig, data: Batch) -> float:
    """6 a parameter that multiplies and position, 12 a head's number and key that is seen: what the step must do."""
    total = sum(math.prod(x.shape) for x in jax.tree.leaves(params) if x.ndim > 1)
    lookup = 0 if c.tied else c.vocab * c.width
    ranges = np.asarray(data.ranges, np.int64)
    seen = float((ranges[..., 1] - ranges[..., 0]).clip(0).sum())
    positions = np.asarray(data.tokens).size
    return 6.0 * (total - lookup) * positions + 12.0 * c.heads * c.head_dim * c.layers * seen
