"""Allowed values of the parameters of rules, logits processors and stopping criteria.

A range is stated once, in the annotation of the parameter:

    def threshold(key, view, memory, p: Annotated[Param, Between(0, 1)] = 0.9): ...

The decorators of `sampler.py` read it: the check of each value, a line of the docstring and the output of
`mercury info` all come from the annotation.
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

    Attributes:
        low: Lower end.
        high: Upper end.
        open_low: Whether `low` itself is excluded.
        open_high: Whether `high` itself is excluded.
        integer: Whether only whole numbers are allowed.
    """

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    integer: bool = False

    def contains(self, value: Any) -> np.ndarray | np.bool_:
        """Returns, for each number of `value`, whether it is in the range."""
        x = np.asarray(value, float)
        above = x > self.low if self.open_low else x >= self.low
        below = x < self.high if self.open_high else x <= self.high
        return above & below & (x == np.floor(x)) if self.integer else above & below

    def __str__(self) -> str:
        kind = "a whole number" if self.integer else "a number"
        if math.isinf(self.low) and math.isinf(self.high):
            return f"{kind}, finite" if self.open_high else kind
        if math.isinf(self.high):
            start = f"above {self.low:g}" if self.open_low else f"{self.low:g} or more"
            return f"{kind}, {start}" if self.open_high else f"{kind}, {start}, or infinity"
        left, right = "(" if self.open_low else "[", ")" if self.open_high else "]"
        return f"{kind} in {left}{self.low:g}, {self.high:g}{right}"


def Between(low: float, high: float, *, integer: bool = False) -> Range:
    """Returns the range [low, high], both ends included.

    Args:
        low: Lower end.
        high: Upper end.
        integer: Whether only whole numbers are allowed.

    Returns:
        The range.
    """
    return Range(low, high, integer=integer)


def AtLeast(low: float, *, integer: bool = False, infinite: bool = False) -> Range:
    """Returns the range [low, inf); `infinite` includes infinity itself.

    Args:
        low: Lower end, included.
        integer: Whether only whole numbers are allowed.
        infinite: Whether infinity is included.

    Returns:
        The range.
    """
    return Range(low, open_high=not infinite, integer=integer)


def Above(low: float) -> Range:
    """Returns the range (low, inf)."""
    return Range(low, open_low=True, open_high=True)


def Finite() -> Range:
    """Returns the range of all finite numbers."""
    return Range(open_low=True, open_high=True)


def ranges_of(function: Callable[..., Any]) -> dict[str, Range]:
    """Reads the ranges from a function's annotations.

    Args:
        function: Parameters annotated `Annotated[..., Range]` are read; the others are ignored.

    Returns:
        The range of each parameter that states one.

    Raises:
        ValueError: An annotation uses a name that the function's module does not define.
    """
    function = inspect.unwrap(function)  # a type checker may wrap it, with other globals
    # Only annotations that may state a range are resolved: the others may use names of a local scope.
    annotations = getattr(function, "__annotations__", {})
    annotations = {n: a for n, a in annotations.items() if not isinstance(a, str) or "Annotated" in a}
    holder = types.SimpleNamespace(__annotations__=annotations)
    try:
        hints = typing.get_type_hints(
            holder, globalns=getattr(function, "__globals__", {}), include_extras=True
        )
    except NameError as error:
        raise refuse(
            f"annotations of {function.__name__}", str(error), "names that its module defines"
        ) from None
    metadata = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    found = {name: [m for m in items if isinstance(m, Range)] for name, items in metadata.items()}
    return {name: items[0] for name, items in found.items() if items}


def check_number(name: str, value: Any, allowed: Range | None) -> Any:
    """Checks a parameter and converts it to the type of its range.

    Args:
        name: What the error message calls it, such as "threshold(p=)".
        value: A number, or an array or list with one number per row. A value that is traced under `jit` passes
            unchecked.
        allowed: None for a parameter without a range: any number, infinity included.

    Returns:
        A float (an int where only whole numbers are allowed), or the array as it was.

    Raises:
        ValueError: Names the parameter, its value and its range.
    """
    description = str(allowed or Range())
    if value is inspect.Parameter.empty:
        raise refuse(name, None, f"{description}: it has no default")
    if isinstance(value, Tracer):
        return value
    if isinstance(value, list | tuple) and all(
        isinstance(v, int | float | np.integer | np.floating) and not isinstance(v, bool) for v in value
    ):
        value = np.asarray(value)
    # numpy, because jnp would turn a constant into a tracer inside of jit.
    kind = getattr(np.asarray(value), "dtype", np.dtype(object)).kind
    if kind not in "iuf" and str(getattr(value, "dtype", "")) != "bfloat16":
        raise refuse(name, value, f"{description}, or an array with one for each row")
    numbers = np.asarray(value, float)
    wrong = np.isnan(numbers) if allowed is None else ~allowed.contains(numbers)
    if wrong.any():
        raise refuse(name, float(numbers[wrong].flat[0]) if numbers.ndim else value, description)
    if allowed is None or numbers.ndim:
        return value
    return int(numbers) if allowed.integer and np.isfinite(numbers) else float(numbers)


def describe_params(name: str, defaults: Mapping[str, Any], ranges: Mapping[str, Range]) -> str:
    """Writes the section of a docstring that lists each parameter with its range and default.

    Args:
        name: Of the rule, logits processor or stopping criterion.
        defaults: Default of each parameter; `inspect.Parameter.empty` for none.
        ranges: Range of each parameter that states one.

    Returns:
        The lines, or "" where there are no parameters.
    """
    lines = [
        f"    {key}: {ranges.get(key, Range())}"
        + ("." if value is inspect.Parameter.empty else f"; default {value}.")
        for key, value in defaults.items()
    ]
    return (
        "\n".join([f"Ranges of {name}; every parameter may be one number, or one per row:", *lines])
        if lines
        else ""
    )
