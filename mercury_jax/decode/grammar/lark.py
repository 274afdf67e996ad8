"""From a spec to the text of a Lark grammar that llguidance compiles.

Beside the text, a grammar comes with short texts of its regular expressions: what a search for the end of an answer
tries first (`search.py`), because a mask of allowed bytes does not tell `.*abc` after `ab` from `.*abc` after `xy`.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mercury_jax.decode.grammar.spec import (
    MOST_BYTES,
    MOST_PATTERN,
    CallsOr,
    CheckedSchema,
    Choice,
    FreeOr,
    GrammarError,
    JSONObject,
    JSONSchema,
    Mark,
    Regex,
    Spec,
    ToolCalls,
    check_schema,
    grammar_error,
)

MOST_OPTIONS = 10_000
MOST_TOOLS = 256
MOST_CALLS = 256  # of one answer, where `at_most` is not given

# At most one space where JSON allows any; no \uXXXX, with which a second key could be spelled like the first.
_LAYOUT = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}


class LarkGrammar(NamedTuple):
    """A grammar as text, what errors call it, and texts that a search for its end may try."""

    lark: str
    name: str
    macros: tuple[bytes, ...]


def lark_grammar(spec: Spec) -> LarkGrammar:
    """Writes the grammar of a spec.

    Args:
        spec: What an answer must obey.

    Returns:
        The grammar as text.

    Raises:
        GrammarError: It is out of bounds, or no spec.
    """
    if isinstance(spec, JSONSchema | JSONObject):
        answer = _answer(spec)
        return LarkGrammar(f"start: {_json(answer.schema)}\n", "schema", _macros(answer.patterns))
    if isinstance(spec, Regex):
        return _regex(spec)
    if isinstance(spec, Choice):
        return _choice(spec)
    if isinstance(spec, ToolCalls | FreeOr | CallsOr):
        return _calls(spec)
    raise grammar_error("schema", spec, "a JSON Schema or a spec of mercury_jax.grammar")


def _answer(spec: JSONSchema | JSONObject) -> CheckedSchema:
    return check_schema(spec.schema if isinstance(spec, JSONSchema) else {"type": "object"})


def special_name(id: int) -> str:
    """Returns the name of a special token in a grammar."""
    return f"<|{id}|>"


def _json(schema: dict[str, Any] | bool) -> str:
    whole = {"allOf": [schema]} if isinstance(schema, bool) else schema
    return f"%json {json.dumps({**whole, 'x-guidance': _LAYOUT})}"


def _macros(patterns: Sequence[str]) -> tuple[bytes, ...]:
    """Texts of the patterns and their ends, as they are written inside of a JSON string."""
    texts = [text for text in map(shortest_match, dict.fromkeys(patterns)) if text]
    ends = [text[i:] for text in texts[:32] for i in range(min(len(text), 32))]
    return tuple(json.dumps(end, ensure_ascii=False)[1:-1].encode() for end in dict.fromkeys(ends))


def _regex(spec: Regex) -> LarkGrammar:
    if not isinstance(spec.pattern, str) or not 0 < len(spec.pattern) <= MOST_PATTERN:
        raise grammar_error("pattern", spec.pattern, f"a regular expression of 1..{MOST_PATTERN} characters")
    text = shortest_match(spec.pattern) or ""
    ends = tuple(text[i:].encode() for i in range(min(len(text), 64)))
    # As JSON Schema defines them: \d and \w are ASCII.
    pattern = llguidance().regex_to_lark(spec.pattern, "dw")
    return LarkGrammar(f"start: /{_slashed(pattern)}/\n", "pattern", ends)


def _slashed(pattern: str) -> str:
    """The pattern between slashes: its own slashes escaped, line ends written as \\n."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n")


