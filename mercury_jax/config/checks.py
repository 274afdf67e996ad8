"""The one form of our errors, and configs as JSON-ready data."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

T = TypeVar("T")


def refuse(field: str, value: object, allowed: str) -> ValueError:
    """The one form of our errors: the field, the value, what is allowed."""
    return ValueError(f"{field} is {value!r}; allowed: {allowed}")


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
