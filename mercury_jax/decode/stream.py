"""stream(): the answer after every few denoising passes, while the loop stays on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from mercury_jax.config import Plan, refuse
from mercury_jax.decode.defaults import Effort
from mercury_jax.decode.inputs import MAX_TOKENS, Prompts, check_lm, check_whole, encode_prompts
from mercury_jax.decode.request import Request, continue_request, encode_request, start
from mercury_jax.decode.sample import decode_answer
from mercury_jax.decode.sampler import SamplerLike
from mercury_jax.decode.session import Session, advance, check_nan
from mercury_jax.decode.state import Frame
from mercury_jax.decode.thinking import closed_thinking
from mercury_jax.types import LM


@dataclass(frozen=True)
class StreamOutput:
    """The answer after a pass. Arrays have one entry per token of the answer so far."""

    text: str  # accepted and tentative tokens, up to an end of text
    tokens: np.ndarray
    accepted: np.ndarray  # bool: the chain holds this token; the others may still change
    confidence: np.ndarray  # probability of the model's most probable token; 1 in finished blocks
    start: int  # first token of the active block
    step: int  # passes so far
    forwards: int  # the same: forward passes of this row (NFE)
    done: bool
    thinking: str | None = None  # of a conversation


def stream(
    lm: LM,
    prompt: Prompts,
    *,
    max_tokens: int = 64,
    seed: int = 0,
    sampler: SamplerLike | None = None,
    plan: Plan | None = None,
    temperature: float | None = None,
    effort: str | Effort | None = None,
    logit_bias: Mapping[int, float] | None = None,
    state: Session | None = None,
    every: int = 1,
) -> Iterator[StreamOutput]:
    """Decodes an answer to one prompt, and yields it after every few denoising passes.

    Args:
        lm: The model.
        prompt: One prompt: a text, a conversation, or ids.
        max_tokens: As of `sample`, like all arguments but the last.
        seed: Draws the tokens.
        sampler: A rule or a `Sampler`.
        plan: Block, steps, and reuse of keys.
        temperature: Of drawn tokens.
        effort: "instant", "low", "medium", "high" or an `Effort`.
        logit_bias: {id: bias}.
        state: Continue from an earlier call's `Output.state`.
        every: Yield after this many passes.

    Returns:
        An iterator; the last output has `done` set, and its text is what `sample` returns.

    Raises:
        ValueError: At the call, naming the argument that does not fit.

    Example:
        >>> for out in mj.stream(lm, "def fibonacci(n):"):
        ...     print(out.text)
    """
    check_lm(lm)
    if prompt is None:
        raise refuse("prompt", prompt, "a prompt; sample(lm, None, state=) finishes what was stopped")
    _, single = encode_prompts(lm, prompt)
    if not single:
        raise refuse("prompt", f"{len(prompt)} prompts", "one prompt; sample() takes several")
    every = check_whole("every", every, 1, MAX_TOKENS, "1 or more passes")
    request = encode_request(lm, Request(
        prompt=prompt, max_tokens=max_tokens, seed=seed, sampler=sampler, plan=plan, temperature=temperature,
        effort=effort, logit_bias=logit_bias, state=state,
    ).checked())  # fmt: skip
    return _outputs(lm, request, start(lm, request), every)


def _outputs(lm: LM, request: Request, session: Session, every: int) -> Iterator[StreamOutput]:
    """Yields the outputs of a session and, where a conversation's answer shows no text, of its continuation."""
    prompt, answered, out = request.prompts[0], True, None
    for out in _session_outputs(lm, session, prompt.chat, every, (), 0):
        answered = not out.done or request.effort is None or not prompt.chat or bool(out.text.strip())
        yield out if answered else dataclasses.replace(out, done=False)
    if out is not None and not answered:
        reply = closed_thinking(lm.tokenizer, prompt.ids, out.tokens)
        session = start(lm, continue_request(lm, request, [reply], [0]))
        yield from _session_outputs(lm, session, True, every, reply, out.step)


def _session_outputs(
    lm: LM, session: Session, chat: bool, every: int, before: tuple[int, ...], steps: int
) -> Iterator[StreamOutput]:
    """Yields the outputs of one session. before, steps: tokens and passes of an earlier one, in front of its answer."""
    marks = lm.tokenizer.thinking
    close = lm.tokenizer.pad if marks is None else marks.close
    buffer = AnswerBuffer(int(session.state.prompt[0]), session.state.tokens.shape[1], close)
    session, frames, made = advance(lm, session, every)
    while True:
        # The next passes are dispatched before these are read, so that the device does not wait for the host.
        session, next_frames, next_made = advance(lm, session, every)
        denoised = buffer.update(jax.device_get(frames), int(jax.device_get(made)))
        if buffer.done:
            check_nan(session)
        if denoised:
            yield _output(lm, buffer, chat, before, steps)
        if buffer.done:
            return
        frames, made = next_frames, next_made


class AnswerBuffer:
    """The tokens of one row's answer by position, put together from frames."""

    def __init__(self, prompt: int, slots: int, close: int):
        self.close = close  # the id that ends the thinking
        self.prompt, self.step, self.start, self.end, self.done = prompt, 0, 0, 0, False
        self.tokens = np.zeros(slots, np.int32)
        self.accepted = np.zeros(slots, bool)
        self.confidence = np.zeros(slots, np.float32)

    def update(self, frames: Frame, made: int) -> bool:
        """Adds the first `made` frames of row 0; returns whether any of them was a denoising pass.

        Args:
            frames: Of several passes [passes, B, ...].
            made: How many of them were made.

        Returns:
            Whether any of them denoised the row.
        """
        denoising = [i for i in range(made) if frames.used[i, 0] > 0]
        for i in denoising:
            frame: Frame = jax.tree.map(lambda x, i=i: x[i, 0], frames)
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
        self.done = self.done or (made > 0 and bool(frames.done[made - 1, 0]))
        return bool(denoising)


def _output(lm: LM, buffer: AnswerBuffer, chat: bool, before: tuple[int, ...], steps: int) -> StreamOutput:
    """The answer in a buffer, up to an end of text that is accepted."""
    tokens, accepted = buffer.tokens[: buffer.end], buffer.accepted[: buffer.end]
    is_end = np.isin(tokens, (lm.model.config.eos, *lm.model.config.ends))
    ends = np.flatnonzero(is_end & (accepted | buffer.done))
    length = int(ends[0]) if len(ends) else len(tokens)
    join = lambda first, new: np.concatenate([np.full(len(before), first, new.dtype), new[:length]])
    tokens = np.concatenate([np.array(before, np.int32), tokens[:length]])
    thinking, text = decode_answer(lm, tokens, chat)
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
    )
