"""The code tasks, on held-out files of Python's standard library: a bound on bits per byte, and filling."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import refuse
from mercury_jax.decode.score import canvas_times
from mercury_jax.decode.token_stats import forbid
from mercury_jax.evaluate.report import Report, Z
from mercury_jax.evaluate.tasks import Settings, Task, refuse_unused
from mercury_jax.train.data import packing, sources, streams
from mercury_jax.types import LM, Batch, LaidOutDocument, Model, PackedPass, Params

ROW = 6  # positions of a laid-out chunk, in blocks: 192 for a block of 32, as our recipes train
ROWS = 32  # chunks of one pass: more logits at once only cost memory
GOLDEN = 0.6180339887498949


class Cost(NamedTuple):
    """Of each chunk [N]: the bound in nats, and what it is spread over."""

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray


def bits_per_byte(lm: LM, task: Task, settings: Settings) -> Report:
    """An upper bound on the bits that a byte of held-out code costs, with its standard error.

    A sample of chunks, cut and laid out as training cuts them: up to `6 block` positions, clean tokens and
    canvases together, beginning anywhere in a file. The first 0 to block - 1 tokens of a chunk are given
    and not scored. Every canvas behind them is scored whole, conditional on what stands before it in its
    chunk and on nothing else; so the context is some hundred tokens for a block of 32, and a model that
    could use more of the file gets no credit for it. End-of-text tokens that fill the last canvas of a file
    are paid for, and count no bytes.

    Of a canvas with m tokens, k are masked, k uniform in 1..m and spread evenly over all canvases, and their
    cross-entropies are summed with weight m / k: the any-order form of the NELBO (LLaDA, arXiv 2502.09992,
    eq. 6), unbiased. Ids that the model may never emit have no probability. The standard error is over
    chunks, so it has both the masks and the choice of chunks in it, not the choice of files.
    """
    refuse_unused(task, settings, "sampler", "plan", "max_tokens")
    if lm.corruption.mask is None:
        raise refuse("corruption", "uniform", "absorbing or hybrid noise: this bound counts masks")
    began = time.perf_counter()
    laid = chunks(lm, settings.limit or task.limit, settings.seed)
    cost = costs(lm, laid, settings)
    bits, se = ratio(cost.nats / math.log(2), cost.bytes)
    return Report(
        {
            "task": task.name,
            "data": "held-out files",
            "n": len(laid),
            "bits_per_byte": bits,
            "se": se,
            "low": bits - Z * se,
            "high": bits + Z * se,
            "bytes": int(cost.bytes.sum()),
            "tokens": int(cost.tokens.sum()),
            "nats_per_token": float(cost.nats.sum() / cost.tokens.sum()),
            "block": lm.model.config.block,
            "row": ROW * lm.model.config.block,
            "seed": settings.seed,
            "seconds": time.perf_counter() - began,
        },
        [{"nats": float(n), "tokens": int(t), "bytes": int(b)} for n, t, b in zip(*cost)],
    )


def chunks(lm: LM, limit: int, seed: int) -> list[LaidOutDocument]:
    """At most `limit` chunks of the held-out files: a random part of one pass over them all."""
    row = ROW * lm.model.config.block
    setting = streams.Setting(
        lm.tokenizer, functools.partial(lm.model.layout, all_clean=False), row, (seed,), "test"
    )
    stream = streams.stream(sources.stdlib(), setting)
    if stream is None:
        raise refuse("code-bpb", "no held-out file", "an interpreter that comes with its library's source")
    return [stream.at(i) for i in range(min(limit, stream.size))]


def costs(lm: LM, laid: Sequence[LaidOutDocument], settings: Settings) -> Cost:
    """The bound for every chunk, in passes of one fixed shape."""
    rng = np.random.default_rng((settings.seed, 1))
    lengths = np.array([len(piece) for piece in lm.tokenizer.pieces])  # bytes of each id
    rows = min(ROWS, settings.batch, len(laid))
    row = ROW * lm.model.config.block
    start, nats = rng.random(), []
    for at in range(0, len(laid), rows):
        part = [packing.Row(laid=[x]) for x in laid[at : at + rows]]
        batch = packing.batch(part + [packing.Row()] * (rows - len(part)), row, lm.tokenizer.pad)
        hidden, weight, start = masked(batch, start, rng)
        # In float64: thousands of weighted terms are summed.
        told = canvas_times(np.asarray(batch.canvas), weight) if lm.model.config.timed else None
        ce = np.asarray(_cross_entropy(lm.model, lm.corruption, lm.params, batch, hidden, told), np.float64)
        nats.append((ce * weight * hidden).sum(axis=1)[: len(part)])
        settings.progress(at + len(part), len(laid))
    scored = [x.tokens[x.editable] for x in laid]
    return Cost(
        np.concatenate(nats), np.array([len(x) for x in scored]), np.array([lengths[x].sum() for x in scored])
    )


def masked(
    batch: Batch, start: float, rng: np.random.Generator
) -> tuple[Bool[np.ndarray, "B T"], Float[np.ndarray, "B T"], float]:
    """(which positions to mask, their weights m / k, where to go on): one k for each canvas.

    k = 1 + floor(m frac(start + i * golden ratio)) over the canvases i: each k is uniform in 1..m,
    and any run of canvases has them spread evenly.
    """
    hidden, weight = np.zeros(batch.tokens.shape, bool), np.zeros(batch.tokens.shape)
    for b, canvas in enumerate(np.where(batch.editable, batch.canvas, -1)):
        for c in np.unique(canvas[canvas >= 0]):
            at = np.flatnonzero(canvas == c)
            start = (start + GOLDEN) % 1.0
            k = 1 + int(len(at) * start)
            hidden[b, rng.permutation(at)[:k]] = True
            weight[b, at] = len(at) / k
    return hidden, weight, start


@functools.partial(jax.jit, static_argnums=(0, 1))
def _cross_entropy(
    model: Model,
    corruption: Any,
    params: Params,
    batch: Batch,
    hidden: Bool[Array, "B T"],
    time: Float[Array, "B T"] | None,
) -> Float[Array, "B T"]:
    xt = jnp.where(hidden, corruption.mask, batch.tokens)
    logits = model.head(params, model.apply(params, PackedPass(xt, batch.positions, batch.ranges, time=time)))
    logits = jax.vmap(functools.partial(forbid, ids=corruption.forbidden))(logits.astype(jnp.float32))
    chosen = jnp.take_along_axis(logits, batch.tokens[..., None], axis=-1)[..., 0]
    # Where nothing is masked the token may be one that is never emitted (padding): 0, not 1e30.
    return jnp.where(hidden, jax.nn.logsumexp(logits, axis=-1) - chosen, 0.0)


def ratio(cost: Float[np.ndarray, "N"], size: Int[np.ndarray, "N"]) -> tuple[float, float]:
    """sum(cost) / sum(size) with the standard error of a ratio of two sums over the same N chunks."""
    n, r = len(cost), float(cost.sum() / size.sum())
    if n < 2:
        return r, math.inf
    rest = cost - r * size
    return r, math.sqrt(n / (n - 1) * float((rest**2).sum())) / float(size.sum())
