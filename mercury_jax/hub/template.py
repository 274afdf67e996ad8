"""Chat templates of checkpoints: messages -> text, and who wrote which of its characters.

A template is a program by a stranger, in jinja2, which transformers' `apply_chat_template` runs; its
functions and settings are the same here (https://huggingface.co/docs/transformers/chat_templating), its
reach is not: see `sandbox/`. Whatever it does wrong is a ValueError in words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mercury_jax import install
from mercury_jax.chat import ROLES
from mercury_jax.config import refuse
from mercury_jax.hub.sandbox import meter as meters
from mercury_jax.hub.sandbox.traced import joined, own
from mercury_jax.tokenizer import valid

MOST_DEPTH = 48  # of the data that a template is given
THOUGHT = ("reasoning_content", "thinking", "reasoning")  # names under which a message has its thinking


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a template may cost. units: characters that it makes on its way, and bytes of lists."""

    source: int = 100_000  # characters; the longest known templates have 20,000
    data: int = 8_000_000  # characters and items of the messages
    output: int = 16_000_000  # characters
    steps: int = 2_000_000
    units: int = 256_000_000
    seconds: float = 5.0


@dataclass(frozen=True)
class Template:
    """A chat template. ValueError for one that is no text, too long, or no jinja2 of the allowed kind."""

    source: str
    bounds: Bounds = Bounds()

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            raise refuse("chat_template", type(self.source).__name__, "a text")
        if len(self.source) > self.bounds.source:
            raise refuse(
                "chat_template", f"{len(self.source)} characters", f"at most {self.bounds.source} characters"
            )
        _ = self._compiled

    @cached_property
    def _compiled(self) -> Any:
        environment = _sandbox()
        return _in_words(lambda: environment.from_string(self.source))

    def render(
        self, messages: Sequence[Mapping[str, Any]], names: Mapping[str, str] | None = None, **variables: Any
    ) -> str:
        """The text of a conversation, `Traced`: which characters the template wrote, and which the messages.

        names: texts of special tokens that the template knows by name (`bos_token`); they and the roles
        count as the template's. variables: what else it may look at, plain data (`tools`,
        `add_generation_prompt`). ValueError naming the message that does not fit, or saying what the
        template did: an error of its own, a reach beyond the sandbox, or more time or text than its bounds.
        """
        data = _Data(self.bounds.data)
        given: dict[str, Any] = {"messages": data.messages(messages)}
        given |= {name: data.plain(value, name) for name, value in variables.items()}
        given |= {name: own(value) for name, value in (names or {}).items()}
        return _in_words(lambda: self._run(given, data.weights))

    def _run(self, given: Mapping[str, Any], weights: Mapping[int, int]) -> str:
        most = self.bounds
        meter = meters.Meter(most.steps, most.units, time.monotonic() + most.seconds, weights)
        token = meters.METER.set(meter)
        try:
            parts, length = [], 0
            for part in self._compiled.root_render_func(self._compiled.new_context(given)):
                parts.append(part)
                length += len(part)
                if length > most.output:
                    raise meters.Spent("writes too much text")
            return valid(joined(parts), "its text")
        finally:
            meters.METER.reset(token)


def _sandbox() -> Any:
    try:
        from mercury_jax.hub.sandbox.environment import Sandbox
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "jinja2":
            raise
        raise refuse("chat_template", "jinja2 is not installed", install.command("hub")) from error
    return Sandbox()


_WORDS = {
    "SecurityError": "reaches beyond its sandbox: ",
    "TemplateSyntaxError": "is no jinja2 template: ",
    "TemplateAssertionError": "is no jinja2 template of ours: ",
    "UndefinedError": "needs what it was not given: ",
    "RecursionError": "calls itself too deeply: ",
    "OverflowError": "computes with huge numbers: ",
    "MemoryError": "needs too much memory: ",
}


def _in_words(run: Callable[[], Any]) -> Any:
    """`run()`, or a ValueError that says what the template did: it is foreign code, and may raise anything."""
    try:
        return run()
    except Exception as error:
        kind = type(error).__name__
        said = " ".join(str(error).split())[:300] or kind
        if kind == "TemplateError":  # the template's own `raise_exception`
            raise ValueError(f"messages: the chat template refuses them: {said}") from error
        raise ValueError(f"chat_template: {_WORDS.get(kind, '')}{said}") from error


class _Data:
    """Copies of plain data, weighed as they are made; nothing else reaches a template."""

    def __init__(self, most: int):
        self.most, self.total, self.weights = most, 0, dict[int, int]()

    def messages(self, messages: Any) -> list[dict[str, Any]]:
        """A conversation, its roles marked as the template's words. ValueError naming what does not fit."""
        if isinstance(messages, str | Mapping) or not messages:
            raise ValueError(f"messages: {messages!r}; must be a list of at least one message")
        for i, message in enumerate(messages):
            _check(message, f"messages[{i}]")
        made = self.plain(list(messages), "messages")
        for message in made:
            message["role"] = own(message["role"])
            thought = next((message[k] for k in THOUGHT if message.get(k) is not None), None)
            if thought is not None:  # as transformers has it: each template reads another name
                message |= {"thinking": thought} | message | {"reasoning_content": thought}
        return made

    def plain(self, value: Any, name: str, depth: int = 0) -> Any:
        self._count(1 + (len(value) if isinstance(value, str) else 0), name, depth)
        if value is None or type(value) in (bool, int, float):
            return value
        if isinstance(value, str):
            return valid(str.__str__(value), name)
        before = self.total
        if isinstance(value, Mapping):
            made: Any = {
                self.plain(k, name, depth + 1): self.plain(v, f"{name}.{k}", depth + 1)
                for k, v in value.items()
            }
        elif isinstance(value, list | tuple):
            made = [self.plain(v, f"{name}[{i}]", depth + 1) for i, v in enumerate(value)]
        else:
            raise refuse(name, type(value).__name__, "plain data, as in JSON")
        self.weights[id(made)] = self.total - before
        return made

    def _count(self, size: int, name: str, depth: int) -> None:
        self.total += size
        if self.total > self.most:
            raise refuse("messages", f"more than {self.most} characters", "fewer, for a chat template")
        if depth > MOST_DEPTH:
            raise refuse(name, "lists within lists", f"at most {MOST_DEPTH} levels")


def _check(message: Any, name: str) -> None:
    if not isinstance(message, Mapping):
        raise ValueError(f"{name}: {message!r}; must be a mapping with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"{name}.role: {role!r}; must be one of {', '.join(ROLES)}")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"{name}.content: {content!r}; must be a str")


def strings(value: Any) -> Iterator[str]:
    """Every text in plain data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            yield from strings(key)
            yield from strings(inside)
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from strings(inside)
