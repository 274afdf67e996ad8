"""From snapshots of an answer to what the client gets: reasoning, content and tool calls, each as it becomes final.

Content ends at the first stop sequence and never contains one; reasoning and arguments of calls are not searched for
them. Bytes of an incomplete character, and text that may be the beginning of a stop sequence or of a call, are held
back. A malformed call (no JSON, no name, cut off by max_tokens) is shown as content. If its beginning has been sent
already, its arguments stay an unfinished JSON text, which no client can execute, and `ParsedMessage.tool_calls` leaves
it out.

What an id adds depends on the ids before it only, so it does not matter how they were cut into snapshots.
"""

from __future__ import annotations

import codecs
import copy
import secrets
from collections.abc import Iterable
from typing import NamedTuple

from mercury_jax.decode.stop_texts import StopMatcher
from mercury_jax.hub.tokenizer import HFTokenizer
from mercury_jax.serve.chat.messages import ToolFormat, tool_format
from mercury_jax.serve.chat.tool_calls import SPACE, CallParser, MalformedCall
from mercury_jax.serve.engine.request import Snapshot
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.types import LM

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class ParsedCall(NamedTuple):
    """A complete tool call; `arguments` is the JSON text of an object."""

    id: str
    name: str
    arguments: str


class ParsedCallDelta(NamedTuple):
    """What is new of the call number `index`. Only its first delta has `id` and `name`; `arguments` are appended."""

    index: int
    id: str | None
    name: str | None
    arguments: str


