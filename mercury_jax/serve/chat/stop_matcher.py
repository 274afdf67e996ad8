"""Finds texts in a stream: stop sequences, and the marks of tool calls that are written as text.

`output_parser` pushes the text of one token after the other, so a match may be spread over several pushes.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Finds the first of some texts in a stream, however the stream is cut.

    Text that may be the beginning of a match is held back until the next push or `flush`.

    Args:
        texts: What to look for; empty texts are ignored.
    """

    def __init__(self, texts: Iterable[str]):
        self.texts = tuple(dict.fromkeys(text for text in texts if text))
        self._longest = max(map(len, self.texts), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None, str]:
        """Takes the next text of the stream.

        Returns:
            Text that belongs to no match; the match, or None; what stands behind the match. Of several matches the
            one that ends first counts, of those that end at the same character the longest.
        """
        if not self.texts:
            return text, None, ""
        stream = self._held + text
        starts = [
            (at + len(found), -len(found), found) for found in self.texts if (at := stream.find(found)) >= 0
        ]
        if starts:
            end, _, found = min(starts)
            self._held = ""
            return stream[: end - len(found)], found, stream[end:]
        # The longest end of the stream that is a beginning of some text.
        first = max(0, len(stream) - self._longest + 1)
        cuts = (at for at in range(first, len(stream)) if any(t.startswith(stream[at:]) for t in self.texts))
        cut = next(cuts, len(stream))
        self._held = stream[cut:]
        return stream[:cut], None, ""

    def flush(self) -> str:
        """What was held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held
