"""The check of a finished answer by an independent implementation of JSON Schema, the package jsonschema.

A grammar enforces most of a schema while the answer is written; what it cannot enforce is left to this check. Nothing
is fetched, and patterns and formats are matched in linear time by llguidance, as in the grammar, where Python's `re`
may take hours.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jsonschema import FormatChecker
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from mercury_jax.decode.grammar.complement import canonical
from mercury_jax.decode.grammar.lark import CheckedValue, json_rule, llguidance
from mercury_jax.decode.grammar.rewrite import split_look_ahead
from mercury_jax.decode.grammar.spec import GrammarError, Place, check_bounds, check_schema, grammar_error

# A schema may refer only to itself: jsonschema's default registry would fetch references over the network.
NO_REFERENCES: Registry[Any] = Registry()


def validator(schema: Any, name: str) -> Callable[[Any], bool]:
    """Makes the check of a value against a schema.

    Args:
        schema: As the user sent it.
        name: What errors call it.

    Raises:
        GrammarError: It is out of bounds, or no JSON Schema.
    """
    return _checker(schema, name).is_valid


def _checker(schema: Any, name: str) -> Any:
    check_bounds(schema, name)
    try:
        kind: Any = validator_for(schema)
        kind.check_schema(schema, format_checker=_FORMATS)
    except SchemaError as error:
        place = Place(name, tuple(error.absolute_path))
        raise GrammarError(f"{place}: {error.message[:500]}", place) from None
    except (TypeError, ValueError, AttributeError, RecursionError):  # a `$schema` that is no address
        raise GrammarError(f"{name} is no JSON Schema", Place(name)) from None
    patterned = '"patternProperties"' in json.dumps(schema)
    return _with_patterns(kind, patterned)(schema, registry=NO_REFERENCES)


def answer_check(checked: Sequence[CheckedValue]) -> Callable[[str], int | None]:
    """Makes the check of the text of a finished answer: a JSON value, or calls of tools.

    Returns:
        (text) -> None if it is valid, otherwise the number of characters before the first value that is at fault.
    """
    for value in checked:
        if '"unevaluatedProperties"' in value.schema and '"patternProperties"' in value.schema:
            raise grammar_error(
                Place(value.name), "unevaluatedProperties beside patternProperties", "one of them"
            )
    found = {value.tool: _checker(json.loads(value.schema), value.name) for value in checked}
    whole, tools = found.pop(None, None), found

    def fault(text: str) -> int | None:
        calls = (
            [(c, at) for c, at in _objects(text) if c.get("name") in tools and "arguments" in c]
            if tools
            else []
        )
        if whole is not None and not calls:
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                return 0
            return _first_fault(whole, value, text, ())
        faults = (
            _first_fault(tools[c["name"]], c["arguments"], text[at:], ("arguments",), at) for c, at in calls
        )
        return next((at for at in faults if at is not None), None)

    return fault


def _first_fault(
    checker: Any, value: Any, text: str, before: tuple[str | int, ...], at: int = 0
) -> int | None:
    """Where in a text that begins at `at` the first value is at fault; `before` leads to the value that is checked."""
    try:
        paths = [(*before, *error.absolute_path, *_repeated(error)) for error in checker.iter_errors(value)]
    except (RecursionError, Unresolvable):
        paths = [()]
    return min((at + offset(text, path) for path in paths), default=None)


def _repeated(error: ValidationError) -> tuple[int, ...]:
    """Of a list with equal items, the index of the first that repeats an earlier one."""
    if error.validator != "uniqueItems" or not isinstance(error.instance, list):
        return ()
    seen = [canonical(item) for item in error.instance]
    return next(((i,) for i, item in enumerate(seen) if item in seen[:i]), ())


def offset(text: str, path: Sequence[str | int]) -> int:
    """Returns where in a JSON text the value at a path begins."""
    decoder, at = json.JSONDecoder(), len(text) - len(text.lstrip())
    for step in path:
        inner, count = re.compile(r"[\s,:]*").match, 0
        at = inner(text, at + 1).end()  # type: ignore[union-attr]
        while (isinstance(step, int) and count < step) or (
            isinstance(step, str) and text[at : at + 1] == '"'
        ):
            key, end = decoder.raw_decode(text, at)
            at, count = inner(text, end).end(), count + 1  # type: ignore[union-attr]
            if isinstance(step, str):
                if key == step:
                    break
                at = inner(text, decoder.raw_decode(text, at)[1]).end()  # type: ignore[union-attr]
    return at


def _objects(text: str) -> Iterator[tuple[dict[str, Any], int]]:
    """The JSON objects in a text from left to right, and where each begins."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            found, end = decoder.raw_decode(text, at)
            yield found, at
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)


