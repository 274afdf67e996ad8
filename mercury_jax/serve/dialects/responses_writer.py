"""The writer of the Responses API: `object_types` has its objects and events, in OpenAI's order."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from mercury_jax.serve.chat.output_parser import OutputDelta, OutputParser
from mercury_jax.serve.dialects.answer_blocks import Block, BlockReader, Step
from mercury_jax.serve.dialects.responses_request import ResponsesRequest
from mercury_jax.serve.engine.request import Snapshot
from mercury_jax.serve.errors import ApiError
from mercury_jax.serve.http import sse_event
from mercury_jax.serve.response_plan import Events, FinishedAnswer, ResponsePlan
from mercury_jax.serve.responses import JsonDict, TokenLogprobs, Usage

# Names of the events of a block's part and of its text, and the fields of both.
EVENTS: dict[str, tuple[str | None, str, JsonDict]] = {
    "text": ("content_part", "output_text", {"content_index": 0}),
    "reasoning": ("reasoning_summary_part", "reasoning_summary_text", {"summary_index": 0}),
    "call": (None, "function_call_arguments", {}),
}


class ResponsesWriter:
    """Writes a response and its events.

    Args:
        keep: Called with the finished response.
    """

    def __init__(self, request: ResponsesRequest, keep: Callable[[JsonDict], None], plan: ResponsePlan):
        self.request, self._keep = request, keep
        head = {"id": f"resp_{secrets.token_hex(12)}", "object": "response", "created_at": int(time.time())}
        warning = {} if plan.warning is None else {"warning": plan.warning}
        self._head: JsonDict = {**head, "background": False, **request.echoed(), **warning}
        self._blocks = BlockReader(reasoning=True)
        self._numbers = itertools.count()
        self._logprobs: dict[str, list[TokenLogprobs]] = {}  # by block

    def begin(self, count: int) -> Events:
        """Writes that the response was created and is in progress."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))

    def update(self, i: int, snapshot: Snapshot, delta: OutputDelta, parser: OutputParser) -> Events:
        """Writes what is new of the items."""
        return (event for step in self._blocks.read(delta) for event in self._step(step))

    def finish(self, i: int, answer: FinishedAnswer) -> Events:
        """Writes the end of the last item."""
        if answer.logprobs and (texts := [b for b in self._blocks.blocks if b.kind == "text"]):
            self._logprobs[texts[0].id] = answer.logprobs["content"] or []
        return (event for step in self._blocks.finish(answer, empty=True) for event in self._step(step))

    def end(self, answers: Sequence[FinishedAnswer], usage: Usage) -> Events:
        """Writes the complete response."""
        response = self._finished(answers[0], usage)
        self._keep(response)
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ApiError) -> Events:
        """Writes that the response failed."""
        reason = {"code": error.code or "server_error", "message": error.message}
        yield self._event("response.failed", response=self._response("failed", error=reason))

    def body(self, answers: Sequence[FinishedAnswer], usage: Usage) -> JsonDict:
        """Returns the response, without malformed calls."""
        response = self._finished(answers[0], usage)
        malformed = lambda item: item["type"] == "function_call" and item["status"] == "incomplete"
        response["output"] = [item for item in response["output"] if not malformed(item)]
        self._keep(response)
        return response

    def _finished(self, answer: FinishedAnswer, usage: Usage) -> JsonDict:
        counted = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["cached_input_tokens"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"],
        }
        ended: JsonDict = {"completed_at": int(time.time()), "usage": counted}
        if answer.finish_reason == "length":
            return self._response("incomplete", incomplete_details={"reason": "max_output_tokens"}, **ended)
        return self._response("completed", **ended)

    def _response(self, status: str, **fields: Any) -> JsonDict:
        absent = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
        output = [self._item(block) for block in self._blocks.blocks]
        return {**self._head, **absent, "status": status, "output": output, **fields}

    def _step(self, step: Step) -> Events:
        """Writes the events of a block: its item and its part begin, text is added, its part and its item end."""
        block, shown = step.block, step.block.kind != "reasoning" or self.request.summarised
        part, name, index = EVENTS[block.kind]
        at: JsonDict = {"item_id": _item_id(block), "output_index": block.index, **index}
        item = {"output_index": block.index, "item": self._item(block)}
        match step.action:
            case "open":
                yield self._event("response.output_item.added", **item)
                if part is not None and shown:
                    yield self._event(f"response.{part}.added", **at, part=self._part(block, ""))
            case "add" if shown:
                logprobs = {"logprobs": []} if block.kind == "text" else {}
                yield self._event(f"response.{name}.delta", **at, delta=step.text, **logprobs)
            case "close":
                if shown:
                    whole = {"arguments" if block.kind == "call" else "text": block.text}
                    logprobs = {"logprobs": self._logprobs.get(block.id, [])} if block.kind == "text" else {}
                    yield self._event(f"response.{name}.done", **at, **whole, **logprobs)
                if part is not None and shown:
                    yield self._event(f"response.{part}.done", **at, part=self._part(block, block.text))
                yield self._event("response.output_item.done", **item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return sse_event({"type": kind, "sequence_number": next(self._numbers), **fields}, kind)

    def _part(self, block: Block, text: str) -> JsonDict:
        if block.kind == "reasoning":
            return {"type": "summary_text", "text": text}
        logprobs = self._logprobs.get(block.id, []) if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item(self, block: Block) -> JsonDict:
        """A block as an item. What it says is empty until it is complete."""
        begun, id = block.status == "in_progress", _item_id(block)
        if block.kind == "call":
            called = {"call_id": block.call_id, "name": block.name, "arguments": "" if begun else block.text}
            return {"id": id, "type": "function_call", "status": block.status, **called}
        parts = [] if begun else [self._part(block, block.text)]
        if block.kind == "reasoning":
            return {"id": id, "type": "reasoning", "summary": parts if self.request.summarised else []}
        return {"id": id, "type": "message", "role": "assistant", "status": block.status, "content": parts}


def _item_id(block: Block) -> str:
    return {"text": "msg_", "reasoning": "rs_", "call": "fc_"}[block.kind] + block.id
