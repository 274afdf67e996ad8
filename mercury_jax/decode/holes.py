"""Holes in known text, and what infill() returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mercury_jax.config import refuse
from mercury_jax.types import LM


@dataclass(frozen=True)
class Hole:
    """A gap of exactly `tokens` tokens; None: of whatever length fits, up to `most`."""

    tokens: int | None = None
    most: int = 32

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("most", self.most)):
            if value is None and name == "tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise refuse(f"Hole.{name}", value, "a whole number from 1 on")

    @property
    def room(self) -> int:
        """The most tokens that it may take."""
        return self.most if self.tokens is None else self.tokens


Row = list[Any]  # Holes, and the ids of known texts, in order


class Filled(NamedTuple):
    """What stands in each row's holes, as ids, and the passes that each row took."""

    fillings: list[list[np.ndarray]]
    forwards: np.ndarray


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


def segments(row: Row, text: np.ndarray, given: np.ndarray) -> list[np.ndarray]:
    """What stands in the holes of a finished row: the tokens that were not given, cut at its texts.

    Texts keep their tokens and their order, so the given tokens up to a hole are as many as the
    known texts before it hold, wherever they have moved.
    """
    at = np.flatnonzero(given[: len(text)])
    at = np.concatenate([[-1], at, [len(text)]])
    found, passed = [], 0
    for part in row:
        if isinstance(part, Hole):
            found.append(text[at[passed] + 1 : at[passed + 1]])
        else:
            passed += len(part)
    return found


def whole(row: Row, fillings: Sequence[np.ndarray]) -> np.ndarray:
    """A row's ids with its holes filled."""
    left = iter(fillings)
    return np.concatenate([np.asarray(next(left) if isinstance(p, Hole) else p, np.int32) for p in row])


def output(lm: LM, rows: Sequence[Row], done: Filled, seconds: float) -> InfillOutput:
    """The completed texts of filled rows."""
    decode = lambda ids: lm.tokenizer.decode(np.asarray(ids).tolist())
    tokens = [whole(row, f) for row, f in zip(rows, done.fillings, strict=True)]
    return InfillOutput(
        texts=[decode(t) for t in tokens],
        fillings=[[decode(ids) for ids in f] for f in done.fillings],
        tokens=tokens,
        filled=[sum(len(ids) for ids in f) for f in done.fillings],
        forwards=done.forwards,
        seconds=seconds,
    )
