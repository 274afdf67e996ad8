"""Chat templates of checkpoints: messages -> text -> ids, and the ids of an answer -> thinking and answer.

`ChatTemplate` renders a jinja2 template as transformers' `apply_chat_template` does
(https://huggingface.co/docs/transformers/chat_templating), in the sandbox of `template_sandbox.py`. The text that it
returns knows which characters the template wrote (`special_tokens.TracedText`). `ChatFormat` combines the templates
of a checkpoint with its tokens. Whatever a template does wrong is a ValueError that says what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from mercury_jax import install
from mercury_jax.chat import check_message
from mercury_jax.config import refuse
from mercury_jax.hub.special_tokens import ControlTokens, joined, mask_of, own
from mercury_jax.tokenizer import Messages, Thinking, valid

MAX_DEPTH = 48  # lists within lists in the data that a template is given
THINKING_KEYS = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # names under which a message may have its thinking


@dataclass(frozen=True, kw_only=True)
class RenderLimits:
    """What rendering a template may take.

    Attributes:
        source: Characters of the template; the longest known ones have 20,000.
        data: Characters and items of the messages.
        output: Characters of the rendered text.
        steps: Turns of loops and operations.
        units: Characters, and bytes of lists, that it makes on its way.
        seconds: Time.
    """

    source: int = 100_000
    data: int = 8_000_000
    output: int = 16_000_000
    steps: int = 2_000_000
    units: int = 256_000_000
    seconds: float = 5.0


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template.

    Attributes:
        source: The jinja2 template.
        limits: What rendering it may take.

    Raises:
        ValueError: The source is not a text, too long, not jinja2, or uses statements that are not allowed.
    """

    source: str
    limits: RenderLimits = RenderLimits()

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            raise refuse("chat_template", type(self.source).__name__, "a text")
        if len(self.source) > self.limits.source:
            allowed = f"at most {self.limits.source} characters"
            raise refuse("chat_template", f"{len(self.source)} characters", allowed)
        _ = self._code

    @cached_property
    def _code(self) -> Any:
        environment = _sandbox()()
        return _explained(lambda: environment.compile(self.source))

    def render(self, messages: Messages, names: Mapping[str, str] | None = None, **variables: Any) -> str:
        """Renders a conversation.

        Args:
            messages: The conversation. Roles count as text of the template, all else as text of the user.
            names: Texts of special tokens that the template knows by name (`bos_token`); they count as the template's.
            **variables: What else it may read, plain data (`tools`, `add_generation_prompt`).

        Returns:
            The text, a `TracedText`.

        Raises:
            ValueError: A message is malformed, or the template failed, left its sandbox, or exceeded its limits.
        """
        if isinstance(messages, str | Mapping) or not messages:
            raise ValueError(f"messages: {messages!r}; must be a list of at least one message")
        for i, message in enumerate(messages):
            check_message(message, f"messages[{i}]")
        copy = _PlainData(self.limits.data).copy
        conversation = copy(list(messages), "messages")
        for message in conversation:
            message["role"] = own(message["role"])
            thinking = next((message[k] for k in THINKING_KEYS if message.get(k) is not None), None)
            if thinking is not None:  # as transformers does: templates differ in the name that they read
                message |= {"thinking": thinking} | message | {"reasoning_content": thinking}
        given: dict[str, Any] = {"messages": conversation}
        given |= {name: copy(value, name) for name, value in variables.items()}
        given |= {name: own(value) for name, value in (names or {}).items()}
        return _explained(lambda: self._run(given))

    def _run(self, given: Mapping[str, Any]) -> str:
        limits = self.limits
        sandbox = _sandbox()(limits.steps, limits.units, limits.seconds)
        parts, left = [], limits.output
        for part in sandbox.run(self._code, given):
            parts.append(part)
            left -= len(part)
            if left < 0:
                raise ValueError("writes too much text")
        return valid(joined(parts), "its text")


def _sandbox() -> Callable[..., Any]:
    """The class `Sandbox`; jinja2 is imported when there is a template to compile."""
    try:
        from mercury_jax.hub.template_sandbox import Sandbox
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "jinja2":
            raise
        raise refuse("chat_template", "jinja2 is not installed", install.command("hub")) from error
    return Sandbox


_EXPLANATIONS = {
    "SecurityError": "reaches beyond its sandbox: ",
    "TemplateSyntaxError": "is not a jinja2 template: ",
    "TemplateAssertionError": "is not a jinja2 template of the allowed kind: ",
    "UndefinedError": "needs what it was not given: ",
    "RecursionError": "calls itself too deeply: ",
    "OverflowError": "computes with huge numbers: ",
    "MemoryError": "needs too much memory: ",
}


