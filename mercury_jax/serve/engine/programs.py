"""The compiled program of each shape: the largest one before the first request, the others behind it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from mercury_jax.decode.state import State
from mercury_jax.serve.engine import device, knobs, shapes, warm
from mercury_jax.serve.engine.shapes import Plan, Shape
from mercury_jax.serve.engine.types import Job

NICE = 15  # of the background compilation, as `nice -n`


class Programs:
    """Compiled steps by shape: the largest one at once, the others behind it, in a thread of their own."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self._made: dict[Shape, Any] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # Only XLA's part of a compilation yields: a thread that traces holds Python's lock, and all would wait for it.
        self._compiler = ThreadPoolExecutor(1, "mercury-xla", initializer=_yield_to_requests)
        self.largest = Shape(plan.rows[-1], plan.slots[-1], knobs.CUT)

    def start(self, behind: Callable[[], None] = lambda: None) -> State:
        """Compile what fits every job, go on with the rest in the background, and give an idle state.

        behind: called once all are compiled.
        """
        state = shapes.seated(self.plan, shapes.idle(self.plan, self.largest))
        encoding = threading.Thread(target=warm.row, args=(self.plan, self.largest.slots))
        encoding.start()  # beside the step: each of the two takes about one core
        self._made[self.largest] = self._lower(self.largest).compile()
        encoding.join()
        if self._stop.is_set():
            return state
        state = warm.around(self.plan, self.largest, state)
        if self.plan.settings.programs == "all" and not self._stop.is_set():
            self._thread = threading.Thread(
                target=self._rest, args=(behind,), name="mercury-compile", daemon=True
            )
            self._thread.start()
        return state

    def stop(self) -> None:
        """Compile nothing more; waits for what is being compiled."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._compiler.shutdown()

    @property
    def complete(self) -> bool:
        """Whether nothing is left to compile."""
        return bool(self._made) and (self._thread is None or not self._thread.is_alive())

    def add(self, shape: Shape) -> None:
        """Compile a shape, and what its coming and going takes; then it may be used."""
        made = self._compiler.submit(self._lower(shape).compile).result()
        known = {(s.rows, s.slots): s for s in self._made}
        if (shape.rows, shape.slots) not in known:
            warm.beside(self.plan, shape, known.values())
        self._made[shape] = made

    def fitting(self, rows: int, slots: int, level: int) -> Shape:
        """The cheapest shape that is compiled and has room."""
        fits = [s for s in list(self._made) if s.rows >= rows and s.slots >= slots and s.level >= level]
        return min(fits, key=lambda s: (s.level, s.rows * s.slots, s.rows))

    def step(self, shape: Shape) -> Any:
        """The compiled step: (params, state, knobs, leave) -> device.Result."""
        return self._made[shape]

    def _rest(self, behind: Callable[[], None]) -> None:
        levels, rows, slots = (knobs.PLAIN, knobs.SHAPED), self.plan.rows, self.plan.slots
        for shape in (Shape(r, s, level) for level in levels for s in slots for r in reversed(rows)):
            if self._stop.is_set():
                return
            self.add(shape)
        behind()

    def _lower(self, shape: Shape) -> Any:
        plan = self.plan
        empty = Job(prompt=(0,), max_tokens=1)
        one = knobs.row(plan.menu, empty, shape.level, plan.lm, plan.block)
        state = jax.eval_shape(lambda: shapes.idle(plan, shape))
        where = shapes.placed(plan, state)
        run = device.run
        if where is not None:  # what goes out must lie where the next dispatch expects it
            lay = lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on)
            state = jax.tree.map(lay, state, where)
            run = device.run_on(where)
        return run.lower(
            shapes.program(plan, shape.slots, shape.level), plan.lm.params, state, knobs.stack(shape.rows, one),
            np.zeros(shape.rows, bool), np.int32(0), plan.settings.passes,
        )  # fmt: skip


def _yield_to_requests() -> None:
    """Lowers the priority of the calling thread, and of the compiler's threads, which inherit it (Linux only).

    Else XLA's compiler takes every core of a small machine, and running streams halt for as long as it compiles.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
