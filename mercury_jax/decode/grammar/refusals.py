"""Why llguidance refuses a schema, in plain words and with the place; and the schema without what it refuses."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mercury_jax.decode.grammar.complement import NOTES
from mercury_jax.decode.grammar.lark import json_rule, lark_grammar, llguidance
from mercury_jax.decode.grammar.spec import (
    NAMED,
    GrammarError,
    JSONSchema,
    Place,
    check_bounds,
    check_schema,
    schemas_inside,
)

COMPILE_SECONDS = 5.0  # for one grammar
MOST_ENFORCED = 256  # schemas of `enforceable` that are kept
MOST_ENFORCED_BYTES = 16 << 10  # of one that is kept
NOT_FOUND = "no answer was found within the limits of the search; a simpler schema may have one"
TOO_LARGE = "too large or too complex to compile"
_MOST_LEFT_OUT = 64  # keywords of one schema
EMPTY = "nothing satisfies it"
_UNKNOWN = "a grammar cannot express it"
# Words of llguidance, and what a user reads instead; messages with the words of `_KEPT` are clear as they are.
_CIRCULAR = "circular references with sibling keys"
_BOUNDS = "is greater than"  # also said of bounds beside a list of constants
_REASONS = (
    ("not disjoint", "its patterns can match the same name; allowed: patterns that exclude each other"),
    ("Regex is empty", f"{EMPTY}: no text matches all patterns, formats and lengths"),
    ("Unsatisfiable schema", EMPTY + ": {}"),
    (_BOUNDS, EMPTY + ": {}"),
    (_CIRCULAR, "{}"),
)
_KEPT = (
    "does not exist|supported|unclosed|repetition|nvalid|must be|xpected|nknown (special )?token|regex parse|"
    "unknown name|lexer error|circular|Unknown common"
)
# What validation.py checks, where the grammar does not enforce it.
_CHECKABLE = f"{TOO_LARGE}|can match the same name|min/maxProperties|{_CIRCULAR}|{_BOUNDS}"
_APPLIED = ("$ref", "allOf", "anyOf", "oneOf")
_CONSTRAINTS = frozenset(
    (*_APPLIED, "type", "enum", "const", "pattern", "format", "required", "items", "additionalItems", "prefixItems",
     "properties", "patternProperties", "additionalProperties", "minItems", "maxItems", "minLength", "maxLength",
     "minProperties", "maxProperties", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
)  # fmt: skip
_LARGE = "fuel|limit|too (big|large|many|complex|deep)|exceed|stack"


def enforceable(
    schema: Mapping[str, Any], name: str, deadline: float | None = None
) -> tuple[Mapping[str, Any], bool]:
    """Leaves out of a schema what a grammar cannot enforce.

    Args:
        schema: A JSON Schema of an object.
        name: What errors call it.
        deadline: By `time.monotonic`; several schemas may share one. None: COMPILE_SECONDS from now.

    Returns:
        A schema that the same values satisfy, and possibly others; and whether something was left out.

    Raises:
        GrammarError: The schema is out of bounds, refers to what does not exist, or nothing satisfies it.
    """
    check_bounds(schema, name)
    text = json.dumps(schema)
    with _lock:
        if found := _enforced.get((text, name)):
            _enforced.move_to_end((text, name))
    if not found:
        until = time.monotonic() + COMPILE_SECONDS if deadline is None else deadline
        found = widened(json.loads(text), name, until, lenient=True)
        lark_grammar(JSONSchema(found.schema, name))  # whether anything satisfies it
        if time.monotonic() < until and len(text) <= MOST_ENFORCED_BYTES:  # more time would not change it
            with _lock:
                _enforced[text, name] = found
                while len(_enforced) > MOST_ENFORCED:
                    _enforced.popitem(last=False)
    left = found.schema if isinstance(found.schema, Mapping) else {"type": "object"}
    return (left, True) if found.loose else (schema, False)


class Widened(NamedTuple):
    """A schema that llguidance compiles, and whether more values satisfy it than the user's."""

    schema: dict[str, Any] | bool
    loose: bool


