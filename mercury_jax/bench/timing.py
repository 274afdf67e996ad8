"""Timing without compilation: calls in which nothing was compiled, and two of them by turns."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

T = TypeVar("T")

TRIES = 4


@functools.cache
def _counter() -> list[int]:
    """One number that rises with every program compiled; JAX has no way to take a listener back."""
    count = [0]

    def hear(event: str, duration_secs: float, **kwargs: str | int) -> None:
        count[0] += event.endswith("backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(hear)
    return count


def compiled() -> int:
    """How many programs were compiled since the first call of this function."""
    return _counter()[0]


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """(result, seconds) of a call; its result must have reached the host, or be waited for in it."""
    began = time.perf_counter()
    result = call()
    return result, time.perf_counter() - began


def steady(call: Callable[[], T]) -> tuple[T, float]:
    """(result, seconds) of a call during which nothing was compiled, made again until that is so.

    RuntimeError where every call compiles: its speed would be that of the compiler.
    """
    for _ in range(TRIES):
        before = compiled()
        result, seconds = timed(call)
        if compiled() == before:
            return result, seconds
    raise RuntimeError(f"each of {TRIES} equal calls compiled a program; there is no steady state to time")


def by_turns(
    first: Callable[[], object], other: Callable[[], object], pairs: int
) -> list[tuple[float, float]]:
    """Seconds of the two calls, one after the other `pairs` times; who begins alternates.

    On a shared machine both of a pair meet the same neighbours, so their ratio is steadier than
    either time.
    """
    found = []
    for i in range(pairs):
        if i % 2:
            after, before = timed(other)[1], timed(first)[1]
            found.append((before, after))
        else:
            found.append((timed(first)[1], timed(other)[1]))
    return found


def ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Median of first / other."""
    return statistics.median(a / max(b, 1e-12) for a, b in pairs)
