"""sample(): prompts in, answers out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mercury_jax.chat import split_answer
from mercury_jax.config import Plan
from mercury_jax.decode import launch, rules
from mercury_jax.decode.prompts import Prompt, check_room, check_seed, normalise
from mercury_jax.decode.state import Frame
from mercury_jax.types import LM

HISTORY = 16  # passes of one dispatch while frames are kept


@dataclass(frozen=True)
class Output:
    """Answers, and what they cost. Lists have one entry a prompt."""

    texts: list[str]  # the answers; for conversations without their thinking
    tokens: list[np.ndarray] = field(repr=False)  # emitted ids, end of text left off
    forwards: np.ndarray  # int [B], denoiser passes of each row
    finish: list[str]  # "stop": the model ended its answer; "length": max_tokens did
    seconds: float  # of decoding, compilation included
    thinking: list[str | None] = field(repr=False)
    history: list[Frame] = field(repr=False, default_factory=list)  # one Frame a pass, if asked for

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


def sample(
    lm: LM,
    prompt: Any,
    *,
    max_tokens: int = 64,
    seed: int = 0,
    sampler: Any = None,
    plan: Plan | None = None,
    temperature: float | None = None,
    history: bool = False,
    mesh: Mesh | None = None,
) -> Output:
    """Decode an answer to each prompt.

    prompt: a text, a conversation (list of {"role", "content"}), ids, or a list of these.
    max_tokens: most tokens to emit, each prompt. seed: row i draws from seed + i.
    sampler: a rule such as `rules.threshold(0.9)` (the default) or a `Sampler`.
    plan: block and steps. temperature: of the drawn tokens (None: the rule's own; 0: argmax).
    history: keep a Frame of every pass. mesh: spread the rows over its `data` axis.
    Raises ValueError, before any compute, naming the argument that does not fit.
    """
    prompts, _ = normalise(lm, prompt)
    most = check_room(lm, prompts, max_tokens)
    began = time.perf_counter()
    job = launch.prepare(
        lm, request(prompts, most, check_seed(seed)), sampler if sampler is not None else rules.threshold(),
        plan or Plan(), temperature=temperature, mesh=mesh,
    )  # fmt: skip
    frames: list[Frame] = []
    if history:
        job, frames = _keep_frames(lm, job)
    else:
        job, _, _ = launch.advance(lm, job, None)
    return collect(lm, job, prompts, most, began, frames)


def request(prompts: Sequence[Prompt], max_tokens: int, seed: int) -> launch.Request:
    """Prompts as left-aligned rows; row i is seeded with seed + i."""
    lengths = np.array([len(p.ids) for p in prompts])
    text = np.zeros((len(prompts), int(lengths.max()) + max_tokens), np.int32)
    for row, prompt in zip(text, prompts, strict=True):
        row[: len(prompt.ids)] = prompt.ids
    given = np.arange(text.shape[1]) < lengths[:, None]
    seeds = (seed + np.arange(len(prompts))) % 2**31
    return launch.Request(text, given, lengths, lengths + max_tokens, seeds)


def _keep_frames(lm: LM, job: launch.Job) -> tuple[launch.Job, list[Frame]]:
    kept: list[Frame] = []
    while not np.all(jax.device_get(job.state.done)):
        job, frames, used = launch.advance(lm, job, HISTORY)
        host = jax.device_get(frames)
        for i in range(int(np.max(jax.device_get(used)))):
            kept.append(jax.tree.map(lambda x, i=i, n=job.rows: x[i, :n], host))
    return job, kept


def collect(
    lm: LM,
    job: launch.Job,
    prompts: Sequence[Prompt],
    max_tokens: int,
    began: float,
    frames: list[Frame],
) -> Output:
    """The answers of a finished job."""
    state = job.state
    text, total, forwards = jax.device_get((state.text, state.total, state.forwards))
    tokens = [text[i, len(p.ids) : total[i]] for i, p in enumerate(prompts)]
    seconds = time.perf_counter() - began
    ended = ["stop" if len(t) < max_tokens else "length" for t in tokens]
    said = [decoded(lm, t, p.chat) for t, p in zip(tokens, prompts, strict=True)]
    return Output(
        texts=[answer for _, answer in said],
        tokens=tokens,
        forwards=forwards[: job.rows],
        finish=ended,
        seconds=seconds,
        thinking=[thought for thought, _ in said],
        history=frames,
    )


def decoded(lm: LM, ids: np.ndarray, chat: bool) -> tuple[str | None, str]:
    """(thinking or None, answer) of emitted ids; raw text has no thinking."""
    if chat:
        return split_answer(lm.tokenizer, ids.tolist())
    return None, lm.tokenizer.decode(ids.tolist())
