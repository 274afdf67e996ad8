"""An answer that is there before anything runs, with the faces of a ticket and of a reply."""

from __future__ import annotations

from collections.abc import AsyncIterator

from mercury_jax.serve.chat.output_parser import OutputDelta, ParsedMessage
from mercury_jax.serve.engine.request import EMPTY_SNAPSHOT, EngineRequest, Snapshot


class Ready:
    """What an update merges to by itself: it takes no slot and no pass."""

    def __init__(self, text: str, tokens: int):
        self.request = EngineRequest(prompt=(0,), max_tokens=1)
        self.stopped = False
        self._message = ParsedMessage(text, "", (), 0, tokens)

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        yield EMPTY_SNAPSHOT._replace(finish="stop")

    def cancel(self) -> None:
        """There is nothing to cancel."""

    def feed(self, snapshot: Snapshot) -> OutputDelta:
        return OutputDelta(content=self._message.content)

    def preview(self, snapshot: Snapshot) -> str:
        return self._message.content

    def message(self) -> ParsedMessage:
        return self._message
