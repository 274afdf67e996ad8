"""Chat templates of checkpoints: renders messages to text.

`ChatTemplate` renders a jinja2 template like transformers' `apply_chat_template`
(https://huggingface.co/docs/transformers/chat_templating), in the sandbox of `template_sandbox.py`. The result is a
`TracedText`, which records which characters the template wrote; `tokenizer.HFTokenizer` encodes it. Any failure of a
template becomes a ValueError with an explanation. This module needs jinja2, so the tokenizer imports it only when it
renders for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any, TypeVar

from mercury_jax.chat import check_message
from mercury_jax.config import refuse
from mercury_jax.hub.template_sandbox import Sandbox, TracedText, joined, own
from mercury_jax.tokenizer import Messages, valid

T = TypeVar("T")

MAX_DEPTH = 48  # nesting depth of the data that a template receives
# Keys under which a message may have its thinking.
THINKING_KEYS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, kw_only=True)
class RenderLimits:
    """Limits of the size of a template, and of the resources of one rendering.

    Attributes:
        source: Characters of the template; the longest known templates have 20,000.
        data: Characters and items of the messages.
        output: Characters of the rendered text.
        units: Characters of all values that the template makes, and 64 for each value and iteration of a loop.
        seconds: Wall-clock time.
    """

    source: int = 100_000
    data: int = 8_000_000
    output: int = 16_000_000
    units: int = 128_000_000
    seconds: float = 5.0


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template.

    Attributes:
        source: The jinja2 template.
        limits: Limits of a rendering.
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
    def _code(self) -> CodeType:
        return _explained(lambda: Sandbox().compile(self.source))

    def render(
        self, messages: Messages, names: Mapping[str, str] | None = None, **variables: Any
    ) -> TracedText:
        """Renders a conversation.

        Args:
            names: Texts of special tokens by name (`bos_token`), as variables of the template. They are marked as the
                template's text.
            **variables: Other variables of the template, JSON-like data (`tools`, `add_generation_prompt`).
        """
        if isinstance(messages, str | Mapping) or not messages:
            raise ValueError(f"messages: {messages!r}; must be a list of at least one message")
        for i, message in enumerate(messages):
            check_message(message, f"messages[{i}]")
        copied: dict[str, Any] = _plain({"messages": list(messages), **variables}, self.limits.data)
        for message in copied["messages"]:
            message["role"] = own(message["role"])
            thinking = next((message[k] for k in THINKING_KEYS if message.get(k) is not None), None)
            if thinking is not None:  # as in transformers: templates differ in the key they read
                message |= {"thinking": thinking} | message | {"reasoning_content": thinking}
        copied |= {name: own(value) for name, value in (names or {}).items()}

        def run() -> TracedText:
            sandbox = Sandbox(self.limits.units, self.limits.seconds)
            template = sandbox.template_class.from_code(sandbox, self._code, sandbox.globals)
            text = joined(template.root_render_func(template.new_context(copied)))
            if len(text) > self.limits.output:
                raise ValueError(f"writes more than {self.limits.output} characters")
            valid(text, "its text")
            return text if isinstance(text, TracedText) else TracedText(text, bytes(len(text)))

        return _explained(run)


_EXPLANATIONS = {
    "SecurityError": "reaches beyond its sandbox: ",
    "TemplateSyntaxError": "is not a jinja2 template: ",
    "TemplateAssertionError": "is not a jinja2 template of the allowed kind: ",
    "UndefinedError": "needs what it was not given: ",
    "RecursionError": "calls itself too deeply: ",
    "OverflowError": "computes with huge numbers: ",
    "MemoryError": "needs too much memory: ",
}


def _explained(run: Callable[[], T]) -> T:
    """Returns `run()`; converts any exception, which a template can cause, to a ValueError with an explanation."""
    try:
        return run()
    except Exception as error:
        kind = type(error).__name__
        words = " ".join(str(error).split())[:300] or kind
        if kind == "TemplateError":  # the template's own `raise_exception`
            raise ValueError(f"messages: the chat template refuses them: {words}") from error
        raise ValueError(f"chat_template: {_EXPLANATIONS.get(kind, '')}{words}") from error


def _plain(data: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Copies JSON-like data, so that a template receives no other object."""
    total = 0

    def copy(value: Any, name: str, depth: int) -> Any:
        nonlocal total
        total += 1 + (len(value) if isinstance(value, str) else 0)
        if total > limit:
            raise refuse("messages", f"more than {limit} characters", "fewer, for a chat template")
        if depth > MAX_DEPTH:
            raise refuse(name, "lists within lists", f"at most {MAX_DEPTH} levels")
        if value is None or type(value) in (bool, int, float):
            return value
        if isinstance(value, str):
            return str.__str__(valid(value, name))
        if isinstance(value, Mapping):
            return {copy(k, name, depth + 1): copy(v, f"{name}.{k}", depth + 1) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [copy(v, f"{name}[{i}]", depth + 1) for i, v in enumerate(value)]
        raise refuse(name, type(value).__name__, "plain data, as in JSON")

    return {name: copy(value, name, 0) for name, value in data.items()}
