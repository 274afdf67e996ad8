"""The writer of the Messages API: `object_types` has its objects and events, in Anthropic's order."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from mercury_jax.serve.chat.output_parser import OutputDelta, OutputParser
from mercury_jax.serve.dialects.answer_blocks import Block, BlockReader, Step
from mercury_jax.serve.dialects.messages_request import MessagesRequest, ThinkingAdaptive, ThinkingEnabled
from mercury_jax.serve.engine.request import Snapshot
from mercury_jax.serve.errors import ApiError, messages_envelope
from mercury_jax.serve.http import sse_event
from mercury_jax.serve.response_plan import Events, FinishedAnswer, ResponsePlan
from mercury_jax.serve.responses import JsonDict, Usage

# Type and field of the deltas of a block.
DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesWriter:
    """Writes a message and its events. The thinking is a block where the request asks for it."""

    def __init__(self, request: MessagesRequest, request_id: str, plan: ResponsePlan):
        asked = request.thinking
        shown = isinstance(asked, ThinkingEnabled | ThinkingAdaptive)
        self._omitted = shown and asked.display == "omitted"
        self._request_id, self._prompt_tokens = request_id, plan.prompt_tokens
        self._blocks = BlockReader(reasoning=shown)
        head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
        warning = {} if plan.warning is None else {"warning": plan.warning}
        self._head = {**head, "model": request.model, **warning}

    def begin(self, count: int) -> Events:
        """Writes the start of the message, without the tokens that are not known yet."""
        usage = _message_usage({"prompt_tokens": self._prompt_tokens})
        empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message={**self._head, **empty})
        yield _event("ping")

    def update(self, i: int, snapshot: Snapshot, delta: OutputDelta, parser: OutputParser) -> Events:
        """Writes what is new of the blocks."""
        return (event for step in self._blocks.read(delta) for event in self._step(step))

    def finish(self, i: int, answer: FinishedAnswer) -> Events:
        """Writes the end of the last block."""
        return (event for step in self._blocks.finish(answer, empty=False) for event in self._step(step))

    def end(self, answers: Sequence[FinishedAnswer], usage: Usage) -> Events:
        """Writes why the message ends, its usage, and its end."""
        yield _event("message_delta", delta=_stop(answers[0]), usage=_message_usage(usage))
        yield _event("message_stop")

    def fail(self, error: ApiError) -> Events:
        """Writes the error."""
        yield sse_event(messages_envelope(error, self._request_id), "error")

    def body(self, answers: Sequence[FinishedAnswer], usage: Usage) -> JsonDict:
        """Returns the message, without malformed calls."""
        blocks = [b for b in self._blocks.blocks if b.kind != "call" or b.arguments is not None]
        content = [self._block(block, block.text) for block in blocks]
        return {**self._head, "content": content, **_stop(answers[0]), "usage": _message_usage(usage)}

    def _step(self, step: Step) -> Events:
        block = step.block
        match step.action:
            case "open":
                yield _event("content_block_start", index=block.index, content_block=self._block(block, ""))
            case "add" if block.kind != "reasoning" or not self._omitted:
                name, field = DELTAS[block.kind]
                yield self._delta(block, {"type": name, field: step.text})
            case "close":
                if block.kind == "reasoning":
                    yield self._delta(block, {"type": "signature_delta", "signature": _signature(block)})
                yield _event("content_block_stop", index=block.index)

    def _delta(self, block: Block, delta: JsonDict) -> bytes:
        return _event("content_block_delta", index=block.index, delta=delta)

    def _block(self, block: Block, text: str) -> JsonDict:
        """A content block with this text; of a call, with its arguments where the text is all of it."""
        match block.kind:
            case "text":
                return {"type": "text", "text": text}
            case "reasoning":
                shown = "" if self._omitted else text
                return {"type": "thinking", "thinking": shown, "signature": _signature(block)}
            case "call":
                arguments = block.arguments if text else {}
                return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def _signature(block: Block) -> str:
    return hashlib.sha256(block.text.encode()).hexdigest() if block.text else ""


def _event(kind: str, **fields: Any) -> bytes:
    return sse_event({"type": kind, **fields}, kind)


def _stop(answer: FinishedAnswer) -> JsonDict:
    """Why an answer ended, and the stop sequence where it was one."""
    sequence = answer.message.stop_sequence if answer.finish_reason == "stop" else None
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    reason = "stop_sequence" if sequence is not None else reasons.get(answer.finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": sequence}


def _message_usage(usage: Mapping[str, Any]) -> JsonDict:
    """The usage; what is missing is not known yet.

    The whole prompt counts as input. The prefix cache, which needs no `cache_control`, is reported in a field of its
    own, since clients add the fields of the vendor's cache to the input.
    """
    return {
        "input_tokens": usage["prompt_tokens"],
        "cached_input_tokens": usage.get("cached_input_tokens", 0),
        **dict.fromkeys(("cache_creation_input_tokens", "cache_read_input_tokens"), 0),
        "output_tokens": usage.get("completion_tokens", 0),
        "output_tokens_details": {"thinking_tokens": usage.get("reasoning_tokens", 0)},
    }
