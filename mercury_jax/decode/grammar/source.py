"""From a spec to the text of a grammar that llguidance compiles."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mercury_jax.decode.grammar.library import library
from mercury_jax.decode.grammar.sample import sample
from mercury_jax.decode.grammar.schema import MOST_BYTES, MOST_PATTERN, Checked, checked
from mercury_jax.decode.grammar.spec import (
    CallsOr,
    Choice,
    FreeOr,
    JSONObject,
    JSONSchema,
    Mark,
    Regex,
    Spec,
    ToolCalls,
    wrong,
)

MOST_OPTIONS = 10_000
MOST_TOOLS = 256
MOST_CALLS = 256  # of one answer, where `at_most` is not given

# At most one space where JSON allows any; no \uXXXX, by which a second key could be spelt like a first one.
_LAYOUT = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}


class Source(NamedTuple):
    """A grammar as text, what it is called in errors, and what a search for its end may try."""

    lark: str
    name: str
    macros: tuple[bytes, ...]


def source_of(spec: Spec) -> Source:
    """The grammar of a spec. Raises GrammarError for what is out of bounds or no spec."""
    if isinstance(spec, JSONSchema | JSONObject):
        answer = _answer(spec)
        return Source(f"start: {_json(answer.schema)}\n", "schema", _macros(answer.patterns))
    if isinstance(spec, Regex):
        return _regex(spec)
    if isinstance(spec, Choice):
        return _choice(spec)
    if isinstance(spec, ToolCalls | FreeOr | CallsOr):
        return _calls(spec)
    raise wrong("schema", spec, "a JSON Schema or a spec of mercury_jax.grammar")


def _answer(spec: JSONSchema | JSONObject) -> Checked:
    return checked(spec.schema if isinstance(spec, JSONSchema) else {"type": "object"})


def special(id: int) -> str:
    """The name of a special token in a grammar."""
    return f"<|{id}|>"


def _json(schema: dict[str, Any] | bool) -> str:
    whole = {"allOf": [schema]} if isinstance(schema, bool) else schema
    return f"%json {json.dumps({**whole, 'x-guidance': _LAYOUT})}"


def _macros(patterns: Sequence[str]) -> tuple[bytes, ...]:
    """Texts of the patterns and their ends, as they stand inside of a JSON text."""
    texts = [text for text in map(sample, dict.fromkeys(patterns)) if text]
    ends = [text[i:] for text in texts[:32] for i in range(min(len(text), 32))]
    return tuple(json.dumps(end, ensure_ascii=False)[1:-1].encode() for end in dict.fromkeys(ends))


def _regex(spec: Regex) -> Source:
    if not isinstance(spec.pattern, str) or not 0 < len(spec.pattern) <= MOST_PATTERN:
        raise wrong("pattern", spec.pattern, f"a regular expression of 1..{MOST_PATTERN} characters")
    text = sample(spec.pattern) or ""
    ends = tuple(text[i:].encode() for i in range(min(len(text), 64)))
    # As JSON Schema reads them: \d and \w are ASCII.
    pattern = library().regex_to_lark(spec.pattern, "dw")
    return Source(f"start: /{_slashed(pattern)}/\n", "pattern", ends)


def _slashed(pattern: str) -> str:
    """The pattern between slashes: its own escaped, line ends spelt out."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n")


def _choice(spec: Choice) -> Source:
    options = spec.options
    if isinstance(options, str) or not isinstance(options, Sequence) or not 0 < len(options) <= MOST_OPTIONS:
        raise wrong("options", options, f"a list of 1..{MOST_OPTIONS} texts")
    for i, option in enumerate(options):
        if not isinstance(option, str) or not option:
            raise wrong(f"options[{i}]", option, "a text of at least one character")
    lark = "start: " + " | ".join(map(_text, dict.fromkeys(options))) + "\n"
    if len(lark) > MOST_BYTES:
        raise wrong("options", f"{len(lark)} bytes", f"at most {MOST_BYTES}")
    return Source(lark, "options", ())


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _calls(spec: ToolCalls | FreeOr | CallsOr) -> Source:
    calls = spec if isinstance(spec, ToolCalls) else spec.calls
    if not isinstance(calls, ToolCalls):
        raise wrong(type(spec).__name__, calls, "ToolCalls")
    tools = calls.tools
    if isinstance(tools, str) or not isinstance(tools, Sequence) or not 0 < len(tools) <= MOST_TOOLS:
        raise wrong("tools", tools, f"a list of 1..{MOST_TOOLS} tools")
    bodies, patterns = [], []
    for i, tool in enumerate(tools):
        body, found = _body(calls, tool, f"tools[{i}]")
        bodies.append(f"b{i}: {body}\n")
        patterns += found
    rules = f"body: {' | '.join(f'b{i}' for i in range(len(tools)))}\n{''.join(bodies)}"
    if len(rules) > MOST_BYTES:
        raise wrong("tools", f"{len(rules)} bytes", f"at most {MOST_BYTES}")
    if isinstance(spec, CallsOr):
        if not isinstance(spec.answer, JSONSchema | JSONObject):
            raise wrong("CallsOr", spec.answer, "JSONSchema or JSONObject")
        answer = _answer(spec.answer)
        start = f"start: calls | answer\ncalls: {_listed(calls)}\nanswer: {_json(answer.schema)}\n"
        return Source(start + rules, "tools and schema", _macros([*patterns, *answer.patterns]))
    start = _free(calls) if isinstance(spec, FreeOr) else _bound(calls)
    return Source(start + rules, "tools", _macros(patterns))


def _body(calls: ToolCalls, tool: Any, where: str) -> tuple[str, list[str]]:
    """{"name": "...", "arguments": {...}} of one tool; the schema keeps its own root, for its references."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str) or not tool["name"]:
        raise wrong(where, tool, 'an object with a "name"')
    parameters = tool.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise wrong(f"{where}.parameters", parameters, "a JSON Schema of an object")
    inner = checked({"type": "object", **parameters}, f"{where}.parameters")
    name, arguments, called = (json.dumps(x) for x in (calls.name, calls.arguments, tool["name"]))
    head = f"\\{{{_quoted(name)}: ?{_quoted(called)}, ?{_quoted(arguments)}: ?"
    return f'/{head}/ {_json(inner.schema)} "}}"', inner.patterns


def _quoted(text: str) -> str:
    """A text as a part of a regular expression between slashes."""
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

    A text without calls shows something: a reply of spaces alone would be no answer.
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
        raise wrong("at_most", calls.at_most, f"1..{MOST_CALLS}, or None")
    if (
        isinstance(calls.at_least, bool)
        or not isinstance(calls.at_least, int)
        or not 0 <= calls.at_least <= most
    ):
        raise wrong("at_least", calls.at_least, f"0..{most}")
    return calls.at_least, most


def _parts(mark: Mark, name: str) -> list[int | str]:
    parts = [mark] if isinstance(mark, int | str) else list(mark)
    if not all(isinstance(part, int | str) and not isinstance(part, bool) for part in parts):
        raise wrong(name, mark, "a special token's id, a text, or a list of these")
    found = [part for part in parts if part != ""]
    if not found and name != "separator":
        raise wrong(name, mark, "at least one token or character")
    return found


def _mark(mark: Mark, name: str) -> str:
    return " ".join(map(_one, _parts(mark, name)))


def _one(part: int | str) -> str:
    return special(part) if isinstance(part, int) else _text(part)
