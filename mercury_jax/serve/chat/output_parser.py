"""Parsing of an answer's snapshots into reasoning, content and tool calls, streamed as tokens become final.

Content ends before the first stop sequence; reasoning and arguments of calls are not searched for stop sequences. The
parser holds back the bytes of an incomplete character, and text that may be the start of a stop sequence or of a call.
A malformed call (no JSON, no name, or cut off by max_tokens) is shown as content. If its first part has already been
sent as a call, its arguments remain an incomplete JSON text, which no client can execute, and
`ParsedMessage.tool_calls` omits it.

The output for a token depends only on the tokens before it, so it does not matter which snapshots a reader misses.
"""

from __future__ import annotations

import codecs
import copy
import secrets
from collections.abc import Iterable
from typing import NamedTuple

from mercury_jax.decode.answer_text import StopMatcher
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
    """New text of the call number `index`. Only its first delta has `id` and `name`; `arguments` are appended."""

    index: int
    id: str | None
    name: str | None
    arguments: str


class OutputDelta(NamedTuple):
    """Text and tool calls that became final; all fields may be empty."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ParsedCallDelta, ...] = ()


class ParsedMessage(NamedTuple):
    """A complete answer.

    Attributes:
        content: Text of the answer.
        reasoning: Text of the thinking.
        tool_calls: The calls.
        reasoning_tokens: Number of tokens of the thinking.
        completion_tokens: Number of all tokens.
        content_offsets: For each token that wrote a character of the content, in order: its index in the answer, and
            the position of that character in the content.
        stop_sequence: The stop sequence that ended the content, if one did.
    """

    content: str
    reasoning: str
    tool_calls: tuple[ParsedCall, ...]
    reasoning_tokens: int
    completion_tokens: int
    content_offsets: tuple[tuple[int, int], ...] = ()
    stop_sequence: str | None = None


class ThinkingMarks(NamedTuple):
    """The tokens around a model's thinking section.

    Attributes:
        open: Token id that opens the section.
        close: Token id that closes the section.
        lead: Text after `open` that is not part of the reasoning.
        trims: Whether to drop line ends around the reasoning and before the answer, which the chat template adds.
    """

    open: int
    close: int
    lead: str
    trims: bool


class OutputFormat(NamedTuple):
    """How the token ids of an answer are decoded.

    Attributes:
        pieces: Bytes of each token id.
        ends: Token ids that end the answer.
        thinking: Marks of the thinking section. None: thinking is not parsed.
        tools: Form of tool calls. None: tool calls are not parsed.
        strips_space: Whether to drop the first space of a text, because the tokenizer adds it.
    """

    pieces: tuple[bytes, ...]
    ends: frozenset[int]
    thinking: ThinkingMarks | None
    tools: ToolFormat | None
    strips_space: bool

    def piece(self, i: int) -> bytes:
        """Returns the bytes of a token id; empty for ids of the model that the tokenizer lacks."""
        return self.pieces[i] if i < len(self.pieces) else b""

    def shown(self, mark: int | str | None) -> str:
        """Returns the text of a mark, which is a token id or already a text."""
        return self.piece(mark).decode(errors="replace") if isinstance(mark, int) else mark or ""


class ReasoningTrimmer:
    """Removes the lead of one thinking section and, if the marks say so, line ends at its start and end."""

    def __init__(self, marks: ThinkingMarks):
        self._marks = marks
        self._head: str | None = ""  # text that may be the start of the lead; None once the lead is over
        self._started = not marks.trims
        self._line_ends = ""  # line ends at the end of the text so far, held back

    def push(self, text: str, end: bool = False) -> str:
        """Adds the next text of the section."""
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
    """Parses one answer. The deltas of all snapshots, concatenated, are its message."""

    def __init__(
        self,
        lm: LM,
        *,
        chat: bool,
        tools: bool = False,
        stop: Iterable[str] = (),
        thinking: bool = False,
        begun: bool = False,
    ):
        self._format = output_format(lm.tokenizer, chat, tools)
        form, marks = self._format.tools, self._format.thinking
        self._position = 0  # number of token ids read from snapshots
        self._tokens = self._reasoning_tokens = 0
        self._finished = self._ended = False  # last snapshot, end id
        self._stop_met: str | None = None  # the stop sequence that ended the content
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._sent = (0, 0)  # number of parts of reasoning and content that `feed` has returned
        self._deltas: dict[int, ParsedCallDelta] = {}  # by call, not yet returned by `feed`
        self._calls: list[ParsedCall] = []
        self._utf8 = _Utf8Decoder("replace")
        # Which tokens wrote each character: tokens whose bytes are not a character yet; characters that are neither
        # content nor dropped yet; those of them that `_stop` holds back; and the content's tokens with their offsets.
        self._undecoded: list[int] = []
        self._origins: list[list[int]] = []
        self._held_origins: list[list[int]] = []
        self._content_offsets: dict[int, int] = {}
        self._content_size = 0
        self._call_size = 0  # characters of the open call, with its opening mark
        self._trimmer = ReasoningTrimmer(marks) if thinking and chat and marks else None  # None: not thinking
        self._strip_space = self._format.strips_space and not begun
        self._call_marks = StopMatcher([form.open] if form and isinstance(form.open, str) else [])
        self._stop = StopMatcher(stop)
        self._state = "content"  # or "call": inside its JSON; "after": between the JSON and the closing mark
        self._call: CallParser | None = None
        self._call_id, self._call_index = "", -1
        self._tail = ""  # in state "after": text that may be the start of the closing mark
        self._skip = ""  # characters that are dropped until a different one arrives
        self._draft = False  # whether this is a copy for `preview`, which omits calls

    @property
    def stopped(self) -> bool:
        """Whether an end token or a stop sequence was found. Later tokens are ignored; the request may be cancelled."""
        return self._ended or self._stop_met is not None

    @property
    def calling(self) -> bool:
        """Whether a tool call has begun."""
        return self._state != "content" or bool(self._calls)

    @property
    def empty(self) -> bool:
        """Whether a finished answer has neither content nor calls, for another reason than a stop sequence."""
        return not (self._stop_met or self._calls or "".join(self._content).strip())

    def feed(self, snapshot: Snapshot) -> OutputDelta:
        """Reads a snapshot."""
        self._advance(snapshot)
        reasoning, content = self._reasoning[self._sent[0] :], self._content[self._sent[1] :]
        self._sent = len(self._reasoning), len(self._content)
        deltas, self._deltas = self._deltas, {}
        return OutputDelta("".join(reasoning), "".join(content), tuple(deltas.values()))

    def preview(self, snapshot: Snapshot) -> str:
        """Returns the current content after a pass, including tokens that may still change.

        The preview ends at the first accepted end token. It omits reasoning, calls, incomplete characters, and text
        that may be the start of a stop sequence.
        """
        self._advance(snapshot)
        if self._finished:
            return "".join(self._content)
        # Parse the tokens that are not final with a copy, so that this parser keeps its state for the final ones. All
        # mutable parts are copied; the decoder drops incomplete characters instead of showing replacement characters.
        draft = copy.copy(self)
        draft._draft, draft._call = True, None
        draft._content, draft._reasoning = list(self._content), []
        draft._origins, draft._held_origins, draft._undecoded, draft._content_offsets = [], [], [], {}
        draft._trimmer, draft._stop = copy.copy(self._trimmer), copy.copy(self._stop)
        draft._call_marks = copy.copy(self._call_marks)
        draft._utf8 = _Utf8Decoder("ignore")
        draft._utf8.setstate(self._utf8.getstate())
        ids, accepted = snapshot.tokens[snapshot.final :], snapshot.accepted[snapshot.final :]
        for i, kept in zip(ids.tolist(), accepted.tolist(), strict=True):
            if kept or i not in self._format.ends:
                draft._take(i)
        return "".join(draft._content)

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens of the thinking, and all tokens, read so far."""
        return self._reasoning_tokens, self._tokens

    def message(self) -> ParsedMessage:
        """Returns the complete answer, after the last snapshot."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        offsets = tuple(self._content_offsets.items())
        return ParsedMessage(content, reasoning, tuple(self._calls), *self.counts, offsets, self._stop_met)

    def _advance(self, snapshot: Snapshot) -> None:
        """Reads the token ids that became final since the previous snapshot."""
        for i in snapshot.tokens[self._position : snapshot.final].tolist():
            self._take(i)
        self._position = max(self._position, snapshot.final)
        if snapshot.finish is not None and not self._finished:
            self._finish()
        self._finished = self._finished or self.stopped or snapshot.finish is not None

    def _take(self, i: int) -> None:
        """Reads one token id: an end of the answer, a mark, or text."""
        if self.stopped:
            return
        if i in self._format.ends:
            self._finish()
            self._ended = True
            return
        self._tokens += 1
        thinking = self._trimmer is not None
        if not self._take_mark(i):
            self._undecoded.append(self._tokens - 1)
            self._take_text(self._utf8.decode(self._format.piece(i)))
        # The tokens that open and close thinking count as reasoning: one of the two states is inside.
        self._reasoning_tokens += thinking or self._trimmer is not None
        self._stream_call()

    def _take_mark(self, i: int) -> bool:
        """Applies a token id if it is a mark of thinking or of a tool call."""
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
            return True  # also a mark without effect, which is never shown as text
        if tools is None or self._trimmer is not None:
            return False
        if i == tools.open:
            self._flush_bytes()
            self._leave_call()
            self._add_origins(self._format.shown(i))
            self._begin_call()
        elif i == tools.close and self._state != "content":
            self._flush_bytes()
            if self._call is not None:
                self._add_origins(self._format.shown(i))
                self._abandon_call(self._format.shown(i))
            else:
                self._state, self._skip = "content", SPACE
        elif i == tools.quote and self._state == "call":
            self._flush_bytes()
            self._add_origins(self._format.shown(i) or '"')
            self._push_call(self._format.shown(i) or '"', quote=True)
        else:
            return False
        return True

    def _take_text(self, text: str) -> None:
        """Adds decoded text to the reasoning, the content or the open call, by the current state."""
        # The first character may have begun in earlier tokens; the last token may begin one that is not complete.
        origins = [self._undecoded, *[self._undecoded[-1:]] * (len(text) - 1)] if text else []
        if not self._utf8.getstate()[0]:
            self._undecoded = []
        elif text:
            self._undecoded = self._undecoded[-1:]
        if text and self._strip_space:
            text, self._strip_space = text.removeprefix(" "), False
        if self._trimmer is None:
            self._origins += origins[len(origins) - len(text) :]
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
                size = len(text) + len(self._tail)
                text = self._take_after_call(text)
                self._drop(size - len(text) - len(self._tail) * (self._state == "after"))
            elif self._call is None:  # a draft skips the text of calls
                return
            else:
                self._push_call(text[0])
                text = text[1:]

    def _take_after_call(self, text: str) -> str:
        """Reads text after the JSON of a call: spaces, and the closing mark if the mark is a text."""
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
        """Adds content up to the first stop sequence."""
        if self._skip and text:
            kept = text.lstrip(self._skip)
            self._drop(len(text) - len(kept))
            text, self._skip = kept, "" if kept else self._skip
        self._held_origins += self._drop(len(text))
        before, found, _ = self._stop.push(text)
        self._add_content(before)
        self._stop_met = self._stop_met or found

    def _add_content(self, text: str) -> None:
        """Adds text that no stop sequence can cut any more, and notes which tokens wrote it."""
        self._content.append(text)
        for offset, tokens in enumerate(self._held_origins[: len(text)], self._content_size):
            for token in tokens:
                self._content_offsets.setdefault(token, offset)
        del self._held_origins[: len(text)]
        self._content_size += len(text)

    def _add_origins(self, mark: str) -> None:
        """Notes that the current token, a mark, wrote this text, which becomes content if its call is malformed."""
        self._origins += [[self._tokens - 1]] * len(mark)

    def _drop(self, size: int) -> list[list[int]]:
        """Removes the origins of the next characters, and returns them."""
        dropped, self._origins = self._origins[:size], self._origins[size:]
        return dropped

    def _begin_call(self) -> None:
        """Starts a call after its opening mark."""
        gemma = self._format.tools is not None and self._format.tools.quote is not None
        self._call = None if self._draft else CallParser(gemma)
        self._state, self._call_id, self._tail = "call", "", ""
        self._call_size = len(self._format.shown(self._format.tools.open)) if self._format.tools else 0

    def _push_call(self, text: str, quote: bool = False) -> None:
        """Adds one character, or the string mark of Gemma's form, to the open call."""
        if self._call is None:
            return
        self._call_size += len(text)
        try:
            self._call.push(text, quote)
        except MalformedCall:
            self._abandon_call()
            return
        if self._call.done:
            self._stream_call()
            call = ParsedCall(self._call_id, self._call.name or "", "".join(self._call.arguments))
            self._calls.append(call)
            self._drop(self._call_size)
            self._call, self._state = None, "after"

    def _stream_call(self) -> None:
        """Adds the new arguments of the open call to the deltas."""
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
        """Ends the current call state because something else follows.

        An open call is malformed and becomes content, as does text that was held back as a possible opening mark.
        """
        self._abandon_call()
        self._say(self._call_marks.flush())
        if self._state != "content":
            self._drop(len(self._tail))
            self._state, self._skip, self._tail = "content", SPACE, ""

    def _flush_bytes(self) -> None:
        """Emits the bytes of an incomplete character as a replacement character; no later token completes it."""
        self._take_text(self._utf8.decode(b"", True))
        self._utf8.reset()

    def _finish(self) -> None:
        """Emits all text that was held back, at the end of the answer."""
        if self.stopped:
            return
        self._flush_bytes()
        if self._trimmer is not None:
            self._reasoning.append(self._trimmer.push("", end=True))
        self._leave_call()
        if not self._stop_met:
            self._add_content(self._stop.flush())


def output_format(tok: AnyTokenizer, chat: bool, tools: bool) -> OutputFormat:
    """Derives the output format of a tokenizer."""
    form, marks = tool_format(tok) if chat and tools else None, None
    if chat and tok.thinking is not None:
        first, *lead = tok.thinking.opening
        marks = ThinkingMarks(first, tok.thinking.close, tok.decode(lead), isinstance(tok, HFTokenizer))
    turn = (tok.end_turn, *(form.ends if form else ())) if chat else ()
    letter = tok.encode("a")
    spaced = b"".join(tok.pieces[i] for i in letter) == b" a"  # SentencePiece adds a space before a text
    return OutputFormat(
        pieces=tok.pieces,
        ends=frozenset((*tok.ends, tok.pad, *turn)),
        thinking=marks,
        tools=form,
        strips_space=chat and spaced and tok.decode(letter) == "a",
    )
