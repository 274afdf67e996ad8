"""Kinds of values in a request: each one reads a JSON value and describes itself as JSON Schema.

One object does both, so that what is validated and what the OpenAPI document says cannot differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from mercury_jax.serve.api.errors import refused

Schema = dict[str, Any]
REQUIRED: Any = object()


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
    """One value: what would ask for something that is not offered has no other."""

    value: str | int | bool

    def fits(self, value: Any) -> bool:
        return type(value) is type(self.value)

    def read(self, value: Any, at: str) -> Any:
        if not self.fits(value) or value != self.value:
            raise refused(at, value, self.allowed())
        return value

    def schema(self) -> Schema:
        return {"const": self.value}

    def allowed(self) -> str:
        return str(self.value).lower()


@dataclass(frozen=True)
class Items:
    """A list of so many values of one kind."""

    kind: Kind
    least: int = 0
    most: int = 1024

    def fits(self, value: Any) -> bool:
        return isinstance(value, list)

    def read(self, value: Any, at: str) -> list[Any]:
        if not self.fits(value) or not self.least <= len(value) <= self.most:
            raise refused(at, value, self.allowed())
        return [self.kind.read(item, f"{at}[{i}]") for i, item in enumerate(value)]

    def schema(self) -> Schema:
        least = {"minItems": self.least} if self.least else {}
        return {"type": "array", "items": self.kind.schema(), "maxItems": self.most} | least

    def allowed(self) -> str:
        return f"a list of {self.least} to {self.most}"


@dataclass(frozen=True)
class Mapped:
    """A JSON object whose keys follow a pattern and whose values are of one kind."""

    pattern: str
    kind: Kind
    most: int

    def fits(self, value: Any) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, at: str) -> dict[str, Any]:
        if not self.fits(value) or len(value) > self.most:
            raise refused(at, value, self.allowed())
        for key in value:
            if not re.fullmatch(self.pattern, key):
                raise refused(f"key of {at}", key, f"the form {self.pattern}")
        return {key: self.kind.read(x, f"{at}.{key}") for key, x in value.items()}

    def schema(self) -> Schema:
        return {
            "type": "object",
            "propertyNames": {"pattern": f"^{self.pattern}$"},
            "additionalProperties": self.kind.schema(),
            "maxProperties": self.most,
        }

    def allowed(self) -> str:
        return f"an object of at most {self.most} entries, its keys of the form {self.pattern}"


@dataclass(frozen=True)
class Anything:
    """Any JSON object, as it is."""

    def fits(self, value: Any) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, at: str) -> dict[str, Any]:
        if not self.fits(value):
            raise refused(at, value, self.allowed())
        return value

    def schema(self) -> Schema:
        return {"type": "object", "additionalProperties": True}

    def allowed(self) -> str:
        return "an object"


class Field(NamedTuple):
    """One line of a table: null means the default, which `REQUIRED` fields lack."""

    name: str
    kind: Kind
    default: Any
    about: str

    def read(self, data: Mapping[str, Any], at: str = "") -> Any:
        value = data.get(self.name)
        if value is not None:
            return self.kind.read(value, at + self.name)
        if self.default is REQUIRED:
            raise refused(at + self.name, None, self.kind.allowed() + " (it has no default)")
        return self.default

    def schema(self) -> Schema:
        kind = self.kind.schema()
        if self.default is REQUIRED:
            return kind | {"description": self.about}
        default = {} if self.default is None else {"default": self.default}
        return {"anyOf": [kind, {"type": "null"}], "description": self.about} | default


@dataclass(frozen=True)
class Record:
    """A JSON object of known fields; others are left out and never refused."""

    fields: tuple[Field, ...]

    def fits(self, value: Any) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, at: str) -> dict[str, Any]:
        if not self.fits(value):
            raise refused(at or "body", value, self.allowed())
        prefix = f"{at}." if at else ""
        return {f.name: f.read(value, prefix) for f in self.fields}

    def schema(self) -> Schema:
        required = [f.name for f in self.fields if f.default is REQUIRED]
        out: Schema = {"type": "object", "properties": {f.name: f.schema() for f in self.fields}}
        return out | ({"required": required} if required else {})

    def allowed(self) -> str:
        return "an object with " + ", ".join(f.name for f in self.fields)


@dataclass(frozen=True)
class Tagged:
    """One of several records, chosen by the text of one field."""

    tag: str
    records: Mapping[str, Record]

    def fits(self, value: Any) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, at: str) -> dict[str, Any]:
        if not self.fits(value):
            raise refused(at, value, self.allowed())
        name = Choice(tuple(self.records)).read(value.get(self.tag), f"{at}.{self.tag}")
        return {self.tag: name} | self.records[name].read(value, at)

    def schema(self) -> Schema:
        return {"oneOf": [self._one(name) for name in self.records]}

    def _one(self, name: str) -> Schema:
        out = self.records[name].schema()
        tag = {self.tag: {"type": "string", "const": name}}
        return out | {"properties": tag | out["properties"], "required": [self.tag, *out.get("required", [])]}

    def allowed(self) -> str:
        return f"an object whose {self.tag} is one of {', '.join(self.records)}"


@dataclass(frozen=True)
class Either:
    """The first of some kinds that has the value's JSON type."""

    kinds: tuple[Kind, ...]

    def fits(self, value: Any) -> bool:
        return any(kind.fits(value) for kind in self.kinds)

    def read(self, value: Any, at: str) -> Any:
        for kind in self.kinds:
            if kind.fits(value):
                return kind.read(value, at)
        raise refused(at, value, self.allowed())

    def schema(self) -> Schema:
        return {"anyOf": [kind.schema() for kind in self.kinds]}

    def allowed(self) -> str:
        return ", or ".join(kind.allowed() for kind in self.kinds)