def _explained(run: Callable[[], Any]) -> Any:
    """Returns `run()`, or raises a ValueError that says what the template did; foreign code may raise anything."""
    try:
        return run()
    except Exception as error:
        kind = type(error).__name__
        words = " ".join(str(error).split())[:300] or kind
        if kind == "TemplateError":  # the template's own `raise_exception`
            raise ValueError(f"messages: the chat template refuses them: {words}") from error
        raise ValueError(f"chat_template: {_EXPLANATIONS.get(kind, '')}{words}") from error


class _PlainData:
    """Copies data for a template and counts its size; nothing but these copies reaches a template."""

    def __init__(self, limit: int):
        self.limit, self.total = limit, 0

    def copy(self, value: Any, name: str, depth: int = 0) -> Any:
        """Returns a copy of JSON-like data; ValueError names the part that is something else, too large or too deep."""
        self.total += 1 + (len(value) if isinstance(value, str) else 0)
        if self.total > self.limit:
            raise refuse("messages", f"more than {self.limit} characters", "fewer, for a chat template")
        if depth > MAX_DEPTH:
            raise refuse(name, "lists within lists", f"at most {MAX_DEPTH} levels")
        if value is None or type(value) in (bool, int, float):
            return value
        if isinstance(value, str):
            return str.__str__(valid(value, name))
        if isinstance(value, Mapping):
            inner = lambda k: f"{name}.{k}"
            return {
                self.copy(k, name, depth + 1): self.copy(v, inner(k), depth + 1) for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.copy(v, f"{name}[{i}]", depth + 1) for i, v in enumerate(value)]
        raise refuse(name, type(value).__name__, "plain data, as in JSON")


# --- conversations of a checkpoint

# What opens thinking and what is written behind that; what closes it and what is written behind that.
THINKING = (
    ("<think>", "\n", "</think>", "\n\n"),  # Qwen3, SDAR, LLaDA2, DeepSeek
    ("<|channel>", "thought\n", "<channel|>", ""),  # Gemma 4, DiffusionGemma
    ("<seed:think>", "\n", "</seed:think>", "\n"),
    ("[THINK]", "", "[/THINK]", ""),
    ("<|think|>", "", "<|end_think|>", ""),  # ours, by `tokenizer_files.own_files`
)


class _ThinkingMarks(NamedTuple):
    opening: tuple[int, ...]  # the opening token and the ids of `lead`
    close: int
    lead: str  # text behind the opening token
    tail: str  # text behind the closing token


