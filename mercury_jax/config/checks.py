"""The one form of our errors, and configs as JSON-ready data."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import numbers
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

T = TypeVar("T")


def refuse(field: str, value: object, allowed: str) -> ValueError:
    """The one form of our errors: the field, the value, what is allowed."""
    return ValueError(f"{field} is {value!r}; allowed: {allowed}")


MANY = 16  # names; where one of so many is similar, the others are not listed


def nearest(name: str, names: Sequence[str]) -> str:
    """What is allowed in place of a name that does not exist, for `refuse`.

    Args:
        name: What was written; `lr` stands for `optim.lr` too.
        names: Those that exist.

    Returns:
        The most similar name first, and all of them unless they are many.
    """
    bare, name = {n.lstrip("-"): n for n in names}, name.lstrip("-")
    last = lambda dotted: dotted.rpartition(".")[2]
    close = difflib.get_close_matches(name, bare, n=1, cutoff=0.5)
    close = close or [n for n in bare if last(n) == last(name)][:1]
    every = ", ".join(names)
    if close and len(names) > MANY:
        return f"{bare[close[0]]} is the nearest of {len(names)}"
    return f"{bare[close[0]]} is the nearest; all: {every}" if close else every


def at_least(least: float, **fields: float) -> None:
    """Raise unless every field is at least `least`."""
    for name, value in fields.items():
        if not value >= least:
            raise refuse(name, value, f"{least} or more")


def one_of(choices: object, **fields: str) -> None:
    """Raise unless every field is one of a Literal's values."""
    allowed = get_args(choices)
    for name, value in fields.items():
        if value not in allowed:
            raise refuse(name, value, ", ".join(allowed))


def check_types(config: Any, prefix: str = "", skip: tuple[str, ...] = ()) -> None:
    """Raise unless every field of a dataclass holds a value of its type.

    Fields of other types than plain values, tuples of them, and dataclasses are left to the class itself.
    """
    hints = _hints(type(config))
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.name not in skip and not _fits(value, hints[f.name]):
            raise refuse(f"{prefix}{f.name}", value, _words(hints[f.name]))


_hints = functools.cache(typing.get_type_hints)
_PLAIN = {
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "a text"),
    bool: (bool, "True or False"),
    type(None): (type(None), "None"),
}


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(_fits(value, choice) for choice in get_args(hint))
    if typing.get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        return isinstance(value, tuple) and all(_fits(x, get_args(hint)[0]) for x in value)
    if hint in _PLAIN:
        return isinstance(value, _PLAIN[hint][0]) and (hint is bool or not isinstance(value, bool))
    return not dataclasses.is_dataclass(hint) or isinstance(value, typing.cast(type, hint))


def _words(hint: Any) -> str:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(_words(choice) for choice in get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a tuple, each of its values {_words(get_args(hint)[0])}"
    return _PLAIN[hint][1] if hint in _PLAIN else f"a {hint.__name__}"


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass of plain values as JSON-ready data."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(kind: type[T], data: Mapping[str, Any]) -> T:
    """Build a config from data, nested ones too; an unknown or missing key is refused by name."""
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise refuse(f"{kind.__name__} key", unknown[0], ", ".join(sorted(fields)))
    missing = [n for n, f in fields.items() if f.default is f.default_factory and n not in data]
    if missing:
        raise refuse(f"{kind.__name__} key {missing[0]}", None, "a value: it has no default")
    hints = typing.get_type_hints(kind)
    return kind(**{name: _typed(hints[name], value) for name, value in data.items()})


def _typed(hint: Any, value: Any) -> Any:
    """JSON's lists as tuples and its objects as the dataclass that the field takes."""
    if isinstance(value, list):
        return tuple(_typed(None, x) for x in value)
    if isinstance(value, Mapping):
        choices = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        for choice in choices:
            if dataclasses.is_dataclass(choice):
                return from_dict(choice, value)  # pyright: ignore[reportArgumentType]
    return value
