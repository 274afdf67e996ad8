"""JSON Schemas as users send them: bounded before anything is compiled, and made safe to generate from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mercury_jax.decode.grammar.spec import wrong

MOST_BYTES = 256 << 10  # of a schema as JSON
MOST_DEPTH = 64  # of its nesting
MOST_VALUES = 20_000  # numbers, texts, lists and objects in it
MOST_NEEDED = 4_096  # minItems, minLength, minProperties
MOST_PATTERN = 2_048  # characters of a regular expression

_ONE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
)
_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_YEAR = "^([1-9]|0[1-9]|00[1-9]|000[1-9])"  # many calendars have no year 0
_LEAP = "[0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00"
_DAY = f"^([0-9]{{4}}-(0[13-9]|1[0-2])|[0-9]{{4}}-02-([01][0-9]|2[0-8])|({_LEAP})-02-29)"
# RFC 3339 has a second 60 at the end of a few days alone, and readers refuse it anywhere else.
_SECONDS = "[0-9]{2}:[0-9]{2}:[0-5]"
_EXACT = {  # what a text of a format begins with, beyond what the package asks of it
    "date": (_YEAR, _DAY),
    "time": (f"^{_SECONDS}",),
    "date-time": (_YEAR, _DAY, f"^[0-9-]{{10}}[Tt]{_SECONDS}"),
}
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class Checked(NamedTuple):
    """A schema that may be compiled, and the regular expressions in it."""

    schema: dict[str, Any] | bool
    patterns: list[str]


def checked(schema: Any, where: str = "schema") -> Checked:
    """The schema within its bounds and rewritten where a generator could fool a validator.

    Raises GrammarError naming the place in the schema, the value and what is allowed.
    """
    if not isinstance(schema, Mapping | bool):
        raise wrong(where, schema, "a JSON Schema: an object, true or false")
    _bounded(schema, where)
    if len(json.dumps(schema)) > MOST_BYTES:
        raise wrong(where, f"{len(json.dumps(schema))} bytes of JSON", f"at most {MOST_BYTES}")
    patterns: list[str] = []
    return Checked(_rewritten(schema, where, patterns), patterns)


def _bounded(schema: Any, where: str) -> None:
    """Refuse what is too deep, too much, or no JSON at all. Without recursion: the depth is not known yet."""
    count, waiting = 0, [(schema, where, 0)]
    while waiting:
        value, at, depth = waiting.pop()
        count += 1
        if depth > MOST_DEPTH:
            raise wrong(
                where, f"nested deeper than {MOST_DEPTH} (at {at[:60]}...)", f"a depth of {MOST_DEPTH}"
            )
        if count > MOST_VALUES:
            raise wrong(where, f"more than {MOST_VALUES} values", f"at most {MOST_VALUES}")
        waiting += [(inner, name, depth + 1) for name, inner in _inside(value, at)]


def _inside(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise wrong(f"{at} key", name, "a text")
            yield f"{at}/{name}", inner
    elif isinstance(value, list | tuple):
        yield from ((f"{at}/{i}", inner) for i, inner in enumerate(value))
    elif isinstance(value, float) and not math.isfinite(value):
        raise wrong(at, value, "a finite number")
    elif not isinstance(value, str | int | float | bool | None):
        raise wrong(at, value, "JSON: an object, a list, a text, a number, true, false or null")


def _rewritten(schema: Any, where: str, patterns: list[str]) -> dict[str, Any] | bool:
    """One schema and all schemas inside it."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise wrong(where, schema, "a schema: an object, true or false")
    new = {key: value for key, value in schema.items() if key != "x-guidance"}
    if new.get("uniqueItems") is False:
        del new["uniqueItems"]
    _check_counts(new, where)
    _check_numbers(new, where)
    _check_reference(new, where)
    _check_fixed(new, where)
    _tighten(new)
    patterns += _patterns(new, where)
    for key in new:
        new[key] = _inner(key, new[key], f"{where}/{key}", patterns)
    _date(new)
    return new


def _inner(key: str, value: Any, where: str, patterns: list[str]) -> Any:
    if key in _LIST or (key == "items" and isinstance(value, list | tuple)):
        if not isinstance(value, list | tuple):
            raise wrong(where, value, "a list of schemas")
        return [_rewritten(inner, f"{where}/{i}", patterns) for i, inner in enumerate(value)]
    if key in _NAMED:
        if not isinstance(value, Mapping):
            raise wrong(where, value, "an object of schemas")
        return {name: _rewritten(inner, f"{where}/{name}", patterns) for name, inner in value.items()}
    return _rewritten(value, where, patterns) if key in _ONE else value


