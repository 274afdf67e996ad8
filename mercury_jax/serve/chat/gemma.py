"""Gemma's spelling of a call, `call:f{key:<|"|>text<|"|>,n:3,on:true}`, respelt as JSON while it is read.

Keys stand bare, texts between marks that are tokens of their own; numbers, literals, lists and objects are as in
JSON. Whatever else stands there goes through, and the JSON reader behind this refuses it.
"""

from __future__ import annotations

import json
import re

from mercury_jax.serve.chat.json_text import Broken

_HEAD = re.compile(r"\s*call:\s*([A-Za-z0-9_.-]{1,64})\s*")
MOST_HEAD = 256  # characters before the arguments
_SPACE = " \t\n\r"


class Gemma:
    """`push` a character, or `quote` for the mark around a text; both return JSON text. Broken for what is no call."""

    def __init__(self) -> None:
        self._head = ""
        self._plain = False  # it is JSON already
        self._open = ""  # brackets
        self._key: str | None = None  # a bare key so far
        self._text = ""  # what ends the text that is being read: the mark ("mark") or a quotation mark
        self._escaped = False

    def push(self, c: str) -> str:
        if self._plain:
            return c
        if not self._open:
            return self._begin(c)
        if self._text:
            return self._in_text(c)
        if self._key is not None:
            return self._in_key(c)
        return self._value(c)

    def quote(self) -> str:
        if self._plain or not self._open or self._text == '"':
            raise Broken
        if self._key is not None:  # a key may be quoted too
            return ""
        self._text = "" if self._text else "mark"
        return '"'

    def _begin(self, c: str) -> str:
        if c != "{":
            self._head += c
            if len(self._head) > MOST_HEAD:
                raise Broken
            return ""
        if not self._head.strip():
            self._plain = True
            return c
        head = _HEAD.fullmatch(self._head)
        if head is None:
            raise Broken
        self._open, self._key = "{", ""
        return f'{{"name": {json.dumps(head.group(1))}, "arguments": {{'

    def _in_text(self, c: str) -> str:
        if self._text == "mark":
            return json.dumps(c, ensure_ascii=False)[1:-1]
        if c == '"' and not self._escaped:
            self._text = ""
        self._escaped = c == "\\" and not self._escaped
        return c

    def _in_key(self, c: str) -> str:
        key = (self._key or "").strip().strip('"')
        if c == ":":
            self._key = None
            return f"{json.dumps(key, ensure_ascii=False)}: "
        if c == "}" and not key:
            self._key = None
            return self._value(c)
        self._key = (self._key or "") + c
        return ""

    def _value(self, c: str) -> str:
        if c == '"':
            self._text = c
        elif c in "{[":
            self._open += c
        elif c in "]}":
            self._open = self._open[:-1]
            if not self._open:
                self._plain = True  # nothing may follow; the reader says so
                return c + "}"
        if c in "{," and self._open.endswith("{"):
            self._key = ""
        return f"{c} " if c == "," else c