def _choice(spec: Choice) -> LarkGrammar:
    options = spec.options
    if isinstance(options, str) or not isinstance(options, Sequence) or not 0 < len(options) <= MOST_OPTIONS:
        raise grammar_error("options", options, f"a list of 1..{MOST_OPTIONS} texts")
    for i, option in enumerate(options):
        if not isinstance(option, str) or not option:
            raise grammar_error(f"options[{i}]", option, "a text of at least one character")
    lark = "start: " + " | ".join(map(_text, dict.fromkeys(options))) + "\n"
    if len(lark) > MOST_BYTES:
        raise grammar_error("options", f"{len(lark)} bytes", f"at most {MOST_BYTES}")
    return LarkGrammar(lark, "options", ())


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _calls(spec: ToolCalls | FreeOr | CallsOr) -> LarkGrammar:
    calls = spec if isinstance(spec, ToolCalls) else spec.calls
    if not isinstance(calls, ToolCalls):
        raise grammar_error(type(spec).__name__, calls, "ToolCalls")
    tools = calls.tools
    if isinstance(tools, str) or not isinstance(tools, Sequence) or not 0 < len(tools) <= MOST_TOOLS:
        raise grammar_error("tools", tools, f"a list of 1..{MOST_TOOLS} tools")
    bodies, patterns = [], []
    for i, tool in enumerate(tools):
        body, found = _body(calls, tool, f"tools[{i}]")
        bodies.append(f"b{i}: {body}\n")
        patterns += found
    rules = f"body: {' | '.join(f'b{i}' for i in range(len(tools)))}\n{''.join(bodies)}"
    if len(rules) > MOST_BYTES:
        raise grammar_error("tools", f"{len(rules)} bytes", f"at most {MOST_BYTES}")
    if isinstance(spec, CallsOr):
        if not isinstance(spec.answer, JSONSchema | JSONObject):
            raise grammar_error("CallsOr", spec.answer, "JSONSchema or JSONObject")
        answer = _answer(spec.answer)
        start = f"start: calls | answer\ncalls: {_listed(calls)}\nanswer: {_json(answer.schema)}\n"
        return LarkGrammar(start + rules, "tools and schema", _macros([*patterns, *answer.patterns]))
    start = _free(calls) if isinstance(spec, FreeOr) else _bound(calls)
    return LarkGrammar(start + rules, "tools", _macros(patterns))


