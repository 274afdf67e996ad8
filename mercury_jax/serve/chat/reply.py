"""Snapshots of an answer -> what to send: thinking, content and tool calls, each as it becomes final.

Content goes up to the first stop sequence, and never holds one; thinking and arguments are not searched for them.
Bytes of half a character, and text that may be the beginning of a stop sequence or of a call, are held back
until it is known what they are. A call that breaks (no JSON, no name, cut off by the length) is content. Where
its beginning has been sent already it cannot be taken back: its arguments stay an unfinished JSON text, which no
client can execute, its text follows as content, and `Message.calls` leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mercury_jax.serve.chat.fold import Fold, Reading
from mercury_jax.serve.chat.formats import thinking_marks, tool_format
from mercury_jax.serve.chat.talk import Call, CallDelta
from mercury_jax.serve.engine.request import Snapshot
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.types import LM

__all__ = ["Call", "CallDelta", "Delta", "Message", "Reply"]


class Delta(NamedTuple):
    """What is new and final; all of it may be empty."""

    thinking: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class Message(NamedTuple):
    """A whole answer. completion_tokens: of all that was read, reasoning_tokens among them."""

    content: str
    thinking: str
    calls: tuple[Call, ...]
    reasoning_tokens: int
    completion_tokens: int


class Reply:
    """Reads one answer. The deltas of all snapshots together are its message, however the snapshots came.

    chat: it is a turn of a conversation, whose thinking and end of turn count. tools: calls count. stop: texts that end
    it. thinking: its prompt opened the thinking (`prompt.opened`).
    """

    def __init__(
        self, lm: LM, *, chat: bool, tools: bool = False, stop: Iterable[str] = (), thinking: bool = False
    ):
        self._fold = Fold(_reading(lm.tokenizer, chat, tools, tuple(stop)), thinking and chat)
        self._at = 0
        self._closed = False
        self._content: list[str] = []
        self._thinking: list[str] = []
        self._sent = (0, 0)  # of the two, parts that went out
        self._calls: list[CallDelta] = []

    @property
    def stopped(self) -> bool:
        """Whether the answer has ended by a stop sequence or an end of its turn: what the engine still writes does not
        count, and its ticket may be cancelled."""
        return self._fold.over

    @property
    def silent(self) -> bool:
        """Whether nothing that a reader sees was said, and no stop sequence is why. After an end."""
        return not (self._fold.talk.over or self._fold.talk.whole or "".join(self._content).strip())

    def feed(self, snapshot: Snapshot) -> Delta:
        """What became final since the last call. Snapshots in their order; some may be left out."""
        self._advance(snapshot)
        thinking, content = self._thinking[self._sent[0] :], self._content[self._sent[1] :]
        self._sent = len(self._thinking), len(self._content)
        calls, self._calls = self._calls, []
        return Delta("".join(thinking), "".join(content), _merged(calls))

    def shown(self, snapshot: Snapshot) -> str:
        """The content as it stands, with what may still change, up to the first settled end.

        Without thinking, calls, half characters and what may be the beginning of a stop sequence. Of the last
        snapshot it is the message's content.
        """
        self._advance(snapshot)
        fold = self._fold
        if not self._closed:
            fold, ends = fold.fork(), fold.reading.ends
            ids, settled = snapshot.tokens[snapshot.final :], snapshot.accepted[snapshot.final :]
            for i, sure in zip(ids.tolist(), settled.tolist(), strict=True):
                if sure or i not in ends:
                    fold.take(i)
            return "".join([*self._content, *fold.talk.said])
        return "".join(self._content)

    def message(self) -> Message:
        """The whole answer, after the last snapshot."""
        fold = self._fold
        return Message(
            "".join(self._content),
            "".join(self._thinking),
            tuple(fold.talk.whole),
            fold.reasoning,
            fold.tokens,
        )

    def _advance(self, snapshot: Snapshot) -> None:
        fold, talk = self._fold, self._fold.talk
        for i in snapshot.tokens[self._at : snapshot.final].tolist():
            fold.take(i)
        self._at = max(self._at, snapshot.final)
        if snapshot.finish is not None and not self._closed:
            fold.finish()
        self._closed = self._closed or fold.over or snapshot.finish is not None
        self._content += talk.said
        self._thinking += fold.thought
        self._calls += talk.deltas
        talk.said, fold.thought, talk.deltas = [], [], []


def _reading(tok: AnyTokenizer, chat: bool, tools: bool, stop: tuple[str, ...]) -> Reading:
    form = tool_format(tok) if chat and tools else None
    turn = (tok.end_turn, *(form.ends if form else ())) if chat else ()
    whole = b"".join(tok.pieces[i] for i in tok.encode("a"))
    return Reading(
        pieces=tok.pieces,
        ends=frozenset((*tok.ends, tok.pad, *turn)),
        thinking=thinking_marks(tok) if chat else None,
        tools=form,
        stop=stop,
        strips=chat and whole == b" a" and tok.decode(tok.encode("a")) == "a",
    )


def _merged(calls: Iterable[CallDelta]) -> tuple[CallDelta, ...]:
    """One delta for each call."""
    made: dict[int, CallDelta] = {}
    for c in calls:
        old = made.get(c.index)
        made[c.index] = c if old is None else old._replace(arguments=old.arguments + c.arguments)
    return tuple(made.values())
