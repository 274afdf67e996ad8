"""The data of the playground page for a denoising pass: changed cells, and the most probable tokens of one cell.

A cell shows one token of the output. The stream (`app.Playground.stream`) sends one frame per snapshot, with the
changed cells only. `left_to_right` makes the snapshots of the opponent in a race. The most probable tokens of a cell
(`top_tokens`) are computed when the user clicks on the cell, by another forward pass over the canvas as it was. Sizes
are padded to a few values, so that few programs are compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mercury_jax.decode.methods.block_drafter import without_drafter
from mercury_jax.decode.rules import autoregressive
from mercury_jax.decode.state import bucket as padded_size
from mercury_jax.decode.stream import stream
from mercury_jax.decode.token_stats import forbid
from mercury_jax.serve.engine.infilling import SUFFIX_TOKENS, fim_order
from mercury_jax.serve.engine.request import EngineRequest, Snapshot
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.types import LM, Model, Params, Pass
from mercury_jax.viz import label

ACCEPTED, FORCED = 1, 2  # bits of a cell's flags, beside those of its label
PRECISION = 1000  # steps of a confidence; finer steps would send changes that are not visible
TOP = 5  # most probable tokens to show for a cell


class ShownCells(NamedTuple):
    """The cells that the page currently shows; one entry per cell.

    Attributes:
        tokens: int32 [n].
        flags: int [n], ACCEPTED and FORCED.
        confidence: int [n], in steps of 1 / PRECISION.
    """

    tokens: np.ndarray
    flags: np.ndarray
    confidence: np.ndarray


NO_CELLS = ShownCells(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))


def changed_cells(shown: ShownCells, snapshot: Snapshot) -> tuple[ShownCells, np.ndarray]:
    """Compares a snapshot with the cells that the page shows.

    Cells before the active block keep the confidence with which they were accepted; the engine reports 1 for them.
    """
    n, before = len(snapshot.tokens), len(shown.tokens)
    confidence = np.rint(np.nan_to_num(snapshot.confidence) * PRECISION).astype(np.int64)
    kept = min(snapshot.start, before, n)
    confidence[:kept] = shown.confidence[:kept]
    flags = ACCEPTED * snapshot.accepted.astype(np.int64) + FORCED * snapshot.forced.astype(np.int64)
    new = ShownCells(snapshot.tokens, flags, confidence)
    changed = np.ones(n, bool)
    both = min(n, before)
    changed[:both] = np.any([a[:both] != b[:both] for a, b in zip(new, shown, strict=True)], axis=0)
    return new, np.flatnonzero(changed)


def frame_event(
    tokenizer: AnyTokenizer, shown: ShownCells, changed: Iterable[int], snapshot: Snapshot
) -> dict[str, Any]:
    """Makes the event of one pass.

    Returns:
        A JSON object {type, forwards, start, n, cells: [[index, id, text, flags, confidence], ...]}.
    """
    cells = []
    for i in map(int, changed):
        token = int(shown.tokens[i])
        text, kind = label(tokenizer, token)
        cells.append([i, token, text, int(shown.flags[i]) | kind, int(shown.confidence[i]) / PRECISION])
    sizes = {"forwards": snapshot.forwards, "start": snapshot.start, "n": len(shown.tokens)}
    return {"type": "frame", **sizes, "cells": cells}


def left_to_right(lm: LM, request: EngineRequest) -> Iterator[Snapshot]:
    """Decodes a request with `rules.autoregressive`: the same weights, one token per pass, with a KV cache.

    This rule changes the program of an engine, so it cannot share a batch with other rules; `mj.stream` decodes alone.
    """
    lm, sampler, size = without_drafter(lm), autoregressive(request.temperature or 0.0), request.max_output
    for out in stream(lm, list(request.prompt), max_tokens=size, seed=request.seed, sampler=sampler):
        n, forced = len(out.tokens), np.zeros(len(out.tokens), bool)
        snapshot = Snapshot(
            out.tokens, out.accepted, out.confidence, forced, n, out.start, out.forwards, cached=0
        )
        yield snapshot
        if out.done:
            yield snapshot._replace(finish="length" if n == size else "stop")


class PassInput(NamedTuple):
    """The input of a denoising pass.

    Attributes:
        text: Ids of prompt and canvas; `text[:encoded]` was in the KV cache, the rest was denoised.
        encoded: Tokens in the KV cache.
        position: The cell, counted from the start of the canvas.
        forbidden: Ids that the pass could not write.
    """

    text: np.ndarray
    encoded: int
    position: int
    forbidden: tuple[int, ...]


class TopTokens(NamedTuple):
    """The TOP most probable token ids of a cell with their probabilities.

    Attributes:
        ids: Token ids, most probable first.
        p: Probabilities of the ids.
        exact: Whether the canvas is exactly the input of the original pass (`is_exact`).
    """

    ids: list[int]
    p: list[float]
    exact: bool


def pass_input(
    lm: LM,
    request: EngineRequest,
    tokens: Sequence[int],
    accepted: Sequence[bool],
    start: int,
    index: int,
    block: int,
) -> PassInput:
    """Reconstructs the input of a pass from the frame before it.

    Cells that were not accepted become noise, as do the cells after the end of `tokens`.
    """
    config, filling = lm.model.config, request.suffix is not None
    ends = (config.eos, *config.ends) if filling else ()  # an answer cannot end inside a hole
    request = fim_order(lm, request)
    size = request.max_output
    cells = np.full(size, -1, np.int64)
    for i, token in enumerate(tokens[:size]):
        cells[i] = token if i < start or accepted[i] else -1
    if start < len(tokens) < min(size, start + block):  # frames omit an accepted end of text
        cells[len(tokens)] = config.eos
    if lm.corruption.mask is not None:
        noise = np.full(size, lm.corruption.mask)
    else:  # a new draw from the prior, since the noise of the original pass is not kept
        noise = np.asarray(lm.corruption.prior(jax.random.key(0), jnp.ones((size,), jnp.float32)))
    before, behind = list(request.prompt), list(request.suffix or ())[:SUFFIX_TOKENS]
    text = np.concatenate([before, np.where(cells < 0, noise, cells), behind]).astype(np.int32)
    encoded = int(lm.model.encodable(jnp.asarray([len(before) + start]))[0])
    if config.pattern != "bidirectional" and not behind:
        text = text[: encoded + block]
    return PassInput(text, encoded, len(before) + index - encoded, (*lm.corruption.forbidden, *ends))


def top_tokens(lm: LM, read: PassInput) -> TopTokens:
    """Computes the most probable tokens of a cell, from the model's probabilities without any logits processor."""
    before, canvas = read.text[: read.encoded], read.text[read.encoded :]
    pad = lambda x, size: np.pad(x, (0, size - len(x)))[None]
    sizes = np.asarray([read.encoded, len(canvas), read.position], np.int32)
    masked = float((canvas == lm.corruption.mask).mean()) if lm.corruption.mask is not None else 1.0
    p, ids = _forward(
        lm.model,
        read.forbidden,
        lm.params,
        pad(before, padded_size(max(len(before), 1))),
        pad(canvas, padded_size(len(canvas))),
        sizes,
        np.float32(masked),
    )
    return TopTokens(ids.tolist(), p.tolist(), is_exact(lm))


