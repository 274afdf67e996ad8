"""What an answer may be asked to obey, and the checks of JSON Schemas as users send them.

Specs are values: `JSONSchema`, `JSONObject`, `Regex`, `Choice`, `ToolCalls`, `FreeOr`, `CallsOr`. A JSON Schema is
bounded before anything is compiled, and rewritten where an answer that a generator makes could fail a validator.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

# A special token by its id, a text, or several of these in a row.
Mark: TypeAlias = int | str | Sequence[int | str]


class GrammarError(ValueError):
    """A grammar that is refused, with the reason; nothing was decoded."""


def grammar_error(where: str, value: object, allowed: str) -> GrammarError:
    """Makes the error "<where> is <value>; allowed: <allowed>", with a long value cut.

    Args:
        where: The place in the schema, or the argument.
        value: What was found.
        allowed: What is allowed.

    Returns:
        The error, to be raised.
    """
    shown = repr(value)
    return GrammarError(f"{where} is {shown if len(shown) <= 80 else shown[:77] + '...'}; allowed: {allowed}")


@dataclass(frozen=True)
class JSONSchema:
    """A JSON value that validates against a schema (draft 2020-12, or the one that `$schema` names).

    Properties come in the schema's order, with at most one space after a comma and a colon. Keywords that cannot be
    guaranteed (`not`, `if`, `uniqueItems`, remote references, ...) are refused.

    Attributes:
        schema: The schema, or true for any JSON value.
    """

    schema: Mapping[str, Any] | bool


@dataclass(frozen=True)
class JSONObject:
    """Any JSON object."""


@dataclass(frozen=True)
class Regex:
    """A text that the pattern matches as a whole.

    Attributes:
        pattern: In the syntax of Rust's regex crate: no look-around, no references.
    """

    pattern: str


@dataclass(frozen=True)
class Choice:
    """One of several texts.

    Attributes:
        options: The texts.
    """

    options: Sequence[str]


@dataclass(frozen=True)
class ToolCalls:
    """Tool calls: open {"name": ..., "arguments": {...}} close.

    Attributes:
        tools: {"name", "parameters"} of each; parameters are a JSON Schema of an object (None: no arguments).
        open: What precedes a call: ids of special tokens, texts, or several of these in a row.
        close: What follows a call, likewise.
        at_least: Fewest calls.
        at_most: Most calls; None: a fixed bound.
        separator: What stands between two calls.
        name: Key of a call's name.
        arguments: Key of a call's arguments.
    """

    tools: Sequence[Mapping[str, Any]]
    open: Mark
    close: Mark
    at_least: int = 1
    at_most: int | None = None
    separator: Mark = ""
    name: str = "name"
    arguments: str = "arguments"


@dataclass(frozen=True)
class FreeOr:
    """Any text that is not blank, calls, or both in this order; `at_least` applies only where there are calls."""

    calls: ToolCalls


@dataclass(frozen=True)
class CallsOr:
    """Either calls, or a JSON value and nothing else; `at_least` applies only where there are calls."""

    calls: ToolCalls
    answer: JSONSchema | JSONObject


Spec: TypeAlias = JSONSchema | JSONObject | Regex | Choice | ToolCalls | FreeOr | CallsOr

MOST_BYTES = 256 << 10  # of a schema as JSON
MOST_DEPTH = 64  # of its nesting
MOST_VALUES = 20_000  # numbers, texts, lists and objects in it
MOST_NEEDED = 4_096  # minItems, minLength, minProperties
MOST_PATTERN = 2_048  # characters of a regular expression

# Keywords that hold one schema, a list of schemas, schemas by name, counts and numbers.
_ONE = (
    "items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else",
)  # fmt: skip
_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_YEAR = "^([1-9]|0[1-9]|00[1-9]|000[1-9])"  # many calendars have no year 0
_LEAP = "[0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00"
_DAY = f"^([0-9]{{4}}-(0[13-9]|1[0-2])|[0-9]{{4}}-02-([01][0-9]|2[0-8])|({_LEAP})-02-29)"
# RFC 3339 has a second 60 at the end of a few days only, and parsers refuse it anywhere else.
_SECONDS = "[0-9]{2}:[0-9]{2}:[0-5]"
_EXACT = {  # patterns at the start of a format, beyond what llguidance checks
    "date": (_YEAR, _DAY),
    "time": (f"^{_SECONDS}",),
    "date-time": (_YEAR, _DAY, f"^[0-9-]{{10}}[Tt]{_SECONDS}"),
}
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class CheckedSchema(NamedTuple):
    """A schema that may be compiled, and the regular expressions in it."""

    schema: dict[str, Any] | bool
    patterns: list[str]


def check_schema(schema: Any, where: str = "schema") -> CheckedSchema:
    """Checks the bounds of a schema, and rewrites it where a generated answer could fail a validator.

    Args:
        schema: As the user sent it.
        where: What errors call it.

    Returns:
        The rewritten schema, and its regular expressions.

    Raises:
        GrammarError: Names the place in the schema, the value and what is allowed.
    """
    if not isinstance(schema, Mapping | bool):
        raise grammar_error(where, schema, "a JSON Schema: an object, true or false")
    _bounded(schema, where)
    if len(json.dumps(schema)) > MOST_BYTES:
        raise grammar_error(where, f"{len(json.dumps(schema))} bytes of JSON", f"at most {MOST_BYTES}")
    patterns: list[str] = []
    return CheckedSchema(_rewritten(schema, where, patterns), patterns)


def _bounded(schema: Any, where: str) -> None:
    """Refuses what is too deep, too large, or no JSON at all; without recursion, because the depth is not known yet."""
    count, waiting = 0, [(schema, where, 0)]
    while waiting:
        value, at, depth = waiting.pop()
        count += 1
        if depth > MOST_DEPTH:
            raise grammar_error(
                where, f"nested deeper than {MOST_DEPTH} (at {at[:60]}...)", f"a depth of {MOST_DEPTH}"
            )
        if count > MOST_VALUES:
            raise grammar_error(where, f"more than {MOST_VALUES} values", f"at most {MOST_VALUES}")
        waiting += [(inner, name, depth + 1) for name, inner in _inside(value, at)]


def _inside(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise grammar_error(f"{at} key", name, "a text")
            yield f"{at}/{name}", inner
    elif isinstance(value, list | tuple):
        yield from ((f"{at}/{i}", inner) for i, inner in enumerate(value))
    elif isinstance(value, float) and not math.isfinite(value):
        raise grammar_error(at, value, "a finite number")
    elif not isinstance(value, str | int | float | bool | None):
        raise grammar_error(at, value, "JSON: an object, a list, a text, a number, true, false or null")


def _rewritten(schema: Any, where: str, patterns: list[str]) -> dict[str, Any] | bool:
    """Rewrites one schema and all schemas inside it."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise grammar_error(where, schema, "a schema: an object, true or false")
    new = {key: value for key, value in schema.items() if key != "x-guidance"}
    if new.get("uniqueItems") is False:
        del new["uniqueItems"]
    _check_numbers(new, where)
    _check_texts(new, where)
    _tighten(new)
    patterns += _patterns(new, where)
    for key, value in new.items():
        place = f"{where}/{key}"
        if key in _LIST or (key == "items" and isinstance(value, list | tuple)):
            if not isinstance(value, list | tuple):
                raise grammar_error(place, value, "a list of schemas")
            new[key] = [_rewritten(inner, f"{place}/{i}", patterns) for i, inner in enumerate(value)]
        elif key in _NAMED:
            if not isinstance(value, Mapping):
                raise grammar_error(place, value, "an object of schemas")
            new[key] = {name: _rewritten(inner, f"{place}/{name}", patterns) for name, inner in value.items()}
        elif key in _ONE:
            new[key] = _rewritten(value, place, patterns)
    # Dates and times are those that exist: no 29 February in other years, no second 60.
    format, every = new.get("format"), new.get("allOf", [])
    if isinstance(format, str) and format in _EXACT and isinstance(every, list | tuple):
        new["allOf"] = [*every, *({"pattern": pattern} for pattern in _EXACT[format])]
    return new