# A conversation sends its tools with every turn.
_enforced: OrderedDict[tuple[str, str], Widened] = OrderedDict()
_lock = threading.Lock()


def widened(schema: Any, name: str, until: float, exact: bool = True, lenient: bool = False) -> Widened:
    """Leaves out of a schema what llguidance refuses.

    Args:
        schema: As the user sent it.
        name: What errors call it.
        until: When to give up, by `time.monotonic`.
        exact: As in `check_schema`; False is tried too where True is too large.
        lenient: Leave out more than what `validation.py` checks. In place of an error about size or time: any object.

    Raises:
        GrammarError: What is refused can neither be left out nor checked.
    """
    loose, error, left = False, None, None
    for tried in (True, False) if exact else (False,):
        left = None
        for _ in range(_MOST_LEFT_OUT):
            if time.monotonic() > until:
                break
            try:
                if left is None:
                    left, more = check_schema(schema, name, tried)
                    loose |= more
                if not (reason := _refusal(left)):
                    return Widened(left, loose)
                if tried and needs_fewer_parts(reason):
                    break
                check_compiles(left, name, until)
            except GrammarError as refusal:
                error = refusal
            if error is None or not error.place or not error.place.keys or not (lenient or error.checkable):
                break
            if EMPTY in str(error) or (error.place.keys[-1] in ("$ref", "$schema") and not error.checkable):
                break
            loose = True
            if left is None:  # refused before llguidance saw it
                schema = _without(schema, error.place.keys)
            else:
                left = _without(left, error.place.keys)
    certain = error is not None and error.place is not None and error.place.keys and time.monotonic() < until
    if lenient and not certain:
        return Widened({"type": "object"}, True)
    if left is not None and time.monotonic() < until:
        check_compiles(left, name, until, schema)
    raise error or GrammarError(f"{name}: takes too long to compile")


def is_checkable(reason: str) -> bool:
    """Whether a check of the finished answer finds what a grammar that was refused for this reason would enforce."""
    return bool(re.search(_CHECKABLE, reason))


def needs_fewer_parts(reason: str) -> bool:
    """Whether a schema is refused for what rewritten keywords have added: parts beside a reference, or too many."""
    return any(words in reason for words in (_CIRCULAR, TOO_LARGE, _BOUNDS))


def _without(schema: Any, keys: Sequence[str | int]) -> Any:
    """A copy of a schema without the keyword at a place; a whole schema there becomes true."""
    key, *rest = keys
    if isinstance(schema, list | tuple):
        copy: Any = list(schema)
        copy[int(key)] = _without(copy[int(key)], rest) if rest else True
        return copy
    copy = dict(schema)
    value = copy.get(key)
    if (
        len(rest) == 1
        and key in NAMED
        and isinstance(value, Mapping)
        and value.get(rest[0], True) is not True
    ):
        copy[key] = {**value, rest[0]: True}
    elif (
        rest
        and isinstance(value, Mapping | list | tuple)
        and (isinstance(value, Mapping) or int(rest[0]) < len(value))
    ):
        copy[key] = _without(value, rest)
    elif key not in copy:  # the keyword was added when the schema was checked
        return True
    elif key == "patternProperties" and isinstance(value, Mapping) and len(value) > 1:
        # Patterns that match the same name become one, whose values satisfy any of them.
        copy[key] = {"|".join(f"({pattern})" for pattern in value): {"anyOf": [*value.values()]}}
    elif key in _APPLIED and copy.keys() & _CONSTRAINTS - {key}:
        # llguidance takes no constraints beside a reference to a schema around it; what it refers to comes first.
        return {name: value for name, value in copy.items() if name == key or name not in _CONSTRAINTS}
    elif key == "allOf" and len(value) > 1 and (refs := [part for part in value if "$ref" in part]):
        copy[key] = refs[:1]
    else:
        del copy[key]
        # What is not listed any more would be forbidden.
        dependent = {"properties": "additionalProperties", "patternProperties": "additionalProperties"}
        copy.pop(dependent.get(str(key), ""), None)
    return copy


