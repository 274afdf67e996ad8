"""The shortest value of a JSON Schema, as a fixpoint over the schema.

The shortest text of a schema depends on the shortest texts of the schemas that a value must contain. Starting from "no
text is known", each round computes all of them from those of the round before, until none gets shorter (Knuth, "A
generalization of Dijkstra's algorithm", 1977). So a recursive schema is as easy as any other, in whatever order its
properties and options are listed. A schema without a text at the end has no value: each one would contain another.

Patterns, formats and bounds of numbers are guessed, so a text must be verified (`grammar.py` does). That there is no
value is certain: only the structure decides it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

MOST_SCHEMAS = 20_000  # schemas and combinations of schemas
MOST_ROUNDS = 200
MOST_SECONDS = 1.0
MOST_TEXT = 1 << 18  # characters of a value
MOST_TAILS = 48
_MOST_NESTED = 40  # schemas inside one another that are followed at once

_TYPES = ("number", "string", "object", "array", "null", "boolean")
_APPLIED = ("$ref", "anyOf", "oneOf", "allOf")
_NOTES = ("$defs", "definitions", "$schema", "$id", "title", "description", "default", "examples", "$comment")
_FORMATS = {
    "date": "2000-01-01",
    "time": "00:00:00Z",
    "date-time": "2000-01-01T00:00:00Z",
    "duration": "P1D",
    "email": "a@a",
    "hostname": "a",
    "ipv4": "1.1.1.1",
    "ipv6": "::",
    "uuid": "00000000-0000-0000-0000-000000000000",
    "uri": "a:",
}


class Shortest(NamedTuple):
    """What a value may be.

    Attributes:
        text: A short value. None: none was found.
        none: Whether it is certain that there is no value.
        place: Keys of the innermost schema that has no value.
        tails: Ends of objects from a required property on, where the schema refers to itself.
    """

    text: str | None
    none: bool = False
    place: tuple[str | int, ...] = ()
    tails: tuple[str, ...] = ()


class _Limit(Exception):
    """A bound of the search was exceeded."""


def shortest_value(schema: Any, match: Callable[[str], str | None]) -> Shortest:
    """Finds a short value of a schema.

    Args:
        schema: A schema of `spec.check_schema`.
    """
    search = _Search(schema, match)
    try:
        return search.run()
    except (_Limit, RecursionError, AttributeError, TypeError, ValueError):
        # A reference may lead to what is no schema; the compiler of the grammar refuses it.
        return Shortest(None)


def resolved(root: Any, ref: str) -> Any:
    """Follows a reference inside of a schema."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    for part in unquote(ref.lstrip("#")).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        try:
            root = root[int(part)] if isinstance(root, list | tuple) else root[part]
        except (LookupError, TypeError, ValueError):
            return None
    return root


