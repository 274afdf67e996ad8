"""stream(): the answer after every few denoising passes, while the loop stays on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from mercury_jax.config import Plan, refuse
from mercury_jax.decode import ask, launch, silent
from mercury_jax.decode.arguments import check_lm, checked_plan
from mercury_jax.decode.output import Session, decoded
from mercury_jax.decode.prompts import Prompt, normalise
from mercury_jax.decode.state import Frame
from mercury_jax.types import LM


@dataclass(frozen=True)
class Moment:
    """The answer as it stands after a pass. Arrays have one entry a token of the answer so far."""

    text: str  # settled and tentative tokens, up to an end of text
    tokens: np.ndarray
    settled: np.ndarray  # bool: the chain holds this token; the others may still change
    confidence: np.ndarray  # probability of the model's best token; 1 in finished blocks
    start: int  # first token of the active block
    step: int  # passes so far
    forwards: int  # the same: denoiser passes of this row
    done: bool
    thinking: str | None = None  # of a conversation


def stream(
    lm: LM,
    prompt: Any,
    *,
    max_tokens: int = 64,
    seed: int = 0,
    sampler: Any = None,
    plan: Plan | None = None,
    temperature: float | None = None,
    effort: Any = None,
    logit_bias: Any = None,
    state: Session | None = None,
    every: int = 1,
) -> Iterator[Moment]:
    """Yield a Moment after every `every` denoising passes; the last one has `done` set.

    Takes one prompt (a text, a conversation, or ids); the other arguments are those of `sample`,
    and the last Moment's text is what `sample` returns. Bad arguments raise at the call.
    """
    check_lm(lm)
    if prompt is None:
        raise refuse("prompt", prompt, "a prompt; sample(lm, None, state=) finishes what was stopped")
    _, single = normalise(lm, prompt)
    if not single:
        raise refuse("prompt", f"{len(prompt)} prompts", "one prompt; sample() takes several")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise refuse("every", every, "1 or more passes")
    asked = ask.checked(ask.Ask(
        prompt=prompt, max_tokens=max_tokens, seed=seed, sampler=sampler, plan=checked_plan(plan),
        temperature=temperature, effort=effort, logit_bias=logit_bias, state=state,
    ))  # fmt: skip
    job, prompts = ask.prepare(lm, asked)
    return _moments(lm, asked, job, prompts[0], every)


def _moments(lm: LM, asked: ask.Ask, job: launch.Job, prompt: Prompt, every: int) -> Iterator[Moment]:
    """The moments of a job and, where a conversation ended in silence, of the one that answers behind it."""
    answered, moment = True, None
    for moment in _of_job(lm, job, prompt.chat, every, (), 0):
        answered = not moment.done or asked.effort is None or not prompt.chat or bool(moment.text.strip())
        yield moment if answered else dataclasses.replace(moment, done=False)
    if moment is not None and not answered:
        said = silent.read(lm.tokenizer, prompt.ids, moment.tokens)
        yield from _of_job(
            lm, ask.answering(lm, asked, [prompt], [said], [0]), True, every, said, moment.step
        )


def _of_job(
    lm: LM, job: launch.Job, chat: bool, every: int, said: tuple[int, ...], steps: int
) -> Iterator[Moment]:
    """The moments of one job. said, steps: what an earlier one left in front of its answer, and took."""
    marks = lm.tokenizer.thinking
    close = lm.tokenizer.pad if marks is None else marks.close
    board = _Board(int(job.state.prompt[0]), job.state.text.shape[1], close)
    job, frames, used = launch.advance(lm, job, every)
    while True:
        # The next passes are under way before these are read, so the device does not wait for us.
        job, ahead, used_ahead = launch.advance(lm, job, every)
        seen = board.look(jax.device_get(frames), int(jax.device_get(used)))
        if board.done:
            launch.refuse_broken(job)
        if seen:
            yield _moment(lm, board, chat, said, steps)
        if board.done:
            return
        frames, used = ahead, used_ahead


class _Board:
    """The answer's tokens by position, put together from frames."""

    def __init__(self, prompt: int, most: int, close: int):
        self.close = close  # the id that ends the thinking
        self.prompt, self.step, self.start, self.end, self.done = prompt, 0, 0, 0, False
        self.tokens = np.zeros(most, np.int32)
        self.settled = np.zeros(most, bool)
        self.confidence = np.zeros(most, np.float32)

    def look(self, frames: Frame, used: int) -> bool:
        """Take in `used` frames of row 0; whether any of them was a denoising pass."""
        passes = [i for i in range(used) if frames.n[i, 0] > 0]
        for i in passes:
            self._pass(jax.tree.map(lambda x, i=i: x[i, 0], frames))
        self.done = self.done or (used > 0 and bool(frames.done[used - 1, 0]))
        return bool(passes)

    def _pass(self, frame: Frame) -> None:
        at = int(frame.start) - self.prompt + np.arange(int(frame.n))
        inside = (at >= 0) & (at < len(self.tokens))
        at, here = at[inside], np.flatnonzero(inside)
        self.start = int(at[0]) if len(at) else self.start
        # Thinking that used up its room is closed between two frames.
        self.tokens[self.end : self.start] = self.close
        self.settled[: self.start], self.confidence[: self.start] = True, 1.0
        self.tokens[at] = frame.answer[here]
        self.settled[at], self.confidence[at] = frame.settled[here], frame.confidence[here]
        # Not the furthest end so far: a draft that failed its check, or a deletion, takes tokens back.
        self.end = int(at[-1]) + 1 if len(at) else self.end
        self.step += 1


def _moment(lm: LM, board: _Board, chat: bool, said: tuple[int, ...], steps: int) -> Moment:
    tokens = board.tokens[: board.end]
    ends = np.flatnonzero(
        np.isin(tokens, (lm.model.config.eos, *lm.model.config.ends))
        & (board.settled[: board.end] | board.done)
    )
    length = int(ends[0]) if len(ends) else len(tokens)
    join = lambda first, new: np.concatenate([np.full(len(said), first, new.dtype), new[:length]])
    tokens = np.concatenate([np.array(said, np.int32), tokens[:length]])
    thinking, text = decoded(lm, tokens, chat)
    return Moment(
        text=text,
        tokens=tokens,
        settled=join(True, board.settled),
        confidence=join(1.0, board.confidence),
        start=len(said) + min(board.start, length),
        step=steps + board.step,
        forwards=steps + board.step,
        done=board.done,
        thinking=thinking,
    )
