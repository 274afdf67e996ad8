"""The text of thinking, without what is always written around it."""

from __future__ import annotations

from mercury_jax.serve.chat.formats import Marks


class Thought:
    """One stretch of thinking. Its lead is left out, and so are line ends at its two ends where the marks trim."""

    def __init__(self, marks: Marks):
        self.marks = marks
        self._head: str | None = ""  # until it is known whether the lead stands there
        self._begun = False
        self._newlines = ""  # at the end, so far

    def push(self, text: str) -> str:
        """What is sure of the thinking."""
        if self._head is not None:
            self._head += text
            lead = self.marks.lead
            if len(self._head) < len(lead) and lead.startswith(self._head):
                return ""
            text, self._head = self._head.removeprefix(lead), None
        return self._trimmed(text)

    def close(self) -> str:
        """The rest, at its end."""
        head, self._head = self._head or "", None
        return self._trimmed(head.removeprefix(self.marks.lead))

    def _trimmed(self, text: str) -> str:
        if not self.marks.trims:
            return text
        text = text if self._begun else text.lstrip("\n")
        self._begun = self._begun or bool(text)
        text = self._newlines + text
        kept = text.rstrip("\n")
        self._newlines = text[len(kept) :]
        return kept
