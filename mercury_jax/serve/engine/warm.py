"""The small programs around the steps, each run once before a request needs it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mercury_jax.decode.constrained import no_tokens
from mercury_jax.decode.state import State
from mercury_jax.serve.engine import device, knobs, shapes
from mercury_jax.serve.engine.prefix import piece_of
from mercury_jax.serve.engine.shapes import Plan, Shape
from mercury_jax.serve.engine.types import Job

SPARE = 256 << 20  # bytes that states may take which are made only to compile
NOBODY = Job(prompt=(0,), max_tokens=1)


def row(plan: Plan, slots: int) -> State:
    """A row of `slots` positions, made and sent through the passes that encode a long prompt."""
    one = shapes.row(plan, slots, NOBODY, 0)
    if plan.lm.model.config.pattern == "bidirectional":
        return one
    full = shapes.program(plan, slots, knobs.CUT)
    return device.encode(full, plan.lm.params, one, shapes.WIDE, np.int32(0))


def around(plan: Plan, shape: Shape, state: State) -> State:
    """Do to an idle state what happens to the slots between two steps; it is idle again."""
    one, piece = row(plan, shape.slots), piece_of(plan.lm.model.config)
    if plan.settings.prefix_bytes and piece is not None and piece <= shape.slots:
        one = device.lay(one, device.cut(state.cache, np.int32(0), np.int32(0), piece), np.int32(0))
    full = shapes.program(plan, shape.slots, knobs.CUT)
    eos = np.full(shape.rows, plan.lm.model.config.eos, np.int32)
    state = shapes.seated(plan, device.write(full, state, no_tokens(shape.rows, full.width), eos))
    state = shapes.seated(plan, device.place(state, np.int32(0), one))
    device.peek(state, np.int32(0))
    return moved(plan, state, shape)


def moved(plan: Plan, state: State, shape: Shape) -> State:
    """An idle state of a shape, out of a state of another one."""
    nobody = np.full(shape.rows, -1, np.int32)
    return shapes.seated(plan, device.move(state, nobody, shape.slots, shapes.width_of(plan, shape.slots)))


def beside(plan: Plan, shape: Shape, others: Iterable[Shape]) -> None:
    """What a new shape brings, and the moves between it and the others, where memory for two states is to spare."""
    new = shapes.seated(plan, shapes.idle(plan, shape))
    size = device.bytes_of(new.cache)
    if size > SPARE:
        return
    new = around(plan, shape, new)
    for other in others:
        if size * other.rows * other.slots <= SPARE * shape.rows * shape.slots:
            moved(plan, moved(plan, new, other), shape)
