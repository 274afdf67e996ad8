"""An answer that is there before anything runs, with the faces of a ticket and of a reply."""

from __future__ import annotations

from collections.abc import AsyncIterator

from mercury_jax.serve.chat.reply import Delta, Message
from mercury_jax.serve.engine.ticket import NOTHING
from mercury_jax.serve.engine.types import Job, Snapshot


class Ready:
    """What an update merges to by itself: it takes no slot and no pass."""

    def __init__(self, text: str, tokens: int):
        self.job = Job(prompt=(0,), max_tokens=1)
        self.stopped = False
        self._message = Message(text, "", (), 0, tokens)

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        yield NOTHING._replace(finish="stop")

    def cancel(self) -> None:
        """There is nothing to cancel."""

    def feed(self, snapshot: Snapshot) -> Delta:
        return Delta(content=self._message.content)

    def shown(self, snapshot: Snapshot) -> str:
        return self._message.content

    def message(self) -> Message:
        return self._message
