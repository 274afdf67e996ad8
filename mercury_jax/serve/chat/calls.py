"""One tool call, read character by character: its name as soon as it is sure, its arguments as they grow."""

from __future__ import annotations

import json
import secrets
import string

from mercury_jax.serve.chat.data import NAME
from mercury_jax.serve.chat.gemma import Gemma
from mercury_jax.serve.chat.json_text import Broken, Piece, Reader

ARGUMENTS = ("arguments", "parameters")  # the latter as Llama's models name them
_LETTERS = string.ascii_letters + string.digits


def new_id() -> str:
    """An id that no other call has."""
    return "call_" + "".join(secrets.choice(_LETTERS) for _ in range(24))


class CallReader:
    """Takes what stands between the marks of a call; Broken where that is no call.

    It is `{"name": "f", "arguments": {...}}`, the two in any order; arguments may be the JSON text of an object, or
    missing. gemma: that model's own spelling, which becomes the same on the way. The arguments of a call that is
    `done` are an object to `json.loads`: their last character is held back until they are.
    """

    def __init__(self, gemma: bool = False):
        self.name: str | None = None
        self.arguments: list[str] = []
        self._raw: list[str] = []
        self._json, self._gemma = Reader(), Gemma() if gemma else None
        self._named = ""  # JSON text of the name so far
        self._given = False  # the arguments are whole
        self._sent = 0

    @property
    def done(self) -> bool:
        return self._json.done

    @property
    def raw(self) -> str:
        """All that was read, as it was written."""
        return "".join(self._raw)

    def push(self, c: str) -> None:
        """One character."""
        self._raw.append(c)
        for spelt in self._gemma.push(c) if self._gemma else c:
            self._take(self._json.push(spelt))
        if self.done:
            self._finish()

    def quote(self, text: str) -> None:
        """Gemma's mark around a text, and how that is written."""
        self._raw.append(text)
        for spelt in self._gemma.quote() if self._gemma else text:
            self._take(self._json.push(spelt))

    def new(self) -> str | None:
        """Arguments that were not taken before; None while the call is not sure to have begun."""
        if self.name is None or not (self._given or self._streams):
            return None
        fresh = "".join(self.arguments[self._sent :])
        self._sent = len(self.arguments)
        return fresh

    @property
    def _streams(self) -> bool:
        return bool(self.arguments) and self.arguments[0] == "{"

    def _take(self, piece: Piece) -> None:
        if piece.member == "name" and self.name is None:
            self._name(piece)
        elif piece.member in ARGUMENTS and not self._given:
            self._argument(piece)

    def _name(self, piece: Piece) -> None:
        self._named += piece.text
        if self._named[0] != '"':
            raise Broken
        if piece.ends:
            name = json.loads(self._named)
            if not NAME.fullmatch(name):
                raise Broken
            self.name = name

    def _argument(self, piece: Piece) -> None:
        if not self.arguments and piece.text not in ("{", '"'):
            raise Broken
        if piece.ends:
            text = "".join([*self.arguments, piece.text])
            if text[0] == '"':
                self.arguments = [_object(json.loads(text))]
                self._given = True
                return
            _object(text)
            self._given = True
        self.arguments.append(piece.text)

    def _finish(self) -> None:
        if self.name is None:
            raise Broken
        if not self._given:
            self.arguments, self._given = ["{}"], True


def _object(text: str) -> str:
    """A text that is a JSON object, or nothing at all."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        raise Broken from None
    if not isinstance(found, dict):
        raise Broken
    return text or "{}"
