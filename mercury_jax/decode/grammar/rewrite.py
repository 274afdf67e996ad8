"""Keywords of JSON Schema that llguidance lacks, written with those that it has.

llguidance intersects schemas (`allOf`) and chooses between them (`anyOf`). With complements (`complement.py`) the other
keywords follow:

    not S                       the complement of S
    if A then B else C          anyOf [A and B, not A and C]
    oneOf [A, B]                anyOf [A and not B, B and not A]
    dependentRequired a: [b]    anyOf [no a, a and b]

Where a keyword has no such form, a schema that more values satisfy stands for it, and `Complements.loose` is set: the
grammar enforces a part, and the finished answer is validated (`validation.py`). One keyword is narrowed instead: the
items that `contains` demands stand next to each other, after at most MOST_BEFORE others.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from mercury_jax.decode.grammar.complement import (
    MOST_BEFORE,
    MOST_DEPTH,
    NOTES,
    TYPES,
    Complements,
    canonical,
    every,
    kind,
    kinds_of,
    plain_values,
)
from mercury_jax.decode.grammar.shortest import resolved

MOST_OPTIONS = 64  # schemas or values that one keyword becomes

_REPLACED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "oneOf", "dependencies",
    "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
Negated: TypeAlias = Callable[[str, Any], Any]  # (keyword, schema inside it) -> the complement, rewritten
Closed: TypeAlias = Callable[
    ..., Any
]  # (schemas that apply in place) -> a schema of what none of them evaluates


def rewritten_keywords(
    complements: Complements, raw: Mapping[str, Any], new: Mapping[str, Any], negated: Negated
) -> dict[str, Any]:
    """Replaces the keywords of one schema.

    Args:
        complements: Of the whole schema.
        raw: The schema as the user wrote it.
        new: The same, with rewritten schemas inside.
        negated: Makes a complement and rewrites it.
    """
    new, parts = dict(new), [_closed(complements, raw, new)]
    if "oneOf" in raw:
        parts.append({"anyOf": _exclusive(complements, raw["oneOf"], new["oneOf"], negated)})
    if "not" in raw:
        parts.append(negated("not", raw["not"]))
    if {"if", "dependencies", "dependentRequired", "dependentSchemas"} & raw.keys() and not complements.exact:
        complements.unchecked()
    elif "if" in raw:
        holds = every(new["if"], new.get("then", True))
        parts.append({"anyOf": [holds, every(negated("if", raw["if"]), new.get("else", True))]})
    if complements.exact:
        for name, names, schema in _dependencies(raw, new):
            there = every({"required": list(dict.fromkeys((name, *names)))}, schema)
            parts.append({"anyOf": [{"properties": {name: False}}, there]})
    if "contains" in raw:
        parts.append(_containing(complements, raw, new, negated))
    if raw.get("uniqueItems"):
        new = _distinct(complements, new)
    if "minProperties" in raw or "maxProperties" in raw:
        new, options = _counted(complements, new)
        parts.append(options)
    if isinstance(step := new.get("multipleOf"), float) and step < 2**53 and math.frexp(step)[0] != 0.5:
        complements.loose |= step != int(step)  # validators round multiples of other fractions
    new = {key: value for key, value in new.items() if key not in _REPLACED}
    parts = [part for part in parts if part is not True]
    return {**new, "allOf": [*new.get("allOf", ()), *parts]} if parts else new


def _exclusive(
    complements: Complements, raw: Sequence[Any], new: Sequence[Any], negated: Negated
) -> list[Any]:
    """The options of `oneOf`, each without the others that may hold at the same time."""
    listed = [plain_values(option) for option in raw]
    if None not in listed:  # llguidance refuses some lists of constants beside bounds
        counts = Counter(text for values in listed for text in {canonical(v) for v in values or ()})
        return [{"enum": [v for v in values or () if counts[canonical(v)] == 1]} for values in listed]
    made = []
    for i, option in enumerate(new):
        others = [one for k, one in enumerate(raw) if k != i and not complements.disjoint(raw[i], one)]
        if others and (len(raw) > MOST_OPTIONS // 4 or not complements.exact):
            others = complements.unchecked([])
        made.append(every(option, *(negated("oneOf", other) for other in others)))
    return made


def _containing(
    complements: Complements, raw: Mapping[str, Any], new: Mapping[str, Any], negated: Negated
) -> Any:
    """Lists whose matching items stand next to each other, after at most MOST_BEFORE others."""
    least, most = int(raw.get("minContains", 1)), raw.get("maxContains")
    if not least and most is None:
        return True
    if least > MOST_OPTIONS or not complements.exact:
        return complements.unchecked()
    # With a largest number of matches, no other item matches.
    other = True if most is None else negated("contains", raw["contains"])
    counts = [least] if most is None else range(least, min(int(most), least + 3) + 1)
    first = raw.get(complements.first, ())
    before = MOST_BEFORE + (len(first) if isinstance(first, list | tuple) else 0)
    shapes = [
        complements.listed([other] * n + [new["contains"]] * count, other)
        for count in counts
        for n in range(before + 1 if count else 1)
        if n + count <= raw.get("maxItems", math.inf)
    ]
    return {"anyOf": shapes} if shapes else {"type": sorted(TYPES - {"array"})}


def _distinct(complements: Complements, new: dict[str, Any]) -> dict[str, Any]:
    """Lists without equal items: enumerated where these are few, else with at most as many items as differ."""
    items = new.get("items")
    if new.get("maxItems", 2) < 2:
        return new
    if not isinstance(items, Mapping) or "enum" not in items or not items.keys() <= {"enum", "type", *NOTES}:
        return complements.unchecked(new)
    values = {canonical(value): value for value in items["enum"] if kind(value) in kinds_of(items)}
    least, most = new.get("minItems", 0), min(len(values), new.get("maxItems", len(values)))
    alone = new.keys() <= {"type", "items", "minItems", "maxItems", "uniqueItems", *NOTES}
    alone &= complements.exact
    if not alone or sum(math.perm(len(values), size) for size in range(least, most + 1)) > MOST_OPTIONS:
        return complements.unchecked({**new, "maxItems": most})
    sizes = range(least, most + 1)
    lists = [list(some) for size in sizes for some in itertools.permutations(values.values(), size)]
    others = [{"type": name} for name in sorted(kinds_of(new) - {"array"})]
    return {key: new[key] for key in new.keys() & NOTES} | {"anyOf": [{"enum": lists}, *others]}


def _counted(complements: Complements, new: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Bounds of the number of properties as options of which are there.

    llguidance counts properties where none of those that are listed is optional.
    """
    required, listed = set(new.get("required", ())), new.get("properties", {})
    free = [name for name, schema in listed.items() if name not in required and schema is not False]
    least = new.get("minProperties", 0) - len(required)
    most = new.get("maxProperties", math.inf) - len(required)
    if not free:
        # A name that is not listed may be written twice, and a parser keeps one.
        complements.loose |= least > 1
        return new, True
    kept = {key: value for key, value in new.items() if key not in ("minProperties", "maxProperties")}
    closed = new.get("additionalProperties") is False and not new.get("patternProperties")
    bounded = most < (len(free) if closed else math.inf)
    if least <= 0 and not bounded:
        return kept, True
    sizes = range(max(least, 0), min(most, len(free)) + 1) if bounded else [least]
    many = sum(math.comb(len(free), size) for size in sizes) > MOST_OPTIONS
    if many or not complements.exact or not (closed or (least == 1 and not bounded)):
        return kept, complements.unchecked()
    options: list[Any] = [{"type": sorted(TYPES - {"object"})}]
    for there in (some for size in sizes for some in itertools.combinations(free, size)):
        absent = [name for name in free if name not in there] if bounded else []
        options.append({"required": list(there), "properties": dict.fromkeys(absent, False)})
    if not closed:  # none of the listed ones, but another
        options.append({"properties": dict.fromkeys(free, False), "minProperties": len(required) + 1})
    return kept, {"anyOf": options}


