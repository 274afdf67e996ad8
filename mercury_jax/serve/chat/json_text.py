"""One JSON object (RFC 8259), read character by character: what does not fit is known at once."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

MOST_DEPTH = 100  # less than what `json.loads` recurses into
_SPACE = " \t\n\r"
_CLOSE = {"{": "}", "[": "]"}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = ("true", "false", "null")


class Broken(Exception):
    """What was read cannot become a JSON object, or not the one that was expected."""


class Piece(NamedTuple):
    """A character in its JSON spelling. member: the key of the object to whose value it belongs (None: to none); ends:
    it is the last one of a value that is a text, a list or an object."""

    text: str
    member: str | None
    ends: bool


class Reader:
    """Takes the characters of one object; `done` when it is whole.

    More lenient than the standard in one point: a line end or a tab inside of a text, which models write, is respelt.
    """

    def __init__(self) -> None:
        self._open: list[str] = []  # brackets
        self._want = "object"
        self._word = ""  # a number or a literal so far
        self._hex = 0  # digits that an escape still needs
        self._in_key = False
        self._key = ""  # JSON text of the object's latest key
        self._member: str | None = None

    @property
    def done(self) -> bool:
        return self._want == "nothing"

    def push(self, c: str) -> Piece:
        """One character. Broken where no object goes on like that."""
        if self._want == "word" and c in ",]} \t\n\r":
            self._end_word()
        if self._want == "value" and len(self._open) == 1 and c not in _SPACE:
            self._member = json.loads(self._key)
        text, member = self._take(c), self._member
        ends = member is not None and self._want == "comma" and len(self._open) == 1
        if ends:
            self._member = None
        return Piece(text, member, ends)

    def _take(self, c: str) -> str:
        if self._want in ("text", "escape", "hex"):
            return self._in_text(c)
        if self._want == "word":
            self._word += c
            return c
        if c in _SPACE:
            return c
        if c == '"' and self._want in ("key", "key or }", "value", "value or ]"):
            self._in_key, self._want = self._want.startswith("key"), "text"
            if self._in_key:
                self._key = c
        elif not self._structure(c):
            raise Broken
        return c

    def _structure(self, c: str) -> bool:
        """Whether a character outside of texts fits."""
        want = self._want
        if c in "{[" and (want.startswith("value") or (want == "object" and c == "{")):
            self._open.append(c)
            self._want = "key or }" if c == "{" else "value or ]"
            return len(self._open) <= MOST_DEPTH
        if c in "-0123456789tfn" and want.startswith("value"):
            self._want, self._word = "word", c
        elif c == ":" and want == "colon":
            self._want = "value"
        elif c == "," and want == "comma":
            self._want = "key" if self._open[-1] == "{" else "value"
        elif want in ("comma", "key or }", "value or ]") and c == _CLOSE[self._open[-1]]:
            self._open.pop()
            self._want = "comma" if self._open else "nothing"
        else:
            return False
        return True

    def _in_text(self, c: str) -> str:
        if self._want == "escape":
            if c not in '"\\/bfnrtu':
                raise Broken
            self._want, self._hex = ("hex", 4) if c == "u" else ("text", 0)
        elif self._want == "hex":
            if c not in "0123456789abcdefABCDEF":
                raise Broken
            self._hex -= 1
            self._want = "hex" if self._hex else "text"
        elif c == "\\":
            self._want = "escape"
        elif c == '"':
            self._want = "colon" if self._in_key else "comma"
        elif c < " ":
            c = json.dumps(c)[1:-1]
        if self._in_key and len(self._open) == 1:
            self._key += c
        return c

    def _end_word(self) -> None:
        if self._word not in _WORDS and not _NUMBER.fullmatch(self._word):
            raise Broken
        self._want = "comma"
        if len(self._open) == 1:
            self._member = None
