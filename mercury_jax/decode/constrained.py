"""Decoding under a grammar: the device proposes, the host commits what the grammar accepts, pass by pass.

A row without a grammar decodes as usual. A row with a grammar proposes tokens in the same way, but the device commits
none of them: after each pass a `ConstrainedRow` on the host reads the row's frame and decides which proposed tokens to
commit, and `write_committed` writes these into the state. Each pass commits at least one token; tokens that the grammar
forces need no pass. The server uses `ConstrainedRow` and `write_committed` for its slots, and `run_free`: while a row
writes free text, the device commits its tokens itself and needs the host only where the free text may end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt

from mercury_jax.decode.grammar.grammar import Grammar, Walker
from mercury_jax.decode.passes import run_limited
from mercury_jax.decode.session import Session, advance
from mercury_jax.decode.state import DecodeConfig, Frame, State
from mercury_jax.decode.token_stats import slice_at
from mercury_jax.types import LM, Params

ALL_IDS = 0xFFFFFFFF  # a word of a grammar mask in which every id is allowed
RETRIES = 16  # of an answer that satisfies its grammar, but not what the grammar leaves to a check
MOST_BANNED = 16  # tokens that attempts at the same value begin with
RETRY_TEMPERATURE = 0.7  # at least, so that another seed gives another answer


def retry_seed(seed: Any, attempt: int) -> Any:
    """Returns the seed of an attempt after the first, from 1 on."""
    return (seed + attempt * 0x3C6EF372) % (1 << 31)


class Kept(NamedTuple):
    """With what another attempt at an answer begins, and the tokens that may not follow it."""

    tokens: tuple[int, ...] = ()
    banned: frozenset[int] = frozenset()


def kept_of(
    grammar: Grammar, tokens: Sequence[int], forced: Sequence[bool], before: Kept, attempt: int
) -> Kept | None:
    """Checks a finished answer.

    Args:
        forced: Of each token, whether the grammar left no choice.
        before: With what this answer began.
        attempt: Number of the next attempt, from 1 on.

    Returns:
        None if the answer is valid. Otherwise what the next attempt keeps: all up to the first value that is at fault.
        Where that is a text or a number, it begins with another token than in earlier attempts. Where it is an object
        or a list, every second attempt begins anew.
    """
    found = grammar.sound(tokens)
    if found is None:
        return None
    count, single = found
    while count < len(tokens) and forced[count]:
        count += 1
    kept = tuple(tokens[:count])
    banned = (before.banned if before.tokens == kept else frozenset()) | {*tokens[count : count + 1]}
    if single and len(banned) <= MOST_BANNED:
        return Kept(kept, banned)
    return Kept() if single or not attempt % 2 else Kept(kept)


class CommittedTokens(NamedTuple):
    """The tokens that the host commits to constrained rows between two passes.

    A row with `used` 0 that is not `ended` does not change.
    """

    tokens: Int[Array, "B W"]
    start: Int[Array, "B"]  # absolute position of the first token: the end of those committed before
    used: Int[Array, "B"]  # number of tokens
    clear: Bool[Array, "B"]  # remask the editable positions after these tokens
    ended: Bool[Array, "B"]  # the answer ends after these tokens


def no_tokens(rows: int, width: int) -> CommittedTokens:
    """Makes a `CommittedTokens` on the host that changes no row; `ConstrainedRow.write` fills it in place."""
    zeros = lambda *shape: np.zeros(shape, np.int32)
    no = lambda: np.zeros(rows, bool)
    return CommittedTokens(zeros(rows, width), zeros(rows), zeros(rows), no(), no())  # type: ignore[arg-type]


def write_committed(
    config: DecodeConfig, state: State, committed: CommittedTokens, eos: Int[Array, "B"]
) -> State:
    """Writes the host's tokens into a state, and commits a block once it is full or the answer ends."""
    small = state._replace(cache=(), self_cond=(), memory=())  # type: ignore[arg-type]
    changes = jax.vmap(lambda *row: _write_row(config, *row))(small, committed, eos)
    return state._replace(**changes)