def _check_numbers(schema: dict[str, Any], where: str) -> None:
    """Checks counts, the list of required properties, and the bounds of numbers."""
    for key in _COUNTS:
        value = schema.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise grammar_error(f"{where}/{key}", value, "a whole number from 0 on")
        if key.startswith("min") and value > MOST_NEEDED:
            raise grammar_error(f"{where}/{key}", value, f"at most {MOST_NEEDED}")
    required = schema.get("required", [])
    if not isinstance(required, list | tuple) or not all(isinstance(name, str) for name in required):
        raise grammar_error(f"{where}/required", required, "a list of names")
    # A key that is not listed may be generated twice, and a parser keeps one of the two.
    if schema.get("minProperties", 0) > len(set(required)) + 1:
        allowed = f"at most {len(set(required)) + 1}: the required properties and one more"
        raise grammar_error(f"{where}/minProperties", schema["minProperties"], allowed)
    for key in _NUMBERS:
        value = schema.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
            raise grammar_error(f"{where}/{key}", value, "a number of less than 300 digits")
    step = schema.get("multipleOf", 1)
    if step <= 0 or (step < 2**53 and math.frexp(step)[0] != 0.5 and step != int(step)):
        allowed = "a whole number, or a power of two such as 0.5: parsers round multiples of other fractions"
        raise grammar_error(f"{where}/multipleOf", step, allowed)


def _check_texts(schema: dict[str, Any], where: str) -> None:
    """Refuses other dialects, remote references, and fixed texts that no answer can hold."""
    # llguidance does not know the keywords of draft 3 (`extends`, `disallow`) and would ignore them.
    if "draft-03" in str(schema.get("$schema")):
        raise grammar_error(f"{where}/$schema", schema["$schema"], "a dialect from draft 4 on")
    target = schema.get("$ref", "#")
    if not isinstance(target, str) or not target.startswith("#"):
        allowed = "a place in this schema, such as '#/$defs/name': nothing is fetched"
        raise grammar_error(f"{where}/$ref", target, allowed)
    for key in ("const", "enum"):
        waiting = [schema[key]] if key in schema else []
        while waiting:
            value = waiting.pop()
            if isinstance(value, str) and any(c < " " and c not in "\b\t\n\f\r" for c in value):
                allowed = "texts without control characters other than \\b, \\t, \\n, \\f and \\r"
                why = "JSON writes the others as \\u escapes, and no answer holds those"
                raise grammar_error(f"{where}/{key}", value, f"{allowed}: {why}")
            waiting += [inner for _, inner in _inside(value, where)]


def _tighten(schema: dict[str, Any]) -> None:
    """Makes exclusive bounds of fractions inclusive: a parser may round 0.000...01 to the bound itself."""
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


def _patterns(schema: dict[str, Any], where: str) -> list[str]:
    named = schema.get("patternProperties", {})
    found = [
        *([schema["pattern"]] if "pattern" in schema else []),
        *(named if isinstance(named, Mapping) else []),
    ]
    for pattern in found:
        if not isinstance(pattern, str):
            raise grammar_error(f"{where}/pattern", pattern, "a regular expression")
        if len(pattern) > MOST_PATTERN:
            raise grammar_error(f"{where}/pattern", f"{len(pattern)} characters", f"at most {MOST_PATTERN}")
    return found
