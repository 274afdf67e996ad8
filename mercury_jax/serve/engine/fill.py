"""Holes between two texts: jobs with a suffix, one after the other in a thread beside the slots.

A model that sees both sides takes hole and suffix as one canvas, whose width is the request's own; it does not
fit into a slot. One that cannot see behind a hole gets the text in FIM order, as any other prompt.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence

import jax
import numpy as np

from mercury_jax.config import Plan, refuse
from mercury_jax.decode.infill import Hole, LengthSearch, Pieces, fill
from mercury_jax.decode.request import Request
from mercury_jax.decode.state import Frame
from mercury_jax.serve.engine import knobs, moments
from mercury_jax.serve.engine.ticket import Ticket
from mercury_jax.serve.engine.types import Job, Snapshot
from mercury_jax.serve.engine.waiting import Waiting
from mercury_jax.types import LM

log = logging.getLogger(__name__)

OPEN = 64  # most tokens of a hole whose length the model chooses: each length is a row of a batch
BEHIND = 256  # tokens of the suffix that a canvas takes in
# Lengths that double, in a few passes, and texts of any length in a few programs: somebody waits for the answer.
GRID = LengthSearch(quantum=256, growth=2.0, rows=8)
PASSES = 16


class Left(Exception):
    """The client has left."""


def in_order(lm: LM, job: Job) -> Job:
    """A job with a suffix as one without, in FIM order (arXiv 2207.14255), where the model needs that.

    ValueError where its tokenizer has no tokens for it.
    """
    if job.suffix is None or lm.model.config.pattern == "bidirectional" or _both_sides(lm):
        return job
    marks = lm.tokenizer.fim
    if marks is None:
        raise refuse("suffix", f"{len(job.suffix)} tokens", f"none: {lm.name} has no tokens for FIM order")
    begin = lm.tokenizer.begin
    before = job.prompt[len(begin) :] if job.prompt[: len(begin)] == tuple(begin) else job.prompt
    prompt = (*begin, marks.prefix, *before, marks.suffix, *job.suffix, marks.middle)
    return dataclasses.replace(job, prompt=prompt, suffix=None)


def _both_sides(lm: LM) -> bool:
    """Whether a canvas shows what stands behind a hole."""
    return lm.model.config.pattern == "causal_encoder" and not lm.model.config.autoregressive


class Fills:
    """A queue of holes and the thread that fills them."""

    def __init__(self, lm: LM, menu: knobs.Menu, most: int, done: Callable[[Ticket, Snapshot], None]):
        self._lm, self._menu, self._done = lm, menu, done
        self._news = threading.Event()
        self.waiting = Waiting(most, self._news.set, lambda: 1 - self.running)
        self.running = 0
        self._stop, self._cold = False, False
        self._thread = threading.Thread(target=self._live, name="mercury-fill", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def warm(self) -> None:
        """Fill a hole for nobody once nothing else is to do: the first request need not wait for its programs."""
        self._cold = self._lm.model.config.pattern == "bidirectional" or _both_sides(self._lm)
        self._news.set()

    def stop(self) -> None:
        """End behind the hole that is being filled; the others are cancelled."""
        self._stop, self.waiting.closed = True, True
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join()
        for ticket in self.waiting.remove(lambda _: True):
            self._done(ticket, moments.ended(ticket, "cancelled"))

    def _live(self) -> None:
        while not self._stop:
            ticket = self.waiting.take(lambda _: True)
            if ticket is None:
                if self._cold:
                    self._cold = False
                    nobody = Job(prompt=(self._lm.model.config.eos,), suffix=(0,), max_tokens=OPEN, steps=1)
                    self._filled(Ticket(nobody, self._news.set))
                    continue
                self._news.wait()
                self._news.clear()
                continue
            self.running = 1
            self._done(ticket, self._filled(ticket))
            self.running = 0

    def _filled(self, ticket: Ticket) -> Snapshot:
        job = ticket.job
        row = _row(self._lm, job)
        chosen = knobs.sampler(self._menu, job, knobs.level_of(job), self._lm.model.config.vocab)
        watch = lambda frames: self._shown(ticket, row, jax.tree.map(lambda x: x[0], frames))
        try:
            request = Request(sampler=chosen, seed=job.seed, plan=Plan(steps=job.steps or PASSES))
            out = fill(self._lm, [row], request, on_frame=watch, search=GRID)
        except Left:
            return moments.ended(ticket, "cancelled")
        except ValueError as error:
            return moments.ended(ticket, "error", str(error))
        except Exception:  # whatever one request does, the next one is served
            log.exception("a hole could not be filled")
            return moments.ended(ticket, "error", "the engine failed")
        tokens = out.fillings[0][0]
        # Of a length that was asked for, or chosen below the most that was allowed, the hole is complete.
        full = row[1].tokens is None and len(tokens) >= row[1].most
        return _whole(tokens, int(out.forwards[0]), "length" if full else "stop")

    def _shown(self, ticket: Ticket, row: Pieces, frame: Frame) -> None:
        """After each pass: has the client left, and what stands in a hole of a fixed length."""
        if ticket.cancelled or self._stop:
            raise Left
        size = row[1].tokens
        if size is not None and frame.used[0] > 0:
            before = ticket.latest or moments.NOTHING
            skip = max(len(row[0]) - int(frame.start[0]), 0)
            here = slice(skip, skip + size)
            answer, settled, sure = (
                np.asarray(x[0, here]) for x in (frame.answer, frame.accepted, frame.confidence)
            )
            free = np.zeros(len(answer), bool)
            ticket.publish(Snapshot(answer, settled, sure, free, 0, 0, before.forwards + 1, 0))


def _row(lm: LM, job: Job) -> Pieces:
    """Before, hole, behind. With `frames` the hole has its length, so that there is one canvas to watch."""
    hole = Hole(job.max_tokens) if job.frames else Hole(most=min(job.max_tokens, OPEN))
    behind: Sequence[int] = (job.suffix or ())[:BEHIND]
    return [list(job.prompt), hole, list(behind)]


def _whole(tokens: np.ndarray, forwards: int, finish: str) -> Snapshot:
    n = len(tokens)
    yes = np.ones(n, bool)
    tokens = np.asarray(tokens, np.int32)
    return Snapshot(tokens, yes, yes.astype(np.float32), ~yes, n, n, forwards, 0, finish)
