"""The slots: one state on the device, who sits where, and the dispatches under way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from mercury_jax.decode.constrained import no_tokens
from mercury_jax.decode.state import SamplingParams, State
from mercury_jax.serve.engine import device, knobs, moments, shapes
from mercury_jax.serve.engine.programs import Programs
from mercury_jax.serve.engine.shapes import Shape
from mercury_jax.serve.engine.types import Job

CALM = 16  # dispatches that must fit a smaller shape before the slots move to it


class Pending(NamedTuple):
    """A dispatch that has not been read: its result on the device, and who sat where."""

    result: device.Result
    seats: tuple[moments.Running | None, ...]


@dataclass
class Slots:
    """Every method is for the engine's thread alone. state: an idle one of the largest shape."""

    plan: shapes.Plan
    programs: Programs
    state: State
    shape: Shape = field(init=False)
    seats: list[moments.Running | None] = field(init=False)
    pending: deque[Pending] = field(default_factory=deque)
    _knobs: list[SamplingParams] = field(init=False)  # by level, on the host
    _sent: Any = None  # those of the level in use, on the device
    _calm: int = 0

    def __post_init__(self) -> None:
        self._seat(self.programs.largest)

    @property
    def running(self) -> int:
        """Seats that are taken."""
        return sum(seat is not None for seat in self.seats)

    @property
    def gated(self) -> bool:
        """Whether a grammar has to see each pass before the next one."""
        return any(seat is not None and seat.gate is not None for seat in self.seats)

    @property
    def need(self) -> Shape:
        """The shape that what runs now asks for."""
        jobs = [seat.ticket.job for seat in self.seats if seat is not None]
        most = max((shapes.positions(self.plan, shapes.tokens_of(job)) for job in jobs), default=0)
        return Shape(max(len(jobs), 1), most, max((knobs.level_of(job) for job in jobs), default=0))

    def settle(self, more: Job | None = None) -> None:
        """Move to the shape that fits what runs, and one job more: at once to a larger one, later to a smaller."""
        need = self.need
        if more is not None:
            size = shapes.positions(self.plan, shapes.tokens_of(more))
            need = Shape(self.running + 1, max(need.slots, size), max(need.level, knobs.level_of(more)))
        fits = (
            need.rows <= self.shape.rows and need.slots <= self.shape.slots and need.level <= self.shape.level
        )
        best = self.programs.fitting(*need)
        self._calm = 0 if best == self.shape or not fits else self._calm + 1
        if not fits or self._calm > CALM or (self.running == 0 and best != self.shape):
            self._move(best)

    def admit(self, run: moments.Running, row: State) -> None:
        """Put a row of this shape's positions into a free seat."""
        slot = self.seats.index(None)
        self.seats[slot] = run
        if row.tokens.shape[1] != self.shape.slots:
            width = shapes.width_of(self.plan, self.shape.slots)
            row = device.move(row, np.zeros(1, np.int32), self.shape.slots, width)
        self.state = shapes.seated(self.plan, device.place(self.state, np.int32(slot), row))
        for level, rows in enumerate(self._knobs):
            job = run.ticket.job
            knobs.put(rows, slot, knobs.row(self.plan.menu, job, level, self.plan.lm, self.plan.block))
        self._sent = None

    def constrain(self) -> None:
        """Write what the grammars have accepted, and what they allow next."""
        gates = [(i, s.gate) for i, s in enumerate(self.seats) if s is not None and s.gate and s.gate.begun]
        program = shapes.program(self.plan, self.shape.slots, knobs.CUT)
        while any(gate.pending for _, gate in gates):
            change = no_tokens(self.shape.rows, program.width)
            for i, gate in gates:
                if gate.pending:
                    gate.write(change, i)
            eos = np.asarray(self._knobs[self.shape.level].eos)
            self.state = shapes.seated(self.plan, device.write(program, self.state, change, eos))
        for i, gate in gates:
            seat = self.seats[i]
            if not gate.ended and seat is not None:
                words = gate.bits()
                for rows in self._knobs[knobs.SHAPED :]:
                    knobs.constrain(rows, i, words, gate.frontier - seat.prompt)
        if gates and self._sent is not None:
            self._sent = knobs.with_constraints(self._sent, self._knobs[self.shape.level])

    def dispatch(self, params: Any) -> None:
        """Send the next passes to the device, without waiting for them; rows without a seat stand still."""
        leave = np.array([seat is None for seat in self.seats])
        if self._sent is None:
            self._sent = jax.device_put(self._knobs[self.shape.level])
        limit = 1 if self.gated else self.plan.settings.passes or 1
        result = self.programs.step(self.shape)(params, self.state, self._sent, leave, np.int32(limit))
        self.state = result.state
        self.pending.append(Pending(result, tuple(self.seats)))

    def read(self) -> tuple[Pending, Any]:
        """Wait for the oldest dispatch; (it, its frames, used and report on the host)."""
        first = self.pending.popleft()
        return first, jax.device_get((first.result.frames, first.result.used, first.result.report))

    def _move(self, shape: Shape) -> None:
        old = [i for i, seat in enumerate(self.seats) if seat is not None]
        seats = [self.seats[i] for i in old]
        kept = [jax.tree.map(lambda x: x[old], rows) for rows in self._knobs]
        if (shape.rows, shape.slots) != (self.shape.rows, self.shape.slots):
            order = np.full(shape.rows, -1, np.int32)
            order[: len(old)] = old
            width = shapes.width_of(self.plan, shape.slots)
            state = (
                device.move(self.state, order, shape.slots, width) if old else shapes.idle(self.plan, shape)
            )
            self.state = shapes.seated(self.plan, state)
            self._seat(shape)
            self.seats[: len(seats)] = seats
            for rows, some in zip(self._knobs, kept, strict=True):
                jax.tree.map(lambda all, new: all.__setitem__(slice(0, len(old)), new), rows, some)
        self.shape, self._sent, self._calm = shape, None, 0

    def _seat(self, shape: Shape) -> None:
        nothing = Job(prompt=(0,), max_tokens=1, rule=self.plan.menu.names[0])
        row = lambda level: knobs.row(self.plan.menu, nothing, level, self.plan.lm, self.plan.block)
        self.shape, self.seats = shape, [None] * shape.rows
        self._knobs = [knobs.stack(shape.rows, row(level)) for level in range(knobs.CUT + 1)]
