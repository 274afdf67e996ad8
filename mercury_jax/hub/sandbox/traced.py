"""Text that knows who wrote it: the template, or the messages.

A chat template writes `<|im_start|>` and means the token; a message that holds the same characters means
the characters. Which is which shows in a mask beside the text: every string literal of the template
comes as a `Traced`, whose characters are all its own, and what a template usually does with strings
(joining, cutting, stripping, replacing) keeps the mask. Whatever does not, gives a plain `str`, of which the
template wrote nothing: a special token may be lost so, never forged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# A conversion such as %s or %5d, or an escaped percent sign.
_PERCENT = re.compile(r"%(?:%|[-+ #0]*\d*(?:\.\d+)?[a-zA-Z])")


class Traced(str):
    """A `str` and its mask: bytes of the same length, 1 where the template wrote the character."""

    mask: bytes

    def __new__(cls, text: str, mask: bytes) -> Traced:
        made = super().__new__(cls, text)
        made.mask = mask
        return made

    def __str__(self) -> Traced:  # so that `str(x)` keeps what it is
        return self

    def __add__(self, other: str) -> Any:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Any:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: Any) -> Traced:
        mask = self.mask[key]
        return Traced(super().__getitem__(key), mask if isinstance(mask, bytes) else bytes([mask]))

    def __mod__(self, values: Any) -> Any:
        """Formatting: what stands around the conversions stays the template's."""
        queue = list(values) if isinstance(values, tuple) else [values]
        parts: list[str] = []
        at = 0
        for found in _PERCENT.finditer(self):
            parts.append(self[at : found.start()])
            at = found.end()
            if found.group() == "%%":
                parts.append(own("%"))
                continue
            if not queue:
                raise TypeError("not enough arguments for format string")
            value = queue.pop(0)
            whole = found.group() == "%s" and isinstance(value, str)
            parts.append(value if whole else str(found.group()) % (value,))
        if queue:
            raise TypeError("not all arguments converted during string formatting")
        return joined([*parts, self[at:]])

    def strip(self, chars: str | None = None) -> Traced:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> Traced:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> Traced:
        return self[: len(super().rstrip(chars))]

    def removeprefix(self, prefix: str, /) -> Traced:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> Traced:
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: int = -1) -> list[Any]:
        if not sep:
            return super().split(sep, maxsplit)
        parts, at = [], 0
        for part in super().split(sep, maxsplit):
            parts.append(self[at : at + len(part)])
            at += len(part) + len(sep)
        return parts

    def replace(self, old: str, new: str, count: int = -1, /) -> Any:
        return joined(self.split(old, count), new) if old else super().replace(old, new, count)

    def join(self, parts: Iterable[str], /) -> Any:
        return joined(parts, self)

    def lower(self) -> Any:
        return self._alike(super().lower())

    def upper(self) -> Any:
        return self._alike(super().upper())

    def title(self) -> Any:
        return self._alike(super().title())

    def capitalize(self) -> Any:
        return self._alike(super().capitalize())

    def _alike(self, text: str) -> str:
        """`text` with our mask, where it has one character for each of ours."""
        return Traced(text, self.mask) if len(text) == len(self) else text


def own(text: str) -> Traced:
    """A text that the template wrote."""
    return Traced(text, b"\1" * len(text))


def mask_of(text: str) -> bytes:
    """Who wrote each character of any `str`."""
    return text.mask if isinstance(text, Traced) else bytes(len(text))


def joined(parts: Iterable[str], between: str = "") -> str:
    """`between.join(parts)`, traced where a part or `between` is."""
    parts = list(parts)
    text = str.join(between, parts)
    if not any(isinstance(part, Traced) for part in (*parts, between)):
        return text
    return Traced(text, mask_of(between).join(map(mask_of, parts)))
