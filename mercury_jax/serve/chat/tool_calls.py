"""Incremental parsing of tool calls, character by character.

A call is a JSON object `{"name": "f", "arguments": {...}}`, or Gemma's `call:f{key:<|"|>text<|"|>}`, which
`GemmaTranslator` converts to JSON. `CallParser` provides the name as soon as it is complete, and the arguments as they
grow; `output_parser` streams both to the client, and shows a malformed call as content.
"""

from __future__ import annotations

import json
import re

from mercury_jax.serve.http import refuse_constant
from mercury_jax.serve.protocol import NAME_PATTERN

ARGUMENT_KEYS = ("arguments", "parameters")  # Llama models write "parameters"
MAX_DEPTH = 100  # nesting limit, below the recursion limit of `json.loads`
MAX_HEAD = 256  # maximum characters before the arguments in Gemma's form
SPACE = " \t\n\r"
_GEMMA_HEAD = re.compile(r"\s*call:\s*([A-Za-z0-9_.-]{1,64})\s*")


class MalformedCall(ValueError):
    """The text is not a tool call."""


class CallParser:
    """Parses the text between the marks of one call.

    Name and arguments may come in either order. The arguments are an object, the JSON text of an object, or missing.
    The last character of the arguments is held back until `json.loads` has accepted them as an object, so a client that
    received all of them can always parse them. Nested values are only scanned for their end while they arrive. Line
    ends and tabs inside strings are not valid JSON, but models write them, so they are escaped.

    Attributes:
        name: Name of the function. None: not known yet.
        arguments: JSON text of the arguments so far, in parts.
        raw: All text so far as the model wrote it, in parts.
        done: Whether the call is complete.
    """

    def __init__(self, gemma: bool = False):
        self.name: str | None = None
        self.arguments: list[str] = []
        self.raw: list[str] = []
        self.done = False
        self._gemma = GemmaTranslator() if gemma else None
        self._complete = False  # whether the arguments are complete
        self._sent = 0  # number of parts of the arguments that `unsent` has returned
        self._depth, self._in_string, self._escaped = 0, False, False
        self._expects = "object"  # then its "first key", "colon", "value", "comma", "key" or "nothing"
        self._key = self._member = ""  # JSON text of the key being read; key of the value being read
        self._value: list[str] = []  # JSON text of the value being read

    def push(self, text: str, quote: bool = False) -> None:
        """Reads the next character."""
        self.raw.append(text)
        if self._gemma is not None:
            text = self._gemma.quote() if quote else self._gemma.push(text)
        try:
            for character in text:
                self._read(character)
        except (ValueError, RecursionError):  # from `json.loads`
            raise MalformedCall from None

    def unsent(self) -> str | None:
        """Returns new text of the arguments; None until both the name and an arguments object are known."""
        if self.name is None or not (self._complete or self.arguments[:1] == ["{"]):
            return None
        new = "".join(self.arguments[self._sent :])
        self._sent = len(self.arguments)
        return new

    def _read(self, c: str) -> None:
        """Reads one character of the JSON object. Only the members of the outermost object are parsed."""
        in_string = self._in_string
        if in_string:
            if c < " " and not self._escaped:
                c = json.dumps(c)[1:-1]
            self._in_string = self._escaped or c != '"'
            self._escaped = c == "\\" and not self._escaped
        elif c == '"':
            self._in_string = True
        elif c in "{[":
            self._depth += 1
        elif c in "]}":
            self._depth -= 1
        if self._depth > MAX_DEPTH or self.done:
            raise MalformedCall
        if self._expects == "value":
            self._read_value(c, in_string)
        elif self._expects in ("key", "first key") and (in_string or self._in_string):
            self._key += c
            self._expects = self._expects if self._in_string else "colon"
        elif c not in SPACE:
            if (
                c
                not in {"object": "{", "first key": "}", "key": "", "colon": ":", "comma": ",}"}[
                    self._expects
                ]
            ):
                raise MalformedCall
            self._expects = {"{": "first key", ":": "value", ",": "key", "}": "nothing"}[c]
            if c == ":":
                self._member, self._key = json.loads(self._key), ""
        if self._depth == 0 and self._expects != "object":
            if self.name is None:
                raise MalformedCall
            if not self._complete:
                self.arguments, self._complete = ["{}"], True
            self.done = True

    def _read_value(self, c: str, in_string: bool) -> None:
        """Reads one character of a member's value; parses the value at its end."""
        is_arguments = self._member in ARGUMENT_KEYS and not self._complete
        # the character after a number or literal, which has no end of its own
        behind = not in_string and (self._depth == 0 or (self._depth == 1 and c == ","))
        ends = behind or (self._depth == 1 and not self._in_string and (in_string or c in "]}"))
        if not behind and (self._value or c not in SPACE):
            self._value.append(c)
            if is_arguments and self._value[0] not in '{"':
                raise MalformedCall
            if is_arguments and not ends:
                self.arguments.append(c)
        if not ends:
            return
        self._expects = "key" if behind else "comma"
        text, self._value = "".join(self._value), []
        value = json.loads(text, parse_constant=refuse_constant)
        if self._member == "name" and self.name is None:
            if not isinstance(value, str) or not re.fullmatch(NAME_PATTERN, value):
                raise MalformedCall
            self.name = value
        elif is_arguments:
            if isinstance(value, str):  # the JSON text of an object; empty for no arguments
                text, self.arguments = value or "{}", []
                value = json.loads(text, parse_constant=refuse_constant)
            if not isinstance(value, dict):
                raise MalformedCall
            self.arguments.append(text[-1] if self.arguments else text)
            self._complete = True


