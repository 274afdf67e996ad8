"""stream(): the answers after every few denoising passes, while the decoding loop stays on the device.

`session.advance` returns one `Frame` per pass; an `AnswerBuffer` per row collects the answer from the frames.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mercury_jax import decode
from mercury_jax.config import Plan, refuse
from mercury_jax.decode import constrained
from mercury_jax.decode.answer_text import (
    closed_thinking,
    cut_at_stop,
    decode_answer,
    end_stopped_rows,
    watched_rows,
)
from mercury_jax.decode.constrained import ConstrainedRow, Grammars
from mercury_jax.decode.grammar.spec import Spec
from mercury_jax.decode.inputs import (
    MAX_TOKENS,
    EffortLike,
    Prompts,
    Seeds,
    WholeNumbers,
    check_lm,
    check_whole,
)
from mercury_jax.decode.request import Request, continue_request, encode_request, start
from mercury_jax.decode.sampler import Param, SamplerLike
from mercury_jax.decode.session import Session, advance, check_nan
from mercury_jax.decode.state import Frame
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.types import LM, shortened


@dataclass(frozen=True)
class StreamOutput:
    """One answer after a pass. Arrays have one entry per token of the answer so far.

    Attributes:
        text: The answer up to an end of text, including tokens that are not accepted yet.
        tokens: int32 [t], ids of `text`.
        accepted: bool [t], whether the canvas holds this token; the others are the current guess.
        confidence: float32 [t], probability of the argmax; 1 in finished blocks.
        start: Index of the first token of the active block.
        step: Denoising and verifying passes of this row so far.
        forwards: The same number, under its name in `Output` (NFE).
        done: Whether the row has finished.
        thinking: The thinking of a conversation; None: without thinking.
        row: Index of the answer: i * n + k for answer k to prompt i.
        tokenizer: The model's tokenizer.
    """

    text: str
    tokens: np.ndarray
    accepted: np.ndarray
    confidence: np.ndarray
    start: int
    step: int
    forwards: int
    done: bool
    thinking: str | None = None
    row: int = 0
    tokenizer: AnyTokenizer | None = field(repr=False, compare=False, default=None)

    def __repr__(self) -> str:
        tokens = f"{int(self.accepted.sum())} of {len(self.tokens)} tokens accepted"
        text = f"row={self.row}, text={shortened(self.text)}"
        return f"StreamOutput({text}, {tokens}, step={self.step}, done={self.done})"

    def _repr_html_(self) -> str:
        return decode.pictures().stream(self)


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
    guidance: Param | Sequence[float] | None = None,
    negative: Prompts | None = None,
    state: Session | None = None,
    every: int = 1,
    mesh: Mesh | None = None,
    schema: Mapping[str, Any] | bool | Spec | Sequence[Mapping[str, Any] | bool | Spec | None] | None = None,
    bad_words: str | Sequence[str] | Sequence[Sequence[str] | None] | None = None,
) -> Iterator[StreamOutput]:
    """Decodes answers, and yields each after every few denoising passes.

    With several answers, each group of passes yields one output per unfinished answer; `StreamOutput.row` is the index
    of the answer. All arguments except `every` are those of `mj.sample`, and may be lists where they may be there.
    `sample` alone has `logprobs`, `keep`, `passes`, `history` and `draft`.

    Args:
        lm: The model.
        prompt: A text, a conversation, ids, or a list of these.
        n: Answers per prompt.
        max_tokens: Maximum number of tokens of an answer, not counting its thinking.
        seed: Seed of the first answer.
        sampler: A rule or a `Sampler`. None: the default of the model.
        plan: Block length, denoising steps, and reuse of cached keys and values.
        temperature: Sampling temperature of tokens. None: the default of the rule.
        effort: "instant", "low", "medium", "high" or an `Effort`.
        stop: Stop texts. With them an output is also yielded whenever a block is committed.
        logit_bias: {token id: bias}.
        guidance: Weight of classifier-free guidance.
        negative: The prompt of its unconditional branch.
        state: `Output.state` of an earlier call, to continue from its KV cache.
        every: Number of passes between two outputs of an answer.
        mesh: Mesh over whose `data` axis the rows are sharded.
        schema: Constraint on every answer. A token that the grammar has not committed is not `accepted`. A schema of
            which a grammar enforces a part only, as with `uniqueItems`, is refused.
        bad_words: Texts that no answer holds.

    Returns:
        An iterator over the outputs. The last output of each answer has `done` set, and the text that `sample` returns.

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
    request = Request(
        prompt=prompt, n=n, max_tokens=max_tokens, seed=seed, sampler=sampler, temperature=temperature,
        plan=Plan() if plan is None else plan,
        effort=effort, stop=stop, logit_bias=logit_bias, guidance=guidance, negative=negative, state=state, mesh=mesh,
        schema=schema, bad_words=bad_words, reads_images=True,
    ).checked()  # fmt: skip
    request = encode_request(lm, request)
    for row in request.grammars or ():
        if row is not None and row.walker.grammar.fault is not None:
            allowed = "one that a grammar enforces as a whole, since an answer that is shown stays. mj.sample checks it"
            raise refuse("schema", row.walker.grammar.name, allowed)
    return _outputs(lm, request, start(lm, request), every)


