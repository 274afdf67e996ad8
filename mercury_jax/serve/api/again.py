"""Continues chat replies that ended without an answer.

A model may end its text inside its thinking, behind it, or before it has said anything; it may also think without
having been asked to, in the answer's room, until that is used up. Its reply would have no content. The server then
submits another job behind the same prompt and reply, and the client reads both as one answer.

`running.respond` wraps the tickets of a chat in `Again`; which job follows is decided by `continued`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool

from mercury_jax.decode import silent
from mercury_jax.decode.effort import EFFORTS
from mercury_jax.decode.output import LogProbs
from mercury_jax.serve.chat.output_parser import OutputParser
from mercury_jax.serve.engine.request import EngineRequest, RequestRejected, Snapshot
from mercury_jax.types import LM

Next = Callable[[EngineRequest, Snapshot], "tuple[Snapshot, EngineRequest] | None"]


class Again:
    """A ticket with further ones behind it, for as long as the reply is silent and another job can follow.

    Args:
        engine: Where further jobs are submitted.
        ticket: The first job's.
        then: Of a job and its reply, what stays of that reply and the job that follows; None where none can.
        reply: A fresh parser of the reply, which says whether it is silent.
    """

    def __init__(self, engine: Any, ticket: Any, then: Next, reply: Callable[[], OutputParser]):
        self.request: EngineRequest = ticket.request
        self._engine, self._ticket, self._then, self._reply = engine, ticket, then, reply
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._ticket.cancel()

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        before: Snapshot | None = None
        while True:
            reply, kept = self._reply(), None
            async with aclosing(aiter(self._ticket)) as snapshots:
                async for snapshot in snapshots:
                    whole = snapshot if before is None else joined(before, snapshot)
                    reply.feed(whole)
                    kept = await self._followed(snapshot, len(whole.tokens) - len(snapshot.tokens), reply)
                    if kept is not None:
                        break
                    yield whole
            if kept is None:
                return
            before = kept if before is None else joined(before, kept)

    async def _followed(self, last: Snapshot, before: int, reply: OutputParser) -> Snapshot | None:
        """What stays of the job's reply where another job has taken over; None: it goes on, or was all.

        A reply may be over before its job is: an end of turn is no end to the engine. Log-probabilities come with
        the job's end alone.
        """
        over = last.finish in ("stop", "length") or (last.finish is None and reply.stopped)
        wait = last.finish is None and self._ticket.request.logprobs is not None
        if not over or wait or self._cancelled or not reply.empty:
            return None
        found = self._then(self._ticket.request, cut(last, reply.message().completion_tokens - before))
        if found is None:
            return None
        try:
            ticket = await run_in_threadpool(self._engine.submit, found[1])
        except (RequestRejected, ValueError):  # the engine is closing
            return None
        self._ticket.cancel()
        self._ticket = ticket
        if self._cancelled:
            ticket.cancel()
        return found[0]


def continued(lm: LM, context: int, opened: bool) -> Next:
    """The rule by which a silent reply is continued.

    Thinking that used up the answer's room gets room of its own, with the answer's kept behind it. Any other silent
    reply is closed and followed by an answer whose first token shows text: the content is never empty, whatever the
    weights are.

    Args:
        lm: Whose marks of thinking count.
        context: Tokens of prompt and answer.
        opened: The prompt opened the thinking.
    """
    tok, marks = lm.tokenizer, lm.tokenizer.thinking

    def then(job: EngineRequest, last: Snapshot) -> tuple[Snapshot, EngineRequest] | None:
        if job.grammar is not None or job.visible:  # neither is silent
            return None
        said, inside = tuple(last.tokens.tolist()), opened or job.thinking > 0
        left = context - len(job.prompt) - len(said) - 1
        unfinished = last.finish == "length" and silent.thinks(tok, said, inside)
        if unfinished and not job.thinking and left >= 2:
            answer = min(job.max_tokens, left - 1)
            room = min(EFFORTS["low"].thinking, left - answer)
            more = dataclasses.replace(job, prompt=(*job.prompt, *said), thinking=room, max_tokens=answer)
            return last, more
        shut = silent.closed(tok, said, inside)
        room = silent.room(tok, job.prompt, shut, job.max_tokens, context)
        answer = dataclasses.replace(
            job, prompt=room.prompt, max_tokens=room.max_tokens, thinking=0, visible=True
        )
        return (last if shut == said or marks is None else closed(last, marks.close)), answer

    return then


def cut(snapshot: Snapshot, n: int) -> Snapshot:
    """The first n tokens of a snapshot, all of them final."""
    logprobs = snapshot.logprobs
    if logprobs is not None:
        logprobs = LogProbs(logprobs.tokens[:n], logprobs.top_ids[:n], logprobs.top[:n])
    return snapshot._replace(
        tokens=snapshot.tokens[:n], accepted=np.ones(n, bool), confidence=snapshot.confidence[:n],
        forced=snapshot.forced[:n], final=n, start=n, logprobs=logprobs,
    )  # fmt: skip


def closed(snapshot: Snapshot, close: int) -> Snapshot:
    """A snapshot with the close of its thinking behind it, as the server has put it there."""
    logprobs = snapshot.logprobs
    if logprobs is not None:
        k = logprobs.top.shape[1]
        logprobs = LogProbs(np.zeros(1), np.full((1, k), close), np.zeros((1, k)))
    yes = np.ones(1, bool)
    end = snapshot._replace(
        tokens=np.array([close], np.int32), accepted=yes, confidence=yes.astype(np.float32), forced=yes, final=1,
        start=1, forwards=0, logprobs=logprobs,
    )  # fmt: skip
    return joined(snapshot, end)


def joined(before: Snapshot, snapshot: Snapshot) -> Snapshot:
    """A snapshot of a further job as one of the whole answer."""
    n, logprobs = len(before.tokens), snapshot.logprobs
    if logprobs is not None:
        logprobs = LogProbs(**_both(before.logprobs, logprobs, "tokens", "top_ids", "top"))
    return snapshot._replace(
        **_both(before, snapshot, "tokens", "accepted", "confidence", "forced"),
        final=n + snapshot.final, start=n + snapshot.start, cached=before.cached,
        forwards=before.forwards + snapshot.forwards, logprobs=logprobs,
    )  # fmt: skip


def _both(before: Any, behind: Any, *names: str) -> dict[str, np.ndarray]:
    """Arrays of both, one behind the other."""
    return {name: np.concatenate([getattr(before, name), getattr(behind, name)]) for name in names}
