"""infill(): any number of holes in known text, all of them denoised at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mercury_jax.config import Plan, refuse
from mercury_jax.decode import launch, rules
from mercury_jax.decode.prompts import check_seed
from mercury_jax.types import LM


@dataclass(frozen=True)
class Hole:
    """A gap of exactly `tokens` tokens."""

    tokens: int

    def __post_init__(self) -> None:
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int | np.integer) or self.tokens < 1:
            raise refuse("Hole.tokens", self.tokens, "a whole number from 1 on")


@dataclass(frozen=True)
class InfillOutput:
    """Completed texts; lists have one entry a request."""

    texts: list[str]
    fillings: list[list[str]]  # of each request's holes, left to right
    tokens: list[np.ndarray] = field(repr=False)  # the whole sequence as ids
    filled: list[int] = field(repr=False)  # tokens that were denoised
    forwards: np.ndarray
    seconds: float

    @property
    def text(self) -> str:
        """The first completed text."""
        return self.texts[0]

    @property
    def holes(self) -> list[str]:
        """What stands in the first request's holes."""
        return self.fillings[0]

    @property
    def tokens_per_forward(self) -> float:
        """Denoised tokens over denoiser passes, summed over the rows."""
        return float(sum(self.filled) / max(int(self.forwards.sum()), 1))

    @property
    def tokens_per_second(self) -> float:
        """Denoised tokens of all rows over the seconds of the call."""
        return sum(self.filled) / max(self.seconds, 1e-9)


Parts = Sequence[str | Hole]


def infill(
    lm: LM,
    parts: Parts | Sequence[Parts],
    *,
    seed: int = 0,
    sampler: Any = None,
    plan: Plan | None = None,
    temperature: float | None = None,
    mesh: Mesh | None = None,
) -> InfillOutput:
    """Fill the holes: `infill(lm, ["def area(r):\\n", Hole(24), "\\n    return a"])`.

    parts: texts and Holes in order, or a list of such lists. Known text never changes. A model with
    full attention takes the whole sequence as its canvas, a causal encoder what lies between the
    first hole and the end; both see the text on either side of every hole.
    Raises ValueError for no hole, a hole that does not fit the context, or a block-causal model,
    which cannot see what follows a hole.
    """
    if lm.model.config.pattern == "block_causal":
        raise refuse(
            "model.pattern", "block_causal", "bidirectional or causal_encoder: they see behind a hole"
        )
    several = len(parts) > 0 and not isinstance(parts[0], str | Hole)
    rows = [_row(lm, p, i) for i, p in enumerate(parts if several else [parts])]
    if not rows:
        raise refuse("parts", parts, "texts and Holes, or a non-empty list of such lists")
    began = time.perf_counter()
    asked = _request(rows, check_seed(seed))
    region = int((asked.total - asked.known).max())
    block = (
        None if lm.model.config.pattern == "bidirectional" else launch.bucket(region, lm.model.config.block)
    )
    width = launch.bucket(int(asked.total.max())) if block is None else block
    job = launch.prepare(
        lm, asked, sampler if sampler is not None else rules.threshold(), plan or Plan(),
        temperature=temperature, block=width, infilling=True, mesh=mesh,
    )  # fmt: skip
    job, _, _ = launch.advance(lm, job, None)
    return _collect(lm, job, rows, began)


Row = list[tuple[list[int], bool]]  # (ids, whether they are a hole) in order


def _row(lm: LM, parts: Any, index: int) -> Row:
    name = f"parts[{index}]"
    if isinstance(parts, str) or not all(isinstance(p, str | Hole) for p in parts):
        raise refuse(name, parts, "a list of texts and Holes")
    if not any(isinstance(p, Hole) for p in parts):
        raise refuse(name, parts, "at least one Hole among the texts")
    mask = lm.model.config.mask
    row = [
        ([mask] * p.tokens, True) if isinstance(p, Hole) else (lm.tokenizer.encode(p), False) for p in parts
    ]
    total, context = sum(len(ids) for ids, _ in row), lm.model.config.context
    if total > context:
        raise refuse(name, f"{total} tokens", f"at most the model's context of {context}")
    return row


def _request(rows: Sequence[Row], seed: int) -> launch.Request:
    total = np.array([sum(len(ids) for ids, _ in row) for row in rows])
    text = np.zeros((len(rows), int(total.max())), np.int32)
    given = np.zeros(text.shape, bool)
    known = np.zeros(len(rows), np.int64)
    for i, row in enumerate(rows):
        ids = np.concatenate([np.asarray(p, np.int32) for p, _ in row])
        hole = np.concatenate([np.full(len(p), is_hole) for p, is_hole in row])
        text[i, : len(ids)], given[i, : len(ids)] = ids, ~hole
        known[i] = np.flatnonzero(hole)[0]
    seeds = (seed + np.arange(len(rows))) % 2**31
    return launch.Request(text, given, known, total, seeds)


def _collect(lm: LM, job: launch.Job, rows: Sequence[Row], began: float) -> InfillOutput:
    text, forwards = jax.device_get((job.state.text, job.state.forwards))
    decode = lm.tokenizer.decode
    texts, fillings, tokens, filled = [], [], [], []
    for i, row in enumerate(rows):
        at, holes = 0, []
        for ids, is_hole in row:
            holes += [decode(text[i, at : at + len(ids)].tolist())] if is_hole else []
            at += len(ids)
        tokens.append(text[i, :at])
        texts.append(decode(text[i, :at].tolist()))
        fillings.append(holes)
        filled.append(sum(len(ids) for ids, is_hole in row if is_hole))
    seconds = time.perf_counter() - began
    return InfillOutput(texts, fillings, tokens, filled, forwards[: job.rows], seconds)
