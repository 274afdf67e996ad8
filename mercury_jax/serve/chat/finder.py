"""Texts found in a stream of text, wherever it was cut."""

from __future__ import annotations

from collections.abc import Iterable


class Finder:
    """Finds the first of some texts, one character after the other (Knuth, Morris and Pratt).

    What may be the beginning of one is held back; `flush` gives it up.
    """

    def __init__(self, texts: Iterable[str]):
        self.texts = tuple(dict.fromkeys(text for text in texts if text))
        self._borders = tuple(_borders(text) for text in self.texts)
        self._seen = [0] * len(self.texts)  # characters of each that stand at the end
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None, str]:
        """(text that is none of them, the one that was found, what stands behind it).

        Of several that end at the same character, the longest is found.
        """
        if not self.texts:
            return text, None, ""
        for at, character in enumerate(text):
            found = self._step(character)
            if found is not None:
                whole = self._held + text[: at + 1]
                self._held, self._seen = "", [0] * len(self.texts)
                return whole[: -len(found)], found, text[at + 1 :]
        whole = self._held + text
        free = len(whole) - max(self._seen)
        self._held = whole[free:]
        return whole[:free], None, ""

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held, self._seen = self._held, "", [0] * len(self.texts)
        return held

    def _step(self, character: str) -> str | None:
        found = None
        for i, text in enumerate(self.texts):
            seen = self._seen[i]
            while seen and text[seen] != character:
                seen = self._borders[i][seen - 1]
            seen += text[seen] == character
            self._seen[i] = seen
            if seen == len(text) and (found is None or len(text) > len(found)):
                found = text
        return found


def _borders(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its end."""
    borders, k = [0] * len(text), 0
    for i in range(1, len(text)):
        while k and text[i] != text[k]:
            k = borders[k - 1]
        k += text[i] == text[k]
        borders[i] = k
    return borders
