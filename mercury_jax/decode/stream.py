"""stream(): the answer after every few denoising passes, while the loop stays on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from mercury_jax.config import Plan, refuse
from mercury_jax.decode.defaults import EffortLike
from mercury_jax.decode.inputs import MAX_TOKENS, Prompts, Seeds, WholeNumbers, check_lm, check_whole
from mercury_jax.decode.request import Request, continue_request, encode_request, start
from mercury_jax.decode.sampler import Param, SamplerLike
from mercury_jax.decode.session import Session, advance, check_nan
from mercury_jax.decode.state import Frame
from mercury_jax.decode.stop_texts import cut_at_stop, end_stopped_rows, watched_rows
from mercury_jax.decode.thinking import closed_thinking, decode_answer
from mercury_jax.types import LM


@dataclass(frozen=True)
class StreamOutput:
    """One answer after a pass. Arrays have one entry per token of the answer so far."""

    text: str  # accepted and tentative tokens, up to an end of text
    tokens: np.ndarray
    accepted: np.ndarray  # bool: the chain holds this token; the others may still change
    confidence: np.ndarray  # probability of the model's most probable token; 1 in finished blocks
    start: int  # first token of the active block
    step: int  # passes so far
    forwards: int  # the same: forward passes of this row (NFE)
    done: bool
    thinking: str | None = None  # of a conversation
    row: int = 0  # which answer: k-th of prompt i is i n + k


def stream(
    lm: LM,
    prompt: Prompts,
    *,
    n: int = 1,
    max_tokens: WholeNumbers = 64,
    seed: Seeds = 0,
    sampler: SamplerLike | None = None,
    plan: Plan | None = None,
    temperature: Param | Sequence[float] | None = None,
    effort: EffortLike | Sequence[EffortLike] | None = None,
    stop: str | Sequence[str] | Sequence[Sequence[str] | None] | None = None,
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None,
    state: Session | None = None,
    every: int = 1,
) -> Iterator[StreamOutput]:
    """Decodes answers, and yields each after every few denoising passes.

    Of several prompts or answers the outputs of a pass come one after the other, those of a finished answer no more:
    `StreamOutput.row` says which answer an output shows.

    Args:
        lm: The model.
        prompt: A text, a conversation, ids, or a list of these.
        n: Answers to each prompt, as of `sample`, like all arguments but the last; what may be a list there may be one
            here.
        max_tokens: Most tokens of an answer.
        seed: Draws the tokens.
        sampler: A rule or a `Sampler`.
        plan: Block, steps, and reuse of keys.
        temperature: Of drawn tokens.
        effort: "instant", "low", "medium", "high" or an `Effort`.
        stop: Texts at which an answer ends. Outputs then also come whenever a block is finished.
        logit_bias: {id: bias}.
        state: Continue from an earlier call's `Output.state`.
        every: Yield after this many passes.

    Returns:
        An iterator; the last output of each answer has `done` set, and its text is what `sample` returns.

    Raises:
        ValueError: At the call, naming the argument that does not fit.

    Example:
        >>> for out in mj.stream(lm, "def fibonacci(n):"):
        ...     print(out.text)
        >>> for out in mj.stream(lm, ["def f", "class A"]):
        ...     print(out.row, out.text)
    """
    check_lm(lm)
    if prompt is None:
        raise refuse("prompt", prompt, "a prompt; sample(lm, None, state=) finishes what was stopped")
    every = check_whole("every", every, 1, MAX_TOKENS, "1 or more passes")
    request = encode_request(lm, Request(
        prompt=prompt, n=n, max_tokens=max_tokens, seed=seed, sampler=sampler, plan=plan, temperature=temperature,
        effort=effort, stop=stop, logit_bias=logit_bias, state=state,
    ).checked())  # fmt: skip
    return _outputs(lm, request, start(lm, request), every)


def _outputs(lm: LM, request: Request, session: Session, every: int) -> Iterator[StreamOutput]:
    """Yields the outputs of a session and, where conversations' answers show no text, of their continuation."""
    prompts, count = request.prompts, len(request.prompts)
    replies: list[tuple[int, ...]] = [()] * count
    passes, unanswered = [0] * count, []
    for out, stopped in _session_outputs(lm, session, range(count), every, [()] * count, [0] * count):
        i = out.row
        if out.done:
            replies[i], passes[i] = tuple(out.tokens.tolist()), out.step
        empty = out.done and request.effort is not None and prompts[i].chat and not out.text.strip()
        empty &= not stopped  # an answer that begins with a stop text is complete
        unanswered += [i] * empty
        yield dataclasses.replace(out, done=False) if empty else out
    if unanswered:
        for i in unanswered:
            replies[i] = closed_thinking(lm.tokenizer, prompts[i].ids, replies[i])
        session = start(lm, continue_request(lm, request, replies, unanswered))
        for out, _ in _session_outputs(lm, session, unanswered, every, replies, passes):
            yield out


