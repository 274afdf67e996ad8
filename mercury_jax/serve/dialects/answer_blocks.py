"""The answer as a sequence of blocks: thinking, text, tool calls.

The Responses API calls them output items, the Messages API content blocks. `BlockReader` divides the parser's deltas
into blocks that do not overlap; the writers make an event of each step.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mercury_jax.serve.chat.output_parser import OutputDelta
from mercury_jax.serve.response_plan import FinishedAnswer

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A part of an answer.

    Attributes:
        index: Its position in the answer.
        id: A random id.
        text: The text so far; of a call, its arguments so far.
        call_id, name: Of a call.
        status: "incomplete" for the last block of an answer that `max_tokens` cut off, and for a malformed call.
    """

    kind: Kind
    index: int
    id: str
    text: str = ""
    call_id: str = ""
    name: str = ""
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"

    @property
    def arguments(self) -> dict[str, Any] | None:
        """The arguments of a call; None until they are complete."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None


class Step(NamedTuple):
    """A block was opened, `text` was added to it, or it was closed."""

    action: Literal["open", "add", "close"]
    block: Block
    text: str = ""


class BlockReader:
    """Divides the deltas of one answer into blocks.

    Args:
        reasoning: Whether the thinking is a block; otherwise it is left out.
    """

    def __init__(self, reasoning: bool):
        self.blocks: list[Block] = []
        self._reasoning = reasoning

    def read(self, delta: OutputDelta) -> Iterator[Step]:
        """Yields the steps of a delta, each before the next one changes a block.

        A block is closed when the next one is opened.
        """
        if delta.reasoning and self._reasoning:
            yield from self._add("reasoning", delta.reasoning)
        # Text in the same delta stands behind a call that goes on, and in front of one that begins.
        for call in (call for call in delta.tool_calls if call.id is None):
            yield from self._add("call", call.arguments)
        if delta.content:
            yield from self._add("text", delta.content)
        for call in (call for call in delta.tool_calls if call.id is not None):
            yield from self._add("call", call.arguments, call.id or "", call.name or "")

    def finish(self, answer: FinishedAnswer, empty: bool) -> Iterator[Step]:
        """Yields the steps at the end of an answer.

        Args:
            empty: Whether an answer without text and calls has an empty block of text.
        """
        if empty and all(block.kind == "reasoning" for block in self.blocks):
            yield from self._add("text", "")
        yield from self._close(cut=answer.finish_reason == "length")

    def _add(self, kind: Kind, text: str, call_id: str = "", name: str = "") -> Iterator[Step]:
        if call_id or not self.blocks or self.blocks[-1].kind != kind:
            yield from self._close()
            self.blocks.append(Block(kind, len(self.blocks), secrets.token_hex(12), "", call_id, name))
            yield Step("open", self.blocks[-1])
        self.blocks[-1].text += text
        if text:
            yield Step("add", self.blocks[-1], text)

    def _close(self, cut: bool = False) -> Iterator[Step]:
        for block in self.blocks[-1:]:
            whole = block.arguments is not None if block.kind == "call" else not cut
            block.status = "completed" if whole else "incomplete"
            yield Step("close", block)