def _outputs(lm: LM, request: Request, session: Session, every: int) -> Iterator[StreamOutput]:
    """Yields the outputs of a session, and those of the continuation of conversations without any answer text."""
    prompts, count, grammars = request.prompts, len(request.prompts), request.grammars
    replies: list[tuple[int, ...]] = [()] * count
    passes, unanswered = [0] * count, []
    rows, nothing = range(count), [()] * count
    for out, stopped in _session_outputs(lm, session, rows, every, nothing, [0] * count, grammars):
        i = out.row
        if out.done:
            replies[i], passes[i] = tuple(out.tokens.tolist()), out.step
        empty = out.done and request.effort is not None and prompts[i].chat and not out.text.strip()
        empty &= not stopped and grammars is None  # an answer that begins with a stop text is complete
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
    grammars: Grammars | None = None,
) -> Iterator[tuple[StreamOutput, bool]]:
    """Yields the outputs of some rows of a session."""
    marks = lm.tokenizer.thinking
    close = lm.tokenizer.pad if marks is None else marks.close
    prompt, slots = np.asarray(session.state.prompt), session.state.tokens.shape[1]
    buffers = {i: AnswerBuffer(int(prompt[i]), slots, close, i) for i in rows}
    for now, host, count in _passes(lm, session, every, grammars):
        denoised = {i: buffer.update(host, count) for i, buffer in buffers.items()}
        for i, row in enumerate(grammars or ()):
            if i in buffers and row is not None and row.begun:
                buffers[i].commit(row)
        for i in now.stopped.keys() & buffers.keys():
            buffers[i].finish(int(np.asarray(now.state.limits.end)[i]))
        if any(buffer.done for buffer in buffers.values()):
            check_nan(now)
        for i, buffer in buffers.items():
            if denoised[i] or buffer.done:
                yield _output(lm, buffer, now, before[i], steps[i]), i in now.stopped
        buffers = {i: buffer for i, buffer in buffers.items() if not buffer.done}
        if not buffers:
            return