def _session_outputs(
    lm: LM,
    session: Session,
    rows: Sequence[int],
    every: int,
    before: Sequence[tuple[int, ...]],
    steps: Sequence[int],
) -> Iterator[tuple[StreamOutput, bool]]:
    """Yields the outputs of some rows of a session, and whether a stop text has ended the answer.

    before, steps: tokens and passes of an earlier session, of each row, in front of its answer.
    """
    marks = lm.tokenizer.thinking
    close = lm.tokenizer.pad if marks is None else marks.close
    prompt, slots = np.asarray(session.state.prompt), session.state.tokens.shape[1]
    buffers = {i: AnswerBuffer(int(prompt[i]), slots, close, i) for i in rows}
    for now, host, count in _passes(lm, session, every):
        denoised = {i: buffer.update(host, count) for i, buffer in buffers.items()}
        for i in now.stopped.keys() & buffers.keys():
            buffers[i].finish(int(np.asarray(now.state.end)[i]))
        if any(buffer.done for buffer in buffers.values()):
            check_nan(now)
        for i, buffer in buffers.items():
            if denoised[i] or buffer.done:
                yield _output(lm, buffer, now, before[i], steps[i]), i in now.stopped
        buffers = {i: buffer for i, buffer in buffers.items() if not buffer.done}
        if not buffers:
            return


def _passes(lm: LM, session: Session, every: int) -> Iterator[tuple[Session, Frame, int]]:
    """Advances a session without end; yields it, the frames of its last passes [passes, B, ...], and their number."""
    watch, checked = watched_rows(session), np.zeros(session.state.done.shape[0], int)
    if watch is not None:
        while True:
            session, frames, made = advance(lm, session, every, watch)
            session, checked = end_stopped_rows(lm, session, checked)
            yield session, jax.device_get(frames), int(np.max(made))
    session, frames, made = advance(lm, session, every)
    while True:
        # The next passes are dispatched before these are read, so that the device does not wait for the host.
        session, next_frames, next_made = advance(lm, session, every)
        yield session, jax.device_get(frames), int(np.max(made))
        frames, made = next_frames, next_made


class AnswerBuffer:
    """The tokens of one row's answer by position, put together from frames."""

    def __init__(self, prompt: int, slots: int, close: int, row: int):
        self.row = row
        self.close = close  # the id that ends the thinking
        self.prompt, self.step, self.start, self.end, self.done = prompt, 0, 0, 0, False
        self.tokens = np.zeros(slots, np.int32)
        self.accepted = np.zeros(slots, bool)
        self.confidence = np.zeros(slots, np.float32)

    def update(self, frames: Frame, made: int) -> bool:
        """Adds the first `made` frames; returns whether any of them was a denoising pass of this row.

        Args:
            frames: Of several passes [passes, B, ...].
            made: How many of them were made.

        Returns:
            Whether any of them denoised the row.
        """
        denoising = [i for i in range(made) if frames.used[i, self.row] > 0]
        for i in denoising:
            frame: Frame = jax.tree.map(lambda x, i=i: x[i, self.row], frames)
            at = int(frame.start) - self.prompt + np.arange(int(frame.used))
            inside = (at >= 0) & (at < len(self.tokens))
            at, here = at[inside], np.flatnonzero(inside)
            self.start = int(at[0]) if len(at) else self.start
            # A thinking that has used up its budget is closed between two frames.
            self.tokens[self.end : self.start] = self.close
            self.accepted[: self.start], self.confidence[: self.start] = True, 1.0
            self.tokens[at], self.accepted[at] = frame.answer[here], frame.accepted[here]
            self.confidence[at] = frame.confidence[here]
            # Not the furthest end so far: a rejected draft, or a deletion, takes tokens back.
            self.end = int(at[-1]) + 1 if len(at) else self.end
            self.step += 1
        self.done = self.done or (made > 0 and bool(frames.done[made - 1, self.row]))
        return bool(denoising)

    def finish(self, end: int) -> None:
        """Ends the answer where a stop text has ended it.

        Args:
            end: Absolute position.
        """
        self.end, self.done = min(self.end, end - self.prompt), True


def _output(
    lm: LM, buffer: AnswerBuffer, session: Session, before: tuple[int, ...], steps: int
) -> StreamOutput:
    """The answer in a buffer, up to an end of text that is accepted."""
    tokens, accepted = buffer.tokens[: buffer.end], buffer.accepted[: buffer.end]
    is_end = np.isin(tokens, (lm.model.config.eos, *lm.model.config.ends))
    ends = np.flatnonzero(is_end & (accepted | buffer.done))
    length = int(ends[0]) if len(ends) else len(tokens)
    join = lambda first, new: np.concatenate([np.full(len(before), first, new.dtype), new[:length]])
    tokens = np.concatenate([np.array(before, np.int32), tokens[:length]])
    thinking, text = decode_answer(lm, tokens, session.prompts[buffer.row].chat)
    if session.stops:
        text = session.stopped.get(buffer.row, cut_at_stop(text, session.stops[buffer.row])[0])
    return StreamOutput(
        text=text,
        tokens=tokens,
        accepted=join(True, buffer.accepted),
        confidence=join(1.0, buffer.confidence),
        start=len(before) + min(buffer.start, length),
        step=steps + buffer.step,
        forwards=steps + buffer.step,
        done=buffer.done,
        thinking=thinking,
        row=buffer.row,
    )
