"""Decoding under a grammar: the device proposes, the host commits what the grammar accepts, pass by pass.

A row without a grammar decodes as always. A row with one proposes tokens as every other row does and commits nothing by
itself: after each pass a `ConstrainedRow` on the host looks at its frame and decides how much of the proposal stands,
and `write_committed` puts that into the state. What the grammar forces costs no pass; each pass commits at least one
token. The server uses the same two pieces for its slots.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from mercury_jax.config import refuse
from mercury_jax.decode import processors
from mercury_jax.decode.decode_config import DecodeConfig
from mercury_jax.decode.grammar import GrammarError, JSONSchema, Spec, Walker, compile
from mercury_jax.decode.inputs import check_max_tokens, encode_prompts
from mercury_jax.decode.request import Request
from mercury_jax.decode.sampler import check_sampler
from mercury_jax.decode.session import Session, advance
from mercury_jax.decode.state import Frame, State
from mercury_jax.types import LM

ALL_IDS = 0xFFFFFFFF  # a word of a grammar mask in which every id is allowed


class CommittedTokens(NamedTuple):
    """What the host commits to constrained rows between two passes. used = 0 and not ended: nothing."""

    tokens: Int[Array, "B W"]
    start: Int[Array, "B"]  # absolute position of the first of them: after what is committed already
    used: Int[Array, "B"]
    clear: Bool[Array, "B"]  # what stands after them becomes noise again
    ended: Bool[Array, "B"]  # the answer ends after them


def no_tokens(rows: int, width: int) -> CommittedTokens:
    """Makes a record on the host that changes no row; `ConstrainedRow.write` fills it in place.

    Args:
        rows: B.
        width: W, most tokens of a row.

    Returns:
        A record of numpy arrays.
    """
    zeros = lambda *shape: np.zeros(shape, np.int32)
    no = lambda: np.zeros(rows, bool)
    return CommittedTokens(zeros(rows, width), zeros(rows), zeros(rows), no(), no())  # type: ignore[arg-type]


def write_committed(
    config: DecodeConfig, state: State, committed: CommittedTokens, eos: Int[Array, "B"]
) -> State:
    """Writes committed tokens into a state; where they fill the block, or end the answer, the block is committed.

    Args:
        config: Static sizes.
        state: Of all rows.
        committed: Of each row.
        eos: Written after an answer that ends.

    Returns:
        The state, in which these tokens are frozen.
    """
    small = state._replace(cache=(), self_cond=(), memory=(), logprobs=())  # type: ignore[arg-type]
    changes = jax.vmap(lambda *row: _write_row(config, *row))(small, committed, eos)
    return state._replace(**changes)


def _write_row(
    config: DecodeConfig, row: State, change: CommittedTokens, eos: Int[Array, ""]
) -> dict[str, Array]:
    at = row.cache_length + jnp.arange(config.width, dtype=jnp.int32)
    slots = jnp.arange(row.tokens.shape[0], dtype=jnp.int32)
    reach = change.start + change.used
    # The committed tokens are the positions start .. reach; they go into the row's tokens and into its open canvas.
    token_at = lambda where: change.tokens[jnp.clip(where - change.start, 0, config.width - 1)]
    inside = lambda where: (where >= change.start) & (where < reach)
    tokens = jnp.where(inside(slots), token_at(slots), row.tokens)
    canvas = jnp.where(inside(at), token_at(at), row.canvas)
    if config.corruption.mask is not None:  # under uniform noise any token is as good as noise
        behind = change.clear & (at >= reach) & ~row.frozen
        canvas = jnp.where(behind, config.corruption.mask, canvas)
    end = jnp.where(change.ended, reach, row.end)
    block_end = jnp.minimum(jnp.minimum(end, row.cache_length + config.width), row.committed + config.block)
    # Where no canvas is open (the row still encodes), tokens are committed at once.
    full = ((change.used > 0) & ((reach >= block_end) | (row.step < 0))) | change.ended
    committed = jnp.where(full, reach, row.committed)
    return dict(
        tokens=jnp.where(change.ended & (slots == reach), eos, tokens),
        canvas=canvas,
        answer=jnp.where(inside(at) | (canvas != row.canvas), canvas, row.answer),
        frozen=row.frozen | inside(at),
        committed=committed,
        end=end,
        step=jnp.where(full, -1, row.step),
        done=row.done | (full & (committed >= end)),
    )


class ConstrainedRow:
    """The host's side of a row under a grammar: what is committed of the model's proposals, pass by pass.

    Call `begin` once the answer begins (before that the row thinks, and is not constrained); then after each pass
    `propose` with the row's frame, `write` into a `CommittedTokens`, and `bits` for the next pass.

    Attributes:
        first: Absolute position where the answer begins; None: not yet.
        committed: The tokens of the answer so far.
        forced: Of each, whether the grammar or the budget left no choice.
        ended: Whether the answer is complete.
    """

    def __init__(self, walker: Walker):
        self.walker = walker
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
        """Whether `write` has something to write."""
        return bool(self._unwritten) or self._clear or (self.ended and not self._end_written)

    def begin(self, at: int) -> None:
        """Begins the answer at an absolute position; commits what the grammar forces at once."""
        self.first = at
        self._advance((), ())

    def propose(self, start: int, answer: Sequence[int], accepted: Sequence[bool]) -> None:
        """Commits what the grammar accepts of a proposal.

        Args:
            start: Absolute position of the window.
            answer: The window's tokens.
            accepted: Which of them the rule has accepted.
        """
        if not self.begun or self.ended or start > self.frontier:
            return
        # What the window holds before the frontier is committed already.
        skip = self.frontier - start
        self._advance([int(i) for i in answer[skip:]], [bool(s) for s in accepted[skip:]])

    def _advance(self, tokens: Sequence[int], accepted: Sequence[bool]) -> None:
        step = self.walker.advance(tokens, accepted)
        self.committed += step.commit
        self.forced += step.forced
        self._unwritten += step.commit
        self._clear |= step.clear
        self.ended = step.ended

    def write(self, change: CommittedTokens, row: int) -> None:
        """Writes what is new into one row of the host's arrays; what does not fit waits for the next time.

        Args:
            change: From `no_tokens`; changed in place.
            row: Index of the row.
        """
        width = change.tokens.shape[1]
        start = self.frontier - len(self._unwritten)
        new = [self._unwritten.popleft() for _ in range(min(width, len(self._unwritten)))]
        arrays: Any = change
        arrays.tokens[row, : len(new)] = new
        arrays.start[row], arrays.used[row] = start, len(new)
        self._end_written = self.ended and not self._unwritten
        # An answer that the budget cuts off fills its row, and has no end of text after it.
        arrays.clear[row], arrays.ended[row] = self._clear, self._end_written and not self.walker.cut
        self._clear = bool(self._unwritten) and self._clear

    def bits(self) -> np.ndarray:
        """Returns the ids that may stand at the frontier, uint32 [words], for `processors.allow_bits`."""
        return self.walker.bits()


Grammars = Sequence[ConstrainedRow | None]


def rows_of_request(lm: LM, request: Request, passes: int | None) -> list[ConstrainedRow | None]:
    """Compiles the grammars of a request, after refusing what they cannot be combined with.

    Args:
        lm: The model.
        request: Checked, with a schema.
        passes: Of the call; must be None.

    Returns:
        One per row, `n` for each prompt; None for a row without a grammar.

    Raises:
        ValueError: Names the argument that does not fit, or the schema that is refused and why.
    """
    if max(lm.tokenizer.ends) < 0 or not any(lm.tokenizer.pieces):
        allowed = "None: a grammar needs a tokenizer with texts and an id that ends the answer"
        raise refuse("schema", request.schema, allowed)
    others = {"state": request.state, "passes": passes, "guidance": request.guidance, "mesh": request.mesh}
    others["stop"] = request.stop  # what obeys a grammar must not be cut
    for name, value in others.items():
        if value is not None:
            raise refuse(name, value, "None with schema=")
    revise = request.plan.revise
    if revise:
        raise refuse("plan.revise", revise, "0 with schema=: tokens that the grammar has accepted stay")
    if request.plan.lookahead:
        allowed = "0 with schema=: the grammar judges the tokens of each pass"
        raise refuse("plan.lookahead", request.plan.lookahead, allowed)
    sampler = None if request.sampler is None else check_sampler(request.sampler)
    if sampler is not None and sampler.rule.variable_length:
        allowed = "a rule that keeps the number of tokens, with schema="
        raise refuse("sampler.rule", sampler.rule.name, allowed)
    if sampler is not None and sampler.speculate:
        allowed = "None or 0 with schema=: the grammar judges what is drafted"
        raise refuse("sampler.speculate", sampler.speculate, allowed)
    prompts, _ = encode_prompts(lm, request.prompt)
    budgets, count = check_max_tokens(lm, prompts, request.max_tokens).tolist(), len(prompts)
    schema = request.schema
    several = isinstance(schema, Sequence) and not isinstance(schema, str)
    if several and len(schema) != count:
        raise refuse("schema", f"{len(schema)} of them", f"one, or {count}: one for each prompt")
    rows: list[ConstrainedRow | None] = []
    for i, one in enumerate(schema if several else [schema] * count):
        spec = JSONSchema(one) if isinstance(one, Mapping | bool) else one
        if spec is not None and not isinstance(spec, Spec):
            raise refuse("schema", one, "a JSON Schema, or a spec of mercury_jax.grammar")
        try:
            compiled = None if spec is None else compile(lm.tokenizer, spec)
            walkers = [None if compiled is None else compiled.walk(budgets[i]) for _ in range(request.n)]
        except GrammarError as error:
            name = f"schema[{i}]" if several else "schema"
            raise GrammarError(f"{name} is refused: {error}") from None
        rows += [None if walker is None else ConstrainedRow(walker) for walker in walkers]
    return rows


def with_grammar_mask(lm: LM, request: Request) -> Request:
    """Returns the request whose sampler has a grammar mask per row; for now it allows every id.

    Args:
        lm: Its vocabulary is the size of the mask.
        request: As `encode_request` made it.

    Returns:
        The request.
    """
    sampler, count = check_sampler(request.sampler), len(request.prompts) // request.n
    bits = np.full((count, 1, -(-lm.model.config.vocab // 32)), ALL_IDS, np.uint32)
    mask = processors.allow_bits(bits, np.zeros(count, np.int32))
    return request._replace(sampler=sampler._replace(allow=(*sampler.allow, mask)))


def run(lm: LM, session: Session, grammars: Grammars, history: bool) -> tuple[Session, list[Frame], int]:
    """Runs a session to its end, with the host between the passes.

    Args:
        lm: The model.
        session: Of a request with a grammar mask, not run yet.
        grammars: One per row, or None.
        history: Whether to keep a frame of every pass.

    Returns:
        The finished session, the frames, and how many passes were made.
    """
    constrained = np.zeros(session.state.tokens.shape[0], bool)
    constrained[: session.rows] = [row is not None for row in grammars]
    # The host commits at least one token per pass, so a block's tokens are steps enough: no schedule ends before.
    steps = np.where(constrained, session.config.block, jax.device_get(session.state.sampling.steps))
    sampling = session.state.sampling._replace(constrained=constrained, steps=steps.astype(np.int32))
    session = dataclasses.replace(session, state=session.state._replace(sampling=sampling))
    frames: list[Frame] = []
    made, state = 0, session.state
    prompt, committed, budget = jax.device_get((state.prompt, state.committed, state.answer_budget))
    _begin_answers(grammars, committed, budget)
    while True:
        session = _write_pending(session, grammars)
        session = _set_masks(session, grammars, prompt)
        if session.done:
            return session, frames, made
        session, chunk, _ = advance(lm, session, 1)
        state = session.state
        chunk, committed, budget = jax.device_get((chunk, state.committed, state.answer_budget))
        frame = jax.tree.map(lambda x: x[0], chunk)
        made += 1
        for i, row in enumerate(grammars):
            if row is not None and row.begun and frame.used[i]:
                used = int(frame.used[i])
                row.propose(int(frame.start[i]), frame.answer[i, :used], frame.accepted[i, :used])
        # Rows whose thinking ended in this pass begin their answer; what the grammar forces is written next.
        _begin_answers(grammars, committed, budget)
        if history:
            frames.append(_with_commits(frame, grammars, session.rows))


def _begin_answers(grammars: Grammars, committed: np.ndarray, answer_budget: np.ndarray) -> None:
    """Begins the answers of rows that do not think, or have just finished thinking."""
    for i, row in enumerate(grammars):
        if row is not None and not row.begun and answer_budget[i] == 0:
            row.begin(int(committed[i]))


def _write_pending(session: Session, grammars: Grammars) -> Session:
    """The session with what the grammars have accepted."""
    state = session.state
    while any(row is not None and row.begun and row.pending for row in grammars):
        change = no_tokens(state.tokens.shape[0], session.config.width)
        for i, row in enumerate(grammars):
            if row is not None and row.begun and row.pending:
                row.write(change, i)
        state = _write_program(session.config, state, CommittedTokens(*change))
    return dataclasses.replace(session, state=state)


def _set_masks(session: Session, grammars: Grammars, prompt: np.ndarray) -> Session:
    """The session with the ids that each grammar allows next; parameters are traced, so nothing is compiled."""
    sampling = session.state.sampling
    sampler = sampling.sampler
    *others, mask = sampler.allow
    bits, start = (np.array(mask.params[name]) for name in ("bits", "start"))
    for i, row in enumerate(grammars):
        bits[i], start[i] = ALL_IDS, 0
        if row is not None and row.begun and not row.ended:
            words = row.bits()
            bits[i] = 0  # also of the model's ids after the tokenizer's last
            bits[i, 0, : len(words)] = words
            start[i] = row.frontier - prompt[i]
    mask = dataclasses.replace(mask, params=mask.params | {"bits": bits, "start": start})
    sampling = sampling._replace(sampler=sampler._replace(allow=(*others, mask)))
    return dataclasses.replace(session, state=session.state._replace(sampling=sampling))


def _with_commits(frame: Frame, grammars: Grammars, rows: int) -> Frame:
    """The frame of a pass, in which the committed tokens are accepted."""
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