class OutputDelta(NamedTuple):
    """What is new and final; all of it may be empty."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ParsedCallDelta, ...] = ()


class ParsedMessage(NamedTuple):
    """A complete answer. `completion_tokens` counts all tokens up to its end, `reasoning_tokens` those of reasoning."""

    content: str
    reasoning: str
    tool_calls: tuple[ParsedCall, ...]
    reasoning_tokens: int
    completion_tokens: int


class ThinkingMarks(NamedTuple):
    """How a model writes thinking.

    Attributes:
        open: Id that opens it.
        close: Id that closes it.
        lead: Text behind `open` that is not part of the thinking.
        trims: Line ends around the thinking and in front of the answer belong to neither.
    """

    open: int
    close: int
    lead: str
    trims: bool


class OutputFormat(NamedTuple):
    """How the ids of an answer are read.

    Attributes:
        pieces: Bytes of each id.
        ends: Ids that end the answer.
        thinking: Marks of thinking. None: they have no meaning here.
        tools: Form of tool calls. None: calls have no meaning here.
        strips_space: The first space of a text was added by the tokenizer.
    """

    pieces: tuple[bytes, ...]
    ends: frozenset[int]
    thinking: ThinkingMarks | None
    tools: ToolFormat | None
    strips_space: bool

    def piece(self, i: int) -> bytes:
        """Bytes of an id; empty for ids of the model that the tokenizer does not have."""
        return self.pieces[i] if i < len(self.pieces) else b""

    def shown(self, mark: int | str | None) -> str:
        """How a mark reads as text."""
        return self.piece(mark).decode(errors="replace") if isinstance(mark, int) else mark or ""


class ReasoningTrimmer:
    """Trims one stretch of thinking: its lead and, where the template adds them, line ends at its start and end."""

    def __init__(self, marks: ThinkingMarks):
        self._marks = marks
        self._head: str | None = ""  # text that may be the beginning of the lead; None behind it
        self._started = not marks.trims
        self._line_ends = ""  # at the end of the text so far

    def push(self, text: str, end: bool = False) -> str:
        """Takes the next text, and returns what certainly belongs to the reasoning. end: the text ends with it.

        Args:
            text: The next text of the thinking.
            end: The thinking ends behind it.

        Returns:
            Text that certainly belongs to the reasoning.
        """
        if self._head is not None:
            self._head += text
            lead = self._marks.lead
            if not end and len(self._head) < len(lead) and lead.startswith(self._head):
                return ""
            text, self._head = self._head.removeprefix(lead), None
        text = text if self._started else text.lstrip("\n")
        self._started = self._started or bool(text)
        if not self._marks.trims:
            return text
        text = self._line_ends + text
        kept = text.rstrip("\n")
        self._line_ends = text[len(kept) :]
        return kept


class OutputParser:
    """Parses one answer. The deltas of all snapshots together are its message.

    Args:
        lm: The model; its tokenizer and its form of tool calls are used.
        chat: The answer is a turn of a conversation, so thinking and the end of the turn have a meaning.
        tools: Tool calls have a meaning.
        stop: Stop sequences.
        thinking: The prompt opened the thinking (`messages.opens_thinking`).
    """

    def __init__(
        self, lm: LM, *, chat: bool, tools: bool = False, stop: Iterable[str] = (), thinking: bool = False
    ):
        self._format = output_format(lm.tokenizer, chat, tools)
        form, marks = self._format.tools, self._format.thinking
        self._position = 0  # ids that were taken from snapshots
        self._tokens = self._reasoning_tokens = 0
        self._finished = self._ended = self._stop_met = False  # last snapshot, end id, stop sequence
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._sent = (0, 0)  # parts of reasoning and content that `feed` has returned
        self._deltas: dict[int, ParsedCallDelta] = {}  # that `feed` has not returned
        self._calls: list[ParsedCall] = []
        self._utf8 = _Utf8Decoder("replace")
        self._trimmer = ReasoningTrimmer(marks) if thinking and chat and marks else None  # None: not thinking
        self._strip_space = self._format.strips_space
        self._call_marks = StopMatcher([form.open] if form and isinstance(form.open, str) else [])
        self._stop = StopMatcher(stop)
        self._state = "content"  # or "call": inside its JSON; or "after": between that and the closing mark
        self._call: CallParser | None = None
        self._call_id, self._call_index = "", -1
        self._tail = ""  # of state "after": what may be the beginning of the closing mark
        self._skip = ""  # characters that are dropped until another one comes
        self._draft = False  # a copy for `preview`, which leaves calls out

    @property
    def stopped(self) -> bool:
        """Whether an end id or a stop sequence was met. Later tokens are ignored, so the request may be cancelled."""
        return self._ended or self._stop_met

    @property
    def empty(self) -> bool:
        """Whether a finished answer shows nothing to the reader, and not because of a stop sequence."""
        return not (self._stop_met or self._calls or "".join(self._content).strip())

    def feed(self, snapshot: Snapshot) -> OutputDelta:
        """What became final since the last call.

        Args:
            snapshot: A later snapshot than the last one; some may be left out.
        """
        self._advance(snapshot)
        reasoning, content = self._reasoning[self._sent[0] :], self._content[self._sent[1] :]
        self._sent = len(self._reasoning), len(self._content)
        deltas, self._deltas = self._deltas, {}
        return OutputDelta("".join(reasoning), "".join(content), tuple(deltas.values()))

    def preview(self, snapshot: Snapshot) -> str:
        """The content as it stands after a pass, with tokens that may still change, up to the first accepted end.

        Reasoning, calls, incomplete characters and what may be the beginning of a stop sequence are left out. For the
        last snapshot it is the content of the message.
        """
        self._advance(snapshot)
        if self._finished:
            return "".join(self._content)
        draft = copy.copy(self)
        draft._draft, draft._call = True, None
        draft._content, draft._reasoning = list(self._content), []
        draft._trimmer, draft._stop = copy.copy(self._trimmer), copy.copy(self._stop)
        draft._call_marks = copy.copy(self._call_marks)
        draft._utf8 = _Utf8Decoder("ignore")
        draft._utf8.setstate(self._utf8.getstate())
        ids, accepted = snapshot.tokens[snapshot.final :], snapshot.accepted[snapshot.final :]
        for i, kept in zip(ids.tolist(), accepted.tolist(), strict=True):
            if kept or i not in self._format.ends:
                draft._take(i)
        return "".join(draft._content)

    def message(self) -> ParsedMessage:
        """The whole answer, after the last snapshot."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        return ParsedMessage(content, reasoning, tuple(self._calls), self._reasoning_tokens, self._tokens)

    def _advance(self, snapshot: Snapshot) -> None:
        """Takes the ids that became final."""
        for i in snapshot.tokens[self._position : snapshot.final].tolist():
            self._take(i)
        self._position = max(self._position, snapshot.final)
        if snapshot.finish is not None and not self._finished:
            self._finish()
        self._finished = self._finished or self.stopped or snapshot.finish is not None

    def _take(self, i: int) -> None:
        if self.stopped:
            return
        if i in self._format.ends:
            self._finish()
            self._ended = True
            return
        self._tokens += 1
        thinking = self._trimmer is not None
        if not self._take_mark(i):
            self._take_text(self._utf8.decode(self._format.piece(i)))
        self._reasoning_tokens += thinking or self._trimmer is not None
        self._stream_call()

    def _take_mark(self, i: int) -> bool:
        """Whether an id is a mark at this place; its effect then."""
        marks, tools = self._format.thinking, self._format.tools
        if marks is not None and i in (marks.open, marks.close):
            self._flush_bytes()
            if i == marks.open and self._trimmer is None:
                self._leave_call()
                self._trimmer = ReasoningTrimmer(marks)
            elif i == marks.close and self._trimmer is not None:
                self._reasoning.append(self._trimmer.push("", end=True))
                self._trimmer = None
                self._leave_call()
                self._skip = "\n" if marks.trims else ""
            self._strip_space = self._format.strips_space
            return True  # a mark that changes nothing is not shown
        if tools is None or self._trimmer is not None:
            return False
        if i == tools.open:
            self._flush_bytes()
            self._leave_call()
            self._begin_call()
        elif i == tools.close and self._state != "content":
            self._flush_bytes()
            if self._call is not None:
                self._abandon_call(self._format.shown(i))
            else:
                self._state, self._skip = "content", SPACE
        elif i == tools.quote and self._state == "call":
            self._flush_bytes()
            self._push_call(self._format.shown(i) or '"', quote=True)
        else:
            return False
        return True

    def _take_text(self, text: str) -> None:
        if text and self._strip_space:
            text, self._strip_space = text.removeprefix(" "), False
        if self._trimmer is not None:
            if text:
                self._reasoning.append(self._trimmer.push(text))
            return
        while text and not self._stop_met:
            if self._state == "content":
                before, mark, text = self._call_marks.push(text)
                self._say(before)
                if mark is not None:
                    self._begin_call()
            elif self._state == "after":
                text = self._take_after_call(text)
            elif self._call is None:  # of a draft
                return
            else:
                self._push_call(text[0])
                text = text[1:]

    def _take_after_call(self, text: str) -> str:
        """Text between the JSON of a call and its closing mark: space, and the mark where it is a text.

        Returns:
            The text behind it.
        """
        close = self._format.tools.close if self._format.tools else ""
        for at, c in enumerate(text):
            if c in SPACE and not self._tail:
                continue
            self._tail += c
            if self._tail == close:
                self._state, self._skip = "content", SPACE
                return text[at + 1 :]
            if not (isinstance(close, str) and close.startswith(self._tail)):
                self._state = "content"
                return self._tail + text[at + 1 :]
        return ""

    def _say(self, text: str) -> None:
        """Adds content, up to a stop sequence."""
        if self._skip and text:
            text = text.lstrip(self._skip)
            self._skip = "" if text else self._skip
        before, found, _ = self._stop.push(text)
        self._content.append(before)
        self._stop_met = self._stop_met or found is not None

    def _begin_call(self) -> None:
        gemma = self._format.tools is not None and self._format.tools.quote is not None
        self._call = None if self._draft else CallParser(gemma)
        self._state, self._call_id, self._tail = "call", "", ""

    def _push_call(self, text: str, quote: bool = False) -> None:
        if self._call is None:
            return
        try:
            self._call.push(text, quote)
        except MalformedCall:
            self._abandon_call()
            return
        if self._call.done:
            self._stream_call()
            call = ParsedCall(self._call_id, self._call.name or "", "".join(self._call.arguments))
            self._calls.append(call)
            self._call, self._state = None, "after"

    def _stream_call(self) -> None:
        """Adds what is new of the call to the deltas."""
        new = None if self._call is None else self._call.unsent()
        if self._call is None or new is None:
            return
        first = not self._call_id
        if first:
            self._call_id, self._call_index = f"call_{secrets.token_hex(12)}", self._call_index + 1
            delta = ParsedCallDelta(self._call_index, self._call_id, self._call.name, new)
            self._deltas[self._call_index] = delta
        elif new:
            old = self._deltas.get(self._call_index, ParsedCallDelta(self._call_index, None, None, ""))
            self._deltas[self._call_index] = old._replace(arguments=old.arguments + new)

    def _abandon_call(self, closing: str = "") -> None:
        """Shows a malformed call as content."""
        if self._call is not None and self._format.tools is not None:
            opening, raw = self._format.shown(self._format.tools.open), "".join(self._call.raw)
            self._call, self._state, self._skip = None, "content", ""
            self._say(f"{opening}{raw}{closing}")

    def _leave_call(self) -> None:
        """Something else follows: what might have begun a call does not, and a call that is open is malformed."""
        self._abandon_call()
        self._say(self._call_marks.flush())
        if self._state != "content":
            self._state, self._skip = "content", SPACE

    def _flush_bytes(self) -> None:
        """Shows the bytes of a character that will not be completed."""
        self._take_text(self._utf8.decode(b"", True))
        self._utf8.reset()

    def _finish(self) -> None:
        """Shows what was held back; nothing follows."""
        if self.stopped:
            return
        self._flush_bytes()
        if self._trimmer is not None:
            self._reasoning.append(self._trimmer.push("", end=True))
        self._leave_call()
        if not self._stop_met:
            self._content.append(self._stop.flush())


def output_format(tok: AnyTokenizer, chat: bool, tools: bool) -> OutputFormat:
    """How answers of a tokenizer are read; see `OutputParser` for the arguments.

    Args:
        tok: The tokenizer.
        chat: As for `OutputParser`.
        tools: As for `OutputParser`.

    Returns:
        The format.
    """
    form, marks = tool_format(tok) if chat and tools else None, None
    if chat and tok.thinking is not None:
        first, *lead = tok.thinking.opening
        marks = ThinkingMarks(first, tok.thinking.close, tok.decode(lead), isinstance(tok, HFTokenizer))
    turn = (tok.end_turn, *(form.ends if form else ())) if chat else ()
    letter = tok.encode("a")
    spaced = b"".join(tok.pieces[i] for i in letter) == b" a"  # SentencePiece puts a space in front of a text
    return OutputFormat(
        pieces=tok.pieces,
        ends=frozenset((*tok.ends, tok.pad, *turn)),
        thinking=marks,
        tools=form,
        strips_space=chat and spaced and tok.decode(letter) == "a",
    )
