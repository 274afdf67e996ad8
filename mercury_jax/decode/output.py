"""What sample() returns, and how it is read off a finished state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from mercury_jax.decode.launch import Job, refuse_broken
from mercury_jax.decode.prompts import Prompt
from mercury_jax.decode.state import Frame, Nats
from mercury_jax.types import LM


@dataclass(frozen=True)
class Session:
    """Where a call stopped, as a value: pass it to `sample(..., state=)` to go on from there.

    A finished one continues with new text or messages without encoding the old again; one that was
    stopped by `passes=` goes on where it stood, with `prompt=None`. It can be used more than once.
    """

    job: Job = field(repr=False)
    prompts: list[Prompt] = field(repr=False)

    @property
    def done(self) -> bool:
        """Whether every row has finished its answer."""
        return bool(np.all(np.asarray(self.job.state.done)))

    @property
    def tokens(self) -> list[np.ndarray]:
        """Prompt and answer of each row as ids, as far as they are settled."""
        text, known, total = jax.device_get((self.job.state.text, self.job.state.known, self.job.state.total))
        ends = np.where(self.job.state.done, total, known)
        return [text[i, : ends[i]] for i in range(self.job.rows)]


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of one answer's tokens, in nats, by the model before any shaper.

    Each is of the pass that wrote the token, given what stood on the canvas then.
    """

    tokens: np.ndarray  # float [n]
    top_ids: np.ndarray  # int [n, k], most probable first
    top: np.ndarray  # float [n, k]


@dataclass(frozen=True)
class Output:
    """Answers, and what they cost. Lists have one entry a prompt."""

    texts: list[str]  # the answers; for conversations without their thinking
    tokens: list[np.ndarray] = field(repr=False)  # emitted ids, end of text left off
    forwards: np.ndarray  # int [B], denoiser passes and causal checks of each row
    finish: list[str]  # "stop": the model ended its answer; "length": max_tokens did; "paused"
    seconds: float  # of decoding, compilation included
    thinking: list[str | None] = field(repr=False)
    passes: int = 0  # of the device loop: the slowest row's, encoding included
    encoded: np.ndarray = field(repr=False, default_factory=lambda: np.zeros(0, int))  # tokens encoded, [B]
    history: list[Frame] = field(repr=False, default_factory=list)  # one Frame a pass, if asked for
    logprobs: list[LogProbs] | None = field(repr=False, default=None)  # if asked for
    state: Session | None = field(repr=False, default=None)  # if asked for

    @property
    def text(self) -> str:
        """The answer to the first prompt."""
        return self.texts[0]

    @property
    def lengths(self) -> list[int]:
        """Emitted tokens of each answer."""
        return [len(t) for t in self.tokens]

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens over denoiser passes, summed over the rows."""
        return float(sum(self.lengths) / max(int(self.forwards.sum()), 1))

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens of all rows over the seconds of the call."""
        return sum(self.lengths) / max(self.seconds, 1e-9)


def collect(
    lm: LM, job: Job, prompts: Sequence[Prompt], began: float, frames: list[Frame], before: np.ndarray
) -> Output:
    """The answers of a job. before [B]: tokens that had their keys already when the call began."""
    refuse_broken(job)
    s = job.state
    text, prompt, known, total, done, forwards, length = jax.device_get(
        (s.text, s.prompt, s.known, s.total, s.done, s.forwards, s.length)
    )
    end = np.where(done, total, np.maximum(known, prompt))
    tokens = [text[i, prompt[i] : end[i]] for i in range(job.rows)]
    seconds = time.perf_counter() - began
    stops = {lm.model.config.eos, *lm.model.config.ends}
    said = [decoded(lm, t, p.chat) for t, p in zip(tokens, prompts, strict=True)]
    return Output(
        texts=[answer for _, answer in said],
        tokens=tokens,
        forwards=forwards[: job.rows],
        finish=[
            _finish(bool(done[i]), not stops.isdisjoint(text[i, end[i] : end[i] + 1].tolist()))
            for i in range(job.rows)
        ],
        seconds=seconds,
        thinking=[thought for thought, _ in said],
        encoded=(length[: job.rows] - before[: job.rows]),
        history=frames,
        logprobs=_logprobs(s.nats, prompt, end, job.rows),
    )


def _finish(done: bool, ended: bool) -> str:
    """ended: the end of text stands just behind the answer."""
    if not done:
        return "paused"
    return "stop" if ended else "length"


def _logprobs(nats: Nats | tuple[()], start: np.ndarray, end: np.ndarray, rows: int) -> list[LogProbs] | None:
    if not isinstance(nats, Nats):
        return None
    host = jax.device_get(nats)
    cut = lambda x, i: x[i, start[i] : end[i]]
    return [LogProbs(cut(host.token, i), cut(host.ids, i), cut(host.top, i)) for i in range(rows)]


def decoded(lm: LM, ids: np.ndarray, chat: bool) -> tuple[str | None, str]:
    """(thinking or None, answer) of emitted ids; raw text has no thinking."""
    if chat:
        return lm.tokenizer.split_answer(ids.tolist())
    return None, lm.tokenizer.decode(ids.tolist())
