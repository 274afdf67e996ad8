"""From what a dispatch showed of a row to the snapshots of its answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from mercury_jax.decode.constrained import ConstrainedRow
from mercury_jax.decode.sample import LogProbs
from mercury_jax.decode.state import Frame
from mercury_jax.serve.engine.device import Report
from mercury_jax.serve.engine.ticket import NOTHING, Ticket
from mercury_jax.serve.engine.types import Snapshot


@dataclass(eq=False)
class Running:
    """A job in a slot, as the host knows it."""

    ticket: Ticket
    cached: int  # tokens of its prompt whose keys were there already
    revises: bool  # its rule may still change what is settled
    close: int = -1  # the id that ends its thinking; -1: it does not think
    forwards: int = 0
    gate: ConstrainedRow | None = None  # of a grammar

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.ticket.job.prompt)


def passing(
    run: Running, frames: Frame, used: int, report: Report, slot: int, ends: tuple[int, ...]
) -> Iterator[Snapshot]:
    """A snapshot for each denoising pass. frames, report: on the host."""
    for i in range(used):
        if frames.used[i, slot] > 0:
            run.forwards += 1
            yield _passed(
                run, jax.tree.map(lambda x, i=i: x[i, slot], frames), np.asarray(report.tokens[slot]), ends
            )


def _passed(run: Running, frame: Frame, text: np.ndarray, ends: tuple[int, ...]) -> Snapshot:
    first = max(int(frame.start), run.prompt)  # a block may begin inside of the prompt
    skip = first - int(frame.start)
    here = slice(skip, int(frame.used))
    settled = np.concatenate([np.ones(first - run.prompt, bool), frame.accepted[here]])
    # What stands before the block is text for good, the close of a thinking included.
    tokens = np.concatenate([text[run.prompt : first], frame.answer[here]]).astype(np.int32)
    sure = np.concatenate([np.ones(first - run.prompt, np.float32), frame.confidence[here]])
    over = np.flatnonzero(np.isin(tokens, ends) & settled)
    size = int(over[0]) if len(over) else len(tokens)
    if run.close >= 0 and run.close not in text[run.prompt : first]:
        # It still thinks: behind the close the block is written anew, as the answer.
        shut = np.flatnonzero((tokens == run.close) & settled)
        size = min(size, int(shut[0]) + 1) if len(shut) else size
    start = min(first - run.prompt, size)
    fixed = start if run.revises else int(np.argmin(np.append(settled[:size], False)))
    return Snapshot(
        tokens[:size],
        settled[:size],
        sure[:size],
        np.zeros(size, bool),
        fixed,
        start,
        run.forwards,
        run.cached,
    )


def judged(run: Running, shown: Snapshot) -> Snapshot:
    """A snapshot of a gated row as its grammar leaves it: only what is committed is final."""
    gate = run.gate
    if gate is None or gate.first is None:
        return shown
    begun, front = gate.first - run.prompt, gate.frontier - run.prompt
    if len(shown.tokens) < begun:  # thinking that filled its room is closed behind the pass that was shown
        shown = _closed(run, shown, begun - len(shown.tokens))
    join = lambda old, new, kind: np.concatenate([old[:begun], new, old[front:]]).astype(kind)
    n = len(gate.committed)
    return shown._replace(
        tokens=join(shown.tokens, gate.committed, np.int32),
        settled=join(shown.settled, np.ones(n), bool),
        confidence=join(shown.confidence, _sure(shown.confidence[begun:front], n), np.float32),
        forced=join(shown.forced, gate.forced, bool),
        final=front,
    )


def _closed(run: Running, shown: Snapshot, n: int) -> Snapshot:
    """A snapshot with n more tokens: the close of its thinking."""
    join = lambda old, value: np.concatenate([old, np.full(n, value, old.dtype)])
    return shown._replace(
        tokens=join(shown.tokens, run.close), settled=join(shown.settled, True),
        confidence=join(shown.confidence, 1.0), forced=join(shown.forced, False),
    )  # fmt: skip


def _sure(known: np.ndarray, n: int) -> np.ndarray:
    """Confidences of n committed tokens; 1 where no pass was needed."""
    return np.concatenate([known, np.ones(n - len(known), np.float32)])


def last(
    run: Running, report: Report, slot: int, ends: tuple[int, ...], logprobs: LogProbs | None
) -> Snapshot:
    """The last snapshot of a row that is done."""
    text, end = np.asarray(report.tokens[slot]), int(report.end[slot])
    bad = int(report.nan_step[slot])
    if bad >= 0:
        return _ended(run, "error", f"the model's logits are NaN in denoising pass {bad}")
    tokens = text[run.prompt : end].astype(np.int32)
    before = run.ticket.latest or NOTHING
    sure, forced = np.ones(len(tokens), np.float32), np.zeros(len(tokens), bool)
    seen = min(len(tokens), len(before.tokens))
    sure[:seen], forced[:seen] = before.confidence[:seen], before.forced[:seen]
    if run.gate is not None and run.gate.first is not None:
        forced[run.gate.first - run.prompt :] = run.gate.forced
    return Snapshot(
        tokens, np.ones(len(tokens), bool), sure, forced, len(tokens), len(tokens), int(report.nfe[slot]),
        run.cached, "stop" if int(text[end]) in ends else "length", "", logprobs,
    )  # fmt: skip


def ended(ticket: Ticket, finish: str, message: str = "") -> Snapshot:
    """The last snapshot of a ticket that ends early: what was final of it stays."""
    s = ticket.latest or NOTHING
    n = s.final
    return s._replace(
        tokens=s.tokens[:n], settled=s.settled[:n], confidence=s.confidence[:n], forced=s.forced[:n],
        start=min(s.start, n), finish=finish, message=message,
    )  # fmt: skip


def _ended(run: Running, finish: str, message: str) -> Snapshot:
    return ended(run.ticket, finish, message)


def logprobs_of(nats: Any, run: Running, end: int) -> LogProbs:
    """A row's log-probabilities, as many alternatives as the job asked for."""
    few = run.ticket.job.logprobs or 0
    where = slice(run.prompt, end)
    return LogProbs(nats.chosen[where], nats.top_ids[where, :few], nats.top[where, :few])
