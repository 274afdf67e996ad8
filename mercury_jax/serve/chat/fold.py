"""The ids of an answer, one after the other -> thinking, content and tool calls.

A fold: what an id adds depends on the ids before it alone, so it does not matter how they were cut into snapshots.
"""

from __future__ import annotations

import codecs
import copy
from typing import NamedTuple

from mercury_jax.serve.chat.formats import Marks, ToolFormat
from mercury_jax.serve.chat.talk import Talk
from mercury_jax.serve.chat.thought import Thought

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Reading(NamedTuple):
    """How an answer is read. pieces: the bytes of each id; ends: ids behind which nothing counts; thinking, tools:
    None where their marks mean nothing; strips: a text's first space belongs to the tokenizer."""

    pieces: tuple[bytes, ...]
    ends: frozenset[int]
    thinking: Marks | None
    tools: ToolFormat | None
    stop: tuple[str, ...]
    strips: bool

    def piece(self, i: int) -> bytes:
        """Bytes of an id; those of the model beyond the tokenizer have none."""
        return self.pieces[i] if i < len(self.pieces) else b""

    def shown(self, mark: int | str | None) -> str:
        """How a mark reads as text."""
        return self.piece(mark).decode(errors="replace") if isinstance(mark, int) else mark or ""


class Fold:
    """The state after some ids. `thought` grows, and what `talk` has; the caller takes it away."""

    def __init__(self, reading: Reading, thinking: bool):
        self.reading = reading
        self.talk = Talk(reading.tools, reading.stop, reading.shown(reading.tools and reading.tools.open))
        self.thought: list[str] = []
        self.tokens = self.reasoning = 0  # ids taken, and those of thinking among them
        self.ended = False
        self._utf8 = _Utf8("replace")
        self._thinking = Thought(reading.thinking) if thinking and reading.thinking else None
        self._first = reading.strips

    @property
    def over(self) -> bool:
        """Whether an end, or a stop sequence, was met."""
        return self.ended or self.talk.over

    def fork(self) -> Fold:
        """A draft that goes on from here and leaves this one as it is, without half characters and calls."""
        made = copy.copy(self)
        made.talk, made.thought = self.talk.fork(), []
        made._thinking = copy.copy(self._thinking)
        made._utf8 = _Utf8("ignore")
        made._utf8.setstate(self._utf8.getstate())
        return made

    def take(self, i: int) -> None:
        """One id."""
        if self.over:
            return
        if i in self.reading.ends:
            self.finish()
            self.ended = True
            return
        self.tokens += 1
        thinking = self._thinking is not None
        if not self._mark(i):
            self._text(self._utf8.decode(self.reading.piece(i)))
        self.reasoning += thinking or self._thinking is not None
        self.talk.stream()

    def finish(self) -> None:
        """Nothing follows: give up what was held back."""
        if self.over:
            return
        self._flush()
        if self._thinking is not None:
            self.thought.append(self._thinking.close())
        self.talk.finish()

    def _mark(self, i: int) -> bool:
        """Whether an id is a mark here, which it then has done."""
        marks, tools = self.reading.thinking, self.reading.tools
        if marks is not None and i in (marks.open, marks.close):
            self._flush()
            self._turn(marks, i == marks.open)
            return True
        if tools is None or self._thinking is not None:
            return False
        if i == tools.open:
            self._flush()
            self.talk.open()
        elif i == tools.close and self.talk.state != "content":
            self._flush()
            self.talk.close(self.reading.shown(i))
        elif i == tools.quote and self.talk.state == "call":
            self._flush()
            self.talk.quote(self.reading.shown(i) or '"')
        else:
            return False
        return True

    def _turn(self, marks: Marks, opens: bool) -> None:
        """Into thinking, or out of it; a mark that changes nothing is not shown."""
        if opens and self._thinking is None:
            self.talk.settle()
            self._thinking = Thought(marks)
        elif not opens and self._thinking is not None:
            self.thought.append(self._thinking.close())
            self._thinking = None
            self.talk.settle(skip="\n" if marks.trims else "")
        self._first = self.reading.strips

    def _flush(self) -> None:
        """Bytes of half a character that will not be completed."""
        self._text(self._utf8.decode(b"", True))
        self._utf8.reset()

    def _text(self, text: str) -> None:
        if text and self._first:
            text, self._first = text.removeprefix(" "), False
        if self._thinking is None:
            self.talk.text(text)
        elif text:
            self.thought.append(self._thinking.push(text))
