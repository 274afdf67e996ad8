"""The most probable tokens of one cell, as a pass saw them: one denoiser pass, at padded sizes.

The sizes are padded to a few, so that clicking through a trace compiles a handful of programs, not one a cell.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mercury_jax.decode.program import bucket
from mercury_jax.decode.read import forbid
from mercury_jax.serve.engine.infilling import SUFFIX_TOKENS, fim_order
from mercury_jax.serve.engine.request import EngineRequest
from mercury_jax.serve.playground.request import cells as cells_of
from mercury_jax.types import LM, Model, Params

TOP = 5


class Canvas(NamedTuple):
    """What a pass read: `text[:known]` encoded, the rest denoised; `at` counts from the canvas's start."""

    text: np.ndarray
    known: int
    at: int
    forbidden: tuple[int, ...]  # ids that it could not write


class Best(NamedTuple):
    """The most probable ids of a cell, and whether the canvas is the one that the pass read."""

    ids: list[int]
    p: list[float]
    exact: bool


def canvas(
    lm: LM,
    job: EngineRequest,
    tokens: Sequence[int],
    settled: Sequence[bool],
    start: int,
    index: int,
    block: int,
) -> Canvas:
    """The text as it stood before a pass over the block at `start`; tokens, settled: what the pass before showed.

    Cells that were not settled are noise, as are those past the end of `tokens`. Nothing ends inside of a hole.
    """
    ends = (lm.model.config.eos, *lm.model.config.ends) if job.suffix is not None else ()
    job, config = fim_order(lm, job), lm.model.config
    size = cells_of(job)
    cells = np.full(size, -1, np.int64)
    for i, token in enumerate(tokens[:size]):
        cells[i] = token if i < start or settled[i] else -1
    if (
        start < len(tokens) < min(size, start + block)
    ):  # an answer is shown up to the end of text that settled
        cells[len(tokens)] = config.eos
    noise = _noise(lm, size)
    before, behind = list(job.prompt), list(job.suffix or ())[:SUFFIX_TOKENS]
    text = np.concatenate([before, np.where(cells < 0, noise, cells), behind]).astype(np.int32)
    known = int(lm.model.encodable(jnp.asarray([len(before) + start]))[0])
    if config.pattern != "bidirectional" and not len(behind):
        text = text[: known + block]
    return Canvas(text, known, len(before) + index - known, (*lm.corruption.forbidden, *ends))


def _noise(lm: LM, size: int) -> np.ndarray:
    """Masks; without a mask, a draw of the prior: the one that the pass read is not kept."""
    if lm.corruption.mask is not None:
        return np.full(size, lm.corruption.mask)
    return np.asarray(lm.corruption.prior(jax.random.key(0), jnp.ones((size,), jnp.float32)))


def best(lm: LM, seen: Canvas) -> Best:
    """The TOP ids at `seen.at` by the model itself: no temperature, bias or grammar."""
    before, rest = seen.text[: seen.known], seen.text[seen.known :]
    pad = lambda x, size: np.pad(x, (0, size - len(x)))[None]
    numbers = np.asarray([seen.known, len(rest), seen.at], np.int32)
    share = float((rest == lm.corruption.mask).mean()) if lm.corruption.mask is not None else 1.0
    p, ids = _pass(
        lm.model, seen.forbidden, lm.params, pad(before, bucket(max(len(before), 1))), pad(rest, bucket(len(rest))),
        numbers, np.float32(share),
    )  # fmt: skip
    return Best(ids.tolist(), p.tolist(), exact(lm))


def exact(lm: LM) -> bool:
    """Whether a trace holds all that a pass read: no redrawn noise, and nothing of what the pass before guessed."""
    carry = jax.eval_shape(lambda: lm.model.condition(None, jnp.zeros((1, 1, 1))))
    return lm.corruption.mask is not None and not jax.tree.leaves(carry)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _pass(
    model: Model,
    forbidden: tuple[int, ...],
    params: Params,
    before: Int[Array, "1 A"],
    rest: Int[Array, "1 C"],
    numbers: Int[Array, "3"],
    time: Float[Array, ""],
) -> tuple[Float[Array, "k"], Int[Array, "k"]]:
    known, n, at = (numbers[i : i + 1] for i in range(3))
    told = lambda t: {"time": t[None]} if model.config.timed else {}
    # Dead positions write past the end: one canvas more than anything that lives.
    cache = model.empty_cache(1, before.shape[1] + 2 * rest.shape[1])
    yes, zero = jnp.ones((1,), bool), jnp.zeros((1,), jnp.int32)
    _, cache = model.forward(params, before, cache, zero, known, known, yes, (), **told(jnp.zeros_like(time)))
    hidden, _ = model.forward(params, rest, cache, known, n, known + n, ~yes, (), **told(time))
    one = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, at[0], 1, axis=1), hidden)
    logits: Any = forbid(model.head(params, one)[0], forbidden)
    return jax.lax.top_k(jax.nn.softmax(logits[0]), TOP)