class ChatFormat:
    """The chat templates of a checkpoint over its tokens.

    Args:
        templates: Sources by name.
        named: Texts of special tokens by the names under which templates know them.
        tokens: The tokenizer.
        ends: Ids that end an answer; the first is the end of text.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        named: Mapping[str, str],
        tokens: ControlTokens,
        ends: tuple[int, ...],
    ):
        self.templates, self.named, self.tokens, self.ends = templates, named, tokens, ends
        self._compiled: dict[str, ChatTemplate] = {}

    @cached_property
    def _marks(self) -> _ThinkingMarks | None:
        ids, encode = self.tokens.control, self.tokens.encode
        for first, lead, last, tail in THINKING:
            if first in ids and last in ids:
                return _ThinkingMarks((ids[first], *encode(lead)), ids[last], lead, tail)
        return None

    @property
    def thinking(self) -> Thinking | None:
        """Tokens around thinking; None if the vocabulary has none."""
        return None if self._marks is None else Thinking(self._marks.opening, self._marks.close)

    @cached_property
    def end_turn(self) -> int:
        """Id that the template writes behind an answer; the end of text if there is no template."""
        try:
            behind = self._encoded(self._text_behind_answer([], None, False), [])
        except ValueError:  # no template, or one that does not allow for it
            return self.ends[0]
        control = set(self.tokens.control.values())
        return next((i for i in behind if i in control), self.ends[0])

    def render(
        self, messages: Messages, thinking: bool, add_generation_prompt: bool, tools: Messages | None = None,
        at_once: bool = False,
    ) -> list[int]:  # fmt: skip
        """Encodes a conversation; arguments as of `HFTokenizer.render`."""
        thinks = True if thinking else False if at_once else None
        ids = self._encoded(self._text(messages, thinks, add_generation_prompt, tools), [messages, tools])
        if not add_generation_prompt or thinks is None:
            return ids
        if thinks:
            return self._with_thinking_open(ids)
        # Without thinking: close what the template may have opened, with nothing in it.
        marks = self._marks
        at = len(ids) if marks is None else self._thinking_start(ids, marks)
        if marks is None or at == len(ids):
            return ids
        encode, line = self.tokens.encode, "\n" if marks.tail else ""
        return [*ids[:at], marks.opening[0], *encode(marks.lead + line), marks.close, *encode(marks.tail)]

    def follow(self, messages: Messages, thinking: bool) -> list[int]:
        """Encodes the end of an answer's turn and the messages behind it, open for the next answer."""
        ids = self._encoded(self._text_behind_answer(messages, thinking or None, True), messages)
        return self._with_thinking_open(ids) if thinking else ids

    def example(self, prompt: str, answer: str, thinking: str | None) -> tuple[list[int], list[int]]:
        """Encodes a training example as (prompt ids, response ids)."""
        asked, encode = self.render([{"role": "user", "content": prompt}], False, True), self.tokens.encode
        end = self.end_turn if self.end_turn in self.ends else self.ends[0]
        if thinking is None:
            return asked, [*encode(answer), end]
        marks = self._required_marks()
        # Thinking that starts on a line of its own also ends on one.
        inside = encode(marks.lead + thinking + ("\n" if marks.lead else ""))
        return asked, [marks.opening[0], *inside, marks.close, *encode(marks.tail + answer), end]

    def split(self, ids: Iterable[int], decode: Callable[[list[int]], str]) -> tuple[str | None, str]:
        """Splits sampled ids, up to the first that ends the answer, into (thinking or None, answer)."""
        shown: list[int] = []
        for i in map(int, ids):
            if i in self.ends or i == self.end_turn:
                break
            shown.append(i)
        marks = self._marks
        if marks is None or not {marks.opening[0], marks.close} & set(shown):
            return None, decode(shown)
        close = shown.index(marks.close) if marks.close in shown else len(shown)
        thinking = decode([i for i in shown[:close] if i != marks.opening[0]])
        return thinking.removeprefix(marks.lead).strip("\n"), decode(shown[close + 1 :]).lstrip("\n")

    def _required_marks(self) -> _ThinkingMarks:
        if self._marks is None:
            known = ", ".join(f"{first} {last}" for first, _, last, _ in THINKING)
            allowed = f"none: this checkpoint's tokenizer has no tokens for it ({known})"
            raise refuse("thinking", True, allowed)
        return self._marks

    def _with_thinking_open(self, ids: list[int]) -> list[int]:
        marks = self._required_marks()
        return [*ids[: self._thinking_start(ids, marks)], *marks.opening]

    def _thinking_start(self, ids: list[int], marks: _ThinkingMarks) -> int:
        """Where thinking is opened: at the end of the prompt if the template did so, else behind the prompt."""
        last = {i: at for at, i in enumerate(ids) if i in (marks.opening[0], marks.close)}
        at = last.get(marks.opening[0], -1)
        opened = at > last.get(marks.close, -1) and at >= len(ids) - len(marks.opening)
        return at if opened else len(ids)

    def _text(
        self, messages: Messages, thinking: bool | None, prompt: bool, tools: Messages | None = None
    ) -> str:
        """Renders the text; `thinking` is passed to the template, None: the template decides."""
        if thinking:
            self._required_marks()
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            has = f"; it has {', '.join(self.templates)}" if self.templates else ""
            raise refuse("messages", "a conversation", f"a text: this checkpoint has no chat template{has}")
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self.templates[name])
        more = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        return self._compiled[name].render(
            messages, self.named, tools=tools, documents=None, add_generation_prompt=prompt, **more
        )

    def _text_behind_answer(self, messages: Messages, thinking: bool | None, prompt: bool) -> str:
        """What the template writes behind an answer; a placeholder answer shows where that starts."""
        held = list(_strings(list(messages)))
        placeholders = (f"Answer{n}here" for n in range(len(held) + 1))
        answer = next(p for p in placeholders if not any(p in text for text in held))
        before = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": answer}]
        text = self._text([*before, *messages], thinking, prompt)
        if text.count(answer) != 1:
            allowed = "a whole conversation: this chat template cannot continue one behind an answer"
            raise refuse("messages", f"{len(messages)} messages", allowed)
        return text[text.index(answer) + len(answer) :]

    def _encoded(self, text: str, given: Any) -> list[int]:
        """Encodes a rendered text.

        A control token that is neither the template's own nor part of a given text was put together by the template in
        a way that `TracedText` does not follow. It is refused, because encoding it as characters would be wrong.
        """
        if 0 in mask_of(text):
            held = list(_strings(given))
            for token in self.tokens.foreign(text):
                if not any(token in x for x in held):
                    raise ValueError(f"chat_template: puts {token!r} together in a way that is not supported")
        return self.tokens.encode_traced(text)


def _strings(value: Any) -> Iterator[str]:
    """Yields every text in plain data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            yield from _strings(key)
            yield from _strings(inside)
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from _strings(inside)
