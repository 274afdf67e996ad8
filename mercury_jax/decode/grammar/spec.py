"""What an answer may be asked to obey, and the checks of JSON Schemas as users send them.

Specs are values: `JSONSchema`, `JSONObject`, `Regex`, `Choice`, `Lark`, `ToolCalls`, `FreeOr`, `CallsOr`, `Without`. A
JSON Schema is bounded before anything is compiled, and rewritten where an answer that a generator makes could fail a
validator.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from mercury_jax.decode.grammar.complement import Complements
from mercury_jax.decode.grammar.rewrite import rewritten_keywords, split_look_ahead
from mercury_jax.decode.grammar.shortest import resolved

# A special token by its id, a text, or several of these in a row.
Mark: TypeAlias = int | str | Sequence[int | str]


class Place(NamedTuple):
    """A place in a schema; `str` gives it as "schema.properties.a.anyOf[0]".

    Attributes:
        root: What errors call the schema.
        keys: Keys and indices from the root on.
    """

    root: str = "schema"
    keys: tuple[str | int, ...] = ()

    def __truediv__(self, key: str | int) -> Place:
        return self._replace(keys=(*self.keys, key))

    def within(self, schema: Any) -> Place:
        """Returns the innermost place on the way to this one that a schema has: others were made by rewriting it."""
        for i, key in enumerate(self.keys):
            inner: Any = dict(enumerate(schema)) if isinstance(schema, list | tuple) else schema
            if not isinstance(inner, Mapping) or key not in inner:
                return self._replace(keys=self.keys[:i])
            schema = inner[key]  # type: ignore[index]
        return self

    def __str__(self) -> str:
        plain = lambda key: (
            f".{key}" if re.fullmatch(r"[\w$-]+", key) else f"[{json.dumps(key, ensure_ascii=False)}]"
        )
        return self.root + "".join(f"[{key}]" if isinstance(key, int) else plain(key) for key in self.keys)


class GrammarError(ValueError):
    """A grammar that is refused, with the reason; nothing was decoded.

    Attributes:
        place: The place in the schema that is refused. None: the error is not about one.
        checkable: Whether a check of the finished answer finds what the grammar does not enforce there.
    """

    def __init__(self, message: str, place: Place | None = None, checkable: bool = False):
        super().__init__(message)
        self.place, self.checkable = place, checkable


def grammar_error(where: str | Place, value: object, allowed: str) -> GrammarError:
    """Makes the error "<where> is <value>; allowed: <allowed>", with a long value cut."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return GrammarError(
        f"{where} is {shown}; allowed: {allowed}", where if isinstance(where, Place) else None
    )


@dataclass(frozen=True)
class JSONSchema:
    """A JSON value that validates against a schema (draft 2020-12, or the one that `$schema` names).

    Properties come in the schema's order, with at most one space after a comma and a colon. Where a grammar enforces a
    part of a schema only, as with `uniqueItems`, the finished answer is validated: see `Grammar.valid`. What neither
    guarantees (remote and dynamic references) is refused. A `format` that has no pattern here is an annotation.

    Attributes:
        schema: The schema, or true for any JSON value.
        name: What errors call the schema.
    """

    schema: Mapping[str, Any] | bool
    name: str = "schema"


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
class Lark:
    """A text of a context-free grammar.

    Attributes:
        grammar: In Lark's syntax as llguidance reads it, with the rule `start`; or in llama.cpp's GBNF, with the rule
            `root ::= ...`. Special tokens are no part of it.
    """

    grammar: str


