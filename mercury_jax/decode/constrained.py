"""sample() under a grammar: single passes, and the host between them.

A row without a grammar decodes as ever. One with a grammar proposes; `gate.Gate` takes what stands of it, and
`amend` writes that back. What the grammar forces costs no pass; each pass settles one token at least.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mercury_jax.config import Plan, refuse
from mercury_jax.decode import launch, shape
from mercury_jax.decode.amend import Amend, amend, nothing
from mercury_jax.decode.gate import Gate
from mercury_jax.decode.grammar import Grammar, GrammarError, JSONSchema, Spec, compile
from mercury_jax.decode.parts import Sampler, checked_sampler
from mercury_jax.decode.state import Frame
from mercury_jax.types import LM

ALL = 0xFFFFFFFF  # every id is allowed


def gates(lm: LM, schema: Any, rows: int, max_tokens: int) -> list[Gate | None]:
    """A gate for each row, None for a row that is free. ValueError naming the schema that is refused, and why.

    schema: a JSON Schema, a spec of `grammar`, or a list of these and None, one a prompt.
    """
    several = isinstance(schema, Sequence) and not isinstance(schema, str)
    if several and len(schema) != rows:
        raise refuse("schema", f"{len(schema)} of them", f"one, or {rows}: one for each prompt")
    made: list[Gate | None] = []
    for i, one in enumerate(schema if several else [schema] * rows):
        try:
            made.append(None if one is None else Gate(_grammar(lm, one).walk(max_tokens)))
        except GrammarError as error:
            name = f"schema[{i}]" if several else "schema"
            raise GrammarError(f"{name} is refused: {error}") from None
    return made


def _grammar(lm: LM, schema: Any) -> Grammar:
    if isinstance(schema, Mapping | bool):
        schema = JSONSchema(schema)
    if not isinstance(schema, Spec):
        raise refuse("schema", schema, "a JSON Schema, or a spec of mercury_jax.grammar")
    return compile(lm.tokenizer, schema)


def check(sampler: Any, plan: Plan) -> None:
    """ValueError for ways of decoding that a grammar cannot follow."""
    if plan.revise:
        raise refuse("plan.revise", plan.revise, "with schema= 0: what the grammar has accepted stays")
    if sampler is None:
        return
    sampler = checked_sampler(sampler)
    if sampler.rule.grows:
        raise refuse("sampler.rule", sampler.rule.name, "with schema= a rule that keeps the number of tokens")
    if sampler.verify:
        raise refuse(
            "sampler.verify", sampler.verify, "with schema= None or 0: the grammar judges what is drafted"
        )


def opened(sampler: Any, rows: int, vocab: int) -> Sampler:
    """The sampler with room for each row's allowed ids; for now all of them are."""
    sampler = checked_sampler(sampler)
    bits = np.full((rows, 1, -(-vocab // 32)), ALL, np.uint32)
    return sampler._replace(allow=(*sampler.allow, shape.allow_bits(bits, np.zeros(rows, np.int32))))


def gated(job: launch.Job, gates: Sequence[Gate | None]) -> launch.Job:
    """The job with its gated rows marked: what they write is settled by the host."""
    mine = np.zeros(job.state.text.shape[0], bool)
    mine[: job.rows] = [gate is not None for gate in gates]
    # The host takes a token of each pass at least: a block has steps enough, and no schedule ends before it.
    steps = np.where(mine, job.program.block, jax.device_get(job.knobs.steps)).astype(np.int32)
    return job._replace(knobs=job.knobs._replace(gated=mine, steps=steps))


def run(
    lm: LM, job: launch.Job, gates: Sequence[Gate | None], history: bool
) -> tuple[launch.Job, list[Frame], int]:
    """(the finished job, a Frame of every pass if asked for, passes that were made)."""
    frames: list[Frame] = []
    made = 0
    prompt, known, reserve = jax.device_get((job.state.prompt, job.state.known, job.state.reserve))
    _begin(gates, known, reserve)
    while True:
        job = _written(job, gates)
        job = _allowed(job, gates, prompt)
        if np.all(jax.device_get(job.state.done)):
            return job, frames, made
        job, chunk, _ = launch.advance(lm, job, 1)
        chunk, known, reserve = jax.device_get((chunk, job.state.known, job.state.reserve))
        frame = jax.tree.map(lambda x: x[0], chunk)
        made += 1
        for i, gate in enumerate(gates):
            if gate is not None and gate.begun and frame.n[i]:
                n = int(frame.n[i])
                gate.look(int(frame.start[i]), frame.answer[i, :n], frame.settled[i, :n])
        _begin(gates, known, reserve)
        if history:
            frames.append(_shown(frame, gates, job.rows))


def _begin(gates: Sequence[Gate | None], known: np.ndarray, reserve: np.ndarray) -> None:
    """Begin the answers of rows that do not think, or have just ended it."""
    for i, gate in enumerate(gates):
        if gate is not None and not gate.begun and reserve[i] == 0:
            gate.begin(int(known[i]))


def _written(job: launch.Job, gates: Sequence[Gate | None]) -> launch.Job:
    """The job with what the gates have accepted."""
    state = job.state
    while any(gate is not None and gate.begun and gate.news for gate in gates):
        change = nothing(state.text.shape[0], job.program.width)
        for i, gate in enumerate(gates):
            if gate is not None and gate.begun and gate.news:
                gate.fill(change, i)
        state = _amend(job.program, state, Amend(*change), job.knobs.eos)
    return job._replace(state=state)


def _allowed(job: launch.Job, gates: Sequence[Gate | None], prompt: np.ndarray) -> launch.Job:
    """The job with the ids that each gate allows next; data, so that nothing is compiled."""
    sampler = job.knobs.sampler
    *others, part = sampler.allow
    bits, start = (np.array(part.knobs[name]) for name in ("bits", "start"))
    for i, gate in enumerate(gates):
        bits[i], start[i] = ALL, 0
        if gate is not None and gate.begun and not gate.over:
            words = gate.bits()
            bits[i], start[i] = (
                0,
                gate.front - prompt[i],
            )  # ids of the model behind the tokenizer's last: never
            bits[i, 0, : len(words)] = words
    part = dataclasses.replace(part, knobs=part.knobs | {"bits": bits, "start": start})
    return job._replace(knobs=job.knobs._replace(sampler=sampler._replace(allow=(*others, part))))


def _shown(frame: Frame, gates: Sequence[Gate | None], rows: int) -> Frame:
    """The frame of a pass with what was accepted of it."""
    answer, settled = frame.answer[:rows].copy(), frame.settled[:rows].copy()
    for i, gate in enumerate(gates):
        if gate is not None and gate.first is not None:
            at = np.arange(answer.shape[1]) + frame.start[i] - gate.first
            mine = (at >= 0) & (at < len(gate.committed)) & (np.arange(answer.shape[1]) < frame.n[i])
            answer[i, mine] = np.asarray(gate.committed, np.int32)[at[mine]]
            settled[i, mine] = True
    return jax.tree.map(lambda x: x[:rows], frame)._replace(answer=answer, settled=settled)


_amend = jax.jit(amend, static_argnums=0, donate_argnums=1)