def _write_row(
    config: DecodeConfig, row: State, change: CommittedTokens, eos: Int[Array, ""]
) -> dict[str, Any]:
    at = row.cache_length + jnp.arange(config.width, dtype=jnp.int32)
    slots = jnp.arange(row.tokens.shape[0], dtype=jnp.int32)
    reach = change.start + change.used
    # The committed tokens are the positions start .. reach; they go into the row's tokens and into its open canvas.
    token_at = lambda where: change.tokens[jnp.clip(where - change.start, 0, config.width - 1)]
    inside = lambda where: (where >= change.start) & (where < reach)
    tokens = jnp.where(inside(slots), token_at(slots), row.tokens)
    canvas = jnp.where(inside(at), token_at(at), row.canvas)
    # under uniform noise the tokens on the canvas already serve as noise
    if config.corruption.mask is not None:
        behind = change.clear & (at >= reach) & ~row.frozen
        canvas = jnp.where(behind, config.corruption.mask, canvas)
    end = jnp.where(change.ended, reach, row.limits.end)
    block_end = jnp.minimum(jnp.minimum(end, row.cache_length + config.width), row.committed + config.block)
    # `full`: the row's block is finished. If no canvas is open, because the row is still encoding, there is no block to
    # fill, and the tokens extend the committed prefix at once.
    full = ((change.used > 0) & ((reach >= block_end) | (row.step < 0))) | change.ended
    committed = jnp.where(full, reach, row.committed)
    # A row that waits for the host, see `run_free`, continues.
    waits = row.done & (row.records.nan_step < 0) & ((change.used > 0) | change.clear | change.ended)
    return dict(
        tokens=jnp.where(change.ended & (slots == reach), eos, tokens),
        canvas=canvas,
        answer=jnp.where(inside(at) | (canvas != row.canvas), canvas, row.answer),
        frozen=row.frozen | inside(at),
        committed=committed,
        limits=row.limits._replace(end=end),
        step=jnp.where(full, -1, row.step),
        done=(row.done & ~waits) | (full & (committed >= end)),
    )


class FreeText(NamedTuple):
    """What the device may commit to constrained rows without the host, see `Walker.free`."""

    # bit mask of the tokens that continue the free text; all 0: the host judges every pass
    ids: UInt[Array, "B words"]
    until: Int[Array, "B"]  # absolute position up to which they may be committed


