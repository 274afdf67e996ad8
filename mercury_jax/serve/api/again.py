"""An answer whose room its own thinking took: it is gone on with, so that no reply is empty.

Where thinking has room of its own, the engine closes it there. A model may also think without having been asked to,
in the answer's room; where that ends before the thinking does, a second job takes the thinking over, in room of its
own, with the answer's kept behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import numpy as np

from mercury_jax.decode.effort import EFFORTS
from mercury_jax.decode.output import LogProbs
from mercury_jax.serve.engine.types import Busy, Job, Snapshot
from mercury_jax.types import LM

Next = Callable[[Job, Snapshot], Job | None]


class Again:
    """A ticket with a second one behind it, where `then` makes a job of the first and its last snapshot."""

    def __init__(self, engine: Any, ticket: Any, then: Next):
        self.job: Job = ticket.job
        self._engine, self._ticket, self._then = engine, ticket, then
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._ticket.cancel()

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        before: Snapshot | None = None
        async with aclosing(aiter(self._ticket)) as snapshots:
            async for snapshot in snapshots:
                if snapshot.finish is None or not self._goes_on(snapshot):
                    yield snapshot
                else:
                    before = snapshot
        if before is not None:
            async with aclosing(aiter(self._ticket)) as snapshots:
                async for snapshot in snapshots:
                    yield joined(before, snapshot)

    def _goes_on(self, last: Snapshot) -> bool:
        """Whether a second job took over; where the engine has no room for it, the first was all."""
        job = None if self._cancelled or last.finish != "length" else self._then(self.job, last)
        if job is None:
            return False
        try:
            self._ticket = self._engine.submit(job)
        except (Busy, ValueError):
            return False
        return True


def thought_on(lm: LM, context: int, opened: bool) -> Next:
    """The job that goes on where an answer ended within its thinking. opened: the prompt had begun it."""
    marks = lm.tokenizer.thinking

    def then(job: Job, last: Snapshot) -> Job | None:
        if marks is None or job.grammar is not None:
            return None
        inside, said = opened, last.tokens.tolist()
        for i in said:
            inside = i == marks.opening[0] or (inside and i != marks.close)
        left = context - len(job.prompt) - len(said) - 1
        if not inside or left < 2:
            return None
        answer = min(job.max_tokens, left - 1)
        room = min(EFFORTS["low"].thinking, left - answer)
        return dataclasses.replace(job, prompt=(*job.prompt, *said), thinking=room, max_tokens=answer)

    return then


def joined(before: Snapshot, snapshot: Snapshot) -> Snapshot:
    """A snapshot of the second job as one of the whole answer."""
    n, logprobs = len(before.tokens), snapshot.logprobs
    if logprobs is not None:
        logprobs = LogProbs(**_both(before.logprobs, logprobs, "tokens", "top_ids", "top"))
    return snapshot._replace(
        **_both(before, snapshot, "tokens", "settled", "confidence", "forced"),
        final=n + snapshot.final, start=n + snapshot.start, cached=before.cached,
        forwards=before.forwards + snapshot.forwards, logprobs=logprobs,
    )  # fmt: skip


def _both(before: Any, behind: Any, *names: str) -> dict[str, np.ndarray]:
    """Arrays of both, one behind the other."""
    return {name: np.concatenate([getattr(before, name), getattr(behind, name)]) for name in names}
