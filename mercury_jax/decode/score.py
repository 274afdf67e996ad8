"""score(): a bound on log p(completion | prompt); logits(): one denoiser pass."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mercury_jax.config import at_least, refuse
from mercury_jax.decode.program import QUANTUM, bucket
from mercury_jax.decode.prompts import check_seed, normalise
from mercury_jax.decode.read import forbid
from mercury_jax.types import LM, Laid, Model, Params


class Score(NamedTuple):
    """A lower bound on log p in nats, its standard error, and what it was taken over.

    With canvases of one token (autoregression) the bound is exact and the error 0.
    """

    log_p: float
    se: float
    tokens: int
    samples: int

    @property
    def nats_per_token(self) -> float:
        """-log_p / tokens."""
        return -self.log_p / self.tokens


def score(lm: LM, prompt: Any, completion: Any, *, samples: int = 32, seed: int = 0) -> Score:
    """Lower bound on log p(completion | prompt), by masking k of a canvas's L tokens, k uniform in 1..L.

    The weight of a canvas is L / k; that any-order form of the NELBO has less variance than masking
    each token by itself (LLaDA, arXiv 2502.09992, eq. 6). k is stratified over the samples.
    prompt, completion: text or ids; the prompt may be empty, or a conversation.
    """
    if lm.corruption.mask is None:
        raise refuse("corruption", "uniform", "absorbing or hybrid noise: this bound counts masks")
    at_least(1, samples=samples)
    before = [] if isinstance(prompt, str) and not prompt else normalise(lm, prompt)[0][0].ids
    after = normalise(lm, completion)[0][0].ids
    total = len(before) + len(after)
    if total > lm.model.config.context:
        raise refuse(
            "prompt and completion", f"{total} tokens", f"at most {lm.model.config.context}, the context"
        )
    laid = lm.model.layout(np.asarray(before + after, np.int32), len(before), whole=False)
    hidden, weight = masks(laid, samples, np.random.default_rng(check_seed(seed)))
    nats = weighted_nats(lm, laid, hidden, weight)
    spread = float(nats.std(ddof=1) / np.sqrt(samples)) if samples > 1 else 0.0
    exact = bool((weight[:, laid.editable] == 1.0).all() and hidden[:, laid.editable].all())
    return Score(-float(nats.mean()), 0.0 if exact else spread, len(after), samples)


def masks(laid: Laid, samples: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(which positions to mask [N, T], their weights [N, T]): k of each canvas's m editable tokens.

    k = 1 + floor(m (u + i / N)) over the samples i: every k is uniform in 1..m, together they are
    spread evenly.
    """
    canvas = np.where(laid.editable, laid.canvas, -1)
    hidden = np.zeros((samples, len(canvas)), bool)
    weight = np.zeros((samples, len(canvas)))
    for c in np.unique(canvas[canvas >= 0]):
        at = np.flatnonzero(canvas == c)
        u = (rng.random() + rng.permutation(samples) / samples) % 1.0
        k = 1 + np.floor(len(at) * u).astype(int)
        rank = rng.random((samples, len(at))).argsort(axis=1).argsort(axis=1)
        hidden[:, at] = rank < k[:, None]
        weight[:, at] = (len(at) / k)[:, None]
    return hidden, weight