def is_exact(lm: LM) -> bool:
    """Says whether frames determine the input of a pass: no random noise, and no self-conditioning."""
    self_conditioning = jax.eval_shape(lambda: lm.model.condition(None, jnp.zeros((1, 1, 1))))
    return lm.corruption.mask is not None and not jax.tree.leaves(self_conditioning)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(
    model: Model,
    forbidden: tuple[int, ...],
    params: Params,
    before: Int[Array, "1 A"],
    canvas: Int[Array, "1 C"],
    sizes: Int[Array, "3"],
    time: Float[Array, ""],
) -> tuple[Float[Array, "k"], Int[Array, "k"]]:
    """Encodes the tokens before the canvas, denoises the canvas once, and returns the TOP of one position."""
    encoded, n, position = (sizes[i : i + 1] for i in range(3))
    clean, noise = (jnp.zeros((1,)), time[None]) if model.config.timed else (None, None)
    # Padded positions write keys after the used part of the cache, so the cache has room for one more canvas.
    cache = model.empty_cache(1, before.shape[1] + 2 * canvas.shape[1])
    yes, zero = jnp.ones((1,), bool), jnp.zeros((1,), jnp.int32)
    _, cache = model.forward(params, Pass(before, cache, zero, encoded, encoded, yes, time=clean))
    hidden, _ = model.forward(params, Pass(canvas, cache, encoded, n, encoded + n, ~yes, time=noise))
    cell = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, position[0], 1, axis=1), hidden)
    logits = forbid(model.head(params, cell)[0], forbidden)
    return jax.lax.top_k(jax.nn.softmax(logits[0]), TOP)