def no_free_text(rows: int, vocab: int) -> FreeText:
    """Makes a `FreeText` on the host in which the host judges every pass."""
    return FreeText(np.zeros((rows, -(-vocab // 32)), np.uint32), np.zeros(rows, np.int32))  # type: ignore[arg-type]


def run_free(
    config: DecodeConfig, params: Params, state: State, passes: int, limit: Int[Array, ""], free: FreeText
) -> tuple[State, Frame, Int[Array, ""], Bool[Array, "B"]]:
    """Runs as `passes.run_limited`, and commits the tokens of constrained rows that are in free text.

    A pass that the host must judge is the last one of its row: the row waits, and is done for the passes that follow
    until `write_committed` changes it. So does a row whose thinking has ended.

    Returns:
        The state, frames [passes, B, ...], the number of passes made, and the rows that wait for the host.
    """

    commit = functools.partial(_commit_free, config, free)
    state, frames, made = run_limited(config, params, state, passes, limit, after=commit)
    waits = (
        state.done
        & state.sampling.constrained
        & (state.committed < state.limits.end)
        & (state.records.nan_step < 0)
    )
    return state, frames, made, waits


def _commit_free(config: DecodeConfig, free: FreeText, before: State, state: State, frame: Frame) -> State:
    """Commits what one pass adds to free text; a row waits if the host must judge the pass, or begin the answer."""
    at = jnp.arange(frame.answer.shape[1], dtype=jnp.int32)  # [L]
    offset = frame.start - state.cache_length
    frozen = jax.vmap(lambda x, start: slice_at(x, start, len(at)))(state.frozen, offset)  # [B, L]
    # The first open token, and the accepted ones that follow it: the tokens front .. front + count of the window.
    front = jnp.min(jnp.where(frozen, len(at), at), axis=1)[:, None]  # [B, 1]
    accepted = (frame.accepted | (at == front)) & (at < frame.used[:, None])
    count = jnp.min(jnp.where((at < front) | accepted, len(at), at), axis=1)[:, None] - front
    bits = jnp.take_along_axis(free.ids, frame.answer >> 5, axis=1) >> (frame.answer & 31).astype(jnp.uint32)
    fits = jnp.all(((bits & 1) > 0) | (at < front) | (at >= front + count), axis=1)
    start, count = frame.start + front[:, 0], count[:, 0]
    fits &= (count > 0) & (start + count <= free.until)
    judged = state.sampling.constrained & (before.limits.answer_budget == 0) & (frame.used > 0) & ~state.done
    begins = (
        state.sampling.constrained & (before.limits.answer_budget > 0) & (state.limits.answer_budget == 0)
    )
    window = jnp.clip(front + jnp.arange(config.width, dtype=jnp.int32), 0, len(at) - 1)
    tokens, no = jnp.take_along_axis(frame.answer, window, axis=1), jnp.zeros_like(fits)
    change = CommittedTokens(tokens, start, jnp.where(judged & fits, count, 0), no, no)
    state = write_committed(config, state, change, state.sampling.eos)
    return state._replace(done=state.done | (judged & ~fits) | begins)


class ConstrainedRow:
    """The host's part of a grammar-constrained row: decides after each pass which proposed tokens to commit.

    Call `begin` when the answer begins; before that the row thinks, and is not constrained. Then, after each pass, call
    `propose` with the row's frame, `write` to fill a `CommittedTokens`, and `bits` for the mask of the next pass.

    Attributes:
        walker: The state of the grammar.
        first: Absolute position where the answer begins; None before it begins.
        committed: The tokens of the answer so far.
        forced: For each of these tokens, whether the grammar or the budget left no choice.
        ended: Whether the answer is complete.
    """

    def __init__(self, walker: Walker, kept: Kept = Kept()):
        self.walker, self._kept = walker, kept
        self.first: int | None = None
        self.committed: list[int] = []
        self.forced: list[bool] = []
        self.ended = False
        self._unwritten: deque[int] = deque()  # committed, and not yet on the device
        self._clear, self._end_written = False, False

    @property
    def begun(self) -> bool:
        """Whether the answer has begun."""
        return self.first is not None

    @property
    def frontier(self) -> int:
        """Absolute position of the first token that is not committed."""
        assert self.first is not None
        return self.first + len(self.committed)

    @property
    def pending(self) -> bool:
        """Whether `write` would change the row."""
        return bool(self._unwritten) or self._clear or (self.ended and not self._end_written)

    def begin(self, at: int, waits: bool = False) -> None:
        """Begins the answer at an absolute position, and commits the tokens that are kept or forced there."""
        self.first, self._clear = at, waits
        if self.walker.ended:  # the answer of an earlier run
            self.committed, self.forced = list(self.walker.written), [True] * len(self.walker.written)
            self._unwritten, self.ended = deque(self.committed), True
        while not self.ended and len(self.committed) < len(self._kept.tokens):
            before = len(self.committed)
            self._advance(self._kept.tokens[before : before + 1], [True])
        if not self._kept.tokens:
            self._advance((), ())

    def again(self, attempt: int) -> ConstrainedRow | None:
        """Checks the answer, which is complete; returns the row of the next attempt, or None if it is valid."""
        grammar = self.walker.grammar
        kept = kept_of(grammar, self.committed, self.forced, self._kept, attempt)
        return None if kept is None else ConstrainedRow(grammar.walk(self.walker.budget), kept)

    def repeated(self) -> ConstrainedRow:
        """Returns a row that has this row's answer, which is complete, from the start."""
        return ConstrainedRow(self.walker)

    def propose(
        self, start: int, answer: Sequence[int], accepted: Sequence[bool], on_device: bool = False
    ) -> None:
        """Commits the tokens of a proposal that the grammar accepts."""
        if not self.begun or self.ended or start > self.frontier:
            return
        # Tokens of the window before the frontier are already committed.
        skip = self.frontier - start
        tokens, taken = [int(i) for i in answer[skip:]], [bool(s) for s in accepted[skip:]]
        if on_device:
            new = tokens[: [*taken[1:], False].index(False) + 1]
            self.walker.follow(new)
            self.committed += new
            self.forced += [False] * len(new)
        else:
            self._advance(tokens, taken)

    def _advance(self, tokens: Sequence[int], accepted: Sequence[bool]) -> None:
        step = self.walker.advance(tokens, accepted)
        self.committed += step.commit
        self.forced += step.forced
        self._unwritten += step.commit
        self._clear |= step.clear
        self.ended = step.ended

    def write(self, change: CommittedTokens, row: int) -> None:
        """Writes newly committed tokens into one row of the host's arrays; at most W, the rest by the next call."""
        width = change.tokens.shape[1]
        start = self.frontier - len(self._unwritten)
        new = [self._unwritten.popleft() for _ in range(min(width, len(self._unwritten)))]
        arrays: Any = change
        arrays.tokens[row, : len(new)] = new
        arrays.start[row], arrays.used[row] = start, len(new)
        self._end_written = self.ended and not self._unwritten
        # An answer that is cut off by the budget fills its row: there is no position for an end of text.
        arrays.clear[row], arrays.ended[row] = self._clear, self._end_written and not self.walker.cut
        self._clear = bool(self._unwritten) and self._clear

    def bits(self) -> np.ndarray:
        """Returns the ids allowed at the frontier as a bit mask, uint32 [words], for `processors.allow_bits`."""
        words = self.walker.bits()
        if self._kept.banned and len(self.committed) == len(self._kept.tokens):
            others = words.copy()
            for id in self._kept.banned:
                others[id // 32] &= ~(np.uint32(1) << np.uint32(id % 32))
            words = others if others.any() else words
        return words


Grammars = Sequence[ConstrainedRow | None]


def run(lm: LM, session: Session, grammars: Grammars, history: bool) -> tuple[Session, list[Frame], int]:
    """Runs a session until all rows are done; see `passes`."""
    frames, made, last = list[Frame](), 0, session
    for last, frame in passes(lm, session, grammars):
        made += frame is not None
        if history and frame is not None:
            frames.append(_with_commits(frame, grammars, last.rows))
    return last, frames, made


def passes(lm: LM, session: Session, grammars: Grammars) -> Iterator[tuple[Session, Frame | None]]:
    """Runs a session until all rows are done, one pass at a time, with the host's decisions between the passes.

    Yields:
        The session after each pass, which the next one uses up, with the frame of the pass; at last the finished
        session without a frame.
    """
    constrained = np.zeros(session.state.tokens.shape[0], bool)
    constrained[: session.rows] = [row is not None for row in grammars]
    # The host commits at least one token per pass. A block therefore never needs more steps than it has tokens, and
    # with fewer its schedule could end before the host has committed all of them.
    steps = np.where(constrained, session.config.block, jax.device_get(session.state.sampling.steps))
    sampling = session.state.sampling._replace(constrained=constrained, steps=steps.astype(np.int32))
    session = dataclasses.replace(session, state=session.state._replace(sampling=sampling))
    state = session.state
    committed, budget = jax.device_get((state.committed, state.limits.answer_budget))
    _begin_answers(grammars, committed, budget)
    while True:
        session = _write_pending(session, grammars)
        session = _set_masks(session, grammars)
        if session.done:
            yield session, None
            return
        session, chunk, _ = advance(lm, session, 1)
        state = session.state
        chunk, committed, budget = jax.device_get((chunk, state.committed, state.limits.answer_budget))
        frame = jax.tree.map(lambda x: x[0], chunk)
        for i, row in enumerate(grammars):
            if row is not None and row.begun and frame.used[i]:
                used = int(frame.used[i])
                row.propose(int(frame.start[i]), frame.answer[i, :used], frame.accepted[i, :used])
        # Rows whose thinking ended in this pass begin their answer; what the grammar forces is written next.
        _begin_answers(grammars, committed, budget)
        yield session, frame


def _begin_answers(grammars: Grammars, committed: np.ndarray, answer_budget: np.ndarray) -> None:
    """Begins the answers of rows that do not think, or have just finished thinking."""
    for i, row in enumerate(grammars):
        if row is not None and not row.begun and answer_budget[i] == 0:
            row.begin(int(committed[i]))


def _write_pending(session: Session, grammars: Grammars) -> Session:
    """Writes the tokens that the grammars have accepted into the state of the session."""
    state = session.state
    while any(row is not None and row.begun and row.pending for row in grammars):
        change = no_tokens(state.tokens.shape[0], session.config.width)
        for i, row in enumerate(grammars):
            if row is not None and row.begun and row.pending:
                row.write(change, i)
        state = _write_program(session.config, state, CommittedTokens(*change))
    return dataclasses.replace(session, state=state)


def _set_masks(session: Session, grammars: Grammars) -> Session:
    """Sets the mask of each row to the ids that its grammar allows next.

    The mask is a traced parameter of the sampler, so that a new mask compiles nothing.
    """
    sampling = session.state.sampling
    sampler = sampling.sampler
    *others, mask = sampler.allow
    bits = np.array(mask.params["bits"])
    for i, row in enumerate(grammars):
        bits[i] = ALL_IDS
        if row is not None and row.begun and not row.ended:
            words = row.bits()
            bits[i] = 0  # the model may have more ids than the tokenizer; those are forbidden too
            bits[i, 0, : len(words)] = words
    mask = dataclasses.replace(mask, params=mask.params | {"bits": bits})
    sampling = sampling._replace(sampler=sampler._replace(allow=(*others, mask)))
    return dataclasses.replace(session, state=session.state._replace(sampling=sampling))


def _with_commits(frame: Frame, grammars: Grammars, rows: int) -> Frame:
    """Makes the frame of a pass as the user sees it: with the tokens that the host committed, as accepted ones."""
    answer, accepted = frame.answer[:rows].copy(), frame.accepted[:rows].copy()
    for i, row in enumerate(grammars):
        if row is not None and row.first is not None:
            place = np.arange(answer.shape[1])
            at = place + frame.start[i] - row.first
            inside = (at >= 0) & (at < len(row.committed)) & (place < frame.used[i])
            answer[i, inside] = np.asarray(row.committed, np.int32)[at[inside]]
            accepted[i, inside] = True
    return jax.tree.map(lambda x: x[:rows], frame)._replace(answer=answer, accepted=accepted)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _write_program(config: DecodeConfig, state: State, change: CommittedTokens) -> State:
    return write_committed(config, state, change, state.sampling.eos)
