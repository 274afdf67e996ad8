"""The host's side of a gated row: what a grammar makes of the model's proposals, pass by pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from mercury_jax.decode.amend import Amend


class Gate:
    """One answer under a grammar. `walker`: of `grammar.Grammar.walk`.

    begin(at) once the answer begins; then after each pass `look` at the row's frame, `fill` the row of an
    `Amend`, and `bits` for the next pass. Everything that the grammar forces is written without a pass.
    """

    def __init__(self, walker: Any):
        self.walker = walker
        self.first: int | None = None  # absolute position where the answer begins; None: not yet
        self.committed: list[int] = []
        self.forced: list[bool] = []
        self.over = False
        self._waiting: deque[int] = deque()  # committed, and not yet written to the device
        self._clear, self._told = False, False

    @property
    def begun(self) -> bool:
        """Whether the answer has begun: before, the row thinks, and is not gated."""
        return self.first is not None

    @property
    def front(self) -> int:
        """Absolute position of the first token that is not committed."""
        assert self.first is not None
        return self.first + len(self.committed)

    @property
    def news(self) -> bool:
        """Whether `fill` has something to write."""
        return bool(self._waiting) or self._clear or (self.over and not self._told)

    def begin(self, at: int) -> None:
        """The answer begins at this position of the text."""
        self.first = at
        self._take((), ())

    def look(self, start: int, answer: Sequence[int], sure: Sequence[bool]) -> None:
        """Take what stands of a proposal. answer: the window's tokens from position `start` on."""
        if not self.begun or self.over or start > self.front:
            return
        skip = self.front - start
        self._take([int(i) for i in answer[skip:]], [bool(s) for s in sure[skip:]])

    def _take(self, tokens: Sequence[int], sure: Sequence[bool]) -> None:
        step = self.walker.advance(tokens, sure)
        self.committed += step.commit
        self.forced += step.forced
        self._waiting += step.commit
        self._clear |= step.clear
        self.over = step.ended

    def fill(self, change: Amend, row: int) -> None:
        """Write what is new into row `row` of the host's arrays; what does not fit waits for the next time."""
        width = change.tokens.shape[1]
        front = self.front - len(self._waiting)
        some = [self._waiting.popleft() for _ in range(min(width, len(self._waiting)))]
        rows: Any = change
        rows.tokens[row, : len(some)] = some
        rows.front[row], rows.n[row] = front, len(some)
        self._told = self.over and not self._waiting
        # An answer that the budget cuts off fills its row, and has no end of text behind it.
        rows.clear[row], rows.ended[row] = self._clear, self._told and not self.walker.cut
        self._clear = bool(self._waiting) and self._clear

    def bits(self) -> np.ndarray:
        """uint32 [words]: the ids that may stand at `front`; for `shape.allow_bits`, with `start` counted from the
        prompt's end."""
        return self.walker.bits()
