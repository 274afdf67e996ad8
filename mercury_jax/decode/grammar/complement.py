"""The complement of a JSON Schema, and whether two schemas have no value in common.

llguidance has neither. A complement is a choice (`anyOf`) of schemas, one or more for each keyword: what has another
type, lacks a required property, lies beyond a bound, or differs from all constants. Where a keyword's complement has no
schema, a larger one stands for it and `Complements.loose` is set.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mercury_jax.decode.grammar.shortest import resolved

MOST_BEFORE = 7  # items before the first one that a list must hold
MOST_NEGATED = 1_000  # schemas whose complement is taken, or that are compared, in one schema
MOST_PATTERN = 2_048  # characters of the pattern of all texts but some constants
MOST_COUNT = 1_024  # items, characters or properties that a complement demands
MOST_DEPTH = 24  # of references and schemas

TYPES = frozenset(("string", "number", "object", "array", "null", "boolean"))
NOTES = frozenset(
    [
        "$schema",
        "$id",
        "id",
        "$defs",
        "definitions",
        "title",
        "description",
        "default",
        "examples",
        "$comment",
        "then",
        "else",
    ]
)
# For each bound: the type it applies to, the bound of the complement, and what is added to it.
_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}


class Complements:
    """Complements of the schemas inside one schema.

    Attributes:
        root: The whole schema, for references.
        exact: Whether complements are made; False: that of any schema allows all values.
        loose: Whether some complement allows values that it should not.
    """

    def __init__(self, root: Any, exact: bool = True):
        self.root, self.exact, self.loose, self._left = root, exact, False, MOST_NEGATED
        dialect = str(root.get("$schema", "")) if isinstance(root, Mapping) else ""
        old = re.search(r"draft-0|2019-09", dialect)
        self.first, self.rest = ("items", "additionalItems") if old else ("prefixItems", "items")

    def unchecked(self, schema: Any = True) -> Any:
        """Leaves a keyword to the check of the finished answer; `schema` stands for it."""
        self.loose = True
        return schema

    def listed(self, first: Sequence[Any], rest: Any) -> dict[str, Any]:
        """Lists of at least these first items; and all values of other types."""
        if not first:
            return {"items": rest}
        return {self.first: list(first), "minItems": len(first), self.rest: rest}

    def negated(self, schema: Any, depth: int = 0) -> Any:
        """Returns a schema of all values that do not satisfy a schema of the user, and perhaps of others."""
        if isinstance(schema, bool):
            return not schema
        self._left -= 1
        if not isinstance(schema, Mapping) or depth > MOST_DEPTH or self._left < 0 or not self.exact:
            return self.unchecked()
        ways = list[Any]()
        for key, value in schema.items():
            idle = value is (key != "uniqueItems") and key.endswith(("Items", "Properties"))
            if key not in NOTES and not idle:
                ways += self._ways(schema, key, value, depth + 1)
        ways = [way for way in ways if way is not False]
        return True if True in ways else either(ways)

    def _ways(self, schema: Mapping[str, Any], key: str, value: Any, depth: int) -> Iterable[Any]:
        """Schemas of the values that do not satisfy one keyword."""
        if key in _BOUNDS:
            applies, bound, more = _BOUNDS[key]
            if applies != "number" and value + more > MOST_COUNT:
                return [self.unchecked({"type": applies})]
            return (
                [{"type": applies, bound: value + more}] if value + more >= 0 or applies == "number" else []
            )
        if key == "type":
            types = {value} if isinstance(value, str) else set(value)
            left = TYPES - types
            # Numbers that are not whole have no schema.
            self.loose |= "integer" in types and "number" in left
            return [{"type": sorted(left)}] if left else []
        if key in ("const", "enum"):
            types = kinds_of({"type": schema["type"]}) if "type" in schema else TYPES
            return self._other_values([value] if key == "const" else value, types)
        if key == "pattern" and (plain := re.fullmatch(r"\^(?:\(([\w |-]+)\)|([\w -]+))\$", value)):
            return self._other_values((plain[1] or plain[2]).split("|"), frozenset(("string",)))
        for ways in (self._applied_ways, self._object_ways, self._array_ways):
            if (found := ways(schema, key, value, depth)) is not None:
                return found
        kinds = {"pattern": "string", "format": "string", "multipleOf": "number", "uniqueItems": "array"}
        if key in kinds or key.endswith(("Properties", "propertyNames", "dependencies")):
            return [self.unchecked({"type": kinds.get(key, "object")})]
        unknown = (
            "$ref",
            "oneOf",
            "contains",
            "minContains",
            "maxContains",
            "additionalItems",
            "unevaluatedItems",
        )
        return [self.unchecked()] if key in unknown else []

    def _applied_ways(
        self, schema: Mapping[str, Any], key: str, value: Any, depth: int
    ) -> Iterable[Any] | None:
        """As `_ways`, of keywords that apply schemas to the same value; None for any other."""
        no = lambda inner: self.negated(inner, depth)
        match key:
            case "not":
                return [value]
            case "allOf":
                return map(no, value)
            case "anyOf":
                return [every(*map(no, value))]
            case "oneOf" if len(value) <= 4:
                both = (pair for pair in itertools.combinations(value, 2) if not self.disjoint(*pair))
                return [every(*map(no, value)), *(every(*pair) for pair in both)]
            case "if":
                then, other = (no(schema.get(name, True)) for name in ("then", "else"))
                return [every(value, then), every(no(value), other)]
            case "$ref" if not schema.keys() - {key} - NOTES:
                target = resolved(self.root, str(value))
                return [self.unchecked() if target is None else no(target)]
        return None

    def _object_ways(
        self, schema: Mapping[str, Any], key: str, value: Any, depth: int
    ) -> Iterable[Any] | None:
        """As `_ways`, of keywords about properties."""
        having = lambda name, inner: {"type": "object", "required": [name], "properties": inner}
        match key:
            case "required":
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties":
                inner = {name: self.negated(one, depth) for name, one in value.items()}
                return [having(name, {name: one}) for name, one in inner.items() if one is not False]
            case "dependentRequired":
                return [
                    having(n, {other: False}) for n, others in value.items() for other in others if other != n
                ]
            case "dependentSchemas":
                return [every(having(name, {}), self.negated(one, depth)) for name, one in value.items()]
        return None

    def _array_ways(
        self, schema: Mapping[str, Any], key: str, value: Any, depth: int
    ) -> Iterable[Any] | None:
        """As `_ways`, of keywords about items."""
        tuples = key == "prefixItems" or isinstance(value, list | tuple)
        if key == "contains" and "minContains" not in schema and "maxContains" not in schema:
            return [{"type": "array", "items": self.negated(value, depth)}]
        if key == "items" and not tuples:
            before, other = len(schema.get("prefixItems", ())), self.negated(value, depth)
            shapes = (
                self.listed([True] * n + [other], True) for n in range(before, before + MOST_BEFORE + 1)
            )
        elif key in ("items", "prefixItems"):
            others = (self.negated(one, depth) for one in value)
            shapes = (self.listed([True] * n + [other], True) for n, other in enumerate(others))
        else:
            return None
        return [{"type": "array", **shape} for shape in shapes]

    def _other_values(self, values: Sequence[Any], types: frozenset[str]) -> list[Any]:
        """Schemas of all values of some types but these."""
        of = lambda name: [v for v in values if kind(v) == name]
        ways: list[Any] = [{"type": name} for name in sorted(types) if not of(name)]
        if "string" in types and (texts := of("string")):
            pattern = other_texts(texts)
            fits = len(pattern) <= MOST_PATTERN
            ways.append(
                {"type": "string", "pattern": pattern} if fits else self.unchecked({"type": "string"})
            )
        if "number" in types and (numbers := sorted(set(of("number")))):
            edges = [None, *numbers, None]
            for low, high in itertools.pairwise(edges):
                above = {} if low is None else {"exclusiveMinimum": low}
                ways.append(
                    {"type": "number", **above, **({} if high is None else {"exclusiveMaximum": high})}
                )
        if "boolean" in types and (said := of("boolean")):
            ways += [{"const": other} for other in (True, False) if other not in said]
        lists = [name for name in ("array", "object") if name in types and of(name)]
        return ways + [self.unchecked({"type": name}) for name in lists]

    # --- comparison

    def disjoint(self, a: Any, b: Any, depth: int = 0) -> bool:
        """Whether it is certain that no value satisfies two schemas of the user."""
        if a is False or b is False:
            return True
        if not (isinstance(a, Mapping) and isinstance(b, Mapping)) or depth > MOST_DEPTH:
            return False
        self._left -= 1
        if self._left < 0:
            return False
        for one, other in ((a, b), (b, a)):
            target = resolved(self.root, one["$ref"]) if isinstance(one.get("$ref"), str) else None
            for inner in (*([] if target is None else [target]), *one.get("allOf", ())):
                if self.disjoint(inner, other, depth + 1):
                    return True
            for key in ("anyOf", "oneOf"):
                if key in one and all(self.disjoint(inner, other, depth + 1) for inner in one[key]):
                    return True
        types = kinds_of(a) & kinds_of(b)
        if not types:
            return True
        one, other = constants(a), constants(b)
        if one is not None and other is not None and not {*map(canonical, one)} & {*map(canonical, other)}:
            return True
        if types == {"object"}:
            return any(self._apart(one, other, depth) for one, other in ((a, b), (b, a)))
        if types == {"number"}:
            most = lambda schema: schema.get("maximum", schema.get("exclusiveMaximum", math.inf))
            least = lambda schema: schema.get("minimum", schema.get("exclusiveMinimum", -math.inf))
            return most(a) < least(b) or most(b) < least(a)
        return False

    def _apart(self, a: Mapping[str, Any], b: Mapping[str, Any], depth: int) -> bool:
        """Whether a property that `a` requires cannot be the same in an object of `b`."""
        closed = b.get("additionalProperties") is False and "patternProperties" not in b
        for name in a.get("required", ()):
            own, other = (
                a.get("properties", {}).get(name, True),
                b.get("properties", {}).get(name, not closed),
            )
            if self.disjoint(own, other, depth + 1):
                return True
        return False


def every(*schemas: Any) -> Any:
    """A schema of the values that satisfy all of these."""
    parts = [schema for schema in schemas if schema is not True]
    if any(part is False for part in parts):
        return False
    return True if not parts else parts[0] if len(parts) == 1 else {"allOf": parts}


def either(schemas: Sequence[Any]) -> Any:
    """A schema of the values that satisfy one of these."""
    return False if not schemas else schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


def other_texts(texts: Iterable[str]) -> str:
    """Returns a regular expression of all texts but these, without look-around.

    A text differs from all of them where it ends early, goes on, or has another character: one group per character.
    """

    def behind(rests: list[str]) -> str:
        heads = dict.fromkeys(rest[0] for rest in rests if rest)
        escaped = {
            c: re.sub(r"[!-/:-@[-`{-~]", r"\\\g<0>", c) if c.isprintable() else f"\\x{{{ord(c):x}}}"
            for c in heads
        }
        ways = [f"[^{''.join(escaped.values())}][\\s\\S]*" if heads else "[\\s\\S]+"]
        ways += [escaped[c] + behind([rest[1:] for rest in rests if rest[:1] == c]) for c in heads]
        return f"(?:{'|'.join(ways)})" + ("" if "" in rests else "?")

    return f"^{behind(list(texts))}$"


def kind(value: Any) -> str:
    """The type of a value; whole numbers are numbers."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    kinds = {str: "string", int: "number", float: "number", dict: "object"}
    return kinds.get(type(value), "array")


def kinds_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema allows by its `type`, `const` or `enum`."""
    said = schema.get("type", ())
    types = frozenset("number" if t == "integer" else t for t in ([said] if isinstance(said, str) else said))
    values = constants(schema)
    return (types or TYPES) & (TYPES if values is None else frozenset(map(kind, values)))


def canonical(value: Any) -> str:
    """The same text for values that JSON Schema calls equal."""
    if isinstance(value, float) and value == int(value):
        value = int(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(canonical, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{json.dumps(key)}:{canonical(value[key])}' for key in sorted(value))}}}"
    return json.dumps(value)


def plain_values(schema: Any) -> list[Any] | None:
    """The values of a schema that only lists them; None for any other."""
    if not isinstance(schema, Mapping) or not schema.keys() <= {"const", "enum", "type", *NOTES}:
        return None
    values = constants(schema)
    fits = lambda value: "type" not in schema or kind(value) in kinds_of({"type": schema["type"]})
    return None if values is None or "integer" in str(schema.get("type")) else [v for v in values if fits(v)]


def constants(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """The values that `const` or `enum` allows; None without these."""
    return [schema["const"]] if "const" in schema else schema.get("enum")