def is_valid(text: str, valid: Callable[[Any], bool]) -> bool:
    """Returns whether a text is JSON that passes a check."""
    try:
        return valid(json.loads(text))
    except (ValueError, RecursionError, Unresolvable):
        return False


@functools.cache
def _with_patterns(kind: Any, patterned: bool) -> Any:
    """A validator class of jsonschema that matches patterns and formats as the grammar does.

    Beside `patternProperties`, `unevaluatedProperties` would match patterns by `re`, and is not checked.
    """
    changed = {
        "pattern": _check_pattern,
        "format": _check_format,
        "patternProperties": _check_pattern_properties,
        "additionalProperties": _check_additional_properties,
        **({"unevaluatedProperties": lambda *_: ()} if patterned else {}),
    }
    return extend(kind, {name: check for name, check in changed.items() if name in kind.VALIDATORS})


def _check_pattern(check: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if check.is_type(value, "string") and not _matches(pattern, value):
        yield ValidationError("the pattern does not match")


def _check_format(check: Any, format: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if check.is_type(value, "string") and not _fits(_format_matcher(format), value):
        yield ValidationError("the format does not match")


def _check_pattern_properties(check: Any, named: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    if check.is_type(value, "object"):
        for pattern, inner in named.items():
            for name in value:
                if _matches(pattern, name):
                    yield from check.descend(value[name], inner)


def _check_additional_properties(
    check: Any, others: Any, value: Any, schema: Any
) -> Iterator[ValidationError]:
    if check.is_type(value, "object"):
        listed, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name in value:
            if name not in listed and not any(_matches(pattern, name) for pattern in patterns):
                yield from check.descend(value[name], others)


def _matches(pattern: str, text: str) -> bool:
    """Says whether a pattern matches a part of a text; True for a pattern that a grammar cannot express."""
    if ahead := split_look_ahead(pattern):
        needed = all(_matches(part, text) for part in (ahead.rest, *ahead.present))
        return needed and not any(_matches(part, text) for part in ahead.absent)
    return _fits(_pattern_matcher(pattern), text)


def _fits(matcher: Any, text: str) -> bool:
    if matcher is None:
        return True
    matcher = matcher.deep_copy()
    written = json.dumps(text, ensure_ascii=False).encode(errors="replace")
    fits = matcher.try_consume_tokens(list(written)) == len(written) and matcher.is_accepting()
    return fits or matcher.is_error()


@functools.lru_cache(256)
def _pattern_matcher(pattern: str) -> Any:
    """Compiles a pattern for JSON strings as bytes; None if llguidance cannot."""
    return _matcher(f"%json {json.dumps({'type': 'string', 'pattern': pattern})}")


@functools.lru_cache(64)
def _format_matcher(format: str) -> Any:
    """Compiles a format as a grammar enforces it; None where it is an annotation."""
    return _matcher(json_rule(check_schema({"type": "string", "format": format}).schema))  # type: ignore[arg-type]


def _matcher(rule: str) -> Any:
    package = llguidance()
    text = package.LLMatcher.grammar_from_lark(f"start: {rule}\n")
    matcher = package.LLMatcher(package.LLTokenizer("byte"), text, log_level=0)
    return None if matcher.is_error() else matcher


# Patterns are the only format that is checked in a schema itself.
_FORMATS = FormatChecker(formats=())


@_FORMATS.checks("regex")
def _is_pattern(pattern: Any) -> bool:
    """Says whether Python or llguidance reads a pattern; their syntaxes differ."""
    try:
        return not isinstance(pattern, str) or bool(re.compile(pattern))
    except (re.error, OverflowError, RecursionError):
        return _pattern_matcher(pattern) is not None