class _Search:
    def __init__(self, root: Any, match: Callable[[str], str | None]):
        self.root, self.match = root, match
        # References inside of a schema with an address of its own mean that schema.
        self.single = not any(
            _values(part, "$id") for part in (root.values() if isinstance(root, Mapping) else ())
        )
        self.best: dict[int, str] = {}
        self.made: dict[tuple[Any, ...], Any] = {}  # combinations of schemas; holding them keeps their ids
        self.equal: dict[str, Any] = {}
        self.seen: set[int] = set()  # schemas of this round
        self.objects: dict[int, list[str]] = {}  # members of the shortest value of each object
        self.changed, self.depth, self.until = True, 0, time.monotonic() + MOST_SECONDS
        self.cut: list[Any] = []  # schemas that were too deep to follow

    def run(self) -> Shortest:
        refs = list(dict.fromkeys(_values(self.root, "$ref")))
        targets = [self.root, *map(self.target, refs)]
        for _ in range(MOST_ROUNDS):
            self.changed, self.seen = False, set()
            text, *_ = [self.text_of(target) for target in targets]
            while self.cut:
                self.text_of(self.cut.pop())
            if not self.changed:
                place = self.empty(self.root) if text is None else ()
                return Shortest(text, text is None, place, self.tails() if refs else ())
        return Shortest(text)

    def empty(self, schema: Any) -> tuple[str | int, ...]:
        """Where a schema without a value requires one that has none."""
        inner: dict[tuple[str | int, ...], Any] = {}
        if not isinstance(schema, bool):
            needed = schema.get("properties", {}).keys() & schema.get("required", ())
            inner |= {("properties", name): schema["properties"][name] for name in needed}
            inner |= {("allOf", i): part for i, part in enumerate(schema.get("allOf", ()))}
            inner |= {("items",): schema["items"]} if isinstance(schema.get("items"), Mapping) else {}
        for keys, part in inner.items():
            self.seen = set()
            if self.text_of(part) is None:
                return (*keys, *self.empty(part))
        return ()

    def target(self, ref: str) -> Any:
        """The schema at a reference; true where this does not know."""
        found = resolved(self.root, ref) if self.single else None
        return True if found is None else found

    def tails(self) -> tuple[str, ...]:
        ends = {",".join(members[i:]) + "}" for members in self.objects.values() for i in range(len(members))}
        # A key's quotation mark may be forced, and the text then goes on after it.
        return tuple(way for end in sorted(ends, key=len)[:MOST_TAILS] for way in (end, end[1:], "," + end))

    def text_of(self, schema: Any) -> str | None:
        """The shortest text so far; computed once in a round."""
        if isinstance(schema, bool):
            return "0" if schema else None
        at = id(schema)
        if self.depth > _MOST_NESTED:
            self.cut.append(schema)
        elif at not in self.seen:
            self.seen.add(at)
            if len(self.seen) > MOST_SCHEMAS or time.monotonic() > self.until:
                raise _Limit
            self.depth += 1
            text = self.computed(schema)
            self.depth -= 1
            if text is not None and (at not in self.best or len(text) < len(self.best[at])):
                if len(text) > MOST_TEXT:
                    raise _Limit
                self.best[at], self.changed = text, True
        return self.best.get(at)

    def computed(self, schema: Mapping[str, Any]) -> str | None:
        """The text of a schema from those of the schemas that it contains."""
        key = next((key for key in _APPLIED if key in schema), None)
        if key is not None:
            rest = self.kept(
                ("rest", id(schema)), lambda: {k: v for k, v in schema.items() if k not in (key, *_NOTES)}
            )
            if key == "$ref":
                return self.text_of(self.both(self.target(schema[key]), rest))
            if key == "allOf":
                for part in schema[key]:
                    rest = self.both(rest, part)
                return self.text_of(rest)
            return _least(self.text_of(self.both(option, rest)) for option in schema[key])
        types = schema.get("type", _TYPES)
        types = [types] if isinstance(types, str) else types
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            values = [v for v in values if any(_is(v, t) for t in types)]
            values = values if "const" not in schema else self.shared(values, schema.get("enum", values))
            return _least(map(_dumped, values))
        make = {"object": self.object, "array": self.array, "string": self.string, "number": _number,
                "integer": _number, "null": lambda _: "null", "boolean": lambda _: "true"}  # fmt: skip
        return _least(make[t](schema) for t in types if t in make)

    def object(self, schema: Mapping[str, Any]) -> str | None:
        properties, extra = schema.get("properties", {}), schema.get("additionalProperties", True)
        wanted = set(schema.get("required", ()))
        missing = int(schema.get("minProperties", 0)) - len(wanted)
        if missing > 0:
            patterns = [self.match(pattern) for pattern in schema.get("patternProperties", {})]
            names = [n for n in (*properties, *patterns) if n is not None and n not in wanted]
            names += [] if extra is False else [n for n in map(str, range(missing)) if n not in names]
            known = {n: text for n in names if (text := self.text_of(self.property(schema, n))) is not None}
            wanted |= set(sorted(known, key=lambda n: len(n) + len(known[n]))[:missing])
        members: list[str] = []
        # Required names that are no properties follow in the order of `required`.
        for name in (
            n for n in dict.fromkeys((*properties, *schema.get("required", ()), *wanted)) if n in wanted
        ):
            text = self.text_of(self.property(schema, name))
            if text is None:
                return None
            members.append(f"{_dumped(name)}:{text}")
        self.objects[id(schema)] = members
        return "{" + ",".join(members) + "}"

    def property(self, schema: Mapping[str, Any], name: str) -> Any:
        """The schema of a property; patterns are not tried, since Python's matching has no bound of time."""
        if name in schema.get("properties", {}):
            return schema["properties"][name]
        patterns, extra = (
            list(schema.get("patternProperties", {}).values()),
            schema.get("additionalProperties", True),
        )
        # Where the pattern does not match and no other name is allowed, there is no value either.
        return extra if not patterns else patterns[0] if len(patterns) == 1 and extra is False else True

    def array(self, schema: Mapping[str, Any]) -> str | None:
        items, first = schema.get("items", True), schema.get("prefixItems", ())
        if isinstance(items, list | tuple):  # before draft 2020-12
            items, first = schema.get("additionalItems", True), items
        parts: list[str] = []
        for i in range(int(schema.get("minItems", 0))):
            text = self.text_of(first[i] if i < len(first) else items)
            if text is None:
                return None
            parts.append(text)
        return "[" + ",".join(parts) + "]"

    def string(self, schema: Mapping[str, Any]) -> str:
        text = _FORMATS.get(schema.get("format", ""), "")
        text = text or (self.match(schema["pattern"]) if "pattern" in schema else None) or ""
        return _dumped(text + "a" * (int(schema.get("minLength", 0)) - len(text)))

    def kept(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self.made:
            if len(self.made) > MOST_SCHEMAS or time.monotonic() > self.until:
                raise _Limit
            made = make()
            # Equal combinations are one schema, so that a schema that refers to itself has finitely many.
            self.made[key] = self.equal.setdefault(_dumped(made), made)
        return self.made[key]

    def shared(self, values: Iterable[Any], others: Iterable[Any], both: bool = True) -> list[Any]:
        """The values that the others contain, or those that they do not contain, in their order."""
        plain = lambda value: value is None or isinstance(value, str | int | float)
        known, rest = {v for v in others if plain(v)}, [v for v in others if not plain(v)]
        kept = []
        for value in values:
            if time.monotonic() > self.until:
                raise _Limit
            kept += [value] if (value in (known if plain(value) else rest)) == both else []
        return kept

    def both(self, a: Any, b: Any) -> Any:
        """A schema of the values that satisfy two schemas, as far as a guess needs it; false only where none does."""
        if isinstance(a, bool) or isinstance(b, bool) or not a or not b:
            return False if a is False or b is False else b if a is True or not a else a
        return self.kept(("both", id(a), id(b)), lambda: self.merged(a, b))

    def merged(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> Any:
        made: dict[str, Any] = {**b, **a}
        every = [*a.get("allOf", ()), *self.shared(b.get("allOf", ()), a.get("allOf", ()), False)]
        for key in made.keys() & a.keys() & b.keys():
            x, y = a[key], b[key]
            if x == y:
                continue
            if key == "type":
                x, y = ([t] if isinstance(t, str) else t for t in (x, y))
                types = [t for t in x if t in y or (t == "integer" and "number" in y)]
                made[key] = types + [t for t in y if t == "integer" and t not in x and "number" in x]
            elif key == "properties":
                made[key] = {
                    n: self.both(self.property(a, n), self.property(b, n)) for n in dict.fromkeys((*x, *y))
                }
            elif key == "required":
                made[key] = list(dict.fromkeys((*x, *y)))
            elif key == "patternProperties":
                made[key] = {**x, **y}
            elif key == "enum":
                made[key] = self.shared(x, y)
            elif (
                key in ("items", "additionalProperties")
                and not isinstance(x, list)
                and not isinstance(y, list)
            ):
                made[key] = self.both(x, y)
            elif key.startswith(("min", "exclusiveMin")):
                made[key] = max(x, y)
            elif key.startswith(("max", "exclusiveMax")):
                made[key] = min(x, y)
            elif key in ("$ref", "anyOf", "oneOf"):
                every += [] if {key: y} in every else [{key: y}]
        # A property that only one of the two lists is what the other one allows there.
        if ("properties" in a) != ("properties" in b):
            owner, other = (a, b) if "properties" in a else (b, a)
            made["properties"] = {
                n: self.both(s, self.property(other, n)) for n, s in owner["properties"].items()
            }
        return {**made, "allOf": every} if every else made


def _values(schema: Any, wanted: str) -> list[str]:
    """The texts of a keyword in a schema and all schemas inside it."""
    texts, waiting = [], [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            texts += [value[wanted]] if isinstance(value.get(wanted), str) else []
            waiting += [inner for key, inner in value.items() if key not in ("const", "enum")]
        elif isinstance(value, list | tuple):
            waiting += value
    return texts


def _least(texts: Iterable[str | None]) -> str | None:
    return min((text for text in texts if text is not None), key=len, default=None)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _is(value: Any, kind: str) -> bool:
    """Whether a value is of a type of JSON Schema."""
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and value == int(value))
    return kind == {str: "string", dict: "object"}.get(type(value), "array")


def _number(schema: Mapping[str, Any]) -> str:
    """A short number within the bounds, or 0."""
    least, most = schema.get("minimum", -1e300), schema.get("maximum", 1e300)
    above, below = schema.get("exclusiveMinimum", -1e300), schema.get("exclusiveMaximum", 1e300)
    step = schema.get("multipleOf", 1)
    starts: Sequence[Any] = [1, 0, *(x for x in (least, most, above, below) if abs(x) < 1e300)]
    near = [(x // step + k) * step for x in starts for k in (-1, 0, 1, 2)]
    whole = [int(x) if x == int(x) else x for x in (*starts, *near, (least + most) / 2, (above + below) / 2)]
    whole = [x for x in whole if least <= x <= most and above < x < below]
    if schema.get("type") == "integer" or "multipleOf" in schema:
        whole = [x for x in whole if x % step == 0]
    return min((_dumped(x) for x in whole), key=len, default="0")
