"""What the grammars cost the host: the time of the thread that runs them, whatever else the decoder does."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from mercury_jax.decode.constrained import ConstrainedRow

METHODS = ("begin", "propose", "write", "bits")


class Clock:
    """Times the methods of every constrained row while it is open: `with Clock() as clock`. Of one thread at a time."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in METHODS}

    def __enter__(self) -> "Clock":
        self._held = {name: getattr(ConstrainedRow, name) for name in METHODS}
        for name, method in self._held.items():
            setattr(ConstrainedRow, name, self._timed(self.seconds[name], method))
        return self

    def __exit__(self, *_: Any) -> None:
        for name, method in self._held.items():
            setattr(ConstrainedRow, name, method)

    def _timed(self, into: list[float], method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*args, **named)
            finally:
                into.append(time.thread_time() - began)

        return timed

    @property
    def total(self) -> float:
        """Seconds of everything."""
        return sum(sum(some) for some in self.seconds.values())

    @property
    def microseconds(self) -> float:
        """For a row and a pass: all that was done, over the proposals."""
        return 1e6 * self.total / max(len(self.seconds["propose"]), 1)

    @property
    def median(self) -> float:
        """Microseconds of an ordinary row and pass: the sum of the methods' medians."""
        return 1e6 * sum(
            statistics.median(some) for name, some in self.seconds.items() if some and name != "begin"
        )