def _passes(
    lm: LM, session: Session, every: int, grammars: Grammars | None
) -> Iterator[tuple[Session, Any, int]]:
    """Advances a session `every` passes at a time; the caller stops the iteration.

    Yields:
        The session, the frames [every, B, ...], and how many of them are from passes that were made.
    """
    if grammars is not None:
        seen: list[Frame] = []
        for now, frame in constrained.passes(lm, session, grammars):
            seen += [] if frame is None else [frame]
            if frame is None or len(seen) == every:
                yield now, jax.tree.map(lambda *x: np.stack(x), *seen) if seen else None, len(seen)
                seen = []
        return
    watch, checked = watched_rows(session), np.zeros(session.state.done.shape[0], int)
    # With stop texts the host must see the text before it dispatches the next passes.
    if watch is not None:
        while True:
            session, frames, made = advance(lm, session, every, watch)
            session, checked = end_stopped_rows(lm, session, checked)
            yield session, jax.device_get(frames), int(np.max(made))
    session, frames, made = advance(lm, session, every)
    while True:
        # The next passes are dispatched before these frames are read, so that the device does not wait for the host.
        session, next_frames, next_made = advance(lm, session, every)
        yield session, jax.device_get(frames), int(np.max(made))
        frames, made = next_frames, next_made


class AnswerBuffer:
    """The answer of one row by position, collected from frames.

    Attributes:
        row: Index of the row in the batch.
        close: Id that ends the thinking.
        prompt: Absolute position where the answer begins; all other positions count from it.
        step: Denoising and verifying passes seen so far.
        start: Start of the active block.
        end: End of the tokens known so far.
        done: Whether the answer is finished.
        tokens: Ids [S].
        accepted: Whether the canvas holds the token [S].
        confidence: Probability of the argmax [S].
    """

    def __init__(self, prompt: int, slots: int, close: int, row: int):
        self.row = row
        self.close = close
        self.prompt, self.step, self.start, self.end, self.done = prompt, 0, 0, 0, False
        self.tokens = np.zeros(slots, np.int32)
        self.accepted = np.zeros(slots, bool)
        self.confidence = np.zeros(slots, np.float32)

    def update(self, frames: Frame, made: int) -> bool:
        """Adds the first `made` frames."""
        denoising = [i for i in range(made) if frames.used[i, self.row] > 0]
        for i in denoising:
            frame: Frame = jax.tree.map(lambda x, i=i: x[i, self.row], frames)
            at = int(frame.start) - self.prompt + np.arange(int(frame.used))
            inside = (at >= 0) & (at < len(self.tokens))
            at, here = at[inside], np.flatnonzero(inside)
            self.start = int(at[0]) if len(at) else self.start
            # Tokens between the old end and the new window appear in no frame: they close a thinking section that has
            # used up its budget.
            self.tokens[self.end : self.start] = self.close
            self.accepted[: self.start], self.confidence[: self.start] = True, 1.0
            self.tokens[at], self.accepted[at] = frame.answer[here], frame.accepted[here]
            self.confidence[at] = frame.confidence[here]
            # The end may decrease: a rejected draft, or a deletion under variable length, removes tokens.
            self.end = int(at[-1]) + 1 if len(at) else self.end
            self.step += 1
        self.done = self.done or (made > 0 and bool(frames.done[made - 1, self.row]))
        return bool(denoising)

    def commit(self, row: ConstrainedRow) -> None:
        """Takes over the tokens that a grammar has committed; what the rule has accepted behind them is a guess."""
        end = row.frontier - self.prompt
        at = end - len(row.committed)
        self.tokens[self.end : at] = (
            self.close
        )  # as in `update`, where the grammar begins with tokens that it forces
        self.tokens[at:end], self.accepted[end:], self.accepted[:end] = row.committed, False, True
        self.end = end if row.ended else max(self.end, end)
        self.done |= row.ended

    def finish(self, end: int) -> None:
        """Marks the answer as finished at the token that completes a stop text."""
        self.end, self.done = min(self.end, end - self.prompt), True


def _output(
    lm: LM, buffer: AnswerBuffer, session: Session, before: tuple[int, ...], steps: int
) -> StreamOutput:
    """Makes the output of a row from its buffer, up to the first accepted end of text.

    An end of text that is only guessed does not end the output, since a later step may replace it.
    """
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
        tokenizer=lm.tokenizer,
    )
