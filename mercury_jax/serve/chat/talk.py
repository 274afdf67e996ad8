"""Content and tool calls: what an answer says outside of its thinking."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import NamedTuple

from mercury_jax.serve.chat.calls import CallReader, new_id
from mercury_jax.serve.chat.finder import Finder
from mercury_jax.serve.chat.formats import ToolFormat
from mercury_jax.serve.chat.json_text import Broken

SPACE = " \t\r\n"


class Call(NamedTuple):
    """A whole call; arguments: the JSON text of an object."""

    id: str
    name: str
    arguments: str


class CallDelta(NamedTuple):
    """What is new of the call `index`. id, name: in its first delta only; arguments: goes on from the last."""

    index: int
    id: str | None
    name: str | None
    arguments: str


class Talk:
    """Takes text, and the marks of calls where they are ids; `said`, `deltas` and `whole` grow.

    opened: how the mark that opens a call is shown, where it turns out to open none. draft: of tokens that may
    still change; calls are left out, whole or broken.
    """

    def __init__(self, tools: ToolFormat | None, stop: Iterable[str], opened: str):
        self.tools, self.opened, self.draft = tools, opened, False
        self.said: list[str] = []
        self.deltas: list[CallDelta] = []
        self.whole: list[Call] = []
        self.over = False  # a stop sequence was met
        self.state = "content"  # or "call": inside of its JSON; "tail": between that and its close
        self._opens = Finder([tools.open] if tools and isinstance(tools.open, str) else [])
        self._stops = Finder(stop)
        self._call: CallReader | None = None
        self._id, self._index = "", -1  # of the call that is being sent
        self._tail = ""
        self._skip = ""  # characters that do not count until others come

    def fork(self) -> Talk:
        """A draft that goes on from here, and leaves this one as it is."""
        made = copy.copy(self)
        made.draft, made.said, made.deltas, made.whole, made._call = True, [], [], [], None
        made._opens, made._stops = copy.deepcopy(self._opens), copy.deepcopy(self._stops)
        return made

    def text(self, text: str) -> None:
        """What was written next."""
        while text and not self.over:
            match self.state:
                case "content":
                    text = self._content(text)
                case "call":
                    text = self._arguments(text)
                case _:
                    text = self._behind(text)

    def open(self) -> None:
        """The mark of a call."""
        self.settle()
        self._begin()

    def close(self, shown: str) -> None:
        """The mark behind a call, and how it is shown where that was none."""
        if self._call is not None:
            self._give_up(shown)
        else:
            self.state, self._skip = "content", SPACE

    def quote(self, shown: str) -> None:
        """Gemma's mark around a text."""
        self._try(lambda call: call.quote(shown))

    def settle(self, skip: str | None = None) -> None:
        """Something else comes: what might have begun a call does not. skip: characters that do not count behind."""
        if self.state == "call":
            self._give_up()
        self._say(self._opens.flush())
        if self.state != "content":
            self.state, self._skip = "content", SPACE
        self._skip = self._skip if skip is None else skip

    def finish(self) -> None:
        """Nothing follows: give up what was held back."""
        self.settle()
        if not self.over:
            self.said.append(self._stops.flush())

    def stream(self) -> None:
        """Add what is new of the call to the deltas."""
        new = None if self._call is None else self._call.new()
        if self._call is None or new is None:
            return
        if not self._id:
            self._id, self._index = new_id(), self._index + 1
            self.deltas.append(CallDelta(self._index, self._id, self._call.name, new))
        elif new:
            self.deltas.append(CallDelta(self._index, None, None, new))

    def _content(self, text: str) -> str:
        before, found, rest = self._opens.push(text)
        self._say(before)
        if found is not None:
            self._begin()
        return rest

    def _arguments(self, text: str) -> str:
        for at, c in enumerate(text if self._call else ""):
            self._try(lambda call, c=c: call.push(c))
            if self.state != "call":
                return text[at + 1 :]
        return ""

    def _behind(self, text: str) -> str:
        """Behind the JSON of a call: space, and its close where that is a text."""
        close = self.tools.close if self.tools else ""
        for at, c in enumerate(text):
            if c in SPACE and not self._tail:
                continue
            self._tail += c
            if self._tail == close:
                self.state, self._skip = "content", SPACE
                return text[at + 1 :]
            if not (isinstance(close, str) and close.startswith(self._tail)):
                self.state = "content"
                return self._tail + text[at + 1 :]
        return ""

    def _say(self, text: str) -> None:
        """Content, up to a stop sequence."""
        if self._skip and text:
            text = text.lstrip(self._skip)
            self._skip = "" if text else self._skip
        before, found, _ = self._stops.push(text)
        self.said.append(before)
        self.over = self.over or found is not None

    def _begin(self) -> None:
        gemma = self.tools is not None and self.tools.quote is not None
        self._call = None if self.draft else CallReader(gemma)
        self.state, self._id, self._tail = "call", "", ""

    def _try(self, push: Callable[[CallReader], None]) -> None:
        """Go on with the call; a broken one becomes content."""
        if self._call is None:
            return
        try:
            push(self._call)
        except Broken:
            self._give_up()
        else:
            if self._call.done:
                self.stream()
                self.whole.append(Call(self._id, self._call.name or "", "".join(self._call.arguments)))
                self._call, self.state = None, "tail"

    def _give_up(self, shown: str = "") -> None:
        if self._call is not None:
            raw, self._call, self.state, self._skip = self._call.raw, None, "content", ""
            self._say(f"{self.opened}{raw}{shown}")
