"""Bodies of answers and of chunks, as the vendor's document has them: pure functions of what was written."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mercury_jax.serve.chat.output_parser import ParsedCall, ParsedCallDelta

Json = dict[str, Any]


class Head(NamedTuple):
    """What all chunks of one answer share."""

    id: str
    created: int
    model: str


class Form(NamedTuple):
    """An endpoint's shapes: names of its objects, the prefix of its ids, and whether it speaks of messages."""

    whole: str
    chunk: str
    prefix: str
    message: bool


CHAT = Form("chat.completion", "chat.completion.chunk", "chatcmpl-", True)
TEXT = Form("text_completion", "text_completion", "cmpl-", False)
EDIT = Form("edit.completion", "edit.completion.chunk", "cmpl-", True)


class Usage(NamedTuple):
    """Tokens of a request; those of thinking are part of the completion's."""

    prompt: int
    completion: int
    reasoning: int
    cached: int

    def json(self) -> Json:
        """Flat, as the vendor has it, and nested, as OpenAI does."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "reasoning_tokens": self.reasoning,
            "cached_input_tokens": self.cached,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


def head(form: Form, model: str) -> Head:
    return Head(form.prefix + secrets.token_hex(12), int(time.time()), model)


def body(form: Form, head: Head, choices: Sequence[Json], usage: Usage, more: Mapping[str, Any]) -> Json:
    """A whole answer; more: `warning`, `reasoning_summary`."""
    return {**_named(form.whole, head), "choices": list(choices), "usage": usage.json(), **more}


def chunk(form: Form, head: Head, choices: Sequence[Json], more: Mapping[str, Any] | None = None) -> Json:
    """One event of a stream."""
    return {**_named(form.chunk, head), "choices": list(choices), **(more or {})}


def usage_chunk(form: Form, head: Head, usage: Usage) -> Json:
    return {**_named(form.chunk, head), "choices": [], "usage": usage.json()}


def _named(kind: str, head: Head) -> Json:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model}


def choice(
    form: Form, index: int, text: str, calls: Sequence[ParsedCall], finish: str, logprobs: Json | None
) -> Json:
    """One whole choice. A message that only calls tools has no content."""
    out: Json = {"index": index, "finish_reason": finish}
    if not form.message:
        out["text"] = text
    else:
        out["message"] = {"role": "assistant", "content": text if text or not calls else None}
        if calls:
            out["message"]["tool_calls"] = [_call(i, call) for i, call in enumerate(calls)]
    return out | ({} if logprobs is None else {"logprobs": logprobs})


def opening(form: Form, index: int) -> Json | None:
    """The first chunk's choice, which tells the role and nothing else; texts have none."""
    return _delta(index, {"role": "assistant"}) if form.message else None


def piece(form: Form, index: int, text: str, calls: Sequence[ParsedCallDelta] = ()) -> Json:
    """What is new of a choice."""
    if not form.message:
        return {"index": index, "text": text, "finish_reason": None}
    delta: Json = {"content": text} if text else {}
    if calls:
        delta["tool_calls"] = [_call_delta(call) for call in calls]
    return _delta(index, delta)


def frame(form: Form, index: int, text: str) -> Json:
    """The whole text as it stands: a client replaces what it had by it, also by nothing."""
    return _delta(index, {"content": text}) if form.message else piece(form, index, text)


def closing(form: Form, index: int, finish: str, logprobs: Json | None) -> Json:
    """The last chunk's choice: why it ended."""
    out = _delta(index, {}, finish) if form.message else {"index": index, "text": "", "finish_reason": finish}
    return out | ({} if logprobs is None else {"logprobs": logprobs})


def _delta(index: int, delta: Json, finish: str | None = None) -> Json:
    return {"index": index, "delta": delta, "finish_reason": finish}


def _call(index: int, call: ParsedCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": index, "id": call.id, "type": "function", "function": function}


def _call_delta(call: ParsedCallDelta) -> Json:
    """The id, the type and the name stand in a call's first delta only."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
