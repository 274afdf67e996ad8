"""The types of the engine's interface: configuration, request, snapshot and handle.

`Engine.submit` takes an `EngineRequest` and returns a `RequestHandle`. A thread or an event loop reads `Snapshot`s of
the answer from the handle; the last one has `finish` set. This module does not import JAX.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from mercury_jax.decode.constrained import Kept

if TYPE_CHECKING:
    from mercury_jax.decode.grammar import Grammar
    from mercury_jax.decode.sample import LogProbs
    from mercury_jax.images import Image

BACKLOG = 1024  # snapshots kept for a slow reader; beyond that the oldest are dropped


class RequestRejected(Exception):
    """The queue is full, or the engine is closing.

    Attributes:
        retry_after: Seconds after which another attempt may succeed.
        closing: Whether the engine is closing, so that another attempt will not succeed.
    """

    def __init__(self, message: str, retry_after: float, closing: bool = False):
        super().__init__(message)
        self.retry_after, self.closing = retry_after, closing


class ContextLengthExceeded(ValueError):
    """Prompt, thinking and answer need `tokens` positions, which exceeds the `context` of the engine."""

    def __init__(self, tokens: int, context: int):
        super().__init__(f"{tokens} tokens of prompt and answer; at most the context of {context}")
        self.tokens, self.context = tokens, context


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and limits of an engine.

    Attributes:
        slots: Maximum number of requests that decode in the same batch.
        queue: Maximum number of requests that wait for a slot; further ones are rejected.
        context: Maximum tokens of prompt and output. None: the model's context.
        block: Tokens of a block. None: the model's block size.
        passes: Maximum denoising passes per dispatch to the device. None: 1 on CPU, 4 elsewhere.
        prefix_bytes: Size of the prefix cache in bytes. 0 disables it.
        max_logprobs: Maximum alternatives per token that a request may ask log-probabilities for.
        programs: "all" compiles a program for each bucket (number of rows, positions, sampler level), so that a few
            short requests run in a small bucket. "one" compiles the largest bucket only; then the text of a request
            does not depend on the other requests of the batch, bit for bit.
        rules: Names of the decoding rules that requests may choose, in addition to the model's own rule. None: the
            rules of `sampling_params.DEFAULT_RULES` for the model's noise, and registered rules of the user. Fewer
            rules compile faster.
        kv: Format of the KV cache: "int8" or "fp8" (a quarter of fp32, half of bf16), "4bit" or "3bit" (half and
            three eighths of int8). None: the model's dtype.
        memory: Maximum bytes per device for KV cache, prefix cache and activations. None: nine tenths of the free
            memory.
    """

    slots: int = 8
    queue: int = 64
    context: int | None = None
    block: int | None = None
    passes: int | None = None
    prefix_bytes: int = 64 << 20
    max_logprobs: int = 20
    programs: Literal["all", "one"] = "all"
    rules: tuple[str, ...] | None = None
    kv: Literal["int8", "fp8", "4bit", "3bit"] | None = None
    memory: int | None = None


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """A prompt and the sampling parameters of its answer. All numbers are traced: no value triggers a recompilation.

    Attributes:
        prompt: Token ids, at least one.
        max_tokens: Maximum tokens of the answer, not counting its thinking.
        thinking: Maximum tokens of thinking before the answer. 0: no thinking; otherwise the prompt must end with the
            start of the thinking section.
        rule: Name of a decoding rule of the engine. None: the model's own rule.
        p: First parameter of the rule, its strictness. None: the rule's default.
        rule_params: Parameters of the rule by name; the others keep their defaults.
        steps: Maximum denoising steps per block. 0: as many as the block has tokens.
        temperature: Sampling temperature; 0 takes the argmax. None: the rule's default.
        top_p: Nucleus sampling; 1 disables it.
        top_k: Keep the k most probable ids; 0 disables it.
        min_p: Keep ids whose probability is at least this fraction of the highest one; 0 disables it.
        repetition_penalty: Divides the logits of ids that occur in the prompt or the answer; 1 disables it.
        presence_penalty: Subtracted from the logits of ids that occur in the answer; 0 disables it.
        frequency_penalty: Subtracted once per occurrence in the answer; 0 disables it.
        logit_bias: Value to add to a logit, by token id.
        seed: Seed of the random draws.
        logprobs: Number of alternatives to return with each token's log-probability. None: no log-probabilities.
        grammar: Grammar that the answer must match; the thinking is not constrained.
        kept: What the answer keeps of an earlier one under the same grammar.
        suffix: Token ids after the answer; the answer fills the hole between prompt and suffix. None: no suffix.
        prediction: Token ids that the answer is expected to be; without effect with `grammar`, `suffix` or `visible`.
        visible: Restrict the first token to ids that show text: no end of text, control token or space. Cannot be
            combined with `thinking`.
        images: Images of the prompt with their positions, for a model with a vision tower.
        cache_salt: Only requests with the same salt share the prefix cache.
        frames: Publish a snapshot of every denoising pass, instead of one per dispatch.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    thinking: int = 0
    rule: str | None = None
    p: float | None = None
    rule_params: Mapping[str, float] = field(default_factory=dict)
    steps: int = 0
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None
    grammar: Grammar | None = None
    kept: Kept = Kept()
    suffix: tuple[int, ...] | None = None
    prediction: tuple[int, ...] = ()
    visible: bool = False
    images: tuple[Image, ...] = ()
    cache_salt: str = ""
    frames: bool = False

    @property
    def max_output(self) -> int:
        """Maximum tokens of the output: thinking, the token that closes it, and the answer."""
        return self.max_tokens + (self.thinking + 1 if self.thinking else 0)

    @property
    def max_length(self) -> int:
        """Maximum tokens of prompt and output."""
        return len(self.prompt) + self.max_output


class Snapshot(NamedTuple):
    """The output of a request (thinking and answer) after a denoising pass.

    Attributes:
        tokens: int32 [n], token ids of the output.
        accepted: bool [n], whether the token is accepted; the others are the current predictions.
        confidence: float32 [n], probability of the most probable token at the position; 1 for committed tokens.
        forced: bool [n], whether the grammar allowed this token only.
        final: Number of leading tokens that will not change any more.
        start: Index of the first token of the active block.
        forwards: Denoising passes spent on the output so far.
        cached: Number of prompt tokens found in the prefix cache.
        finish: None while the request is decoding; then "stop" (end of text or of the grammar), "length", "cancelled"
            or "error". All tokens of a finished request are final.
        message: The error message, with finish "error".
        logprobs: Log-probabilities of all tokens, in the last snapshot of a request that asks for them.
        predicted: Number of tokens that come from the prediction of the request.
    """

    tokens: np.ndarray
    accepted: np.ndarray
    confidence: np.ndarray
    forced: np.ndarray
    final: int
    start: int
    forwards: int
    cached: int
    finish: str | None = None
    message: str = ""
    logprobs: LogProbs | None = None
    predicted: int = 0

    def truncated(self, n: int) -> Snapshot:
        """Returns a snapshot of the first `n` tokens, all of them final."""
        return self._replace(
            tokens=self.tokens[:n],
            accepted=np.ones(n, bool),
            confidence=self.confidence[:n],
            forced=self.forced[:n],
            final=n,
            start=n,
            logprobs=_map_logprobs(lambda x: x[:n], self.logprobs),
        )

    def followed_by(self, later: Snapshot) -> Snapshot:
        """Appends the snapshot of a request that continues this one, so that both read as one answer.

        Returns:
            A snapshot with the tokens of both. `cached` is taken from this one, because its prompt is the prompt that
            the client sent.
        """
        n = len(self.tokens)
        concatenated = lambda *pair: np.concatenate(pair)
        return later._replace(
            **{name: concatenated(getattr(self, name), getattr(later, name)) for name in self._fields[:4]},
            final=n + later.final,
            start=n + later.start,
            cached=self.cached,
            forwards=self.forwards + later.forwards,
            predicted=self.predicted + later.predicted,
            logprobs=_map_logprobs(concatenated, self.logprobs, later.logprobs),
        )

    def with_token(self, token: int) -> Snapshot:
        """Appends one final token that was chosen by the server, not by the model."""
        one = np.ones(1, bool)
        logprobs = _map_logprobs(lambda x: np.zeros((1, *x.shape[1:]), x.dtype), self.logprobs)
        if logprobs is not None:
            logprobs.top_ids[:] = token
        ids, sure = np.array([token], np.int32), one.astype(np.float32)
        return self.followed_by(Snapshot(ids, one, sure, one, 1, 1, 0, 0, self.finish, logprobs=logprobs))


def _map_logprobs(f: Callable[..., np.ndarray], *trees: LogProbs | None) -> LogProbs | None:
    """Applies a function to the corresponding arrays of several `LogProbs`; None if one of them is None."""
    if any(tree is None for tree in trees):
        return None
    fields = dataclasses.fields(trees[0])  # type: ignore[arg-type]
    return type(trees[0])(*(f(*(getattr(tree, field.name) for tree in trees)) for field in fields))  # type: ignore


EMPTY_SNAPSHOT = Snapshot(
    np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32), np.zeros(0, bool), 0, 0, 0, 0
)


class EngineStats(NamedTuple):
    """Gauges of the current state (the first seven fields) and counters since the start.

    The Prometheus metrics have the same names, with the prefix `mercury_`.

    Attributes:
        waiting: Requests without a slot.
        running: Requests in slots.
        slots: Maximum number of requests in slots.
        capacity: Positions per slot in the current bucket.
        kv_bytes: Size of the slots' KV cache in bytes.
        kv_used: Bytes of the KV cache that are reserved for running requests.
        prefix_bytes: Bytes of the prefix cache in use.
        submitted, finished, cancelled, rejected, failed: Requests by outcome.
        forwards: Denoising passes, summed over requests.
        tokens: Tokens of finished answers.
        prompt_tokens: Tokens of prompts.
        cached_tokens: Tokens of prompts found in the prefix cache.
        device_passes: Passes of the batched program; one pass serves all slots.
        dispatches: Calls of that program, of one or several passes each.
    """

    waiting: int
    running: int
    slots: int
    capacity: int
    kv_bytes: int
    kv_used: int
    prefix_bytes: int
    submitted: int
    finished: int
    cancelled: int
    rejected: int
    failed: int
    forwards: int
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    device_passes: int
    dispatches: int


class RequestHandle:
    """A submitted request: read snapshots of its answer, or cancel it. Any thread or event loop may use the handle.

    `async for` yields snapshots as they arrive. A slow reader misses intermediate snapshots (with `request.frames` only
    if more than BACKLOG are unread), but never the last one, whose `finish` is set.

    Attributes:
        request: The request.
        arrival_time: Time of submission, in seconds of `time.monotonic`.
        cancelled: Whether `cancel` was called.
        latest: The latest snapshot; None before the first.
    """

    def __init__(self, request: EngineRequest, on_cancel: Callable[[], None]):
        self.request = request
        self.arrival_time = time.monotonic()
        self.cancelled = False
        self._on_cancel = on_cancel
        self._changed = threading.Condition()
        self.latest: Snapshot | None = None
        self._backlog: deque[Snapshot] = deque(maxlen=BACKLOG)
        self._listeners: list[Callable[[], None]] = []

    @property
    def finished(self) -> bool:
        """Whether the last snapshot has been published."""
        return self.latest is not None and self.latest.finish is not None

    def cancel(self) -> None:
        """Cancels the request; its slot is freed after the current step. Has no effect on a finished request."""
        if not self.finished and not self.cancelled:
            self.cancelled = True
            self._on_cancel()

    def wait(self, timeout: float | None = None) -> Snapshot:
        """Waits for the last snapshot."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.finished, timeout):
                raise TimeoutError(f"the request did not finish within {timeout} s")
            assert self.latest is not None
            return self.latest

    def publish(self, snapshot: Snapshot) -> None:
        """Makes a snapshot available to all readers. Called by the engine; ignored after the last snapshot."""
        with self._changed:
            if self.finished:
                return
            self.latest = snapshot
            if self.request.frames:
                self._backlog.append(snapshot)
            self._changed.notify_all()
            listeners = list(self._listeners)
        for notify in listeners:  # outside of the lock, since a listener runs code of its event loop
            notify()

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed, so there is no reader
                loop.call_soon_threadsafe(changed.set)

        # The engine publishes in its own thread: `notify` wakes this coroutine through its event loop, and the lock
        # protects `latest` and the backlog while they are read.
        with self._changed:
            self._listeners.append(notify)
        try:
            seen: Snapshot | None = None
            while True:
                with self._changed:
                    if self.request.frames:
                        unread = list(self._backlog)
                        self._backlog.clear()
                    else:
                        latest = self.latest
                        unread = [] if latest is None or latest is seen else [latest]
                for snapshot in unread:
                    yield snapshot
                    seen = snapshot
                    if snapshot.finish is not None:
                        return
                await changed.wait()
                changed.clear()
        finally:
            with self._changed:
                self._listeners.remove(notify)