class GemmaTranslator:
    """Translates Gemma's form of a call, `call:f{key:<|"|>text<|"|>,n:3}`, to JSON, `{"name": "f", "arguments": ...}`.

    Keys have no quotes, and strings are enclosed in a special token. Numbers, literals, lists and objects are as in
    JSON. All other text is passed through: `CallParser` refuses it, or accepts it if the call is already JSON.
    """

    def __init__(self) -> None:
        self._head = ""
        self._verbatim = False  # whether the rest is passed through
        self._brackets = ""  # the open brackets
        self._key: str | None = None  # a bare key so far
        self._string = ""  # end of the string being read: the special token ("mark") or a quotation mark
        self._escaped = False

    def push(self, c: str) -> str:
        """Translates one character."""
        if self._verbatim:
            return c
        if not self._brackets and c != "{":
            self._head += c
            if len(self._head) > MAX_HEAD:
                raise MalformedCall
            return ""
        if not self._brackets:
            if not self._head.strip():
                self._verbatim = True
                return c
            head = _GEMMA_HEAD.fullmatch(self._head)
            if head is None:
                raise MalformedCall
            self._brackets, self._key = "{", ""
            return f'{{"name": {json.dumps(head.group(1))}, "arguments": {{'
        if self._string == "mark":
            return json.dumps(c, ensure_ascii=False)[1:-1]
        if self._string:
            if c == '"' and not self._escaped:
                self._string = ""
            self._escaped = c == "\\" and not self._escaped
            return c
        if self._key is not None:
            key = self._key.strip().strip('"')
            if c == ":":
                self._key = None
                return f"{json.dumps(key, ensure_ascii=False)}: "
            if c != "}" or key:
                self._key += c
                return ""
            self._key = None  # the object is empty
        if c == '"':
            self._string = c
        elif c in "{[":
            self._brackets += c
        elif c in "]}":
            self._brackets = self._brackets[:-1]
            if not self._brackets:
                self._verbatim = True  # nothing may follow, and the parser refuses it
                return c + "}"
        if c in "{," and self._brackets.endswith("{"):
            self._key = ""
        return f"{c} " if c == "," else c

    def quote(self) -> str:
        """Translates the special token on either side of a string."""
        if self._verbatim or not self._brackets or self._string == '"':
            raise MalformedCall
        if self._key is not None:  # keys may be quoted too
            return ""
        self._string = "" if self._string else "mark"
        return '"'
