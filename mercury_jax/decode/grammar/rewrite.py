"""Keywords of JSON Schema that llguidance lacks, written with those that it has.

llguidance intersects schemas (`allOf`) and chooses between them (`anyOf`), but has no complement. With the complement
of a schema, `Rewriter.negated`, the others follow:

    not S                       the complement of S
    if A then B else C          anyOf [A and B, not A and C]
    oneOf [A, B]                anyOf [A and not B, B and not A]
    dependentRequired a: [b]    anyOf [no a, a and b]

Where a keyword has no such form, a schema that more values satisfy stands for it, and `Rewriter.loose` is set: the
grammar enforces a part, and the finished answer is validated (`validation.py`). Two keywords are narrowed instead:
the items that `contains` demands stand next to each other, after at most MOST_BEFORE others; and of the options of an
`anyOf` beside `unevaluatedProperties` one evaluates all properties.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from mercury_jax.decode.grammar.shortest import resolved

MOST_BEFORE = 7  # items before the first one that `contains` demands
MOST_OPTIONS = 64  # schemas or values that one keyword becomes
MOST_NEGATED = 4_000  # schemas whose complement is taken, in one schema
MOST_TEXTS = 2_048  # characters of the pattern of all texts but some constants
MOST_COUNT = 1_024  # items, characters or properties that a complement demands
_MOST_DEPTH = 24  # of references and schemas, where these are compared

_TYPES = frozenset(("string", "number", "object", "array", "null", "boolean"))
_NOTES = frozenset(
    (
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
    )
)
_REPLACED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "oneOf", "dependencies",
    "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
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
_CONDITIONS = ("anyOf", "oneOf", "if", "dependentSchemas")
Negated: TypeAlias = Callable[[str, Any], Any]  # (keyword, schema inside it) -> the complement, rewritten


class Rewriter:
    """Rewrites the keywords of one whole schema.

    Attributes:
        loose: Whether some rewritten schema allows values that the user's does not.
    """

    def __init__(self, root: Any, exact: bool = True):
        """`exact` False: what needs a complement or a longer schema is left to the check."""
        self.root, self.exact, self.loose, self._left = root, exact, False, MOST_NEGATED
        dialect = str(root.get("$schema", "")) if isinstance(root, Mapping) else ""
        old = re.search(r"draft-0|2019-09", dialect)
        self.first, self.rest = ("items", "additionalItems") if old else ("prefixItems", "items")

    def keywords(self, raw: Mapping[str, Any], new: dict[str, Any], negated: Negated) -> dict[str, Any]:
        """Replaces the keywords of one schema; `new` is the user's `raw` with rewritten schemas inside."""
        close = lambda *applied: True
        for key in ("unevaluatedProperties", "unevaluatedItems"):
            if key in raw:
                close = self._closing(raw, new[key], key, close)
        conditions = [key for key in _CONDITIONS if key in raw]
        parts: list[Any] = [] if len(conditions) == 1 else [close(*(raw[key] for key in conditions))]
        new = dict(new)
        if "anyOf" in raw:
            new["anyOf"] = [every(s, close(r)) for r, s in zip(raw["anyOf"], new["anyOf"], strict=True)]
        if "oneOf" in raw:
            options = self._exclusive(raw["oneOf"], new["oneOf"], negated)
            parts.append({"anyOf": [every(s, close(r)) for r, s in zip(raw["oneOf"], options, strict=True)]})
        if "not" in raw:
            parts.append(negated("not", raw["not"]))
        if "if" in raw and not self.exact:
            self.loose = True
        elif "if" in raw:
            then, other = (every(new.get(key, True), close(raw.get(key, True))) for key in ("then", "else"))
            then = every(then, close(raw["if"], raw.get("then", True)))
            parts.append({"anyOf": [every(new["if"], then), every(negated("if", raw["if"]), other)]})
        for name, names, schema in _dependencies(raw, new):
            if not self.exact:
                self.loose = True
                break
            there = every({"required": list(dict.fromkeys((name, *names)))}, schema)
            parts.append({"anyOf": [{"properties": {name: False}}, there]})
        if "contains" in raw:
            parts.append(self._containing(raw, new, negated))
        if raw.get("uniqueItems"):
            new = self._distinct(new)
        if "minProperties" in raw or "maxProperties" in raw:
            new, options = self._counted(new)
            parts.append(options)
        if isinstance(step := new.get("multipleOf"), float) and step < 2**53 and math.frexp(step)[0] != 0.5:
            self.loose |= step != int(step)  # validators round multiples of other fractions
        new = {key: value for key, value in new.items() if key not in _REPLACED}
        parts = [part for part in parts if part is not True]
        return {**new, "allOf": [*new.get("allOf", ()), *parts]} if parts else new

    def unchecked(self, schema: Any = True) -> Any:
        """Leaves a keyword to the check of the finished answer; `schema` stands for it."""
        self.loose = True
        return schema

    def _exclusive(self, raw: Sequence[Any], new: Sequence[Any], negated: Negated) -> list[Any]:
        """The options of `oneOf`, each without the others that may hold at the same time."""
        made = []
        for i, option in enumerate(new):
            others = [other for k, other in enumerate(raw) if k != i and not self.disjoint(raw[i], other)]
            if len(raw) > MOST_OPTIONS // 4 or not self.exact:
                others = self.unchecked([]) if others else []
            made.append(every(option, *(negated("oneOf", other) for other in others)))
        return made

    def _containing(self, raw: Mapping[str, Any], new: Mapping[str, Any], negated: Negated) -> Any:
        """Lists whose matching items stand next to each other, after at most MOST_BEFORE others."""
        least, most = int(raw.get("minContains", 1)), raw.get("maxContains")
        if not least and most is None:
            return True
        # With a largest number of matches, no other item matches.
        other = True if most is None else negated("contains", raw["contains"])
        counts = [least] if most is None else range(least, min(int(most), least + 3) + 1)
        room = min(int(raw.get("maxItems", MOST_OPTIONS)), MOST_OPTIONS)
        shapes = [
            self._list([other] * before + [new["contains"]] * count, other)
            for count in counts
            for before in range(MOST_BEFORE + 1 if count else 1)
            if before + count <= room
        ]
        return {"anyOf": shapes} if shapes else {"type": sorted(_TYPES - {"array"})}

    def _list(self, first: Sequence[Any], rest: Any) -> dict[str, Any]:
        """Lists of at least these first items; and all values of other types."""
        return (
            {self.first: list(first), "minItems": len(first), self.rest: rest} if first else {"items": rest}
        )

    def _distinct(self, new: dict[str, Any]) -> dict[str, Any]:
        """Lists without equal items: enumerated where that is a short list, else with as many items as differ."""
        items = new.get("items")
        plain = isinstance(items, Mapping) and items.keys() <= {"enum", "type", *_NOTES} and "enum" in items
        if new.get("maxItems", 2) < 2 or not plain:
            return new if new.get("maxItems", 2) < 2 else self.unchecked(new)
        values = {canonical(v): v for v in items["enum"] if kind(v) in kinds_of(items)}
        least, most = new.get("minItems", 0), min(len(values), new.get("maxItems", len(values)))
        count = sum(math.perm(len(values), size) for size in range(least, most + 1))
        if (
            count > MOST_OPTIONS
            or not self.exact
            or not new.keys() <= {"type", "items", "minItems", "maxItems", "uniqueItems", *_NOTES}
        ):
            return self.unchecked({**new, "maxItems": most})
        sizes = range(least, most + 1)
        lists = [list(some) for size in sizes for some in itertools.permutations(values.values(), size)]
        others = [{"type": name} for name in sorted(kinds_of(new) - {"array"})]
        return {key: value for key, value in new.items() if key in _NOTES} | {
            "anyOf": [{"enum": lists}, *others]
        }

    def _counted(self, new: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """`minProperties` as options of which properties are there; llguidance counts where none are optional."""
        names, needed = [*new.get("properties", {})], new.get("required", [])
        free = [name for name in names if name not in needed and new["properties"][name] is not False]
        least = int(new.get("minProperties", 0)) - len(set(needed))
        most = int(new.get("maxProperties", len(free) + len(set(needed)))) - len(set(needed))
        if not free and least <= 1:
            return new, True
        kept = {key: value for key, value in new.items() if key not in ("minProperties", "maxProperties")}
        closed = new.get("additionalProperties") is False and not new.get("patternProperties")
        if least <= 0 and (most >= len(free) and closed):
            return kept, True
        bounded = "maxProperties" in new and not (most >= len(free) and closed)
        sizes = range(max(least, 0), min(most, len(free)) + 1) if bounded else [max(least, 0)]
        if (
            sum(math.comb(len(free), size) for size in sizes) > MOST_OPTIONS
            or not self.exact
            or not (closed or least == 1)
            or (bounded and not closed)
        ):
            return kept, self.unchecked()
        options: list[Any] = [{"type": sorted(_TYPES - {"object"})}]
        for there in (some for size in sizes for some in itertools.combinations(free, size)):
            absent = [name for name in free if name not in there] if bounded else []
            options.append({"required": list(there), "properties": dict.fromkeys(absent, False)})
        if not closed:  # none of the listed ones, but another
            options.append({"properties": dict.fromkeys(free, False), "minProperties": len(set(needed)) + 1})
        return kept, {"anyOf": options}

    def _closing(self, raw: Mapping[str, Any], rest: Any, key: str, before: Any) -> Any:
        """Makes, of schemas that apply in place, the schema of what none of them evaluates."""
        own = self._evaluated({k: v for k, v in raw.items() if k not in _CONDITIONS}, 0)
        conditions = [k for k in _CONDITIONS if k in raw]
        self.loose |= len(conditions) > 1 or "dependentSchemas" in raw

        def close(*applied: Any) -> Any:
            seen = own
            for schema in applied:  # of a keyword with several schemas, whatever one of them evaluates
                for inner in schema if isinstance(schema, list | tuple) else [schema]:
                    seen = seen.joined(self._evaluated(inner, 0))
            earlier = before(*applied)
            if key == "unevaluatedItems":
                first = {self.first: [True] * seen.items, self.rest: rest} if seen.items else {"items": rest}
                return earlier if seen.all_items else every(earlier, first)
            named = {"properties": dict.fromkeys(seen.names, True), "additionalProperties": rest}
            named |= {"patternProperties": dict.fromkeys(seen.patterns, True)} if seen.patterns else {}
            return earlier if seen.all_names else every(earlier, named)

        return close

    def _evaluated(self, schema: Any, depth: int) -> Evaluated:
        """What a schema evaluates wherever it holds, with references and `allOf`; the rest is left to the check."""
        seen = Evaluated()
        if not isinstance(schema, Mapping) or depth > _MOST_DEPTH:
            self.loose |= isinstance(schema, Mapping)
            return seen
        first = schema.get("prefixItems", ())
        if isinstance(items := schema.get("items"), list | tuple):
            first, items = items, schema.get("additionalItems")
        seen = Evaluated(
            tuple(schema.get("properties", ())), tuple(schema.get("patternProperties", ())),
            "additionalProperties" in schema, len(first), items is not None,
        )  # fmt: skip
        applied = [resolved(self.root, schema["$ref"])] if "$ref" in schema else []
        for inner in (*applied, *schema.get("allOf", ())):
            seen = seen.joined(self._evaluated(inner, depth + 1))
        self.loose |= any(key in schema for key in (*_CONDITIONS, "contains"))
        return seen

    # --- complements

    def negated(self, schema: Any, depth: int = 0) -> Any:
        """Returns a schema of all values that do not satisfy a schema of the user, and perhaps of others."""
        if isinstance(schema, bool):
            return not schema
        self._left -= 1
        if not isinstance(schema, Mapping) or depth > _MOST_DEPTH or self._left < 0 or not self.exact:
            return self.unchecked()
        ways = list[Any]()
        for key, value in schema.items():
            idle = value is (key != "uniqueItems") and key.endswith(("Items", "Properties"))
            if key not in _NOTES and key not in ("then", "else") and not idle:
                ways += self._ways(schema, key, value, depth + 1)
        ways = [way for way in ways if way is not False]
        return True if True in ways else either(ways)

    def _ways(self, schema: Mapping[str, Any], key: str, value: Any, depth: int) -> Iterable[Any]:
        """Schemas of the values that do not satisfy one keyword."""
        no = lambda inner: self.negated(inner, depth)
        if key in _BOUNDS:
            applies, bound, more = _BOUNDS[key]
            if applies != "number" and value + more > MOST_COUNT:
                return [self.unchecked({"type": applies})]
            return (
                [{"type": applies, bound: value + more}] if value + more >= 0 or applies == "number" else []
            )
        match key:
            case "type":
                types = {value} if isinstance(value, str) else set(value)
                left = _TYPES - types
                # Numbers that are not whole have no schema.
                whole = "integer" in types and "number" in left
                return (
                    [self.unchecked({"type": sorted(left)}) if whole else {"type": sorted(left)}]
                    if left
                    else []
                )
            case "const" | "enum":
                return self._other_values([value] if key == "const" else value, kinds_of(schema))
            case "required":
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties":
                inner = {name: no(s) for name, s in value.items()}
                return [
                    {"type": "object", "required": [name], "properties": {name: s}}
                    for name, s in inner.items()
                    if s is not False
                ]
            case "items" if not isinstance(value, list | tuple):
                before = len(schema.get("prefixItems", ()))
                shapes = [
                    self._list([True] * n + [no(value)], True)
                    for n in range(before, before + MOST_BEFORE + 1)
                ]
                return [{"type": "array", **shape} for shape in shapes]
            case "items" | "prefixItems":
                return [
                    {"type": "array", **self._list([True] * n + [no(s)], True)} for n, s in enumerate(value)
                ]
            case "not":
                return [value]
            case "allOf":
                return [no(inner) for inner in value]
            case "anyOf":
                return [every(*(no(inner) for inner in value))]
            case "oneOf" if len(value) <= 4:
                both = [pair for pair in itertools.combinations(value, 2) if not self.disjoint(*pair)]
                return [every(*(no(inner) for inner in value)), *(every(*pair) for pair in both)]
            case "if":
                then, other = (no(schema.get(name, True)) for name in ("then", "else"))
                return [every(value, then), every(no(value), other)]
            case "dependentRequired":
                return [
                    {"type": "object", "required": [name], "properties": {other: False}}
                    for name, names in value.items()
                    for other in names
                ]
            case "dependentSchemas":
                return [every({"type": "object", "required": [name]}, no(s)) for name, s in value.items()]
            case "contains" if "minContains" not in schema and "maxContains" not in schema:
                return [{"type": "array", "items": no(value)}]
            case "$ref" if not schema.keys() - {key, *_NOTES}:
                target = resolved(self.root, value)
                return [self.unchecked() if target is None else no(target)]
            case "pattern" if plain := re.fullmatch(r"\^\(?([\w -]+(?:\|[\w -]+)*)\)?\$", value):
                if "|" not in plain[1] or value[1] == "(":
                    return self._other_values(plain[1].split("|"), frozenset(("string",)))
        about = {"pattern": "string", "format": "string", "multipleOf": "number", "uniqueItems": "array"}
        objects = ("Properties", "dependencies", "propertyNames")
        if key in about or key.endswith(objects):
            return [self.unchecked({"type": about.get(key, "object")})]
        return (
            [self.unchecked()] if key in ("$ref", "oneOf", "contains", *_REPLACED, "additionalItems") else []
        )

    def _other_values(self, values: Sequence[Any], types: frozenset[str]) -> list[Any]:
        """Schemas of all values of some types but these."""
        of = lambda name: [v for v in values if kind(v) == name]
        ways: list[Any] = [{"type": name} for name in sorted(types) if not of(name)]
        if "string" in types and (texts := of("string")):
            pattern = other_texts(texts)
            fits = len(pattern) <= MOST_TEXTS
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
        if not (isinstance(a, Mapping) and isinstance(b, Mapping)) or depth > _MOST_DEPTH:
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
        values = [_constants(s) for s in (a, b)]
        if all(v is not None for v in values) and not {*map(canonical, values[0])} & {
            *map(canonical, values[1])
        }:
            return True
        if types == {"object"}:
            return any(self._apart(one, other, depth) for one, other in ((a, b), (b, a)))
        if types == {"number"}:
            return any(
                one.get("maximum", one.get("exclusiveMaximum", math.inf))
                < other.get("minimum", other.get("exclusiveMinimum", -math.inf))
                for one, other in ((a, b), (b, a))
            )
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


class Evaluated(NamedTuple):
    """What a schema evaluates: names and patterns of properties, or all; the number of first items, or all."""

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    all_names: bool = False
    items: int = 0
    all_items: bool = False

    def joined(self, other: Evaluated) -> Evaluated:
        return Evaluated(
            self.names + other.names, self.patterns + other.patterns, self.all_names or other.all_names,
            max(self.items, other.items), self.all_items or other.all_items,
        )  # fmt: skip


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


class LookAhead(NamedTuple):
    """A pattern in parts without look-around: a text matches `rest` and all of `present`, and none of `absent`."""

    rest: str
    present: list[str]
    absent: list[str]


def split_look_ahead(pattern: str) -> LookAhead | None:
    """Splits a pattern that looks ahead at its beginning only; None for any other, also one without look-around."""
    present, absent, rest = list[str](), list[str](), pattern
    if without := re.fullmatch(r"\^\(\(\?!([^()]*|\([^()]*\))\)\.\)([*+])\$", pattern):  # ^((?!X).)*$
        return LookAhead(f"^.{without[2]}$", [], [without[1]])
    while ahead := re.match(r"\^?\(\?([=!])", rest):
        depth, inside, at = 1, False, ahead.end()
        while at < len(rest) and depth:  # to the parenthesis that closes this one
            inside = rest[at] == "[" or (inside and rest[at] != "]")
            depth += 0 if inside else {"(": 1, ")": -1}.get(rest[at], 0)
            at += 2 if rest[at] == "\\" else 1
        body = rest[ahead.end() : at - 1]
        (present if ahead[1] == "=" else absent).append(f"^(?:{body.removeprefix('^')})")
        rest = "^" + rest[at:].removeprefix("^")
    anchored = pattern.startswith("^") and (present or absent)
    parts = (rest, *present, *absent)
    return LookAhead(rest, present, absent) if anchored and not any(map(_LOOKS.search, parts)) else None


_LOOKS = re.compile(r"\(\?<?[=!]")


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
    values = _constants(schema)
    return (types or _TYPES) & (_TYPES if values is None else frozenset(map(kind, values)))


def canonical(value: Any) -> str:
    """The same text for values that JSON Schema calls equal."""
    if isinstance(value, float) and value == int(value):
        value = int(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(canonical, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{json.dumps(key)}:{canonical(value[key])}' for key in sorted(value))}}}"
    return json.dumps(value)


def _constants(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _dependencies(raw: Mapping[str, Any], new: Mapping[str, Any]) -> Iterable[tuple[str, Sequence[str], Any]]:
    """(property, properties that it needs, schema that it needs) of each dependency."""
    for name, names in raw.get("dependentRequired", {}).items():
        yield name, names, True
    for name, value in {**new.get("dependentSchemas", {}), **new.get("dependencies", {})}.items():
        yield (name, value, True) if isinstance(value, list | tuple) else (name, (), value)