def check_compiles(schema: Any, name: str, deadline: float, given: Any = None) -> None:
    """Refuses a checked schema that llguidance cannot compile, with the reason and the place (in `given`, if set)."""
    if reason := _refusal(schema):
        place, reason = _refused(schema, schema, Place(name), reason, deadline)
        checkable = is_checkable(reason) and place.keys[-1:] != ("pattern",)
        place = place if given is None else place.within(given)
        raise GrammarError(f"{place}: {reason}", place, checkable)


def _refusal(schema: Any) -> str:
    """Why llguidance cannot compile a schema; empty where it can."""
    schema = {"allOf": [schema]} if isinstance(schema, bool) else schema
    matcher = llguidance().LLMatcher
    text = matcher.grammar_from_lark(f"start: {json_rule(schema)}\n")
    message = matcher.validate_grammar(text)
    return plain_reason(message) if message else ""


def _refused(
    schema: Mapping[str, Any],
    root: Mapping[str, Any],
    place: Place,
    reason: str,
    deadline: float,
    followed: tuple[str, ...] = (),
) -> tuple[Place, str]:
    """The innermost place in a schema, or behind its references, that is refused for this reason; the reason there."""
    definitions = {key: root[key] for key in ("$defs", "definitions", "$schema") if key in root}
    empty, needed = reason.startswith(EMPTY), schema.get("required", ())
    for keys, inner in schemas_inside(schema):
        # Where nothing satisfies a schema, its optional properties and single options are not the reason.
        if empty and not (keys[0] == "allOf" or (keys[0] == "properties" and keys[1] in needed)):
            continue
        if isinstance(inner, Mapping) and inner.get("$ref") not in followed and time.monotonic() < deadline:
            said = _refusal({**definitions, **inner})
            if said == reason or (empty and said.startswith(EMPTY)):
                at = place._replace(keys=(*place.keys, *keys))
                return _refused(inner, root, at, said, deadline, followed)
    # Of several keywords whose absence would do, one that says little.
    for key in sorted(schema.keys() - NOTES, key=lambda key: (key in NAMED or key in _APPLIED, key)):
        without = {name: value for name, value in schema.items() if name != key}
        if not empty and time.monotonic() < deadline and _refusal({**definitions, **without}) != reason:
            ref = (
                re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", str(schema[key])) if key == "$ref" else None
            )
            inner = root.get(ref[1], {}).get(ref[2]) if ref else None
            if ref is None or not isinstance(inner, Mapping) or ref[0] in followed:
                return place / key, reason
            at = Place(place.root, (ref[1], ref[2]))
            return _refused(inner, root, at, reason, deadline, (*followed, ref[0]))
    return place, reason


def plain_reason(message: str) -> str:
    """The cause in llguidance's message, in words that need no knowledge of it."""
    lines = [line.strip() for line in message.split("<non-verbose/>")[0].splitlines() if line.strip()]
    named = next((line.removeprefix("error:").strip() for line in lines if line.startswith("error:")), None)
    cause = (named or (lines or [""])[0]).split("failed to compile JSON schema:")[-1]
    cause = cause.removeprefix(" ").split(";")[0][:300]
    for words, reason in _REASONS:
        if words in cause:
            cause = cause.split(": ")[0] if words == _CIRCULAR else cause
            return reason.format(cause.removeprefix("Unsatisfiable schema: "))
    if re.search(_KEPT, cause):
        return cause
    return TOO_LARGE if re.search(_LARGE, cause) else _UNKNOWN