def times(canvas: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The time of each canvas, k / m, at all of its positions [N, T]; 0 outside. canvas [T] or [N, T]."""
    t = np.zeros_like(weight)
    for row, index in enumerate(np.broadcast_to(canvas, weight.shape)):
        for c in np.unique(index[index >= 0]):
            at = index == c
            most = weight[row, at].max()
            t[row, at] = 1.0 / most if most else 0.0
    return t


ROWS = 16  # samples of one pass


def weighted_nats(
    lm: LM, laid: Laid, hidden: np.ndarray, weight: np.ndarray, quantum: int = QUANTUM
) -> np.ndarray:
    """Sum over masked positions of weight * cross-entropy, one number a sample, float64."""
    samples, width = hidden.shape
    size, rows = bucket(width, quantum), min(ROWS, 1 << (samples - 1).bit_length())
    assert lm.corruption.mask is not None
    pad = lambda x, n: np.pad(x, [(0, n - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    fixed = [jnp.asarray(pad(x, size)) for x in (laid.tokens, laid.positions, laid.ranges)]
    noised = np.where(hidden, lm.corruption.mask, laid.tokens)
    when = times(laid.canvas, weight) if lm.model.config.timed else None
    batch = lambda x: jnp.asarray(pad(np.pad(x, [(0, 0), (0, size - width)]), rows))
    out = []
    for i in range(0, samples, rows):
        told = None if when is None else batch(when[i : i + rows])
        xt = batch(noised[i : i + rows])
        ce = np.asarray(_ce(lm.model, lm.corruption.forbidden, lm.params, xt, *fixed, told))
        scored = (hidden * weight)[i : i + rows]
        out.append((ce[: len(scored), :width] * scored).sum(axis=1, dtype=np.float64))
    return np.concatenate(out)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ce(
    model: Model,
    forbidden: tuple[int, ...],
    params: Params,
    xt: Int[Array, "B T"],
    tokens: Int[Array, "T"],
    positions: Int[Array, "T"],
    ranges: Int[Array, "T R 2"],
    time: Float[Array, "B T"] | None,
) -> Float[Array, "B T"]:
    wide = lambda x: jnp.broadcast_to(x, (xt.shape[0], *x.shape))
    told = {} if time is None else {"time": time}
    hidden = model.apply(params, xt, wide(positions), wide(ranges), (), **told)
    logits = jax.vmap(functools.partial(forbid, ids=forbidden))(model.head(params, hidden))
    chosen = jnp.take_along_axis(logits, wide(tokens)[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def logits(lm: LM, canvas: Any, prompt: Any = None, *, time: Any = None) -> Float[Array, "B L V"]:
    """One denoiser pass: logits aligned with the canvas, [B, L, V], at least fp32.

    canvas: ids [L] or [B, L], noise included as it stands. prompt: None, a text, or ids; the same
    for all rows. time: of the canvas's noise in 0..1, one number or one a row, for models that are told it;
    None: the share of its tokens that are masks.
    """
    canvas = np.atleast_2d(np.asarray(canvas))
    if canvas.ndim != 2 or canvas.shape[1] == 0 or not np.issubdtype(canvas.dtype, np.integer):
        raise refuse("canvas", canvas.shape, "integer ids [L] or [B, L] with L of 1 or more")
    if canvas.min() < 0 or canvas.max() >= lm.model.config.vocab:
        raise refuse(
            "canvas", (int(canvas.min()), int(canvas.max())), f"ids in 0..{lm.model.config.vocab - 1}"
        )
    before = [] if prompt is None else normalise(lm, prompt)[0][0].ids
    if len(before) + canvas.shape[1] > lm.model.config.context:
        raise refuse(
            "canvas", canvas.shape, f"with its prompt at most {lm.model.config.context} tokens, the context"
        )
    known = int(lm.model.encodable(jnp.asarray([len(before)]))[0])
    text = np.concatenate([np.tile(np.asarray(before, np.int32), (len(canvas), 1)), canvas], axis=1)
    told = _told(lm, canvas, time)
    return _pass(lm.model, known, lm.params, jnp.asarray(text, jnp.int32), told)[:, len(before) - known :]


def _told(lm: LM, canvas: np.ndarray, time: Any) -> Float[Array, "B"] | None:
    """What a timed model is told of each row's canvas; None for the others."""
    if not lm.model.config.timed:
        if time is not None:
            raise refuse("time", time, "None: this model is not told the time")
        return None
    if time is None:
        if lm.corruption.mask is None:
            raise refuse("time", None, "a number in 0..1: the noise of this model leaves no masks to count")
        time = (canvas == lm.corruption.mask).mean(axis=1)
    t = np.asarray(time, np.float32)
    if t.shape not in ((), (len(canvas),)) or not ((t >= 0) & (t <= 1)).all():
        raise refuse("time", time, f"a number in 0..1, or one for each of the {len(canvas)} rows")
    return jnp.broadcast_to(t, (len(canvas),))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _pass(
    model: Model, known: int, params: Params, text: Int[Array, "B S"], time: Float[Array, "B"] | None
) -> Float[Array, "B L V"]:
    rows, size = text.shape
    told = lambda t: {} if t is None else {"time": t}
    full = lambda n: jnp.full((rows,), n, jnp.int32)
    cache = model.empty_cache(rows, size)
    if known:
        everyone = jnp.ones((rows,), bool)
        _, cache = model.forward(
            params, text[:, :known], cache, full(0), full(known), full(known), everyone, (),
            **told(None if time is None else jnp.zeros_like(time)),
        )  # fmt: skip
    nobody, rest = jnp.zeros((rows,), bool), size - known
    hidden, _ = model.forward(
        params, text[:, known:], cache, full(known), full(rest), full(size), nobody, (), **told(time)
    )
    return model.head(params, hidden)
