"""Conversations by a checkpoint's chat template: messages -> ids, and the ids of an answer -> what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from mercury_jax.config import refuse
from mercury_jax.hub.sandbox.traced import mask_of
from mercury_jax.hub.spelling import Spelt
from mercury_jax.hub.template import Template, strings
from mercury_jax.tokenizer import Thinking

# What opens thinking and what is written behind that, what closes it and what is written behind that.
THINKING = (
    ("<think>", "\n", "</think>", "\n\n"),  # Qwen3, SDAR, LLaDA2, DeepSeek
    ("<|channel>", "thought\n", "<channel|>", ""),  # Gemma 4, DiffusionGemma
    ("<seed:think>", "\n", "</seed:think>", "\n"),
    ("[THINK]", "", "[/THINK]", ""),
    ("<|think|>", "", "<|end_think|>", ""),  # ours, by `tokenizer_json.py`
)
Messages = Sequence[Mapping[str, Any]]


class _Marks(NamedTuple):
    opening: tuple[int, ...]
    close: int
    lead: str  # the text of what `opening` has behind its first id
    tail: str


class Conversation:
    """The chat templates of a checkpoint, by name, over its tokens.

    named: texts of special tokens that a template knows by name. ends: ids that end an answer, the first
    of them the end of text.
    """

    def __init__(
        self, templates: Mapping[str, str], named: Mapping[str, str], spelt: Spelt, ends: tuple[int, ...]
    ):
        self.templates, self.named, self.spelt, self.ends = templates, named, spelt, ends
        self._made: dict[str, Template] = {}

    @cached_property
    def _marks(self) -> _Marks | None:
        ids, encode = self.spelt.control, self.spelt.encode
        for first, lead, last, tail in THINKING:
            if first in ids and last in ids:
                return _Marks((ids[first], *encode(lead)), ids[last], lead, tail)
        return None

    @property
    def thinking(self) -> Thinking | None:
        """What opens and what closes thinking; None where the vocabulary has no tokens for it."""
        return None if self._marks is None else Thinking(self._marks.opening, self._marks.close)

    @cached_property
    def end_turn(self) -> int:
        """What the template writes behind an answer; the end of text where there is no template."""
        try:
            behind = self._encoded(self._behind([], None, False), [])
        except ValueError:  # no template, or one that cannot say
            return self.ends[0]
        control = set(self.spelt.control.values())
        return next((i for i in behind if i in control), self.ends[0])

    def render(
        self, messages: Messages, thinking: bool, add_generation_prompt: bool, tools: Messages | None = None,
        at_once: bool = False,
    ) -> list[int]:  # fmt: skip
        thinks = True if thinking else False if at_once else None
        ids = self._encoded(self._text(messages, thinks, add_generation_prompt, tools), [messages, tools])
        if not add_generation_prompt or thinks is None:
            return ids
        return self._opened(ids) if thinks else self._shut(ids)

    def follow(self, messages: Messages, thinking: bool) -> list[int]:
        """The end of an answer's turn, and the messages behind it."""
        ids = self._encoded(self._behind(messages, thinking or None, True), messages)
        return self._opened(ids) if thinking else ids

    def example(self, prompt: str, answer: str, thinking: str | None) -> tuple[list[int], list[int]]:
        asked, encode = self.render([{"role": "user", "content": prompt}], False, True), self.spelt.encode
        end = self.end_turn if self.end_turn in self.ends else self.ends[0]
        if thinking is None:
            return asked, [*encode(answer), end]
        marks = self._needed()
        # As it was opened, so it is closed: on a line of its own, or not.
        thought = encode(marks.lead + thinking + ("\n" if marks.lead else ""))
        return asked, [marks.opening[0], *thought, marks.close, *encode(marks.tail + answer), end]

    def split(self, ids: Iterable[int], decode: Callable[[list[int]], str]) -> tuple[str | None, str]:
        """(thinking or None, answer), up to the first id that ends it."""
        said: list[int] = []
        for i in map(int, ids):
            if i in self.ends or i == self.end_turn:
                break
            said.append(i)
        marks = self._marks
        if marks is None or not {marks.opening[0], marks.close} & set(said):
            return None, decode(said)
        close = said.index(marks.close) if marks.close in said else len(said)
        thought = decode([i for i in said[:close] if i != marks.opening[0]])
        return thought.removeprefix(marks.lead).strip("\n"), decode(said[close + 1 :]).lstrip("\n")

    def _needed(self) -> _Marks:
        if self._marks is None:
            known = ", ".join(f"{first} {last}" for first, _, last, _ in THINKING)
            raise refuse(
                "thinking", True, f"none: this checkpoint's tokenizer has no tokens for it ({known})"
            )
        return self._marks

    def _opened(self, ids: list[int]) -> list[int]:
        """The ids, behind which the model can only think."""
        marks = self._needed()
        return [*ids[: self._opening(ids, marks)], *marks.opening]

    def _shut(self, ids: list[int]) -> list[int]:
        """The ids, behind which the model need not think: a thinking that the template opened holds nothing."""
        marks = self._marks
        at = len(ids) if marks is None else self._opening(ids, marks)
        if marks is None or at == len(ids):
            return ids
        encode, line = self.spelt.encode, "\n" if marks.tail else ""
        return [*ids[:at], marks.opening[0], *encode(marks.lead + line), marks.close, *encode(marks.tail)]

    def _opening(self, ids: list[int], marks: _Marks) -> int:
        """Where thinking is opened: some templates do so themselves, at the end of the prompt; else behind it."""
        last = {i: at for at, i in enumerate(ids) if i in (marks.opening[0], marks.close)}
        at = last.get(marks.opening[0], -1)
        opened = at > last.get(marks.close, -1) and at >= len(ids) - len(marks.opening)
        return at if opened else len(ids)

    def _text(
        self, messages: Messages, thinking: bool | None, prompt: bool, tools: Messages | None = None
    ) -> str:
        """thinking: what the template is told of it (None: nothing)."""
        if thinking:
            self._needed()
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            has = f"; it has {', '.join(self.templates)}" if self.templates else ""
            raise refuse("messages", "a conversation", f"a text: this checkpoint has no chat template{has}")
        if name not in self._made:
            self._made[name] = Template(self.templates[name])
        more = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        return self._made[name].render(
            messages, self.named, tools=tools, documents=None, add_generation_prompt=prompt, **more
        )

    def _behind(self, messages: Messages, thinking: bool | None, prompt: bool) -> str:
        """What the template writes behind an answer: a stand-in for it shows where that begins."""
        held = list(strings(list(messages)))
        answer = next(
            w for w in (f"Answer{n}here" for n in range(len(held) + 1)) if not any(w in x for x in held)
        )
        before = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": answer}]
        text = self._text([*before, *messages], thinking, prompt)
        if text.count(answer) != 1:
            raise refuse("messages", f"{len(messages)} messages", "a whole conversation: this chat template does not "
                         "say how one goes on behind an answer")  # fmt: skip
        return text[text.index(answer) + len(answer) :]

    def _encoded(self, text: str, given: Any) -> list[int]:
        """Ids of a template's text. What looks like control and is neither its own nor in what it was given, it
        has made in a way that `Traced` does not follow: better to refuse than to misread it."""
        if 0 in mask_of(text):
            held = list(strings(given))
            for token in self.spelt.foreign(text):
                if not any(token in x for x in held):
                    raise ValueError(f"chat_template: puts {token!r} together in a way that is not supported")
        return self.spelt.encode_traced(text)
