"""Ranges of the parameters of rules, logits processors and stopping criteria, stated once in the signature.

    @mj.rule
    def threshold(key, view, memory, *, p: Annotated[Knob, Between(0, 1)] = 0.9): ...

`parts` reads the annotation: the check of each value, the line in the docstring, and what `mercury info` prints come
from it.
"""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer

from mercury_jax.config import refuse


class Range(NamedTuple):
    """The numbers that a parameter may be.

    low, high: the ends, which belong to the range unless `above` or `below` says otherwise. whole: whole numbers only.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    whole: bool = False

    def holds(self, value: Any) -> np.ndarray | np.bool_:
        """Whether each number of `value` is in the range."""
        x = np.asarray(value, float)
        inside = (x > self.low if self.above else x >= self.low) & (
            x < self.high if self.below else x <= self.high
        )
        return inside & (x == np.floor(x)) if self.whole else inside

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if math.isinf(self.low) and math.isinf(self.high):
            return f"{kind}, finite" if self.below else kind
        if math.isinf(self.high):
            start = f"above {self.low:g}" if self.above else f"{self.low:g} or more"
            return f"{kind}, {start}" if self.below else f"{kind}, {start}, or infinity"
        opened, closed = "(" if self.above else "[", ")" if self.below else "]"
        return f"{kind} in {opened}{self.low:g}, {self.high:g}{closed}"


def Between(low: float, high: float, *, whole: bool = False) -> Range:
    """From `low` to `high`, both included."""
    return Range(low, high, whole=whole)


def AtLeast(low: float, *, whole: bool = False, infinite: bool = False) -> Range:
    """From `low` on; infinity only where `infinite` says so."""
    return Range(low, below=not infinite, whole=whole)


def Above(low: float) -> Range:
    """Finite and more than `low`."""
    return Range(low, above=True, below=True)


def Finite() -> Range:
    """Any finite number."""
    return Range(above=True, below=True)


def ranges_of(function: Callable[..., Any]) -> dict[str, Range]:
    """The range of each argument that states one."""
    function = inspect.unwrap(function)  # a type checker may stand around it, with other globals
    written = getattr(function, "__annotations__", {})
    # Only those that may state a range are resolved: a rule may annotate the others with names of its own scope.
    written = {n: a for n, a in written.items() if not isinstance(a, str) or "Annotated" in a}
    holder = types.SimpleNamespace(__annotations__=written)
    try:
        hints = typing.get_type_hints(
            holder, globalns=getattr(function, "__globals__", {}), include_extras=True
        )
    except NameError as error:
        raise refuse(
            f"annotations of {function.__name__}", str(error), "names of the module it stands in"
        ) from None
    found = {
        n: [m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Range)] for n, hint in hints.items()
    }
    return {n: some[0] for n, some in found.items() if some}


def checked(field: str, value: Any, allowed: Range | None) -> Any:
    """A parameter's value, its type that of its range: float, or int where only whole numbers are allowed.

    Args:
        field: What the message calls it, such as "threshold(p=)".
        value: A number, or one for each row; values that are traced under `jit` cannot be looked at, and pass.
        allowed: None for a parameter without a range: any number, also an infinite one.

    Raises:
        ValueError: Naming the field, its value and its range.
    """
    said = str(allowed or Range())
    if value is inspect.Parameter.empty:
        raise refuse(field, None, f"{said}: it has no default")
    if isinstance(value, Tracer):
        return value
    if isinstance(value, list | tuple):
        value = np.asarray(value) if _numbers(value) else value
    # numpy: jnp would trace a constant inside of jit.
    kind = getattr(np.asarray(value), "dtype", np.dtype(object)).kind
    if kind not in "iuf" and str(getattr(value, "dtype", "")) != "bfloat16":
        raise refuse(field, value, f"{said}, or an array with one for each row")
    numbers = np.asarray(value, float)
    wrong = np.isnan(numbers) if allowed is None else ~allowed.holds(numbers)
    if wrong.any():
        raise refuse(field, float(numbers[wrong].flat[0]) if numbers.ndim else value, said)
    if allowed is None or numbers.ndim:
        return value
    return int(value) if allowed.whole and np.isfinite(numbers) else float(value)


def _numbers(values: Any) -> bool:
    return all(
        isinstance(v, int | float | np.integer | np.floating) and not isinstance(v, bool) for v in values
    )


def described(name: str, defaults: Mapping[str, Any], ranges: Mapping[str, Range]) -> str:
    """The lines of a docstring that say what each parameter may be; empty where there are none."""
    lines = [
        f"    {key}: {ranges.get(key, Range())}"
        + ("." if value is inspect.Parameter.empty else f"; default {value}.")
        for key, value in defaults.items()
    ]
    return "\n".join([f"Parameters of {name}, each one for all rows or one a row:", *lines]) if lines else ""