def _body(calls: ToolCalls, tool: Any, where: str) -> tuple[str, list[str]]:
    """{"name": "...", "arguments": {...}} of one tool; the schema keeps its own root, for its references."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str) or not tool["name"]:
        raise grammar_error(where, tool, 'an object with a "name"')
    parameters = tool.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise grammar_error(f"{where}.parameters", parameters, "a JSON Schema of an object")
    inner = check_schema({"type": "object", **parameters}, f"{where}.parameters")
    name, arguments, called = (json.dumps(x) for x in (calls.name, calls.arguments, tool["name"]))
    head = f"\\{{{_quoted(name)}: ?{_quoted(called)}, ?{_quoted(arguments)}: ?"
    return f'/{head}/ {_json(inner.schema)} "}}"', inner.patterns


def _quoted(text: str) -> str:
    """A text escaped for a regular expression between slashes."""
    return re.sub(r"[^\w\s\"<>'=:;,@#%&!~`-]", lambda found: "\\" + found.group(), text)


def _bound(calls: ToolCalls) -> str:
    listed = _listed(calls)
    return f"start: {listed}\n" if _counts(calls)[0] else f"start: ({listed})?\n"


def _listed(calls: ToolCalls) -> str:
    """One call or more."""
    return f"{_mark(calls.open, 'open')} body {_mark(calls.close, 'close')} {_again(calls)}"


def _again(calls: ToolCalls) -> str:
    """The calls behind the first one."""
    least, most = _counts(calls)
    if most == 1:
        return ""
    one = f"{_mark(calls.separator, 'separator')} {_mark(calls.open, 'open')} body {_mark(calls.close, 'close')}"
    return f"({one}){{{max(least, 1) - 1},{most - 1}}}"


def _free(calls: ToolCalls) -> str:
    """Free text up to what opens a call; where that is a text, it cannot be part of the free text.

    A text without calls is not blank: a reply of spaces alone would be no answer.
    """
    parts = _parts(calls.open, "open")
    text = "TEXT: /(?s:\\s*\\S.*)/\n"
    if isinstance(parts[0], int):
        return f"start: TEXT ({_listed(calls)})? | SPACE? {_listed(calls)}\n{text}SPACE: /\\s+/\n"
    rest = "".join(f" {_one(part)}" for part in parts[1:])
    close = _mark(calls.close, "close")
    head = f"head[lazy]: /(?s:.*)/ {_text(parts[0])}\n"
    return f"start: TEXT | head{rest} body {close} {_again(calls)}\n{head}{text}"


def _counts(calls: ToolCalls) -> tuple[int, int]:
    most = MOST_CALLS if calls.at_most is None else calls.at_most
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= MOST_CALLS:
        raise grammar_error("at_most", calls.at_most, f"1..{MOST_CALLS}, or None")
    if (
        isinstance(calls.at_least, bool)
        or not isinstance(calls.at_least, int)
        or not 0 <= calls.at_least <= most
    ):
        raise grammar_error("at_least", calls.at_least, f"0..{most}")
    return calls.at_least, most


def _parts(mark: Mark, name: str) -> list[int | str]:
    parts = [mark] if isinstance(mark, int | str) else list(mark)
    if not all(isinstance(part, int | str) and not isinstance(part, bool) for part in parts):
        raise grammar_error(name, mark, "a special token's id, a text, or a list of these")
    found = [part for part in parts if part != ""]
    if not found and name != "separator":
        raise grammar_error(name, mark, "at least one token or character")
    return found


def _mark(mark: Mark, name: str) -> str:
    return " ".join(map(_one, _parts(mark, name)))


def _one(part: int | str) -> str:
    return special_name(part) if isinstance(part, int) else _text(part)


def llguidance() -> Any:
    """Imports llguidance at first use.

    Raises:
        GrammarError: It is not installed; says what to install.
    """
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise GrammarError(
            "schema needs the package llguidance: install mercury-jax with its extra `serve`"
        ) from None


MOST_SAMPLE = 4_096  # characters of a sample of a regular expression


class _TooLong(Exception):
    pass


def shortest_match(pattern: str) -> str | None:
    """Guesses a short text that a regular expression matches; the caller must verify it.

    Args:
        pattern: A regular expression, read by Python's parser.

    Returns:
        The text, or None where the pattern cannot be read so.

    Raises:
        GrammarError: Every such text is longer than MOST_SAMPLE.
    """
    parser: Any = importlib.import_module("re._parser")
    try:
        return _of(parser.parse(pattern))
    except _TooLong:
        raise grammar_error(
            "pattern", pattern, f"what a text of at most {MOST_SAMPLE} characters matches"
        ) from None
    except (ValueError, KeyError, StopIteration, RecursionError, OverflowError, parser.error):
        return None


def _of(parsed: Any) -> str:
    text = ""
    for op, arg in parsed:
        text += _piece(str(op), arg)
        if len(text) > MOST_SAMPLE:
            raise _TooLong
    return text


def _piece(op: str, arg: Any) -> str:
    if op == "LITERAL":
        return chr(arg)
    if op == "ANY":
        return "a"
    if op == "NOT_LITERAL":
        return "b" if arg == ord("a") else "a"
    if op == "IN":
        return _member(arg)
    if op == "BRANCH":
        return min((_of(branch) for branch in arg[1]), key=len)
    if op in ("SUBPATTERN", "ATOMIC_GROUP"):
        return _of(arg[-1] if op == "SUBPATTERN" else arg)
    if op in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        least, _, inner = arg
        one = _of(inner)
        if least * len(one) > MOST_SAMPLE:
            raise _TooLong
        return one * least
    return ""  # an anchor


_CATEGORY = {"CATEGORY_DIGIT": "0", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "a"}
_NONE = {"CATEGORY_NOT_DIGIT": "a", "CATEGORY_NOT_SPACE": "a", "CATEGORY_NOT_WORD": "-"}


def _member(items: Any) -> str:
    """One character of a class."""
    named = [(str(op), arg) for op, arg in items]
    if named[0][0] == "NEGATE":
        return next(c for c in "a0 -_.AzZ9" if not any(_holds(op, arg, c) for op, arg in named[1:]))
    op, arg = named[0]
    if op == "CATEGORY":
        return {**_CATEGORY, **_NONE}[str(arg)]
    return chr(arg[0] if op == "RANGE" else arg)


def _holds(op: str, arg: Any, character: str) -> bool:
    if op == "RANGE":
        return arg[0] <= ord(character) <= arg[1]
    if op == "CATEGORY":
        return character in {"CATEGORY_DIGIT": "09", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "a0_AzZ9"}.get(
            str(arg), ""
        )
    return ord(character) == arg