def _dependencies(raw: Mapping[str, Any], new: Mapping[str, Any]) -> Iterable[tuple[str, Sequence[str], Any]]:
    """(property, properties that it needs, schema that it needs) of each dependency."""
    for name, names in raw.get("dependentRequired", {}).items():
        yield name, names, True
    for name, value in {**new.get("dependentSchemas", {}), **new.get("dependencies", {})}.items():
        yield (name, value, True) if isinstance(value, list | tuple) else (name, (), value)


# --- what is not evaluated


class Evaluated(NamedTuple):
    """What a schema evaluates: names and patterns of properties, or all; the number of first items, or all."""

    names: set[str]
    patterns: set[str]
    every_name: bool
    items: int
    every_item: bool


def _closed(complements: Complements, raw: Mapping[str, Any], new: Mapping[str, Any]) -> Any:
    """`unevaluatedProperties` and `unevaluatedItems` as a schema of what is left."""
    if not {"unevaluatedProperties", "unevaluatedItems"} & raw.keys():
        return True
    seen, parts = list(_evaluated(complements, raw)), list[Any]()
    if "unevaluatedItems" in new and not any(one.every_item for one in seen):
        rest, count = new["unevaluatedItems"], max(one.items for one in seen)
        first = {complements.first: [True] * count, complements.rest: rest}
        parts.append(first if count else {"items": rest})
    if "unevaluatedProperties" in new and not any(one.every_name for one in seen):
        names = {name: True for one in seen for name in sorted(one.names)}
        patterns = {pattern: True for one in seen for pattern in sorted(one.patterns)}
        rest = new["unevaluatedProperties"]
        parts.append({"properties": names, "patternProperties": patterns, "additionalProperties": rest})
    return every(*parts)


def _evaluated(complements: Complements, schema: Any, depth: int = 0) -> Iterable[Evaluated]:
    """What a schema, its references and `allOf` evaluate; whether conditions evaluate more is left to the check."""
    if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
        complements.loose |= depth > MOST_DEPTH
        return
    first, items = schema.get("prefixItems", ()), schema.get("items")
    if isinstance(items, list | tuple):
        first, items = items, schema.get("additionalItems")
    names, patterns = set(schema.get("properties", ())), set(schema.get("patternProperties", ()))
    yield Evaluated(names, patterns, "additionalProperties" in schema, len(first), items is not None)
    applied = [resolved(complements.root, str(schema["$ref"]))] if "$ref" in schema else []
    for key in ("anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "contains"):
        if key in schema:
            complements.unchecked()
            value = schema[key].values() if key == "dependentSchemas" else schema[key]
            applied += [value] if isinstance(value, Mapping | bool) else value
    for inner in (*applied, *schema.get("allOf", ())):
        yield from _evaluated(complements, inner, depth + 1)


# --- look-around


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
