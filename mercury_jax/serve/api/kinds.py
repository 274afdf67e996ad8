"""Kinds of what holds values in a request: lists, objects, tables of fields, and choices between kinds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mercury_jax.serve.api.errors import refused
from mercury_jax.serve.api.values import Choice, Flag, Integer, Kind, Number, Only, Schema, Text

__all__ = [
    "REQUIRED", "Anything", "Choice", "Either", "Field", "Flag", "Integer", "Items", "Kind", "Mapped", "Number", "Only",
    "Record", "Schema", "Tagged", "Text",
]  # fmt: skip

REQUIRED: Any = object()


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


ABSENT = (None, False, 0, "", [], {})  # values by which clients say that a field is not used


@dataclass(frozen=True)
class Record:
    """A JSON object of known fields; others are left out, but for those in `never`, which are refused by name.

    never: fields whose loss a client would not notice, by name, with what to use instead; ABSENT values are fine.
    """

    fields: tuple[Field, ...]
    never: Mapping[str, str] = field(default_factory=dict)

    def fits(self, value: Any) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, at: str) -> dict[str, Any]:
        if not self.fits(value):
            raise refused(at or "body", value, self.allowed())
        prefix = f"{at}." if at else ""
        for name, instead in self.never.items():
            if value.get(name) not in ABSENT:
                raise refused(prefix + name, value[name], f"none: this server has no such field. {instead}")
        return {f.name: f.read(value, prefix) for f in self.fields}

    def schema(self) -> Schema:
        required = [f.name for f in self.fields if f.default is REQUIRED]
        out: Schema = {"type": "object", "properties": {f.name: f.schema() for f in self.fields}}
        for name, instead in self.never.items():
            out["properties"][name] = {"enum": list(ABSENT), "description": f"Refused. {instead}"}
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
