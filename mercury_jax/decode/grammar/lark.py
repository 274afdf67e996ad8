"""From a spec to the text of a Lark grammar that llguidance compiles.

Beside the text, a grammar comes with short texts of its regular expressions: what a search for the end of an answer
tries first (`search.py`), because a mask of allowed bytes does not tell `.*abc` after `ab` from `.*abc` after `xy`.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from mercury_jax import install
from mercury_jax.decode.grammar.shortest import shortest_value
from mercury_jax.decode.grammar.spec import (
    MOST_BYTES,
    MOST_PATTERN,
    CallsOr,
    Choice,
    FreeOr,
    GrammarError,
    JSONObject,
    JSONSchema,
    Lark,
    Mark,
    Place,
    Regex,
    Spec,
    ToolCalls,
    Without,
    check_bounds,
    check_schema,
    grammar_error,
    patterns_inside,
)

MOST_OPTIONS = 10_000
MOST_GRAMMAR = 32 << 10  # characters of a grammar of the user
MOST_TOOLS = 256
_MOST_CACHED = 16 << 10  # characters of a schema whose rule is kept
MOST_CALLS = 256  # of one answer, where `at_most` is not given

# At most one space where JSON allows any; no \uXXXX, with which a second key could be spelled like the first.
_LAYOUT = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}


class LarkGrammar(NamedTuple):
    """A grammar as text.

    Attributes:
        lark: The text.
        name: What errors call it.
        macros: Texts that a search for the end of an answer may try.
        schemas: Of each JSON Schema in it what errors call it, the schema, and the user's in JSON.
        answer: A short answer, which must be verified. None: none was found.
        opening: Text that ends free text; empty: a special token does. None: the answer has no free text.
        checked: What the grammar does not enforce as a whole, so that a finished answer has to be checked.
    """

    lark: str
    name: str
    macros: tuple[bytes, ...] = ()
    schemas: tuple[tuple[str, Any, str], ...] = ()
    answer: tuple[int | str, ...] | None = None
    opening: bytes | None = None
    checked: tuple[CheckedValue, ...] = ()


class CheckedValue(NamedTuple):
    """A schema as the user sent it, in JSON; what errors call it; and the tool whose arguments obey it, if any."""

    schema: str
    name: str
    tool: str | None = None


# From a user's schema and its name to one that llguidance compiles, and whether that allows other values too.
Widen: TypeAlias = Callable[[Any, str], tuple[Any, bool]]


class _Value(NamedTuple):
    """A JSON value in a grammar.

    Its rule; what errors call its schema, the schema as checked and as the user sent it; and what shortens a search.
    """

    rule: str
    name: str
    schema: Any
    given: str
    text: str | None
    macros: tuple[bytes, ...]
    checked: tuple[CheckedValue, ...]


def lark_grammar(spec: Spec, widen: Widen | None = None) -> LarkGrammar:
    """Writes the grammar of a spec.

    Args:
        spec: The spec.
        widen: Makes the schemas that stand in the grammar; None: `check_schema` does.
    """
    if isinstance(spec, JSONSchema | JSONObject):
        value = _json(spec, widen)
        answer = None if value.text is None else (value.text,)
        named = ((value.name, value.schema, value.given),)
        return LarkGrammar(
            f"start: {value.rule}\n", value.name, value.macros, named, answer, checked=value.checked
        )
    if isinstance(spec, Regex):
        pattern = spec.pattern
        if not isinstance(pattern, str) or not 0 < len(pattern) <= MOST_PATTERN:
            raise grammar_error("pattern", pattern, f"a regular expression of 1..{MOST_PATTERN} characters")
        text = shortest_match(pattern) or ""
        ends = tuple(text[i:].encode() for i in range(min(len(text), 64)))
        # As JSON Schema defines them, \d and \w are ASCII. Between slashes: slashes are escaped, line ends written \n.
        lark = llguidance().regex_to_lark(pattern, "dw")
        lark = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", lark).replace("\n", "\\n")
        return LarkGrammar(f"start: /{lark}/\n", "pattern", ends)
    if isinstance(spec, Choice):
        options = spec.options
        if (
            isinstance(options, str)
            or not isinstance(options, Sequence)
            or not 0 < len(options) <= MOST_OPTIONS
        ):
            raise grammar_error("options", options, f"a list of 1..{MOST_OPTIONS} texts")
        for i, option in enumerate(options):
            if not isinstance(option, str) or not option:
                raise grammar_error(f"options[{i}]", option, "a text of at least one character")
        lark = "start: " + " | ".join(_item(option) for option in dict.fromkeys(options)) + "\n"
        if len(lark) > MOST_BYTES:
            raise grammar_error("options", f"{len(lark)} bytes", f"at most {MOST_BYTES}")
        return LarkGrammar(lark, "options")
    if isinstance(spec, Lark):
        return LarkGrammar(_of_user(spec.grammar), "grammar")
    if isinstance(spec, ToolCalls | FreeOr | CallsOr):
        return _calls(spec, widen)
    if isinstance(spec, Without):
        return LarkGrammar(_without(spec), "bad_words")
    raise grammar_error("schema", spec, "a JSON Schema or a spec of mercury_jax.grammar")


def _of_user(text: Any) -> str:
    """The text of a user's grammar in Lark's syntax, without what would reach beyond texts."""
    if not isinstance(text, str) or not 0 < len(text) <= MOST_GRAMMAR:
        raise grammar_error("grammar", text, f"a grammar in Lark or GBNF of 1..{MOST_GRAMMAR} characters")
    if re.search(r"(?m)^\s*[\w-]+\s*::=", text):
        convert = importlib.import_module(f"{llguidance().__name__}.gbnf_to_lark").gbnf_to_lark
        try:
            text = convert(text).replace("%llguidance {}", "")
        except Exception as error:  # the converter has no class of its own for some errors
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise GrammarError(f"grammar is no GBNF: {reason}") from None
    # Outside of texts, patterns and comments, `<` begins a special token, which no text of an answer shows.
    outside = re.sub(r'"(?:\\.|[^"\\\n])*"|//.*|/(?:\\.|[^/\\\n])*/', "", text)
    for mark, name in (("<", "a special token"), ("%llguidance", "options of llguidance")):
        if mark in outside:
            raise grammar_error("grammar", name, "rules over texts")
    return text


def _without(spec: Without) -> str:
    """A grammar of all texts that are not blank and hold none of the texts."""
    for i, text in enumerate(spec.texts):
        if not isinstance(text, str) or not 0 < len(text) <= MOST_PATTERN:
            raise grammar_error(f"bad_words[{i}]", text, f"a text of 1..{MOST_PATTERN} characters")
    # What is left of a text that the text before the answer begins.
    cut = lambda text: (n for n in range(1, len(text)) if spec.after.endswith(text[:n]))
    rests = [text[n:] for text in spec.texts for n in cut(text)]
    quoted = lambda texts: "|".join("".join(f"\\x{{{ord(c):x}}}" for c in t) for t in dict.fromkeys(texts))
    lark = f"start: TEXT\nTEXT: /(?s:.*\\S.*)/ & ~/(?s:.*({quoted(spec.texts)}).*)/"
    lark += f" & ~/(?s:({quoted(rests)}).*)/\n" if rests else "\n"
    if len(lark) > MOST_BYTES:
        raise grammar_error("bad_words", f"{len(lark)} bytes", f"at most {MOST_BYTES}")
    return lark


def _json(spec: JSONSchema | JSONObject, widen: Widen | None) -> _Value:
    """A JSON value in a grammar."""
    given, name = (spec.schema, spec.name) if isinstance(spec, JSONSchema) else ({"type": "object"}, "schema")
    check_bounds(given, name)
    text = json.dumps(given)
    plain = widen is None and len(text) <= _MOST_CACHED
    return _value(text, name, None) if plain else _value.__wrapped__(text, name, widen)


@functools.lru_cache(256)  # a conversation sends its tools with every turn
def _value(text: str, name: str, widen: Widen | None) -> _Value:
    given = json.loads(text)
    if widen is None:
        schema, loose = check_schema(given, name)
    else:
        schema, loose = widen(given, name)
    short = shortest_value(schema, shortest_match)
    if short.none:
        place = Place(name, short.place).within(given)
        raise GrammarError(f"{place}: nothing satisfies it", place)
    whole = {"allOf": [schema]} if isinstance(schema, bool) else schema
    macros = (*_macros(patterns_inside(schema)), *(tail.encode() for tail in short.tails))
    checked = (CheckedValue(text, name),) if loose else ()
    return _Value(json_rule(whole), name, whole, text, short.text, macros, checked)


def json_rule(schema: Mapping[str, Any]) -> str:
    """Returns the rule of a JSON Schema in a grammar."""
    return f"%json {json.dumps({**schema, 'x-guidance': _LAYOUT})}"


def _macros(patterns: Sequence[str]) -> tuple[bytes, ...]:
    """Texts of the patterns and their ends, as they are written inside of a JSON string."""
    texts = [text for text in map(shortest_match, dict.fromkeys(patterns)) if text]
    ends = [text[i:] for text in texts[:32] for i in range(min(len(text), 32))]
    return tuple(json.dumps(end, ensure_ascii=False)[1:-1].encode() for end in dict.fromkeys(ends))


def _calls(spec: ToolCalls | FreeOr | CallsOr, widen: Widen | None) -> LarkGrammar:
    """The grammar of tool calls, alone or beside another form of answer."""
    calls = spec if isinstance(spec, ToolCalls) else spec.calls
    if not isinstance(calls, ToolCalls):
        raise grammar_error(type(spec).__name__, calls, "ToolCalls")
    tools = calls.tools
    if isinstance(tools, str) or not isinstance(tools, Sequence) or not 0 < len(tools) <= MOST_TOOLS:
        raise grammar_error("tools", tools, f"a list of 1..{MOST_TOOLS} tools")
    # 1. One rule per tool, for the JSON of its call.
    made = [_body(calls, tool, f"tools[{i}]", widen) for i, tool in enumerate(tools)]
    checked = tuple(value for body in made for value in body.checked)
    bodies = "".join(f"b{i}: {body.rule}\n" for i, body in enumerate(made))
    rules = f"body: {' | '.join(f'b{i}' for i in range(len(tools)))}\n{bodies}"
    if len(rules) > MOST_BYTES:
        raise grammar_error("tools", f"{len(rules)} bytes", f"at most {MOST_BYTES}")
    # 2. The list of calls: the first one, and those after it.
    least, most = calls.at_least, MOST_CALLS if calls.at_most is None else calls.at_most
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= MOST_CALLS:
        raise grammar_error("at_most", calls.at_most, f"1..{MOST_CALLS}, or None")
    if isinstance(least, bool) or not isinstance(least, int) or not 0 <= least <= most:
        raise grammar_error("at_least", least, f"0..{most}")
    texts = [body.text for body in made if body.text is not None]
    call = None
    if texts:
        mark = lambda value: (value,) if isinstance(value, int | str) else tuple(value)
        one = (*mark(calls.open), min(texts, key=len), *mark(calls.close))
        call = one + (*mark(calls.separator), *one) * (max(least, 1) - 1)
    named = tuple((body.name, body.schema, body.given) for body in made)
    macros = tuple(dict.fromkeys(macro for body in made for macro in body.macros))
    first, *rest = _marks(calls.open, "open")
    opening, close = " ".join([first, *rest]), " ".join(_marks(calls.close, "close"))
    separator = " ".join(_marks(calls.separator, "separator"))
    repeats = f"{{{max(least, 1) - 1},{most - 1}}}"
    more = "" if most == 1 else f"({separator} {opening} body {close}){repeats}"
    listed = f"{opening} body {close} {more}"
    # 3. What else the answer may be.
    if isinstance(spec, CallsOr):
        if not isinstance(spec.answer, JSONSchema | JSONObject):
            raise grammar_error("CallsOr", spec.answer, "JSONSchema or JSONObject")
        value = _json(spec.answer, widen)
        start = f"start: calls | answer\ncalls: {listed}\nanswer: {value.rule}\n"
        answer = call if value.text is None else (value.text,)
        named, macros = (*named, (value.name, value.schema, value.given)), (*macros, *value.macros)
        checked += value.checked
        return LarkGrammar(start + rules, "tools and schema", macros, named, answer, checked=checked)
    if isinstance(spec, ToolCalls):
        start = f"start: {listed}\n" if least else f"start: ({listed})?\n"
        answer = call if least else ()
        return LarkGrammar(start + rules, "tools", macros, named, answer, checked=checked)
    # Free text up to what opens a call. Where a text opens it, that cannot be part of the free text. Free text without
    # calls is not blank: a reply of spaces alone would be no answer.
    text = "TEXT: /(?s:\\s*\\S.*)/\n"
    if first.startswith("<"):  # a special token
        start = f"start: TEXT ({listed})? | SPACE? {listed}\n{text}SPACE: /\\s+/\n"
    else:
        head = f"head[lazy]: /(?s:.*)/ {first}\n"
        start = f"start: TEXT | {' '.join(['head', *rest])} body {close} {more}\n{head}{text}"
    marks = [calls.open] if isinstance(calls.open, int | str) else calls.open
    mark = next(part for part in marks if part != "")
    mark = b"" if isinstance(mark, int) else mark.encode()
    return LarkGrammar(start + rules, "tools", macros, named, opening=mark, checked=checked)


def _body(calls: ToolCalls, tool: Any, where: str, widen: Widen | None) -> _Value:
    """{"name": "...", "arguments": {...}} of one tool; the schema keeps its own root, for its references."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str) or not tool["name"]:
        raise grammar_error(where, tool, 'an object with a "name"')
    parameters, place = tool.get("parameters"), tool.get("place", f"{where}.parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise grammar_error(place, parameters, "a JSON Schema of an object")
    inner = _json(JSONSchema({"type": "object", **parameters}, place), widen)
    # JSON texts, escaped for a regular expression between slashes.
    escape = lambda text: re.sub(
        r"[^\w\s\"<>'=:;,@#%&!~`-]", lambda found: "\\" + found.group(), json.dumps(text)
    )
    name, arguments, called = map(escape, (calls.name, calls.arguments, tool["name"]))
    head = f"{{{json.dumps(calls.name)}:{json.dumps(tool['name'])},{json.dumps(calls.arguments)}:"
    return inner._replace(
        rule=f'/\\{{{name}: ?{called}, ?{arguments}: ?/ {inner.rule} "}}"',
        text=None if inner.text is None else head + inner.text + "}",
        checked=tuple(value._replace(tool=tool["name"]) for value in inner.checked),
    )


def _marks(mark: Mark, name: str) -> list[str]:
    """The items of a mark in a grammar; at least one, but for the separator."""
    parts = [mark] if isinstance(mark, int | str) else list(mark)
    if not all(isinstance(part, int | str) and not isinstance(part, bool) for part in parts):
        raise grammar_error(name, mark, "a special token's id, a text, or a list of these")
    found = [_item(part) for part in parts if part != ""]
    if not found and name != "separator":
        raise grammar_error(name, mark, "at least one token or character")
    return found


def _item(part: int | str) -> str:
    """A special token or a text in a grammar."""
    return special_name(part) if isinstance(part, int) else json.dumps(part, ensure_ascii=False)


def special_name(id: int) -> str:
    """Returns the name of a special token in a grammar."""
    return f"<|{id}|>"


def llguidance() -> Any:
    """Imports llguidance at first use."""
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise GrammarError(f"schema needs the package llguidance: {install.command('serve')}") from None


MOST_SAMPLE = 4_096  # characters of a sample of a regular expression


class _TooLong(Exception):
    pass


def shortest_match(pattern: str) -> str | None:
    """Guesses a short text that a regular expression matches; the caller must verify it."""
    parser: Any = importlib.import_module("re._parser")
    try:
        return _shortest(parser.parse(pattern))
    except _TooLong:
        allowed = f"what a text of at most {MOST_SAMPLE} characters matches"
        raise grammar_error("pattern", pattern, allowed) from None
    except (ValueError, KeyError, StopIteration, RecursionError, OverflowError, parser.error):
        return None


def _shortest(parsed: Any) -> str:
    """A short text of a parsed pattern: of each repetition the fewest, of alternatives the shortest."""
    text = ""
    for op, arg in parsed:
        match str(op):
            case "LITERAL":
                text += chr(arg)
            case "ANY":
                text += "a"
            case "NOT_LITERAL":
                text += "b" if arg == ord("a") else "a"
            case "IN":
                text += _member([(str(kind), value) for kind, value in arg])
            case "BRANCH":
                text += min((_shortest(branch) for branch in arg[1]), key=len)
            case "SUBPATTERN" | "ATOMIC_GROUP":
                text += _shortest(arg[-1] if str(op) == "SUBPATTERN" else arg)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                least, _, inner = arg
                one = _shortest(inner)
                if least * len(one) > MOST_SAMPLE:
                    raise _TooLong
                text += one * least
        if len(text) > MOST_SAMPLE:
            raise _TooLong
    return text  # anchors add nothing


# A character of each class, and all candidates for a negated one that are in it.
_CATEGORY = {
    "DIGIT": "09",
    "SPACE": " ",
    "WORD": "a0_AzZ9",
    "NOT_DIGIT": "a",
    "NOT_SPACE": "a",
    "NOT_WORD": "-",
}


def _member(items: list[tuple[str, Any]]) -> str:
    """One character of a class; of a negated one, a candidate that none of its items holds."""

    def holds(op: str, arg: Any, character: str) -> bool:
        if op == "RANGE":
            return arg[0] <= ord(character) <= arg[1]
        if op == "CATEGORY":  # the negated categories are taken to hold nothing; the caller verifies the text
            name = str(arg).removeprefix("CATEGORY_")
            return not name.startswith("NOT_") and character in _CATEGORY[name]
        return ord(character) == arg

    if items[0][0] == "NEGATE":
        return next(c for c in "a0 -_.AzZ9" if not any(holds(op, arg, c) for op, arg in items[1:]))
    op, arg = items[0]
    if op == "CATEGORY":
        return _CATEGORY[str(arg).removeprefix("CATEGORY_")][0]
    return chr(arg[0] if op == "RANGE" else arg)
