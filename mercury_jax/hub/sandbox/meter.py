"""What one render may cost: steps, characters, seconds; see the package's docstring."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from mercury_jax.hub.sandbox.traced import joined

MOST_WEIGHT = 32_000_000  # characters of what one operation may look at
MOST_ITEMS = 200_000  # of the lists that it may look at
MOST_UNITS = 64_000_000  # paid for at once: characters, or bytes of a list
POINTER, OBJECT = 8, 64  # bytes of a list's slot, of a short text
MOST_DEPTH = 64  # lists within lists: C code recurses into them


class Spent(Exception):
    """A render used up what it was given."""


@dataclass
class Meter:
    """What is left to one render. weights: of the lists and dicts that it was given, by `id`."""

    steps: int
    units: int  # characters, or bytes of lists
    until: float  # of `time.monotonic`
    weights: Mapping[int, int] = field(default_factory=dict)

    def spend(self, units: int = 0) -> None:
        self.steps -= 1
        self.units -= units
        if self.steps < 0:
            raise Spent("takes too many steps: a loop that does not end?")
        if self.units < 0 or units > MOST_UNITS:
            raise Spent("writes too much text")
        if time.monotonic() > self.until:
            raise Spent("takes too long")


METER: ContextVar[Meter] = ContextVar("meter")


def spend(units: int = 0) -> None:
    METER.get().spend(units)


def weigh(*values: Any) -> int:
    """Characters and items of plain data, as deep as it goes. `Spent` beyond the bounds."""
    known, total, items = METER.get().weights, 0, len(values)
    stack = [(v, 0) for v in values]
    while stack:
        value, depth = stack.pop()
        total += 1 + (len(value) if isinstance(value, str) else known.get(id(value), 0))
        if isinstance(value, list | tuple | dict | _VIEWS) and id(value) not in known:
            items += len(value)
            if items <= MOST_ITEMS:
                inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value
                stack.extend((v, depth + 1) for v in inside)
        if items > MOST_ITEMS or total > MOST_WEIGHT or depth > MOST_DEPTH:
            raise Spent("makes lists too large or too deep")
    return total


_VIEWS = type({}.keys()) | type({}.values()) | type({}.items())


def held(value: Any) -> Any:
    """`value`, whose making is paid for."""
    if isinstance(value, str):
        spend(len(value))
    elif isinstance(value, list | tuple | dict):
        spend(POINTER * len(value))
    return value


def light(value: Any) -> Any:
    """`value`, known to be quick to look at."""
    weigh(value)
    return value


def each(values: Iterable[Any]) -> Iterator[Any]:
    """The items, one step each."""
    for value in values:
        spend()
        yield value


def text(value: Any) -> str:
    """What `{{ value }}` writes."""
    if isinstance(value, str):
        return value
    weigh(value)
    return held(str(value))


def concat(parts: Iterable[Any]) -> str:
    """The texts as one, paid for."""
    texts = [text(part) for part in parts]
    spend(sum(map(len, texts)))
    return joined(texts)


def metered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a test that weighs what it gets and pays for what it gives."""

    @wraps(function)  # jinja2's marks, of the context as first argument, come along
    def run(*args: Any, **kwargs: Any) -> Any:
        weigh(*args, *kwargs.values())
        spend()
        found = function(*args, **kwargs)
        return each(found) if isinstance(found, Iterator) else held(found)

    return run
