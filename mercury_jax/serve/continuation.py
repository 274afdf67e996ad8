"""Continues chat answers that ended without content.

A model may end its text inside its thinking, after it, or before it has written anything visible; it may also think
without having been asked to, within `max_tokens`, until that is used up. The server then submits another job whose
prompt is the old prompt and answer, and the client reads both as one answer.

`streaming.respond` wraps the jobs of a chat in `ContinuedAnswer`; `continuation_of` decides which job follows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool

from mercury_jax.decode import thinking
from mercury_jax.decode.defaults import EFFORTS
from mercury_jax.decode.sample import LogProbs
from mercury_jax.serve.engine.request import EngineRequest, RequestRejected, Snapshot
from mercury_jax.serve.service import AnswerHandle, AnswerParser, ServingEngine
from mercury_jax.types import LM

# Of a job and its last snapshot: the part of the snapshot that is kept, and the job that follows; None for no job.
Continuation = Callable[[EngineRequest, Snapshot], "tuple[Snapshot, EngineRequest] | None"]


class ContinuedAnswer:
    """A job and those that continue it, read as one.

    Args:
        engine: Where further jobs are submitted.
        handle: The first job.
        continuation: Decides which job follows.
        parser: Returns a fresh parser, which says whether the answer has content.
    """

    def __init__(
        self,
        engine: ServingEngine,
        handle: AnswerHandle,
        continuation: Continuation,
        parser: Callable[[], AnswerParser],
    ):
        self.request: EngineRequest = handle.request
        self._engine, self._handle, self._continuation, self._parser = engine, handle, continuation, parser
        self._cancelled = False

    def cancel(self) -> None:
        """Cancels the job that runs; no other one follows."""
        self._cancelled = True
        self._handle.cancel()

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        before: Snapshot | None = None  # of the jobs so far, once another one has followed
        while True:
            parser, kept = self._parser(), None
            async with aclosing(aiter(self._handle)) as snapshots:  # type: ignore[type-var]
                async for snapshot in snapshots:
                    whole = snapshot if before is None else join(before, snapshot)
                    parser.feed(whole)
                    kept = await self._continue(snapshot, len(whole.tokens) - len(snapshot.tokens), parser)
                    if kept is not None:
                        break
                    yield whole
            if kept is None:
                return
            before = kept if before is None else join(before, kept)

    async def _continue(self, last: Snapshot, before: int, parser: AnswerParser) -> Snapshot | None:
        """Submits the next job where the answer has ended without content.

        An answer may end before its job does: the end of a turn does not end the job. Logprobs come with the last
        snapshot of the job only.

        Args:
            last: The newest snapshot of the job.
            before: Tokens of the jobs before it.
            parser: Has read all of them.

        Returns:
            What is kept of the job where another one has followed; None where it goes on or was the last.
        """
        ended = last.finish in ("stop", "length") or (last.finish is None and parser.stopped)
        needs_logprobs = last.finish is None and self._handle.request.logprobs is not None
        if not ended or needs_logprobs or self._cancelled or not parser.empty:
            return None
        kept = truncate(last, parser.message().completion_tokens - before)
        found = self._continuation(self._handle.request, kept)
        if found is None:
            return None
        try:
            handle = await run_in_threadpool(self._engine.submit, found[1])
        except (RequestRejected, ValueError):  # the engine shuts down
            return None
        self._handle.cancel()
        self._handle = handle
        if self._cancelled:
            handle.cancel()
        return found[0]


def continuation_of(lm: LM, context: int, opened: bool) -> Continuation:
    """Returns the rule by which answers without content are continued.

    Thinking that used up `max_tokens` gets a thinking budget of its own, and `max_tokens` is kept for the answer. Any
    other answer without content has its thinking closed, and is followed by a job whose first token is visible text,
    so that the content is never empty, whatever the weights are.

    Args:
        lm: The model; its tokenizer has the marks of thinking.
        context: Tokens of prompt and answer.
        opened: Whether the prompt opened the thinking.

    Returns:
        A function of a job and its last snapshot.
    """
    tokenizer, marks = lm.tokenizer, lm.tokenizer.thinking

    def continuation(job: EngineRequest, last: Snapshot) -> tuple[Snapshot, EngineRequest] | None:
        if job.grammar is not None or job.visible:  # these always have content
            return None
        answer, inside = tuple(last.tokens.tolist()), opened or job.thinking > 0
        left = context - len(job.prompt) - len(answer) - 1
        unfinished = last.finish == "length" and thinking.is_thinking(tokenizer, answer, inside)
        if unfinished and not job.thinking and left >= 2:
            max_tokens = min(job.max_tokens, left - 1)
            budget = min(EFFORTS["low"].thinking, left - max_tokens)
            prompt = (*job.prompt, *answer)
            return last, dataclasses.replace(job, prompt=prompt, thinking=budget, max_tokens=max_tokens)
        closed = thinking.close_thinking_ids(tokenizer, answer, inside)
        behind, size = thinking.continuation_prompt(tokenizer, job.prompt, closed, job.max_tokens, context)
        following = dataclasses.replace(
            job, prompt=tuple(behind.ids), max_tokens=size, thinking=0, visible=True
        )
        if marks is not None and closed != answer:
            last = append_token(last, marks.close)
        return last, following

    return continuation


def truncate(snapshot: Snapshot, n: int) -> Snapshot:
    """Returns the first tokens of a snapshot, all of them final.

    Args:
        snapshot: The snapshot.
        n: Number of tokens.

    Returns:
        A snapshot whose arrays have n entries.
    """
    logprobs = snapshot.logprobs
    if logprobs is not None:
        logprobs = LogProbs(logprobs.tokens[:n], logprobs.top_ids[:n], logprobs.top[:n])
    return snapshot._replace(
        tokens=snapshot.tokens[:n],
        accepted=np.ones(n, bool),
        confidence=snapshot.confidence[:n],
        forced=snapshot.forced[:n],
        final=n,
        start=n,
        logprobs=logprobs,
    )


def append_token(snapshot: Snapshot, token: int) -> Snapshot:
    """Returns a snapshot with one more final token, which the server and not the model has chosen.

    Args:
        snapshot: The snapshot.
        token: Id of the token. Its logprob is 0.

    Returns:
        A snapshot whose arrays have one more entry.
    """
    logprobs, true = snapshot.logprobs, np.ones(1, bool)
    if logprobs is not None:
        k = logprobs.top.shape[1]
        logprobs = LogProbs(np.zeros(1), np.full((1, k), token), np.zeros((1, k)))
    end = snapshot._replace(
        tokens=np.array([token], np.int32),
        accepted=true,
        confidence=true.astype(np.float32),
        forced=true,
        final=1,
        start=1,
        forwards=0,
        logprobs=logprobs,
    )
    return join(snapshot, end)


def join(before: Snapshot, snapshot: Snapshot) -> Snapshot:
    """Returns a snapshot of a later job as one of the whole answer.

    Args:
        before: What is kept of the earlier jobs, all of it final.
        snapshot: Of the later job.

    Returns:
        A snapshot with the arrays of both. `cached` is that of the first job, whose prompt is the request's.
    """

    def both(first: Any, second: Any, *names: str) -> dict[str, np.ndarray]:
        return {name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in names}

    n, logprobs = len(before.tokens), snapshot.logprobs
    if logprobs is not None:
        logprobs = LogProbs(**both(before.logprobs, logprobs, "tokens", "top_ids", "top"))
    return snapshot._replace(
        **both(before, snapshot, "tokens", "accepted", "confidence", "forced"),
        final=n + snapshot.final,
        start=n + snapshot.start,
        cached=before.cached,
        forwards=before.forwards + snapshot.forwards,
        logprobs=logprobs,
    )