def _check_counts(schema: dict[str, Any], where: str) -> None:
    for key in _COUNTS:
        value = schema.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise wrong(f"{where}/{key}", value, "a whole number from 0 on")
        if key.startswith("min") and value > MOST_NEEDED:
            raise wrong(f"{where}/{key}", value, f"at most {MOST_NEEDED}")
    required = schema.get("required", [])
    if not isinstance(required, list | tuple) or not all(isinstance(name, str) for name in required):
        raise wrong(f"{where}/required", required, "a list of names")
    # A key that is not listed may be written twice, and a reader keeps one of the two.
    if schema.get("minProperties", 0) > len(set(required)) + 1:
        allowed = f"at most {len(set(required)) + 1}: the required properties and one more"
        raise wrong(f"{where}/minProperties", schema["minProperties"], allowed)


def _check_numbers(schema: dict[str, Any], where: str) -> None:
    for key in _NUMBERS:
        value = schema.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
            raise wrong(f"{where}/{key}", value, "a number of less than 300 digits")
    step = schema.get("multipleOf", 1)
    if step <= 0 or (step < 2**53 and math.frexp(step)[0] != 0.5 and step != int(step)):
        allowed = "a whole number, or a power of two such as 0.5: readers round multiples of other fractions"
        raise wrong(f"{where}/multipleOf", step, allowed)


def _check_reference(schema: dict[str, Any], where: str) -> None:
    # Of its keywords (`extends`, `disallow`) a generator knows nothing and would hold to nothing.
    if "draft-03" in str(schema.get("$schema")):
        raise wrong(f"{where}/$schema", schema["$schema"], "a dialect from draft 4 on")
    target = schema.get("$ref", "#")
    if not isinstance(target, str) or not target.startswith("#"):
        raise wrong(
            f"{where}/$ref", target, "a place in this schema, such as '#/$defs/name': nothing is fetched"
        )


def _check_fixed(schema: dict[str, Any], where: str) -> None:
    """Refuse texts of `const` and `enum` that JSON can only spell with \\u escapes, which no answer uses."""
    for key in ("const", "enum"):
        waiting = [schema[key]] if key in schema else []
        while waiting:
            value = waiting.pop()
            if isinstance(value, str) and any(c < " " and c not in "\b\t\n\f\r" for c in value):
                allowed = "texts without control characters other than \\b, \\t, \\n, \\f and \\r"
                why = "JSON spells the others as \\u escapes, and no answer holds those"
                raise wrong(f"{where}/{key}", value, f"{allowed}: {why}")
            waiting += [inner for _, inner in _inside(value, where)]


def _tighten(schema: dict[str, Any]) -> None:
    """Exclusive bounds of fractions as inclusive ones: a reader may round 0.000...01 to the bound itself."""
    if schema.get("type") == "integer" or "multipleOf" in schema:
        return
    for key, bound, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        if key not in schema:
            continue
        edge = schema[key] + sign * max(abs(schema[key]) * 2.0**-48, 1e-12)
        other = schema.get("maximum" if sign > 0 else "minimum", math.inf * sign)
        if (other - edge) * sign > 0:
            pick = max if sign > 0 else min
            schema[bound] = pick(edge, schema[bound]) if bound in schema else edge
            del schema[key]


def _date(schema: dict[str, Any]) -> None:
    """Dates and times that exist: no 29 February in other years, no second 60."""
    format, every = schema.get("format"), schema.get("allOf", [])
    if isinstance(format, str) and format in _EXACT and isinstance(every, list | tuple):
        schema["allOf"] = [*every, *({"pattern": pattern} for pattern in _EXACT[format])]


def _patterns(schema: dict[str, Any], where: str) -> list[str]:
    named = schema.get("patternProperties", {})
    found = [
        *([schema["pattern"]] if "pattern" in schema else []),
        *(named if isinstance(named, Mapping) else []),
    ]
    for pattern in found:
        if not isinstance(pattern, str):
            raise wrong(f"{where}/pattern", pattern, "a regular expression")
        if len(pattern) > MOST_PATTERN:
            raise wrong(f"{where}/pattern", f"{len(pattern)} characters", f"at most {MOST_PATTERN}")
    return found
