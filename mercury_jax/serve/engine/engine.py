"""The engine: a thread that admits jobs into slots, runs them together, and hands out what they show."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import Counter

import jax
import numpy as np

from mercury_jax.config import refuse
from mercury_jax.decode.constrained import ConstrainedRow
from mercury_jax.decode.state import Frame, State
from mercury_jax.models import cache
from mercury_jax.serve.engine import device, knobs, memory, moments, shapes
from mercury_jax.serve.engine.fill import BEHIND, Fills, in_order
from mercury_jax.serve.engine.moments import Running
from mercury_jax.serve.engine.prefix import Prefixes, piece_of
from mercury_jax.serve.engine.programs import Programs
from mercury_jax.serve.engine.slots import Slots
from mercury_jax.serve.engine.ticket import Ticket
from mercury_jax.serve.engine.types import Job, Settings, Snapshot, Stats, TooLong
from mercury_jax.serve.engine.waiting import Waiting, may_sit
from mercury_jax.types import LM

log = logging.getLogger(__name__)

PIECE = 1024  # tokens of a long prompt that are encoded between two dispatches


@dataclasses.dataclass
class Filling:
    """A long prompt on its way into a slot."""

    run: Running
    row: State
    upto: int


class Engine:
    """Any model that `mj.load` loads, as slots of one state machine.

        engine = Engine(lm, Settings(slots=8))
        engine.start()
        ticket = engine.submit(Job(prompt=(5, 6, 7), max_tokens=32))
        ticket.wait().tokens

    Requests join and leave between two passes; what they ask for is data, so none of them compiles anything.
    `submit`, `stats` and a ticket's methods may be called from any thread.
    """

    def __init__(self, lm: LM, settings: Settings = Settings()):
        if settings.passes is None:
            passes = 1 if jax.default_backend() == "cpu" else 4
            settings = dataclasses.replace(settings, passes=passes)
        if settings.kv is not None:
            lm = dataclasses.replace(lm, model=cache.with_kv_kind(lm.model, settings.kv))
        memory.check(lm, settings)
        self.lm, self.settings = lm, settings
        self.plan = shapes.plan(lm, settings)
        self.context = self.plan.context
        self.ready, self.closing = False, False
        self._ends = (lm.model.config.eos, *lm.model.config.ends)
        self._news = threading.Condition()
        self._dirty, self._stopping = False, False
        self._waiting = Waiting(settings.queue, self._wake, self._free)
        self._programs = Programs(self.plan)
        self._prefixes = Prefixes(piece_of(lm.model.config), settings.prefix_bytes)
        self._fills = Fills(lm, self.plan.menu, settings.queue, self._filled)
        self._slots: Slots | None = None
        self._filling: Filling | None = None
        self._counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._live, name="mercury-engine", daemon=True)

    def start(self) -> None:
        """Compile what every job fits into, then serve; the programs for fewer and shorter jobs follow."""
        self._slots = Slots(self.plan, self._programs, self._programs.start(self._fills.warm))
        if self._stopping:  # stopped while it compiled
            return
        self._thread.start()
        self._fills.start()
        self.ready = True

    def submit(self, job: Job) -> Ticket:
        """A ticket for the job. Raises Busy, TooLong, or ValueError for a number that does not fit."""
        job = self._checked(job)
        ticket = Ticket(job, self._wake)
        try:
            (self._waiting if job.suffix is None else self._fills.waiting).add(ticket)
        except Exception:
            self._counts["rejected"] += 1
            raise
        self._counts["submitted"] += 1
        return ticket

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new jobs and wait for those that are there; whether all have ended in time."""
        self.closing = self._waiting.closed = self._fills.waiting.closed = True
        until = None if timeout is None else time.monotonic() + timeout
        while self._busy():
            if until is not None and time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def stop(self) -> None:
        """Cancel what is left, and end the thread."""
        self.closing = self._waiting.closed = True
        self._fills.stop()
        self._wake(stop=True)
        if self._thread.ident is not None:
            self._thread.join()
        self._programs.stop()
        self.ready = False

    @property
    def compiled(self) -> bool:
        """Whether every program is there, those for fewer and shorter jobs included; what is timed waits for it."""
        return self.ready and self._programs.complete

    def stats(self) -> Stats:
        """Counters since the start, and what is going on now."""
        count, slots = self._counts, self._slots
        state = None if slots is None else slots.state
        seats = [] if slots is None else [seat for seat in slots.seats if seat is not None]
        bytes_of = 0 if state is None else device.bytes_of(state.cache)
        rows, size = (1, 1) if slots is None else (slots.shape.rows, slots.shape.slots)
        used = sum(shapes.tokens_of(seat.ticket.job) for seat in seats)
        return Stats(
            waiting=len(self._waiting), running=len(seats), slots=self.settings.slots, capacity=size,
            kv_bytes=bytes_of, kv_used=bytes_of * used // (rows * size), prefix_bytes=self._prefixes.bytes,
            **{name: count[name] for name in _COUNTS},
        )  # fmt: skip

    def _free(self) -> int:
        """Seats that nobody has."""
        slots = self._slots
        taken = 0 if slots is None else slots.running + (self._filling is not None)
        return self.settings.slots - taken

    def _checked(self, job: Job) -> Job:
        job = in_order(self.lm, job)
        tokens = shapes.tokens_of(job) + min(len(job.suffix or ()), BEHIND)
        if not job.prompt:
            raise refuse("prompt", job.prompt, "at least one token")
        if tokens > self.context:
            raise TooLong(tokens, self.context)
        if job.logprobs is not None and not 0 <= job.logprobs <= self.settings.alternatives:
            raise refuse("logprobs", job.logprobs, f"0..{self.settings.alternatives}")
        if job.grammar is not None:
            job.grammar.walk(job.max_tokens)  # whether an answer fits at all
        knobs.row(
            self.plan.menu, job, knobs.CUT, self.lm, self.plan.block
        )  # whatever it refuses, it refuses here
        return job

    def _busy(self) -> bool:
        slots = self._slots
        beside = len(self._waiting) + len(self._fills.waiting) + self._fills.running
        return beside > 0 or self._filling is not None or (slots is not None and slots.running > 0)

    def _filled(self, ticket: Ticket, final: Snapshot) -> None:
        """A hole was filled, in the thread of the holes."""
        kind = {"cancelled": "cancelled", "error": "failed"}.get(final.finish or "", "finished")
        self._counts.update({kind: 1, "forwards": final.forwards, "tokens": len(final.tokens)})
        ticket.publish(final)

    def _wake(self, stop: bool = False) -> None:
        with self._news:
            self._dirty = True
            self._stopping = self._stopping or stop
            self._news.notify()

    # Everything below runs in the engine's own thread.

    def _live(self) -> None:
        slots = self._slots
        assert slots is not None
        while not self._stopping:
            try:
                self._turn(slots)
            except Exception:  # whatever one request does, the next one is served
                log.exception("the engine failed; what ran is lost")
                slots = self._anew(slots)
        filling = [] if self._filling is None else [self._filling.run]
        for seat in (*slots.seats, *filling):
            if seat is not None:
                seat.ticket.publish(moments.ended(seat.ticket, "cancelled"))
        for ticket in self._waiting.remove(lambda _: True):
            ticket.publish(moments.ended(ticket, "cancelled"))

    def _anew(self, slots: Slots) -> Slots:
        """End what runs with an error, and go on with empty slots."""
        filling = [] if self._filling is None else [self._filling.run]
        for seat in (*slots.seats, *filling):
            if seat is not None and not seat.ticket.over:
                self._over(seat.ticket, "error", "the engine failed")
        empty = shapes.seated(self.plan, shapes.idle(self.plan, self._programs.largest))
        self._filling, self._slots = None, Slots(self.plan, self._programs, empty)
        return self._slots

    def _turn(self, slots: Slots) -> None:
        """Admit, dispatch, read: the device has the next passes before the last ones are looked at."""
        self._leave(slots)
        self._admit(slots)
        if slots.running:
            slots.constrain()
            slots.dispatch(self.lm.params)
        # A grammar looks at a pass before the next one; without one, the device is always a dispatch ahead.
        while slots.pending and (len(slots.pending) > 1 or slots.gated or not slots.running):
            self._read(slots)
        if not slots.running and not slots.pending and self._filling is None:
            self._rest()

    def _rest(self) -> None:
        with self._news:
            self._news.wait_for(lambda: self._dirty, timeout=None if len(self._waiting) == 0 else 0.01)
            self._dirty = False

    def _leave(self, slots: Slots) -> None:
        """Free the seats of cancelled jobs."""
        for ticket in self._waiting.remove(lambda ticket: ticket.cancelled):
            self._over(ticket, "cancelled")
        for i, seat in enumerate(slots.seats):
            if seat is not None and seat.ticket.cancelled:
                self._over(seat.ticket, "cancelled")
                slots.seats[i] = None
        if self._filling is not None and self._filling.run.ticket.cancelled:
            self._over(self._filling.run.ticket, "cancelled")
            self._filling = None

    def _over(self, ticket: Ticket, finish: str, message: str = "") -> None:
        self._counts["cancelled" if finish == "cancelled" else "failed"] += 1
        ticket.publish(moments.ended(ticket, finish, message))

    def _admit(self, slots: Slots) -> None:
        if self._filling is not None:
            self._fill(slots, self._filling)
        while slots.running + (self._filling is not None) < self.settings.slots:
            ticket = self._waiting.take(lambda ticket: self._fits(slots, ticket.job))
            if ticket is None:
                break
            self._seat(slots, ticket)
        slots.settle()

    def _fits(self, slots: Slots, job: Job) -> bool:
        filling = [] if self._filling is None else [self._filling.run]
        sitting = [seat.ticket.job for seat in (*slots.seats, *filling) if seat is not None]
        return (not filling or not self._long(job)) and may_sit(job, sitting, self.settings.slots)

    def _long(self, job: Job) -> bool:
        """Whether the prompt wants encoding passes of its own, between those of the others."""
        full = self.lm.model.config.pattern == "bidirectional"
        return not full and len(job.prompt) > 2 * self.plan.block

    def _seat(self, slots: Slots, ticket: Ticket) -> None:
        job = ticket.job
        pieces = self._prefixes.find(job.prompt, job.salt)
        cached = self._prefixes.tokens(pieces)
        slots.settle(job)
        row = self._prefixes.lay(shapes.row(self.plan, slots.shape.slots, job, cached), pieces)
        run = Running(ticket, cached, self.plan.menu.revises[self.plan.menu.find(job.rule)])
        marks = self.lm.tokenizer.thinking
        run.close = marks.close if job.thinking and marks is not None else -1
        if job.grammar is not None:
            run.gate = ConstrainedRow(job.grammar.walk(job.max_tokens))
            if not job.thinking:
                run.gate.begin(len(job.prompt))
        self._counts["cached_tokens"] += cached
        self._counts["prompt_tokens"] += len(job.prompt)
        if len(job.prompt) - cached > 2 * self.plan.block and self._long(job):
            self._filling = Filling(run, row, cached)
        else:
            slots.admit(run, row)

    def _fill(self, slots: Slots, filling: Filling) -> None:
        """Encode the next piece of a long prompt; behind the last one it takes its seat."""
        job, upto = filling.run.ticket.job, filling.upto + PIECE
        size = filling.row.tokens.shape[1]
        program = shapes.program(self.plan, size, knobs.CUT)
        filling.row = device.encode(program, self.lm.params, filling.row, shapes.WIDE, np.int32(upto))
        filling.upto = upto
        if upto >= len(job.prompt):
            self._filling = None
            slots.settle(job)
            slots.admit(filling.run, filling.row)

    def _read(self, slots: Slots) -> None:
        pending, (frames, used, report) = slots.read()
        self._counts["device_passes"] += int(used)
        for slot, run in enumerate(pending.seats):
            if run is None or run.ticket.over:
                continue
            shown = list(moments.passing(run, frames, int(used), report, slot, self._ends))
            self._counts["forwards"] += len(shown)
            if run.gate is not None:
                self._judge(run, run.gate, frames, report, slot)
                shown = [moments.judged(run, snapshot) for snapshot in shown]
            for snapshot in shown if run.ticket.job.frames else shown[-1:]:
                run.ticket.publish(snapshot)
            if report.done[slot]:
                self._finish(slots, run, report, slot)

    def _judge(
        self, run: Running, gate: ConstrainedRow, frames: Frame, report: device.Report, slot: int
    ) -> None:
        """Show a grammar what the pass proposed; where the thinking has just been closed, begin the answer."""
        n = int(frames.used[0, slot])
        if gate.begun and n:
            gate.propose(int(frames.start[0, slot]), frames.answer[0, slot, :n], frames.accepted[0, slot, :n])  # type: ignore[arg-type]
        elif not gate.begun and report.answer_budget[slot] == 0:
            gate.begin(int(report.committed[slot]))

    def _finish(self, slots: Slots, run: Running, report: device.Report, slot: int) -> None:
        job, end = run.ticket.job, int(report.end[slot])
        found = slots.seats.index(run)  # the slots may have moved since
        logprobs = None
        if job.logprobs is not None:
            nats = jax.device_get(device.peek(slots.state, np.int32(found)))
            logprobs = moments.logprobs_of(nats, run, end)
        encoded = min(int(report.cache_length[slot]), end)
        self._prefixes.keep(slots.state, found, report.tokens[slot, :end].tolist(), encoded, job.salt)
        slots.seats[found] = None
        final = moments.last(run, report, slot, self._ends, logprobs)
        self._counts["failed" if final.finish == "error" else "finished"] += 1
        self._counts["tokens"] += len(final.tokens)
        self._waiting.took(time.monotonic() - run.ticket.born)
        run.ticket.publish(final)


_COUNTS = (
    "submitted", "finished", "cancelled", "rejected", "failed", "forwards", "tokens", "prompt_tokens",
    "cached_tokens", "device_passes",
)  # fmt: skip
