"""The steps of an answer: its tokens, and when each was accepted, after every denoising step.

An `AnswerTrace` is read off the frames of `sample(..., history=True)`; `html` and `plots` draw it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from mercury_jax.config import refuse
from mercury_jax.decode.stream import AnswerBuffer

if TYPE_CHECKING:
    from mercury_jax.decode.sample import Output


class AnswerTrace(NamedTuple):
    """One answer after each of its S denoising steps. Positions without a token yet have id -1.

    Attributes:
        tokens: int [S, n], accepted tokens and current guesses.
        since: int [S, n], the step in which the token was accepted, counted from 1; 0: a guess.
        confidence: float [S, n], probability of the argmax; of an accepted token in the step that accepted it.
    """

    tokens: np.ndarray
    since: np.ndarray
    confidence: np.ndarray


def trace_of(out: Output, row: int) -> AnswerTrace:
    """Reads the steps of one answer off the frames of a call."""
    if not out.history:
        raise refuse("history", "empty", "the frames of sample(..., history=True)")
    if not 0 <= row < len(out.texts):
        raise refuse("row", row, f"0..{len(out.texts) - 1}: the answers of this call")
    # No frame shows the token that closes a thinking section whose budget is used up.
    marks = None if out.tokenizer is None else out.tokenizer.thinking
    close = -1 if marks is None else marks.close
    first = int(out.first[row])
    size = max(int(frame.start[row]) + int(frame.used[row]) for frame in out.history) - first
    buffer = AnswerBuffer(first, max(size, 0), close, row)
    steps, since, confidence = [], np.zeros_like(buffer.tokens), buffer.confidence
    for frame in out.history:
        if not buffer.update(jax.tree.map(lambda x: np.asarray(x)[None], frame), 1):
            continue
        known = np.arange(len(buffer.tokens)) < buffer.end
        accepted = buffer.accepted & known
        new = accepted & (since == 0)
        since = np.where(accepted, np.where(new, len(steps) + 1, since), 0)
        confidence = np.where(accepted & ~new, confidence, buffer.confidence)
        steps.append((np.where(known, buffer.tokens, -1), since, np.where(known, confidence, 0.0)))
    if not steps:
        return AnswerTrace(np.zeros((0, 0), int), np.zeros((0, 0), int), np.zeros((0, 0)))
    n = max(out.lengths[row], 1)  # what a model wrote after its end of text is not part of the answer
    return AnswerTrace(*(np.stack(field)[:, :n] for field in zip(*steps, strict=True)))
