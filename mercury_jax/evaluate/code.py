"""The code tasks, on held-out files of Python's standard library: a bound on the bits per byte, and infilling.

`bits_per_byte` estimates the likelihood bound (NELBO) on random chunks of the files; `infill_lines` hides parts of
lines and counts how often the model restores them exactly. Importing this file adds both to `runner.TASKS`.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import Plan, refuse
from mercury_jax.decode import defaults, infill as infilling
from mercury_jax.decode.likelihood import canvas_times
from mercury_jax.decode.score import score
from mercury_jax.decode.token_stats import forbid
from mercury_jax.evaluate.runner import (
    OF_EXACT,
    TASKS,
    EvalReport,
    EvalSettings,
    Evaluation,
    Z,
    in_batches,
    rule_name,
    summarise,
)
from mercury_jax.noise import Corruption
from mercury_jax.training.data import packing, sources
from mercury_jax.types import LM, Batch, LaidOutDocument, Model, PackedPass, Params

NO_FILES = "an interpreter that comes with its library's source"

# --- bits per byte

CHUNKS = 768  # default number of chunks of an evaluation
ROW = 6  # positions of a laid-out chunk, in blocks: 192 for a block of 32, as in our training recipes
CAUSAL_ROW = 96  # for autoregressive models: the text tokens that 192 positions hold for a block of 32
MAX_ROWS = 32  # chunks per forward pass: more would only need more memory for logits
GOLDEN = 0.6180339887498949


def bits_per_byte(lm: LM, settings: EvalSettings) -> EvalReport:
    """Estimates an upper bound on the bits per byte of held-out code, with its standard error.

    Chunks are drawn at random and laid out as in training: up to `6 block` positions, clean tokens and canvases
    together, starting anywhere in a file. The first 0 to block - 1 tokens of a chunk are given and not scored. Each
    following canvas is scored completely, conditional only on the tokens before it in the chunk. For a block of 32 the
    context is therefore about a hundred tokens, and a model that could use more of the file gains nothing. End-of-text
    tokens that fill the last canvas of a file add to the cost but not to the number of bytes.

    In a canvas of m tokens, k tokens are masked, with k uniform in 1..m. The sum of their cross-entropies times m / k
    is an unbiased estimate of the any-order NELBO (LLaDA, arXiv 2502.09992, eq. 6). Low-discrepancy draws of k reduce
    its variance. Ids that the model never emits get probability 0. The standard error is computed over chunks: it
    covers the draws of masks and of chunks, but not the choice of files.

    An autoregressive model is scored exactly, on all tokens but the first of chunks of 96 tokens.
    """
    causal = lm.model.config.autoregressive
    if lm.corruption.mask is None and not causal:
        raise refuse("corruption", "uniform", "absorbing or hybrid noise: this bound counts masks")
    began = time.perf_counter()
    laid = chunks(lm, settings.limit or CHUNKS, settings.seed)
    if causal:
        scored = [x.tokens[1:] for x in laid]
        nats = _causal_nats(lm, laid, settings)
    else:
        scored = [x.tokens[x.editable] for x in laid]
        nats = _chunk_nats(lm, laid, settings)
    lengths = np.array([len(piece) for piece in lm.tokenizer.pieces])  # bytes of each id
    tokens, size = np.array([len(x) for x in scored]), np.array([lengths[x].sum() for x in scored])
    bits, se = ratio(nats / math.log(2), size)
    summary = {
        "task": "code-bpb",
        "data": "held-out files",
        "n": len(laid),
        "bits_per_byte": bits,
        "se": se,
        "low": bits - Z * se,
        "high": bits + Z * se,
        "bytes": int(size.sum()),
        "tokens": int(tokens.sum()),
        "nats_per_token": float(nats.sum() / tokens.sum()),
        "block": lm.model.config.block,
        "row": _row(lm),
        "seed": settings.seed,
        "seconds": time.perf_counter() - began,
    }
    costs = zip(nats, tokens, size)
    return EvalReport(summary, [{"nats": float(n), "tokens": int(t), "bytes": int(b)} for n, t, b in costs])


def chunks(lm: LM, limit: int, seed: int) -> list[LaidOutDocument]:
    """Draws chunks of the held-out files: the first chunks of a shuffled pass over all of them."""
    # A row of an autoregressive model has each token once, as a clean token; there are no canvases.
    layout = functools.partial(lm.model.layout, all_clean=None if lm.model.config.autoregressive else False)
    settings = packing.StreamSettings(lm.tokenizer, layout, _row(lm), (seed,), "test")
    stream = sources.stdlib().open(settings)
    if stream is None:
        raise refuse("code-bpb", "no held-out file", NO_FILES)
    return [stream.at(i) for i in range(min(limit, stream.size))]


def _row(lm: LM) -> int:
    """Returns the number of positions of a laid-out chunk."""
    return CAUSAL_ROW if lm.model.config.autoregressive else ROW * lm.model.config.block


def _causal_nats(lm: LM, laid: Sequence[LaidOutDocument], settings: EvalSettings) -> Float[np.ndarray, "N"]:
    """Computes the exact cost in nats of every chunk behind its first token, `settings.batch` chunks at a time."""
    nats = []
    for at in range(0, len(laid), settings.batch):
        part = [x.tokens.tolist() for x in laid[at : at + settings.batch]]
        nats.append(-np.asarray(score(lm, [x[:1] for x in part], [x[1:] for x in part]).log_p))
        settings.progress(at + len(part), len(laid))
    return np.concatenate(nats)


def _chunk_nats(lm: LM, laid: Sequence[LaidOutDocument], settings: EvalSettings) -> Float[np.ndarray, "N"]:
    """Computes the bound of every chunk in nats, in forward passes of one fixed shape."""
    rng = np.random.default_rng((settings.seed, 1))
    rows, row = min(MAX_ROWS, settings.batch, len(laid)), _row(lm)
    start, nats = rng.random(), []
    for at in range(0, len(laid), rows):
        part = [packing.PackedRow(laid=[x]) for x in laid[at : at + rows]]
        empty = [packing.PackedRow()] * (rows - len(part))
        batch = packing.pack(part + empty, row, lm.tokenizer.pad)
        masked, weight, start = draw_masks(batch, start, rng)
        # [B, T]; summed in float64, because thousands of weighted terms are added.
        times = canvas_times(np.asarray(batch.canvas), weight) if lm.model.config.timed else None
        ce = np.asarray(_cross_entropy(lm.model, lm.corruption, lm.params, batch, masked, times), np.float64)
        nats.append((ce * weight * masked).sum(axis=1)[: len(part)])
        settings.progress(at + len(part), len(laid))
    return np.concatenate(nats)


def draw_masks(
    batch: Batch, start: float, rng: np.random.Generator
) -> tuple[Bool[np.ndarray, "B T"], Float[np.ndarray, "B T"], float]:
    """Draws the number k of masked tokens of each canvas, and which of its m tokens are masked.

    For canvas i, k = 1 + floor(m frac(start + i * golden ratio)). Each k is uniform in 1..m, and the values of any run
    of consecutive canvases are spread evenly.
    """
    masked, weight = np.zeros(batch.tokens.shape, bool), np.zeros(batch.tokens.shape)
    for b, canvas in enumerate(np.where(batch.editable, batch.canvas, -1)):
        for c in np.unique(canvas[canvas >= 0]):
            at = np.flatnonzero(canvas == c)
            start = (start + GOLDEN) % 1.0
            k = 1 + int(len(at) * start)
            masked[b, rng.permutation(at)[:k]] = True
            weight[b, at] = len(at) / k
    return masked, weight, start


@functools.partial(jax.jit, static_argnums=(0, 1))
def _cross_entropy(
    model: Model,
    corruption: Corruption,
    params: Params,
    batch: Batch,
    masked: Bool[Array, "B T"],
    time: Float[Array, "B T"] | None,
) -> Float[Array, "B T"]:
    assert corruption.mask is not None  # `bits_per_byte` refuses noise without masks
    xt = jnp.where(masked, corruption.mask, batch.tokens)
    logits = model.head(params, model.apply(params, PackedPass(xt, batch.positions, batch.ranges, time=time)))
    logits = jax.vmap(functools.partial(forbid, ids=corruption.forbidden))(logits.astype(jnp.float32))
    chosen = jnp.take_along_axis(logits, batch.tokens[..., None], axis=-1)[..., 0]
    # An unmasked position may hold an id that is never emitted (padding), with a cross-entropy of 1e30; use 0 there.
    return jnp.where(masked, jax.nn.logsumexp(logits, axis=-1) - chosen, 0.0)


def ratio(cost: Float[np.ndarray, "N"], size: Int[np.ndarray, "N"]) -> tuple[float, float]:
    """Estimates a ratio of two sums over the same N chunks, with its standard error.

    Returns:
        (sum(cost) / sum(size), its standard error). The error is infinite for a single chunk.
    """
    n, r = len(cost), float(cost.sum() / size.sum())
    if n < 2:
        return r, math.inf
    # Delta method: the error of the ratio is that of the residuals cost - r size, divided by the total size.
    rest = cost - r * size
    return r, math.sqrt(n / (n - 1) * float((rest**2).sum())) / float(size.sum())


# --- infilling

HOLES = 64  # default number of holes of an evaluation


class HiddenText(NamedTuple):
    """A hidden line, or part of a line, with the text around it.

    Attributes:
        path: The file.
        before: The text before the hole, two blocks of tokens.
        target: The hidden text.
        after: The text after the hole; hole and `after` together have one block of tokens.
        tokens: Number of tokens of `target`.
        whole: Whether `target` is a whole line.
    """

    path: str
    before: str
    target: str
    after: str
    tokens: int
    whole: bool


def infill_lines(lm: LM, settings: EvalSettings) -> EvalReport:
    """Measures how often a hidden line, or part of a line, is restored exactly, given its number of tokens.

    Half of the holes are whole lines, half are spans within a line. The context is two blocks of text before the hole,
    and the rest of the hole's block after it, which is the form of context that a causal encoder is trained on.
    """
    began, timed = time.perf_counter(), list[tuple[int, int, float]]()
    rows: list[dict[str, Any]] = []
    sampler = defaults.default_sampler(lm) if settings.sampler is None else settings.sampler
    named, plan = rule_name(lm, sampler), settings.plan or Plan()
    found = draw_holes(lm, settings.limit or HOLES, settings.seed)
    decode = lambda holes, seed: infilling.infill(
        lm, [[hole.before, infilling.Hole(hole.tokens), hole.after] for hole in holes], seed=seed, sampler=sampler,
        plan=plan,
    )  # fmt: skip
    for part, out, compiled in in_batches(found, settings, decode):
        for i, hole in enumerate(part):
            prediction = out.fillings[i][0]
            rows.append({
                "input": f"{hole.before}<hole>{hole.after}",
                "output": hole.target,
                "prediction": prediction,
                "correct": prediction == hole.target,
                "forwards": int(out.forwards[i]),
                "tokens": hole.tokens,
                "whole": hole.whole,
                "path": hole.path,
            })  # fmt: skip
        if not compiled:
            timed.append((len(part), sum(hole.tokens for hole in part), out.seconds))
    summary = {"task": "code-infill", "data": "held-out files", "rule": named, "steps": plan.steps}
    summary |= {"seed": settings.seed, "batch": settings.batch}
    summary |= summarise(rows, timed, time.perf_counter() - began)
    for name, whole in (("right_lines", True), ("right_spans", False)):
        summary[name] = sum(row["correct"] for row in rows if row["whole"] == whole)
    return EvalReport(summary, rows)


def draw_holes(lm: LM, n: int, seed: int) -> list[HiddenText]:
    """Draws holes in the held-out files, whole lines and spans in turn."""
    rng, block = np.random.default_rng((seed, 2)), lm.model.config.block
    docs = [(path, lm.tokenizer.encode(text)) for path, text in sources.stdlib_files("test")]
    docs = [(path, ids) for path, ids in docs if len(ids) > 4 * block]
    if not docs:
        raise refuse("code-infill", "no held-out file", NO_FILES)
    share = np.array([len(ids) for _, ids in docs], float)
    found: list[HiddenText] = []
    for _ in range(200 * n):
        path, ids = docs[rng.choice(len(docs), p=share / share.sum())]
        hole = _draw_hole(lm, path, ids, len(found) % 2 == 0, rng)
        found += [hole] if hole else []
        if len(found) == n:
            return found
    raise refuse("limit", n, f"1..{len(found)}, what the held-out files have for this tokenizer")


def _draw_hole(lm: LM, path: str, ids: list[int], whole: bool, rng: np.random.Generator) -> HiddenText | None:
    """Draws a hole near a random position; None if no line there fits, or if cutting the text changes its tokens."""
    block, tok = lm.model.config.block, lm.tokenizer
    at = int(rng.integers(2 * block, len(ids) - block))
    ends = [at + i for i, token in enumerate(ids[at : at + 2 * block]) if b"\n" in tok.pieces[token]]
    # Lines after `at`, without their line ends, that have 2 to block / 2 tokens.
    lines = (
        (end + 1, stop)
        for end, stop in pairwise(ends)
        if 2 <= stop - end - 1 <= block // 2 and end + 1 + block <= len(ids)
    )
    start, stop = next(lines, (0, 0))
    if not stop:
        return None
    if not whole:
        n = int(rng.integers(1, stop - start + 1))
        start = start + int(rng.integers(0, stop - start - n + 1))
        stop = start + n
    cut = [ids[start - 2 * block : start], ids[start:stop], ids[stop : start + block]]
    before, target, after = map(tok.decode, cut)
    # A cut inside a character or a merge changes the tokens: the three texts must encode to the tokens of the file.
    if not target.strip() or [tok.encode(x) for x in (before, target, after)] != cut:
        return None
    return HiddenText(path, before, target, after, stop - start, whole)


TASKS.update(
    {
        "code-bpb": Evaluation(
            "code-bpb",
            "bound on the bits per byte of held-out files of Python's standard library",
            bits_per_byte,
            unused=("sampler", "plan", "max_tokens", "file", *OF_EXACT),
            splits=("test",),
        ),
        "code-infill": Evaluation(
            "code-infill",
            "hide part of a line of those files, or a whole line, and restore it exactly",
            infill_lines,
            unused=("max_tokens", "file", *OF_EXACT),
            splits=("test",),
        ),
    }
)