@dataclass(frozen=True)
class ToolCalls:
    """Tool calls: open {"name": ..., "arguments": {...}} close.

    Attributes:
        tools: {"name", "parameters"} of each; parameters are a JSON Schema of an object (None: no arguments).
            With a key "place", that is what errors call the parameters.
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


@dataclass(frozen=True)
class Without:
    """Any text that is not blank and holds none of some texts, however they are divided into tokens.

    Attributes:
        texts: The texts that the answer may not hold.
        after: The text before the answer. A text that begins in it may not be completed by the answer either.
    """

    texts: Sequence[str]
    after: str = ""


Spec: TypeAlias = JSONSchema | JSONObject | Regex | Choice | Lark | ToolCalls | FreeOr | CallsOr | Without

MOST_BYTES = 256 << 10  # of a schema as JSON
MOST_DEPTH = 64  # of its nesting
MOST_VALUES = 20_000  # numbers, texts, lists and objects in it
MOST_NEEDED = 4_096  # minItems, minLength, minProperties
MOST_PATTERN = 2_048  # characters of a regular expression

# Keywords that hold one schema, a list of schemas, schemas by name, counts and numbers.
_ONE = (
    "items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COUNTS = (
    "minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip
_YEAR = "^([1-9]|0[1-9]|00[1-9]|000[1-9])"  # many calendars have no year 0
_LEAP = "[0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00"
_DAY = f"^([0-9]{{4}}-(0[13-9]|1[0-2])|[0-9]{{4}}-02-([01][0-9]|2[0-8])|({_LEAP})-02-29)"
# RFC 3339 has a second 60 at the end of a few days only, and parsers refuse it anywhere else.
_SECONDS = "[0-9]{2}:[0-9]{2}:[0-5]"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_V4 = rf"{_BYTE}(\.{_BYTE}){{3}}"
# A network has no bits set behind its prefix: whole bytes of the prefix, or a network of one address.
_NETWORK = rf"^({_V4}(/32)?|{_BYTE}(\.{_BYTE}){{2}}\.0/24|{_BYTE}\.{_BYTE}(\.0){{2}}/16|{_BYTE}(\.0){{3}}/8)$"
_HEX = "[0-9a-f]"
# Formats of a text: llguidance's name, and schemas or patterns beyond what it checks. All others are annotations.
_FORMATS: dict[Any, tuple[str | None, tuple[Any, ...]]] = {
    **{name: (name, ()) for name in ("duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")},
    # Dates and times are those that exist: no 29 February in other years, no second 60.
    "date": ("date", (_YEAR, _DAY)),
    # T and Z as capitals, which every parser reads; RFC 3339 allows small letters too.
    "time": ("time", (f"^{_SECONDS}", "^[^tz]*$")),
    "date-time": ("date-time", (_YEAR, _DAY, f"^[0-9-]{{10}}T{_SECONDS}", "^[^tz]*$")),
    "idn-email": (None, ("^[^@]+@[^@]+$",)),
    "ipv4interface": (None, (f"^{_V4}(/(3[0-2]|[12]?[0-9]))?$",)),
    "ipv4network": (None, (_NETWORK,)),
    "ipv6interface": ("ipv6", ()),
    "ipv6network": ("ipv6", ()),
    **{f"ipvany{kind}": (None, ({"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]},))
       for kind in ("address", "interface", "network")},
    **{f"uuid{n}": (None, (f"^{_HEX}{{8}}-{_HEX}{{4}}-{n}{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}$",))
       for n in range(1, 9)},
    "base64": (None, ("^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",)),
}  # fmt: skip
_NAME_FORMATS = {  # of property names
    "uuid": f"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
    "date": "^[12][0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$",
    "ipv4": f"^{_V4}$",
}
_UNSUPPORTED = ("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor")
_DIALECT = r"^https?://json-schema\.org/(draft-0[467]/|draft/20(?:19-09|20-12)/|)schema#?$"
TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}
# Patterns with look-around that libraries write, without it: pydantic's Decimal.
_EQUAL_PATTERNS = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$"}
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class CheckedSchema(NamedTuple):
    """A schema that may be compiled, and whether it allows values that the user's does not."""

    schema: dict[str, Any] | bool
    loose: bool


