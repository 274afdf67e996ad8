"""Kinds of single values in a request: numbers, texts, flags, choices.

Each reads a JSON value and describes itself as JSON Schema: one object does both, so that what is validated and
what the OpenAPI document says cannot differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mercury_jax.serve.api.errors import refused

Schema = dict[str, Any]


class Kind(Protocol):
    """fits: whether a value has the JSON type. read: the value, or ApiError naming `at`."""

    def fits(self, value: Any) -> bool: ...
    def read(self, value: Any, at: str) -> Any: ...
    def schema(self) -> Schema: ...
    def allowed(self) -> str: ...


@dataclass(frozen=True)
class Integer:
    """A whole number in a range, without some; 5.0 is one, as in JSON Schema, true is none."""

    least: int
    most: int
    without: tuple[int, ...] = ()

    def fits(self, value: Any) -> bool:
        return (isinstance(value, int) and not isinstance(value, bool)) or (
            isinstance(value, float) and value.is_integer()
        )

    def read(self, value: Any, at: str) -> int:
        if not self.fits(value) or not self.least <= value <= self.most or value in self.without:
            raise refused(at, value, self.allowed())
        return int(value)

    def schema(self) -> Schema:
        out: Schema = {"type": "integer", "minimum": self.least, "maximum": self.most}
        return out | ({"not": {"enum": list(self.without)}} if self.without else {})

    def allowed(self) -> str:
        but = f" without {', '.join(map(str, self.without))}" if self.without else ""
        return f"a whole number from {self.least} to {self.most}{but}"


@dataclass(frozen=True)
class Number:
    """A finite number in a range; with `open`, its lower end is left out."""

    least: float
    most: float
    open: bool = False

    def fits(self, value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    def read(self, value: Any, at: str) -> float:
        inside = self.fits(value) and self.least <= value <= self.most and math.isfinite(value)
        if not inside or (self.open and value == self.least):
            raise refused(at, value, self.allowed())
        return float(value)

    def schema(self) -> Schema:
        least = "exclusiveMinimum" if self.open else "minimum"
        return {"type": "number", least: self.least, "maximum": self.most}

    def allowed(self) -> str:
        return f"a number {'above' if self.open else 'from'} {self.least:g} to {self.most:g}"


@dataclass(frozen=True)
class Flag:
    def fits(self, value: Any) -> bool:
        return isinstance(value, bool)

    def read(self, value: Any, at: str) -> bool:
        if not self.fits(value):
            raise refused(at, value, self.allowed())
        return value

    def schema(self) -> Schema:
        return {"type": "boolean"}

    def allowed(self) -> str:
        return "true or false"


@dataclass(frozen=True)
class Text:
    """A text of so many characters, of a pattern if one is given (the whole text matches it)."""

    least: int = 0
    most: int | None = None
    pattern: str = ""

    def fits(self, value: Any) -> bool:
        return isinstance(value, str)

    def read(self, value: Any, at: str) -> str:
        if not self.fits(value) or len(value) < self.least or (self.most and len(value) > self.most):
            raise refused(at, value, self.allowed())
        if self.pattern and not re.fullmatch(self.pattern, value):
            raise refused(at, value, self.allowed())
        return value

    def schema(self) -> Schema:
        out: Schema = {"type": "string"}
        if self.least:
            out["minLength"] = self.least
        if self.most:
            out["maxLength"] = self.most
        return out | ({"pattern": f"^{self.pattern}$"} if self.pattern else {})

    def allowed(self) -> str:
        size = f" of {self.least} to {self.most} characters" if self.most else " of 1 or more characters"
        size = size if self.least or self.most else ""
        return f"a text{size}" + (f" of the form {self.pattern}" if self.pattern else "")


@dataclass(frozen=True)
class Choice:
    """One of some texts; `same` maps further spellings to one of them."""

    names: tuple[str, ...]
    same: Mapping[str, str] = field(default_factory=dict)

    def fits(self, value: Any) -> bool:
        return isinstance(value, str)

    def read(self, value: Any, at: str) -> str:
        if not self.fits(value) or value not in (*self.names, *self.same):
            raise refused(at, value, self.allowed())
        return self.same.get(value, value)

    def schema(self) -> Schema:
        return {"type": "string", "enum": [*self.names, *self.same]}

    def allowed(self) -> str:
        return ", ".join((*self.names, *self.same))


@dataclass(frozen=True)
class Only:
    """One value: what would ask for something that is not offered has no other. 1.0 is 1, true is not."""

    value: str | int | bool

    def fits(self, value: Any) -> bool:
        return _json_type(value) is _json_type(self.value)

    def read(self, value: Any, at: str) -> Any:
        if not self.fits(value) or value != self.value:
            raise refused(at, value, self.allowed())
        return self.value

    def schema(self) -> Schema:
        return {"const": self.value}

    def allowed(self) -> str:
        return str(self.value).lower()


def _json_type(value: Any) -> type:
    """JSON has one type of numbers."""
    return int if isinstance(value, float) else type(value)