class _Names(dict[int, str | None]):
    """Patterns of names by the ids of their schemas; those being made; and how many names have become properties."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.listed = set[int](), 0


def check_schema(schema: Any, name: str = "schema", exact: bool = True) -> CheckedSchema:
    """Checks the bounds of a schema, and rewrites what llguidance lacks or a generated answer could fail.

    Args:
        schema: As the user sent it.
        name: What errors call it.
        exact: Whether keywords may become several schemas; False: those are left to the check of the answer.
    """
    check_bounds(schema, name)
    complements = Complements(schema, exact)
    return CheckedSchema(_rewritten(schema, Place(name), complements, _Names()), complements.loose)


def patterns_inside(schema: Any) -> list[str]:
    """Returns the regular expressions of a checked schema."""
    if not isinstance(schema, Mapping):
        return []
    inner = [pattern for _, one in schemas_inside(schema) for pattern in patterns_inside(one)]
    return [*_patterns(schema, Place()), *inner]


def check_bounds(schema: Any, name: str = "schema") -> None:
    """Checks the kind, the size and the depth of a schema.

    Args:
        schema: As the user sent it.
        name: What errors call it.

    Raises:
        GrammarError: Names the schema, the value and what is allowed.
    """
    if not isinstance(schema, Mapping | bool):
        raise grammar_error(Place(name), schema, "a JSON Schema: an object, true or false")
    _bounded(schema, Place(name))
    if len(json.dumps(schema)) > MOST_BYTES:
        raise grammar_error(Place(name), f"{len(json.dumps(schema))} bytes of JSON", f"at most {MOST_BYTES}")


def _bounded(schema: Any, where: Place) -> None:
    """Refuses what is too deep, too large, or no JSON at all; without recursion, because the depth is not known yet."""
    count, waiting = 0, [(schema, where, 0)]
    while waiting:
        value, at, depth = waiting.pop()
        count += 1
        if depth > MOST_DEPTH:
            raise grammar_error(
                where, f"nested deeper than {MOST_DEPTH} (at {str(at)[:60]}...)", f"a depth of {MOST_DEPTH}"
            )
        if count > MOST_VALUES:
            raise grammar_error(where, f"more than {MOST_VALUES} values", f"at most {MOST_VALUES}")
        waiting += [(inner, name, depth + 1) for name, inner in _inside(value, at)]


def _inside(value: Any, at: Place) -> Iterator[tuple[Place, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise grammar_error(f"{at} key", name, "a text")
            yield at / name, inner
    elif isinstance(value, list | tuple):
        yield from ((at / i, inner) for i, inner in enumerate(value))
    elif isinstance(value, float) and not math.isfinite(value):
        raise grammar_error(at, value, "a finite number")
    elif not isinstance(value, str | int | float | bool | None):
        raise grammar_error(at, value, "JSON: an object, a list, a text, a number, true, false or null")


def _rewritten(schema: Any, where: Place, complements: Complements, known: _Names) -> dict[str, Any] | bool:
    """Rewrites one schema and all schemas inside it."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise grammar_error(where, schema, "a schema: an object, true or false")
    new = {
        key: value for key, value in schema.items() if key != "x-guidance" and not _says_nothing(schema, key)
    }
    for key in _UNSUPPORTED:
        if key in new:
            why = "is not supported: what it refers to depends on the path. Use $ref"
            raise GrammarError(f"{where / key} {why}", where / key)
    _check_numbers(new, where)
    _check_texts(new, where)
    if "$schema" in new:  # as llguidance spells it; without a draft, the newest one
        draft = re.sub(_DIALECT, r"\1", str(new.pop("$schema")))
        scheme, end = ("http", "#") if "draft-" in draft else ("https", "")
        new = {"$schema": f"{scheme}://json-schema.org/{draft}schema{end}", **new} if draft else new
    _tighten(new)
    _close_names(new, where, complements, known)
    _look_ahead(new, complements)
    _patterns(new, where)
    raw = dict(new)
    for key, value in new.items():
        place = where / key
        if key in _LIST or (key == "items" and isinstance(value, list | tuple)):
            if not isinstance(value, list | tuple):
                raise grammar_error(place, value, "a list of schemas")
            new[key] = [_rewritten(inner, place / i, complements, known) for i, inner in enumerate(value)]
        elif key in NAMED:
            if not isinstance(value, Mapping):
                raise grammar_error(place, value, "an object of schemas")
            new[key] = {n: _rewritten(inner, place / n, complements, known) for n, inner in value.items()}
        elif key in _ONE:
            new[key] = _rewritten(value, place, complements, known)
        elif key == "dependencies" and isinstance(value, Mapping):
            new[key] = {
                n: d if isinstance(d, list) else _rewritten(d, place / n, complements, known)
                for n, d in value.items()
            }
    negated = lambda key, inner: _rewritten(complements.negated(inner), where / key, complements, known)
    try:
        new = rewritten_keywords(complements, raw, new, negated)
    except (AttributeError, LookupError, TypeError, RecursionError):
        raise grammar_error(where, schema, "keywords with values of the right kind") from None
    format, every = new.get("format"), new.get("allOf", [])
    if format is not None and format not in _FORMATS:  # an annotation (JSON Schema 2020-12, 7.2.3)
        del new["format"]
    elif format is not None and isinstance(every, list | tuple):
        supported, more = _FORMATS[format]
        new["format"] = supported
        new = new if supported else {key: value for key, value in new.items() if key != "format"}
        if more:
            new["allOf"] = [
                *every,
                *({"pattern": pattern} if isinstance(pattern, str) else pattern for pattern in more),
            ]
    return new


def schemas_inside(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yields the schemas directly inside a checked schema, with the keys that lead to each."""
    for key, value in schema.items():
        if key in _LIST or (key == "items" and isinstance(value, list)):
            yield from (((key, i), inner) for i, inner in enumerate(value))
        elif key in NAMED:
            yield from (((key, name), inner) for name, inner in value.items())
        elif key in _ONE:
            yield (key,), value


def _says_nothing(schema: Mapping[str, Any], key: str) -> bool:
    """Whether a keyword has no effect: by its value, or because the keyword that it refers to is missing."""
    value = schema[key]
    if key == "propertyNames":
        return value is True or value == {} or (isinstance(value, Mapping) and value == {"type": "string"})
    if key in ("unevaluatedItems", "unevaluatedProperties"):
        return value is True or value == {}
    if key == "if":
        return "then" not in schema and "else" not in schema
    if key in ("dependentRequired", "dependentSchemas", "dependencies"):
        return value == {}
    owner = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}.get(key, key)
    return owner not in schema or (value is False and key in ("uniqueItems", "not", "$recursiveAnchor"))


def _close_names(schema: dict[str, Any], where: Place, complements: Complements, known: _Names) -> None:
    """Replaces `propertyNames` by properties or by a pattern of them; other properties are not allowed then."""
    if "propertyNames" not in schema:
        return
    names, place, root = schema.pop("propertyNames"), where / "propertyNames", complements.root
    own, extra = schema.get("properties", {}), schema.get("additionalProperties", True)
    others = schema.get("patternProperties")
    if not isinstance(own, Mapping):
        raise grammar_error(where / "properties", own, "an object of schemas")
    names = _definition(names, root)
    if isinstance(names, Mapping):
        _check_texts(dict(names), place)
    listed = (
        names.get("enum", [names["const"]] if "const" in names else None)
        if isinstance(names, Mapping)
        else None
    )
    if names is False or isinstance(listed, list | tuple):
        texts = dict.fromkeys(name for name in listed or () if isinstance(name, str))
        known.listed += len(texts)
        if known.listed > MOST_VALUES:
            raise grammar_error(place, f"more than {MOST_VALUES} names in all", f"at most {MOST_VALUES}")
        # In the order of the schema's own properties, then of the names.
        schema["properties"] = {
            name: own.get(name, extra) for name in (*(n for n in own if n in texts), *texts)
        }
        schema["additionalProperties"] = False
        allowed = (
            not (set(names) & {"pattern", "anyOf", "allOf", "oneOf"}) if isinstance(names, Mapping) else True
        )
    else:
        pattern = _name_pattern(names, place, root, known)
        if pattern == "":
            return
        allowed = pattern is not None and not own
        if pattern is not None and not others:
            # Whether it matches a listed property is left to the check: Python's matching has no bound of time.
            schema["additionalProperties"] = False
            schema |= {} if extra is False else {"patternProperties": {pattern: extra}}
    complements.loose |= bool(not allowed or others)


def _definition(schema: Any, root: Any) -> Any:
    """Follows references: an enumeration of names is often a definition."""
    for _ in range(MOST_DEPTH):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            break
        if (found := resolved(root, str(schema["$ref"]))) is None:
            break
        schema = found
    return schema


def _name_pattern(names: Any, place: Place, root: Any, known: _Names, depth: int = 0) -> str | None:
    """A pattern of the names that a schema allows; empty for all, None where it has none.

    `known` holds the patterns by the ids of their schemas.
    """
    names = _definition(names, root)
    if id(names) in known.begun:
        raise grammar_error(place, "names that refer to themselves", "names with a pattern or an enum")
    if id(names) not in known:
        known.begun.add(id(names))
        pattern = None if depth > MOST_DEPTH else _made_pattern(names, place, root, known, depth)
        if pattern and len(pattern) > MOST_PATTERN:
            raise grammar_error(place, f"a pattern of {len(pattern)} characters", f"at most {MOST_PATTERN}")
        known[id(names)] = pattern
        known.begun.discard(id(names))
    return known[id(names)]


def _made_pattern(names: Any, place: Place, root: Any, known: _Names, depth: int) -> str | None:
    if not isinstance(names, Mapping):
        return "" if names is True else None
    _check_texts(dict(names), place)
    notes = {"type", "title", "description", "$comment", "default", "examples", "deprecated"}
    said = set(names) - notes
    if not said:
        return "" if names.get("type", "string") == "string" else None
    if said == {"pattern"}:
        return _patterns(dict(names), place)[0]
    if said <= {"minLength", "maxLength"}:
        _check_numbers(dict(names), place)
        most = int(names["maxLength"]) if "maxLength" in names else ""
        return f"^[\\s\\S]{{{int(names.get('minLength', 0))},{most}}}$"
    if said == {"format"}:
        return _NAME_FORMATS.get(names["format"], "")
    if said in ({"enum"}, {"const"}):
        texts = names["enum"] if "enum" in names else [names["const"]]
        escaped = [re.sub(r"([^\w\s])", r"\\\1", text) for text in texts if isinstance(text, str)]
        return f"^({'|'.join(escaped)})$"
    if said in ({"anyOf"}, {"oneOf"}) and isinstance(options := names[min(said)], list | tuple):
        parts = list(dict.fromkeys(_name_pattern(o, place, root, known, depth + 1) for o in options))
        return None if None in parts else "" if "" in parts else "|".join(f"({part})" for part in parts)
    return None


def _check_numbers(schema: dict[str, Any], where: Place) -> None:
    """Checks counts, the list of required properties, and the bounds of numbers."""
    for key in _COUNTS:
        value = schema.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise grammar_error(where / key, value, "a whole number from 0 on")
        schema |= {key: int(value)} if key in schema else {}
        if key.startswith("min") and value > MOST_NEEDED:
            raise grammar_error(where / key, value, f"at most {MOST_NEEDED}")
    required = schema.get("required", [])
    if not isinstance(required, list | tuple) or not all(isinstance(name, str) for name in required):
        raise grammar_error(where / "required", required, "a list of names")
    for key in _NUMBERS:
        value = schema.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
            raise grammar_error(where / key, value, "a number of less than 300 digits")
    if schema.get("multipleOf", 1) <= 0:
        raise grammar_error(where / "multipleOf", schema["multipleOf"], "a number above 0")


def _check_texts(schema: dict[str, Any], where: Place) -> None:
    """Refuses other dialects, remote references, and fixed texts that no answer can hold."""
    # llguidance does not know the keywords of draft 3 (`extends`, `disallow`) and would ignore them.
    if "$schema" in schema and not re.search(_DIALECT, str(schema["$schema"])):
        raise grammar_error(
            where / "$schema", schema["$schema"], "a dialect of json-schema.org from draft 4 on"
        )
    types = schema.get("type", [])
    if (
        not {types} <= TYPES
        if isinstance(types, str)
        else not isinstance(types, list) or not {*map(str, types)} <= TYPES
    ):
        raise grammar_error(where / "type", types, f"one of {', '.join(sorted(TYPES))}, or a list of these")
    if not isinstance(schema.get("format", ""), str):
        raise grammar_error(where / "format", schema["format"], "a text")
    if not isinstance(schema.get("enum", []), list | tuple):
        raise grammar_error(where / "enum", schema["enum"], "a list of values")
    target = schema.get("$ref", "#")
    if not isinstance(target, str) or not target.startswith("#"):
        allowed = "a place in this schema, such as '#/$defs/name': nothing is fetched"
        raise grammar_error(where / "$ref", target, allowed)
    for key in ("const", "enum"):
        waiting = [schema[key]] if key in schema else []
        while waiting:
            value = waiting.pop()
            if isinstance(value, str) and any(c < " " and c not in "\b\t\n\f\r" for c in value):
                allowed = "texts without control characters other than \\b, \\t, \\n, \\f and \\r"
                why = "JSON writes the others as \\u escapes, and no answer holds those"
                raise grammar_error(where / key, value, f"{allowed}: {why}")
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


def _look_ahead(schema: dict[str, Any], complements: Complements) -> None:
    """Replaces a pattern that begins with look-ahead by patterns without it."""
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or len(pattern) > MOST_PATTERN:
        return
    schema["pattern"] = pattern = _EQUAL_PATTERNS.get(pattern, pattern)
    if ahead := split_look_ahead(pattern):
        complements.loose |= bool(ahead.absent)
        schema["pattern"] = ahead.rest
        schema["allOf"] = [*schema.get("allOf", ()), *({"pattern": other} for other in ahead.present)]


def _patterns(schema: Mapping[str, Any], where: Place) -> list[str]:
    named = schema.get("patternProperties", {})
    found = [
        *([schema["pattern"]] if "pattern" in schema else []),
        *(named if isinstance(named, Mapping) else []),
    ]
    for pattern in found:
        if not isinstance(pattern, str):
            raise grammar_error(where / "pattern", pattern, "a regular expression")
        if len(pattern) > MOST_PATTERN:
            raise grammar_error(where / "pattern", f"{len(pattern)} characters", f"at most {MOST_PATTERN}")
    return found
